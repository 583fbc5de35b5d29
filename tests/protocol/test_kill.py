"""A publisher is killed by SIGKILL at every step of its work, and started again: everything converges (I9).

Each publisher is a real process that kills itself before or after one call, and is followed by the real command.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.protocol.checks import Fact, check_invariants, commits, facts
from tests.protocol.faults import everything_in
from tests.protocol.jobs import Bench, Execution, small
from tests.protocol.writers import Launcher, Signal, Writer
from tests.servers import Bucket

from dispatch_agent.store.base import Store
from dispatch_agent.store.opening import open_store

KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Scene:
    """One execution's folder and one destination, both in `base`."""

    base: Path
    launcher: Launcher
    url: str
    bucket: Bucket | None = None

    @property
    def execution(self) -> Execution:
        return Execution(self.base / "root", 7)

    def store(self) -> Store:
        return open_store(self.url, self.bucket.options if self.bucket else None)

    def fresh(self) -> None:
        """Two complete saves, and no publisher yet."""
        self.execution.save("step-1", small("one"))
        self.execution.save("best", b"best")

    def again(self) -> None:
        """Both are published, and then one of them is written again and a third one comes."""
        self.fresh()
        store = self.store()
        assert Bench(store).run(self.execution) is None
        store.close()
        self.execution.save("step-1", small("two"))
        self.execution.save("step-2", small("three"))

    def publish(self, at: Signal | None = None) -> int:
        """One publisher that kills itself at a call; its exit code."""
        return self.launcher.run(self.writer(at))

    def restart(self) -> int:
        """The real command, to its end."""
        argv = ["watch", str(self.execution.folder), "--once", "--complete", "marker", "--dest", self.url]
        return self.launcher.run(replace(self.writer(None), argv=argv, url=""))

    def writer(self, at: Signal | None) -> Writer:
        return Writer(
            log=str(self.base / "log"),
            environment={**self.execution.environment, **(self.bucket.environment if self.bucket else {})},
            url=self.url,
            options=self.bucket.options if self.bucket else {},
            folder=str(self.execution.folder),
            epoch=self.execution.epoch,
            attempt=self.execution.identity.attempt,
            nonce=os.urandom(6).hex(),
            at=at,
        )


@pytest.fixture
def scenes(place: Path, launcher: Launcher) -> Callable[[], Scene]:
    """Makes an empty scene on a folder each time that it is called."""
    made = iter(range(10_000))

    return lambda: scene_at(place / str(next(made)), launcher)


def scene_at(base: Path, launcher: Launcher) -> Scene:
    base.mkdir()
    return Scene(base, launcher, str(base / "store"))


Begin = Callable[[Scene], None]
BEGINNINGS = {"fresh": Scene.fresh, "again": Scene.again}


@pytest.fixture(params=BEGINNINGS)
def begin(request: pytest.FixtureRequest) -> Begin:
    return BEGINNINGS[request.param]


def unkilled(scene: Scene, begin: Begin, at: Signal | None = None) -> tuple[list[Fact], list[str]]:
    """What is published by a run that nothing kills, and the calls that it makes."""
    begin(scene)
    running = scene.launcher.start(scene.writer(at))
    assert running.wait() == 0, running.said()
    return facts(scene.store()), running.calls()


def check_converged(scene: Scene, expected: list[Fact], what: str) -> None:
    """The real command finishes what was begun; a second one changes nothing."""
    store = scene.store()
    check_invariants(store, pointer_is_current=False)
    assert scene.restart() == 0, what
    check_invariants(store)
    assert facts(store) == expected, what
    assert len(commits(store)) == len(expected), f"{what}: a generation was committed twice"
    before = everything_in(store)
    assert scene.restart() == 0, what
    assert everything_in(store) == before, f"{what}: a second restart changed something"
    store.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_i9_killed_at_any_call_of_the_store(when: str, begin: Begin, scenes: Callable[[], Scene]) -> None:
    expected, calls = unkilled(scenes(), begin)
    for k, call in enumerate(calls, 1):
        scene = scenes()
        begin(scene)
        assert scene.publish(Signal(signal.SIGKILL, when, k)) == KILLED
        check_converged(scene, expected, f"killed {when} {call}")
        shutil.rmtree(scene.base)


@pytest.mark.parametrize("when", ["before", "after"])
def test_i9_killed_at_any_change_of_a_name_on_disk(when: str, scenes: Callable[[], Scene]) -> None:
    """Also inside a call of the store, and at the records in `.dispatch`: execution.json, order/<n>."""
    never = Signal(signal.SIGKILL, when, k=0, disk=True)
    expected, calls = unkilled(scenes(), Scene.fresh, never)
    assert [call for call in calls if "/.dispatch/order/" in call]
    assert [call for call in calls if call.endswith("/.dispatch/execution.json")]
    for k, call in enumerate(calls, 1):
        scene = scenes()
        scene.fresh()
        assert scene.publish(replace(never, k=k)) == KILLED
        check_converged(scene, expected, f"killed {when} {call}")
        shutil.rmtree(scene.base)


@pytest.mark.parametrize("kills", [2, 3])
def test_i9_killed_several_times_in_a_row(kills: int, begin: Begin, scenes: Callable[[], Scene]) -> None:
    expected, calls = unkilled(scenes(), begin)
    for seed in range(12):
        scene = scenes()
        chance = random.Random(f"{kills} {seed}")  # noqa: S311 (repeatable, not secret)
        begin(scene)
        at = [
            Signal(signal.SIGKILL, chance.choice(["before", "after"]), chance.randint(1, len(calls)))
            for _ in range(kills)
        ]
        for each in at:
            assert scene.publish(each) in {KILLED, 0}  # a later one has less to do and may end before its call
        check_converged(scene, expected, f"seed {seed}: killed at {at}")


@pytest.mark.xdist_group("seaweed")
@pytest.mark.parametrize("seed", range(3))
def test_i9_killed_while_it_publishes_to_s3(seed: int, shared_bucket: Bucket, place: Path, launcher: Launcher) -> None:
    chance = random.Random(seed)  # noqa: S311 (repeatable, not secret)
    expected, _ = unkilled(scene_at(place / "folder", launcher), Scene.fresh)
    in_memory = replace(scene_at(place / "memory", launcher), url="memory://counted")
    _, calls = unkilled(in_memory, Scene.fresh)  # such a store is asked for the same as S3
    scene = replace(
        scene_at(place / "killed", launcher), url=f"{shared_bucket.url}/{os.urandom(6).hex()}", bucket=shared_bucket
    )
    scene.fresh()
    k, when = chance.randint(len(calls) // 3, len(calls)), chance.choice(["before", "after"])
    assert scene.publish(Signal(signal.SIGKILL, when, k)) == KILLED
    check_converged(scene, expected, f"killed {when} call {k}")
