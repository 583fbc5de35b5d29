"""A save leaves its execution's folder for good: first out of sight whole, by one rename, then bit by bit.

    exec/<attempt>/.dispatch/leaving.<origin>.<token>.<save>   moved out, and looked at once more; goes back if killed
                             gone.<token>                      to be deleted; a killed run's is deleted by the next

`<origin>` is where the save stood, `exec` or `resume`; `<save>` its raw name. Nothing is made, so that a volume that is
full can be emptied; no link is followed, and nothing is ever replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from dispatch_agent.checkpoint import records
from dispatch_agent.checkpoint.folder import FolderLock
from dispatch_agent.checkpoint.generations import fingerprint
from dispatch_agent.checkpoint.names import shown
from dispatch_agent.checkpoint.save import Snapshot
from dispatch_agent.checkpoint.walk import reason, snapshot
from dispatch_agent.errors import SaveError

LEAVING, GONE = b"leaving.", b"gone."

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR})


class Stays(Exception):
    """Why something is left where it is. `passing`: time alone may change that."""

    def __init__(self, reason: str, *, passing: bool = False) -> None:
        super().__init__(reason)
        self.passing = passing


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds the locks of all the folder's publishers, whatever store it was ever published to.

    Raises Stays if one of them is at work, AgentError if a lock cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        for path in sorted(records.own(folder).glob("lock.*")):
            lock = FolderLock(path)
            stack.callback(lock.release)
            if not lock.acquire():
                msg = "a publisher has it"
                raise Stays(msg, passing=True)
        yield


def unfinished(folder: Path) -> bool:
    """Whether a run that was killed left something for `finish` in an execution's folder."""
    return any(name.startswith((LEAVING, GONE)) for name in _names(folder))


def remove(folder: Path, home: Path, save: Snapshot) -> None:
    """Delete the save that stands in `home`, which is the execution's `folder` or its folder below `resume/`.

    Durably out of sight before anything of it goes. Raises Stays if it is not as in `save` any more (then it is back
    in its place), or cannot be deleted; OSError if it cannot be moved.
    """
    _check_not_mounted(os.path.join(os.fsencode(home), save.name))
    token = secrets.token_hex(4).encode()
    leaving = LEAVING + (b"exec." if home == folder else b"resume.") + token + b"." + save.name
    gone = GONE + token
    with _opened(records.own(folder)) as own, _opened(home) as standing:
        try:
            os.rename(save.name, leaving, src_dir_fd=standing, dst_dir_fd=own)
        except FileNotFoundError as error:
            msg = "it is gone already"
            raise Stays(msg, passing=True) from error
        _sync(own)
        _sync(standing)
        if changed := _changed(save, records.own(folder), leaving):
            _put_back(leaving, own, save.name, standing)
            msg = f"it changed while it was looked at: {changed}"
            raise Stays(msg, passing=True)
        os.rename(leaving, gone, src_dir_fd=own, dst_dir_fd=own)
        _sync(own)
        try:
            _delete(gone, own)
        except (OSError, RecursionError) as error:
            msg = f"it was moved to {records.own(folder, os.fsdecode(gone))} and cannot be deleted: {_why(error)}"
            raise Stays(msg) from error


def _check_not_mounted(place: bytes) -> None:
    """What is mounted inside a save is somebody's own, and would be emptied with it. Raises Stays."""
    inside = os.path.realpath(place) + b"/"
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        # proc(5): spaces and the like are written as three octal digits.
        at = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), line.split(b" ")[4])
        if (at + b"/").startswith(inside):
            msg = f"a filesystem is mounted in it, at {shown(at)}: unmount that first"
            raise Stays(msg)


def finish(folder: Path, resume: Path) -> list[tuple[Path, str]]:
    """Settle what a killed run left: what was on its way out goes back, what was gone is deleted.

    `resume` is the execution's folder below `resume/`. What could not be settled, and why. Raises OSError.
    """
    left = []
    with _opened(records.own(folder)) as own:
        for name in _names(folder):
            try:
                if name.startswith(GONE):
                    _delete(name, own)
                elif name.startswith(LEAVING):
                    origin, _token, save = name.removeprefix(LEAVING).split(b".", 2)
                    with _opened(resume if origin == b"resume" else folder) as standing:
                        _put_back(name, own, save, standing)
            except (Stays, OSError, ValueError, RecursionError) as error:
                left.append((records.own(folder, os.fsdecode(name)), _why(error)))
    return left


def _names(folder: Path) -> list[bytes]:
    try:
        return sorted(map(os.fsencode, os.listdir(records.own(folder))))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _changed(save: Snapshot, place: Path, name: bytes) -> str:
    try:
        now = snapshot(place, name)
    except SaveError as error:
        return str(error)
    return "" if fingerprint(now) == fingerprint(save) else "its files are others"


def _put_back(name: bytes, own: int, save: bytes, standing: int) -> None:
    """Replaces nothing: raises Stays if another save has the name by now. Raises OSError."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=own, follow_symlinks=False).st_mode):
            os.rename(name, save, src_dir_fd=own, dst_dir_fd=standing)
        else:
            os.link(name, save, src_dir_fd=own, dst_dir_fd=standing, follow_symlinks=False)
            os.unlink(name, dir_fd=own)
    except OSError as error:
        if error.errno in _TAKEN:
            msg = "it was moved out and another save has its name by now: move it where you want it"
            raise Stays(msg) from error
        raise


def _delete(name: bytes, at: int) -> None:
    """Everything under this name in the open folder `at`. Links are removed, never followed. Raises OSError."""
    try:
        descriptor = os.open(name, _FOLDER, dir_fd=at)
    except OSError as error:
        if error.errno not in {errno.ENOTDIR, errno.ELOOP}:
            raise
        os.unlink(name, dir_fd=at)
        return
    try:
        with contextlib.suppress(PermissionError):  # another's: perhaps it can be emptied as it is
            os.fchmod(descriptor, 0o700)
        for inner in os.listdir(descriptor):
            _delete(os.fsencode(inner), descriptor)
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=at)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, _FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:  # some network filesystems sync no folders
            raise


def _why(error: Exception) -> str:
    return reason(error) if isinstance(error, OSError) else str(error)
