"""Whether the trainer has ended: by its word (a done file), or by a lock that ends with it.

The lock is one of POSIX: `exec --hold` takes it on its started marker, execve keeps it, and however the process ends
the kernel lets it go. So does whoever closes the marker's descriptor; nobody outside can tell the two apart.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from dispatch_agent.checkpoint import records

HELD = b"held\n"
"""What a marker holds once its lock was taken: from then on, a free lock is an ended trainer."""
_TEXT = 4096
_LOCKED = frozenset({errno.EACCES, errno.EAGAIN})
# Not to wait for whoever put a FIFO there, nor to follow where a link leads.
_AS_IT_IS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def done(path: Path, attempt: str, folder: Path, root: Path | None) -> tuple[bool, str]:
    """Whether the done file at `path` says that the trainer of `attempt` has ended; if not, why what is there does not.

    Its text may be the attempt. Empty it counts as well, but not in the checkpoint root `root` outside this execution's
    `folder`: what stands there outlasts an execution.
    """
    try:
        text = _text(path)
    except FileNotFoundError:
        return False, ""
    except OSError as error:
        return False, f"{path} cannot be read: {error.strerror or error}"
    if text == os.fsencode(attempt):
        return True, ""
    if text:
        return False, f"{path} holds {text.decode('utf-8', 'replace')[:200]!r}, which is not this attempt, {attempt!r}"
    where = Path(os.path.abspath(path))
    if (
        root is not None
        and where.is_relative_to(os.path.abspath(root))
        and not where.is_relative_to(os.path.abspath(folder))
    ):
        return False, f"{path} is empty, so another execution may have left it: write the attempt, {attempt!r}, into it"
    return True, ""


def _text(path: Path) -> bytes:
    """What a plain file says. Raises OSError, also for a FIFO, whose writer would have to be waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is no plain file")
        return os.read(descriptor, _TEXT).strip()
    finally:
        os.close(descriptor)


def held(folder: Path, rank: int) -> str:
    """Why the trainer of `rank`, or that of another rank on this volume, is not taken for ended; empty if all have.

    Raises OSError if that cannot be told, as where the filesystem keeps no locks.
    """
    own = records.own(folder)
    try:
        markers = sorted(name for name in os.listdir(own) if re.fullmatch(r"started\.[0-9]+", name))
    except FileNotFoundError:
        markers = []
    if f"started.{rank}" not in markers:
        return f"no trainer of rank {rank} has started: {own / f'started.{rank}'} is not there"
    for name in markers:
        reason = _held(own / name)
        if reason:
            return reason
    return ""


def _held(marker: Path) -> str:
    descriptor = os.open(marker, os.O_RDONLY | _AS_IT_IS)
    try:
        if os.read(descriptor, len(HELD)) != HELD:
            return f"{marker} is held by nobody: start the trainer with `dispatch-agent exec --hold`"
        os.lockf(descriptor, os.F_TEST, 0)
    except OSError as error:
        if error.errno not in _LOCKED:
            raise
        return f"{marker} is held: its trainer runs"
    finally:
        os.close(descriptor)
    return ""


def forget(folder: Path, rank: int) -> None:
    """Before the trainer of `rank` is started once more: the mark that the one before held says no more that it ended.

    Raises OSError.
    """
    try:
        descriptor = os.open(records.own(folder, f"started.{rank}"), os.O_RDWR | _AS_IT_IS)
    except FileNotFoundError:
        return
    try:
        os.lockf(descriptor, os.F_TEST, 0)
        os.ftruncate(descriptor, 0)
    except OSError as error:
        if error.errno not in _LOCKED:
            raise
    finally:
        os.close(descriptor)
