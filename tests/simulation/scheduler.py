"""Who runs next, and what time it is: actors as greenlets, a clock that moves only while all wait, a list of decisions.

An actor is product code that runs until it reaches a point: a call of the store, a step on the disk, a wait. At every
point it is decided who goes on and whether the call meets a fault. Decisions other than the plain ones (the same actor
goes on, nothing goes wrong) are written down by actor and by the number of its point, so that a run can be repeated
with fewer of them, or with fewer actors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NoReturn, Protocol

import greenlet

START = 1_767_225_600.0
"""Seconds: where the simulated wall clocks begin."""


class Crash(BaseException):
    """The actor's process dies here. Not an Exception: nothing on the way may mend it."""


class Violation(BaseException):
    """An invariant does not hold. Not an Exception, for the product's loop goes on after those."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


def violated(invariant: str, what: str) -> NoReturn:
    raise Violation(invariant, what)


@dataclass(frozen=True)
class Decision:
    """What happens at one point besides the plain: another actor goes on, a fault is met."""

    to: str = ""
    fault: str = ""


Point = tuple[str, int]
"""An actor and the number of its point, from 1."""
Decisions = dict[Point, Decision]


@dataclass(eq=False)
class Actor:
    """One process, or one write that is still on its way (`land`). `dead`: killed, and every step of it is its last."""

    name: str
    run: greenlet.greenlet | None = None
    land: Callable[[], None] | None = None
    points: int = 0
    until: float | None = None
    event: threading.Event | None = None
    dead: bool = False

    def ready(self, now: float) -> bool:
        return self.until is None or self.until <= now or (self.event is not None and self.event.is_set())


class Source(Protocol):
    """Where decisions come from."""

    def fault(self, point: Point, kinds: Sequence[str], weight: int) -> str: ...

    def choose(
        self, point: Point, plain: Actor | None, ready: Sequence[Actor], waiting: Sequence[Actor], now: float
    ) -> Actor | None: ...


@dataclass
class Recorded:
    """Repeats decisions; where there is none, the plain thing happens."""

    decisions: Decisions

    def fault(self, point: Point, kinds: Sequence[str], weight: int) -> str:  # noqa: ARG002 (drawn ones need it)
        fault = self.decisions.get(point, Decision()).fault
        return fault if fault in kinds else ""

    def choose(
        self,
        point: Point,
        plain: Actor | None,
        ready: Sequence[Actor],
        waiting: Sequence[Actor],
        now: float,  # noqa: ARG002
    ) -> Actor | None:
        to = self.decisions.get(point, Decision()).to
        return next((actor for actor in (*ready, *waiting) if actor.name == to), plain)


@dataclass
class Drawn:
    """Draws decisions, and writes them down. The rates are chances per point, times its weight."""

    random: Random
    faults: float
    crashes: float
    switches: float
    jumps: float
    freezes: float
    decisions: Decisions = field(default_factory=dict)
    _frozen: dict[str, tuple[int, float]] = field(default_factory=dict)
    _count: int = 0
    _weight: int = 1

    def fault(self, point: Point, kinds: Sequence[str], weight: int) -> str:
        self._weight = weight
        if self.faults == self.crashes == 0.0 or not kinds:
            return ""
        draw = self.random.random() / weight
        if draw >= self.faults + self.crashes:
            return ""
        crash = draw < self.crashes
        kinds = [kind for kind in kinds if kind.startswith("crash") == crash]
        if not kinds:
            return ""
        fault = self.random.choice(kinds)
        self.decisions[point] = Decision(fault=fault)
        return fault

    def choose(
        self, point: Point, plain: Actor | None, ready: Sequence[Actor], waiting: Sequence[Actor], now: float
    ) -> Actor | None:
        self._count += 1
        rare = self._weight == 1
        self._weight = 1
        if self.random.random() < (self.freezes / 20 if rare else self.freezes):
            turns, seconds = self.random.choice(((10, 0.0), (40, 1.0), (150, 6.0), (400, 15.0)))
            self._frozen[point[0]] = (self._count + turns, now + seconds)
        awake = [actor for actor in ready if self._is_awake(actor, now)]
        chosen = plain
        if plain is not None and plain.name == point[0] and plain in awake and self.random.random() > self.switches:
            return plain
        if waiting and (not ready or self.random.random() < self.jumps):
            first = min(waiting, key=lambda other: other.until or 0.0)
            chosen = first if self.random.random() < 0.8 else self.random.choice(waiting)
        elif awake:
            chosen = self.random.choice(awake)
        elif waiting:
            chosen = min(waiting, key=lambda other: other.until or 0.0)
        elif ready:
            chosen = min(ready, key=lambda other: self._frozen[other.name])
        if chosen is not None and chosen is not plain:
            self.decisions[point] = Decision(chosen.name, self.decisions.get(point, Decision()).fault)
        return chosen

    def _is_awake(self, actor: Actor, now: float) -> bool:
        turns, time = self._frozen.get(actor.name, (0, 0.0))
        return self._count >= turns and now >= time


class Scheduler:
    """Hands out turns. Everything happens in this one thread, so the same decisions give the same run."""

    def __init__(self, source: Source, longest: int) -> None:
        """`longest`: how many points a run may have; one that has more is said not to come to an end."""
        self.source = source
        self.now = 0.0
        self.longest = longest
        self.count = 0
        self.actors: list[Actor] = []
        self.trace: list[str] = []
        self._stamps = 0
        self.current: Actor | None = None
        self._hub = greenlet.getcurrent()
        self._next: Actor | None = None

    def add(self, name: str, do: Callable[[Actor], None]) -> Actor:
        actor = Actor(name)

        def run() -> None:
            try:
                do(actor)
            except Crash:
                pass
            except Exception as error:  # noqa: BLE001 (whatever it is, the product did not expect it)
                violated("end", f"{actor.name} ends with {error!r}")
            self.actors.remove(actor)
            self._decide(actor, plain=None)

        actor.run = greenlet.greenlet(run, self._hub)
        self.actors.append(actor)
        return actor

    def land_later(self, name: str, land: Callable[[], None], at: float | None) -> None:
        """A write that is on its way: it arrives when it is chosen, and `at` this time if one is given."""
        self.actors.append(Actor(name, land=land, until=at))

    def say(self, who: str, what: str) -> None:
        self.trace.append(f"{self.now:8.3f}  {who:<12} {what}")

    def stamp(self, skew: float = 0.0) -> int:
        """A wall clock's nanoseconds, of a clock that is `skew` seconds ahead; never the same twice."""
        self._stamps += 1
        return int((START + self.now + skew) * 1e9) + self._stamps * 1000

    def run(self) -> None:
        """Until every process has ended. Raises Violation."""
        self._decide(Actor("start"), plain=None)
        while self._next is not None:
            actor = self._next
            if not actor.ready(self.now):
                self.now = actor.until or self.now
            if actor.land is not None:
                self.actors.remove(actor)
                actor.points += 1
                actor.land()
                self._decide(actor, plain=None)
            else:
                assert actor.run is not None
                self.current = actor
                actor.run.switch()
                self.current = None

    def land_all(self) -> None:
        """Have every write arrive that is still on its way."""
        for actor in [actor for actor in self.actors if actor.land is not None]:
            self.actors.remove(actor)
            assert actor.land is not None
            actor.land()

    def end(self) -> None:
        """Take every process off its feet."""
        for actor in self.actors:
            if actor.run is not None and not actor.run.dead:
                actor.run.throw(greenlet.GreenletExit)
        self.actors.clear()

    def point(self, actor: Actor, faults: Sequence[str] = (), weight: int = 1) -> str:
        """Let others go on before the actor's next step; the fault that the step meets, one of `faults`, or ''.

        Where much hangs on a step, its `weight` makes faults, and long rests before it, so many times likelier.
        """
        if actor.dead:
            raise Crash
        fault = self.source.fault((actor.name, actor.points + 1), faults, weight)
        self._decide(actor, plain=actor)
        if self._next is not actor:
            self._hub.switch()
        if actor.dead:
            raise Crash
        return fault

    def wait(self, actor: Actor, event: threading.Event, seconds: float) -> bool:
        if not event.is_set():
            actor.until, actor.event = self.now + max(0.001, seconds), event
            self._decide(actor, plain=None)
            self._hub.switch()
            actor.until = actor.event = None
        if actor.dead:
            raise Crash
        return event.is_set()

    def _decide(self, actor: Actor, plain: Actor | None) -> None:
        self.count += 1
        if self.count > self.longest:
            violated("I9", f"no end after {self.longest} steps")
        actor.points += 1
        ready, waiting = [], []
        for other in self.actors:
            (ready if other.ready(self.now) else waiting).append(other)
        if plain is None:
            processes = [other for other in ready if other.run is not None]
            plain = processes[0] if processes else min(waiting, key=lambda a: a.until or 0.0, default=None)
            if plain is None:
                self._next = None  # only writes on their way are left
                return
        self._next = self.source.choose((actor.name, actor.points), plain, ready, waiting, self.now)


@dataclass(frozen=True)
class ActorsClock:
    """The product's clock for one actor; its wall clock is `skew` seconds ahead."""

    scheduler: Scheduler
    actor: Actor
    skew: float = 0.0

    def wall(self) -> str:
        return f"2026-01-01T{self.scheduler.now + self.skew:018.6f}Z"

    def monotonic(self) -> float:
        return 1000.0 + self.scheduler.now

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return self.scheduler.wait(self.actor, event, seconds)
