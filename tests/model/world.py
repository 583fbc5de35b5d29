"""What a destination and a volume hold, as values, and what one request makes of them.

`Objects` maps keys to bytes and never changes; a request gives an answer and other objects. The volumes of the writers
are in the same mapping, below `local/`: they lose no answers, but a crash leaves them as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dispatch_agent.errors import StoreUnavailable
from dispatch_agent.store.base import ConditionFailed, Document, KeyMissing, Stored

LOCAL = "local/"

Objects = Mapping[str, bytes]
Op = Literal["create", "replace", "put", "delete", "read", "list", "folders", "dump", "wait"]
CONDITIONAL = frozenset({"create", "replace"})
WRITES = frozenset({"create", "replace", "put", "delete"})


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Only a volume knows `dump`, a listing with contents, and `wait`: a listing that is answered as soon
    as it has more than `version` keys."""

    op: Op
    key: str
    data: bytes = b""
    version: str = ""

    @property
    def writes(self) -> bool:
        return self.op in WRITES

    @property
    def local(self) -> bool:
        return self.key.startswith(LOCAL)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: `ok` with a value, or how the client raises."""

    kind: Literal["ok", "missing", "refused", "unavailable"]
    value: Any = None

    def give(self, key: str) -> Any:
        """As the Store seam says it. Raises KeyMissing, ConditionFailed, StoreUnavailable."""
        if self.kind == "missing":
            raise KeyMissing(key)
        if self.kind == "refused":
            raise ConditionFailed(key)
        if self.kind == "unavailable":
            msg = f"{key}: no answer"
            raise StoreUnavailable(msg)
        return self.value


UNAVAILABLE, REFUSED = Answer("unavailable"), Answer("refused")


def apply(objects: Objects, request: Request, *, weak: bool = False) -> tuple[Answer, Objects]:
    """What the destination answers and holds afterwards. `weak`: it accepts conditions and ignores
    them; a volume never does."""
    key, there = request.key, objects.get(request.key)
    if not request.writes:
        return _shown(objects, request), objects
    if request.op == "delete":
        return Answer("ok"), {k: v for k, v in objects.items() if k != key}
    exists = request.op == "create" and there is not None
    differs = request.op == "replace" and (there is None or version(there) != request.version)
    if (exists or differs) and (request.local or not weak):
        return REFUSED, objects
    return Answer("ok", version(request.data)), {**objects, key: request.data}


def _shown(objects: Objects, request: Request) -> Answer:
    key = request.key
    if request.op == "read":
        return Answer("ok", Document(objects[key], version(objects[key]))) if key in objects else Answer("missing")
    under = below(objects, key)
    if request.op in {"list", "wait"}:
        return Answer("ok", tuple(Stored(k, len(objects[k])) for k in under))
    if request.op == "dump":
        return Answer("ok", tuple((k, objects[k]) for k in under))
    rests = (k[len(key) + 1 :].partition("/") for k in under)
    return Answer("ok", tuple(sorted({name for name, slash, _ in rests if slash})))


def is_ready(objects: Objects, request: Request) -> bool:
    """Whether there will be an answer now."""
    return request.op != "wait" or len(below(objects, request.key)) > int(request.version)


def below(objects: Objects, prefix: str) -> list[str]:
    """The keys under a prefix, sorted."""
    return sorted(key for key in objects if key.startswith(f"{prefix}/"))


def version(data: bytes) -> str:
    """An ETag as S3 gives it: equal bytes have equal versions, so a condition may hold that had stopped holding."""
    return hashlib.sha256(data).hexdigest()[:8]
