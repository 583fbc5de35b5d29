"""Looking at the disk: what stands in an execution's folder right now.

Never follows a link, never raises because something vanished or may not be read: a trainer writes, renames and deletes
at the same moment. What one look says is not yet true of any one instant; `differences` of two looks tells.
"""

from __future__ import annotations

import os
from pathlib import Path

from dispatch_agent.checkpoint import folder as own
from dispatch_agent.checkpoint.names import shown
from dispatch_agent.checkpoint.save import Entry, Snapshot, Survey
from dispatch_agent.checkpoint.walk import GONE, look_at, reason, snapshot, whole
from dispatch_agent.errors import IntegrityError

__all__ = ["differences", "snapshot", "survey"]

LOOKS = 5  # more words than that in a row, and the last look has to do
_TEXT_BYTES = 4096  # a tracker file holds one name; anything greater is no tracker


def survey(folder: Path) -> Survey:
    """Everything directly under `folder`, looked at whole. A missing folder is an empty survey.

    A save that vanishes half-way is left out. What may not be read is in `unreadable` by its raw name, the folder
    itself under the empty name. It is as of one moment in this alone: no save was said to be complete meanwhile, so
    that of two words the later one is never seen without the earlier.
    """
    for _ in range(LOOKS):
        said = own.spoken(folder)
        found = _survey(folder)
        if own.spoken(folder) == said:
            break
    return found


def _survey(folder: Path) -> Survey:
    saves: list[Snapshot] = []
    texts: dict[bytes, tuple[bytes, int]] = {}
    links: dict[bytes, bytes] = {}
    link_times: dict[bytes, int] = {}
    unreadable: dict[bytes, str] = {}
    base = os.fsencode(folder)
    try:
        names = sorted(os.listdir(base))
    except OSError as error:
        if error.errno not in GONE:
            unreadable[b""] = reason(error)
        return Survey((), unreadable=unreadable)
    for name in names:
        if name == own.NAME:
            continue
        try:
            root = look_at(os.path.join(base, name))
            if root.kind == "link":
                links[name] = root.target
                link_times[name] = root.mtime_ns
                continue
            saves.append(whole(base, name, root))
            if root.kind == "file" and root.size <= _TEXT_BYTES:
                texts[name] = (_text(os.path.join(base, name)), root.mtime_ns)
        except OSError as error:
            if error.errno not in GONE:
                unreadable[name] = reason(error)
    markers = {}
    for name in [*(save.name for save in saves), *(name for name in unreadable if name)]:
        try:
            marker = own.marker_of(folder, name)
        except IntegrityError as error:  # of this save alone: the others must not wait for its repair
            unreadable[name] = str(error)
            continue
        if marker is not None:
            markers[name] = marker
    return Survey(tuple(saves), markers, texts, links, unreadable, link_times)


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


def _text(path: bytes) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.read(descriptor, _TEXT_BYTES)
    finally:
        os.close(descriptor)
