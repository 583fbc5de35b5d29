"""Two FUSE mounts of one volume: what two nodes see of a shared filesystem."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.servers.juicefs import juicefs_volume
from tests.servers.processes import end, program, spawn, until


@dataclass(frozen=True)
class Mounts:
    """One volume, seen from two nodes."""

    here: Path
    there: Path


@pytest.fixture(scope="session")
def juicefs_mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounts]:
    """JuiceFS: a name is made once for all mounts, a lock holds for all, and a name that was made to mean another file
    means the old one for up to a second elsewhere."""
    folder = tmp_path_factory.mktemp("juicefs")
    volume = juicefs_volume(folder)

    def command(where: Path) -> list[str]:
        options = ("--no-usage-report", "--backup-meta", "0", "--cache-dir", f"{where}.cache")
        return [program("juicefs"), "mount", *options, volume, str(where)]

    with _mounted_twice(folder, command) as mounts:
        yield mounts


@pytest.fixture(scope="session")
def seaweed_mounts(seaweed: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounts]:
    """SeaweedFS: two mounts can both make one name, by link(2) and by O_EXCL, and a lock holds for one mount."""
    filer = f"127.0.0.1:{(urlsplit(seaweed).port or 0) + 3}"

    def command(where: Path) -> list[str]:
        path = ("-filer.path=/mounted", "-dirAutoCreate", f"-cacheDir={where}.cache")
        return [program("weed"), "mount", f"-filer={filer}", f"-dir={where}", *path]

    with _mounted_twice(tmp_path_factory.mktemp("seaweed"), command) as mounts:
        yield mounts


@contextmanager
def _mounted_twice(folder: Path, command: Callable[[Path], list[str]]) -> Iterator[Mounts]:
    with ExitStack() as stack:
        yield Mounts(*(stack.enter_context(_mounted(folder / name, command)) for name in ("here", "there")))


@contextmanager
def _mounted(where: Path, command: Callable[[Path], list[str]]) -> Iterator[Path]:
    where.mkdir()
    log = where.with_suffix(".log")
    process = spawn(command(where), log)
    try:
        until(where.is_mount, process, log)
        yield where
    finally:
        # Lazily, so that a file which a failed test left open keeps nothing mounted.
        subprocess.run([program("fusermount3", "fuse3"), "-u", "-z", str(where)], check=False)
        deadline = time.monotonic() + 5
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        end((process,))
