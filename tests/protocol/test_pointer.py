"""The pointer only moves up, whatever happens to it (I4), and nobody who reads the commits depends on it (I7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.protocol.checks import check_invariants
from tests.protocol.faults import Call, Do, faulty
from tests.protocol.jobs import Bench, Execution, small

from dispatch_agent.errors import IntegrityError, StoreUnavailable
from dispatch_agent.publish import pointer, reader
from dispatch_agent.store.memory import MemoryStore

TRIES = 6


def test_i4_a_pointer_that_could_not_be_moved_is_moved_by_a_later_pass(place: Path) -> None:
    """Also if no save comes after it that would move it."""
    lost: list[Call] = []

    def hook(call: Call, do: Do) -> Any:
        if call.key == "latest.json" and len(lost) < TRIES:
            lost.append(call)
            msg = "not now (by the test)"
            raise StoreUnavailable(msg)
        return do()

    bench = Bench(faulty(MemoryStore(), hook))
    execution = Execution(place, 1)
    execution.save("step-1", small(1))
    publisher = bench.publisher(execution)
    publisher.run()
    assert pointer.read(bench.store) is None
    publisher.run()
    check_invariants(bench.store)


def test_i4_a_stale_writer_that_finds_no_pointer_does_not_make_one_that_names_itself(place: Path) -> None:
    """After its commit, before it looks at the pointer, a newer one publishes and something deletes the pointer."""
    store, old, new = MemoryStore(), Execution(place, 1), Execution(place, 2)

    def hook(call: Call, do: Do) -> Any:
        if call.method == "read" and call.key == "latest.json":
            new.save("step-1", small("new"))
            assert Bench(store).run(new) is None
            store.delete("latest.json")
        return do()

    old.save("step-9", small("old"))
    assert Bench(faulty(store, hook)).run(old) is None
    check_invariants(store)


def test_i4_a_pointer_that_vanished_under_a_publisher_is_an_alarm_and_is_not_made_anew(place: Path) -> None:
    bench, execution = Bench(MemoryStore()), Execution(place, 1)
    publisher = bench.publisher(execution)
    for step in (1, 2):
        execution.save(f"step-{step}", small(step))
        publisher.run()
        bench.store.delete("latest.json")
    assert pointer.read(bench.store) is None
    assert "has vanished" in "".join(bench.lines)
    assert reader.newest(bench.store).save == "step-2"


@pytest.mark.parametrize("damage", [b"", b"garbage", b'{"format":2}', b"[]"])
def test_i7_a_damaged_pointer_stops_neither_writers_nor_readers(damage: bytes, place: Path) -> None:
    bench, execution = Bench(MemoryStore()), Execution(place, 1)
    execution.save("step-1", small(1))
    assert bench.run(execution) is None
    bench.store.put("latest.json", damage)
    execution.save("step-2", small(2))
    assert bench.run(execution) is None
    assert reader.newest(bench.store).save == "step-2"
    with pytest.raises(IntegrityError):
        pointer.read(bench.store)


def test_i4_a_pointer_that_vanishes_between_a_look_and_the_write_is_an_alarm(place: Path) -> None:
    """Also to a publisher that sees it for the first time."""
    store = MemoryStore()
    first, second = Execution(place, 1), Execution(place, 2)
    first.save("step-1", small(1))
    assert Bench(store).run(first) is None

    def hook(call: Call, do: Do) -> Any:
        if call.method == "replace":
            store.delete("latest.json")
        return do()

    second.save("step-1", small(2))
    bench = Bench(faulty(store, hook))
    assert bench.run(second) is None
    assert pointer.read(store) is None
    assert "has vanished" in "".join(bench.lines)


@pytest.mark.parametrize("lost", [0, 5], ids=["seen in a look", "seen, and no answer to the last write"])
def test_i4_a_publisher_that_was_alarmed_stays_so(lost: int, place: Path) -> None:
    """Whichever try of its first commit saw the pointer, its second commit makes none."""
    store = MemoryStore()
    first, second = Execution(place, 1), Execution(place, 2)
    first.save("step-1", small(1))
    assert Bench(store).run(first) is None
    replaces: list[Call] = []

    def hook(call: Call, do: Do) -> Any:
        if call.method == "replace":
            replaces.append(call)
            if len(replaces) <= lost:
                msg = "not now (by the test)"
                raise StoreUnavailable(msg)
            store.delete("latest.json")
            if lost:
                msg = "not now (by the test)"
                raise StoreUnavailable(msg)
        return do()

    bench = Bench(faulty(store, hook))
    publisher = bench.publisher(second)
    for step in (2, 3):
        second.save(f"step-{step}", small(step))
        publisher.run()
    assert pointer.read(store) is None
    assert "has vanished" in "".join(bench.lines)
