"""What a training run really saved: a log, kept outside the watched folder, that published trees are compared with.

The training scripts call `begin` before a save and `finished` after the framework's own call has returned on every
rank. A listing is taken at that moment, so it holds what the framework calls a finished save, nothing more or less.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Listing = dict[str, str]


def listing(save: Path) -> Listing:
    """Every file, folder and link of a save by its path inside it, with what it holds. A single file has path ''."""
    if not save.is_dir():
        return {"": _held(save)}
    return {path.relative_to(save).as_posix(): _held(path) for path in sorted(save.rglob("*"))}


def _held(path: Path) -> str:
    if path.is_symlink():
        return f"link {path.readlink()}"
    if path.is_dir():
        return "folder"
    return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


class Reference:
    """Appends one JSON line per event. Only rank 0 writes; the barriers keep the other ranks from moving on."""

    def __init__(self, log: Path | None, rank: int = 0, barrier: Callable[[], None] = lambda: None) -> None:
        self._log = log if rank == 0 else None
        self._barrier = barrier if log is not None else lambda: None

    def begin(self, save: Path) -> None:
        """A save is about to be written under this path."""
        self._append(event="begin", save=save.name, at=time.monotonic())

    def finished(self, save: Path) -> None:
        """The framework returned from this save on the calling rank."""
        self._barrier()
        if self._log is not None:
            at = time.monotonic()
            self._append(event="finished", save=save.name, at=at, listing=listing(save))
        self._barrier()

    def resumed(self, step: int) -> None:
        """The run goes on after this step, from a save that it was given."""
        self._append(event="resumed", step=step)

    def _append(self, **event: Any) -> None:
        if self._log is None:
            return
        # One write(2) to O_APPEND: a SIGKILL leaves a whole line or none.
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, (json.dumps(event) + "\n").encode())
        os.close(descriptor)


def options(description: str) -> argparse.ArgumentParser:
    """The options that all training scripts share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="where saves go; by default what save_dir() says")
    parser.add_argument("--steps", type=int, default=60, help="training steps in all")
    parser.add_argument("--every", type=int, default=10, help="training steps between two saves")
    parser.add_argument("--step-seconds", type=float, default=0.02, help="sleep in each step, as a bigger model would")
    parser.add_argument("--reference", type=Path, help="log of what was saved, for the tests")
    return parser
