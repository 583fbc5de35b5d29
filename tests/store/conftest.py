"""The stores that one suite runs over, and a file as the publisher would hand it to a store."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.servers import Bucket, rclone, rclone_bucket, s3_bucket, seaweed, shared_bucket

from dispatch_agent.store.base import Store
from dispatch_agent.store.opening import open_store

__all__ = ["rclone", "rclone_bucket", "s3_bucket", "seaweed", "shared_bucket"]

# Tests that share a server run in one process each, so that two servers are started and no more.
SEAWEED = pytest.mark.xdist_group("seaweed")
KINDS = ("memory", "folder", "tmpfs", pytest.param("seaweed", marks=pytest.mark.xdist_group("seaweed-conformance")))

Opener = Callable[[], Store]


class FileSource:
    """A file, read as the publisher reads it. `fails_at` is where reading raises, as for a file that changed."""

    def __init__(self, path: Path, *, fails_at: int | None = None) -> None:
        self.size = path.stat().st_size
        self.ticks = 0
        self._file = path.open("rb", buffering=0)
        self._fails_at = fails_at
        self._at = 0

    def fileno(self) -> int:
        return self._file.fileno()

    def read(self, size: int) -> bytes:
        if self._fails_at is not None and self._at >= self._fails_at:
            raise ChangedError
        end = self.size if self._fails_at is None else self._fails_at
        piece = self._file.read(min(size, end - self._at))
        self._at += len(piece)
        return piece

    def tick(self, size: int) -> None:
        self.ticks += size

    def __enter__(self) -> FileSource:  # noqa: PYI034 (typing.Self is newer than Python 3.10)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class ChangedError(Exception):
    """What a source raises, and a store must let pass."""


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="dispatch-agent-test-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "seaweed":
        request.getfixturevalue(
            "shared_bucket"
        )  # its server is started here, or it would count as left behind by the first test
    return str(request.param)


@pytest.fixture
def opener(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens one and the same destination, as often as asked: another client of it each time."""
    url, options = f"memory://{os.urandom(6).hex()}", None
    if kind == "folder":
        url = str(tmp_path / "store")
    elif kind == "tmpfs":
        url = str(request.getfixturevalue("tmpfs") / "store")
    elif kind == "seaweed":
        bucket: Bucket = request.getfixturevalue("shared_bucket")
        url, options = f"{bucket.url}/some/{os.urandom(6).hex()}", bucket.options
    opened: list[Store] = []

    def opener() -> Store:
        opened.append(open_store(url, options))
        return opened[-1]

    yield opener
    for store in opened:
        store.close()


@pytest.fixture
def store(opener: Opener) -> Store:
    return opener()
