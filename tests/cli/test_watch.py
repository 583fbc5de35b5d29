"""`publish watch` as it is run: beside a trainer, until SIGTERM; and `publish publish` beside it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import LARGE, UNSET, Job, eventually, program, tree_of


class TestPublishing:
    @pytest.mark.parametrize("events", ["auto", "polling"])
    def test_what_is_marked_complete_is_published_and_nothing_else(self, job: Job, events: str) -> None:
        with job.watch("--events", events) as watch:
            job.write("step-1")
            job.save("step-2")
            watch.says("published save=step-2")
            job.save("step-3", b"one file")
            watch.says("published save=step-3")
            watch.stop().passes()
        assert job.published() == ["step-2", "step-3"]

    def test_events_wake_it_long_before_the_next_look(self, job: Job) -> None:
        watch = job.start("--rescan", "600")
        try:
            watch.says("claimed")
            for name in ("step-1", "step-2"):
                job.save(name)
                watch.says(f"published save={name}")
            watch.stop().passes()
        finally:
            watch.process.kill()
            watch.process.wait()

    def test_another_content_under_the_same_name_is_another_generation(self, job: Job) -> None:
        with job.watch() as watch:
            for generation, data in enumerate((b"one", b"two", b"one"), 1):
                job.save("last", {"weights.bin": data})
                watch.says(f"generation={generation}")
            job.save("last", {"weights.bin": b"one"})
            watch.says("already save=last")
            watch.stop().passes()
        assert job.published() == ["last"] * 3

    def test_a_folder_that_does_not_exist_yet_is_waited_for(self, job: Job) -> None:
        shutil.rmtree(job.root / "exec")
        with job.watch() as watch:
            watch.says("standing by")
            assert not job.folder.exists(), "the trainer makes it, with its own user and mode"
            job.save("step-1")
            watch.says("published save=step-1")
            watch.stop().passes()

    def test_a_folder_that_is_made_anew_is_another_term(self, job: Job) -> None:
        """Its saves are of the same execution, but their order does not go on: it is another folder."""
        job.run("publish", job.save("step-1")).passes()
        shutil.rmtree(job.folder)
        job.run("publish", job.save("step-2")).passes()
        terms = [item["term"] for item in job.run("list", "--json").json]
        assert terms == [1, 2]
        assert job.run("latest").out == "step-2\n"

    def test_a_folder_given_by_path_needs_no_root(self, job: Job) -> None:
        job.save("step-1")
        job.run("watch", job.folder, "--once", PUBLISH_ROOT="/nowhere").passes()
        assert job.published() == ["step-1"]

    def test_a_restarted_watch_goes_on_after_a_kill(self, job: Job) -> None:
        job.save("step-1", LARGE)
        with job.watch("--workers", "1") as watch:
            watch.says("uploading save=step-1")
            eventually(lambda: bool(job.data()), lambda: watch.said)
            watch.signal(signal.SIGKILL)
            assert watch.end().code == -signal.SIGKILL
        job.save("step-2")
        job.run("watch", "--once").passes()
        assert job.published() == ["step-1", "step-2"]
        job.run("verify", "--all").passes()

    def test_a_store_inside_the_root_is_not_taken_for_a_save(self, job: Job) -> None:
        inside = replace(job, dest=str(job.root / "store"))
        inside.save("step-1")
        inside.run("watch", "--once").passes()
        assert inside.published() == ["step-1"]

    def test_a_second_watch_of_the_folder_stands_by_and_takes_over(self, job: Job) -> None:
        with job.watch() as first, job.watch() as second:
            eventually(lambda: "standing by" in first.said + second.said, lambda: first.said + second.said)
            working, waiting = (first, second) if "standing by" in second.said else (second, first)
            working.stop().passes()
            job.save("step-1")
            waiting.says("published save=step-1")
            waiting.stop().passes()


class TestEnding:
    def test_sigterm_publishes_a_save_that_was_completed_just_before(self, job: Job) -> None:
        watch = job.start("--rescan", "600", "--events", "polling")
        try:
            watch.says("claimed")
            time.sleep(0.3)
            job.save("step-1")
            assert "published" not in watch.said, "it would not have looked for ten minutes"
            watch.stop().passes()
        finally:
            watch.process.kill()
            watch.process.wait()
        assert job.published() == ["step-1"]

    def test_sigterm_with_nothing_to_do_ends_at_once(self, job: Job) -> None:
        with job.watch() as watch:
            watch.says("claimed")
            started = time.monotonic()
            watch.stop().passes()
            assert time.monotonic() - started < 5

    def test_an_incomplete_save_at_the_end_is_no_error(self, job: Job) -> None:
        with job.watch("--log-level", "debug") as watch:
            job.write("step-1")
            watch.says("waiting save=step-1")
            watch.stop().passes()
        assert job.commits() == []

    def test_an_incomplete_save_at_the_end_is_said(self, job: Job) -> None:
        with job.watch() as watch:
            watch.says("claimed")
            job.write("step-1")
            result = watch.stop().passes()
        assert "left incomplete save=step-1" in result.err
        assert "--complete" in result.err

    def test_a_drain_that_runs_out_of_time_exits_40_and_names_what_is_left(self, job: Job) -> None:
        job.save("step-1", LARGE)
        with job.watch("--workers", "1", "--drain-timeout", "0.1") as watch:
            watch.says("uploading save=step-1")
            watch.stop().fails(40, "left unpublished", "a later publisher")
        assert job.commits() == []
        job.run("watch", "--once").passes()
        assert job.published() == ["step-1"]

    def test_a_second_signal_ends_at_once(self, job: Job) -> None:
        job.save("step-1", LARGE)
        with job.watch("--workers", "1") as watch:
            watch.says("uploading save=step-1")
            watch.signal()
            time.sleep(0.05)
            watch.signal(signal.SIGINT)
            watch.end().fails(40, "left unpublished")

    def test_a_sigterm_that_comes_twice_is_one(self, job: Job) -> None:
        """timeout(1) tells the process, and then its group."""
        job.save("step-1", LARGE)
        with job.watch("--workers", "1") as watch:
            watch.says("uploading save=step-1")
            watch.signal()
            time.sleep(0.05)
            watch.stop().passes()
        assert job.published() == ["step-1"]

    def test_signals_after_the_drain_do_not_disturb_it(self, job: Job) -> None:
        """Whenever a signal comes, there is one sentence or none, and never a traceback."""
        with job.watch() as watch:
            watch.says("claimed")
            for _ in range(20):
                if watch.process.poll() is None:
                    watch.signal()
            result = watch.end()
        assert result.code in (0, 40)
        assert "Traceback" not in result.err

    def test_ctrl_c_drains_too(self, job: Job) -> None:
        with job.watch() as watch:
            watch.says("claimed")
            job.save("step-1")
            watch.signal(signal.SIGINT)
            watch.end().passes()
        assert job.published() == ["step-1"]

    def test_a_log_reader_that_goes_away_does_not_stop_it(self, job: Job) -> None:
        process = subprocess.Popen(
            [program("publish"), "watch", "--rescan", "0.3"], env=job.variables(), stderr=subprocess.PIPE
        )
        try:
            assert process.stderr
            process.stderr.readline()
            process.stderr.close()
            job.save("step-1")
            eventually(lambda: len(job.commits()) == 1, lambda: "it ended or waits")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) in (0, 141)
        finally:
            process.kill()
            process.wait()


class TestOnce:
    def test_it_ends_when_all_is_published(self, job: Job) -> None:
        for name in ("step-1", "step-2"):
            job.save(name)
        job.run("watch", "--once").passes()
        assert job.published() == ["step-1", "step-2"]
        job.run("watch", "--once").passes()
        assert job.published() == ["step-1", "step-2"]

    def test_saves_of_which_none_is_complete_are_41(self, job: Job) -> None:
        job.write("step-1")
        job.run("watch", "--once").fails(41, "saw 1 save", "--complete")

    def test_and_the_reasons_are_above(self, job: Job) -> None:
        job.write("step-1")
        assert "left incomplete save=step-1" in job.run("watch", "--once").err

    def test_no_saves_at_all_are_no_error(self, job: Job) -> None:
        job.run("watch", "--once").passes()

    def test_a_folder_that_never_comes_is_incomplete(self, job: Job) -> None:
        shutil.rmtree(job.root / "exec")
        job.run("watch", "--once", "--start-timeout", "0").fails(20, str(job.folder), "not there yet")


class TestFenced:
    """A newer execution has published: whatever this one still has to say is not taken."""

    def overtaken(self, job: Job) -> Job:
        newer = job.later()
        newer.folder.mkdir(exist_ok=True)
        newer.run("publish", newer.save("step-9")).passes()
        return newer

    def test_it_is_said_once_and_sigterm_exits_30(self, job: Job) -> None:
        with job.watch() as watch:
            job.save("step-1")
            watch.says("published save=step-1")
            newer = self.overtaken(job)
            job.save("step-2")
            watch.says("is stale")
            time.sleep(1.0)
            assert watch.process.poll() is None, "a sidecar that exits is only restarted"
            assert watch.said.count("is stale") == 1
            result = watch.stop()
        result.fails(30, str(job.epoch), str(newer.epoch), job.attempt, "nothing of this execution is lost locally")
        assert job.published() == ["step-1", "step-9"]
        assert (job.folder / "step-2" / "weights.bin").exists()

    def test_on_fenced_exit_exits_30_by_itself(self, job: Job) -> None:
        self.overtaken(job)
        job.save("step-1")
        job.run("watch", "--on-fenced", "exit").fails(30, "is stale")

    def test_once_does_not_wait_for_a_signal_that_nobody_sends(self, job: Job) -> None:
        self.overtaken(job)
        job.save("step-1")
        job.run("watch", "--once").fails(30, "is stale")

    def test_a_one_shot_exits_30(self, job: Job) -> None:
        self.overtaken(job)
        job.run("publish", job.write("step-1")).fails(30, "is stale")
        assert job.published() == ["step-9"]


class TestRanks:
    def test_rank_1_of_a_shared_volume_stands_by(self, job: Job) -> None:
        with job.watch("--shared-volume", PET_NNODES="2", JOB_COMPLETION_INDEX="1") as watch:
            watch.says("rank 0 publishes for all ranks")
            job.save("step-1")
            time.sleep(0.7)
            watch.stop().passes()
        assert not job.store.exists()

    def test_rank_0_of_a_shared_volume_publishes(self, job: Job) -> None:
        job.save("step-1")
        job.run("watch", "--once", PUBLISH_SHARED_VOLUME="true", PET_NNODES="2", JOB_COMPLETION_INDEX="0").passes()
        assert job.published() == ["step-1"]

    def test_a_one_shot_of_rank_1_says_where_to_run_it(self, job: Job) -> None:
        job.run("publish", job.write("step-1"), "--rank", "1").fails(3, "rank 1", "rank 0")

    @pytest.mark.parametrize("variable", ["PET_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"])
    def test_several_nodes_without_a_word_are_refused(self, job: Job, variable: str) -> None:
        job.run("watch", **{variable: "2"}).fails(3, "2 nodes", "--shared-volume")


class TestLogs:
    def test_every_json_line_carries_the_identity(self, job: Job) -> None:
        job.write("no-sign")
        with job.watch("--log-format", "json", "--log-level", "debug", PUBLISH_NOSUCH="x", PUBLISH_RANK="0") as watch:
            job.save("step-1")
            watch.says('"published"')
            result = watch.stop().passes()
        lines = [json.loads(line) for line in result.err.splitlines()]
        assert {(line["epoch"], line["attempt"], line["rank"]) for line in lines} == {(str(job.epoch), job.attempt, 0)}
        assert {"settings", "claimed", "complete", "uploading", "published", "waiting", "ended"} <= {
            line["event"] for line in lines
        }
        assert all({"time", "level"} <= set(line) for line in lines)

    def test_the_greatest_epoch_is_the_same_text_everywhere(self, job: Job) -> None:
        greatest = replace(job, epoch=18_000_000_999_999_999_999)
        save = greatest.save("step-1")
        result = greatest.run("publish", save, "--log-format", "json").passes()
        assert json.loads(result.err.splitlines()[0])["epoch"] == "18000000999999999999"
        assert greatest.run("latest", "--json").json["epoch"] == "18000000999999999999"

    def test_a_quiet_level_says_only_what_is_wrong(self, job: Job) -> None:
        job.save("step-1")
        assert job.run("watch", "--once", "--log-level", "error").passes().err == ""


class TestOneShot:
    def test_it_publishes_and_a_second_time_says_already(self, job: Job) -> None:
        save = job.write("step-1")
        assert job.run("publish", save).passes().out == f"published: step-1 at {job.dest}\n"
        assert job.run("publish", save).passes().out == f"already: step-1 at {job.dest}\n"
        again = job.run("publish", save, "--json").passes().json
        assert (again["result"], again["save"]) == ("already", "step-1")
        assert job.published() == ["step-1"]

    def test_a_relative_path_is_taken_from_here(self, job: Job) -> None:
        job.write("step-1")
        answer = subprocess.run(
            [program("publish"), "publish", "step-1"], env=job.variables(), cwd=job.folder, check=False, timeout=60
        )
        assert answer.returncode == 0
        assert job.published() == ["step-1"]

    def test_beside_a_watch_it_hands_the_save_over_and_waits_for_its_commit(self, job: Job) -> None:
        with job.watch() as watch:
            watch.says("claimed")
            got = job.run("publish", job.write("step-1"), "--json").passes().json
            assert got["result"] == "published"
            assert (job.store / got["commit"]).exists()
            again = job.run("publish", job.folder / "step-1", "--json").passes().json
            assert again["result"] == "already"
            watch.stop().passes()
        assert job.published() == ["step-1"]

    def test_beside_a_watch_that_hangs_it_gives_up_in_time(self, job: Job) -> None:
        with job.watch() as watch:
            watch.says("claimed")
            watch.signal(signal.SIGSTOP)
            started = time.monotonic()
            result = job.run("publish", job.write("step-1"), "--timeout", "1")
            result.fails(20, "another publisher has", "step-1")
            assert time.monotonic() - started < 10

    def test_a_demanded_rule_that_is_not_met_is_incomplete(self, job: Job) -> None:
        job.run("publish", job.write("step-1"), "--complete", "marker").fails(20, "step-1", "publish complete")
        job.run("publish", job.folder / "step-1", "--complete", "pointer:latest").fails(20, "step-1", "latest")
        assert job.commits() == []


class TestInPlace:
    def in_place(self, job: Job) -> Job:
        return replace(job, dest=str(job.root))

    def test_it_publishes_without_a_copy_and_restores(self, job: Job, place: Path) -> None:
        one = self.in_place(job)
        save = one.save("step-1")
        one.run("watch", "--once", "--in-place").passes()
        assert not list(job.root.rglob("data/**/weights.bin")), "nothing is copied"
        one.run("verify").passes()
        one.run("restore", place / "back").passes()
        assert tree_of(place / "back" / "step-1") == tree_of(save)

    def test_restore_finds_out_what_the_trainer_changed(self, job: Job, place: Path) -> None:
        one = self.in_place(job)
        save = one.save("step-1")
        one.run("publish", save, "--in-place").passes()
        (save / "weights.bin").write_bytes(b"x" * 1000)
        one.run("restore", place / "back").fails(22, "step-1/weights.bin", "damaged after it was published")

    def test_it_is_refused_where_store_and_root_are_two(self, job: Job) -> None:
        job.run("watch", "--in-place").fails(3, "--in-place", job.dest, str(job.root))


def test_a_save_that_changes_after_its_mark_waits_for_the_next_one(job: Job) -> None:
    save = job.write("step-1")
    job.run("complete", save).passes()
    future = time.time_ns() + 2_000_000_000
    (save / "weights.bin").write_bytes(b"changed")
    os.utime(save / "weights.bin", ns=(future, future))
    with job.watch("--log-level", "debug") as watch:
        watch.says("waiting save=step-1")
        assert job.commits() == []
        job.run("complete", save).passes()
        watch.says("published save=step-1")
        watch.stop().passes()
    assert json.loads(job.commits()[0].read_bytes())["rule"] == "marker"


class TestEarlyAndLate:
    """What comes before a watch is ready, and what it leaves when it never was."""

    def test_a_sigterm_that_comes_while_it_starts_drains(self, job: Job) -> None:
        """The trainer ended at once: what it saved is published all the same."""
        job.save("step-1")
        ended = subprocess.run([sys.executable, "-c", STARTING], env=job.variables(), timeout=60, check=False)
        assert ended.returncode == 0
        assert job.published() == ["step-1"]

    def test_what_it_could_not_claim_the_next_execution_recovers(self, job: Job) -> None:
        """Its store never answered, but it has said whose folder it is."""
        job.save("step-1")
        nowhere = {**AWAY, "PUBLISH_START_TIMEOUT": "0"}
        assert job.run("watch", "--once", "--dest", "s3://bucket/job", **nowhere).code == 10
        later = job.later()
        assert "step-1" in later.run("recover").passes().out
        assert job.published() == ["step-1"]

    @pytest.mark.parametrize("how", ["swallowed", "replaced"])
    def test_the_end_of_the_time_is_heard_wherever_the_signal_comes(self, how: str) -> None:
        """In a weak reference's callback the interpreter swallows what is raised; a lock raises something else."""
        ended = subprocess.run([sys.executable, "-c", OUT_OF_TIME, how], timeout=30, check=False, capture_output=True)
        assert ended.stdout == b"aborted", ended.stderr


STARTING = """
import importlib.abc, os, signal, sys

class Kill(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "dispatch_agent.cli.main":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Kill())
sys.argv = ["publish", "watch"]
from dispatch_agent.__main__ import publish
publish()
"""
"""`publish watch`, to which SIGTERM comes before it has imported what it needs."""
OUT_OF_TIME = """
import os, signal, sys, threading, time, weakref
from dispatch_agent.cli import signals
from dispatch_agent.clock import SystemClock
from dispatch_agent.logs import Log
from dispatch_agent.publish.watcher import Abort, Stop, Tally, watch

signals.abort_within(60)

class Thing:
    pass

def start():
    thing = Thing()
    seen = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGALRM) if sys.argv[1] == "swallowed" else None)
    del thing
    if sys.argv[1] == "replaced":
        lock = threading.Lock()
        with lock:
            lock.release()
            os.kill(os.getpid(), signal.SIGALRM)
    time.sleep(60)

clock = SystemClock()
log = Log(lambda line: print(line, file=sys.stderr), clock)
try:
    watch(start, Stop(), Tally(), clock, log, rescan=1.0, once=False, start_timeout=0.0)
except Abort:
    sys.stdout.write("aborted")
"""
AWAY = {
    "PUBLISH_DEST": UNSET,
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
}
"""A store at a port where nobody listens."""
