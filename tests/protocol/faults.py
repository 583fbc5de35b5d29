"""A store that misbehaves at a chosen call, a clock that only tests move, and the hooks that both are driven by.

`FaultyStore` stands before any store and hands every call to a hook, which may fail before it, let it through, fail
after it (the answer is lost), kill the process, or stop it. Calls are numbered from 1 in the order in which they come;
what the probe does on its scratch keys is not counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dispatch_agent.errors import StoreUnavailable
from dispatch_agent.publish.watcher import Abort
from dispatch_agent.store.base import ConditionFailed, Document, LatestLink, Limits, Source, Store, Stored, Uploaded

WRITES = frozenset({"create", "replace", "put", "upload", "symlink", "delete"})


@dataclass(frozen=True)
class Call:
    """One call of the store. A piece of an upload's source is a call of its own, `piece`, inside that `upload`."""

    number: int
    method: str
    key: str

    def __str__(self) -> str:
        return f"{self.number}:{self.method}:{self.key}"


Do = Callable[[], Any]
Hook = Callable[[Call, Do], Any]
"""Stands around one call: `hook(call, do)` returns what the caller gets, and calls `do` if the store is to."""


def through(_: Call, do: Do) -> Any:
    """Nothing happens besides."""
    return do()


class FaultyStore:
    """A Store whose every call goes through a hook, and which remembers them."""

    def __init__(self, inner: Store, hook: Hook = through) -> None:
        self.url = inner.url
        self.limits: Limits = inner.limits
        self.calls: list[Call] = []
        self.hook = hook
        self.inner = inner
        self._lock = threading.Lock()

    def create(self, key: str, data: bytes) -> str:
        return self._around("create", key, lambda: self.inner.create(key, data))

    def replace(self, key: str, data: bytes, version: str) -> str:
        return self._around("replace", key, lambda: self.inner.replace(key, data, version))

    def put(self, key: str, data: bytes) -> None:
        self._around("put", key, lambda: self.inner.put(key, data))

    def read(self, key: str) -> Document:
        return self._around("read", key, lambda: self.inner.read(key))

    def upload(self, key: str, source: Source) -> Uploaded:
        watched = _WatchedSource(source, lambda do: self._around("piece", key, do))
        return self._around("upload", key, lambda: self.inner.upload(key, watched))

    def stream(self, key: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        yield from self._around("stream", key, lambda: list(self.inner.stream(key, chunk)))

    def list(self, prefix: str) -> Iterator[Stored]:
        yield from self._around("list", prefix, lambda: [*self.inner.list(prefix)])

    def folders(self, prefix: str) -> Sequence[str]:
        return self._around("folders", prefix, lambda: self.inner.folders(prefix))

    def delete(self, key: str) -> None:
        self._around("delete", key, lambda: self.inner.delete(key))

    def close(self) -> None:
        self.inner.close()

    def _around(self, method: str, key: str, do: Do) -> Any:
        if key.startswith("probe/"):
            return do()
        with self._lock:
            call = Call(len(self.calls) + 1, method, key)
            self.calls.append(call)
        return self.hook(call, do)


class FaultyFolder(FaultyStore):
    """A FaultyStore before a folder, which also has a `latest` link for people."""

    def symlink(self, name: str, target_key: str) -> None:
        inner = self.inner
        assert isinstance(inner, LatestLink)
        self._around("symlink", name, lambda: inner.symlink(name, target_key))


def faulty(inner: Store, hook: Hook = through) -> FaultyStore:
    """`inner` behind a hook, as much of a store as `inner` is."""
    return FaultyFolder(inner, hook) if isinstance(inner, LatestLink) else FaultyStore(inner, hook)


class _WatchedSource:
    def __init__(self, source: Source, around: Callable[[Do], Any]) -> None:
        self._source = source
        self._around = around

    @property
    def size(self) -> int:
        return self._source.size

    def fileno(self) -> int:
        return self._source.fileno()

    def read(self, size: int) -> bytes:
        return self._around(lambda: self._source.read(size))

    def tick(self, size: int) -> None:
        self._around(lambda: self._source.tick(size))


# --- what a store may do at call k ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class At:
    """Which calls a fault happens at: number k and the `more` after it."""

    k: int
    more: int = 0

    def __contains__(self, call: Call) -> bool:
        return self.k <= call.number <= self.k + self.more


def fails_before(at: At) -> Hook:
    """The request never reaches the store."""

    def hook(call: Call, do: Do) -> Any:
        if call in at:
            raise _lost(call)
        return do()

    return hook


def fails_after(at: At) -> Hook:
    """The store does it and the answer is lost."""

    def hook(call: Call, do: Do) -> Any:
        answer = do()
        if call in at:
            raise _lost(call)
        return answer

    return hook


def sent_twice(at: At) -> Hook:
    """A library sends the request again whose answer was lost: a condition then fails because of one's own write."""

    def hook(call: Call, do: Do) -> Any:
        answer = do()
        if call in at and call.method in {"create", "replace"}:
            raise ConditionFailed(call.key)
        return answer

    return hook


def refuses(at: At) -> Hook:
    """A conditional write is refused although nothing stands in its way, and nothing is stored (409, 412)."""

    def hook(call: Call, do: Do) -> Any:
        if call in at and call.method in {"create", "replace"}:
            raise ConditionFailed(call.key)
        return do()

    return hook


def slow(at: At, clock: FakeClock, seconds: float) -> Hook:
    """The call takes long, and then its answer is lost: a timeout."""

    def hook(call: Call, do: Do) -> Any:
        answer = do()
        if call in at:
            clock.now += seconds
            raise _lost(call)
        return answer

    return hook


def lands_late(at: At) -> Hook:
    """A write is answered by an error and reaches the store only two calls later, when nobody waits for it any more."""
    held: list[tuple[int, Do]] = []

    def hook(call: Call, do: Do) -> Any:
        if held and call.number > held[0][0] + 1:
            with contextlib.suppress(ConditionFailed):  # it was sent again meanwhile
                held.pop(0)[1]()
        if call in at and call.method in {"create", "replace"}:
            held.append((call.number, do))
            raise _lost(call)
        return do()

    return hook


def unreachable_from(k: int, *, last: str = "lost") -> Hook:
    """From call k on nothing answers; call k itself is `lost` (done, unanswered) or `never` done."""

    def hook(call: Call, do: Do) -> Any:
        if call.number < k:
            return do()
        if call.number == k and last == "lost":
            do()
        raise _lost(call)

    return hook


def signals_itself(number: signal.Signals, when: str, is_it: Callable[[Call], bool]) -> Hook:
    """The process sends itself a signal `before` or `after` a call: SIGKILL to die there, SIGSTOP to freeze there."""

    def hook(call: Call, do: Do) -> Any:
        it = is_it(call)
        if it and when == "before":
            os.kill(os.getpid(), number)
        try:
            return do()
        finally:
            if it and when == "after":
                os.kill(os.getpid(), number)

    return hook


def _lost(call: Call) -> StoreUnavailable:
    return StoreUnavailable(f"the answer to {call} was lost (by the test)")


# --- time and records of what happened --------------------------------------------------------------------------------


class TimeIsUp(Abort):
    """More virtual time has passed than the test allows: what a second SIGTERM does, or a drain that takes too long."""


@dataclass
class FakeClock:
    """Time that passes only while somebody waits; `limit` seconds of it at most."""

    now: float = 1000.0
    limit: float = 100_000.0
    _walls: int = field(default=0)

    def wall(self) -> str:
        self._walls += 1
        return f"2026-01-01T00:00:{self.now:013.6f}+{self._walls}"

    def monotonic(self) -> float:
        return self.now

    def wait(self, event: threading.Event, seconds: float) -> bool:
        if not event.is_set():
            self.now += max(0.001, seconds)
        if self.now > self.limit:
            raise TimeIsUp
        return event.is_set()


def everything_in(store: Store) -> dict[str, str]:
    """Every key of a store and the digest of its bytes."""
    return {item.key: hashlib.sha256(b"".join(store.stream(item.key))).hexdigest() for item in store.list("")}
