"""Small files of ours in `.dispatch/`: written whole and once, or replaced whole; never seen half-written."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from dispatch_agent.errors import AgentError, IntegrityError

NAME = b".dispatch"
_HINTS = {
    errno.ENOSPC: "the volume is full: free space, the trainer's next save would fail too",
    errno.EDQUOT: "the quota is used up: free space, the trainer's next save would fail too",
    errno.EROFS: "the volume is mounted read-only: mount it writable, the order of saves has to be kept on it",
    errno.EACCES: "run the publisher with the trainer's UID, or make the folder writable for it",
    errno.EPERM: "run the publisher with the trainer's UID, or make the folder writable for it",
}
# What a filesystem without hard links answers to link(2).
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def own(folder: Path, *below: str) -> Path:
    """A path inside `.dispatch/` of an execution's folder."""
    return folder.joinpath(NAME.decode(), *below)


def make_folder(path: Path) -> None:
    """Make a folder of ours (and `.dispatch` above it) unless it is there. Raises AgentError.

    It gets the owner, group and mode of the folder it is made in: whoever may write saves may mark them, be it the
    trainer or a publisher with another UID.
    """
    if path.parent.name == NAME.decode():
        make_folder(path.parent)
    try:
        above = path.parent.stat()
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir() or path.is_symlink():
                msg = f"{path} is no folder: dispatch-agent keeps its records there, move what is in its place"
                raise AgentError(msg) from None
            if not _is_unfinished(path, above):
                return
        _give(path, above)
        sync(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def create(path: Path, value: dict[str, Any]) -> bool:
    """Write a record that must not be there yet; whether it was us who did. Durable when true. Raises AgentError.

    Complete content first, then link(2): a record is absent or whole, and of two at once only one wins.
    """
    try:
        temporary = _write(path, value)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_LINKS and not path.exists():
                msg = (
                    f"{path} cannot be created exclusively: the filesystem has no hard links ({error.strerror}); "
                    "put the checkpoint root on a volume that has them (ext4, xfs, NFS, a PersistentVolumeClaim)"
                )
                raise AgentError(msg) from error
            raise
        finally:
            temporary.unlink()
        sync(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    return True


def replace(path: Path, value: dict[str, Any], mtime_ns: int) -> None:
    """Write a record whatever stands there, with this mtime. Durable afterwards. Raises AgentError."""
    try:
        temporary = _write(path, value, mtime_ns)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def read(path: Path) -> dict[str, Any] | None:
    """A record's fields, or None if it is not there. Raises IntegrityError if it is not one of ours."""
    found = read_dated(path)
    return None if found is None else found[0]


def read_dated(path: Path) -> tuple[dict[str, Any], int] | None:
    """A record's fields with the mtime_ns of that very file, which may be replaced meanwhile. Otherwise as `read`."""
    try:
        # Not to wait for whoever put a FIFO there, nor to follow where a link leads.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            mtime_ns = status.st_mtime_ns
            value = json.loads(file.read()) if stat.S_ISREG(status.st_mode) else None
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, OSError) as error:
        msg = f"{path} cannot be read as a record of dispatch-agent: {error}"
        raise IntegrityError(msg) from error
    if not isinstance(value, dict) or value.get("format") != 1:
        msg = f"{path} is no record that this version of dispatch-agent knows (expected format 1)"
        raise IntegrityError(msg)
    return value, mtime_ns


def sync(folder: Path) -> None:
    """Make a folder's entries durable, where the filesystem can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:  # some network filesystems sync no folders
            raise
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> AgentError:
    """The sentence for an OSError of a write of ours."""
    hint = _HINTS.get(error.errno or 0, "")
    return AgentError(f"{path} cannot be written: {error.strerror}{'; ' if hint else ''}{hint}")


def _is_unfinished(path: Path, above: os.stat_result) -> bool:
    """Whether it is as somebody with our UID made it who was killed before it got its mode and group."""
    status = path.stat()
    if (status.st_mode, status.st_gid) == (above.st_mode, above.st_gid) or os.geteuid() not in {0, status.st_uid}:
        return False
    with os.scandir(path) as entries:
        return next(entries, None) is None


def _give(path: Path, above: os.stat_result) -> None:
    """The owner, group and mode of the folder above, as far as we may: only root may give a folder away, and others
    only to a group of theirs."""
    for owner in (above.st_uid, -1):
        with suppress(PermissionError):
            os.chown(path, owner, above.st_gid)
            break
    if path.stat().st_mode != above.st_mode:  # some filesystems give all the same mode, and let nobody change it
        path.chmod(above.st_mode & 0o7777)


def _write(path: Path, value: dict[str, Any], mtime_ns: int | None = None) -> Path:
    temporary = path.parent / f".tmp-{secrets.token_hex(8)}"
    data = json.dumps({"format": 1, **value}, sort_keys=True, separators=(",", ":")).encode("ascii")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.fchmod(descriptor, 0o644)  # readable for a publisher with another UID, whatever our umask
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        if mtime_ns is not None:
            os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        os.fsync(descriptor)
    except BaseException:
        temporary.unlink()
        raise
    finally:
        os.close(descriptor)
    return temporary
