"""A whole job on each kind of store, by the product's own commands: published, fenced, raced, restored, verified.

What holds without conditional writes too: nothing is overwritten, order is in the names, a stale writer is refused, and
an epoch that two attempts claim is found out, by listing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import Job, tree_of
from tests.protocol.checks import check_invariants, commits
from tests.protocol.jobs import Execution, small
from tests.protocol.writers import Launcher, Writer
from tests.store.conftest import Opener
from tests.store.matrix import Kind, Place

from dispatch_agent.publish import pointer, reader

pytestmark = pytest.mark.needs("outside")
WRITERS = 4
FENCED = 30
TREE = {"weights.bin": os.urandom(300_000), "empty": b"", "odd name %2F?": b"1", "sub/state.json": b"{}"}


@pytest.fixture
def accepting(kind: Kind) -> dict[str, str]:
    """What an operator says who wants a store that cannot refuse, or not always."""
    return {} if kind.fair and not kind.weak else {"PUBLISH_ACCEPT_WEAK_STORE": "1"}


@pytest.fixture
def job(place: Place, tmp_path: Path) -> Job:
    job = Job(tmp_path / "root", place.url, place.environment)
    job.folder.mkdir(parents=True)
    return job


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


def test_what_is_saved_is_published_in_order_and_restored_byte_for_byte(
    job: Job, kind: Kind, accepting: dict[str, str], tmp_path: Path
) -> None:
    job = replace(job, environ={**job.environ, **accepting})
    newer = job.later()
    job.save("step-1")
    job.run("watch", "--once").passes()
    saved = newer.save("step-2", TREE)
    with newer.watch() as watch:
        watch.says("published save=step-2")
        watch.stop().passes()
    job.run("publish", job.save("step-3")).fails(FENCED, "is stale")
    assert job.published() == ["step-1", "step-2"]
    newest = job.run("latest", "--json").passes().json
    assert newest["save"] == "step-2"
    if kind.fair:
        assert newest["pointer"] == (None if kind.replace == "no" else newest["commit"])
    job.run("restore", tmp_path / "restored").passes()
    assert tree_of(tmp_path / "restored" / "step-2") == tree_of(saved)
    job.run("verify", "--all").passes()


@pytest.mark.needs("weak")
def test_i5_an_epoch_that_two_attempts_claim_is_found_out(job: Job, accepting: dict[str, str]) -> None:
    job = replace(job, environ={**job.environ, **accepting})
    job.run("publish", job.save("step-1")).passes()
    other = replace(job, attempt="1.18.1")
    other.run("publish", other.save("step-2")).fails(31, job.attempt, other.attempt)
    assert job.published() == ["step-1"]


@pytest.mark.needs("weak")
def test_a_store_that_cannot_refuse_is_refused_before_any_byte_is_sent(job: Job, opener: Opener) -> None:
    save = job.save("step-1")
    for command in (["publish", save], ["watch", "--once"]):
        job.run(*command).fails(12, "cannot refuse a lost race", "--accept-weak-store")  # type: ignore[arg-type]
    assert list(opener().list("")) == [], "the probe tidies up, and nothing else was written"


def test_i7_of_executions_that_publish_at_once_the_greatest_is_the_newest(
    kind: Kind, place: Place, opener: Opener, accepting: dict[str, str], tmp_path: Path, launcher: Launcher
) -> None:
    executions = [Execution(tmp_path / "root", number) for number in range(1, WRITERS + 1)]
    running = []
    for number, execution in enumerate(executions):
        save = execution.save(f"step-{100 - execution.number}", small(execution.number))
        environment = {**place.environment, **execution.environment, **accepting}
        argv = ["publish", str(save), "--dest", place.seen_by(number), "--timeout", "120"]
        log = str(tmp_path / f"{execution.epoch}.log")
        running.append(
            launcher.start(Writer(log=log, epoch=execution.epoch, environment=environment, argv=argv, stopped=True))
        )
    for each in running:
        each.wait_until_stopped()
    for each in running:
        each.wake()
    codes = {each.writer.epoch: each.wait() for each in running}
    assert set(codes.values()) <= {0, FENCED}, "\n".join(each.said() for each in running)
    store = opener()
    published = {epoch for epoch, code in codes.items() if code == 0}
    assert {record.order.epoch for record in commits(store)} == published
    assert reader.newest(store).order.epoch == max(codes) == max(published)
    check_invariants(store, pointer_is_current=kind.replace == "yes" and kind.fair)
    assert kind.replace != "no" or pointer.read(store) is None, "a pointer that cannot be moved safely was written"
