"""Who meets whom: the small worlds that are explored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.model.actors import Folder, Save
from tests.model.explore import FAULTS, Scenario
from tests.model.writers import Writer, finished, nothing_said_is_swept, pruner, publishers, ran


def saves_of(folder: Folder, count: int) -> list[Save]:
    """Saves that stand complete from the start."""
    return [Save(f"s{number}", f"{folder.path} {number}", number) for number in range(1, count + 1)]


def executions(saves: Iterable[int], first: int = 1) -> tuple[list[Writer], dict[Folder, list[Save]]]:
    """Executions of the epochs `first`, …, one publisher each, each with so many saves."""
    stands = {Folder(e, f"a{e}"): saves_of(Folder(e, f"a{e}"), count) for e, count in enumerate(saves, first)}
    return [Writer(folder, folder.epoch) for folder in stands], stands


def meeting(
    writers: Sequence[Writer],
    stands: Mapping[Folder, Sequence[Save]],
    *,
    faults: int = 0,
    kinds: frozenset[str] = FAULTS,
    losses: int = 0,
    weak: bool = False,
    age: int = 1,
    tries: int = 2,
    trained: bool = False,
) -> Scenario:
    """Publishers that start at any time."""
    actors, objects = publishers(writers, stands, weak=weak, age=age, tries=tries, trained=trained)
    return Scenario(
        actors,
        objects,
        faults=faults,
        kinds=kinds,
        losses=losses,
        weak=weak,
        at_the_end=_nothing if weak or losses else finished,
    )


def racing(*saves: int, **more: Any) -> Scenario:
    """Executions of the epochs 1, 2, …, each with so many saves. More as in `meeting`, here and below."""
    return meeting(*executions(saves), **more)


def trained(*saves: Save, writers: int = 1, **more: Any) -> Scenario:
    """A trainer that writes these saves into one folder, beside publishers."""
    folder = Folder(1, "a1")
    who = [Writer(folder, number) for number in range(1, writers + 1)]
    return meeting(who, {folder: saves}, trained=True, **more)


def one_folder(saves: int, **more: Any) -> Scenario:
    """Two publishers of one folder, whose lock holds nobody: an owner and a recovery, a sidecar and a one-shot."""
    folder = Folder(1, "a1")
    return meeting([Writer(folder, 1), Writer(folder, 2)], {folder: saves_of(folder, saves)}, **more)


def two_folders(saves: int, **more: Any) -> Scenario:
    """Two folders of one rank under one attempt: a pod that was replaced, and what is left of it."""
    stands = {folder: saves_of(folder, saves) for folder in (Folder(1, "a1", "old"), Folder(1, "a1", "new"))}
    return meeting([Writer(folder, number) for number, folder in enumerate(stands, 1)], stands, **more)


def two_attempts(saves: int, *, rank: int = 0, **more: Any) -> Scenario:
    """One epoch given to two attempts, the second of them at any rank."""
    first, second = Folder(1, "a1"), Folder(1, "b1")
    stands = {folder: saves_of(folder, saves) for folder in (first, second)}
    return meeting([Writer(first, 1), Writer(second, 2, rank)], stands, **more)


def pruned(
    *saves: int, before: Sequence[int] = (), faults: int = 0, kinds: frozenset[str] = FAULTS, prunes: int = 1
) -> Scenario:
    """Prunes beside executions; those of `before`, of older epochs, have published all they have."""
    earlier, old = executions(before)
    writers, new = executions(saves, first=len(before) + 1)
    done, objects = publishers(earlier, old, alone=False)
    actors, more = publishers(writers, new, alone=False)
    return Scenario(
        (*actors, *(pruner(number) for number in range(1, prunes + 1))),
        ran(done, {**objects, **more}),
        faults=faults,
        kinds=kinds,
        always=nothing_said_is_swept,
        at_the_end=finished,
    )


def _nothing(*_: object) -> str:
    return ""
