"""Ordinary code, stopped at every request and copied: run from its start with the answers so far.

A *program* is a function that asks for everything it learns. Run with the answers that it was given, it goes to the
next request and no further; so its state is a value, the answers. The shipped publisher is such a program once its
store and its volume ask.

A *step* is a function of the program that leaves nothing behind but its result (`check_fence`, `write_once`, …). Of a
step that is over only the result is kept: histories that came to the same are one state. That is what keeps an
exploration small; which functions are steps changes no outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from tests.model.world import Answer, Request

Program = Callable[[], str]
"""Runs to its end, and says in a word how it ended."""

Event = tuple[str, str]
"""What a program said to people: what, and about which key."""


class Unanswered(BaseException):
    """The program is at a request that has no answer yet. Nothing on the way may take it for a failure."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.request = request


class Outcome:
    """What a step came to: a value or an exception. Equal if nobody could tell the difference."""

    __slots__ = ("_hash", "error", "key", "value")

    def __init__(self, value: Any, error: Exception | None = None) -> None:
        self.value = value
        self.error = error
        # The text of an error may tell its history; the code looks only at its type and what it carries.
        self.key = repr(value) if error is None else f"{type(error).__name__} {getattr(error, 'data', None)!r}"
        self._hash = hash(self.key)

    def give(self) -> Any:
        if self.error is not None:
            self.error.__context__ = None
            raise self.error.with_traceback(None)
        return self.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and self.key == other.key

    def __hash__(self) -> int:
        return self._hash


@dataclass(slots=True)
class Replay:
    """One run of a program over what it knows: the outcomes of the steps that are over, the answers in this one."""

    outcomes: list[Outcome]
    answers: list[Answer]
    said: list[Event] = field(default_factory=list)
    _over: int = 0
    _used: int = 0
    _inside: bool = False

    def ask(self, request: Request) -> Any:
        """The answer, if it is known. Raises what the answer says, or Unanswered."""
        return self._answer(request) if self._inside else self.step(lambda: self._answer(request))

    def step(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, remembered or found out. A step inside a step is a part of it."""
        if self._inside:
            return work()
        if self._over == len(self.outcomes):
            self._inside = True
            try:
                outcome = Outcome(work())
            except Exception as error:  # noqa: BLE001 -- whatever it is, it is given to the program
                outcome = Outcome(None, error)
            finally:
                self._inside = False
            self.outcomes.append(outcome)
            self.answers, self._used = [], 0
        self._over += 1
        return self.outcomes[self._over - 1].give()

    def say(self, what: str, about: str) -> None:
        """Remember what is said for the first time, not what this run only repeats."""
        if self._over == len(self.outcomes) and self._used == len(self.answers):
            self.said.append((what, about))

    def _answer(self, request: Request) -> Any:
        if self._used == len(self.answers):
            raise Unanswered(request)
        self._used += 1
        return self.answers[self._used - 1].give(request.key)


_current: ContextVar[Replay] = ContextVar("replay")


def current() -> Replay:
    """The run that is under way."""
    return _current.get()


def as_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, in a run as a step of it."""

    @wraps(function)
    def stepping(*args: Any, **kwargs: Any) -> Any:
        replay = _current.get(None)
        return function(*args, **kwargs) if replay is None else replay.step(lambda: function(*args, **kwargs))

    return stepping


@dataclass(frozen=True, slots=True)
class Node:
    """A program at a request, or at its end."""

    program: int
    outcomes: tuple[Outcome, ...]
    answers: tuple[Answer, ...]
    request: Request | None
    end: str = ""


@dataclass(slots=True)
class Machine:
    """Runs programs, every piece of them once. Nodes and answers are numbers here: states are then small and quick."""

    programs: list[Program] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    _numbers: dict[Node, int] = field(default_factory=dict)
    _after: dict[tuple[int, Answer], tuple[int, tuple[Event, ...]]] = field(default_factory=dict)

    def start(self, program: Program) -> int:
        """The node at which a program begins."""
        self.programs.append(program)
        return self._run(len(self.programs) - 1, (), ())[0]

    def after(self, number: int, answer: Answer) -> tuple[int, tuple[Event, ...]]:
        """The node that an answer leads to, and what was said on the way."""
        known = self._after.get((number, answer))
        if known is None:
            node = self.nodes[number]
            known = self._after[number, answer] = self._run(node.program, node.outcomes, (*node.answers, answer))
        return known

    def _run(
        self, program: int, outcomes: tuple[Outcome, ...], answers: tuple[Answer, ...]
    ) -> tuple[int, tuple[Event, ...]]:
        replay = Replay(list(outcomes), list(answers))
        token = _current.set(replay)
        request, end = None, ""
        try:
            end = self.programs[program]()
        except Unanswered as unanswered:
            request = unanswered.request
        finally:
            _current.reset(token)
        node = Node(program, tuple(replay.outcomes), tuple(replay.answers), request, end)
        number = self._numbers.setdefault(node, len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(node)
        return number, tuple(replay.said)
