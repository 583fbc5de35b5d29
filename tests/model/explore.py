"""Every run of a few actors within bounds, the shortest first: breadth-first over states that were seen once.

A state is: what the destination and the volumes hold, where every actor is, which requests are still on their way, and
how many faults may yet happen. The next step is any actor's request, answered or struck by a fault, or a request that
lands late. Interleavings of requests that only one actor can see are left out: see `Actor.alone`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from tests.model import invariants
from tests.model.invariants import View
from tests.model.replay import Event, Machine, Program
from tests.model.world import CONDITIONAL, REFUSED, UNAVAILABLE, Objects, Request, apply, below, is_ready

from dispatch_agent.publish import keys

FAULTS = frozenset({"late", "refused", "copy", "error", "crash", "again"})
BLIND, LYING = frozenset({"blind"}), frozenset({"lying"})
"""late: no answer, and the request lands at any later time, or never. refused: the same, and the answer says that the
condition does not hold, as if it were another's doing (a resend whose first copy landed; a 409). copy: answered, and a
second copy lands at any later time. error: a read has no answer. crash: the actor starts anew; its request lands later,
or never. again: one that is done starts once more.

What no store may do: blind: a listing lacks one key that stands. lying: data is said to be stored, and lands at any
later time, or never."""


Marks = frozenset[str]
"""What the judges remember of an actor's earlier requests since its start."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request of an actor, answered or not, for its judge. `end` is how the actor ended with it, if it did."""

    start: int
    request: Request
    answered: bool
    before: View
    after: View
    said: tuple[Event, ...]
    end: str
    marks: Marks


Judge = Callable[[Step], tuple[str, Marks]]
"""What is wrong with a step ("" if nothing), and what is remembered of it."""


@dataclass(frozen=True, slots=True)
class Actor:
    """One who asks. `program` gives the program of its n-th start, from 0.

    `alone` are the prefixes below which nobody else in this scenario reads or writes, `alone_reads` those below which
    nobody else writes. A request for what only one actor can see (a reading one: for what only it changes) commutes
    with every step of the others. It is therefore taken as soon as it is there, alone; its faults branch all the same.
    `faultless`: nothing befalls it.
    """

    name: str
    program: Callable[[int], Program]
    judge: Judge
    alone: tuple[str, ...] = ()
    alone_reads: tuple[str, ...] = ()
    faultless: bool = False

    def is_alone(self, request: Request) -> bool:
        """Whether nobody else can tell when this request is answered."""
        if _under(request.key, self.alone):
            # The judge asks what the others had published when a manifest was written: that is for it to see.
            return not (request.writes and request.key.startswith("data/") and request.key.endswith(".json"))
        return not request.writes and _under(request.key, self.alone_reads)


def _under(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}/") for prefix in prefixes)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Who acts, on what, and what may go wrong: at most `faults` of `kinds` in all, and the pointer deleted at most
    `losses` times. `weak`: conditions are ignored. `always` says what is wrong with any state, `at_the_end` with one in
    which all have ended."""

    actors: tuple[Actor, ...]
    objects: Objects
    faults: int = 0
    kinds: frozenset[str] = FAULTS
    losses: int = 0
    weak: bool = False
    always: Callable[[View, tuple[Marks, ...]], str] | None = None
    at_the_end: Callable[[View, tuple[str, ...], tuple[Marks, ...]], str] = lambda *_: ""


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong, and a shortest way there, one step a line."""

    what: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"{number:4}. {step}" for number, step in enumerate(self.steps, 1))])


Outcome = tuple[frozenset[tuple[str, bytes]], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Explored:
    """How much there was, in states and steps; how many states in which all had ended; the first violation; what the
    destination held, and how each had ended, when all had."""

    states: int
    steps: int
    ends: int
    violation: Violation | None
    outcomes: frozenset[Outcome] = frozenset()


class State(NamedTuple):
    """Numbers for what would be long: the objects, and per actor its node. `late`: (actor, request) on their way."""

    objects: int
    nodes: tuple[int, ...]
    starts: tuple[int, ...]
    marks: tuple[Marks, ...]
    late: tuple[tuple[int, int], ...]
    faults: int
    losses: int


How = tuple[str, int, int]
"""A step from a state: what happened, to which actor, with which request (a number)."""


class _Came(NamedTuple):
    """How a state was reached first: from which, by which step, and what followed by itself."""

    number: int
    how: How
    forced: tuple[How, ...]


_Edge = tuple[How, tuple[How, ...], State, str]
"""A step, what followed by itself, the state it leads to, and what is wrong with it."""

_Move = tuple[int, int, Marks, tuple[How, ...], str]
"""After a step of one actor: its node, the objects, its marks, what followed by itself, and what is wrong."""

_WITHOUT = "answered without "
_T = TypeVar("_T")
_NOTHING: Marks = frozenset()


def explore(scenario: Scenario, *, most: int = 10_000_000) -> Explored:
    """All of it, up to the first violation. Raises AssertionError beyond `most` states."""
    return _Exploration(scenario, most).run()


@dataclass(slots=True)
class _Exploration:
    scenario: Scenario
    most: int
    machine: Machine = field(default_factory=Machine)
    views: list[View] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    _objects: dict[frozenset[tuple[str, bytes]], int] = field(default_factory=dict)
    _request_numbers: dict[Request, int] = field(default_factory=dict)
    _starts: dict[tuple[int, int], int] = field(default_factory=dict)
    _moves: dict[tuple[int, int, int, int, Marks, str, bool], _Move] = field(default_factory=dict)
    _changes: dict[tuple[int, int], str] = field(default_factory=dict)
    _applied: dict[tuple[int, int], int] = field(default_factory=dict)
    _alone: dict[tuple[int, int], bool] = field(default_factory=dict)

    def run(self) -> Explored:
        first = self._first()
        states, came = [first], [_Came(0, ("", 0, 0), ())]
        seen = {first}
        steps = ends = number = 0
        outcomes: set[Outcome] = set()
        while number < len(states):
            state = states[number]
            if self.scenario.always and (wrong := self.scenario.always(self.views[state.objects], state.marks)):
                return Explored(len(states), steps, ends, Violation(wrong, self._words(came, number)))
            if not any(self.machine.nodes[node].request for node in state.nodes):
                ends += 1
                ended = tuple(self.machine.nodes[node].end for node in state.nodes)
                outcomes.add((frozenset(self.views[state.objects].objects.items()), ended))
                if wrong := self._wrong_at_the_end(state):
                    return Explored(len(states), steps, ends, Violation(wrong, self._words(came, number)))
            for how, forced, after, wrong in self._steps(state):
                steps += 1 + len(forced)
                if wrong:
                    came.append(_Came(number, how, forced))
                    return Explored(len(states), steps, ends, Violation(wrong, self._words(came, len(came) - 1)))
                if after not in seen:
                    seen.add(after)
                    states.append(after)
                    came.append(_Came(number, how, forced))
                    assert len(states) <= self.most, f"more than {self.most} states"
            number += 1
        return Explored(len(states), steps, ends, None, frozenset(outcomes))

    def _first(self) -> State:
        objects = self._number(self.scenario.objects)
        count, faults = len(self.scenario.actors), self.scenario.faults
        state = State(objects, (), (0,) * count, (_NOTHING,) * count, (), faults, self.scenario.losses)
        for actor in range(count):
            state = state._replace(nodes=(*state.nodes, self._begin(actor, 0)))
        return state

    def _steps(self, state: State) -> Iterator[_Edge]:
        """Every step from a state: of one actor alone if what it asks for concerns nobody else."""
        waiting = [(actor, self.machine.nodes[node].request) for actor, node in enumerate(state.nodes)]
        for actor, request in waiting:
            if request is not None and self._is_alone(actor, state.nodes[actor]) and self._is_ready(state, request):
                yield from self._of_actor(state, actor, request)
                return
        for actor, request in waiting:
            if request is not None:
                if self._is_ready(state, request):
                    yield from self._of_actor(state, actor, request)
            elif state.faults and "again" in self.scenario.kinds and not self.scenario.actors[actor].faultless:
                yield self._restart(state, ("again", actor, 0), state.objects, state.late)
        for late in dict.fromkeys(state.late):
            left = list(state.late)
            left.remove(late)
            objects = self._apply(state.objects, late[1])
            after = state._replace(objects=objects, late=tuple(left))
            yield ("lands", *late), (), after, self._change(state.objects, objects)
        if state.losses and keys.POINTER in self.views[state.objects].objects:
            without = {k: v for k, v in self.views[state.objects].objects.items() if k != keys.POINTER}
            after = state._replace(objects=self._number(without), losses=state.losses - 1)
            yield ("lost", 0, 0), (), after, ""

    def _of_actor(self, state: State, actor: int, request: Request) -> Iterator[_Edge]:
        number = self._request(request)
        faults = 0 if self.scenario.actors[actor].faultless else state.faults
        for how, late in self._ways(request, faults, state.objects):
            on_its_way = tuple(sorted([*state.late, (actor, number)])) if late else state.late
            if how.startswith("crash"):
                objects = self._apply(state.objects, number) if how == "crashed after" else state.objects
                yield self._restart(state, (how, actor, number), objects, on_its_way)
                continue
            faults = state.faults - (how != "answered" or late)
            node, objects, marks, forced, wrong = self._move(state, actor, how, faults)
            after = State(
                objects,
                _with(state.nodes, actor, node),
                state.starts,
                state.marks if marks == state.marks[actor] else _with(state.marks, actor, marks),
                on_its_way,
                faults,
                state.losses,
            )
            yield ("answered twice" if how == "answered" and late else how, actor, number), forced, after, wrong

    def _is_ready(self, state: State, request: Request) -> bool:
        return request.op != "wait" or is_ready(self.views[state.objects].objects, request)

    def _restart(self, state: State, how: How, objects: int, late: tuple[tuple[int, int], ...]) -> _Edge:
        """The actor has ended, or was killed, and the objects are these: it begins anew."""
        actor, start = how[1], state.starts[how[1]] + 1
        node, after, marks, forced, wrong = self._settle(
            actor, start, self._begin(actor, start), objects, _NOTHING, state.faults - 1
        )
        following = State(
            after,
            _with(state.nodes, actor, node),
            _with(state.starts, actor, start),
            _with(state.marks, actor, marks),
            late,
            state.faults - 1,
            state.losses,
        )
        return how, forced, following, self._change(state.objects, objects) or wrong

    def _ways(self, request: Request, faults: int, objects: int) -> Iterator[tuple[str, bool]]:
        """What may become of a request, and whether (a copy of) it is on its way afterwards."""
        yield "answered", False
        if not faults:
            return
        kinds = self.scenario.kinds
        if request.local:
            if request.writes and "crash" in kinds:
                yield "crashed", False
                yield "crashed after", False
        elif request.writes:
            befall = {
                "late": ("unanswered", True),
                "refused": ("refused", request.op in CONDITIONAL),
                "copy": ("answered", True),
                "crash": ("crashed", True),
                "lying": ("believed", request.key.startswith(f"{keys.DATA}/") and request.op != "delete"),
            }
            yield from (way for kind, way in befall.items() if kind in kinds and way[1])
        else:
            if "error" in kinds:
                yield "unanswered", False
            if "blind" in kinds and request.op in {"list", "folders"}:
                for key in below(self.views[objects].objects, request.key):
                    yield f"{_WITHOUT}{key}", False

    def _move(self, state: State, actor: int, how: str, faults: int) -> _Move:
        """One step of an actor, and what follows by itself."""
        start, node, marks = state.starts[actor], state.nodes[actor], state.marks[actor]
        key = (actor, start, node, state.objects, marks, how, faults > 0)
        known = self._moves.get(key)
        if known is None:
            once = self._moved(actor, start, node, state.objects, marks, how)
            known = once if once[4] else self._settle(actor, start, *once[:3], faults)
            self._moves[key] = known
        return known

    def _is_alone(self, actor: int, node: int) -> bool:
        known = self._alone.get((actor, node))
        if known is None:
            request = self.machine.nodes[node].request
            known = self._alone[actor, node] = request is not None and self.scenario.actors[actor].is_alone(request)
        return known

    def _settle(self, actor: int, start: int, node: int, objects: int, marks: Marks, faults: int) -> _Move:
        """What follows by itself: all that nobody else can see and nothing can befall."""
        forced: list[How] = []
        wrong = ""
        while not wrong:
            request = self.machine.nodes[node].request
            if request is None or request.op == "wait" or not self._is_alone(actor, node):
                break
            if faults and not (request.local and ("crash" not in self.scenario.kinds or not request.writes)):
                break
            forced.append(("answered", actor, self._request(request)))
            node, objects, marks, _, wrong = self._moved(actor, start, node, objects, marks, "answered")
        return node, objects, marks, tuple(forced), wrong

    def _moved(self, actor: int, start: int, node: int, objects: int, marks: Marks, how: str) -> _Move:
        request = self.machine.nodes[node].request
        assert request is not None
        before = self.views[objects]
        shown = {k: v for k, v in before.objects.items() if how != f"{_WITHOUT}{k}"}
        answer, made = apply(shown, request, weak=self.scenario.weak)
        if how == "believed":
            made = before.objects
        elif how in {"unanswered", "refused"}:
            answer, made = (UNAVAILABLE if how == "unanswered" else REFUSED), before.objects
        after = objects if not request.writes or made == before.objects else self._number(made)
        node, said = self.machine.after(node, answer)
        step = Step(
            start, request, how == "answered", before, self.views[after], said, self.machine.nodes[node].end, marks
        )
        wrong, marks = self.scenario.actors[actor].judge(step)
        return node, after, marks, (), wrong or self._change(objects, after)

    def _wrong_at_the_end(self, state: State) -> str:
        nodes = [self.machine.nodes[node] for node in state.nodes]
        if any(node.request for node in nodes):
            return ""
        return self.scenario.at_the_end(self.views[state.objects], tuple(node.end for node in nodes), state.marks)

    def _begin(self, actor: int, start: int) -> int:
        if (actor, start) not in self._starts:
            self._starts[actor, start] = self.machine.start(self.scenario.actors[actor].program(start))
        return self._starts[actor, start]

    def _apply(self, objects: int, request: int) -> int:
        key = (objects, request)
        if key not in self._applied:
            after = apply(self.views[objects].objects, self.requests[request], weak=self.scenario.weak)[1]
            self._applied[key] = self._number(after)
        return self._applied[key]

    def _change(self, before: int, after: int) -> str:
        if before == after:
            return ""
        if (before, after) not in self._changes:
            self._changes[before, after] = invariants.of_a_change(self.views[before], self.views[after])
        return self._changes[before, after]

    def _number(self, objects: Objects) -> int:
        number = self._objects.setdefault(frozenset(objects.items()), len(self.views))
        if number == len(self.views):
            self.views.append(View(objects))
        return number

    def _request(self, request: Request) -> int:
        number = self._request_numbers.setdefault(request, len(self.requests))
        if number == len(self.requests):
            self.requests.append(request)
        return number

    def _words(self, came: list[_Came], number: int) -> tuple[str, ...]:
        steps: list[How] = []
        while number > 0:
            steps += [*reversed(came[number].forced), came[number].how]
            number = came[number].number
        return tuple(said for how in reversed(steps) if (said := self._say(how)))

    def _say(self, how: How) -> str:
        what, actor, number = how
        if what == "lost":
            return f"somebody deletes {keys.POINTER}"
        who = self.scenario.actors[actor].name
        if what == "again":
            return f"{who} starts again"
        request = self.requests[number]
        if what == "answered" and request.local and not request.writes:
            return ""  # looking at one's own volume
        if what.startswith(_WITHOUT):
            return f"{who}: {request.op} {short(request.key)}, which does not show {short(what.removeprefix(_WITHOUT))}"
        return f"{who}: {_WORDS[what].format(f'{request.op} {short(request.key)}')}"


_WORDS: Mapping[str, str] = {
    "answered": "{}",
    "answered twice": "{} (a copy of it is still on its way)",
    "believed": "{}: said to be stored; it may land",
    "unanswered": "{}: no answer; a write may still land",
    "refused": "{}: told that the condition does not hold; it may still land",
    "crashed": "is killed at {}; what was sent may still land",
    "crashed after": "is killed just after {}",
    "lands": "what was sent lands: {}",
}


def short(key: str) -> str:
    """A key without the zeros that only fill it."""
    return re.sub(r"(?<![0-9a-f])0{3,}(?=[0-9a-f])", "", key)


def _with(values: tuple[_T, ...], index: int, value: _T) -> tuple[_T, ...]:
    return (*values[:index], value, *values[index + 1 :])
