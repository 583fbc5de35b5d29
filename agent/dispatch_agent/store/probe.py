"""What a destination can do, seen by doing it on scratch keys below it: in turn, then with racing writers.

Real servers accept a condition and ignore it, or pass in turn and let two writers win a race. A race that one host
wins fairly proves nothing about other hosts, so what is known of the store's kind is heard too.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from dispatch_agent.clock import Clock, SystemClock
from dispatch_agent.errors import StoreDenied, StoreError, StoreTooWeak, StoreUnavailable
from dispatch_agent.store.base import ConditionFailed, KeyMissing, Store
from dispatch_agent.store.capabilities import Capabilities, Checksum, Checksums, Facts, States, require
from dispatch_agent.support import Support

__all__ = ["Capabilities", "probe", "require"]

# Measured: four writers of one key wait 0.6 s per round on SeaweedFS, two 0.05 s. Two find a check that is not atomic
# in nearly every round, since both are let go together; four find what only a queue shows.
RACERS, ROUNDS = 2, 10
CROWD, CROWD_ROUNDS = 4, 1
# On a loaded machine SeaweedFS lets losers sleep for a second: after this long only the first few rounds are run.
RACE_SECONDS, LEAST_ROUNDS = 1.5, 3
LISTED = 8
OVERWRITES = 16
BODY = 64 << 10  # large enough that a write which is not atomic is seen half done

Write = Callable[[bytes], str]


def probe(
    store: Store,
    *,
    racers: int = RACERS,
    rounds: int = ROUNDS,
    nonce: str | None = None,
    clock: Clock | None = None,
) -> Capabilities:
    """Prove what `store` can do; sets the checksum that it honours on a store that can send one.

    Takes one to four seconds on a server that is near. Removes its scratch keys below `probe/`. Raises
    StoreUnavailable and StoreDenied when the store does not answer at all.
    """
    work = _Probe(store, f"probe/{nonce or secrets.token_hex(6)}", racers, rounds, clock or SystemClock())
    try:
        found = work.run()
    finally:
        work.clean()
    return replace(found, saw=tuple(work.saw))


@dataclass(slots=True)
class _Probe:
    store: Store
    below: str
    racers: int
    rounds: int
    clock: Clock
    saw: list[str] = field(default_factory=list)
    written: set[str] = field(default_factory=set)

    def run(self) -> Capabilities:
        facts = self.store.facts() if isinstance(self.store, States) else Facts(Support(), Support())
        listing = _between_hosts(self._list_after_write(), facts.listing_trusted)
        whole = self._atomic(facts.atomic_visibility)
        create = _between_hosts(self._create(), facts.create_trusted)
        replaced = _between_hosts(self._replace(), facts.replace_trusted)
        checksums, checksum = self._checksums()
        return Capabilities(create, replaced, whole, listing, checksums, checksum)

    def clean(self) -> None:
        """Remove the scratch keys; a store that lets us write but not delete keeps them, and that is said."""
        try:
            for key in self.written | {found.key for found in self.store.list(self.below)}:
                self.store.delete(key)
        except StoreError as error:
            self.saw.append(f"scratch keys below {self.below} were left: {error}")

    def _key(self, name: str) -> str:
        key = f"{self.below}/{name}"
        self.written.add(key)
        return key

    def _see(self, value: Literal["yes", "no"], reason: str) -> Support:
        self.saw.append(reason)
        return Support(value, "probed", reason)

    def _list_after_write(self) -> Support:
        for number in range(LISTED):
            key = self._key(f"list/{number}/object")
            self.store.put(key, b"%d" % number)
            if key not in {found.key for found in self.store.list(self.below)}:
                return self._see(
                    "no", f"an object written just before was missing in the listing ({number + 1} written)"
                )
            if str(number) not in self.store.folders(f"{self.below}/list"):
                return self._see(
                    "no", f"the folder of an object written just before was missing ({number + 1} written)"
                )
        return self._see("yes", f"{LISTED} of {LISTED} objects were listed at once")

    def _atomic(self, known: Support) -> Support:
        """Overwrite one key while it is read."""
        key = self._key("whole")
        bodies = [bytes([65 + number]) * BODY for number in range(2)]
        self.store.put(key, bodies[0])
        ended = threading.Event()

        def overwrite() -> None:
            try:
                for number in range(OVERWRITES):
                    self.store.put(key, bodies[number % 2])
            finally:
                ended.set()

        reads, broken = 0, ""
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(overwrite)
            while not broken and not (ended.is_set() and reads):
                reads += 1
                broken = self._partial(key, bodies)
            writing.result()
        if broken:
            return self._see("no", f"a reader beside a writer saw {broken}")
        self.saw.append(f"{reads} reads beside {OVERWRITES} overwrites saw whole objects")
        return known

    def _partial(self, key: str, bodies: list[bytes]) -> str:
        try:
            data = self.store.read(key).data
        except KeyMissing:
            return "no object where one had stood"
        except StoreUnavailable as error:
            return f"a broken answer ({error.__cause__ or error})"
        return "" if data in bodies else f"{len(data)} bytes that nobody wrote as one"

    def _create(self) -> Support:
        key = self._key("create")
        try:
            if not self._accepted(lambda data: self.store.create(key, data), key, b"first"):
                return self._see("no", "the create of an absent key was refused")
            refused = self._refuses(lambda data: self.store.create(key, data), key, b"first")
        except StoreTooWeak as error:
            return self._see("no", f"a create is not possible: {error}")
        if not refused:
            return self._see("no", "a create over an existing object was not refused")

        def start(number: int) -> tuple[str, Write]:
            fresh = self._key(f"create.{number}")
            return fresh, lambda data: self.store.create(fresh, data)

        return self._race("create", start)

    def _replace(self) -> Support:
        key = self._key("replace")
        try:
            self.store.put(key, b"first")
            first = self.store.read(key).version
            if not self._accepted(lambda data: self.store.replace(key, data, first), key, b"second"):
                return self._see("no", "the replace of the current version was refused")
            refused = self._refuses(lambda data: self.store.replace(key, data, first), key, b"second")
            absent = self._key("absent")
            made = not self._refuses(lambda data: self.store.replace(absent, data, first), absent, None)
        except StoreTooWeak as error:
            return self._see("no", f"a replace is not possible: {error}")
        if not refused or made:
            return self._see(
                "no", f"a replace of {'an absent object' if refused else 'an old version'} was not refused"
            )

        def start(_: int) -> tuple[str, Write]:
            version = self.store.read(key).version
            return key, lambda data: self.store.replace(key, data, version)

        return self._race("replace", start)

    def _accepted(self, write: Write, key: str, data: bytes) -> bool:
        """Whether a write whose condition holds is stored; what stands decides, since its answer may be lost."""
        with suppress(ConditionFailed, StoreUnavailable):
            write(data)
        return self._content(key) == data

    def _refuses(self, write: Write, key: str, stands: bytes | None) -> bool:
        """Whether a write whose condition does not hold is refused, and nothing changed."""
        try:
            write(b"must not be stored")
        except ConditionFailed:
            return self._content(key) == stands
        return False

    def _content(self, key: str) -> bytes | None:
        try:
            return self.store.read(key).data
        except KeyMissing:
            return None

    def _race(self, what: str, start: Callable[[int], tuple[str, Write]]) -> Support:
        """Rounds in which several writers are let go at once; exactly one may win, and its bytes must stand."""
        plan = [self.racers] * self.rounds + [CROWD] * (CROWD_ROUNDS if self.racers < CROWD else 0)
        with ThreadPoolExecutor(max(plan)) as pool:
            began, raced = self.clock.monotonic(), 0
            for number, racers in enumerate(plan):
                if number >= LEAST_ROUNDS and self.clock.monotonic() - began > RACE_SECONDS:
                    break
                raced += 1
                key, write = start(number)
                bodies = [f"{what} {number} {racer} {secrets.token_hex(8)}".encode() for racer in range(racers)]
                barrier = threading.Barrier(racers)
                told = list(pool.map(lambda body, w=write, b=barrier: _attempt(w, body, b), bodies))
                wrong = _judge(bodies, told, self._content(key))
                if wrong:
                    return self._see("no", f"racing {what}, round {number + 1} of {racers} writers: {wrong}")
        return self._see("yes", f"{raced} races to {what} had one winner each, and its bytes stood")

    def _checksums(self) -> tuple[Support, Checksum]:
        if not isinstance(self.store, Checksums):
            return Support("no", "catalogue", "bytes are read back after an upload instead"), "none"
        reasons: list[str] = []
        algorithms: tuple[Literal["sha256", "md5"], ...] = ("sha256", "md5")
        self.store.checksum = "none"
        for algorithm in algorithms:
            try:
                found = self.store.try_checksum(f"{self.below}/checksum", algorithm)
            except StoreDenied:
                raise
            except StoreError as error:
                found = Support("unknown", "probed", str(error))
            reasons.append(found.reason)
            if found:
                self.store.checksum = algorithm
                return self._see("yes", found.reason), algorithm
        return self._see("no", "; ".join([*reasons, "bytes are read back after an upload instead"])), "none"


def _between_hosts(seen: Support, known: Support) -> Support:
    """What one host saw hold is worth what is known to hold between hosts."""
    return known if seen and not known else seen


def _attempt(write: Write, body: bytes, barrier: threading.Barrier) -> Literal["won", "lost", "unknown"]:
    barrier.wait()
    try:
        write(body)
    except ConditionFailed:
        return "lost"
    except StoreUnavailable:
        return "unknown"
    return "won"


def _judge(bodies: list[bytes], told: Sequence[str], stands: bytes | None) -> str:
    """What is wrong with the outcome of one round, or nothing.

    The writer whose bytes stand has won whatever it was told: its first answer may have been lost, and the request that
    was sent again refused.
    """
    if stands not in bodies:
        return "the bytes that stand are of none of the writers"
    owner = bodies.index(stands)
    winners = [racer for racer, word in enumerate(told) if word == "won" and racer != owner]
    return f"{len(winners)} were told that they had won although another's bytes stand" if winners else ""
