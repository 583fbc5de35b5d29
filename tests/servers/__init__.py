"""Real servers for tests.

A conftest.py takes what it needs: `from tests.servers import s3_bucket, seaweed, …`. Servers listen on 127.0.0.1 only,
are started once in each test process and are killed when their last user has ended, or with the test process itself.
One module a kind of server; `processes` starts and ends them.
"""

from tests.servers.s3 import (
    ACCESS_KEY,
    SECRET_KEY,
    Bucket,
    ceph,
    ceph_bucket,
    fresh_bucket,
    juicefs_bucket,
    juicefs_gateway,
    moto,
    moto_bucket,
    rclone,
    rclone_bucket,
    rclone_shared_bucket,
    s3_bucket,
    seaweed,
    shared_bucket,
)

__all__ = [
    "ACCESS_KEY",
    "FIXTURES",
    "SECRET_KEY",
    "Bucket",
    "ceph",
    "ceph_bucket",
    "fresh_bucket",
    "juicefs_bucket",
    "juicefs_gateway",
    "moto",
    "moto_bucket",
    "rclone",
    "rclone_bucket",
    "rclone_shared_bucket",
    "s3_bucket",
    "seaweed",
    "shared_bucket",
]

FIXTURES = frozenset(
    {
        "seaweed",
        "ceph",
        "moto",
        "rclone",
        "juicefs_gateway",
        "juicefs_mounts",
        "seaweed_mounts",
        "azurite",
        "fake_gcs",
        "sshd",
    }
)
"""The fixtures that start a server; a test that uses one gets the marker `server`."""
