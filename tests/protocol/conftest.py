"""Where the protocol's tests work: a scratch folder without the cost of a disk, and real servers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.protocol.writers import Launcher
from tests.servers import s3_bucket, seaweed, shared_bucket

from dispatch_agent.store.base import Store
from dispatch_agent.store.memory import MemoryStore
from dispatch_agent.store.posix import PosixStore

__all__ = ["s3_bucket", "seaweed", "shared_bucket"]


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory: a killed process loses no more there than on a disk, and fsync costs nothing."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="dispatch-agent-test-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=["memory", "folder"])
def fresh_store(request: pytest.FixtureRequest, place: Path) -> Callable[[], Store]:
    """Makes an empty destination each time that it is called."""
    made = iter(range(100_000))
    if request.param == "memory":
        return MemoryStore
    return lambda: PosixStore(place / "stores" / str(next(made)))
