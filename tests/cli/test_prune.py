"""`publish prune` as an operator runs it: looked at first, then applied, beside whatever else is at work (I6)."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import SEAWEED, Job, flip, on_s3, program, tree_of
from tests.servers import Bucket

from dispatch_agent.publish import keys


def published(job: Job, executions: int = 3, saves: int = 2) -> list[Job]:
    """Executions one after the other, each with saves `<execution>.<save>` of distinct content."""
    done = []
    for number in range(1, executions + 1):
        one = job.later(1_000_000 + number, f"1.{number}")
        for save in range(1, saves + 1):
            one.save(f"{number}.{save}", {"weights.bin": b"%d.%d" % (number, save) * 1000})
        one.run("watch", "--once").passes()
        done.append(one)
    return done


def test_it_shows_what_would_go_and_deletes_nothing(job: Job) -> None:
    published(job)
    before = tree_of(job.store)
    shown = job.run("prune", "--keep", "2").passes().out
    assert [line.split()[2] for line in shown.splitlines()[1:5]] == ["1.1", "1.2", "2.1", "2.2"]
    assert "would delete 4 saves" in shown
    assert "Nothing was deleted: add --apply" in shown
    assert tree_of(job.store) == before


def test_applied_it_leaves_what_it_said_it_would(job: Job) -> None:
    published(job)
    told = job.run("prune", "--keep", "3", "--keep-every", "3", "--json").passes().json
    assert not told["applied"]
    done = job.run("prune", "--keep", "3", "--keep-every", "3", "--apply", "--json").passes().json
    assert done == {**told, "applied": True}
    assert job.published() == [item["save"] for item in done["kept"]] == ["1.1", "2.2", "3.1", "3.2"]
    assert job.run("verify", "--all").passes().out.count("intact") == 4
    assert job.run("latest").passes().out.strip() == "3.2"
    assert len(job.commits()) == 6


def test_what_is_still_on_the_volume_is_not_published_again(job: Job) -> None:
    *_, last = published(job)
    job.run("prune", "--keep", "2", "--apply").passes()
    before = tree_of(job.store)
    last.run("watch", "--once").passes()
    after = tree_of(job.store)
    assert {k: v for k, v in after.items() if not k.startswith(b"probe")} == {
        k: v for k, v in before.items() if not k.startswith(b"probe")
    }


def test_verify_keeps_the_last_intact_saves_beside_damaged_ones(job: Job) -> None:
    published(job, executions=2, saves=3)
    for save in ("2.2", "2.3"):
        flip(next(path for path in job.data() if save in path.parts and path.name == "weights.bin"))
    assert (
        "2 saves stay, and --keep counts those that are whole by size" in job.run("prune", "--keep", "2").passes().out
    )
    done = job.run("prune", "--keep", "2", "--verify", "--apply").passes()
    assert "4 saves stay, and --keep counts those every byte of which is right" in done.out
    assert job.published() == ["1.3", "2.1", "2.2", "2.3"]


@pytest.mark.parametrize("keep", ["0", "1", "-3", "two"])
def test_fewer_than_two_is_no_number_to_keep(job: Job, keep: str) -> None:
    answer = job.run("prune", f"--keep={keep}")
    assert answer.code == 2
    assert "--keep" in answer.err


def test_a_record_that_cannot_be_read_is_said_at_the_end_and_the_rest_is_done(job: Job) -> None:
    published(job)
    damaged = job.commits()[0]
    damaged.write_bytes(b"{}")
    answer = job.run("prune", "--keep", "2", "--apply")
    answer.fails(22, keys.COMMITS, "format None")
    assert "deleted 3 saves" in answer.out
    assert [path for path in job.data() if "1.1" in path.parts], "what it names is unknown"


def test_beside_a_watch_and_a_reader_nothing_is_lost(job: Job) -> None:
    """Saves come, are pruned to two, and are restored, all at once."""
    with job.watch("--rescan", "0.1") as watch:
        for step in range(12):
            job.save(f"step-{step}", {"weights.bin": b"%d" % step * 100_000})
            if step % 2:
                job.run("prune", "--keep", "2", "--apply").passes()
                target = job.root / f"back-{step}"
                job.run("restore", target).passes()
                (got,) = (path for path in target.iterdir())
                number = got.name.removeprefix("step-").encode()
                assert (got / "weights.bin").read_bytes() == number * 100_000
        watch.stop().passes()
    job.run("prune", "--keep", "2", "--apply").passes()
    assert job.published() == ["step-10", "step-11"]


def test_killed_at_any_moment_it_is_finished_by_the_next(job: Job) -> None:
    published(job, executions=3, saves=4)
    seed = random.Random(7)  # noqa: S311 (when to kill, not a secret)
    for _ in range(6):
        process = subprocess.Popen(
            [program("publish"), "prune", "--keep", "2", "--apply"], env=job.variables(), stdout=subprocess.DEVNULL
        )
        time.sleep(0.3 + seed.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert job.published()[-2:] == ["3.3", "3.4"]
        assert job.run("verify").code == 0
    job.run("prune", "--keep", "2", "--apply").passes()
    assert job.published() == ["3.3", "3.4"]
    assert {path.parts[-2] for path in job.data() if path.suffix != ".json"} == {
        Path(item["data"][0]).name for item in job.run("list", "--json").passes().json
    }


@SEAWEED
def test_on_s3_a_dead_executions_half_uploads_go_and_a_living_ones_stay(job: Job, shared_bucket: Bucket) -> None:
    job = on_s3(job, shared_bucket)
    published(job)
    prefix = job.dest.removeprefix(f"{shared_bucket.url}/")
    client = shared_bucket.client()
    begun = [f"{prefix}/data/{1_000_000 + number:020d}-1.{number}/big/00000.{'a' * 12}.000001/w" for number in (1, 3)]
    for key in begun:
        client.create_multipart_upload(Bucket=shared_bucket.name, Key=key)
    done = job.run("prune", "--keep", "2", "--apply", "--json").passes().json
    assert [f"{prefix}/{key}" for key in done["unfinished"]] == begun[:1]
    left = client.list_multipart_uploads(Bucket=shared_bucket.name, Prefix=f"{prefix}/")["Uploads"]
    assert [upload["Key"] for upload in left] == begun[1:]
    assert job.published() == ["3.1", "3.2"]
    job.run("verify", "--all").passes()


def test_a_store_that_cannot_refuse_a_lost_race_is_refused_unless_accepted(job: Job, rclone_bucket: Bucket) -> None:
    job = on_s3(job, rclone_bucket, PUBLISH_ACCEPT_WEAK_STORE="1")
    published(job, executions=2, saves=2)
    job.run("prune", "--keep", "2", "--apply", PUBLISH_ACCEPT_WEAK_STORE="0").fails(12, "--accept-weak-store")
    assert len(job.published()) == 4
    job.run("prune", "--keep", "2", "--apply").passes()
    assert job.published() == ["2.1", "2.2"]


def test_an_empty_store_has_nothing_to_prune(job: Job) -> None:
    answer = replace(job, dest=f"{job.dest}-empty").run("prune", "--keep", "2", "--apply").passes()
    assert "deleted 0 saves" in answer.out
