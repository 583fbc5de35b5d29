"""One file on its way to a server and back, in parts: read once, digested, with bounded memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from dispatch_agent.errors import StoreUnavailable
from dispatch_agent.store import loop
from dispatch_agent.store.base import Source

T = TypeVar("T")
MIB = 1 << 20
WHOLE = 16 * MIB  # up to here one request
# Measured: 4 parts of 8 MiB take 70 MiB of memory, 4 of 16 MiB take 145 and are no faster. Python below 3.12 copies
# what a socket cannot take at once.
PART = 8 * MIB
BESIDE = 4  # parts on their way at once, of all uploads of a store together
TICK_SECONDS = 1.0


class Room:
    """The bytes that all uploads of one store together may hold in memory. One part is let in whatever its size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        self._changed = threading.Condition()

    def take(self, size: int, tick: Callable[[], None]) -> None:
        """Wait for room, calling `tick` about once a second; what it raises ends the wait."""
        with self._changed:
            while self._used and self._used + size > self._size:
                self._changed.wait(TICK_SECONDS)
                tick()
            self._used += size

    def give(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify_all()


@dataclass(slots=True)
class Sending(Generic[T]):
    """One file, read once and sent in requests of which at most `beside` are under way.

    Leaving it as a context gives up what is still under way. `also` is a digest beside sha256, where a server wants it.
    """

    source: Source
    room: Room
    beside: int = BESIDE
    also: Any = None
    sha256: Any = field(default_factory=hashlib.sha256)
    size: int = 0
    _taken: int = 0
    _under_way: set[Future[T]] = field(default_factory=set)
    _answers: list[T] = field(default_factory=list)

    def __enter__(self) -> Sending[T]:
        return self

    def __exit__(self, *_: object) -> None:
        for future in self._under_way:
            future.cancel()
        self.room.give(self._taken)

    @property
    def ended(self) -> bool:
        return self.size >= self.source.size

    def take(self, size: int) -> bytes:
        """The next `size` bytes, fewer only at the end, once there is room for them. Raises like the source."""
        self.room.take(size, self._tick)
        self._taken += size
        pieces: list[bytes] = []
        missing = size
        while missing and (piece := self.source.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self.sha256.update(data)
        if self.also is not None:
            self.also.update(data)
        self.size += len(data)
        return data

    def begin(self, request: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Send what was taken; its room is given back when the request is done. Raises what an earlier one raised."""
        while len(self._under_way) >= self.beside:
            self._answers += self._collect()
        size, self._taken = self._taken, 0
        future = loop.submit(request())
        future.add_done_callback(lambda _: self.room.give(size))
        self._under_way.add(future)

    def finish(self) -> list[T]:
        """Wait for what is under way, and give all answers since the last time, as they came."""
        while self._under_way:
            self._answers += self._collect()
        answers, self._answers = self._answers, []
        return answers

    def _collect(self) -> list[T]:
        """What is done of what is under way, at least one. The source is asked meanwhile whether to go on."""
        while True:
            done, self._under_way = wait(self._under_way, TICK_SECONDS, FIRST_COMPLETED)
            if done:
                return [future.result() for future in done]
            self._tick()

    def _tick(self) -> None:
        self.source.tick(0)


@dataclass(frozen=True, slots=True)
class Range:
    """Some bytes of an object, its version, and the bytes that it has in all."""

    data: bytes
    version: str
    whole: int


def in_ranges(where: str, fetch: Callable[[int, str], Coroutine[Any, Any, Range]], chunk: int) -> Iterator[bytes]:
    """An object in pieces of at most `chunk` bytes. `fetch(at, version)` asks for some bytes from `at` on, of that
    version if one is given; the next range is asked for while the caller works on this one."""
    at, coming = 0, loop.submit(fetch(0, ""))
    try:
        while True:
            found = coming.result()
            at += len(found.data)
            if at < found.whole:
                if not found.data:
                    msg = f"{where} gave no more than {at} of {found.whole} bytes: read it again"
                    raise StoreUnavailable(msg)
                coming = loop.submit(fetch(at, found.version))
            for start in range(0, len(found.data), chunk):
                yield found.data[start : start + chunk]
            if at >= found.whole:
                return
    finally:
        coming.cancel()
