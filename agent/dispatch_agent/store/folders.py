"""Folders and files below a root, by descriptor: no link is followed, no name is seen half written."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from dispatch_agent.errors import StoreDenied, StoreError, StoreUnavailable
from dispatch_agent.store import keys

T = TypeVar("T")
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A name of this folder was removed under us by someone who tidied; each turn needs one more such deletion just then.
TURNS = 100
SHARED = stat.S_ISGID | stat.S_IWGRP | stat.S_IWOTH
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
NO_SYNC = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
DENIED = {
    errno.EACCES: "let this user write there, or run as the volume's owner",
    errno.EPERM: "let this user write there, or run as the volume's owner",
    errno.EROFS: "mount it writable",
    errno.ENOTDIR: "a file stands where a folder is needed: move it away or choose another folder",
    errno.EISDIR: "a folder stands where a file is needed: move it away or choose another folder",
    errno.ELOOP: "a symbolic link stands in the store, and none is followed there: replace it by what it points to",
}
PASSING = {
    errno.ENOSPC: "free some space or enlarge the volume",
    errno.EDQUOT: "free some space or raise the quota",
    errno.ESTALE: "the server lost the folder: mount it again if this stays",
    errno.EIO: "look at the kernel's log and the volume's health",
}


@contextmanager
def explained(what: str, path: Path) -> Iterator[None]:
    """Raises StoreDenied, StoreUnavailable or StoreError in place of OSError, with what was tried and what to do."""
    try:
        yield
    except OSError as error:
        said = f"could not {what} {path}: {error.strerror or error}"
        if error.errno in DENIED:
            msg = f"{said} (as uid {os.geteuid()}): {DENIED[error.errno]}"
            raise StoreDenied(msg) from error
        if error.errno == errno.ENAMETOOLONG:
            msg = f"{said}: shorten the names inside the save"
            raise StoreError(msg) from error
        msg = f"{said}: {PASSING.get(error.errno or 0, 'look at the volume if this stays')}"
        raise StoreUnavailable(msg) from error


@contextmanager
def opened(root: Path, parents: list[str], *, make: bool = False) -> Iterator[int]:
    """A descriptor of a folder below `root`. Raises FileNotFoundError if it is not there and not to be made."""
    folder = _open_root(root, make=make)
    try:
        for name in parents:
            below = _step(folder, name, make=make)
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


def made(root: Path, parents: list[str], act: Callable[[int], T]) -> T:
    """`act` in a folder that is made if need be, again if someone tidied it away meanwhile. Raises OSError."""
    for _ in range(TURNS):
        with suppress(FileNotFoundError), opened(root, parents, make=True) as folder:
            return act(folder)
    raise OSError(errno.EBUSY, "the folder vanished each time that it was made", str(root.joinpath(*parents)))


def open_file(folder: int, name: str) -> int:
    """A descriptor of a regular file, nothing else: a FIFO would block and a link lead away. Raises OSError."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return file
    os.close(file)
    if stat.S_ISDIR(mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    raise OSError(errno.EIO, f"it is no regular file (mode {mode:o})", name)


def read_file(folder: int, name: str) -> bytes:
    """A small file whole. Raises OSError."""
    with os.fdopen(open_file(folder, name), "rb") as file:
        return file.read()


def open_lock(folder: int, name: str) -> int:
    """The lock file of a folder, made if need be; read-only if it is another user's, which flock(2) allows."""
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
    except PermissionError:
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    _share(lock, folder, stat.S_IWGRP | stat.S_IWOTH)
    return lock


def is_at(file: int, folder: int, name: str) -> bool:
    """Whether the open file is what stands under this name. Raises OSError."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(name, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return False


def drop_lock(folder: int, name: str) -> None:
    """Remove a folder's lock file if nothing else is in there and nobody has it. Raises OSError.

    Who waited for it finds another one at its name, or none, and opens that.
    """
    try:
        lock = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return
    try:
        if os.listdir(folder) == [name]:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.listdir(folder) == [name]:
                os.unlink(name, dir_fd=folder)
    except OSError as error:
        # Somebody has it, or may alone remove it, or there are no locks: then it stays.
        if error.errno not in {errno.EWOULDBLOCK, errno.EACCES, errno.EPERM, errno.ENOENT, *NO_LOCKS}:
            raise
    finally:
        os.close(lock)


def walk(folder: int, below: str = "", *, strict: bool = False) -> Iterator[tuple[str, int]]:
    """Path and size of every regular file below an open folder; what vanishes meanwhile is left out. Raises OSError:
    where it is `strict`, also for a symbolic link, which may hide what stood there."""
    for entry in _entries(folder, strict=strict):
        if entry.is_dir(follow_symlinks=False):
            with suppress(FileNotFoundError), _child(folder, entry.name) as child:
                yield from walk(child, f"{below}{entry.name}/", strict=strict)
        elif entry.is_file(follow_symlinks=False):
            with suppress(FileNotFoundError):
                yield below + entry.name, os.stat(entry.name, dir_fd=folder, follow_symlinks=False).st_size


def subfolders(folder: int, *, strict: bool = False) -> list[str]:
    """The names of the real folders directly in an open folder. Raises OSError, as `walk` does."""
    return [entry.name for entry in _entries(folder, strict=strict) if entry.is_dir(follow_symlinks=False)]


def holds_a_file(folder: int, name: str) -> bool:
    """Whether any file is below this folder: an empty one is only what a crash left of a write. Raises OSError."""
    try:
        with _child(folder, name) as child:
            return next(walk(child), None) is not None
    except FileNotFoundError:
        return False


def tidy(root: Path, parents: list[str]) -> None:
    """Remove empty folders from the deepest upwards, never the root. Raises OSError."""
    for depth in range(len(parents), 0, -1):
        with suppress(FileNotFoundError), opened(root, parents[: depth - 1]) as folder:
            if not _remove_empty(folder, parents[depth - 1]):
                return


def _remove_empty(folder: int, name: str) -> bool:
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError as error:
        # In use, or not ours to remove: an empty folder is no object, so nothing is left undone.
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.EACCES, errno.EPERM}:
            return False
        raise
    return True


def drafts(folder: int) -> Iterator[str]:
    """The path of every draft below an open folder. Raises OSError."""
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            with suppress(FileNotFoundError), _child(folder, entry.name) as child:
                yield from (f"{entry.name}/{path}" for path in drafts(child))
        elif entry.name.startswith(keys.DRAFT):
            yield entry.name


def point(root: Path, parents: list[str], name: str, target: str) -> None:
    """Let `name` be a symbolic link with this text, replacing what stood there in one step. Raises OSError."""

    def act(folder: int) -> None:
        draft = private_name()
        os.symlink(target, draft, dir_fd=folder)
        try:
            os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(draft, dir_fd=folder)
            raise
        sync_folder(folder)

    made(root, parents, act)


def sync_folder(folder: int) -> None:
    """Make the names in a folder last. Raises OSError."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in NO_SYNC:  # some network filesystems have no such call: their names last at once or never
            raise


def private_name() -> str:
    """A name that no key has and no listing shows."""
    return f"{keys.DRAFT}{secrets.token_hex(8)}"


def _open_root(root: Path, *, make: bool) -> int:
    # The root itself may be reached through links: that is the operator's own path.
    try:
        return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        if not make:
            raise
    for folder in [*reversed(root.parents), root]:
        with suppress(FileExistsError):
            os.mkdir(folder)
            parent = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sync_folder(parent)
            finally:
                os.close(parent)
    return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _step(folder: int, name: str, *, make: bool) -> int:
    for _ in range(TURNS):
        try:
            return os.open(name, FOLDER, dir_fd=folder)
        except FileNotFoundError:
            if not make:
                raise
        except NotADirectoryError:
            if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, "a symbolic link is in the way", name) from None
            if make:
                raise
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from None
        with suppress(FileExistsError, FileNotFoundError):
            _make(folder, name)
        if os.fstat(folder).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the folder above was removed", name)
    raise OSError(errno.EBUSY, "the folder vanished each time that it was made", name)


def _make(folder: int, name: str) -> None:
    os.mkdir(name, dir_fd=folder)
    made_folder = os.open(name, FOLDER, dir_fd=folder)
    try:
        _share(made_folder, folder, SHARED)
    finally:
        os.close(made_folder)
    sync_folder(folder)


def _share(descriptor: int, folder: int, bits: int) -> None:
    """Take over from the folder above who else may write."""
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    wanted = mode | (os.fstat(folder).st_mode & bits)
    if wanted != mode:
        # Where modes are fixed by the mount (SMB, FAT) or the file is another user's, that user or the mount decides.
        with suppress(PermissionError):
            os.fchmod(descriptor, wanted)


def _entries(folder: int, *, strict: bool = False) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        entries = [entry for entry in found if not entry.name.startswith(keys.PRIVATE)]
    link = next((entry for entry in entries if entry.is_symlink()), None) if strict else None
    if link is not None:
        raise OSError(errno.ELOOP, f"{link.name!r} is a symbolic link", link.name)
    return entries


@contextmanager
def _child(folder: int, name: str) -> Iterator[int]:
    try:
        child = os.open(name, FOLDER, dir_fd=folder)
    except NotADirectoryError:
        raise FileNotFoundError(errno.ENOENT, "no longer a folder", name) from None
    try:
        yield child
    finally:
        os.close(child)
