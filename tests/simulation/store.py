"""A simulated store: what stands in it, and the handle through which one process sees it, with all that may go wrong.

A call of a handle is one point of the scheduler. Faults of a call:

- `before`: it never reaches the store; `denied`: the store refuses it; `after`: it is done, and the answer is lost;
- `refused`: a conditional write is answered 409 or 412, nothing stored; `twice`: stored and answered 412,
  because a library sent it again; `late`: answered by an error, and it lands whenever it lands; `echo`: a copy of the
  request lands later, too;
- `forgets`: data is taken and lost; `corrupts`: other bytes are stored, where the store verifies nothing;
- `crash before`, `crash after`, `crash late`: the process dies there.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tests.simulation.plans import Meets, Stall
from tests.simulation.scheduler import Actor, Crash, Scheduler

from dispatch_agent.errors import StoreDenied, StoreUnavailable
from dispatch_agent.store.base import ConditionFailed, Document, KeyMissing, Limits, Source, Stored, Uploaded

READS = ("before", "crash before")
WRITES = ("before", "after", "late", "echo", "denied", "crash before", "crash after", "crash late")
CONDITIONAL = (*WRITES, "refused", "twice")
WEIGHT = 4
"""How much likelier a fault is at a control object, on which the protocol rests, than at data."""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Guard(Protocol):
    """What looks at every change before it is made and after it was. Raises Violation."""

    def sends(self, actor: Actor, method: str, key: str, data: bytes) -> None: ...

    def writes(self, actor: Actor, key: str, data: bytes) -> None: ...

    def written(self, key: str) -> None: ...

    def deletes(self, actor: Actor, key: str) -> None: ...


@dataclass(eq=False)
class Bucket:
    """What stands under which key. `verifies`: it rejects wrong checksums. `away`: from when to when nothing answers,
    in seconds. With `conditions` off it takes every conditional write for a plain one."""

    scheduler: Scheduler
    guard: Guard
    verifies: bool = True
    conditions: bool = True
    away: Sequence[tuple[float, float]] = ()
    stuck: Sequence[tuple[str, float, float]] = ()
    stalls: list[Stall | Meets] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)

    def put(self, actor: Actor, key: str, data: bytes) -> None:
        self.guard.writes(actor, key, data)
        self.objects[key] = data
        self.guard.written(key)

    def create(self, actor: Actor, key: str, data: bytes) -> None:
        if self.conditions and key in self.objects:
            raise ConditionFailed(key)
        self.put(actor, key, data)

    def replace(self, actor: Actor, key: str, data: bytes, version: str) -> None:
        if self.conditions and digest(self.objects.get(key, b"")) != version:
            raise ConditionFailed(key)
        self.put(actor, key, data)

    def delete(self, actor: Actor, key: str) -> None:
        if key in self.objects:
            self.guard.deletes(actor, key)
            del self.objects[key]


class Handle:
    """One process's connection: a Store."""

    limits = Limits(key_bytes=1024, component_bytes=255)

    def __init__(self, bucket: Bucket, actor: Actor) -> None:
        self.url = "simulated://store"
        self.bucket = bucket
        self.actor = actor

    def create(self, key: str, data: bytes) -> str:
        self._write("create", key, data, lambda: self.bucket.create(self.actor, key, data), CONDITIONAL)
        return digest(data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        self._write("replace", key, data, lambda: self.bucket.replace(self.actor, key, data, version), CONDITIONAL)
        return digest(data)

    def put(self, key: str, data: bytes) -> None:
        self._write("put", key, data, lambda: self.bucket.put(self.actor, key, data), WRITES)

    def read(self, key: str) -> Document:
        self._look("read", key)
        if key not in self.bucket.objects:
            self._say("read", key, "nothing")
            raise KeyMissing(key)
        self._say("read", key)
        data = self.bucket.objects[key]
        return Document(data, digest(data))

    def upload(self, key: str, source: Source) -> Uploaded:
        self._point()
        half = (source.size + 1) // 2 or 1
        pieces = []
        while piece := source.read(half):
            pieces.append(piece)
            self._point()
        data = b"".join(pieces)
        kinds = (*WRITES, "forgets") if self.bucket.verifies else (*WRITES, "forgets", "corrupts")
        self._write("upload", key, data, lambda: self.bucket.put(self.actor, key, data), kinds)
        return Uploaded(len(data), digest(data), verified=self.bucket.verifies)

    def stream(self, key: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        self._look("stream", key)
        if key not in self.bucket.objects:
            self._say("stream", key, "nothing")
            raise KeyMissing(key)
        self._say("stream", key)
        data = self.bucket.objects[key]
        for start in range(0, len(data), chunk):
            yield data[start : start + chunk]

    def list(self, prefix: str) -> Iterator[Stored]:
        self._look("list", prefix)
        under = prefix + "/" if prefix else ""
        found = [Stored(key, len(data)) for key, data in self.bucket.objects.items() if key.startswith(under)]
        self._say("list", prefix, f"{len(found)} keys")
        yield from found

    def folders(self, prefix: str) -> Sequence[str]:
        self._look("folders", prefix)
        under = prefix + "/"
        rest = [key[len(under) :].split("/") for key in self.bucket.objects if key.startswith(under)]
        found = sorted({parts[0] for parts in rest if len(parts) > 1})
        self._say("folders", prefix, " ".join(name.lstrip("0") for name in found) or "none")
        return found

    def delete(self, key: str) -> None:
        self._write("delete", key, b"", lambda: self.bucket.delete(self.actor, key), WRITES)

    def close(self) -> None:
        """Nothing to give back."""

    def _say(self, method: str, key: str, answer: str = "") -> None:
        self.bucket.scheduler.say(self.actor.name, f"{method} {key}" + (f" -> {answer}" if answer else ""))

    def _point(self, faults: Sequence[str] = (), weight: int = 1, planned: Meets | None = None) -> str:
        if self.actor.dead:
            raise Crash
        fault = self.bucket.scheduler.point(self.actor, faults, weight)
        if planned is not None:
            fault = planned.fault
        if fault == "crash before":
            raise self._crash()
        return fault

    def _crash(self) -> Crash:
        self.actor.dead = True
        self.bucket.scheduler.say(self.actor.name, "DIES")
        return Crash()

    def _answers(self, method: str, key: str, fault: str) -> None:
        now = self.bucket.scheduler.now
        writes = method in ("create", "replace", "put")
        stuck = writes and any(key == where and since <= now < until for where, since, until in self.bucket.stuck)
        if fault == "before" or stuck or any(start <= now < end for start, end in self.bucket.away):
            self._say(method, key, "no answer, not done")
            msg = f"the store does not answer {method} {key}"
            raise StoreUnavailable(msg)
        if fault == "denied":
            self._say(method, key, "denied")
            msg = f"the store denies {method} {key}"
            raise StoreDenied(msg)

    def _look(self, method: str, key: str) -> None:
        self._planned(f"{method} {key}")
        self._answers(method, key, self._point(READS))

    def _write(self, method: str, key: str, data: bytes, do: Callable[[], None], faults: Sequence[str]) -> None:
        """One write. Raises ConditionFailed, StoreUnavailable, StoreDenied, Crash, Violation."""
        if key.startswith("data/") and method in ("create", "put"):
            faults = (*faults, "forgets")
        if self.actor.dead:
            raise Crash
        planned = self._planned(key)
        self.bucket.guard.sends(self.actor, method, key, data)
        fault = self._point(faults, WEIGHT if method in ("create", "replace", "put") else 1, planned)
        self._answers(method, key, fault)
        if fault in ("late", "crash late", "echo"):
            self._send_later(method, key, do, fault, planned)
        elif fault == "refused":
            self._say(method, key, "refused without a reason")
            raise ConditionFailed(key)
        elif fault == "forgets":
            self._say(method, key, "taken and lost")
            return
        elif fault == "corrupts":
            self._say(method, key, "stored as other bytes")
            self.bucket.put(self.actor, key, data[:-1] + b"?")
            return
        try:
            do()
        except ConditionFailed:
            self._say(method, key, "refused")
            raise
        self._say(method, key, {"after": "done, the answer is lost", "twice": "done, answered 412"}.get(fault, ""))
        if fault == "crash after":
            raise self._crash()
        if fault == "after":
            msg = f"the answer to {method} {key} was lost"
            raise StoreUnavailable(msg)
        if fault == "twice":
            raise ConditionFailed(key)

    def _planned(self, key: str) -> Meets | None:
        """Stand still where it is planned; the planned fault."""
        for planned in list(self.bucket.stalls):
            if planned.name == self.actor.name and key.startswith(planned.key):
                self.bucket.stalls.remove(planned)
                if isinstance(planned, Meets):
                    return planned
                scheduler = self.bucket.scheduler
                self._say("stands still before", key, f"until {planned.until:g} s")
                scheduler.wait(self.actor, threading.Event(), planned.until - scheduler.now)
        return None

    def _send_later(self, method: str, key: str, do: Callable[[], None], fault: str, planned: Meets | None) -> None:
        """Have a write, or a copy of it (`echo`), on its way. Raises StoreUnavailable, Crash."""
        late = f"write {self.actor.points} of {self.actor.name}"
        at = planned.lands if planned else None
        self.bucket.scheduler.land_later(late, lambda: self._land(late, method, key, do), at)
        self._say(method, key, f"{'a copy is' if fault == 'echo' else 'no answer,'} still on its way ({late})")
        if fault == "late":
            msg = f"no answer to {method} {key}"
            raise StoreUnavailable(msg)
        if fault == "crash late":
            raise self._crash()

    def _land(self, late: str, method: str, key: str, do: Callable[[], None]) -> None:
        try:
            do()
        except ConditionFailed:
            self.bucket.scheduler.say("network", f"{late}: {method} {key} arrives and is refused")
        else:
            self.bucket.scheduler.say("network", f"{late}: {method} {key} arrives")
