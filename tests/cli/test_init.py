"""`publish init` as it is run: the init container of every pod of a job, before its trainer."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
from tests.cli.conftest import (
    LARGE,
    NOBODY,
    PATIENCE,
    SEAWEED,
    UNSET,
    Job,
    Result,
    Running,
    command,
    eventually,
    fill,
    flip,
    on_s3,
    small_disk,
    tree_of,
)
from tests.servers import Bucket
from tests.store.front import Forward, Reply, Request, fault, front

TREE: Mapping[str, bytes] = {
    "weights.bin": os.urandom(70_000),
    "inner/state.json": b"{}",
    "empty": b"",
    ".hidden": b"h",
}
FILES: Mapping[str, bytes] = {f"{number:02}.bin": os.urandom(1000) for number in range(30)}
POD, OTHER_POD = {"AGENT_K8S_POD_UID": "uid-1"}, {"AGENT_K8S_POD_UID": "uid-2"}


@pytest.fixture
def first(place: Path) -> Job:
    """A job's first execution, on an empty volume."""
    job = Job(place / "root", str(place / "store"))
    job.root.mkdir()
    return job


@pytest.fixture
def second(first: Job) -> Job:
    """The execution after one that published a save."""
    first.save("step-1", TREE)
    first.run("watch", "--once").passes()
    return first.later()


JOBS = ("01J8ZQ4T7M9W2K5X3R6Y8N0PVA", "01J8ZQ4T7M9W2K5X3R6Y8N0PVB")


@contextmanager
def running(job: Job, *arguments: str, **environ: str) -> Iterator[Running]:
    log = job.root.parent / f"init-{os.urandom(4).hex()}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command("publish"), "init", *arguments], env=job.variables(environ), stdout=out, stderr=out
        )
    try:
        yield Running(process, log)
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def resume_path(job: Job) -> str:
    """What a trainer gets from the function that the README shows."""
    script = "from dispatch_agent import resume_path; print(resume_path())"
    return subprocess.run(
        [sys.executable, "-c", script], env=job.variables(), check=True, capture_output=True, text=True
    ).stdout.strip()


def resumed(job: Job) -> Path:
    [path] = (job.root / "resume" / job.attempt).iterdir()
    return path


def claims(job: Job) -> list[str]:
    return sorted(path.name for path in (job.store / "claims" / f"{job.epoch:020d}").iterdir())


class TestWhatToResumeFrom:
    def test_the_first_execution_starts_from_nothing_and_says_where_it_looked(self, first: Job) -> None:
        result = first.run("init").passes()
        assert result.out == ""
        assert "starts from nothing" in result.err
        assert first.dest in result.err
        assert first.folder.is_dir()
        assert claims(first) == ["00000.0001.json", "attempt.json"]
        assert resume_path(first) == "None"
        assert first.run("init", "--json").passes().json["path"] is None

    def test_the_second_gets_the_newest_save_byte_for_byte(self, second: Job) -> None:
        result = second.run("init").passes()
        path = second.root / "resume" / second.attempt / "step-1"
        assert result.out == f"{path}\n"
        assert tree_of(path) == tree_of(second.root / "exec" / "1.17.1" / "step-1")
        assert resume_path(second) == str(path)
        shell = subprocess.run(
            ["sh", "-c", f'DISPATCH_ATTEMPT={second.attempt}; echo "{second.root}/resume/$DISPATCH_ATTEMPT"/*'],
            check=True,
            capture_output=True,
            text=True,
        )
        assert shell.stdout == result.out

    def test_what_a_killed_execution_left_is_published_and_resumed_from(self, second: Job) -> None:
        before = replace(second, epoch=second.epoch - 1, attempt="1.17.1")
        before.save("step-2", TREE | {"more": b"m"})
        before.write("step-3")
        result = second.run("init", "--json").passes()
        facts = result.json
        assert facts["path"] == str(second.root / "resume" / second.attempt / "step-2")
        assert tree_of(Path(facts["path"])) == tree_of(before.folder / "step-2")
        assert (second.store / facts["commit"]).is_file()
        assert second.published() == ["step-1", "step-2"]
        [recovered] = facts["recovered"]
        assert [(save["save"], save["result"]) for save in recovered["saves"]] == [
            ("step-2", "published"),
            ("step-3", "abandoned"),
        ]
        assert (facts["epoch"], facts["attempt"], facts["rank"], facts["led"]) == (
            str(second.epoch),
            second.attempt,
            0,
            True,
        )

    def test_names_that_are_not_utf8_are_printed_as_they_are(self, first: Job) -> None:
        first.save(b"step-\xfe", TREE)
        first.run("watch", "--once").passes()
        second = first.later()
        out = subprocess.run(
            [*command("publish"), "init"], env=second.variables(), check=True, capture_output=True
        ).stdout
        assert out == os.fsencode(second.root) + b"/resume/1.17.2/step-\xfe\n"
        assert os.path.isdir(out[:-1])

    def test_a_volume_and_a_store_whose_paths_are_not_utf8(self, place: Path) -> None:
        odd = place / os.fsdecode(b"a\n\xff b")
        first = Job(odd / "root", str(odd / "store"))
        first.save("step-1", TREE)
        first.run("watch", "--once").passes()
        second = first.later()
        second.run("init").passes()
        assert tree_of(resumed(second)) == tree_of(first.folder / "step-1")

    def test_it_may_run_again_and_keeps_what_was_chosen(self, second: Job) -> None:
        path = second.run("init").passes().out
        before = replace(second, epoch=second.epoch - 1, attempt="1.17.1")
        before.run("publish", before.save("step-2", TREE)).passes()
        assert second.published() == ["step-1", "step-2"]
        again = second.run("init", "--json", PUBLISH_DEST=str(second.root / "nowhere")).passes()
        assert f"{again.json['path']}\n" == path, "and a rank that follows does not ask the store"
        assert not again.json["led"]

    def test_what_was_restored_there_before_is_what_it_resumes_from(self, second: Job) -> None:
        path = Path(second.run("restore").passes().out.strip())
        before = replace(second, epoch=second.epoch - 1, attempt="1.17.1")
        before.run("publish", before.save("step-2", TREE)).passes()
        assert second.run("init").passes().out == f"{path}\n"
        assert resume_path(second) == str(path)

    def test_several_saves_there_are_refused(self, second: Job) -> None:
        for name in ("a", "b"):
            (second.root / "resume" / second.attempt / name).mkdir(parents=True)
        second.run("init").fails(3, "holds 2 saves")

    def test_a_file_in_its_place_is_refused(self, second: Job) -> None:
        (second.root / "resume").mkdir()
        (second.root / "resume" / second.attempt).touch()
        second.run("init").fails(3, f"{second.root}/resume/{second.attempt}", "move it away")

    def test_a_damaged_newest_is_passed_over_and_said(self, second: Job) -> None:
        before = replace(second, epoch=second.epoch - 1, attempt="1.17.1")
        before.run("publish", before.save("step-2", {"weights.bin": b"w" * 5000})).passes()
        shutil.rmtree(before.folder / "step-2")
        [damaged] = [path for path in before.data() if "step-2" in str(path) and path.name == "weights.bin"]
        flip(damaged)
        second.run("init", "--no-fall-back").fails(22, "weights.bin")
        assert not (second.root / "resume" / second.attempt / "step-2").exists()
        result = second.run("init").passes()
        assert "damaged" in result.err
        assert "step-2" in result.err
        assert result.out == f"{second.root}/resume/{second.attempt}/step-1\n"
        assert resume_path(second) == result.out.strip()
        flip(damaged)
        assert second.run("init").passes().out == result.out, "what was agreed on is not taken back"

    def test_where_all_is_damaged_it_does_not_start_from_nothing(self, second: Job) -> None:
        shutil.rmtree(second.root / "exec")
        for path in second.data():
            if path.stat().st_size:
                flip(path)
        second.run("init").fails(22, "everything", "damaged")
        [record] = second.commits()
        record.write_bytes(b"{}")
        third = second.later(second.epoch + 1, "1.17.3")
        third.run("init").fails(22, "everything", "damaged")

    def test_in_place(self, first: Job) -> None:
        here = replace(first, dest=str(first.root))
        here.save("step-1", TREE)
        here.run("watch", "--once", "--in-place").passes()
        second = here.later()
        path = Path(second.run("init", "--in-place").passes().out.strip())
        assert tree_of(path) == tree_of(here.folder / "step-1")

    @SEAWEED
    def test_with_s3(self, second: Job, shared_bucket: Bucket) -> None:
        there = on_s3(second, shared_bucket)
        path = Path(there.run("init").passes().out.strip())
        assert tree_of(path) == tree_of(second.root / "exec" / "1.17.1" / "step-1")
        assert there.published() == ["step-1"]


class TestWhatIsSaid:
    def test_nothing_of_older_executions_that_left_nothing(self, second: Job) -> None:
        """A volume of a hundred executions must not fill the log of each start."""
        second.run("init").passes()
        second.save("step-2")
        second.run("watch", "--once").passes()
        third = second.later(second.epoch + 1, "1.17.3")
        assert "WARNING" not in third.run("init").passes().err


class TestTheSidecarAfterwards:
    def test_goes_on_in_the_same_folder_under_the_same_term(self, second: Job) -> None:
        second.run("init", **POD).passes()
        mark = (second.folder / ".dispatch" / "execution.json").read_bytes()
        claimed = claims(second)
        with second.watch(**POD) as sidecar:
            sidecar.says("claimed")
            second.save("step-9")
            eventually(lambda: "step-9" in second.published(), lambda: sidecar.said)
            assert sidecar.stop().code == 0
        assert (second.folder / ".dispatch" / "execution.json").read_bytes() == mark
        assert claims(second) == claimed == ["00000.0001.json", "attempt.json"]
        assert [path.parent.name for path in second.commits()][-1] == f"{second.epoch:020d}"


class TestARankThatRanBefore:
    def test_in_the_same_pod_is_refused(self, second: Job) -> None:
        second.run("init", **POD).passes()
        second.run("init", **POD).fails(
            125, "rank 0", second.attempt, "this very pod", "in place", "--allow-rank-restart"
        )

    def test_in_another_pod_is_refused(self, second: Job) -> None:
        second.run("init", **POD).passes()
        second.run("init", **OTHER_POD).fails(125, "rank 0", "uid-1", "uid-2", "replaced", "--allow-rank-restart")

    def test_another_rank_is_not(self, second: Job) -> None:
        shared = {"PUBLISH_SHARED_VOLUME": "1"}
        second.run("init", **POD, **shared, JOB_COMPLETION_INDEX="0").passes()
        second.run("init", **OTHER_POD, **shared, JOB_COMPLETION_INDEX="1").passes()
        second.run("init", **OTHER_POD, **shared, JOB_COMPLETION_INDEX="1").fails(125, "rank 1")

    def test_whose_command_ran_without_an_init_is_refused(self, second: Job) -> None:
        raw = {
            "DISPATCH_EPOCH": UNSET,
            "DISPATCH_ATTEMPT": UNSET,
            "DISPATCH_K8S_EPOCH_PREFIX": "1",
            "DISPATCH_K8S_TOKEN_PREFIX": "j.1.1",
            "DISPATCH_K8S_ADMISSION": "1",
            "DISPATCH_K8S_RESTART": "1",
        }
        subprocess.run(
            [*command("dispatch-agent"), "exec", "--", "true"], env=second.variables(raw), check=True, timeout=30
        )
        second.run("init", **raw, **POD).fails(125, "started.0", "its command ran")
        assert not (second.store / "claims" / f"{1_000_002:020d}").exists(), "nothing was done"

    @pytest.mark.parametrize("how", ["option", "variable", "exec's variable"])
    def test_may_run_where_that_is_allowed_and_said(self, second: Job, how: str) -> None:
        path = second.run("init", **POD).passes().out
        options = ["--allow-rank-restart"] if how == "option" else []
        more = {
            "variable": {"PUBLISH_ALLOW_RANK_RESTART": "1"},
            "exec's variable": {"AGENT_ALLOW_RANK_RESTART": "true"},
        }
        result = second.run("init", *options, **OTHER_POD, **more.get(how, {})).passes()
        assert result.out == path
        assert "identity weakened" in result.err
        second.run("init", **POD, AGENT_ALLOW_RANK_RESTART="0").fails(125)

    def test_without_a_pods_uid_runs_as_often_as_it_likes(self, second: Job) -> None:
        second.run("init").passes()
        second.run("init").passes()
        second.run("init", **POD).passes()

    def test_one_that_did_not_get_ready_may_try_again(self, second: Job) -> None:
        second.run("init", "--start-timeout", "0", **POD, PUBLISH_DEST="/proc/1/nowhere").fails(10)
        second.run("init", **POD).passes()

    def test_jobsets_counters_are_said(self, second: Job) -> None:
        result = second.run("init", AGENT_K8S_IN_PLACE_RESTART="1").passes()
        assert "identity weakened" in result.err
        assert "in_place_restart=1" in result.err

    def test_a_volume_that_went_with_its_pod_is_said(self, second: Job) -> None:
        second.run("init", **POD).passes()
        shutil.rmtree(second.root / "exec")
        result = second.run("init", **OTHER_POD).passes()
        assert "identity weakened" in result.err
        assert "term 2" in result.err


class TestManyRanks:
    def test_all_resume_from_one_save_whatever_is_published_meanwhile(self, second: Job) -> None:
        before = replace(second, epoch=second.epoch - 1, attempt="1.17.1")
        late = before.save("late", TREE)
        place = {"PET_NNODES": "8", "PUBLISH_SHARED_VOLUME": "1"}
        pods = [place | {"JOB_COMPLETION_INDEX": str(n), "AGENT_K8S_POD_UID": f"uid-{n}"} for n in range(8)]
        choice = second.folder / ".dispatch" / "resume" / "1"
        shutil.move(late, second.root / "late")  # not yet there for a recovery
        with many(second, pods) as ranks:
            eventually(choice.exists, lambda: "nothing was chosen")
            shutil.move(second.root / "late", late)
            before.run("publish", late).passes()
            results = [end(rank) for rank in ranks]
        results.append(second.run("init", "--json").passes())
        assert second.published() == ["step-1", "late"]
        assert {result.json["path"] for result in results} == {str(second.root / "resume" / second.attempt / "step-1")}
        assert [result.json["led"] for result in results].count(True) == 1
        assert tree_of(resumed(second)) == tree_of(before.folder / "step-1")
        assert claims(second) == ["00000.0001.json", "attempt.json"]

    def test_the_one_that_does_the_work_is_followed_when_it_dies(self, second: Job) -> None:
        before = replace(second, epoch=second.epoch - 1, attempt="1.17.1")
        before.run("publish", before.save("big", LARGE)).passes()
        target = second.root / "resume" / second.attempt
        ranks = [{"JOB_COMPLETION_INDEX": str(rank), "AGENT_K8S_POD_UID": f"uid-{rank}"} for rank in range(2)]
        with running(second, "--shared-volume", **ranks[0]) as leader:
            eventually(lambda: any(target.glob(".*.partial/*")), lambda: leader.said)
            leader.signal(signal.SIGSTOP)
            with running(second, "--shared-volume", **ranks[1]) as other:
                other.says("waiting")
                leader.signal(signal.SIGKILL)
                assert other.end().code == 0, other.said
        before.run("publish", before.save("late", TREE)).passes()
        again = second.run("init", "--shared-volume", **ranks[0]).passes()
        assert again.out == f"{target}/big\n"
        assert tree_of(target / "big") == tree_of(before.folder / "big")

    def test_a_rank_does_not_wait_for_ever(self, second: Job) -> None:
        second.run("init").passes()
        shutil.rmtree(second.root / "resume")
        bounds = ("--timeout", "0.2", "--restore-timeout", "0.3", "--shared-volume")
        with locked(second.folder / ".dispatch" / "resume.lock"):
            second.run("init", *bounds, JOB_COMPLETION_INDEX="1").fails(20, "resume.lock", "0.5 s", "--restore-timeout")

    def test_several_nodes_must_say_whether_they_share_a_volume(self, second: Job) -> None:
        second.run("init", PET_NNODES="2").fails(3, "--shared-volume")
        second.run("init", JOB_COMPLETION_INDEX="1").fails(3, "--shared-volume")
        second.run("init", "--node-local", PET_NNODES="2").fails(3, "--node-local")
        assert not second.folder.exists()

    def test_volumes_that_are_not_shared_do_not_fence_each_other(self, second: Job) -> None:
        second.run("init", "--shared-volume", JOB_COMPLETION_INDEX="0").passes()
        elsewhere = replace(second, root=second.root.parent / "another")
        elsewhere.root.mkdir()
        elsewhere.run("init", "--shared-volume", JOB_COMPLETION_INDEX="1").fails(3, "do not share one volume")
        assert claims(second) == ["00000.0001.json", "attempt.json"]


class TestWhatKeepsATrainerFromStarting:
    def test_3_for_a_volume_that_is_not_there(self, second: Job) -> None:
        second.run("init", PUBLISH_ROOT=str(second.root / "typo")).fails(3, "typo", "mount")
        assert not (second.root / "typo").exists()

    def test_3_for_a_destination_among_the_saves(self, second: Job) -> None:
        second.run("init", PUBLISH_DEST=str(second.root / "exec" / "store")).fails(3, "choose a folder outside")

    def test_125_without_an_identity(self, second: Job) -> None:
        second.run("init", DISPATCH_EPOCH=UNSET, DISPATCH_ATTEMPT=UNSET).fails(125, "no identity")

    def test_31_for_an_epoch_of_another_attempt(self, second: Job) -> None:
        second.run("init").passes()
        twin = replace(second, attempt="2.17.2")
        twin.run("init").fails(31, second.attempt)
        assert not (second.root / "resume" / twin.attempt).exists()

    def test_31_for_an_older_epoch_of_another_attempt_with_complete_saves(self, second: Job) -> None:
        before = replace(second, epoch=second.epoch - 1, attempt="1.17.1")
        before.save("step-2")
        (second.store / "claims" / f"{before.epoch:020d}" / "attempt.json").write_text("another")
        second.run("init").fails(31, "another", str(before.epoch))
        assert not (second.root / "resume").exists()

    @pytest.mark.parametrize("command", [("init",), ("watch", "--once")])
    def test_32_for_the_destination_of_another_job(self, first: Job, command: tuple[str, ...]) -> None:
        """A description that was copied, but for its job id: each job would fence, and resume from, the other."""
        mine, other = (replace(first, environ={"DISPATCH_JOB_ID": job}) for job in JOBS)
        mine.save("step-1", TREE)
        mine.run("watch", "--once").passes()
        other = replace(other, root=first.root.with_name("other"), epoch=first.epoch + 1, attempt="other.1.1.1.1")
        other.folder.mkdir(parents=True)
        other.save("step-1", {"weights.bin": b"other"})
        other.run(*command).fails(32, JOBS[0], JOBS[1], "its own destination")
        assert not (first.store / "claims" / f"{other.epoch:020d}").exists()
        mine.save("step-2", TREE)
        mine.run("watch", "--once").passes()
        assert mine.published() == ["step-1", "step-2"]

    def test_but_not_for_that_of_a_job_which_this_one_supersedes(self, first: Job) -> None:
        replaced, mine = (replace(first, environ={"DISPATCH_JOB_ID": job}) for job in JOBS)
        replaced.save("step-1", TREE)
        replaced.run("watch", "--once").passes()
        mine = replace(mine, root=first.root.with_name("mine"), epoch=10**12 + 10**6, attempt="mine.1.1.1.0")
        mine.root.mkdir()
        mine.run("init").passes()
        assert tree_of(resumed(mine)) == tree_of(first.folder / "step-1")

    def test_30_for_an_execution_that_was_replaced(self, second: Job) -> None:
        later = second.later(second.epoch + 1, "1.17.3")
        later.run("publish", later.save("step-9")).passes()
        second.run("init").fails(30, "stale")
        assert not (second.root / "resume").exists()

    def test_40_rather_than_a_step_back_behind_what_time_ran_out_for(self, second: Job) -> None:
        before = replace(second, epoch=second.epoch - 1, attempt="1.17.1")
        before.save("step-2")
        [lock] = (before.folder / ".dispatch").glob("lock.*")
        with locked(lock):
            second.run("init", "--timeout", "1", "--wait-owner", "60").fails(40, "step-2")
        assert not (second.root / "resume").exists()
        assert second.run("init").passes().out.endswith("/step-2\n")

    def test_40_for_a_restore_that_takes_too_long(self, second: Job) -> None:
        second.run("init", "--restore-timeout", "0", **POD).fails(40, "--restore-timeout")
        assert second.run("init", **POD).passes().out.endswith("/step-1\n")

    def test_12_for_a_store_that_cannot_refuse_a_lost_race(self, second: Job, rclone_bucket: Bucket) -> None:
        there = on_s3(second, rclone_bucket)
        there.run("init").fails(12, "--accept-weak-store")
        assert there.run("init", "--accept-weak-store").passes().out.endswith("/step-1\n")

    @SEAWEED
    def test_11_for_a_store_that_denies(self, second: Job, shared_bucket: Bucket) -> None:
        on_s3(second, shared_bucket).run("init", AWS_SECRET_ACCESS_KEY="wrong").fails(11)

    def test_10_for_a_store_that_is_away_for_too_long(self, second: Job) -> None:
        nobody = {**Bucket("http://127.0.0.1:1", "bucket").environment}
        away = replace(second, dest="s3://bucket/job", environ=nobody)
        away.run("init", "--start-timeout", "1").fails(10, "127.0.0.1:1")

    def test_22_for_a_record_of_a_later_version(self, second: Job) -> None:
        [record] = second.commits()
        record.write_bytes(record.read_bytes().replace(b'"format":1', b'"format":2'))
        shutil.rmtree(second.root / "exec")
        second.run("init").fails(22, "format")


class TestWhatDoesNot:
    def test_what_can_never_be_published_is_said_loudly(self, second: Job) -> None:
        before = replace(second, epoch=second.epoch - 1, attempt="1.17.1")
        path = before.save("step-2")
        (path / "weights.bin").unlink()
        (path / "weights.bin").symlink_to("/etc/hostname")
        before.run("complete", path).passes()
        (second.root / "exec" / "stray").mkdir()
        result = second.run("init").passes()
        assert result.out.endswith("/step-1\n")
        assert "step back" in result.err
        assert "left=1.17.1/step-2" in result.err
        assert "not recovered" in result.err

    def test_a_living_owner_is_waited_for_and_then_published_beside(self, second: Job) -> None:
        before = replace(second, epoch=second.epoch - 1, attempt="1.17.1")
        before.save("step-2")
        [lock] = (before.folder / ".dispatch").glob("lock.*")
        with locked(lock):
            result = second.run("init", "--wait-owner", "0.4").passes()
        assert "beside" in result.err
        assert result.out.endswith("/step-2\n")

    @SEAWEED
    def test_a_store_that_comes_back(self, second: Job, shared_bucket: Bucket) -> None:
        there = on_s3(second, shared_bucket)
        away = threading.Event()
        away.set()

        def behave(request: Request, forward: Forward) -> Reply:
            return fault(503, "SlowDown") if away.is_set() else forward(request)

        with front(shared_bucket.endpoint, behave) as endpoint, running(there, AWS_ENDPOINT_URL=endpoint) as run:
            run.says("store away")
            away.clear()
            result = run.end()
        assert result.code == 0, result.err
        assert result.err.endswith("/step-1\n")

    @SEAWEED
    def test_a_store_that_goes_away_in_the_middle_of_a_restore(self, second: Job, shared_bucket: Bucket) -> None:
        there = on_s3(second, shared_bucket)
        before = replace(there, epoch=second.epoch - 1, attempt="1.17.1")
        before.run("publish", before.save("big", FILES)).passes()
        asked = 0

        def behave(request: Request, forward: Forward) -> Reply:
            nonlocal asked
            asked += ".bin" in request.key and request.method == "GET"
            return fault(503, "SlowDown") if 10 < asked < 25 else forward(request)

        with front(shared_bucket.endpoint, behave) as endpoint:
            result = there.run("init", "--workers", "2", AWS_ENDPOINT_URL=endpoint).passes()
        assert asked >= 25, "the store was away"
        assert tree_of(Path(result.out.strip())) == tree_of(before.folder / "big")


class TestSignals:
    def test_sigterm_ends_a_restore_at_once_and_the_next_run_goes_on(self, second: Job) -> None:
        before = replace(second, epoch=second.epoch - 1, attempt="1.17.1")
        before.run("publish", before.save("big", LARGE)).passes()
        target = second.root / "resume" / second.attempt
        with running(second, **POD) as run:
            eventually(lambda: any(target.glob(".*.partial/*")), lambda: run.said)
            result = run.stop()
        assert result.code == 143, result.err
        assert "aborted" in result.err
        assert not (target / "big").exists()
        assert second.run("init", **POD).passes().out == f"{target}/big\n"
        assert tree_of(target / "big") == tree_of(before.folder / "big")

    @SEAWEED
    def test_sigterm_ends_a_restore_from_a_store_that_hangs(self, second: Job, shared_bucket: Bucket) -> None:
        there, hangs, ended = on_s3(second, shared_bucket), threading.Event(), threading.Event()
        asked: list[str] = []
        before = replace(there, epoch=second.epoch - 1, attempt="1.17.1")
        before.run("publish", before.save("step-2")).passes()

        def behave(request: Request, forward: Forward) -> Reply:
            if "weights.bin" in request.key and request.method == "GET":
                asked.append(request.key)
                hangs.set()
                ended.wait(2 * PATIENCE)
            return forward(request)

        with front(shared_bucket.endpoint, behave) as endpoint, running(there, AWS_ENDPOINT_URL=endpoint) as run:
            assert hangs.wait(PATIENCE), run.said
            try:
                assert run.stop().code == 143
                assert len(asked) == 1, "it did not wait until the store is given up, and asked again"
            finally:
                ended.set()
        assert there.run("init").passes().out.endswith("/step-2\n")

    def test_sigterm_ends_a_recovery_at_once(self, second: Job) -> None:
        before = replace(second, epoch=second.epoch - 1, attempt="1.17.1")
        before.save("step-2")
        [lock] = (before.folder / ".dispatch").glob("lock.*")
        with locked(lock), running(second, "--wait-owner", "600") as run:
            run.says("standing by")
            assert run.stop().code == 143
        assert second.run("init").passes().out.endswith("/step-2\n")

    def test_sigterm_ends_the_wait_for_another_rank(self, second: Job) -> None:
        second.run("init").passes()
        shutil.rmtree(second.root / "resume")
        with locked(second.folder / ".dispatch" / "resume.lock"), running(second) as run:
            run.says("waiting")
            assert run.stop().code == 143


@pytest.mark.root
class TestWhoMayWrite:
    @pytest.mark.parametrize("mode", [0o2777, 0o1777])
    def test_a_trainer_with_another_uid_where_all_may_write_to_the_root(self, second: Job, mode: int) -> None:
        fresh = emptied(second, mode, group=0)
        [trained] = trained_after_init(fresh, User(4242, [4242], 0o077), User(NOBODY, [NOBODY]))
        assert trained == str(resumed(fresh))

    @pytest.mark.parametrize("mode", [0o2770, 0o770])
    def test_a_trainer_of_the_same_group_and_no_other(self, second: Job, mode: int) -> None:
        fresh = emptied(second, mode, group=3000)
        init = User(4242, [4242, 3000], 0o077)
        mine, other = trained_after_init(fresh, init, User(NOBODY, [NOBODY, 3000]), User(NOBODY, [NOBODY]))
        assert mine == str(resumed(fresh))
        assert "PermissionError" in other

    def test_root_makes_it_for_the_owner_of_the_root(self, second: Job) -> None:
        fresh = emptied(second, 0o755, group=NOBODY)
        os.chown(fresh.root, NOBODY, NOBODY)
        [trained] = trained_after_init(fresh, User(0, [0], 0o077), User(NOBODY, [NOBODY]))
        assert trained == str(resumed(fresh))

    @pytest.mark.parametrize("last", ["exec", "exec/1.17.2", "exec/1.17.2/.dispatch"])
    def test_one_that_was_killed_before_it_gave_a_folder_its_mode_is_mended(self, second: Job, last: str) -> None:
        fresh = emptied(second, 0o2770, group=3000)
        for path in [fresh.root / parent for parent in (*reversed(Path(last).parents), last) if parent != Path()]:
            path.mkdir()
            os.chown(path, 4242, 3000)
            path.chmod(0o2770)
        os.chown(fresh.root / last, 4242, 4242)
        (fresh.root / last).chmod(0o700)
        init = User(4242, [4242, 3000], 0o077)
        [trained] = trained_after_init(fresh, init, User(NOBODY, [NOBODY, 3000]))
        assert trained == str(resumed(fresh))

    def test_a_volume_that_is_mounted_read_only_is_said(self, second: Job) -> None:
        with small_disk(second.root.parent / "volume", "16m") as volume:
            subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
            second.run("init", "--root", volume).fails(1, "read-only")

    def test_a_full_disk_is_said_and_the_next_run_goes_on(self, second: Job) -> None:
        before = replace(second, epoch=second.epoch - 1, attempt="1.17.1")
        before.run("publish", before.save("big", {"a": b"a" * (3 << 20)})).passes()
        with small_disk(second.root.parent / "volume", "4m") as volume:
            here = replace(second, root=volume)
            ballast = volume / "ballast"
            ballast.write_bytes(b"x" * (2 << 20))
            here.run("init", **POD).fails(1, "No space left")
            ballast.unlink()
            path = here.run("init", **POD).passes().out.strip()
            assert tree_of(Path(path)) == tree_of(before.folder / "big")
        with small_disk(second.root.parent / "full", "1m") as volume:
            fill(volume)
            replace(second, root=volume).run("init").fails(1, "full")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Somebody holds the lock, and is alive."""
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def emptied(job: Job, mode: int, group: int) -> Job:
    """The execution on a volume of its own, whose root has this mode and group, and a store that all may use."""
    for path in [job.store, *job.store.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)
    root = job.root.parent / "volume"
    root.mkdir()
    os.chown(root, 0, group)
    root.chmod(mode)
    return replace(job, root=root)


@dataclass(frozen=True)
class User:
    """Who runs a container: UID, groups with the first one first, umask."""

    uid: int
    groups: list[int]
    umask: int = 0o022


def trained_after_init(job: Job, init: User, *trainers: User) -> list[str]:
    """One user runs `publish init`; then each trainer reads all of what it resumes from, writes a save and marks it.

    What each trainer resumed from, or what was in its way.
    """
    done = subprocess.run(
        [sys.executable, "-I", "-c", AS_USERS, json.dumps([asdict(user) for user in (init, *trainers)])],
        env=job.variables(),
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# Whoever runs the tests may have Python and the checkout where no other user may look, so all is imported before.
AS_USERS = """
import importlib, json, os, pkgutil, sys
import dispatch_agent.__main__
from dispatch_agent import complete, resume_path, save_dir
for module in pkgutil.walk_packages(dispatch_agent.__path__, "dispatch_agent."):
    importlib.import_module(module.name)

def become(user):
    os.setgroups(user["groups"])
    os.setgid(user["groups"][0])
    os.setuid(user["uid"])
    os.umask(user["umask"])

def refuse(error):
    raise error

def train():
    path = resume_path()
    for top, _, files in os.walk(path, onerror=refuse):
        for file in files:
            open(os.path.join(top, file), "rb").read()
    save = save_dir() / f"step-{os.getpid()}"
    save.mkdir()
    (save / "weights").write_bytes(b"w")
    complete(save)
    print(path, flush=True)

init, *trainers = json.loads(sys.argv.pop())
if os.fork() == 0:
    become(init)
    os.dup2(2, 1)
    sys.argv[1:] = ["init"]
    dispatch_agent.__main__.publish()
assert os.wait()[1] == 0, "init failed"
for user in trainers:
    if os.fork() == 0:
        become(user)
        try:
            train()
        except BaseException as error:
            print(repr(error), flush=True)
        os._exit(0)
    os.wait()
"""


@contextmanager
def many(job: Job, environs: list[dict[str, str]]) -> Iterator[list[subprocess.Popen[str]]]:
    pipe, run = subprocess.PIPE, [*command("publish"), "init", "--json"]
    processes = [
        subprocess.Popen(run, env=job.variables(environ), stdout=pipe, stderr=pipe, text=True) for environ in environs
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def end(process: subprocess.Popen[str]) -> Result:
    out, err = process.communicate(timeout=60)
    return Result(process.returncode, out, err).passes()
