"""One pass and the loop around it: what is reported, what is tried again, and when the loop gives up."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from tests.protocol.faults import Call, Do, FakeClock, faulty
from tests.protocol.jobs import Bench, Execution, small

from dispatch_agent.errors import IntegrityError, NothingPublished, StoreDenied, StoreUnavailable
from dispatch_agent.publish.publisher import Pass
from dispatch_agent.publish.watcher import BACKOFF_LONGEST, Stop, Tally
from dispatch_agent.store.memory import MemoryStore

UPGRADE = StoreUnavailable("it is being upgraded")


@pytest.fixture
def execution(tmp_path: Path) -> Execution:
    return Execution(tmp_path, 1)


def waiting(done: Pass) -> dict[str, str]:
    return {save: verdict.reason for save, verdict in done.waiting}


def test_a_save_that_cannot_be_looked_at_is_reported_as_stuck(execution: Execution) -> None:
    """A damaged marker holds back its own save, loudly, and no other."""
    bench = Bench(MemoryStore("unreadable"))
    execution.save("step-1", small(1))
    execution.save("step-2", small(2))
    (execution.folder / ".dispatch" / "complete" / "step-1").write_text("{")
    done = bench.publisher(execution).run()
    assert [outcome.save for outcome in done.outcomes] == ["step-2"]
    assert list(waiting(done)) == ["step-1"]
    assert done.waiting[0][1].stuck
    assert done.seen == 2


def test_a_published_save_that_the_tracker_no_longer_names_is_no_news(execution: Execution) -> None:
    bench = Bench(MemoryStore("tracker"))
    publisher = bench.publisher(execution, rule="pointer:latest")
    for name in ("step-1", "step-2"):
        execution.write(name, small(name))
        execution.write("latest", name.encode())
        publisher.run()
        bench.clock.wait(Stop().wake, 10.0)
        done = publisher.run()
        assert [outcome.result for outcome in done.outcomes] == ["published"]
        assert not waiting(done)
    execution.write("step-3", small(3))
    assert list(waiting(publisher.run())) == ["step-3"]


def test_a_save_written_on_after_its_signal_is_not_published_and_said_to_be_so(execution: Execution) -> None:
    """A placed save whose bytes changed under the same marker is another save than the one that was complete (I2)."""
    bench = Bench(MemoryStore("written-on"))
    save = execution.save("step-1", small(1))
    publisher = bench.publisher(execution)
    marker = execution.folder / ".dispatch" / "complete" / "step-1"
    times = marker.stat()
    store = bench.store
    bench.store = faulty(store)
    assert publisher.run().outcomes[0].result == "published"
    (save / "weights.dat").write_bytes(b"half a new one")
    os.utime(save / "weights.dat", ns=(times.st_atime_ns, times.st_mtime_ns))
    done = publisher.run()
    assert not done.outcomes
    assert "publish complete" in waiting(done).get("step-1", "publish complete")
    assert len(list(store.list("commits"))) == 1


def test_a_store_that_goes_away_is_tried_again_with_growing_pauses_until_it_is_back(execution: Execution) -> None:
    """I9: a sidecar does not give up."""
    clock = FakeClock()
    asked: list[float] = []
    back_at = clock.now + 600.0

    def away(call: Call, do: Do) -> object:
        if call.number > 12 and clock.now < back_at:
            asked.append(clock.now)
            raise UPGRADE
        return do()

    bench = Bench(faulty(MemoryStore("away"), away), clock)
    execution.save("step-1", small(1))
    assert bench.run(execution) is None
    assert max(after - before for before, after in pairwise(asked)) >= BACKOFF_LONGEST
    assert len(asked) < 100


@pytest.mark.parametrize(("error", "patient"), [(StoreUnavailable("down"), True), (StoreDenied("no"), False)])
def test_a_start_that_cannot_reach_the_store_ends_and_one_that_is_denied_ends_at_once(
    execution: Execution, error: Exception, patient: bool
) -> None:
    clock = FakeClock()

    def never(_call: Call, _do: Do) -> object:
        raise error

    bench = Bench(faulty(MemoryStore("never"), never), clock)
    execution.save("step-1", small(1))
    before = clock.now
    with pytest.raises(type(error)):
        bench.loop(lambda: bench.publisher(execution), Tally(), Stop(), once=False)
    assert (clock.now - before >= 60.0) == patient


def test_a_fault_of_our_own_is_counted_shown_and_tried_again(execution: Execution) -> None:
    """The one broad except: it swallows nothing silently."""
    clock = FakeClock()
    calls: list[Call] = []

    def broken(call: Call, do: Do) -> object:
        calls.append(call)
        if call.method == "upload" and len(calls) < 12:
            raise ZeroDivisionError
        return do()

    bench = Bench(faulty(MemoryStore("bug"), broken), clock)
    execution.save("step-1", small(1))
    tally = Tally()
    bench.loop(lambda: bench.publisher(execution), tally, Stop(), once=True)
    assert tally.published == 1
    assert tally.failed_passes >= 1
    assert any("ZeroDivisionError" in line and "Traceback" in line for line in bench.lines)


def test_saves_of_which_none_was_published_end_as_an_error(execution: Execution) -> None:
    bench = Bench(MemoryStore("nothing"))
    execution.write("step-1", small(1))
    assert isinstance(bench.run(execution), NothingPublished)


def test_a_save_that_holds_a_fifo_is_refused_and_the_next_one_goes_on(execution: Execution) -> None:
    bench = Bench(MemoryStore("fifo"))
    odd = execution.write("step-1", small(1))
    os.mkfifo(odd / "pipe")
    execution.save("step-1", small(1))
    execution.save("step-2", small(2))
    done = bench.publisher(execution).run()
    failed, published = done.outcomes
    assert (failed.save, published.save, published.result) == ("step-1", "step-2", "published")
    assert isinstance(failed.error, IntegrityError)
    assert "step-1/pipe" in str(failed.error)
    assert done.unpublished == done.hopeless == ("step-1",)


def test_a_commit_record_names_the_epoch_as_text_and_holds_no_local_path(execution: Execution) -> None:
    """Whoever reads the store learns nothing of the machine that wrote it but the publisher's name."""
    bench = Bench(MemoryStore("record"))
    execution.save("step-1", small(1))
    bench.publisher(execution).run()
    (commit,) = [item.key for item in bench.store.list("commits")]
    data = bench.store.read(commit).data
    assert json.loads(data)["epoch"] == "1000001"
    assert str(execution.root).encode() not in data
