"""Where the protocol's tests work: a scratch folder without the cost of a disk, and real servers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.protocol.writers import Launcher
from tests.servers import s3_bucket, seaweed, shared_bucket

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
