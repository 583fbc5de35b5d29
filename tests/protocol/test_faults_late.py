"""A write that reaches the store when its sender has gone: after it died, in the middle of the next one's work, after
its successor committed.

Covered: every write of a whole publication (create, replace, upload) held at its call, x the moment at which it is let
go (also after a prune), on a folder and in memory. What is let go while the writer itself still works is the fault
"lands late".
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.protocol.checks import facts
from tests.protocol.faults import LATE, At, Call, Dead, Do, Late, through
from tests.protocol.stories import Story, prune

from dispatch_agent.errors import Fenced
from dispatch_agent.publish import pointer, reader
from dispatch_agent.store.base import Store


@pytest.fixture
def undisturbed(fresh_store: Callable[[], Store], place: Path) -> Story:
    """The same with nothing that goes wrong: what is published then, and the calls that it takes."""
    story = Story(fresh_store(), place / "undisturbed")
    assert story.play() == [None, None]
    return story


def writes_of(story: Story) -> list[int]:
    return [call.number for call in story.store.calls if call.method in LATE]


def dies(real: Store, root: Path, k: int) -> tuple[Story, Late]:
    """A publisher that dies at its k-th call, a write, which is still on its way."""
    late = Late(At(k), real, lambda call: Dead(str(call)))
    dead = threading.Event()

    def until_dead(call: Call, do: Do) -> Any:
        if dead.is_set():  # its other thread had not heard yet
            raise Dead(str(call))
        try:
            return late(call, do)
        except Dead:
            dead.set()
            raise

    story = Story(real, root, until_dead)
    with contextlib.suppress(Dead):
        story.play()
    assert [call.number for call, _ in late.held] == [k]
    return story, late


def finish(story: Story, hook: Callable[[Call, Do], Any] = through) -> Story:
    """Fresh publishers go on where the dead one was, with all that the trainer saves."""
    fresh = story.next(hook)
    assert fresh.watch() is None
    fresh.then()
    assert fresh.watch() is None
    return fresh


def at(number: int, act: Callable[[], None]) -> Callable[[Call, Do], Any]:
    """Does something before a call."""

    def hook(call: Call, do: Do) -> Any:
        if call.number == number:
            act()
        return do()

    return hook


@pytest.mark.parametrize("moment", ["before the next publisher", "after it"])
def test_i9_the_last_write_of_a_dead_writer_lands_late(
    moment: str, fresh_store: Callable[[], Store], place: Path, undisturbed: Story
) -> None:
    for k in writes_of(undisturbed):
        what = f"{moment}: {undisturbed.store.calls[k - 1]}"
        story, late = dies(fresh_store(), place / str(k), k)
        if moment == "before the next publisher":
            late.deliver()
        fresh = finish(story)
        late.deliver()
        fresh.check()
        assert facts(story.real) == facts(undisturbed.real), what
        finish(story).check()
        assert facts(story.real) == facts(undisturbed.real), f"and once more, {what}"


def test_i9_the_last_write_of_a_dead_writer_lands_in_the_middle_of_the_next_ones_work(
    fresh_store: Callable[[], Store], place: Path, undisturbed: Story, exhaustive: bool
) -> None:
    total = len(undisturbed.store.calls)
    for k in writes_of(undisturbed):
        drawn = random.Random(k)  # noqa: S311 (repeatable, not secret)
        for j in range(1, total + 1) if exhaustive else drawn.sample(range(1, total + 1), 2):
            story, late = dies(fresh_store(), place / f"{k}-{j}", k)
            fresh = finish(story, at(j, late.deliver))
            late.deliver()  # there may have been no such call
            what = f"{undisturbed.store.calls[k - 1]} lands before the next one's call {j}"
            assert facts(story.real) == facts(undisturbed.real), what
            fresh.check(pointer_is_current=False)
            finish(story).check()
            assert facts(story.real) == facts(undisturbed.real), f"and once more, {what}"


def test_i7_the_last_write_of_a_dead_writer_lands_while_its_successor_works_or_after(
    fresh_store: Callable[[], Store], place: Path, undisturbed: Story, exhaustive: bool
) -> None:
    """The successor's saves are newest from their commit on, and the dead one's restarted publisher is refused."""
    total = len(undisturbed.store.calls)
    for k in writes_of(undisturbed):
        drawn = random.Random(k)  # noqa: S311 (repeatable, not secret)
        for j in range(1, total + 2) if exhaustive else [drawn.randint(1, total), total + 1]:
            what = f"{undisturbed.store.calls[k - 1]} lands before its successor's call {j} of {total}"
            story, late = dies(fresh_store(), place / f"{k}-{j}", k)
            successor = story.next(at(j, late.deliver), number=8)
            assert successor.play() == [None, None], what
            late.deliver()
            successor.check()
            published = facts(story.real)
            assert [fact[3:] for fact in published if fact[3] == 1_000_008] == [(1_000_008, 1, n) for n in (1, 2, 3)]
            assert reader.newest(story.real).attempt == "a8", what
            assert isinstance(story.next().watch(), Fenced), what
            assert facts(story.real) == published, what
            successor.check()


def test_i6_the_last_write_of_a_dead_writer_lands_after_a_prune(
    fresh_store: Callable[[], Store], place: Path, undisturbed: Story
) -> None:
    """Of an execution whose epoch was sealed meanwhile: no reader takes it for newest, and the next prune buries it."""
    for k in writes_of(undisturbed):
        what = f"{undisturbed.store.calls[k - 1]} lands after a prune"
        story, late = dies(fresh_store(), place / str(k), k)
        for number in (8, 9):
            successor = story.next(number=number)
            assert successor.play() == [None, None], what
        assert prune(story.real) is None, what
        late.deliver()
        successor.look(what)
        assert reader.newest(story.real).attempt == "a9", what
        assert pointer.read(story.real).order == reader.newest(story.real).order, what  # type: ignore[union-attr]
        assert isinstance(story.next().watch(), Fenced), what
        assert prune(story.real) is None, what
        successor.check()
        assert {item.order.epoch for item in reader.published(story.real)} == {1_000_009}, what
