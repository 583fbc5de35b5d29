"""A save leaves its execution's folder for good: first out of sight whole, by one rename, then bit by bit.

    exec/<attempt>/.dispatch/leaving/<slot>/<save>    moved out, and looked at once more; a killed run's goes back
                             gone/<slot>/<save>       to be deleted; a killed run's is deleted by the next

`<slot>` begins with where the save stood: `exec` or `resume`. No link is followed, and nothing is ever replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from dispatch_agent.checkpoint import records
from dispatch_agent.checkpoint.folder import FolderLock
from dispatch_agent.checkpoint.generations import fingerprint
from dispatch_agent.checkpoint.save import Snapshot
from dispatch_agent.checkpoint.walk import reason, snapshot
from dispatch_agent.errors import SaveError

LEAVING, GONE = "leaving", "gone"

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
    return any(_slots(folder, where) for where in (LEAVING, GONE))


def remove(folder: Path, home: Path, save: Snapshot) -> None:
    """Delete the save that stands in `home`, which is the execution's `folder` or its folder below `resume/`.

    Durably out of sight before anything of it goes. Raises Stays if it is not as in `save` any more (then it is back
    in its place), or cannot be deleted; AgentError, OSError.
    """
    slot = f"{'exec' if home == folder else 'resume'}.{secrets.token_hex(6)}"
    for where in (LEAVING, GONE):
        records.make_folder(records.own(folder, where))
    with (
        _opened(records.own(folder, LEAVING)) as leaving,
        _opened(records.own(folder, GONE)) as gone,
        _opened(home) as standing,
    ):
        os.mkdir(slot, 0o700, dir_fd=leaving)
        try:
            with _opened(slot, leaving) as inside:
                os.rename(save.name, save.name, src_dir_fd=standing, dst_dir_fd=inside)
                for each in (inside, leaving, standing):
                    _sync(each)
                if changed := _changed(save, records.own(folder, LEAVING, slot)):
                    _put_back(save.name, inside, standing)
                    msg = f"it changed while it was looked at: {changed}"
                    raise Stays(msg, passing=True)
        except BaseException:
            with contextlib.suppress(OSError):  # the save is still in it
                os.rmdir(slot, dir_fd=leaving)
            raise
        os.rename(slot, slot, src_dir_fd=leaving, dst_dir_fd=gone)
        for each in (leaving, gone):
            _sync(each)
        try:
            _delete(os.fsencode(slot), gone)
        except (OSError, RecursionError) as error:
            msg = f"it was moved to {records.own(folder, GONE, slot)} and cannot be deleted: {_why(error)}"
            raise Stays(msg) from error


def finish(folder: Path, resume: Path) -> list[tuple[Path, str]]:
    """Settle what a killed run left: what was on its way out goes back, what was gone is deleted.

    `resume` is the execution's folder below `resume/`. What could not be settled, and why.
    """
    left = []
    for slot in _slots(folder, LEAVING):
        home = resume if slot.name.startswith("resume.") else folder
        try:
            with _opened(slot.parent) as leaving, _opened(slot) as inside, _opened(home) as standing:
                for name in os.listdir(inside):
                    _put_back(os.fsencode(name), inside, standing)
                os.rmdir(slot.name, dir_fd=leaving)
        except (Stays, OSError) as error:
            left.append((slot, _why(error)))
    for slot in _slots(folder, GONE):
        try:
            with _opened(slot.parent) as gone:
                _delete(os.fsencode(slot.name), gone)
        except (OSError, RecursionError) as error:
            left.append((slot, _why(error)))
    return left


def _slots(folder: Path, where: str) -> list[Path]:
    path = records.own(folder, where)
    try:
        return [] if path.is_symlink() else sorted(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _changed(save: Snapshot, place: Path) -> str:
    try:
        now = snapshot(place, save.name)
    except SaveError as error:
        return str(error)
    return "" if fingerprint(now) == fingerprint(save) else "its files are others"


def _put_back(name: bytes, inside: int, home: int) -> None:
    """Replaces nothing: raises Stays if another save has the name by now. Raises OSError."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode):
            os.rename(name, name, src_dir_fd=inside, dst_dir_fd=home)
        else:
            os.link(name, name, src_dir_fd=inside, dst_dir_fd=home, follow_symlinks=False)
            os.unlink(name, dir_fd=inside)
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
def _opened(path: str | Path, at: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, _FOLDER, dir_fd=at)
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
