"""A writer is frozen (SIGSTOP) in the middle of its work, a newer execution publishes, and the old one wakes up.

What is newest stays what it was, not one byte that stood there changes, and the woken writer says that it is stale.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tests.protocol.checks import check_invariants, commits
from tests.protocol.faults import everything_in
from tests.protocol.jobs import Execution, small
from tests.protocol.writers import Launcher, Running, Signal, Writer
from tests.servers import Bucket

from dispatch_agent.publish import pointer, reader
from dispatch_agent.store.base import Store
from dispatch_agent.store.opening import open_store

FENCED = 30
BIG, BIG_ON_S3 = 5 << 20, 25 << 20  # read in several pieces

OLD, NEW = 1_000_001, 1_000_002

# Where it is frozen, and what it says when it wakes up: 0 where its commit had passed the last look at the fence.
STEPS = {
    "before it claims the epoch": (Signal(signal.SIGSTOP, "before", method="create", key="claims/"), FENCED),
    "after it claimed its term": (Signal(signal.SIGSTOP, "after", method="create", key=f"claims/{OLD:020d}/0"), FENCED),
    "before the upload": (Signal(signal.SIGSTOP, "before", method="upload"), FENCED),
    "in the middle of a file": (Signal(signal.SIGSTOP, "before", 3, method="piece"), FENCED),
    "after the upload": (Signal(signal.SIGSTOP, "after", 2, method="upload"), FENCED),
    "before the manifest": (Signal(signal.SIGSTOP, "before", method="create", key="data/"), FENCED),
    "after the manifest": (Signal(signal.SIGSTOP, "after", method="create", key="data/"), FENCED),
    "just before the commit": (Signal(signal.SIGSTOP, "before", method="create", key="commits/"), 0),
    "just after the commit": (Signal(signal.SIGSTOP, "after", method="create", key="commits/"), 0),
    "before it makes the pointer": (Signal(signal.SIGSTOP, "before", method="create", key="latest.json"), 0),
}
ON_A_FOLDER = {**STEPS, "before it sets the link": (Signal(signal.SIGSTOP, "before", method="symlink"), 0)}
ON_S3 = ("in the middle of a file", "just before the commit")


def old_writer(base: Path, url: str, bucket: Bucket | None, at: Signal) -> Writer:
    execution = Execution(base / "root", 1)
    execution.save("step-9", {"big": os.urandom(BIG_ON_S3 if bucket else BIG), "small": b"small"})
    return Writer(
        log=str(base / "old.log"),
        environment=bucket.environment if bucket else {},
        url=url,
        options=bucket.options if bucket else {},
        folder=str(execution.folder),
        epoch=execution.epoch,
        attempt=execution.identity.attempt,
        nonce=os.urandom(6).hex(),
        at=at,
    )


def newer_execution_publishes(base: Path, url: str, old: Writer, launcher: Launcher, *saves: str) -> None:
    """By the real command, into the same destination."""
    newer = Execution(base / "root", 2)
    for save in saves:
        newer.save(save, small(save))
    argv = ["watch", str(newer.folder), "--once", "--complete", "marker", "--dest", url]
    writer = replace(old, at=None, argv=argv, log=str(base / "new.log"), url="")
    code = launcher.run(replace(writer, environment={**old.environment, **newer.environment}))
    assert code == 0, (base / "new.log").read_text()


def wakes_up_to_be_stale(store: Store, frozen: Running, expected: int) -> None:
    before, newest = everything_in(store), reader.newest(store)
    frozen.wake()
    assert frozen.wait() == expected, frozen.said()
    after = everything_in(store)
    assert {key: after.get(key) for key in before} == before, "a byte of what stood there changed"
    own = re.compile(
        rf"data/{OLD:020d}-a1/step-9/00000\.{frozen.writer.nonce}\.\d{{6}}[./].*"
        rf"|commits/{OLD:020d}/0001\.000001\.{frozen.writer.nonce}\.json|claims/{OLD:020d}/.*"
    )
    assert [key for key in after if key not in before and not own.fullmatch(key)] == []
    assert reader.newest(store) == newest, "what is newest went back"
    at = pointer.read(store)
    assert at is not None
    assert at.order == newest.order, "the pointer went back"
    check_invariants(store)
    stale = [record for record in commits(store) if record.order.epoch == OLD]
    assert bool(stale) == (expected == 0)
    assert all(record.order < newest.order for record in stale)


@pytest.mark.parametrize("step", ON_A_FOLDER)
def test_i7_woken_after_a_newer_commit(step: str, place: Path, launcher: Launcher) -> None:
    at, expected = ON_A_FOLDER[step]
    url = str(place / "store")
    frozen = launcher.start(old_writer(place, url, None, at))
    frozen.wait_until_stopped()
    newer_execution_publishes(place, url, frozen.writer, launcher, "step-1", "step-2")
    wakes_up_to_be_stale(open_store(url), frozen, expected)


def test_i4_woken_between_reading_and_replacing_the_pointer(place: Path, launcher: Launcher) -> None:
    """It has read a pointer that it may replace, and replaces it only now: a compare without a swap would go back."""
    url = str(place / "store")
    at = Signal(signal.SIGSTOP, "before", method="replace", key="latest.json")
    writer = old_writer(place, url, None, at)
    Execution(place / "root", 1).save("step-10", small("ten"))
    frozen = launcher.start(writer)
    frozen.wait_until_stopped()
    newer_execution_publishes(place, url, writer, launcher, "step-1")
    store = open_store(url)
    newest = reader.newest(store)
    frozen.wake()
    assert frozen.wait() == 0, frozen.said()
    assert reader.newest(store) == newest
    check_invariants(store)
    named = pointer.read(store)
    assert named is not None
    assert named.order == newest.order


@pytest.mark.xdist_group("seaweed")
@pytest.mark.parametrize("step", ON_S3)
def test_i7_woken_after_a_newer_commit_on_s3(step: str, shared_bucket: Bucket, place: Path, launcher: Launcher) -> None:
    at, expected = STEPS[step]
    url = f"{shared_bucket.url}/{os.urandom(6).hex()}"
    frozen = launcher.start(old_writer(place, url, shared_bucket, at))
    frozen.wait_until_stopped()
    newer_execution_publishes(place, url, frozen.writer, launcher, "step-1")
    store = open_store(url, shared_bucket.options)
    wakes_up_to_be_stale(store, frozen, expected)
    store.close()
