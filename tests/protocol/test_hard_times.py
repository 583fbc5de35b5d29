"""What trainers, disks and people do to a publisher beside crashes: each once lost, mixed or blocked a save."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.protocol.checks import commits
from tests.protocol.faults import Call, Do, FakeClock, everything_in, faulty
from tests.protocol.jobs import Bench, Execution, small

from dispatch_agent import resume_path
from dispatch_agent.checkpoint.folder import mark_complete
from dispatch_agent.errors import StoreUnavailable, UsageError
from dispatch_agent.publish import reader, restore
from dispatch_agent.publish.publisher import StandBy
from dispatch_agent.publish.watcher import Stop, Tally
from dispatch_agent.store.keys import LOCK
from dispatch_agent.store.memory import MemoryStore
from dispatch_agent.store.posix import PosixStore

FULL = StoreUnavailable("no space left")


@pytest.fixture
def execution(tmp_path: Path) -> Execution:
    return Execution(tmp_path, 1)


def published(bench: Bench) -> list[str]:
    return [record.save for record in commits(bench.store)]


def test_i2_a_marked_save_that_rotation_has_half_deleted_is_not_published(execution: Execution) -> None:
    """The trainer marked it, began to rotate it away, and was killed; only then the publisher looks."""
    bench = Bench(MemoryStore("half-deleted"))
    for number in (1, 2, 3):
        execution.save(f"step-{number}", small(number))
    (execution.folder / "step-1" / "weights.dat").unlink()
    bench.run(execution)
    assert published(bench) == ["step-2", "step-3"]


@pytest.mark.parametrize("ahead", [0, 300])
def test_i2_a_half_overwritten_save_is_not_published_whatever_the_clocks_say(execution: Execution, ahead: int) -> None:
    """A file of the future made the marker newer than all that is written over it."""
    bench = Bench(MemoryStore(f"overwritten-{ahead}"))
    save = execution.write("last", small(1))
    future = time.time_ns() + ahead * 10**9
    os.utime(save / "weights.dat", ns=(future, future))
    mark_complete(save)
    (save / "inner" / "state.json").write_bytes(b"half of the next one")
    bench.run(execution)
    assert published(bench) == []
    mark_complete(save)
    bench.run(execution)
    assert published(bench) == ["last"]


@pytest.mark.parametrize("how", ["cleared", "moved away", "made anew"])
def test_i9_a_folder_that_is_replaced_under_a_running_publisher_is_started_on_anew(
    execution: Execution, how: str
) -> None:
    """Its order starts again at 1: the old publisher would take the new saves for published."""
    bench = Bench(MemoryStore(f"replaced-{how}"))
    publisher = bench.publisher(execution)
    for number in (1, 2, 3):
        execution.save(f"step-{number}", small(number))
    publisher.run()
    if how == "cleared":
        shutil.rmtree(execution.folder / ".dispatch")
    elif how == "moved away":
        execution.folder.rename(execution.root / "old")
    else:
        shutil.rmtree(execution.folder)
    for number in (4, 5):
        execution.save(f"step-{number}", small(number))
    with pytest.raises(StandBy, match="replaced"):
        publisher.run()
    tally, stop, starts = Tally(), Stop(), [publisher]

    def start() -> object:
        return starts.pop() if starts else bench.publisher(execution)

    bench.loop(start, tally, stop, once=True)  # type: ignore[arg-type]  # publishers, the first one used up
    assert {"step-4", "step-5"} <= set(published(bench))


def test_i9_a_save_that_the_store_does_not_take_holds_back_nobody(execution: Execution) -> None:
    def too_large(call: Call, do: Do) -> object:
        if call.method == "upload" and "/big/" in call.key:
            raise FULL
        return do()

    bench = Bench(faulty(MemoryStore("too-large"), too_large), FakeClock(limit=2000.0))
    publisher = bench.publisher(execution)
    execution.save("big", small(1))
    execution.save("small", small(2))
    publisher.run()
    assert published(bench) == ["small"]
    execution.save("smaller", small(3))
    publisher.run()
    assert published(bench) == ["small", "smaller"]


def test_a_failed_try_leaves_nothing_behind_once_the_store_answers(execution: Execution) -> None:
    """A full store stayed full of what had failed for want of space."""
    failing = True

    def full(call: Call, do: Do) -> object:
        if failing and call.method == "upload" and call.key.endswith("weights.dat"):
            raise FULL
        return do()

    bench = Bench(faulty(MemoryStore("litter"), full))
    publisher = bench.publisher(execution)
    execution.save("step-1", small(1))
    for _ in range(4):
        with pytest.raises(StoreUnavailable):
            publisher.run()
        bench.clock.wait(Stop().wake, 100.0)
    failing = False
    publisher.run()
    bench.clock.wait(Stop().wake, 100.0)
    publisher.run()
    (record,) = commits(bench.store)
    data = [key for key in everything_in(bench.store) if key.startswith("data/")]
    assert [key for key in data if not key.startswith(record.parts[0].prefix)] == []


def test_i9_a_damaged_record_of_an_old_generation_does_not_stop_the_next(execution: Execution) -> None:
    bench = Bench(MemoryStore("damaged-record"))
    execution.save("last", small(1))
    bench.run(execution)
    (first,) = commits(bench.store)
    bench.store.put(first.key, b"garbage")
    execution.save("last", small(2))
    assert bench.run(execution) is None
    assert next(reader.published(bench.store)).record is not None


def test_i4_a_folder_named_latest_in_the_store_costs_the_link_alone(execution: Execution, tmp_path: Path) -> None:
    bench = Bench(PosixStore(tmp_path / "store"))
    (tmp_path / "store" / "latest" / "mine").mkdir(parents=True)
    for number in (1, 2):
        execution.save(f"step-{number}", small(number))
        assert bench.run(execution) is None
    assert published(bench) == ["step-1", "step-2"]


def test_a_writer_frozen_with_the_pointers_lock_keeps_nobody_from_starting_or_committing(
    execution: Execution, tmp_path: Path
) -> None:
    """The whole point: a stale execution that holds something must not hold its successor."""
    dest = tmp_path / "store"
    command = [sys.executable, "-I", "-m", "dispatch_agent", "publish", "watch", "--once", "--dest", str(dest)]
    environ = {**os.environ, **execution.environment, "PUBLISH_ROOT": str(execution.root)}

    def publish(name: str) -> None:
        execution.save(name, small(name))
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    publish("step-1")
    frozen = os.open(dest / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(frozen, fcntl.LOCK_EX)
    publish("step-2")
    assert [record.save for record in commits(PosixStore(dest))] == ["step-1", "step-2"]
    os.close(frozen)
    publish("step-3")
    assert os.readlink(dest / "latest").split("/")[2] == "step-3"


def test_a_save_is_marked_only_in_an_executions_folder(tmp_path: Path) -> None:
    """A stray record further up made every save below it look like a part of one."""
    stray = tmp_path / "stray.txt"
    stray.write_bytes(b"x")
    with pytest.raises(UsageError, match="not directly in an execution's folder"):
        mark_complete(stray)
    assert not (tmp_path / ".dispatch").exists()


def test_an_execution_resumes_from_one_save_however_often_its_init_container_runs(
    execution: Execution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(MemoryStore("init-again"))
    target = tmp_path / "resume" / execution.identity.attempt

    def init() -> Path:
        got = restore.restore_newest(
            bench.store,
            target,
            save=None,
            fall_back=True,
            progress=lambda _save, _size: lambda _n: None,
            damaged=lambda _key, _why: None,
            workers=1,
            alone=True,
        )
        return got.path

    for number in (1, 2):
        execution.save("last", small(number))
        bench.run(execution)
        if number == 1:
            first = init()
    with pytest.raises(restore.Occupied) as occupied:
        init()
    assert occupied.value.path == first
    monkeypatch.setenv("PUBLISH_ROOT", str(tmp_path))
    monkeypatch.setenv("DISPATCH_ATTEMPT", execution.identity.attempt)
    assert resume_path() == first
