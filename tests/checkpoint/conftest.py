"""Builders for the tests of the local disk side."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import settings

import dispatch_agent
from dispatch_agent.checkpoint.save import Entry, Snapshot

SECOND = 1_000_000_000
TRAINERS = Path(__file__).parent.parent / "trainers"
_IMPORTS = (
    "import os, sys, resource, signal, threading, time\n"
    "from pathlib import Path\n"
    "from dispatch_agent.checkpoint import folder, reading, scan, watch\n"
    "from dispatch_agent.clock import SystemClock\n"
)
# A machine that runs other tests at the same time makes any example slow now and then.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")
Built = Callable[..., Snapshot]


@pytest.fixture
def exec_folder(tmp_path: Path) -> Path:
    """An execution's folder, empty."""
    folder = tmp_path / "exec" / "1.42.0"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def built() -> Built:
    """A save out of thin air: `built("step-1", {"a": 5, "b": (6, 0)})`, path to mtime in seconds or (mtime, size)."""

    def build(
        name: str,
        files: Mapping[str, int | tuple[int, int]] | None = None,
        *,
        at: int = 0,
        size: int = 10,
        links: Mapping[str, str] | None = None,
        folder_at: int | None = None,
    ) -> Snapshot:
        if files is None:
            return Snapshot(os.fsencode(name), _entry("", "file", at, size), ())
        entries = [
            _entry(path, "file", *(spec if isinstance(spec, tuple) else (spec, 10))) for path, spec in files.items()
        ]
        entries += [_entry(path, "link", 0, 1, target) for path, target in (links or {}).items()]
        folders = {str(parent) for path in files for parent in Path(path).parents if str(parent) != "."}
        for path in folders:
            within = [e.mtime_ns for e in entries if e.kind == "file" and e.path.startswith(os.fsencode(path) + b"/")]
            entries.append(_entry(path, "folder", max(within) // SECOND, 4096))
        newest = max([0, *(entry.mtime_ns // SECOND for entry in entries)])
        root = _entry("", "folder", newest if folder_at is None else folder_at, 4096)
        return Snapshot(os.fsencode(name), root, tuple(sorted(entries, key=lambda entry: entry.path)))

    return build


def _entry(path: str, kind: str, at: int, size: int, target: str = "") -> Entry:
    time = at * SECOND
    return Entry(os.fsencode(path), kind, size, time, time, 1, 0o644, os.fsencode(target))  # type: ignore[arg-type]


@pytest.fixture
def environment() -> dict[str, str]:
    """What a child process needs to import the package."""
    return {**os.environ, "PYTHONPATH": str(Path(dispatch_agent.__file__).parent.parent)}


@pytest.fixture
def trainer(environment: dict[str, str]) -> Callable[..., subprocess.Popen[bytes]]:
    """Start a fake trainer: `trainer("dcp", folder, "--saves", "2")`. Its process; wait for it or kill it."""

    def start(kind: str, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(TRAINERS / f"{kind}.py"), str(folder), *arguments], env=environment
        )

    return start


@pytest.fixture
def python(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a Python program to its end. With `uid` (as root) it becomes that user once everything is imported: the
    interpreter and the package may stand where only root can read."""

    def run(program: str, *arguments: object, uid: int | None = None) -> subprocess.CompletedProcess[str]:
        drop = f"os.setgroups([]); os.setgid({uid}); os.setuid({uid})\n" if uid is not None else ""
        return subprocess.run(
            [sys.executable, "-c", _IMPORTS + drop + program, *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )

    return run
