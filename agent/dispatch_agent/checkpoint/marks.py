"""Our own marker: `publish complete PATH` says that a save is complete. The one signal that is right for every trainer.

A marker is never durable before the data it speaks of: after a node's power loss, a marked save is a whole save.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from dispatch_agent.checkpoint import records
from dispatch_agent.checkpoint.generations import fingerprint
from dispatch_agent.checkpoint.names import decode_name, encode, shown
from dispatch_agent.checkpoint.save import Marker
from dispatch_agent.checkpoint.walk import snapshot
from dispatch_agent.errors import IntegrityError, UsageError

_TOKEN = re.compile(r"[!-~]{0,128}")
_LONGEST = 200  # bytes of an encoded name that surely fit a file name of ours


def mark_complete(path: Path, token: str = "", *, anywhere: bool = False) -> Marker:
    """Say that the save at `path` (one file or folder directly in an execution's folder) is complete.

    An execution's folder is `…/exec/<attempt>`, or one that a publisher has claimed; with `anywhere`, any folder.

    Called after the last file is written and closed, by one process; several saves may be marked at once. Makes the
    save's data durable first. The marker holds what the save held, and its mtime is no older than any file's, so that
    neither a later deletion nor clocks that disagree deceive a publisher.

    Raises UsageError for a path that is no save, IntegrityError if data cannot be made durable, SourceChanged if it
    vanishes meanwhile, AgentError if the marker cannot be written.
    """
    if not _TOKEN.fullmatch(token):
        msg = f"token {token!r}: expected at most 128 visible ASCII characters"
        raise UsageError(msg)
    path = Path(os.path.abspath(path))  # not resolve(): it would follow the link that we refuse
    _check(path, anywhere=anywhere)
    newest = _make_durable(path)
    folder, name = path.parent, os.fsencode(path.name)
    where = records.own(folder, "complete")
    records.make_folder(where)
    sequence = _next(folder)
    mtime = max(time.time_ns(), newest)
    content = fingerprint(snapshot(folder, name)).digest
    fields = {"name": encode(name), "sequence": sequence, "token": token, "content": content}
    records.replace(where / _file_name(name), fields, mtime)
    # What the filesystem made of the time (some keep whole seconds) is what publishers will read.
    return Marker(name, sequence, (where / _file_name(name)).stat().st_mtime_ns, token, content)


def markers(folder: Path) -> dict[bytes, Marker]:
    """All markers in an execution's folder, by raw name of the save, there or not.

    Raises IntegrityError if one is not of our making.
    """
    where = records.own(folder, "complete")
    try:
        files = [name for name in os.listdir(where) if not name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found = [_read(where / file) for file in files]
    return {marker.name: marker for marker in found if marker is not None}


def spoken(folder: Path) -> object:
    """What differs once another word was given, by `mark_complete`, in an execution's folder: a marker is replaced by
    another file. Equal before and after a look: no word was given during it."""
    where = records.own(folder, "complete")
    try:
        with os.scandir(where) as entries:
            return where.stat().st_mtime_ns, sorted((entry.name, entry.inode()) for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return None


def marker_of(folder: Path, name: bytes) -> Marker | None:
    """The marker of one save, or None. Raises IntegrityError if it is not of our making or may not be read."""
    return _read(records.own(folder, "complete", _file_name(name)))


def _read(path: Path) -> Marker | None:
    found = records.read_dated(path)
    if found is None:
        return None
    value, mtime = found
    try:
        name, sequence = decode_name(value["name"]), value["sequence"]
        token, content = value["token"], value["content"]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        msg = f"{path} is no marker of dispatch-agent: {error}"
        raise IntegrityError(msg) from error
    texts = isinstance(token, str) and isinstance(content, str)
    if not texts or type(sequence) is not int or _file_name(name) != path.name:
        msg = f"{path} is no marker of dispatch-agent: sequence {sequence!r}, token {token!r}"
        raise IntegrityError(msg)
    return Marker(name, sequence, mtime, token, content)


def _file_name(name: bytes) -> str:
    encoded = encode(name)
    return encoded if len(encoded) <= _LONGEST else "%x-" + hashlib.sha256(name).hexdigest()


def _check(path: Path, *, anywhere: bool) -> None:
    try:
        kind = stat.S_IFMT(path.lstat().st_mode)
    except OSError as error:
        msg = f"{path} cannot be marked complete: {error.strerror}"
        raise UsageError(msg) from error
    why = ""
    if kind == stat.S_IFLNK:
        why = "is a link: mark what it points to"
    elif kind not in {stat.S_IFREG, stat.S_IFDIR}:
        why = "is neither a file nor a folder"
    elif records.NAME in map(os.fsencode, path.parts):
        why = "is dispatch-agent's own"
    elif records.own(path).exists():
        why = "is an execution's folder: mark one save in it"
    else:
        # A record of ours further up means that path is a part of a save, and we would leave our records inside it.
        for above in path.parents[1:]:
            if records.own(above).exists() and not records.own(path.parent).exists():
                why = (
                    f"lies inside the save {above / path.relative_to(above).parts[0]}: mark that, or remove "
                    f"{records.own(above)} if {above} is no execution's folder"
                )
                break
        else:
            if not (
                anywhere or path.parent.parent.name == "exec" or records.own(path.parent, "execution.json").exists()
            ):
                why = (
                    f"is not directly in an execution's folder: {path.parent} is neither ROOT/exec/<attempt> nor a "
                    f"folder that a publish watch has"
                )
    if why:
        msg = f"{path} cannot be marked complete: it {why}"
        raise UsageError(msg)


def _make_durable(path: Path) -> int:
    """fsync what the save consists of; the greatest mtime_ns in it.

    Not sync(2) or syncfs(2): they would wait for everything that anybody wrote to the node or the volume.
    """
    newest = path.lstat().st_mtime_ns
    for part in _parts(path):
        try:
            status = part.lstat()
            newest = max(newest, status.st_mtime_ns)
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                continue
            descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
                continue  # a filesystem that syncs no folders
            hint = f" (we are UID {os.geteuid()}: run as the UID that wrote it)" if error.errno == errno.EACCES else ""
            msg = (
                f"{shown(os.fsencode(part))} cannot be made durable, so its save is not marked: {error.strerror}{hint}"
            )
            raise IntegrityError(msg) from error
    records.sync(path.parent)
    return newest


def _parts(path: Path) -> Iterator[Path]:
    if path.is_dir():
        for top, _folders, files in os.walk(path):
            for file in files:
                yield Path(top, file)
            yield Path(top)
    else:
        yield path


def _take(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _next(folder: Path) -> int:
    """The next sequence number: the first whose empty file we can create. They stay, so none is given twice."""
    where = records.own(folder, "sequence")
    records.make_folder(where)
    try:
        number = max((int(name) for name in os.listdir(where) if name.isdecimal()), default=0) + 1
        while not _take(where / f"{number:06d}"):
            number += 1
        return number
    except OSError as error:
        raise records.cannot_write(where, error) from error
