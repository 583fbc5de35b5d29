"""Looking at one save: every entry below it, at one moment, by descriptor and without following a link."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from dispatch_agent.checkpoint.names import shown
from dispatch_agent.checkpoint.save import Entry, Kind, Snapshot
from dispatch_agent.errors import IntegrityError, SourceChanged

GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
_KINDS: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}


def snapshot(folder: Path, name: bytes) -> Snapshot:
    """One save, looked at now.

    Raises SourceChanged if it vanished (or became a link), IntegrityError if something in it may not be read.
    """
    base = os.fsencode(folder)
    try:
        root = look_at(os.path.join(base, name))
        if root.kind != "link":
            return whole(base, name, root)
    except OSError as error:
        if error.errno not in GONE:
            msg = f"{shown(name)} cannot be looked at: {reason(error)}"
            raise IntegrityError(msg) from error
        msg = f"{shown(name)} vanished from {folder}"
        raise SourceChanged(msg) from error
    msg = f"{shown(name)} in {folder} is a link to {shown(root.target)}, not a save"
    raise SourceChanged(msg)


def whole(base: bytes, name: bytes, root: Entry) -> Snapshot:
    """The save under `root`, or an OSError of the kind that says it is gone or unreadable."""
    if root.kind != "folder":
        return Snapshot(name, root, ())
    top = os.path.join(base, name)
    entries: list[Entry] = []
    pending = [b""]
    while pending:
        found = _listing(top, pending.pop())
        entries += found
        pending += [entry.path for entry in found if entry.kind == "folder"]
    # A folder renamed away and made anew under our feet would give a mix of two saves.
    if os.lstat(top).st_ino != root.inode:
        raise OSError(errno.ESTALE, "replaced by another", top)
    entries.sort(key=lambda entry: entry.path)
    return Snapshot(name, root, tuple(entries))


def _listing(top: bytes, inner: bytes) -> list[Entry]:
    """The entries of one folder of a save: the one place to remember an unchanged folder, should looks get dear."""
    prefix = inner + b"/" if inner else b""
    try:
        descriptor = os.open(os.path.join(top, inner), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if inner and error.errno in GONE:
            return []  # deleted since it was listed; its parent's mtime tells the next look
        raise
    entries: list[Entry] = []
    try:
        with os.scandir(descriptor) as listing:
            for item in listing:
                name = os.fsencode(item.name)
                try:
                    status = item.stat(follow_symlinks=False)
                    target = os.readlink(name, dir_fd=descriptor) if stat.S_ISLNK(status.st_mode) else b""
                except OSError as error:
                    if error.errno in GONE or error.errno == errno.EINVAL:  # EINVAL: no link any more
                        continue
                    raise
                entries.append(_entry(prefix + name, status, target))
    finally:
        os.close(descriptor)
    return entries


def look_at(path: bytes) -> Entry:
    """One entry as lstat(2) gives it, with an empty path. Raises OSError."""
    status = os.lstat(path)
    return _entry(b"", status, os.readlink(path) if stat.S_ISLNK(status.st_mode) else b"")


def _entry(path: bytes, status: os.stat_result, target: bytes) -> Entry:
    mode = status.st_mode
    kind = _KINDS.get(stat.S_IFMT(mode), "other")
    return Entry(
        path, kind, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, stat.S_IMODE(mode), target
    )


def reason(error: OSError) -> str:
    """Why something cannot be looked at, for people."""
    where = f" at {shown(os.fsencode(error.filename))}" if isinstance(error.filename, str | bytes) else ""
    hint = "; run the publisher with the trainer's UID" if error.errno in {errno.EACCES, errno.EPERM} else ""
    return f"{error.strerror}{where}{hint}"
