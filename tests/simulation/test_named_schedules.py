"""The schedules that broke earlier drafts of the protocol, on the shipped code: each holds, and each can be broken.

Every test runs one fixed schedule, sees that what it is about really happened, and then runs the same schedule on a
build that lacks what makes it hold.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.protocol.checks import commits
from tests.protocol.jobs import Execution
from tests.simulation import world
from tests.simulation.mutations import MUTATIONS
from tests.simulation.plans import (
    Folder,
    Meets,
    Plan,
    Process,
    Prune,
    Rates,
    Reader,
    Recover,
    Remount,
    Stall,
    Step,
    Trainer,
    Watch,
)
from tests.simulation.shrink import in_words
from tests.simulation.world import Result

from dispatch_agent.publish import reader
from dispatch_agent.store.posix import PosixStore

ONE, TWO, THREE = Folder(1, "a1"), Folder(2, "a2"), Folder(3, "a3")


def saves(*names: str, tag: str = "A") -> tuple[Step, ...]:
    return tuple(Step("save", name, tag) for name in names)


def trainer(folder: Folder, start: float, *steps: Step) -> Trainer:
    return Trainer(f"trainer-{folder}", folder, start, steps)


def watch(folder: Folder, start: float, drain: float, *, name: str = "", lives: int = 1, rank: int = 0) -> Watch:
    return Watch(name or f"watch-{folder}", folder, start, lives=lives, drain=drain, rank=rank)


def plan(*processes: Process, stalls: tuple[Stall | Meets, ...] = (), locks: bool = True) -> Plan:
    return Plan(0, processes, stalls=stalls, locks=locks)


def holds(what: Plan) -> Result:
    """Run the schedule: no invariant is broken."""
    result = world.run(what, {})
    if result.violation is not None:
        pytest.fail(in_words(result), pytrace=False)
    return result


def breaks(what: Plan, build: str, *invariants: str) -> None:
    """Run the schedule on a broken build: one of these invariants is broken."""
    with MUTATIONS[build]():
        result = world.run(what, {})
    assert result.violation is not None, f"{build} goes unnoticed"
    assert result.violation.invariant in invariants, result.violation


def test_i7_a_leftover_published_by_a_third_execution_after_a_second_one_committed() -> None:
    schedule = plan(
        trainer(ONE, 0.0, *saves("step-2")),
        watch(ONE, 0.0, 5.0),
        trainer(TWO, 10.0, *saves("step-1")),
        watch(TWO, 10.0, 15.0),
        Recover("recover", 20.0, 3, "a3"),
        stalls=(Meets("watch-a1@0", "data/", "crash before"),),
    )
    result = holds(schedule)
    assert result.published == ("2.1.1 step-1",)
    breaks(schedule, "the_fence_refuses_nobody", "I7")


def test_i7_a_leftover_that_a_recovery_is_publishing_when_the_second_execution_commits() -> None:
    schedule = plan(
        trainer(ONE, 0.0, *saves("step-2")),
        watch(ONE, 0.0, 5.0),
        Recover("recover", 10.0, 3, "a3"),
        trainer(TWO, 12.0, *saves("step-1")),
        watch(TWO, 12.0, 15.0),
        stalls=(Meets("watch-a1@0", "data/", "crash before"), Stall("recover", "data/", 20.0)),
    )
    result = holds(schedule)
    assert result.happened("recover      upload data/00000000000001000001")
    assert result.published == ("2.1.1 step-1",)
    breaks(schedule, "no_second_look_at_the_fence", "I7")


def test_i3_two_ranks_pairing_different_contents_of_one_name(tmp_path: Path) -> None:
    """Only rank 0 can commit: on a shared volume it publishes for all, and node-local volumes are refused."""
    store = PosixStore(tmp_path / "store")
    for rank, volume, code in ((0, "--shared-volume", 0), (1, "--shared-volume", 3), (1, "--node-local", 3)):
        execution = Execution(tmp_path / f"node-{rank}", 1)
        path = execution.write("step-1", f"of rank {rank}".encode())
        command = ["publish", "publish", str(path), "--dest", store.url, "--rank", str(rank), volume]
        answer = subprocess.run(
            [sys.executable, "-I", "-m", "dispatch_agent", *command],
            env={**os.environ, **execution.environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert answer.returncode == code, answer.stderr
    (record,) = commits(store)
    reader.verify(store, record, tick=lambda _: None, workers=1)
    assert record.size == len("of rank 0")
    assert not [item.key for item in store.list("claims") if "/00001." in item.key]


def test_i9_a_restart_after_a_prune_that_publishes_an_old_save_as_new() -> None:
    schedule = plan(
        trainer(ONE, 0.0, *saves("step-1", "step-2", "last")),
        watch(ONE, 0.0, 5.0),
        Prune("prune", 10.0, 1),
        watch(ONE, 20.0, 25.0, name="again"),
    )
    result = holds(schedule)
    assert result.happened("prune        create pruned/00000000000001000001/0001.000001")
    assert result.published == ("1.1.1 step-1", "1.1.2 step-2", "1.1.3 last")
    breaks(schedule, "committed_is_not_listed_at_the_start", "I9")


def test_i9_two_saves_found_complete_in_one_look_committed_in_the_wrong_order() -> None:
    schedule = plan(trainer(ONE, 0.0, *saves("step-2", "step-1", "last")), watch(ONE, 5.0, 10.0))
    assert holds(schedule).published == ("1.1.1 step-2", "1.1.2 step-1", "1.1.3 last")
    breaks(schedule, "saves_of_one_look_are_ordered_by_name", "I9")


@pytest.mark.parametrize("key", ["data/00000000000001000001-a1/step-1/"])
@pytest.mark.parametrize("lands", [0.5, 8.0, 100.0])
def test_i1_a_dropped_trys_late_write(key: str, lands: float) -> None:
    schedule = plan(
        trainer(ONE, 0.0, *saves("step-1")),
        watch(ONE, 0.0, 20.0),
        stalls=(Meets("watch-a1@0", key, "late", lands),),
    )
    result = holds(schedule)
    assert result.happened("network")
    assert result.published == ("1.1.1 step-1",)
    breaks(schedule, "try_numbers_come_again", "I1")


@pytest.mark.parametrize("locks", [True, False])
def test_i9_a_one_shot_that_fences_the_sidecar(locks: bool) -> None:
    schedule = plan(
        trainer(
            ONE, 0.0, *saves("step-1"), Step("sleep", seconds=3.0), Step("begin", "last", "A"), Step("publish", "last")
        ),
        Trainer("later", ONE, 10.0, saves("step-2")),
        watch(ONE, 0.0, 20.0),
        locks=locks,
    )
    result = holds(schedule)
    assert result.published[0] == "1.1.1 step-1"
    assert {line.split(".", 1)[1] for line in result.published} == {"1.1 step-1", "1.2 last", "1.3 step-2"}
    assert not result.happened("ends with 30")
    breaks(schedule, "every_start_claims_a_new_term", "I9")


def test_i5_two_attempts_claiming_one_epoch_at_different_ranks() -> None:
    other = Folder(1, "b1", volume=1)
    schedule = plan(
        trainer(ONE, 0.0, *saves("step-1")),
        watch(ONE, 0.0, 10.0),
        trainer(other, 2.0, *saves("step-1", tag="B")),
        watch(other, 2.0, 10.0, rank=1),
    )
    result = holds(schedule)
    assert result.happened("watch-b1@1   ends with 31")
    assert result.published == ("1.1.1 step-1",)
    breaks(schedule, "another_attempt_may_share_the_epoch", "I5")


def test_i4_a_pending_pointer_write_that_lands_after_a_prune() -> None:
    schedule = replace(
        plan(
            trainer(ONE, 0.0, *saves("step-1"), Step("sleep", seconds=3.0), *saves("step-2")),
            watch(ONE, 0.0, 5.0),
            trainer(TWO, 10.0, *saves("step-1", "step-2")),
            watch(TWO, 10.0, 12.0),
            Prune("prune", 40.0, 1),
            stalls=(
                Meets("watch-a1@0", "latest.json", ""),
                Meets("watch-a1@0", "latest.json", "crash late", 60.0),
            ),
        ),
        stuck=(("latest.json", 9.0, 39.0),),
    )
    result = holds(schedule)
    assert result.happened("replace latest.json arrives and is refused")
    breaks(schedule, "a_prune_moves_no_pointer", "I6")


@pytest.mark.parametrize("dies", [False, True])
def test_i6_a_stalled_commit_that_lands_after_a_prune(dies: bool) -> None:
    where = "commits/"
    stalls = (Meets("watch-a1@0", where, "crash late", 40.0) if dies else Stall("watch-a1@0", where, 40.0),)
    schedule = plan(
        trainer(ONE, 0.0, *saves("step-2")),
        watch(ONE, 0.0, 60.0),
        trainer(TWO, 10.0, *saves("step-1", "step-2")),
        watch(TWO, 10.0, 15.0),
        Prune("prune", 20.0, 1),
        stalls=stalls,
    )
    result = holds(schedule)
    assert result.published == ("1.1.1 step-2", "2.1.1 step-1", "2.1.2 step-2")
    assert result.happened("create pruned/00000000000001000001/sealed.json")
    assert result.happened("the last reader restores 00000000000001000002/0001.000002")
    if not dies:
        assert result.happened("watch-a1@0   ends with 30")
        breaks(schedule, "the_seal_is_not_looked_for", "I6")


def test_i7_a_replaced_pod_whose_sidecar_restarts_in_place_after_its_successor_committed() -> None:
    successor = Folder(1, "a1", volume=1)
    schedule = plan(
        trainer(ONE, 0.0, *saves("step-1"), Step("sleep", seconds=20.0), *saves("step-2")),
        watch(ONE, 0.0, 5.0),
        trainer(successor, 10.0, *saves("step-1", tag="B")),
        watch(successor, 10.0, 15.0),
        watch(ONE, 25.0, 30.0, name="restarted"),
    )
    result = holds(schedule)
    assert result.happened("restarted    ends with 30")
    assert result.published == ("1.1.1 step-1", "1.2.1 step-1")
    breaks(schedule, "the_fence_knows_no_terms", "I7")


def test_i9_an_owner_and_a_recovery_at_work_on_one_folder_without_an_effective_lock() -> None:
    schedule = plan(
        trainer(ONE, 0.0, *saves("step-1"), Step("sleep", seconds=2.0), Step("delete", "step-1"), *saves("step-2")),
        watch(ONE, 0.0, 30.0),
        Recover("recover", 5.0, 2, "a2"),
        stalls=(
            Stall("watch-a1@0", "commits/00000000000001000001/0001.000002", 20.0),
            Stall("recover", "commits/", 15.0),
        ),
        locks=False,
    )
    result = holds(schedule)
    assert result.happened("watch-a1@0   create commits/")
    assert result.happened("recover      create commits/")
    assert result.published == ("1.1.1 step-1", "1.1.2 step-2", "1.1.2 step-2")
    breaks(schedule, "places_are_not_durable", "I3", "I8", "I9")


def test_i9_an_upload_that_failed_then_a_restart() -> None:
    """In its own place, below what was published meanwhile."""
    schedule = plan(
        trainer(ONE, 0.0, *saves("step-1", "step-2")),
        watch(ONE, 1.0, 40.0, lives=2),
        stalls=(
            Meets("watch-a1@0", "data/00000000000001000001-a1/step-1/", "denied"),
            Meets("watch-a1@0", "latest.json", "crash after"),
        ),
    )
    result = holds(schedule)
    assert result.happened("upload data/00000000000001000001-a1/step-1") or result.happened("denied")
    assert result.published == ("1.1.1 step-1", "1.1.2 step-2")
    order = [line for line in result.trace if "create commits/" in line]
    assert [line.partition("/0001.")[2][:6] for line in order] == ["000002", "000001"]
    breaks(schedule, "places_are_not_durable", "I3", "I8", "I9")


@pytest.mark.parametrize("mounted", [2.0, 10.0])
def test_i9_a_volume_whose_files_were_all_chowned_by_a_new_mount(mounted: float) -> None:
    """Before the save is published, and after."""
    schedule = plan(
        trainer(ONE, 0.0, *saves("step-1", "last")),
        Remount("mount", ONE, mounted),
        watch(ONE, 5.0, 8.0),
        watch(ONE, 15.0, 20.0, name="again"),
    )
    result = holds(schedule)
    assert result.happened("every file has another owner")
    assert result.published == ("1.1.1 step-1", "1.1.2 last")
    if mounted < 5.0:
        breaks(schedule, "a_change_of_owner_is_a_change_of_content", "I9")


def test_i3_two_folders_that_a_weak_store_gave_one_term() -> None:
    """Each start of the one that saw both is refused: none of its saves gets a place of the other's."""
    other = Folder(1, "a1", volume=1)
    schedule = replace(
        plan(
            trainer(ONE, 0.0, *saves("step-1")),
            watch(ONE, 0.0, 10.0),
            trainer(other, 0.0, *saves("last", tag="B")),
            watch(other, 0.0, 10.0, lives=2),
            stalls=(
                Stall("watch-a1@0", "claims/00000000000001000001/00000", 1.0),
                Stall("watch-a1@1", "claims/00000000000001000001/00000", 2.0),
            ),
        ),
        weak=True,
    )
    result = holds(schedule)
    assert result.happened("watch-a1@1   ends with 32")
    assert result.published == ("1.1.1 step-1",)


def test_i7_a_reader_that_a_prune_overtakes() -> None:
    """It has listed the epochs and is slow; a newer execution publishes, and what it was about to find is pruned."""
    schedule = plan(
        trainer(TWO, 0.0, *saves("step-1")),
        watch(TWO, 0.0, 3.0),
        Reader("reader", 5.0, 1),
        trainer(THREE, 10.0, *saves("step-1", "step-2")),
        watch(THREE, 10.0, 15.0),
        Prune("prune", 20.0, 1),
        stalls=(Stall("reader", "list pruned/", 30.0),),
    )
    assert holds(schedule).happened("reader       restores 00000000000001000003/0001.000002")


def test_i9_two_words_given_while_one_look_reads_them() -> None:
    """In some of these seeds the trainer says it of two saves while a look is between their markers."""
    begun = (Step("begin", "last", "A"), Step("begin", "step-1", "A"), Step("sleep", seconds=1.0))
    steps = (*begun, Step("say", "last"), Step("say", "step-1"))
    for seed in range(100):
        schedule = Plan(seed, (trainer(ONE, 0.0, *steps), watch(ONE, 0.0, 20.0)), Rates(switches=0.5, jumps=0.2))
        result = world.run(schedule)
        assert result.violation is None
        assert result.published == ("1.1.1 last", "1.1.2 step-1")
