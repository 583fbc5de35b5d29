"""The last words of a container: one short text, where Kubernetes looks for it."""

from __future__ import annotations

import os
from pathlib import Path

from dispatch_agent.logs import redact

DEFAULT = Path("/dev/termination-log")
MOST = 4096
"""Bytes that a kubelet takes of it."""


def path_of(given: str | None) -> Path | None:
    """Where the last words go: `given`, else Kubernetes' file if there is one."""
    if given:
        return Path(given)
    return DEFAULT if DEFAULT.is_file() else None


def write(path: Path | None, code: int, sentence: str, *more: str, over: bool = True) -> None:
    """Leave exit code, sentence and further lines at `path`; without `over` only if nothing was said yet.

    Never raises: the exit code and the log say the same.
    """
    if path is None:
        return
    text = "\n".join([f"exit {code}: {redact(sentence)}", *map(redact, more)])
    data = (text + "\n").encode("utf-8", "backslashreplace")
    if len(data) > MOST:
        data = data[: MOST - 4].decode("utf-8", "ignore").encode() + "…\n".encode()
    try:
        # In place: a kubelet reads the file that it has mounted, not another one of the name.
        with open(path, "ab" if not over else "wb", opener=_without_waiting) as file:
            if over or file.tell() == 0:
                file.write(data)
    except OSError:
        return


def _without_waiting(path: str, flags: int) -> int:
    """Not to wait for a FIFO's reader: nothing could end that, so late."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)
