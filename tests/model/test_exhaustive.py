"""Every interleaving and every fault within bounds, over the shipped publisher: nothing breaks I1 to I9."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.model.actors import Save
from tests.model.conftest import Explore
from tests.model.explore import BLIND, LYING, Scenario
from tests.model.scenarios import one_folder, pruned, racing, trained, two_attempts, two_folders

WORLDS: dict[str, Callable[[], Scenario]] = {
    "one writer, two saves, two faults": lambda: racing(2, faults=2),
    "three writers, two saves each": lambda: racing(2, 2, 2),
    "two writers, two saves each, one fault": lambda: racing(2, 2, faults=1),
    "two writers whose later starts have lesser nonces, one fault": lambda: racing(1, 1, faults=1, age=-1),
    "three writers, no answer lost but one write late": lambda: racing(1, 1, 1, faults=1, kinds=frozenset({"late"})),
    "two publishers of one folder": lambda: one_folder(2),
    "two folders of one rank, one fault": lambda: two_folders(1, faults=1),
    "two attempts of one epoch, one fault": lambda: two_attempts(1, faults=1),
    "two attempts of one epoch at two ranks, one fault": lambda: two_attempts(1, rank=1, faults=1),
    "a pointer that somebody deletes": lambda: racing(1, 2, losses=1),
    "a pointer that somebody deletes, one fault": lambda: racing(1, 1, losses=1, faults=1),
    "one name written over, one write late or one crash": lambda: written_over(
        "A", "B", faults=1, kinds=frozenset({"late", "crash"})
    ),
    "a prune beside two writers": lambda: pruned(1, 2),
    "a prune beside one writer, one fault": lambda: pruned(1, before=(2,), faults=1),
    "two prunes beside one writer": lambda: pruned(1, before=(2, 1), prunes=2),
    "a store that ignores conditions, three writers": lambda: racing(1, 2, 1, weak=True),
    "a store that ignores conditions, one fault": lambda: racing(1, 1, weak=True, faults=1),
    "a store that ignores conditions, two publishers of one folder": lambda: one_folder(1, weak=True),
    "a store that ignores conditions, two attempts": lambda: two_attempts(1, weak=True),
    "a store that ignores conditions, two folders": lambda: two_folders(1, weak=True),
    "a store that says too early that data is stored": lambda: racing(1, 1, faults=1, kinds=LYING),
}
LARGER_WORLDS: dict[str, Callable[[], Scenario]] = {
    "three writers, two saves each, one fault": lambda: racing(2, 2, 2, faults=1),
    "three writers, one fault": lambda: racing(1, 1, 1, faults=1),
    "two writers, two faults": lambda: racing(1, 1, faults=2),
    "one writer, three faults": lambda: racing(1, faults=3),
    "two publishers of one folder, one fault": lambda: one_folder(1, faults=1),
    "one name written over, one fault": lambda: written_over("A", "B", faults=1),
    "one name written over, two publishers": lambda: written_over("A", "B", writers=2),
    "one name written over twice, one fault": lambda: written_over("A", "B", "A", faults=1),
    "a prune beside three writers": lambda: pruned(1, 1, 1),
    "a prune beside two writers after an older one, one write late": lambda: pruned(
        1, 1, before=(1,), faults=1, kinds=frozenset({"late"})
    ),
    "a prune beside two writers, one write late": lambda: pruned(1, 2, faults=1, kinds=frozenset({"late"})),
    "two prunes beside one writer, one fault": lambda: pruned(1, before=(2, 1), prunes=2, faults=1),
    "a store that ignores conditions, two publishers of one folder, one fault": lambda: one_folder(
        1, weak=True, faults=1
    ),
}
"""With `--exhaustive`: minutes each, and up to two gigabytes. `-s` prints how much there was."""


def written_over(*contents: str, **more: Any) -> Scenario:
    """A trainer that writes one save again and again, each time with the next of these contents."""
    return trained(*(Save("last", content, number) for number, content in enumerate(contents, 1)), **more)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        worlds = {**WORLDS, **(LARGER_WORLDS if metafunc.config.getoption("--exhaustive") else {})}
        metafunc.parametrize("world", worlds.values(), ids=worlds)


@pytest.mark.timeout(7200)
def test_nothing_breaks_the_protocol(explored: Explore, world: Callable[[], Scenario]) -> None:
    found = explored(world())
    print(f"{found.states} states, {found.steps} steps, {found.ends} ends")
    assert found.violation is None, str(found.violation)
    assert found.ends, "no run ever ends"


BLINDED: dict[str, tuple[Callable[[], Scenario], str]] = {
    "a stale writer does not see that it is": (lambda: racing(1, 1, faults=1, kinds=BLIND), "stale"),
    "a prune sweeps the half of a save that it is shown": (
        lambda: only_the_prune_is_struck(pruned(1, 2, faults=1, kinds=BLIND)),
        "I6",
    ),
    "a second attempt does not see the first": (lambda: two_attempts(1, weak=True, faults=1, kinds=BLIND), "I5"),
}


def only_the_prune_is_struck(scenario: Scenario) -> Scenario:
    actors = tuple(replace(actor, faultless=not actor.name.startswith("prune")) for actor in scenario.actors)
    return replace(scenario, actors=actors)


@pytest.mark.parametrize("name", BLINDED)
def test_without_list_after_write_it_breaks(explored: Explore, name: str) -> None:
    """Why a store whose listings lag is refused (exit 12): each of these is a run that such a store allows."""
    scenario, breaks = BLINDED[name]
    found = explored(scenario())
    assert found.violation is not None
    assert found.violation.what.startswith(breaks), str(found.violation)


def test_leaving_out_what_only_one_can_see_changes_no_outcome(explored: Explore) -> None:
    """Neither do the steps that forget how they came to their result: both only save work."""
    scenario = racing(1, 1, faults=1, kinds=frozenset({"late", "crash"}))
    all_of_it = replace(scenario, actors=tuple(replace(a, alone=(), alone_reads=()) for a in scenario.actors))
    reduced, whole = explored(scenario), explored(all_of_it)
    assert whole.states > 2 * reduced.states
    assert whole.outcomes == reduced.outcomes
    remembering = explored(scenario, steps=False)
    assert remembering.states > reduced.states
    assert remembering.outcomes == reduced.outcomes
