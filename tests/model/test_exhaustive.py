"""Every interleaving and every fault within bounds, over the shipped publisher: nothing breaks I1 to I9."""

from __future__ import annotations

import pytest
from tests.model.actors import Folder, Save
from tests.model.conftest import Explore
from tests.model.explore import Scenario
from tests.model.writers import Writer, finished, nothing_said_is_swept, pruner, publishers


def executions(*saves: int) -> tuple[list[Writer], dict[Folder, list[Save]]]:
    """Executions of epochs 1, 2, …, each with so many saves that are complete from the start."""
    folders = [Folder(epoch, f"a{epoch}") for epoch in range(1, len(saves) + 1)]
    return [Writer(folder, folder.epoch) for folder in folders], {
        folder: saves_of(folder, count) for folder, count in zip(folders, saves, strict=True)
    }


def saves_of(folder: Folder, count: int) -> list[Save]:
    return [Save(f"s{number}", f"{folder.attempt}{number}", number) for number in range(1, count + 1)]


def racing(*saves: int, faults: int = 0) -> Scenario:
    actors, objects = publishers(*executions(*saves))
    return Scenario(actors, objects, faults=faults, at_the_end=finished)


def one_folder(saves: int, *, faults: int = 0, age: int = 1) -> Scenario:
    """Two publishers of one folder, without its lock: an owner and a recovery, or a sidecar and a one-shot."""
    folder = Folder(1, "a1")
    actors, objects = publishers([Writer(folder, 1), Writer(folder, 2)], {folder: saves_of(folder, saves)}, age=age)
    return Scenario(actors, objects, faults=faults, at_the_end=finished)


def two_folders(saves: int, *, faults: int = 0) -> Scenario:
    """Two folders of one rank under one attempt: a pod that was replaced, and what is left of it."""
    folders = [Folder(1, "a1", "old"), Folder(1, "a1", "new")]
    actors, objects = publishers(
        [Writer(folder, number) for number, folder in enumerate(folders, 1)],
        {folder: saves_of(folder, saves) for folder in folders},
    )
    return Scenario(actors, objects, faults=faults, at_the_end=finished)


def two_attempts(saves: int, *, faults: int = 0, rank: int = 0) -> Scenario:
    """One epoch given to two attempts; the second at any rank."""
    folders = [Folder(1, "a1"), Folder(1, "b1")]
    writers = [Writer(folders[0], 1), Writer(folders[1], 2, rank)]
    actors, objects = publishers(writers, {folder: saves_of(folder, saves) for folder in folders})
    return Scenario(actors, objects, faults=faults, at_the_end=finished)


def pruned(*saves: int, faults: int = 0) -> Scenario:
    actors, objects = publishers(*executions(*saves), alone=False)
    return Scenario((*actors, pruner()), objects, faults=faults, always=nothing_said_is_swept, at_the_end=finished)


SCENARIOS = {
    "one writer, two saves, two faults": lambda: racing(2, faults=2),
    "three writers, two saves each": lambda: racing(2, 2, 2),
    "two writers, two saves each, one fault": lambda: racing(2, 2, faults=1),
    "three writers, one fault": lambda: racing(1, 1, 1, faults=1),
    "two publishers of one folder": lambda: one_folder(2),
    "two folders of one rank": lambda: two_folders(2),
    "two attempts of one epoch": lambda: two_attempts(1, faults=1),
    "two attempts of one epoch at two ranks": lambda: two_attempts(1, faults=1, rank=1),
    "a prune beside two writers": lambda: pruned(1, 2),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_breaks_the_protocol(explored: Explore, name: str) -> None:
    found = explored(SCENARIOS[name]())
    assert found.violation is None, str(found.violation)
    assert found.ends > 0
