"""`publish recover` as it is run: an init container of the next execution, or an operator by hand."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tests.cli.conftest import (
    NOBODY,
    SEAWEED,
    UNSET,
    Job,
    Running,
    command,
    on_s3,
    small_disk,
    tree_of,
)
from tests.servers import Bucket

from dispatch_agent.checkpoint.folder import mark_complete

NO_IDENTITY = {"DISPATCH_EPOCH": UNSET, "DISPATCH_ATTEMPT": UNSET}


@pytest.fixture
def left(job: Job) -> Job:
    """An execution that published one save, and left another complete and a third one incomplete."""
    mark_complete(job.write("step-1"))
    job.run("watch", "--once").passes()
    mark_complete(job.write("step-2"))
    job.write("step-3")
    return job


@contextmanager
def owner_of(job: Job) -> Iterator[None]:
    """Somebody has the folder's lock, and is alive."""
    [lock] = (job.folder / ".dispatch").glob("lock.*")
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def running(job: Job, *arguments: str) -> Iterator[Running]:
    log = job.root / "recover.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command("publish"), "recover", *arguments], env=job.variables(), stdout=out, stderr=out
        )
    try:
        yield Running(process, log)
    finally:
        process.kill()
        process.wait()


class TestReport:
    def test_a_line_for_every_execution_and_every_save(self, left: Job) -> None:
        half = tree_of(left.folder / "step-3")
        (left.root / "exec" / "stray").mkdir()
        result = left.later().run("recover").passes()
        lines = result.out.splitlines()
        assert lines[0].startswith("unknown    stray: it has no .dispatch/execution.json")
        assert lines[1:3] == [f"recovered  {left.attempt} (epoch {left.epoch})", "  published  step-2"]
        assert lines[3].startswith("  abandoned  step-3: ")
        assert len(lines) == 4
        assert left.published() == ["step-1", "step-2"]
        assert tree_of(left.folder / "step-3") == half

    def test_json_for_programs(self, left: Job) -> None:
        [found] = left.later().run("recover", "--json").passes().json
        saves = found.pop("saves")
        assert found == {
            "name": left.attempt,
            "state": "recovered",
            "reason": None,
            "epoch": str(left.epoch),
            "job": None,
            "standing": 1,
        }
        assert [(save["save"], save["result"]) for save in saves] == [("step-2", "published"), ("step-3", "abandoned")]
        assert (left.store / saves[0]["commit"]).is_file()
        assert saves[1]["reason"]

    def test_names_that_are_not_utf8_break_neither(self, left: Job) -> None:
        os.mkdir(os.path.join(os.fsencode(left.root), b"exec", b"\xff\nfenced  x"))
        left.save(b"step-\xfe")
        shown = left.later().run("recover").passes().out
        assert "unknown    \\xff\\nfenced  x: " in shown
        assert "  published  step-\\xfe\n" in shown
        names = {found["name"] for found in left.later().run("recover", "--json").passes().json}
        assert names == {"%FF%0Afenced  x", left.attempt}

    def test_nothing_to_recover(self, job: Job) -> None:
        assert job.run("recover").passes().out == f"nothing    to recover in {job.root / 'exec'}\n"
        shutil.rmtree(job.root / "exec")
        first = job.run("recover", "--json").passes()
        assert (first.json, first.err) == ([], ""), "no exec/ yet is how every first execution finds its volume"

    def test_a_root_that_is_not_there_is_said(self, job: Job) -> None:
        assert "is that the right volume?" in job.run("recover", "--root", job.root / "typo").passes().err

    def test_executions_with_nothing_left_are_counted(self, left: Job) -> None:
        shutil.rmtree(left.folder / "step-3")
        left.later().run("recover").passes()
        said = left.later().run("recover").passes().out
        assert said == f"nothing    is left to publish of 1 older execution(s) in {left.root / 'exec'}\n"

    def test_beside_others_they_are_counted_as_the_others(self, left: Job) -> None:
        left.later().run("recover").passes()
        shutil.rmtree(left.folder / "step-3")
        later = left.later()
        later.save("step-9")
        later.run("publish", later.save("step-8")).passes()
        lines = later.later(later.epoch + 1, "1.17.3").run("recover").passes().out.splitlines()
        assert lines[0] == f"recovered  {later.attempt} (epoch {later.epoch})"
        assert lines[-1] == f"nothing    is left to publish of the 1 other(s) in {left.root / 'exec'}"

    def test_what_publishes_an_unknown_folder_by_hand_is_said_and_works(self, job: Job) -> None:
        mark_complete(job.write("step-1"))
        mark_complete(job.write("step-2"))
        mark_complete(job.write("step-3"))
        shutil.rmtree(job.folder / "step-3")
        [said] = job.later().run("recover").passes().out.splitlines()
        assert said.startswith(f"unknown    {job.attempt}: it has no .dispatch/execution.json")
        assert "its epoch is not known here; 2 save(s) in it are marked complete" in said
        *variables, program, subcommand, option = said.partition("by hand with ")[2].rsplit(" ", 3)
        assert program == "publish"
        line = variables[0].replace("<its epoch>", str(job.epoch))
        job.run(subcommand, option, **dict(word.split("=") for word in line.split())).passes()
        assert job.published() == ["step-1", "step-2"]

    def test_a_fenced_one_says_what_it_still_holds(self, left: Job) -> None:
        later = left.later()
        later.run("publish", later.save("step-9")).passes()
        third = later.later(later.epoch + 1, "1.17.3")
        lines = third.run("recover").passes().out.splitlines()
        assert lines[0].startswith(f"fenced     {left.attempt} (epoch {left.epoch}): epoch {later.epoch} has published")
        assert lines[1].startswith("  left       step-2: ")
        assert lines[2].startswith("  abandoned  step-3: ")
        assert left.published() == ["step-1", "step-9"]


class TestWhoseItIs:
    def test_without_an_identity_it_asks_what_is_older(self, left: Job) -> None:
        left.run("recover", **NO_IDENTITY).fails(125, "no identity", "--before EPOCH")

    def test_by_hand_the_operator_says_it(self, left: Job) -> None:
        twin = left.later(left.epoch + 1, "1.17.2")
        twin.run("publish", twin.save("step-9")).passes()
        shutil.rmtree(left.store)
        found = left.run("recover", "--before", str(left.epoch + 1), "--json", **NO_IDENTITY).passes().json
        assert {item["name"]: item["state"] for item in found} == {left.attempt: "recovered", "1.17.2": "refused"}
        assert left.published() == ["step-1", "step-2"]

    def test_an_execution_does_not_recover_itself(self, left: Job) -> None:
        assert left.run("recover", "--json").passes().json == []
        left.run("recover", "--before", str(left.epoch + 1)).fails(3, "--before", str(left.epoch), "itself")
        left.run("recover", "--before", "soon").fails(125, "soon")
        assert left.published() == ["step-1"]

    def test_another_jobs_folder_is_refused(self, job: Job) -> None:
        job.save("step-1")
        job.run("watch", "--once", DISPATCH_JOB_ID="01ARZ3NDEKTSV4RRFFQ69G5FAV").passes()
        later = job.later()
        [found] = later.run("recover", "--json", DISPATCH_JOB_ID="01ARZ3NDEKTSV4RRFFQ69G5FAW").passes().json
        assert found["state"] == "refused"
        assert "01ARZ3NDEKTSV4RRFFQ69G5FAV" in found["reason"]

    def test_on_a_shared_volume_rank_0_recovers_for_all(self, left: Job) -> None:
        nodes = {"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "1"}
        later = left.later()
        later.run("recover", **nodes).fails(3, "--shared-volume")
        assert "standing by" in later.run("recover", "--shared-volume", **nodes).passes().err
        assert left.published() == ["step-1"]
        later.run("recover", "--shared-volume", **{**nodes, "JOB_COMPLETION_INDEX": "0"}).passes()
        assert left.published() == ["step-1", "step-2"]


class TestTheSameEnvironmentAsWatch:
    def test_the_completion_rule(self, left: Job) -> None:
        left.later().run("recover", PUBLISH_COMPLETE="settle:0.3").passes()
        assert left.published() == ["step-1", "step-2", "step-3"]

    def test_in_place(self, left: Job) -> None:
        here = replace(left.later(), dest=str(left.root))
        here.run("recover", "--in-place").passes()
        assert here.published() == ["step-1", "step-2"]
        assert not (left.root / "data").is_dir() or here.data() == [], "nothing was copied"
        here.run("verify", "--all").passes()

    def test_a_destination_inside_what_is_published_is_refused(self, left: Job) -> None:
        inside = replace(left.later(), dest=str(left.folder / "store"))
        inside.run("recover").fails(3, "choose a folder outside")
        replace(left.later(), dest=str(left.root / "elsewhere")).run("recover", "--in-place").fails(3, "--in-place")


class TestOwner:
    def test_a_living_one_is_waited_for_and_then_published_beside(self, left: Job) -> None:
        with owner_of(left):
            result = left.later().run("recover", "--wait-owner", "0.5").passes()
        assert "standing by" in result.err
        assert "beside" in result.err
        assert left.published() == ["step-1", "step-2"]

    def test_sigterm_ends_the_wait_and_says_what_is_left(self, left: Job) -> None:
        with owner_of(left), running(left.later(), "--wait-owner", "600") as recovery:
            recovery.says("standing by")
            recovery.signal(signal.SIGTERM)
            result = recovery.end()
        result.fails(40, "step-2")
        assert "  left       step-2: " in result.err
        assert left.published() == ["step-1"]


class TestExitCodes:
    def test_31_for_an_epoch_of_another_attempt_and_the_others_are_recovered(self, left: Job) -> None:
        (left.store / "claims" / f"{left.epoch:020d}" / "attempt.json").write_text("another")
        later = left.later()
        later.save("step-9")
        later.run("watch", "--once", PUBLISH_DEST=str(left.root / "away")).passes()
        shutil.rmtree(left.store / "commits")
        third = later.later(later.epoch + 1, "1.17.3")
        result = third.run("recover")
        result.fails(31, "another", str(left.epoch))
        assert f"recovered  {later.attempt}" in result.out
        assert left.published() == ["step-9"]

    def test_40_when_time_runs_out(self, left: Job) -> None:
        left.later().run("recover", "--timeout", "0").fails(40, "time ran out")
        assert left.published() == ["step-1"]

    @SEAWEED
    def test_11_for_a_store_that_denies(self, left: Job, shared_bucket: Bucket) -> None:
        there = on_s3(left.later(), shared_bucket)
        there.run("recover", AWS_SECRET_ACCESS_KEY="wrong").fails(11)
        there.run("recover").passes()
        assert there.published() == ["step-1", "step-2"]

    def test_12_for_a_store_that_cannot_refuse_a_lost_race(self, left: Job, rclone_bucket: Bucket) -> None:
        there = on_s3(left.later(), rclone_bucket)
        there.run("recover").fails(12, "--accept-weak-store")
        there.run("recover", "--accept-weak-store").passes()
        assert there.published() == ["step-1", "step-2"]


@pytest.mark.root
class TestNotOursToWrite:
    def test_another_users_folder_is_refused_and_the_others_are_recovered(self, left: Job) -> None:
        later = left.later()
        later.save("step-9")
        later.run("watch", "--once", PUBLISH_DEST=str(left.root / "away")).passes()
        shutil.rmtree(left.store)
        left.store.mkdir()
        for path in [left.store, later.folder, *later.folder.rglob("*")]:
            os.chown(path, NOBODY, NOBODY)
        before = tree_of(left.folder)
        closed = left.later(left.epoch - 1, "1.17.0")
        shutil.copytree(left.folder, closed.folder)
        closed.folder.chmod(0o711)
        third = replace(later.later(later.epoch + 1, "1.17.3"), user=NOBODY)
        found = {item["name"]: item for item in third.run("recover", "--json").passes().json}
        assert found[left.attempt]["state"] == "refused"
        assert "Permission denied" in found[left.attempt]["reason"]
        assert found[closed.attempt]["state"] == "refused"
        assert "Permission denied" in found[closed.attempt]["reason"]
        assert found[later.attempt]["state"] == "recovered"
        assert left.published() == ["step-9"]
        assert tree_of(left.folder) == before

    def test_a_volume_that_is_mounted_read_only_keeps_nobody_from_starting(self, left: Job) -> None:
        with small_disk(left.root.parent / "volume", "16m") as volume:
            shutil.copytree(left.root / "exec", volume / "exec")
            subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
            result = left.later().run("recover", "--root", volume, "--json").passes()
        [found] = json.loads(result.out)
        assert found["state"] == "refused"
        assert "read-only" in found["reason"]
        assert [save["save"] for save in found["saves"] if save["result"] == "left"] == ["step-2"]
