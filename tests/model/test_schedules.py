"""The schedules that broke earlier drafts of the protocol, each by its name.

Each is shown to happen (a state that only it leads to is reached) and to break nothing in any run of its world. Two
ranks that pair different contents of one name cannot be told here: a commit has one part, its own rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from tests.model.actors import Folder, Save, nonce
from tests.model.conftest import Explore
from tests.model.explore import Marks, Scenario
from tests.model.invariants import View
from tests.model.scenarios import (
    meeting,
    one_folder,
    pruned,
    racing,
    saves_of,
    trained,
    two_attempts,
    two_folders,
)
from tests.model.writers import ENDED, PENDING, Writer, finished, pruner, publishers, ran

from dispatch_agent.publish import keys

Reached = Callable[[View, tuple[Marks, ...]], bool]


def ended(actor: int, end: str) -> Reached:
    return lambda _, marks: f"{ENDED}{end}" in marks[actor]


def places(view: View) -> list[tuple[int, int, int]]:
    return sorted({order.place for order in view.commits})


def data_of(view: View, start: int, tried: int) -> bool:
    """Whether the first writer's try of that start left data."""
    mark = f".{nonce(1, start, 0, 1)}.{tried:06d}/"
    return any(mark in key for key in view.objects)


def third_after_second(view: View, marks: tuple[Marks, ...]) -> bool:
    """The second execution committed; then the third, on the first one's folder, was refused."""
    return places(view) == [(2, 1, 1)] and f"{ENDED}Fenced" in marks[0]


def after_a_prune() -> Scenario:
    """An execution that published three saves, of which one was pruned, is started again."""
    folder = Folder(1, "a1")
    stands = {folder: saves_of(folder, 3)}
    first, objects = publishers([Writer(folder, 1)], stands, alone=False)
    again, _ = publishers([Writer(folder, 2)], stands, alone=False)
    there = ran([*first, pruner()], objects)
    assert any(key.startswith(f"{keys.PRUNED}/") for key in there)
    return Scenario(again, there, faults=1, at_the_end=finished)


def somebody_else_committed(view: View, _marks: tuple[Marks, ...]) -> bool:
    return {order.nonce for order in view.commits} != {nonce(1, 0, 0, 1)}


def owner_recovery_and_successor() -> Scenario:
    """An owner and a recovery on one folder, which hold each other off by nothing, and the next execution."""
    old, new = Folder(1, "a1"), Folder(2, "a2")
    stands = {old: saves_of(old, 1), new: saves_of(new, 1)}
    return meeting([Writer(old, 1), Writer(old, 2), Writer(new, 3)], stands)


def both_committed(view: View, _marks: tuple[Marks, ...]) -> bool:
    return len([order for order in view.commits if order.place == (1, 1, 1)]) == 2


def pointer_on_its_way(view: View, marks: tuple[Marks, ...]) -> bool:
    return PENDING in marks[0] and any(key.startswith(f"{keys.PRUNED}/") for key in view.objects)


@dataclass(frozen=True)
class Schedule:
    what: str
    scenario: Callable[[], Scenario]
    happens: Reached


SCHEDULES = [
    Schedule(
        "a leftover published by a third execution after a second one committed",
        lambda: racing(1, 1, faults=1),
        third_after_second,
    ),
    Schedule(
        "two saves found complete in one look, and the first one fails",
        lambda: racing(2, faults=1),
        lambda view, _: places(view) == [(1, 1, 2)],
    ),
    Schedule(
        "a dropped try's late write",
        lambda: racing(1, faults=1, kinds=frozenset({"late"})),
        lambda view, _: data_of(view, 0, 1) and data_of(view, 0, 2) and bool(view.commits),
    ),
    Schedule("two publishers of one folder, neither of which fences the other", lambda: one_folder(1), both_committed),
    Schedule(
        "two attempts that claim one epoch at different ranks",
        lambda: two_attempts(1, rank=1, faults=1),
        ended(1, "EpochCollision"),
    ),
    Schedule(
        "a stalled commit that lands after a prune",
        lambda: pruned(1, 2),
        lambda view, _: any(map(view.swept, view.commits)),
    ),
    Schedule(
        "a pending pointer write that lands after a prune",
        lambda: pruned(1, 1, before=(1,), faults=1, kinds=frozenset({"late"})),
        pointer_on_its_way,
    ),
    Schedule(
        "a replaced pod whose sidecar restarts in place after its successor committed",
        lambda: two_folders(1, faults=1, kinds=frozenset({"again", "crash"})),
        lambda view, marks: places(view) == [(1, 1, 1), (1, 2, 1)] and f"{ENDED}Fenced" in marks[0],
    ),
    Schedule(
        "an owner and a recovery at work on one folder without a lock", owner_recovery_and_successor, both_committed
    ),
    Schedule(
        "an upload that failed, then a restart",
        lambda: racing(1, faults=2, kinds=frozenset({"late", "crash"})),
        lambda view, _: data_of(view, 0, 1) and any(order.nonce == nonce(1, 1, 0, 1) for order in view.commits),
    ),
    Schedule(
        "a volume whose files were all chowned by a new mount",
        lambda: trained(
            Save("last", "A", 1), Save("last", "A", 1, mounted=1), faults=1, kinds=frozenset({"again", "crash"})
        ),
        ended(0, "done"),
    ),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.what)
def test_it_happens_and_breaks_nothing(explored: Explore, schedule: Schedule) -> None:
    assert happens(explored, schedule.scenario(), schedule.happens), "it never happens: the world is too small"


def test_a_restart_after_a_prune_publishes_no_old_save_as_new(explored: Explore) -> None:
    assert not happens(explored, after_a_prune(), somebody_else_committed)


def test_a_chowned_volume_is_not_published_twice(explored: Explore) -> None:
    scenario = trained(Save("last", "A", 1), Save("last", "A", 1, mounted=1), faults=1, kinds=frozenset({"again"}))
    assert not happens(explored, scenario, lambda view, _: len(places(view)) > 1)


def happens(explored: Explore, scenario: Scenario, what: Reached) -> bool:
    """Whether it happens in any run. Nothing is wrong in any."""
    seen: list[View] = []

    def look(view: View, marks: tuple[Marks, ...]) -> str:
        if not seen and what(view, marks):
            seen.append(view)
        return scenario.always(view, marks) if scenario.always else ""

    found = explored(replace(scenario, always=look))
    assert found.violation is None, str(found.violation)
    assert found.ends, "no run ever ends"
    return bool(seen)
