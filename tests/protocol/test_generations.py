"""Which contents of one name are published, as what, and in which order (I9): by a new publisher each time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.protocol.checks import check_invariants, commits
from tests.protocol.faults import Call, Do, faulty
from tests.protocol.jobs import Bench, Execution, small

from dispatch_agent.checkpoint.folder import mark_complete
from dispatch_agent.errors import StoreUnavailable
from dispatch_agent.publish import pointer, reader
from dispatch_agent.store.memory import MemoryStore


@pytest.fixture
def execution(place: Path) -> Execution:
    return Execution(place, 1)


@pytest.fixture
def bench() -> Bench:
    return Bench(MemoryStore())


def published(bench: Bench) -> list[tuple[str, int, int]]:
    """Save, generation and ordinal of every commit, the oldest first."""
    check_invariants(bench.store)
    return [(record.save, record.generation, record.order.ordinal) for record in commits(bench.store)]


def is_newest(bench: Bench, save: str) -> bool:
    named = pointer.read(bench.store)
    return reader.newest(bench.store).save == save and named is not None and named.save == save


def test_i9_other_content_under_one_name_is_a_new_generation(bench: Bench, execution: Execution) -> None:
    execution.save("last", small("A"))
    bench.run(execution)
    execution.save("last", small("B"))
    bench.run(execution)
    assert published(bench) == [("last", 1, 1), ("last", 2, 2)]


def test_i9_the_same_content_again_is_already_published(bench: Bench, execution: Execution) -> None:
    execution.save("last", small("A"))
    bench.run(execution)
    execution.save("last", small("A"))
    assert bench.run(execution) is None
    assert published(bench) == [("last", 1, 1)]


def test_i9_what_came_back_is_a_generation_of_its_own(bench: Bench, execution: Execution) -> None:
    for content in "ABA":
        execution.save("last", small(content))
        bench.run(execution)
    assert published(bench) == [("last", 1, 1), ("last", 2, 2), ("last", 3, 3)]
    first, _, third = commits(bench.store)
    assert first.content == third.content


def test_i9_what_came_back_after_the_same_again_counts_distinct_contents(bench: Bench, execution: Execution) -> None:
    for content in "AABBA":
        execution.save("last", small(content))
        bench.run(execution)
    assert published(bench) == [("last", 1, 1), ("last", 2, 3), ("last", 3, 5)]


def test_i9_a_start_on_what_is_published_changes_nothing(bench: Bench, execution: Execution) -> None:
    execution.save("step-1", small("A"))
    bench.run(execution)
    before = {item.key for item in bench.store.list("")}
    assert bench.run(execution) is None
    assert {item.key for item in bench.store.list("")} == before


def test_i9_marked_again_without_a_change_it_is_not_published_again(bench: Bench, execution: Execution) -> None:
    path = execution.save("step-1", small("A"))
    bench.run(execution)
    mark_complete(path)
    assert bench.run(execution) is None
    assert published(bench) == [("step-1", 1, 1)]


def test_i9_the_next_generation_waits_until_it_is_known_whether_the_last_one_landed(execution: Execution) -> None:
    """Otherwise both would be the first."""
    refusing = [True]

    def hook(call: Call, do: Do) -> Any:
        if refusing and call.method == "create" and call.key.startswith("commits/") and "/0001.000001." in call.key:
            msg = "not now (by the test)"
            raise StoreUnavailable(msg)
        return do()

    bench = Bench(faulty(MemoryStore(), hook))
    publisher = bench.publisher(execution)
    for content in "AB":
        execution.save("last", small(content))
        publisher.run()
        bench.clock.now += 100.0
    assert publisher.unsure
    refusing.clear()
    publisher.run()
    assert published(bench) == [("last", 1, 1), ("last", 2, 2)]


@pytest.mark.parametrize("rule", ["marker", "rename"])
@pytest.mark.parametrize("kept_running", [True, False])
def test_i9_a_save_that_rotation_deletes_file_by_file_is_never_published_again(
    rule: str, kept_running: bool, bench: Bench, execution: Execution
) -> None:
    path = execution.save("step-1", {f"shard-{n}": os.urandom(50) for n in range(5)})
    if rule == "rename":
        path = execution.write("step-2", {f"shard-{n}": os.urandom(50) for n in range(5)})
    bench.run(execution, rule=rule)
    expected = published(bench)
    publisher = bench.publisher(execution, rule=rule)
    for file in sorted(path.iterdir()):
        file.unlink()
        for _ in range(3):
            bench.clock.now += 10.0
            (publisher if kept_running else bench.publisher(execution, rule=rule)).run()
    path.rmdir()
    bench.run(execution, rule=rule)
    assert published(bench) == expected


def test_i9_two_saves_complete_in_one_look_keep_the_order_of_their_markers(bench: Bench, execution: Execution) -> None:
    """Whatever their names and times say."""
    for name in ("z", "y", "a", "step-10", "step-9"):
        execution.write(name, small(name))
    for name in ("step-10", "z", "a", "step-9", "y"):
        mark_complete(execution.folder / name)
    bench.run(execution)
    assert [save for save, _, _ in published(bench)] == ["step-10", "z", "a", "step-9", "y"]
    assert is_newest(bench, "y")


def test_i9_two_saves_complete_in_one_look_without_markers_keep_the_order_of_their_times(
    bench: Bench, execution: Execution
) -> None:
    for age, name in enumerate(["a", "c", "b"]):
        path = execution.write(name, {"data": name.encode()})
        for each in (path / "data", path):
            os.utime(each, (1_700_000_000 - age, 1_700_000_000 - age))
    bench.run(execution, rule="rename")
    assert [save for save, _, _ in published(bench)] == ["b", "c", "a"]


def test_i7_a_late_upload_is_committed_in_its_place_and_is_not_the_newest(execution: Execution) -> None:
    """The first save's bytes arrive damaged at first, so the second one is committed before it."""
    made: list[str] = []

    def hook(call: Call, do: Do) -> Any:
        if call.method == "create" and call.key.startswith("commits/"):
            made.append(call.key.split(".")[1])
        if call.method == "list" and "/step-1/" in call.key and not made:
            return []  # not one of its files is there
        return do()

    real = MemoryStore()
    bench = Bench(faulty(real, hook))
    execution.save("step-1", small("one"))
    execution.save("step-2", small("two"))
    publisher = bench.publisher(execution)
    publisher.run()
    bench.clock.now += 10.0
    publisher.run()
    assert made == ["000002", "000001"]
    bench.store = real
    assert published(bench) == [("step-1", 1, 1), ("step-2", 1, 2)]
    assert is_newest(bench, "step-2")


def test_i7_a_late_upload_of_an_older_execution_is_not_the_newest(bench: Bench, place: Path) -> None:
    """While no newer epoch has a commit it is taken; once one has, it is refused."""
    old, new = Execution(place, 1), Execution(place, 2)
    old.save("step-5", small("old"))
    new.save("step-3", small("new"))
    waiting = bench.publisher(new)
    assert bench.run(old) is None
    waiting.run()
    old.save("step-6", small("older"))
    error = bench.run(old)
    assert error is not None
    assert error.exit_code == 30
    assert published(bench) == [("step-5", 1, 1), ("step-3", 1, 1)]
    assert is_newest(bench, "step-3")
