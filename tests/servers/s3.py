"""Servers that speak S3."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.servers.ceph import start_ceph
from tests.servers.juicefs import juicefs_volume
from tests.servers.processes import Server, program, shared, start

ACCESS_KEY, SECRET_KEY = "test", "testsecret"


@dataclass(frozen=True)
class Bucket:
    """A fresh bucket of a running server."""

    endpoint: str
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    @property
    def environment(self) -> dict[str, str]:
        """What a child process needs in its environment to reach this bucket."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def options(self) -> dict[str, Any]:
        """The same as storage options."""
        return {
            "endpoint_url": self.endpoint,
            "key": ACCESS_KEY,
            "secret": SECRET_KEY,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def behind(self, endpoint: str) -> Bucket:
        """The same bucket, reached through a front."""
        return Bucket(endpoint, self.name)

    def client(self) -> Any:
        """A plain botocore client, for what a test does or looks at beside the code under test."""
        import botocore.session
        from botocore.config import Config

        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
            config=Config(
                s3={"addressing_style": "path"},
                connect_timeout=5,
                read_timeout=20,
                retries={"total_max_attempts": 4},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a SeaweedFS: conditions are atomic on single requests, wrong checksums are refused."""
    with shared("seaweed", lambda: _start_seaweed(tmp_path_factory.mktemp("seaweed"))) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of Ceph's RADOS gateway: conditions are atomic, but If-Match holds only without quotes, losers of a
    race may be told 500, a wrong sha256 is stored and a wrong MD5 refused."""
    with shared("ceph", lambda: start_ceph(tmp_path_factory.mktemp("ceph"), ACCESS_KEY, SECRET_KEY)) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a moto: no store, but what others test with. Looks at conditions, never at checksums."""
    with shared("moto", lambda: _start_moto(tmp_path_factory.mktemp("moto"))) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of `rclone serve s3`: takes every condition and ignores it."""
    with shared("rclone", lambda: _start_rclone(tmp_path_factory.mktemp("rclone"))) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def juicefs_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of `juicefs gateway`, which is MinIO's code before it knew conditions: ignores every one."""
    with shared("juicefs-gateway", lambda: _start_juicefs(tmp_path_factory.mktemp("gateway"))) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def shared_bucket(seaweed: str) -> Bucket:
    """One bucket for many tests, each below a prefix of its own: a fresh one costs SeaweedFS a second."""
    return fresh_bucket(seaweed)


@pytest.fixture
def s3_bucket(seaweed: str) -> Bucket:
    return fresh_bucket(seaweed)


@pytest.fixture(scope="session")
def ceph_bucket(ceph: str) -> Bucket:
    return fresh_bucket(ceph)


@pytest.fixture(scope="session")
def moto_bucket(moto: str) -> Bucket:
    return fresh_bucket(moto)


@pytest.fixture(scope="session")
def juicefs_bucket(juicefs_gateway: str) -> Bucket:
    return fresh_bucket(juicefs_gateway)


@pytest.fixture(scope="session")
def rclone_shared_bucket(rclone: str) -> Bucket:
    return fresh_bucket(rclone)


@pytest.fixture
def rclone_bucket(rclone: str) -> Bucket:
    return fresh_bucket(rclone)


def fresh_bucket(endpoint: str) -> Bucket:
    """A new bucket of the server at `endpoint`."""
    bucket = Bucket(endpoint, f"b-{uuid.uuid4().hex[:12]}")
    client = bucket.client()
    client.create_bucket(Bucket=bucket.name)
    client.close()
    return bucket


# Else every new bucket takes seven volumes.
SEAWEED_ENVIRONMENT = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}


def seaweed_command(weed: str, folder: Path, port: int, bind: str) -> list[str]:
    """SeaweedFS's S3 server, which listens on `bind` and keeps all in `folder`; that holds `seaweed_folder`'s files."""
    return [
        weed,
        *("-logtostderr=true", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", f"-ip.bind={bind}"),
        *("-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-volume.max=10000"),
        *("-master.electionTimeout=1s", f"-master.port={port + 1}", f"-volume.port={port + 2}"),
        *("-filer=true", f"-filer.port={port + 3}", "-s3", f"-s3.port={port}"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}"),
    ]


def seaweed_folder(folder: Path) -> None:
    """Lay down in `folder` what a SeaweedFS needs to start."""
    identity = {"name": "test", "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]}
    actions = ["Admin", "Read", "List", "Tagging", "Write"]
    (folder / "s3.json").write_text(json.dumps({"identities": [{**identity, "actions": actions}]}))
    (folder / "data").mkdir()


def _start_seaweed(folder: Path) -> Server:
    seaweed_folder(folder)

    def command(port: int) -> list[str]:
        return seaweed_command(program("weed"), folder, port, "127.0.0.1")

    # The ports + 10000 are for its own calls.
    return start(command, folder, SEAWEED_ENVIRONMENT, offsets=(0, 1, 2, 3))


def _start_rclone(folder: Path) -> Server:
    (folder / "data").mkdir()

    def command(port: int) -> list[str]:
        keys = f"{ACCESS_KEY},{SECRET_KEY}"
        return [
            program("rclone"),
            *("serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", keys, "--config", str(folder / "none")),
            str(folder / "data"),
        ]

    return start(command, folder, {}, offsets=(0,))


def _start_moto(folder: Path) -> Server:
    return start(lambda port: [program("moto_server"), "-H", "127.0.0.1", "-p", str(port)], folder, {}, offsets=(0,))


def _start_juicefs(folder: Path) -> Server:
    """A bucket is a folder of its volume."""
    volume = juicefs_volume(folder)

    def command(port: int) -> list[str]:
        options = ("--no-usage-report", "--no-banner", "--multi-buckets", "--keep-etag", "--no-bgjob")
        return [program("juicefs"), "gateway", *options, "--backup-meta", "0", volume, f"127.0.0.1:{port}"]

    return start(command, folder, {"MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY}, offsets=(0,))
