"""The stores that one suite runs over, and a file as the publisher would hand it to a store."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.servers import (
    ceph,
    ceph_bucket,
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
from tests.servers.azurite import azure_container, azurite
from tests.servers.gcs import fake_gcs, gcs_bucket
from tests.servers.mounts import juicefs_mounts
from tests.servers.sftp import sftp_folder, sshd
from tests.store.matrix import KINDS, Kind, Place

from dispatch_agent.store.base import Store
from dispatch_agent.store.opening import open_store

__all__ = [
    "azure_container",
    "azurite",
    "ceph",
    "ceph_bucket",
    "fake_gcs",
    "gcs_bucket",
    "juicefs_bucket",
    "juicefs_gateway",
    "juicefs_mounts",
    "moto",
    "moto_bucket",
    "rclone",
    "rclone_bucket",
    "rclone_shared_bucket",
    "s3_bucket",
    "seaweed",
    "sftp_folder",
    "shared_bucket",
    "sshd",
]

# Tests that share a server run in one process, so that it is started once.
SEAWEED = pytest.mark.xdist_group("seaweed")

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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `kind` (or `store`, or `opener`) runs on each kind of store that can what its `needs` name."""
    if "kind" not in metafunc.fixturenames:
        return
    needed = [what for marker in metafunc.definition.iter_markers("needs") for what in marker.args]
    chosen = [kind for kind in KINDS if all(kind.can(what) for what in needed)]
    marked = [pytest.param(kind, id=kind.name, marks=_together(kind)) for kind in chosen]
    metafunc.parametrize("kind", marked, indirect=True, scope="session")


def _together(kind: Kind) -> list[pytest.MarkDecorator]:
    return [pytest.mark.server, pytest.mark.xdist_group(f"{kind.name}-conformance")] if kind.starts else []


@pytest.fixture(scope="session")
def kind(request: pytest.FixtureRequest) -> Kind:
    """What it needs is started here: started by the first test, it would count as left behind by that."""
    kind: Kind = request.param
    if kind.starts:
        request.getfixturevalue(kind.starts)
    return kind


@pytest.fixture
def rounds(kind: Kind, request: pytest.FixtureRequest) -> int:
    """How many rounds to race: as many as the kind of store can bear in CI, or as --rounds says."""
    return int(request.config.getoption("rounds") or kind.rounds)


@pytest.fixture
def place(kind: Kind, request: pytest.FixtureRequest) -> Place:
    """A destination of this kind that no other test uses."""
    return kind.place(request)


@pytest.fixture
def opener(place: Place) -> Iterator[Opener]:
    """Opens one and the same destination, as often as asked: another client of it each time."""
    opened: list[Store] = []

    def opener() -> Store:
        opened.append(open_store(place.seen_by(len(opened)), place.options))
        return opened[-1]

    yield opener
    for store in opened:
        store.close()


@pytest.fixture
def store(opener: Opener) -> Store:
    return opener()


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No proxy of the machine, no AWS settings but a region; the two AWS files are `tmp_path`'s, and not there yet."""
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
