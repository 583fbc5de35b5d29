"""One identity comes twice: a container restarted in place, a JobSet built anew, a counter reset, a folder copied.

Each is found out, or harmless: the entry's mark, the folder's record, the claims of the epoch and of the term. Nothing
that was published is ever replaced, and what is refused has not written any data.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.protocol.checks import check_invariants, commits
from tests.protocol.faults import Call, Do, faulty
from tests.protocol.jobs import Bench, Execution, small
from tests.protocol.writers import Launcher, Writer

from dispatch_agent import prologue
from dispatch_agent.checkpoint.folder import mark_complete
from dispatch_agent.errors import AgentError, Conflict, EpochCollision, Fenced
from dispatch_agent.publish import reader
from dispatch_agent.store.base import Store
from dispatch_agent.store.memory import MemoryStore
from dispatch_agent.store.posix import PosixStore

JOB = "01J8ZQ4T7M9W2K5X3R6Y8N0PVB"
ENTRY = [sys.executable, "-I", "-S", prologue.__file__]
TRAIN = 'save=$PUBLISH_ROOT/exec/$DISPATCH_ATTEMPT/$1; mkdir -p "$save"; echo "$2" >"$save/weights"; echo trained'


@dataclass(frozen=True)
class Pod:
    """One rank of a TrainJob: the counters its containers are given, the volume it mounts, where it publishes."""

    launcher: Launcher
    base: Path
    dest: str
    admission: int = 1
    restart: int = 0
    rank: int = 0
    volume: str = "volume"

    @property
    def execution(self) -> Execution:
        return Execution(self.base / self.volume, self.admission + self.restart, self.attempt)

    @property
    def attempt(self) -> str:
        return f"{JOB}.1.1.{self.admission}.{self.restart}"

    @property
    def counters(self) -> dict[str, str]:
        return {
            "DISPATCH_JOB_ID": JOB,
            "DISPATCH_K8S_ADMISSION": str(self.admission),
            "DISPATCH_K8S_RESTART": str(self.restart),
            "DISPATCH_K8S_EPOCH_PREFIX": "1",
            "DISPATCH_K8S_TOKEN_PREFIX": f"{JOB}.1.1",
            "JOB_COMPLETION_INDEX": str(self.rank),
            "PUBLISH_ROOT": str(self.base / self.volume),
        }

    def trains(self, save: str, content: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        """The container `node` starts: the entry, and as its command a trainer that writes one complete save."""
        (self.base / self.volume).mkdir(exist_ok=True)
        done = subprocess.run(
            [*ENTRY, "/bin/sh", "-c", TRAIN, "sh", save, content],
            env={"PATH": os.environ["PATH"], **self.counters, **more},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            mark_complete(self.execution.folder / save)
        return done

    def publishes(self, environment: Mapping[str, str] | None = None, *options: str) -> int:
        """The sidecar starts, publishes what is complete, and ends; its exit code. What it said is appended."""
        argv = ["watch", "--once", "--complete", "marker", "--dest", self.dest, *options]
        return self.launcher.run(
            Writer(log=str(self.base / "log"), environment=environment or self.counters, argv=argv)
        )

    @property
    def said(self) -> str:
        return (self.base / "log").read_text()

    @property
    def pair(self) -> dict[str, str]:
        return {**self.execution.environment, "DISPATCH_JOB_ID": JOB, "PUBLISH_ROOT": str(self.base / self.volume)}


@pytest.fixture
def pod(place: Path, launcher: Launcher) -> Pod:
    return Pod(launcher, place, str(place / "store"))


def published(pod: Pod) -> list[tuple[str, int, int]]:
    """Save, generation and term of every commit, in order."""
    return [(r.save, r.generation, r.order.term) for r in commits(PosixStore(pod.dest.removeprefix("local://")))]


def keys_of(pod: Pod) -> set[str]:
    return {item.key for item in PosixStore(pod.dest.removeprefix("local://")).list("")}


# --- the same identity, the same volume -------------------------------------------------------------------------------


def test_a_container_restarted_in_place_is_refused_and_what_it_had_saved_is_published(pod: Pod) -> None:
    assert pod.trains("step-1").stdout == "trained\n"
    again = pod.trains("step-1", "of the second run")
    assert (again.returncode, again.stdout) == (125, "")
    assert f"rank 0 already ran under attempt {pod.attempt}" in again.stderr
    assert "the counters repeated" in again.stderr
    assert pod.publishes() == 0
    assert published(pod) == [("step-1", 1, 1)]


def test_a_sidecar_restarted_in_place_is_free_and_keeps_its_term(pod: Pod) -> None:
    """From the raw counters or from the finished pair: it marks nothing and finds its claim again."""
    for number, environment in enumerate((pod.counters, pod.counters, pod.pair, pod.counters), 1):
        pod.execution.save(f"step-{number}", small(number))
        assert pod.publishes(environment) == 0, pod.said
    assert published(pod) == [(f"step-{number}", 1, 1) for number in (1, 2, 3, 4)]
    assert len([key for key in keys_of(pod) if key.startswith("claims/")]) == 2


def test_a_rank_restart_that_is_allowed_is_said_and_its_saves_are_later_generations(pod: Pod) -> None:
    assert pod.trains("last", "of the first run").returncode == 0
    assert pod.publishes() == 0
    again = pod.trains("last", "of the second run", AGENT_ALLOW_RANK_RESTART="1")
    assert again.returncode == 0
    assert f"identity weakened: rank 0 runs again under attempt {pod.attempt}" in again.stderr
    assert pod.publishes() == 0
    assert published(pod) == [("last", 1, 1), ("last", 2, 1)]


def test_a_jobset_built_anew_whose_counters_repeat_is_refused_on_the_volume_of_the_first(pod: Pod) -> None:
    """Nothing tells it from the first one but the mark: the rank's, so the other ranks of the first were free."""
    ranks = [replace(pod, rank=rank) for rank in range(3)]
    assert [each.trains(f"step-{each.rank}").returncode for each in ranks] == [0, 0, 0]
    assert [each.trains("step-9").returncode for each in ranks] == [125, 125, 125]
    assert replace(pod, restart=1).trains("step-9").returncode == 0


def test_what_an_execution_starts_itself_is_free(pod: Pod) -> None:
    """A nested entry, and local ranks side by side: they have the finished pair."""
    nested = f'for rank in 0 1; do {" ".join(ENTRY)} /bin/sh -c "echo \\$DISPATCH_EPOCH" & done; wait'
    done = subprocess.run(
        [*ENTRY, "/bin/sh", "-c", nested],
        env={"PATH": os.environ["PATH"], **pod.counters},
        capture_output=True,
        text=True,
        check=False,
        cwd=pod.base,
    )
    assert (done.stdout, done.stderr) == (f"{pod.execution.epoch}\n" * 2, "")


# --- the same identity, another volume --------------------------------------------------------------------------------


def test_the_same_identity_on_a_fresh_volume_takes_a_new_term_and_fences_the_old_folder(pod: Pod) -> None:
    """The volume was lost, or a JobSet built anew on another one; the first pod may be alive and cut off."""
    assert pod.trains("step-8").returncode == 0
    assert pod.publishes() == 0
    new = replace(pod, volume="fresh")
    assert new.trains("step-1").returncode == 0
    assert new.publishes() == 0
    pod.execution.save("step-9", small("late"))
    assert pod.publishes() == Fenced.exit_code
    assert "term 1 of rank 0" in pod.said
    assert published(pod) == [("step-8", 1, 1), ("step-1", 1, 2)]
    assert reader.newest(PosixStore(pod.dest)).save == "step-1"
    check_invariants(PosixStore(pod.dest))


# --- the same epoch, another attempt ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weak", [False, True], ids=["conditional", "weak"])
def test_i5_a_jobset_built_anew_whose_counters_add_up_the_same_publishes_nothing(pod: Pod, weak: bool) -> None:
    """A=1, J=1 and then A=2, J=0: one R and two attempts. The command runs, in a folder of its own."""
    options = ["--accept-weak-store"] if weak else []
    first = replace(pod, restart=1, dest=f"local://{pod.dest}" if weak else pod.dest)
    second = replace(first, admission=2, restart=0)
    assert first.execution.epoch == second.execution.epoch
    assert first.trains("step-1").returncode == 0
    assert first.publishes(None, *options) == 0, first.said
    before = keys_of(first)
    assert second.trains("step-1").returncode == 0
    assert second.publishes(None, *options) == EpochCollision.exit_code
    assert f"belongs to attempt '{first.attempt}', not to '{second.attempt}'" in second.said
    assert [key for key in keys_of(first) - before if not (weak and key.startswith("claims/"))] == []
    assert [save for save, _, _ in published(first)] == ["step-1"]


@pytest.mark.parametrize("weak", [False, True], ids=["conditional", "weak"])
@pytest.mark.parametrize("ranks", [(0, 0), (0, 1), (1, 0)], ids=str)
def test_i5_two_attempts_at_any_ranks_are_found_out_before_any_data(
    ranks: tuple[int, int], weak: bool, place: Path
) -> None:
    """At every call of the first, all of the second. With conditions one goes on; without, none may, never both."""

    def run(k: int) -> bool:
        pair = [Execution(place / str(k), 1, attempt) for attempt in ("first", "second")]
        for execution in pair:
            execution.save("step-1", small(execution.attempt))
        real, results, reached = interleaved(
            lambda store: publish(Bench(store, weak=weak), pair[0], ranks[0]),
            lambda store: publish(Bench(store, weak=weak), pair[1], ranks[1]),
            k,
        )
        refused = [execution.attempt for execution, error in zip(pair, results, strict=True) if error]
        assert all(isinstance(error, EpochCollision) for error in results if error), f"call {k}: {results}"
        assert len(refused) == 1 or (weak and refused), f"call {k}"
        written = [item.key for item in real.list("") if not item.key.startswith("claims/")]
        assert not [key for key in written for attempt in refused if f"-{attempt}/" in key], f"call {k}: data"
        assert {record.attempt for record in commits(real)} == {"first", "second"} - set(refused), f"call {k}"
        return reached

    k = 1
    while run(k):
        k += 1
    assert k > 10


def publish(bench: Bench, execution: Execution, rank: int) -> AgentError | None:
    try:
        bench.publisher(execution, rank=rank).run()
    except AgentError as error:
        return error
    return None


def interleaved(
    first: Callable[[Store], Any], second: Callable[[Store], Any], k: int
) -> tuple[MemoryStore, list[Any], bool]:
    """`first`, and all of `second` before its k-th call, or after it if it has fewer: results, and whether it had."""
    real = MemoryStore()
    answers: list[Any] = []

    def hook(call: Call, do: Do) -> Any:
        if call.number == k:
            answers.append(second(real))
        return do()

    answer = first(faulty(real, hook))
    reached = bool(answers)
    return real, [answer, *(answers or [second(real)])], reached


# --- a folder copied with its records ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("admission", "restart"), [(2, 0), (1, 1)])
def test_a_folder_copied_for_the_next_execution_is_refused_by_its_records(
    admission: int, restart: int, pod: Pod
) -> None:
    """`cp -a exec/a exec/b`, to resume from it: its mark and its records are those of the first."""
    assert pod.trains("step-1").returncode == 0
    assert pod.publishes() == 0
    before = keys_of(pod)
    following = replace(pod, admission=admission, restart=restart)
    shutil.copytree(pod.execution.folder, following.execution.folder, symlinks=True)
    refused = following.trains("step-2")
    assert refused.returncode == 125
    assert "another execution's folder was copied" in refused.stderr
    following.execution.save("step-2", small(2))
    assert following.publishes() == Conflict.exit_code
    assert f"belongs to job '{JOB}', epoch {pod.execution.epoch}" in following.said
    assert keys_of(pod) == before


def test_i5_a_copied_folder_shows_the_collision_also_where_no_store_does(pod: Pod) -> None:
    first = replace(pod, restart=1)
    second = replace(pod, admission=2, dest=f"{pod.dest}-another")
    assert first.trains("step-1").returncode == 0
    assert first.publishes() == 0
    shutil.copytree(first.execution.folder, second.execution.folder)
    assert second.publishes() == EpochCollision.exit_code
    assert "two executions were given one epoch" in second.said
    assert not Path(second.dest, "data").exists()


@pytest.mark.parametrize("placed", [False, True], ids=["not placed", "placed"])
def test_i9_a_volume_copied_while_its_execution_goes_on_is_not_taken_for_the_original(pod: Pod, placed: bool) -> None:
    """Both have one folder id, so one term: a place of one must not pass for the other's."""
    assert pod.trains("step-1").returncode == 0
    assert pod.publishes() == 0
    copy = replace(pod, volume="copy")
    shutil.copytree(pod.base / pod.volume, copy.base / copy.volume)
    pod.execution.save("step-2", small("of the original"))
    assert pod.publishes() == 0
    copy.execution.save("step-2", small("of the copy"))
    if placed:  # by a publisher to somewhere else
        assert replace(copy, dest=f"{pod.dest}-another").publishes() == 0
    assert copy.publishes() == Conflict.exit_code
    assert (
        f"its place 2 {'holds another save or content, step-2' if placed else 'is empty'}. It was copied" in copy.said
    )
    own = copy.execution.folder / ".dispatch"
    (own / "execution.json").unlink()
    shutil.rmtree(own / "order")
    assert copy.publishes() == 0
    assert published(pod) == [("step-1", 1, 1), ("step-2", 1, 1), ("step-1", 1, 2), ("step-2", 1, 2)]
    assert pod.publishes() == Fenced.exit_code


def test_i9_a_volume_put_back_to_an_earlier_state_is_found_out(pod: Pod) -> None:
    assert pod.trains("step-1").returncode == 0
    assert pod.publishes() == 0
    shutil.copytree(pod.base / pod.volume, pod.base / "snapshot")
    pod.execution.save("step-2", small(2))
    assert pod.publishes() == 0
    shutil.rmtree(pod.base / pod.volume)
    (pod.base / "snapshot").rename(pod.base / pod.volume)
    assert pod.publishes() == Conflict.exit_code
    assert "place 2 is empty" in pod.said
    pod.execution.save("step-3", small(3))
    assert pod.publishes() == Conflict.exit_code
    assert published(pod) == [("step-1", 1, 1), ("step-2", 1, 1)]


# --- what JobSet counts apart -----------------------------------------------------------------------------------------


def test_jobsets_later_counters_are_reported_and_change_nothing(pod: Pod) -> None:
    pod.execution.save("step-1", small(1))
    assert pod.publishes() == 0
    assert "identity weakened" not in pod.said
    pod.execution.save("step-2", small(2))
    restarted = {"AGENT_K8S_IN_PLACE_RESTART": "2", "AGENT_K8S_JOB_RESTART": "", "AGENT_K8S_EXECUTION": "4"}
    assert pod.publishes({**pod.counters, **restarted}) == 0
    assert "in_place_restart=2 execution=4" in pod.said
    assert pod.said.count("identity weakened") == 1
    assert "JobSet restarted this pod's containers 2 time(s) in place" in pod.said
    assert published(pod) == [("step-1", 1, 1), ("step-2", 1, 1)]
    assert {record.attempt for record in commits(PosixStore(pod.dest))} == {pod.attempt}
