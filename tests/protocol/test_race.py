"""Eight writers of different epochs publish at once, each a real process: the race that a naive publisher loses.

Afterwards the newest is never anything but the greatest epoch that exited 0, and while they race it never goes back.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.protocol.checks import check_invariants, commits
from tests.protocol.jobs import Execution, small
from tests.protocol.writers import Launcher, Running, Signal, Writer
from tests.servers import Bucket

from dispatch_agent.errors import Incomplete
from dispatch_agent.publish import pointer, reader
from dispatch_agent.publish.keys import Order
from dispatch_agent.store.base import Store
from dispatch_agent.store.opening import open_store

WRITERS = 8
FENCED = 30
BEFORE_THE_COMMIT = Signal(signal.SIGSTOP, "before", method="create", key="commits/")


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    """How many rounds to race: as many as the test says, or as --rounds says."""
    # The option is there only if pytest was told of this folder when it started.
    return int(request.config.getoption("rounds", None) or request.param)


def executions(base: Path) -> list[Execution]:
    """Each with one complete save, in an order that says nothing about their epochs."""
    made = [Execution(base / "root", number) for number in range(1, WRITERS + 1)]
    for execution in made:
        execution.save(f"step-{100 - execution.number}", small(execution.number))
    random.shuffle(made)
    return made


def start_all(launcher: Launcher, writers: list[Writer]) -> list[Running]:
    """Start every writer, wait until each has stopped where it is to, and let all go at once."""
    running = [launcher.start(writer) for writer in writers]
    for each in running:
        each.wait_until_stopped()
    for each in running:
        each.wake()
    return running


@contextmanager
def newest_never_goes_back(store: Store) -> Iterator[None]:
    """I4 and I7, asked again and again by a reader while writers race."""
    over, wrong = threading.Event(), []

    def look() -> None:
        newest, named = Order(0, 0, 0, ""), Order(0, 0, 0, "")
        while not over.wait(0.002):
            try:
                at, now = pointer.read(store), reader.newest(store).order
            except Incomplete:
                continue
            if now < newest:
                wrong.append(f"I7: the newest went back from {newest} to {now}")
            if at is not None and at.order < named:
                wrong.append(f"I4: the pointer went back from {named} to {at.order}")
            newest, named = now, at.order if at else named

    reading = threading.Thread(target=look)
    reading.start()
    try:
        yield
    finally:
        over.set()
        reading.join()
    assert wrong == []


def check_outcome(store: Store, codes: dict[int, int], said: str) -> None:
    """What each writer said is what stands, and the greatest of those that said 0 is the newest by every account."""
    assert set(codes.values()) <= {0, FENCED}, said
    published = {epoch for epoch, code in codes.items() if code == 0}
    found = commits(store)
    assert {record.order.epoch for record in found} == published, "who exited 30 published, or who exited 0 did not"
    assert len(found) == len(published), "an execution committed twice"
    assert max(published) == max(codes), "nobody was newer than the greatest epoch, and it was fenced"
    newest = reader.newest(store)
    assert newest.order.epoch == max(published)
    check_invariants(store)


def race(launcher: Launcher, base: Path, url: str, bucket: Bucket | None, *, whole_command: bool) -> None:
    environment = bucket.environment if bucket else {}
    writers = []
    for execution in executions(base):
        save = next(path for path in execution.folder.iterdir() if path.name.startswith("step-"))
        command = ["publish", str(save), "--dest", url, "--timeout", "120"]
        writers.append(
            Writer(
                log=str(base / f"{execution.epoch}.log"),
                environment={**environment, **execution.environment},
                argv=command if whole_command else [],
                stopped=whole_command,
                url=url,
                options=bucket.options if bucket else {},
                folder=str(execution.folder),
                epoch=execution.epoch,
                attempt=execution.identity.attempt,
                nonce=os.urandom(6).hex(),
                at=None if whole_command else BEFORE_THE_COMMIT,
            )
        )
    store = open_store(url, bucket.options if bucket else None)
    with newest_never_goes_back(store):
        running = start_all(launcher, writers)
        codes = {each.writer.epoch: each.wait() for each in running}
    check_outcome(store, codes, "\n".join(each.said() for each in running))
    store.close()


@pytest.mark.parametrize("rounds", [10], indirect=True)
@pytest.mark.timeout(3600)
def test_i7_eight_commands_let_go_at_once(rounds: int, place: Path, launcher: Launcher) -> None:
    for number in range(rounds):
        base = place / str(number)
        base.mkdir()
        race(launcher, base, str(base / "store"), None, whole_command=True)


@pytest.mark.parametrize("rounds", [10], indirect=True)
@pytest.mark.timeout(3600)
def test_i7_eight_writers_meet_just_before_their_commit(rounds: int, place: Path, launcher: Launcher) -> None:
    """Each has looked at the fence and found nobody newer."""
    for number in range(rounds):
        base = place / str(number)
        base.mkdir()
        race(launcher, base, str(base / "store"), None, whole_command=False)


@pytest.mark.xdist_group("seaweed")
@pytest.mark.parametrize("rounds", [2], indirect=True)  # eight writers of one key wait for seconds there
@pytest.mark.timeout(3600)
def test_i7_eight_writers_meet_on_s3(rounds: int, shared_bucket: Bucket, place: Path, launcher: Launcher) -> None:
    for number in range(rounds):
        base = place / str(number)
        base.mkdir()
        race(launcher, base, f"{shared_bucket.url}/{os.urandom(6).hex()}", shared_bucket, whole_command=False)


def test_i7_eight_programs_started_one_after_the_other(place: Path) -> None:
    """As they are installed, without anything of ours between them and the machine."""
    url, started = str(place / "store"), []
    program = Path(sys.executable).with_name("publish")
    for execution in executions(place):
        save = next(path for path in execution.folder.iterdir() if path.name.startswith("step-"))
        with (place / f"{execution.epoch}.log").open("wb") as log:
            environment = {**os.environ, **execution.environment}
            command = [program, "publish", save, "--dest", url]
            started.append((execution, subprocess.Popen(command, env=environment, stdout=log, stderr=log)))
    store = open_store(url)
    with newest_never_goes_back(store):
        codes = {execution.epoch: process.wait() for execution, process in started}
    check_outcome(store, codes, "\n".join(log.read_text() for log in place.glob("*.log")))


def test_a_naive_publisher_loses_the_race(place: Path, launcher: Launcher) -> None:
    """Read, compare, write: it ends stale. A race that it could win would prove nothing about the product."""
    for number in range(200):
        base = place / str(number)
        base.mkdir()
        writers = [
            Writer(log=str(base / "log"), url=str(base / "store"), epoch=epoch, naive=True, stopped=True)
            for epoch in random.sample(range(1, WRITERS + 1), WRITERS)
        ]
        codes = {each.writer.epoch: each.wait() for each in start_all(launcher, writers)}
        newest = int(open_store(str(base / "store")).read("latest.json").data)
        if newest < max(epoch for epoch, code in codes.items() if code == 0):
            return
    pytest.fail("the naive publisher was never stale: the writers do not meet")
