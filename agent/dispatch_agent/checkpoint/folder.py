"""An execution's folder: whose it is, the durable order of its saves, and the lock of its publishers.

    exec/<attempt>/.dispatch/execution.json    job, epoch, attempt, folder id; written once
                             order/<n>         the n-th generation that was complete; written once
                             already/<n>.<store>  the n-th is what was published before it; written once
                             complete/<save>   our marker; replaced
                             sequence/<n>      numbers that markers have used
                             lock.<store>      held by the publisher that does the work

Order rests on link(2) alone. The lock only keeps two publishers from doing the same work.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

from dispatch_agent.checkpoint import records
from dispatch_agent.checkpoint.generations import Candidate, Fingerprint, Place, fingerprint, in_order, is_new
from dispatch_agent.checkpoint.marks import mark_complete, marker_of, markers, spoken
from dispatch_agent.checkpoint.names import decode_name, encode
from dispatch_agent.checkpoint.records import NAME
from dispatch_agent.checkpoint.save import Signal
from dispatch_agent.errors import Conflict, EpochCollision, IntegrityError

__all__ = [
    "NAME",
    "Candidate",
    "Execution",
    "Fingerprint",
    "FolderLock",
    "Place",
    "already",
    "ensure",
    "fingerprint",
    "in_order",
    "is_new",
    "lock",
    "mark_complete",
    "marker_of",
    "markers",
    "note_already",
    "place",
    "places",
    "read_execution",
    "spoken",
]


@dataclass(frozen=True, slots=True)
class Execution:
    """Whose folder this is: as its first publisher wrote it. `folder_id` is this folder's alone, for ever."""

    job: str
    epoch: int
    attempt: str
    folder_id: str


def ensure(folder: Path, *, job: str, epoch: int, attempt: str, folder_id: str) -> Execution:
    """The folder's execution; written with these values if it has none (the folder itself is made too, if missing).

    An existing record's folder id wins. Raises EpochCollision if it has this epoch under another attempt, Conflict if
    it is of another epoch or job, AgentError if nothing can be written, IntegrityError if the record is damaged.
    """
    wanted = Execution(job, epoch, attempt, folder_id)
    found = read_execution(folder)
    if found is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise records.cannot_write(folder, error) from error
        records.make_folder(records.own(folder))
        # An epoch may not fit a JSON number.
        value = {"job": job, "epoch": str(epoch), "attempt": attempt, "folder_id": folder_id}
        if records.create(records.own(folder, "execution.json"), value):
            return wanted
        found = read_execution(folder)
    if found is None:
        msg = f"{records.own(folder, 'execution.json')} was removed while it was read: nothing but dispatch-agent may"
        raise IntegrityError(msg)
    if found.epoch == epoch and found.attempt != attempt:
        msg = (
            f"{folder} belongs to attempt {found.attempt!r} of epoch {epoch}, and this is attempt {attempt!r} of the "
            "same epoch: two executions were given one epoch"
        )
        raise EpochCollision(msg)
    # A command run by hand beside the sidecar may not know the job; it says nothing against it then.
    other_job = bool(job and found.job and job != found.job)
    if other_job or (found.epoch, found.attempt) != (epoch, attempt):
        msg = (
            f"{folder} belongs to job {found.job!r}, epoch {found.epoch}, attempt {found.attempt!r}, and this is job "
            f"{job!r}, epoch {epoch}, attempt {attempt!r}: give every execution its own exec/<attempt> folder"
        )
        raise Conflict(msg)
    return found


def read_execution(folder: Path) -> Execution | None:
    """Whose folder it is; None if it has no record. Raises IntegrityError if the record is damaged."""
    path = records.own(folder, "execution.json")
    value = records.read(path)
    if value is None:
        return None
    fields = [value.get(key) for key in ("job", "epoch", "attempt", "folder_id")]
    if not all(isinstance(field, str) for field in fields) or not re.fullmatch(r"[0-9]{1,20}", str(fields[1])):
        msg = f"{path} is damaged: job, epoch, attempt and folder_id are {fields!r}"
        raise IntegrityError(msg)
    return Execution(str(fields[0]), int(str(fields[1])), str(fields[2]), str(fields[3]))


def places(folder: Path, known: Sequence[Place] = ()) -> list[Place]:
    """All places of the folder, the n-th at index n-1. Records never change, so those in `known` are not read again.

    Raises IntegrityError if one is damaged or missing in the middle.
    """
    where = records.own(folder, "order")
    try:
        names = sorted((name for name in os.listdir(where) if name.isdecimal()), key=int)
    except FileNotFoundError:
        return []
    found = list(known)
    for number, name in enumerate(names, 1):
        if int(name) != number:
            msg = f"{where} has no record {number} but a record {int(name)}: nothing but dispatch-agent may remove any"
            raise IntegrityError(msg)
        if number > len(found):
            found.append(_read_place(where / name, number))
    return found


def place(folder: Path, candidates: Sequence[Candidate]) -> list[Place]:
    """Give each complete save its durable place, and return them in the order of `candidates`.

    New generations get the next places, in the order of `in_order`; one that is not new keeps the place it has. Two
    publishers at once agree: of two that write the same place one wins and the other looks again. Raises AgentError
    if nothing can be written, IntegrityError if the order is damaged.
    """
    got: dict[bytes, Place] = {}
    where = records.own(folder, "order")
    if candidates:
        records.make_folder(where)
    known: list[Place] = places(folder)
    for name, signal, content in in_order(candidates):
        while name not in got:
            same_name = [seen for seen in known if seen.name == name]
            if not is_new(signal, content, same_name):
                got[name] = next((p for p in same_name if signal.mark and p.signal.mark == signal.mark), same_name[-1])
                continue
            mine = Place(len(known) + 1, name, signal, content)
            if records.create(where / f"{mine.number:06d}", _fields(mine)):
                got[name] = mine
            known = places(folder, known)
    return [got[name] for name, _, _ in candidates]


def note_already(folder: Path, number: int, store: str) -> None:
    """Remember that the place holds what its name's last generation at `store` held: nothing is to be published, and a
    later publisher need not read it to find that out. Raises AgentError if nothing can be written."""
    where = records.own(folder, "already")
    records.make_folder(where)
    records.create(where / _already(number, store), {"store": store})


def already(folder: Path, store: str) -> set[int]:
    """The places that `note_already` was told of for this store. Another store may lack that last generation."""
    try:
        names = os.listdir(records.own(folder, "already"))
    except (FileNotFoundError, NotADirectoryError):
        return set()
    numbers = {int(name.partition(".")[0]) for name in names if name.partition(".")[0].isdecimal()}
    return {number for number in numbers if _already(number, store) in names}


def _already(number: int, store: str) -> str:
    return f"{number:06d}.{_of_store(store)}"


def _of_store(store: str) -> str:
    return hashlib.sha256(os.fsencode(store)).hexdigest()[:12]


def lock(folder: Path, store: str) -> FolderLock:
    """The lock of the folder's publishers to one store, not yet taken: two stores are two works."""
    return FolderLock(records.own(folder, f"lock.{_of_store(store)}"))


@final
class FolderLock:
    """flock on `.dispatch/lock.<store>`: the kernel gives it back when its holder dies, however it dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    @property
    def held(self) -> bool:
        """Whether we hold it."""
        return self._descriptor >= 0

    def acquire(self) -> bool:
        """Try once, without waiting; whether we hold it now. Raises AgentError if the lock cannot be opened.

        True on a filesystem that has no flock: safety never rests on it.
        """
        if self.held:
            return True
        records.make_folder(self._path.parent)
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise records.cannot_write(self._path, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
                os.close(descriptor)
                return False
            if error.errno not in {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}:
                os.close(descriptor)
                raise records.cannot_write(self._path, error) from error
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Give it back, if held."""
        if self.held:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _fields(mine: Place) -> dict[str, Any]:
    signal = mine.signal
    return {
        "name": encode(mine.name),
        "rule": signal.rule,
        "mark": signal.mark,
        "newest_ns": signal.newest_ns,
        "sequence": signal.sequence,
        "token": signal.token,
        "fingerprint": list(mine.fingerprint.parts),
    }


def _read_place(path: Path, number: int) -> Place:
    value = records.read(path)
    if value is None:
        msg = f"{path} was removed while it was read: nothing but dispatch-agent may"
        raise IntegrityError(msg)
    try:
        name = decode_name(value["name"])
        signal = Signal(value["rule"], value["mark"], value["newest_ns"], value["sequence"], value["token"])
        parts = tuple(value["fingerprint"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        msg = f"{path} is damaged: {error}"
        raise IntegrityError(msg) from error
    texts = (signal.rule, signal.mark, signal.token, *parts)
    numbers = (signal.newest_ns, 0 if signal.sequence is None else signal.sequence)
    if not all(isinstance(text, str) for text in texts) or not all(type(item) is int for item in numbers):
        msg = f"{path} is damaged: a field is of another kind"
        raise IntegrityError(msg)
    return Place(number, name, signal, Fingerprint(parts))
