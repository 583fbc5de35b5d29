"""A job for each test: a folder, a destination in a folder or on a real S3 server, and the end of its processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.frameworks.harness import Scene
from tests.servers import Bucket, s3_bucket, seaweed

__all__ = ["s3_bucket", "seaweed"]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A job that publishes to a folder."""
    job = Scene(tmp_path, str(tmp_path / "store"), None)
    yield job
    job.close()


@pytest.fixture
def s3_scene(tmp_path: Path, s3_bucket: Bucket) -> Iterator[Scene]:
    """A job that publishes to an S3 server."""
    job = Scene(tmp_path, f"{s3_bucket.url}/job", s3_bucket)
    yield job
    job.close()


@pytest.fixture
def other_filesystem(tmp_path: Path) -> Iterator[Path]:
    """A folder from which a file cannot be renamed into the job's."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert Path(folder).stat().st_dev != tmp_path.stat().st_dev, (
            "/dev/shm must be another filesystem than the tests'"
        )
        yield Path(folder)
