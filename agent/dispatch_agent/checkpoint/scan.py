"""Looking at the disk: what stands in an execution's folder right now.

Never follows a link, never raises because something vanished or may not be read: a trainer writes, renames and deletes
at the same moment. What one look says is not yet true of any one instant; `differences` of two looks tells.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from dispatch_agent.checkpoint import folder as own
from dispatch_agent.checkpoint.names import shown
from dispatch_agent.checkpoint.save import Entry, Kind, Snapshot, Survey
from dispatch_agent.errors import IntegrityError, SourceChanged

_TEXT_BYTES = 4096  # a tracker file holds one name; anything greater is no tracker
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
_KINDS: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}


def survey(folder: Path) -> Survey:
    """Everything directly under `folder`, looked at whole. A missing folder is an empty survey.

    A save that vanishes half-way is left out. What may not be read is in `unreadable` by its raw name, the folder
    itself under the empty name.
    """
    saves: list[Snapshot] = []
    texts: dict[bytes, tuple[bytes, int]] = {}
    links: dict[bytes, bytes] = {}
    link_times: dict[bytes, int] = {}
    unreadable: dict[bytes, str] = {}
    base = os.fsencode(folder)
    try:
        names = sorted(os.listdir(base))
    except OSError as error:
        if error.errno not in _GONE:
            unreadable[b""] = _reason(error)
        return Survey((), unreadable=unreadable)
    for name in names:
        if name == own.NAME:
            continue
        try:
            root = _lstat(os.path.join(base, name))
            if root.kind == "link":
                links[name] = root.target
                link_times[name] = root.mtime_ns
                continue
            saves.append(_whole(base, name, root))
            if root.kind == "file" and root.size <= _TEXT_BYTES:
                texts[name] = (_text(os.path.join(base, name)), root.mtime_ns)
        except OSError as error:
            if error.errno not in _GONE:
                unreadable[name] = _reason(error)
    markers = {}
    for save in saves:
        try:
            marker = own.marker_of(folder, save.name)
        except IntegrityError as error:  # of this save alone: the others must not wait for its repair
            unreadable[save.name] = str(error)
            continue
        if marker is not None:
            markers[save.name] = marker
    return Survey(tuple(saves), markers, texts, links, unreadable, link_times)


def snapshot(folder: Path, name: bytes) -> Snapshot:
    """One save, looked at now.

    Raises SourceChanged if it vanished (or became a link), IntegrityError if something in it may not be read.
    """
    base = os.fsencode(folder)
    try:
        root = _lstat(os.path.join(base, name))
        if root.kind != "link":
            return _whole(base, name, root)
    except OSError as error:
        if error.errno not in _GONE:
            msg = f"{shown(name)} cannot be looked at: {_reason(error)}"
            raise IntegrityError(msg) from error
        msg = f"{shown(name)} vanished from {folder}"
        raise SourceChanged(msg) from error
    msg = f"{shown(name)} in {folder} is a link to {shown(root.target)}, not a save"
    raise SourceChanged(msg)


def differences(a: Snapshot, b: Snapshot) -> str:
    """The first difference between two looks of one running publisher, in words; empty if there is none.

    Sees ctime and inode too, so it notices a file rewritten with its old size and mtime; across a remount it would
    see change where there is none (generations.fingerprint is for that).
    """
    if a is b or (a.root == b.root and a.entries == b.entries):
        return ""
    if said := _changed(a.name, a.root, b.root):
        return said
    before = {entry.path: entry for entry in a.entries}
    after = {entry.path: entry for entry in b.entries}
    for path in sorted(before.keys() | after.keys()):
        place = a.name + b"/" + path
        if path not in after:
            return f"{shown(place)} vanished"
        if path not in before:
            return f"{shown(place)} appeared"
        if said := _changed(place, before[path], after[path]):
            return said
    return ""


def _changed(place: bytes, a: Entry, b: Entry) -> str:
    for what, old, new in (
        ("kind", a.kind, b.kind),
        ("size", a.size, b.size),
        ("target", shown(a.target), shown(b.target)),
        ("mtime", a.mtime_ns, b.mtime_ns),
        ("inode", a.inode, b.inode),
        ("mode", oct(a.mode), oct(b.mode)),
        ("ctime", a.ctime_ns, b.ctime_ns),
    ):
        if old != new:
            return f"{what} of {shown(place)} was {old} and is {new}"
    return ""


def _whole(base: bytes, name: bytes, root: Entry) -> Snapshot:
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
        if inner and error.errno in _GONE:
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
                    if error.errno in _GONE or error.errno == errno.EINVAL:  # EINVAL: no link any more
                        continue
                    raise
                entries.append(_entry(prefix + name, status, target))
    finally:
        os.close(descriptor)
    return entries


def _lstat(path: bytes) -> Entry:
    status = os.lstat(path)
    return _entry(b"", status, os.readlink(path) if stat.S_ISLNK(status.st_mode) else b"")


def _entry(path: bytes, status: os.stat_result, target: bytes) -> Entry:
    mode = status.st_mode
    kind = _KINDS.get(stat.S_IFMT(mode), "other")
    return Entry(
        path, kind, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, stat.S_IMODE(mode), target
    )


def _text(path: bytes) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.read(descriptor, _TEXT_BYTES)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    where = f" at {shown(os.fsencode(error.filename))}" if isinstance(error.filename, str | bytes) else ""
    hint = "; run the publisher with the trainer's UID" if error.errno in {errno.EACCES, errno.EPERM} else ""
    return f"{error.strerror}{where}{hint}"
