"""A store that misbehaves at a chosen call, a clock that only tests move, and the hooks that both are driven by.

`FaultyStore` stands before any store and hands every call to a hook, which may fail before it, let it through, fail
after it (the answer is lost), kill the process, or stop it. Calls are numbered from 1 in the order in which they come;
what the probe does on its scratch keys is not counted.

`FAULTS` is the one vocabulary of what may go wrong at a call; the tests say which commands they cross it with:

    fault           what a real store did                                      seen by the publisher as
    fails before    connection refused or closed, 409, 429, 5xx, SlowDown      StoreUnavailable, nothing done
    fails after     connection closed, 5xx, after the request was applied      StoreUnavailable, done
    sent twice      as before, and a library sent it again: 412 for one's own  ConditionFailed, done
    refused         412 though nothing stands in the way (Ceph, a race)        ConditionFailed, nothing done
    denied          ExpiredToken, AccessDenied, RequestTimeTooSkewed           StoreDenied, nothing done
    hangs before    no answer until the timeout                                time passes, then as fails before
    hangs after     no answer until the timeout, though it was applied         time passes, then as fails after
    lands late      no answer, and applied two calls later                     StoreUnavailable, done when nobody waits
    clock back      the wall clock jumps back by a day                         nothing
    clock ahead     the wall clock jumps ahead by a day                        nothing

That the answers of a real S3 server come out as the right column says is tests/store/test_s3_faults.py's to show;
tests/protocol/test_faults_s3.py plays whole publications through those answers. What a reader meets besides (other
bytes than were stored, fewer, none) is `READER_FAULTS`. Death at a call is `signals_itself`, in real processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from dispatch_agent.errors import StoreDenied, StoreUnavailable
from dispatch_agent.publish.watcher import Abort
from dispatch_agent.store.base import (
    ConditionFailed,
    Document,
    KeyMissing,
    LatestLink,
    Limits,
    Source,
    Store,
    Stored,
    Uploaded,
)

WRITES = frozenset({"create", "replace", "put", "upload", "symlink", "delete"})
LATE = WRITES - {"symlink"}
"""What can be on its way when its sender has gone. A link is only made in a folder, by a system call."""


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
        if call not in at:
            return do()
        _unheard(do)
        raise _lost(call)

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


def denied(at: At) -> Hook:
    """The store does nothing for these credentials: they expired, or the clock that they were signed by is wrong."""

    def hook(call: Call, do: Do) -> Any:
        if call in at:
            msg = f"{call} was denied (by the test)"
            raise StoreDenied(msg)
        return do()

    return hook


def hangs(at: At, clock: FakeClock, seconds: float, *, done: bool) -> Hook:
    """The call is waited for until a timeout ends it, `done` or not."""

    def hook(call: Call, do: Do) -> Any:
        if call not in at:
            return do()
        if done:
            _unheard(do)
        clock.now += seconds
        raise _lost(call)

    return hook


def clock_jumps(at: At, clock: FakeClock, days: int) -> Hook:
    """Somebody sets the machine's clock; the one that only counts seconds goes on."""

    def hook(call: Call, do: Do) -> Any:
        if call in at:
            clock.days += days
        return do()

    return hook


class Dead(BaseException):
    """The process is gone. Not an Exception: nothing on the way can take it for a failure to mend."""


class Late:
    """Holds the writes of some calls, answers them with an error, and lets them reach the store at `deliver`.

    `real` is the store behind. What carries no condition is taken out of it again and put back later: nobody else has
    its key.
    """

    def __init__(self, at: At, real: Store, error: Callable[[Call], BaseException] | None = None) -> None:
        self.at = at
        self.held: list[tuple[Call, Do]] = []
        self._real = real
        self._error = error or _lost

    def __call__(self, call: Call, do: Do) -> Any:
        if call not in self.at or call.method not in LATE:
            return do()
        if call.method in {"put", "upload"}:
            do()
            data = self._real.read(call.key).data
            self._real.delete(call.key)
            self.held.append((call, lambda: self._real.put(call.key, data)))
        else:
            self.held.append((call, do))
        raise self._error(call)

    def deliver(self) -> None:
        """Everything that is held, in the order in which it was sent."""
        while self.held:
            with contextlib.suppress(ConditionFailed):  # it was sent again meanwhile, or somebody was faster
                self.held.pop(0)[1]()


def lands_late(at: At, real: Store) -> Hook:
    """A write is answered by an error and reaches the store only two calls later, when nobody waits for it any more."""
    late = Late(at, real)

    def hook(call: Call, do: Do) -> Any:
        if late.held and call.number > late.held[0][0].number + 1:
            late.deliver()
        return late(call, do)

    return hook


def unreachable_from(k: int, *, last: str = "lost") -> Hook:
    """From call k on nothing answers; call k itself is `lost` (done, unanswered) or `never` done."""

    def hook(call: Call, do: Do) -> Any:
        if call.number < k:
            return do()
        if call.number == k and last == "lost":
            _unheard(do)
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


def _unheard(do: Do) -> None:
    """The store does it, and whatever it answers is lost: also that a key is missing or a condition does not hold."""
    with contextlib.suppress(KeyMissing, ConditionFailed):
        do()


def _lost(call: Call) -> StoreUnavailable:
    return StoreUnavailable(f"the answer to {call} was lost (by the test)")


FAULTS: dict[str, Callable[[At, FakeClock, Store], Hook]] = {
    "fails before": lambda at, _clock, _real: fails_before(at),
    "fails after": lambda at, _clock, _real: fails_after(at),
    "sent twice": lambda at, _clock, _real: sent_twice(at),
    "refused": lambda at, _clock, _real: refuses(at),
    "denied": lambda at, _clock, _real: denied(at),
    "hangs before": lambda at, clock, _real: hangs(at, clock, 30.0, done=False),
    "hangs after": lambda at, clock, _real: hangs(at, clock, 30.0, done=True),
    "lands late": lambda at, _clock, real: lands_late(at, real),
    "clock back": lambda at, clock, _real: clock_jumps(at, clock, -1),
    "clock ahead": lambda at, clock, _real: clock_jumps(at, clock, 1),
}
PASSING = [name for name in FAULTS if name != "denied"]
"""Those that a publisher rides out by itself where they happen once."""


def spoilt(at: At, how: Callable[[bytes], bytes]) -> Hook:
    """What is read is not what was stored."""

    def hook(call: Call, do: Do) -> Any:
        answer = do()
        if call in at and call.method == "read":
            return Document(how(answer.data), answer.version)
        if call in at and call.method == "stream":
            return [how(b"".join(answer))]
        return answer

    return hook


def vanished(at: At) -> Hook:
    """A key that was listed is gone; a listing shows nothing."""

    def hook(call: Call, do: Do) -> Any:
        if call not in at:
            return do()
        if call.method in {"list", "folders"}:
            return []
        raise KeyMissing(call.key)

    return hook


READER_FAULTS: dict[str, Callable[[At], Hook]] = {
    "other bytes": lambda at: spoilt(at, lambda data: b"\0" + data[1:]),
    "fewer bytes": lambda at: spoilt(at, lambda data: data[:-1]),
    "more bytes": lambda at: spoilt(at, lambda data: data + b"\0"),
    "no bytes": lambda at: spoilt(at, lambda _: b""),
    "vanished": vanished,
}


# --- time and records of what happened --------------------------------------------------------------------------------


class TimeIsUp(Abort):
    """More virtual time has passed than the test allows: what a second SIGTERM does, or a drain that takes too long."""


@dataclass
class FakeClock:
    """Time that passes only while somebody waits; `limit` seconds of it at most."""

    now: float = 1000.0
    limit: float = 100_000.0
    days: int = 0
    """By how much somebody has set the wall clock forward (or back)."""
    _walls: int = field(default=0)

    def wall(self) -> str:
        """Never twice the same."""
        self._walls += 1
        since = timedelta(days=self.days, seconds=self.now, microseconds=self._walls)
        return (datetime(2026, 1, 1, tzinfo=timezone.utc) + since).isoformat(timespec="microseconds")

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
