"""Real servers for tests.

A conftest.py takes what it needs: `from tests.servers import s3_bucket, seaweed, …`. Servers listen
on 127.0.0.1 only, are started once in each test process and are killed when their last user has ended, or with the test
process itself.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ACCESS_KEY, SECRET_KEY = "test", "testsecret"
START_SECONDS = 30.0


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
    with _shared("seaweed", lambda: _start_seaweed(tmp_path_factory.mktemp("seaweed"))) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of `rclone serve s3`: takes every condition and ignores it."""
    with _shared("rclone", lambda: _start_rclone(tmp_path_factory.mktemp("rclone"))) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def shared_bucket(seaweed: str) -> Bucket:
    """One bucket for many tests, each below a prefix of its own: a fresh one costs SeaweedFS a second."""
    return _fresh(seaweed)


@pytest.fixture
def s3_bucket(seaweed: str) -> Bucket:
    return _fresh(seaweed)


@pytest.fixture
def rclone_bucket(rclone: str) -> Bucket:
    return _fresh(rclone)


def _fresh(endpoint: str) -> Bucket:
    bucket = Bucket(endpoint, f"b-{uuid.uuid4().hex[:12]}")
    client = bucket.client()
    client.create_bucket(Bucket=bucket.name)
    client.close()
    return bucket


# --- starting and ending ----------------------------------------------------------------------------------------------


@dataclass
class _Server:
    endpoint: str
    process: subprocess.Popen[bytes]
    folder: Path
    users: int = 0


_servers: dict[str, _Server] = {}


@contextmanager
def _shared(name: str, start: Callable[[], _Server]) -> Iterator[str]:
    """Fixtures taken into several conftest.py files are several fixtures, but one server."""
    server = _servers.get(name) or _servers.setdefault(name, start())
    server.users += 1
    try:
        yield server.endpoint
    finally:
        server.users -= 1
        if server.users == 0:
            del _servers[name]
            server.process.kill()  # not SIGTERM, which SeaweedFS heeds after half a minute
            server.process.wait()
            shutil.rmtree(server.folder, ignore_errors=True)


def _start_seaweed(folder: Path) -> _Server:
    identity = {"name": "test", "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]}
    actions = ["Admin", "Read", "List", "Tagging", "Write"]
    (folder / "s3.json").write_text(json.dumps({"identities": [{**identity, "actions": actions}]}))
    (folder / "data").mkdir()

    def command(port: int) -> list[str]:
        return [
            _program("weed"),
            *("-logtostderr=true", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *("-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-volume.max=10000"),
            *("-master.electionTimeout=1s", f"-master.port={port + 1}", f"-volume.port={port + 2}"),
            *("-filer=true", f"-filer.port={port + 3}", "-s3", f"-s3.port={port}"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}"),
        ]

    # Else every new bucket takes seven volumes. The ports + 10000 are for its own calls.
    return _start(command, folder, {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}, offsets=(0, 1, 2, 3))


def _start_rclone(folder: Path) -> _Server:
    (folder / "data").mkdir()

    def command(port: int) -> list[str]:
        keys = f"{ACCESS_KEY},{SECRET_KEY}"
        return [
            _program("rclone"),
            *("serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", keys, "--config", str(folder / "none")),
            str(folder / "data"),
        ]

    return _start(command, folder, {}, offsets=(0,))


def _start(
    command: Callable[[int], list[str]], folder: Path, more: dict[str, str], offsets: tuple[int, ...]
) -> _Server:
    log = folder / "log"
    for _ in range(3):  # another program may take a port between our look and the server's start
        port = _free_port(offsets)
        with log.open("wb") as out:
            process = subprocess.Popen(
                command(port),
                env={**os.environ, **more},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 (one system call, and no lock is taken)
            )
        endpoint = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            if _answers(port):
                return _Server(endpoint, process, folder)
            time.sleep(0.05)
        process.kill()
        process.wait()
    pytest.fail(f"{command(0)[0]} did not start:\n{log.read_text(errors='replace')[-2000:]}", pytrace=False)


def _program(name: str) -> str:
    """Beside this Python, or on PATH. A missing server fails the test: a skip would hide that nothing was tested."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is missing: pip install -e '.[test]'", pytrace=False)
    return found


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed test run leaves no server


def _free_port(offsets: tuple[int, ...]) -> int:
    """A port that is free together with those at `offsets`, and with the same ports + 10000 where there are several."""
    wanted = [*offsets, *(offset + 10000 for offset in offsets)] if len(offsets) > 1 else list(offsets)
    while True:
        port = random.randrange(20000, 30000)  # noqa: S311 (no secret)
        if all(_is_free(port + offset) for offset in wanted):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    return False
