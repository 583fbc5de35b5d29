"""The next execution publishes what older ones left complete: `publish recover` (I9 beyond the death of an execution).

Owners and recoveries are real processes where they die or freeze; where they are interleaved call by call, or counted,
they run in this process, on the same code.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.protocol.checks import check_invariants, commits, facts
from tests.protocol.faults import (
    At,
    Call,
    Do,
    FakeClock,
    FaultyStore,
    TimeIsUp,
    everything_in,
    fails_before,
    faulty,
    unreachable_from,
)
from tests.protocol.jobs import Bench, Execution, small
from tests.protocol.test_two_publishers import every_k, interleave
from tests.protocol.writers import PROVED, Launcher, Running, Signal, Writer
from tests.servers import Bucket

from dispatch_agent.checkpoint import completion
from dispatch_agent.checkpoint import folder as bookkeeping
from dispatch_agent.clock import Clock
from dispatch_agent.errors import (
    AgentError,
    DrainTimeout,
    EpochCollision,
    OutcomeUnknown,
    StoreDenied,
    StoreUnavailable,
)
from dispatch_agent.logs import Log
from dispatch_agent.publish import reader, start
from dispatch_agent.publish.placing import Placer, Rule, View
from dispatch_agent.publish.recover import Recovered, recover, verdict
from dispatch_agent.publish.start import Starter
from dispatch_agent.settings import PublishSettings
from dispatch_agent.store.base import Store
from dispatch_agent.store.memory import MemoryStore
from dispatch_agent.store.opening import open_store

KILLED = -signal.SIGKILL
JOB = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


# --- a recovery in this process ---------------------------------------------------------------------------------------


@dataclass
class Recovery:
    """`publish recover` of execution `by` below `root`, in this process."""

    store: Store
    root: Path
    by: int = 9
    rule: str | Rule = "marker"
    wait_owner: float = 0.0
    job: str | None = None
    rank: int = 0
    clock: Clock = field(default_factory=FakeClock)
    lines: list[str] = field(default_factory=list)

    def starter(self) -> Starter:
        identity = replace(Execution(self.root, self.by).identity, job_id=self.job)
        return Starter(
            store=self.store,
            identity=identity,
            folder=self.root / "exec",
            settings=PublishSettings(workers=1),
            rule=completion.parse_rule(self.rule) if isinstance(self.rule, str) else self.rule,
            rank=self.rank,
            clock=self.clock,
            log=Log(self.lines.append, self.clock, least="warning"),
            progress=lambda _save, _size: lambda _n: None,
            draw_nonce=lambda: secrets.token_hex(6),
            draw=lambda: 0.5,
            environ={},
            _found=PROVED,
        )

    def run(self) -> dict[str, Recovered]:
        return {result.name: result for result in recover(self.starter(), self.wait_owner)}


def said(result: Recovered) -> dict[str, str]:
    """What became of every save."""
    return {save.name: save.result for save in result.saves}


def owned(execution: Execution, *, job: str = "", folder_id: str = "") -> Execution:
    """Its folder is marked as the execution's, as the first thing that its publisher does, and nothing is claimed."""
    bookkeeping.ensure(
        execution.folder,
        job=job,
        epoch=execution.epoch,
        attempt=execution.identity.attempt,
        folder_id=folder_id or secrets.token_hex(6),
    )
    return execution


def tree(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file below a path: its inode, its mtime_ns and its bytes."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns, p.read_bytes()) for p in files}


# --- owner and recovery as real processes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """An execution that left two complete saves and half a one, and the next execution, at one destination."""

    base: Path
    launcher: Launcher
    url: str
    bucket: Bucket | None = None

    @property
    def old(self) -> Execution:
        return Execution(self.base / "root", 1)

    @property
    def new(self) -> Execution:
        return Execution(self.base / "root", 2)

    def store(self) -> Store:
        return open_store(self.url, self.bucket.options if self.bucket else None)

    def begin(self) -> Scene:
        self.old.save("step-1", small("one"))
        self.old.save("best", b"best")
        self.old.write("half", small("half"))
        return self

    def owner(self, at: Signal | None = None) -> Writer:
        return Writer(
            log=str(self.base / "owner.log"),
            environment=self.bucket.environment if self.bucket else {},
            url=self.url,
            options=self.bucket.options if self.bucket else {},
            folder=str(self.old.folder),
            epoch=self.old.epoch,
            attempt=self.old.identity.attempt,
            nonce=os.urandom(6).hex(),
            at=at,
        )

    def recovery(self, at: Signal | None = None) -> Writer:
        """The same code as the command's, without its probe."""
        return replace(
            self.owner(at),
            log=str(self.base / "recovery.log"),
            folder=str(self.old.folder.parent),
            epoch=self.new.epoch,
            attempt=self.new.identity.attempt,
            recovers=True,
        )

    def command(self) -> Writer:
        """The real command, to its end."""
        argv = ["recover", "--root", str(self.base / "root"), "--complete", "marker", "--dest", self.url]
        return replace(
            self.recovery(),
            argv=[*argv, "--wait-owner", "0", "--json"],
            environment={**self.recovery().environment, **self.new.environment},
        )

    def run(self, writer: Writer) -> int:
        return self.launcher.run(writer)

    def frozen(self, writer: Writer) -> Running:
        running = self.launcher.start(writer)
        running.wait_until_stopped()
        return running


EXPECTED = [("step-1", 1), ("best", 1)]


@pytest.fixture
def scenes(place: Path, launcher: Launcher) -> Callable[[], Scene]:
    made = iter(range(10_000))

    def make() -> Scene:
        base = place / str(next(made))
        base.mkdir()
        return Scene(base, launcher, str(base / "store")).begin()

    return make


def check_recovered(scene: Scene, what: str) -> None:
    """Both complete saves are published, once and in order, and nothing else; a second recovery changes nothing."""
    store = scene.store()
    half = tree(scene.old.folder / "half")
    assert scene.run(scene.recovery()) == 0, f"{what}:\n{Path(scene.recovery().log).read_text()}"
    check_invariants(store)
    assert [(save, generation) for save, generation, *_ in facts(store)] == EXPECTED, what
    assert [record.order.epoch for record in commits(store)] == [scene.old.epoch] * 2, what
    before = everything_in(store)
    assert scene.run(scene.recovery()) == 0, what
    assert everything_in(store) == before, f"{what}: a second recovery changed something"
    assert tree(scene.old.folder / "half") == half, what
    store.close()


def calls_of(scene: Scene, writer: Writer) -> list[str]:
    running = scene.launcher.start(writer)
    assert running.wait() == 0, running.said()
    return running.calls()


@pytest.mark.parametrize("when", ["before", "after"])
def test_i9_an_owner_killed_at_any_call_is_recovered(when: str, scenes: Callable[[], Scene]) -> None:
    calls = calls_of(scene := scenes(), scene.owner())
    for k, call in enumerate(calls, 1):
        scene = scenes()
        assert scene.run(scene.owner(Signal(signal.SIGKILL, when, k))) == KILLED
        check_recovered(scene, f"owner killed {when} {call}")
        shutil.rmtree(scene.base)


@pytest.mark.parametrize("when", ["before", "after"])
def test_i9_a_recovery_killed_at_any_call_is_run_again(when: str, scenes: Callable[[], Scene]) -> None:
    """The owner died as soon as it had claimed, so that all is left to the recovery."""

    def abandoned() -> Scene:
        scene = scenes()
        at = Signal(signal.SIGKILL, "after", method="create", key=f"claims/{scene.old.epoch:020d}/0")
        assert scene.run(scene.owner(at)) == KILLED
        return scene

    calls = calls_of(scene := abandoned(), scene.recovery())
    for k, call in enumerate(calls, 1):
        scene = abandoned()
        assert scene.run(scene.recovery(Signal(signal.SIGKILL, when, k))) == KILLED
        check_recovered(scene, f"recovery killed {when} {call}")
        shutil.rmtree(scene.base)


def test_i9_an_owner_killed_at_any_change_of_a_name_on_disk_is_recovered(scenes: Callable[[], Scene]) -> None:
    """Also between the places that it gave: the recovery gives the rest the places after them."""
    never = Signal(signal.SIGKILL, "after", k=0, disk=True)
    calls = calls_of(scene := scenes(), scene.owner(never))
    ours = [k for k, call in enumerate(calls, 1) if "/.dispatch/" in call]
    marked = next(k for k in ours if calls[k - 1].endswith("execution.json"))
    assert len([k for k in ours if k > marked]) > 3
    for k in ours:
        scene = scenes()
        assert scene.run(scene.owner(replace(never, k=k))) == KILLED
        if k < marked:  # no publisher had it
            assert scene.run(scene.recovery()) == 0
            assert everything_in(scene.store()) == {}
            continue
        check_recovered(scene, f"owner killed after {calls[k - 1]}")


FROZEN = {
    "before it claims": Signal(signal.SIGSTOP, "before", method="create", key="claims/"),
    "in the middle of a file": Signal(signal.SIGSTOP, "before", 2, method="piece"),
    "before its manifest": Signal(signal.SIGSTOP, "before", method="create", key="data/"),
    "just before its commit": Signal(signal.SIGSTOP, "before", method="create", key="commits/"),
    "just after its commit": Signal(signal.SIGSTOP, "after", method="create", key="commits/"),
    "before its second commit": Signal(signal.SIGSTOP, "before", 2, method="create", key="commits/"),
    "before it moves the pointer": Signal(signal.SIGSTOP, "before", method="create", key="latest.json"),
    "as it has given a place": Signal(signal.SIGSTOP, "after", method="link", disk=True, k=2),
}


@pytest.mark.parametrize("step", FROZEN)
def test_i9_beside_a_frozen_owner_that_wakes_up_afterwards(step: str, scenes: Callable[[], Scene]) -> None:
    """It holds the folder's lock. The recovery does not need it, and the owner finds its work done, or does it too."""
    scene = scenes()
    owner = scene.frozen(scene.owner(FROZEN[step]))
    assert scene.run(scene.recovery()) == 0, Path(scene.recovery().log).read_text()
    assert "beside" in Path(scene.recovery().log).read_text(), "nobody had the lock"
    store = scene.store()
    assert [(save, generation) for save, generation, *_ in facts(store)] == EXPECTED
    before = everything_in(store)
    owner.wake()
    assert owner.wait() == 0, owner.said()
    after = everything_in(store)
    assert {key: after[key] for key in before if key != "latest.json"} == {
        key: value for key, value in before.items() if key != "latest.json"
    }, "a byte of what stood there changed"
    check_invariants(store)
    assert [(save, generation) for save, generation, *_ in facts(store)] == EXPECTED


def test_i9_a_living_owner_is_waited_for(scenes: Callable[[], Scene]) -> None:
    """One that dies within the wait leaves its lock, and its work, to the recovery alone."""
    scene = scenes()
    owner = scene.frozen(scene.owner(FROZEN["before its manifest"]))

    class Watched(FakeClock):
        def wait(self, event: Any, seconds: float) -> bool:
            if self.now > 1010 and not killed:
                os.kill(owner.pid, signal.SIGKILL)
                killed.append(owner.wait())
            return super().wait(event, seconds)

    killed: list[int] = []
    recovery = Recovery(scene.store(), scene.base / "root", by=2, wait_owner=30.0, clock=Watched())
    assert said(recovery.run()["a1"]) == {"step-1": "published", "best": "published", "half": "abandoned"}
    assert killed == [KILLED]
    assert 1010 < recovery.clock.monotonic() < 1030
    assert not [line for line in recovery.lines if "beside" in line]
    check_invariants(scene.store())


def test_i9_beside_an_owner_at_work_without_an_effective_lock(scenes: Callable[[], Scene]) -> None:
    """Both as processes of their own, let go at once, several times."""
    for number in range(6):
        scene = scenes()
        for save in range(4):
            scene.old.save(f"more-{save}", small(f"{number} {save}"))
        pair = [replace(scene.owner(), stopped=True), replace(scene.recovery(), stopped=True)]
        running = [scene.frozen(writer) for writer in pair]
        for one in running:
            one.wake()
        assert [one.wait() for one in running] == [0, 0], running[0].said() + running[1].said()
        store = scene.store()
        check_invariants(store)
        assert [(save, generation) for save, generation, *_ in facts(store)] == [
            *EXPECTED,
            *((f"more-{save}", 1) for save in range(4)),
        ]


def test_i9_two_recoveries_at_once(scenes: Callable[[], Scene]) -> None:
    """Two pods of the next execution, as processes of their own, let go at once."""
    for _ in range(6):
        scene = scenes()
        owned(scene.old)
        writers = [replace(scene.recovery(), stopped=True, nonce=os.urandom(6).hex()) for _ in range(2)]
        running = [scene.frozen(writer) for writer in writers]
        for one in running:
            one.wake()
        assert [one.wait() for one in running] == [0, 0], running[0].said()
        check_invariants(scene.store())
        assert [(save, generation) for save, generation, *_ in facts(scene.store())] == EXPECTED


@pytest.mark.xdist_group("seaweed")
@pytest.mark.parametrize("seed", range(2))
def test_i9_an_owner_killed_on_s3_is_recovered_by_the_command(
    seed: int, shared_bucket: Bucket, place: Path, launcher: Launcher
) -> None:
    chance = random.Random(seed)  # noqa: S311 (repeatable, not secret)
    (place / "counted").mkdir()
    counted = Scene(place / "counted", launcher, "memory://counted").begin()
    calls = calls_of(counted, counted.owner())  # such a store is asked for the same as S3
    (place / "killed").mkdir()
    url = f"{shared_bucket.url}/{os.urandom(6).hex()}"
    scene = Scene(place / "killed", launcher, url, shared_bucket).begin()
    k = chance.randint(len(calls) // 3, len(calls))
    assert scene.run(scene.owner(Signal(signal.SIGKILL, chance.choice(["before", "after"]), k))) == KILLED
    assert scene.run(scene.command()) == 0, Path(scene.command().log).read_text()
    check_recovered(scene, f"owner killed at {calls[k - 1]}")


@pytest.mark.xdist_group("seaweed")
def test_i9_beside_an_owner_frozen_on_s3(shared_bucket: Bucket, place: Path, launcher: Launcher) -> None:
    scene = Scene(place, launcher, f"{shared_bucket.url}/{os.urandom(6).hex()}", shared_bucket).begin()
    owner = scene.frozen(scene.owner(FROZEN["just before its commit"]))
    assert scene.run(scene.command()) == 0, Path(scene.command().log).read_text()
    owner.wake()
    assert owner.wait() == 0, owner.said()
    store = scene.store()
    check_invariants(store)
    assert [(save, generation) for save, generation, *_ in facts(store)] == EXPECTED
    store.close()


# --- interleaved, call by call ----------------------------------------------------------------------------------------


def test_i9_an_owner_and_a_recovery_interleaved_at_every_call(place: Path) -> None:
    def run(k: int) -> bool:
        execution = owned(Execution(place / str(k), 1))
        for name in ("step-1", "step-2"):
            execution.save(name, small(name))
        execution.save("step-1", small("again"))

        def recovers(bench: Bench) -> Any:
            return verdict(Recovery(bench.store, execution.root).run().values())

        store, one, two, reached = interleave(lambda bench: bench.run(execution), recovers, k)
        assert (one, two) == (None, None), f"call {k}"
        check_invariants(store)
        assert [(save, generation) for save, generation, *_ in facts(store)] == [("step-2", 1), ("step-1", 1)]
        return reached

    assert every_k(run) > 30


def test_i7_a_newer_execution_publishes_at_any_call_of_a_recovery(place: Path) -> None:
    """What came before it stands in its place below; after it nothing comes, and the next execution can start."""

    def run(k: int) -> bool:
        old, new = owned(Execution(place / str(k), 1)), Execution(place / str(k), 2)
        for name in ("step-8", "step-9"):
            old.save(name, small(name))
        new.save("step-3", small("new"))
        store, results, newer, reached = interleave(
            lambda bench: Recovery(bench.store, old.root, by=2).run(), lambda bench: bench.run(new), k
        )
        assert newer is None, f"call {k}"
        check_invariants(store)
        assert verdict(results.values()) is None, f"call {k}"
        stale = [record.save for record in commits(store) if record.order.epoch == old.epoch]
        missing = {"step-8", "step-9"} - set(stale)
        if reached:
            assert reader.newest(store).save == "step-3", f"call {k}"
        if missing:
            assert results["a1"].state == "fenced", f"call {k}"
            assert {name for name, what in said(results["a1"]).items() if what == "left"} == missing, f"call {k}"
        return reached

    assert every_k(run) > 20


# --- what is older, and in which order --------------------------------------------------------------------------------


def test_i7_a_third_execution_adopts_nothing_once_the_second_has_committed(place: Path) -> None:
    store = MemoryStore()
    first, second = owned(Execution(place, 1)), Execution(place, 2)
    first.save("step-9", small("first"))
    assert Bench(MemoryStore()).run(first) is None  # it has its place, and is published elsewhere
    second.save("step-3", small("second"))
    assert Bench(store).run(second) is None
    assert said(Recovery(store, place, by=3).run()["a1"]) == {"step-9": "left"}
    first.write("half", small("half"))
    before = everything_in(store)
    held = tree(first.folder)
    results = Recovery(store, place, by=3).run()
    assert everything_in(store).keys() - before.keys() == set()
    assert [record.save for record in commits(store)] == ["step-3"]
    assert results["a1"].state == "fenced"
    assert said(results["a1"]) == {"step-9": "left", "half": "abandoned"}
    assert f"epoch {second.epoch}" in results["a1"].reason
    assert (results["a2"].state, results["a2"].standing) == ("recovered", 1)
    assert verdict(results.values()) is None
    assert tree(first.folder) == held


def test_i9_several_old_executions_are_recovered_oldest_first(place: Path) -> None:
    """The newer one's commit would fence the older. Names sort the other way; one of them has never claimed."""
    store = MemoryStore()
    olds = [owned(Execution(place, number, f"z{9 - number}")) for number in range(1, 5)]
    for old in olds:
        old.save("last", small(old.number))
    assert Bench(store).run(olds[0]) is None
    olds[0].save("last", small("later"))
    results = Recovery(store, place).run()
    check_invariants(store)
    assert [(r.order.epoch, r.generation) for r in commits(store)] == [
        (olds[0].epoch, 1),
        (olds[0].epoch, 2),
        *((old.epoch, 1) for old in olds[1:]),
    ]
    assert {result.state for result in results.values()} == {"recovered"}
    for old in olds:
        assert bookkeeping.lock(old.folder, store.url).acquire(), "it still has the folder"


def test_i7_a_fenced_folder_holds_neither_what_stands_nor_what_would_be_nothing_new(place: Path) -> None:
    store = MemoryStore()
    first, second = Execution(place, 1), Execution(place, 2)
    path = first.save("step-1", small("one"))
    assert Bench(store).run(first) is None
    bookkeeping.mark_complete(path)  # marked once more, and the content is the same
    assert Bench(store).run(first) is None
    second.save("step-2", small("two"))
    assert Bench(store).run(second) is None
    result = Recovery(store, place).run()["a1"]
    assert (result.state, result.standing, result.saves) == ("fenced", 1, ())


def test_fenced_folders_are_looked_through_last_and_only_where_something_changed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be many, and large ones: they keep no execution from starting."""
    store = MemoryStore()
    untouched, marked, changed, second = (Execution(place, number) for number in (1, 2, 3, 4))
    for execution in (untouched, marked, changed, second):
        execution.save("last", small(execution.number))
        execution.save("best", b"best")
        assert Bench(store).run(execution) is None
    marked.save("last", small("written over"))
    changed.write("best", b"changed and not marked again")
    second.save("last", small("later"))
    looked: list[str] = []

    class Slow(Placer):
        def view(self) -> View:
            looked.append(self.folder.name)
            if self.folder == marked.folder:
                raise TimeIsUp
            return super().view()

    results = Recovery(store, place).run()
    assert said(results["a2"]) == {"last": "left"}
    assert said(results["a3"]) == {"best": "abandoned"}
    monkeypatch.setattr("dispatch_agent.publish.recover.Placer", Slow)
    second.save("last", small("later still"))
    results = Recovery(store, place).run()
    assert looked == ["a4", "a2"]
    assert {name: (result.state, said(result)) for name, result in results.items()} == {
        "a1": ("fenced", {}),
        "a2": ("fenced", {}),
        "a3": ("fenced", {}),
        "a4": ("recovered", {"last": "published"}),
    }
    assert verdict(results.values()) is None


def test_a_recovery_is_of_lower_epochs_alone(place: Path) -> None:
    """Its own folder it does not look at; the same epoch elsewhere and a newer one are reported and left alone."""
    store = MemoryStore()
    for number in (4, 5, 6):
        owned(Execution(place, number)).save("step-1", small(number))
    owned(Execution(place, 5, "twin")).save("step-1", small("twin"))
    results = Recovery(store, place, by=5).run()
    assert {name: result.state for name, result in results.items()} == {
        "a4": "recovered",
        "a6": "refused",
        "twin": "refused",
    }
    assert [record.attempt for record in commits(store)] == ["a4"]


def test_the_folders_own_job_term_and_rank_are_taken(place: Path) -> None:
    """Found by its folder id: an earlier folder of the attempt had the term before, a claim tells the rank."""
    store = MemoryStore()
    earlier, old = Execution(place / "lost", 1), owned(Execution(place, 1), job=JOB)
    earlier.save("step-1", small("lost"))
    old.save("step-2", small("kept"))
    Bench(store).publisher(earlier, rank=3).run()
    Bench(store).publisher(replace(old), rank=3).run()
    old.save("step-3", small("left"))
    result = Recovery(store, place, job=JOB).run()["a1"]
    assert said(result) == {"step-3": "published"}
    newest = reader.newest(store)
    assert (newest.job, newest.order.term, newest.order.ordinal, newest.parts[0].rank) == (JOB, 2, 2, 3)
    assert newest.folder == bookkeeping.read_execution(old.folder).folder_id  # type: ignore[union-attr]


def test_i5_an_epoch_that_belongs_to_another_attempt_is_refused_and_the_others_are_recovered(place: Path) -> None:
    store = MemoryStore()
    elsewhere = Execution(place / "elsewhere", 1, "other")
    owned(elsewhere)
    assert Bench(store).run(elsewhere) is None
    for number in (1, 2):
        owned(Execution(place, number)).save("step-1", small(number))
    results = Recovery(store, place).run()
    assert results["a1"].state == "refused"
    assert isinstance(verdict(results.values()), EpochCollision)
    assert [record.attempt for record in commits(store)] == ["a2"]


# --- what is complete -------------------------------------------------------------------------------------------------


def test_what_is_incomplete_is_abandoned_with_the_rules_reason_and_untouched(place: Path) -> None:
    store = MemoryStore()
    old = owned(Execution(place, 1))
    old.save("step-1", small("whole"))
    old.write("step-2", small("half"))
    old.save("step-3", small("was whole"))
    (old.folder / "step-3" / "weights.dat").write_bytes(b"torn")
    halves = tree(old.folder / "step-2") | tree(old.folder / "step-3")
    result = Recovery(store, place).run()["a1"]
    assert said(result) == {"step-1": "published", "step-2": "abandoned", "step-3": "abandoned"}
    reasons = {save.name: save.reason for save in result.saves}
    assert "no completion marker" in reasons["step-2"]
    assert "newer than its completion marker" in reasons["step-3"]
    assert tree(old.folder / "step-2") | tree(old.folder / "step-3") == halves
    assert [record.save for record in commits(store)] == ["step-1"]


def test_a_rule_of_quiet_gets_its_time_from_the_first_look(place: Path) -> None:
    store = MemoryStore()
    old = owned(Execution(place, 1))
    old.write("step-1", small("one"))
    recovery = Recovery(store, place, rule="settle:60")
    assert said(recovery.run()["a1"]) == {"step-1": "published"}
    assert recovery.clock.monotonic() >= 1060


def test_a_trainer_that_is_still_writing_does_not_hold_up_the_others(place: Path) -> None:
    store = MemoryStore()
    alive, dead = owned(Execution(place, 1)), owned(Execution(place, 2))
    alive.write("log", b"")
    dead.write("step-1", small("one"))

    class Writing(FakeClock):
        def wait(self, event: Any, seconds: float) -> bool:
            with (alive.folder / "log").open("ab") as log:
                log.write(b"more\n")
            return super().wait(event, seconds)

    recovery = Recovery(store, place, rule="settle:60", wait_owner=30.0, clock=Writing(limit=2000.0))
    results = recovery.run()
    assert said(results["a1"]) == {"log": "abandoned"}
    assert "still being written" in results["a1"].saves[0].reason
    assert said(results["a2"]) == {"step-1": "published"}
    assert verdict(results.values()) is None


def test_i9_a_volume_whose_files_were_all_written_anew_by_a_remount_is_the_same_folder(place: Path) -> None:
    """Other inodes and ctimes, the same content and mtimes: what was published is not published again."""
    store = MemoryStore()
    old = Execution(place / "volume", 1)
    old.save("step-1", small("one"))
    old.write("step-2", small("two"))
    assert Bench(store).run(old, rule="settle:1") is None
    old.save("step-3", small("three"))
    shutil.copytree(place / "volume", place / "copy", symlinks=True)
    shutil.rmtree(place / "volume")
    (place / "copy").rename(place / "volume")
    result = Recovery(store, place / "volume", rule="settle:1").run()["a1"]
    assert said(result) == {"step-3": "published"}
    assert result.standing == 2
    assert [(save, generation) for save, generation, *_ in facts(store)] == [
        ("step-1", 1),
        ("step-2", 1),
        ("step-3", 1),
    ]


@pytest.mark.root
def test_i9_a_volume_that_was_chowned_is_the_same_folder(place: Path) -> None:
    store = MemoryStore()
    old = Execution(place, 1)
    old.save("step-1", small("one"))
    assert Bench(store).run(old) is None
    old.save("step-2", small("two"))
    for path in [place, *place.rglob("*")]:
        os.chown(path, 1234, 1234)
    assert said(Recovery(store, place).run()["a1"]) == {"step-2": "published"}
    assert [(save, generation) for save, generation, *_ in facts(store)] == [("step-1", 1), ("step-2", 1)]


# --- a hostile exec/ --------------------------------------------------------------------------------------------------


def test_what_no_publisher_ever_had_is_reported_and_never_adopted(place: Path) -> None:
    store = MemoryStore()
    unknown = Execution(place, 1)
    unknown.save("step-1", small("nobody's"))  # `publish complete` alone makes no record of an execution
    (place / "exec" / "file").write_bytes(b"")
    (place / "exec" / "link").symlink_to(unknown.folder)
    os.mkfifo(place / "exec" / "pipe")
    os.mkdir(os.path.join(os.fsencode(place), b"exec", b"\xff\n"))
    owned(Execution(place, 2)).save("step-2", small("ours"))
    results = Recovery(store, place).run()
    assert {name: result.state for name, result in results.items()} == {
        "a1": "unknown",
        "file": "unknown",
        "link": "unknown",
        "pipe": "unknown",
        "%FF%0A": "unknown",
        "a2": "recovered",
    }
    assert [record.save for record in commits(store)] == ["step-2"]


def _record(**fields: Any) -> Callable[[Path], None]:
    def damage(own: Path) -> None:
        whole = json.loads((own / "execution.json").read_text())
        (own / "execution.json").write_text(json.dumps({**whole, **fields}))

    return damage


def _fifo(own: Path) -> None:
    (own / "execution.json").unlink()
    os.mkfifo(own / "execution.json")


def _linked(own: Path) -> None:
    other = owned(Execution(own.parents[2] / "away", 8))
    shutil.rmtree(own)
    own.symlink_to(other.folder / ".dispatch")


def _without_its_first_place(own: Path) -> None:
    (own / "order").mkdir()
    (own / "order" / "000002").write_text("{}")


HOSTILE: dict[str, Callable[[Path], None]] = {
    "cut short": lambda own: (own / "execution.json").write_text('{"format": 1, "jo'),  # type: ignore[dict-item]
    "of a later format": _record(format=2),
    "an epoch that is no number": _record(epoch="1e6"),
    "an epoch of ten thousand digits": _record(epoch="1" * 10_000),
    "an epoch out of range": _record(epoch="18000001000001000000"),
    "an epoch of no submission": _record(epoch="5"),
    "an attempt that leaves the folder": _record(attempt="../a1"),
    "a folder id that leaves its key": _record(folder_id="../../commits"),
    "a copy of another": _record(attempt="a2"),
    "another job's": _record(job="01ARZ3NDEKTSV4RRFFQ69G5FAW"),
    "a pipe": _fifo,
    "a link to another's": _linked,
    "an order with a gap": _without_its_first_place,
}


@pytest.mark.parametrize("damage", HOSTILE)
def test_a_record_that_cannot_be_trusted_is_refused_with_the_reason_and_stops_nobody(damage: str, place: Path) -> None:
    store = MemoryStore()
    bad, good = owned(Execution(place, 1)), owned(Execution(place, 2))
    bad.save("step-1", small("bad"))
    good.save("step-2", small("good"))
    HOSTILE[damage](bad.folder / ".dispatch")
    held = tree(bad.folder / "step-1")
    results = Recovery(store, place, job=JOB).run()
    assert results["a1"].state == "refused"
    assert results["a1"].reason
    assert verdict(results.values()) is None
    assert [record.save for record in commits(store)] == ["step-2"]
    assert tree(bad.folder / "step-1") == held


def test_a_folder_whose_name_is_no_attempt_token_is_refused(place: Path) -> None:
    """Its name would be a part of keys."""
    store = MemoryStore()
    owned(Execution(place, 1, "no token")).save("step-1", small(1))
    assert Recovery(store, place).run()["no token"].state == "refused"
    assert everything_in(store) == {}


def test_i3_a_copied_folder_gives_no_second_content_to_a_place(place: Path) -> None:
    """A copy has its original's folder id and therefore its term, and goes on from its places."""
    store = MemoryStore()
    old = Execution(place, 1)
    old.save("step-1", small("one"))
    assert Bench(store).run(old) is None
    shutil.copytree(old.folder, place / "exec" / "copy")
    old.save("step-2", small("two"))
    bookkeeping.mark_complete(replace_save(place / "exec" / "copy" / "step-2"))
    results = Recovery(store, place).run()
    assert results["copy"].state == "refused"
    assert said(results["a1"]) == {"step-2": "published"}
    check_invariants(store)


def replace_save(path: Path) -> Path:
    path.mkdir()
    (path / "weights.dat").write_bytes(b"another content")
    return path


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_old_folders_cost_one_listing_however_many_there_are(place: Path) -> None:
    store = MemoryStore()
    for number in range(1, 1001):
        own = Execution(place, number).folder / ".dispatch"
        own.mkdir(parents=True)
        record = {"format": 1, "job": "", "epoch": f"{1_000_000 + number}", "attempt": f"a{number}", "folder_id": "0a"}
        (own / "execution.json").write_text(json.dumps(record))
    empty = FaultyStore(store)
    assert len(Recovery(empty, place, by=20_000).run()) == 1000
    assert empty.calls == []
    for number in range(1, 51):
        Execution(place, number).save("step-1", small(number))
    newest = Execution(place, 15_000)
    newest.save("step-2", small("newest"))
    assert Bench(store).run(newest) is None
    shutil.rmtree(newest.folder)
    counted = FaultyStore(store)
    results = Recovery(counted, place, by=20_000).run()
    assert [call.method for call in counted.calls] == ["list"]
    assert sum(result.state == "fenced" for result in results.values()) == 1000


def test_a_folder_whose_every_place_is_committed_costs_the_same_whatever_it_holds(place: Path) -> None:
    counts = set()
    for saves in (1, 20):
        store = MemoryStore()
        old = Execution(place / str(saves), 1)
        for number in range(saves):
            old.save(f"step-{number:02}", small(number))
        assert Bench(store).run(old) is None
        counted = FaultyStore(store)
        result = Recovery(counted, old.root).run()["a1"]
        assert (result.state, result.standing, result.saves) == ("recovered", saves, ())
        counts.add(len(counted.calls))
    assert len(counts) == 1
    assert counts.pop() < 20


def test_the_store_is_probed_once_for_all_folders_and_never_for_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[Store] = []
    monkeypatch.setattr(start, "probe", lambda store: probes.append(store) or PROVED)
    store = MemoryStore()
    for number in (1, 2, 3):
        owned(Execution(place, number)).write("half", small(number))
    recovery = Recovery(store, place)
    recover(replace(recovery.starter(), _found=None), 0.0)
    assert probes == []
    for number in (1, 2, 3):
        Execution(place, number).save("step-1", small(number))
    recover(replace(recovery.starter(), _found=None), 0.0)
    assert len(commits(store)) == 3
    assert len(probes) == 1
    assert sum("left incomplete save=half" in line for line in recovery.lines) == 3, "each folder's is said"


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_40_when_time_runs_out_with_something_complete_left(place: Path) -> None:
    """What was published until then is said; the folder that was not reached too. The next recovery goes on."""
    store = MemoryStore()
    for number in (1, 2):
        old = owned(Execution(place, number))
        old.save("step-1", small(number))
        old.save("step-2", small(number + 10))
    clock = FakeClock(limit=1100.0)

    def hook(call: Call, do: Do) -> Any:
        if call.method == "upload" and "step-2" in call.key:
            clock.wait(Never(), 200.0)
        return do()

    results = Recovery(faulty(store, hook), place, clock=clock).run()
    assert said(results["a1"]) == {"step-1": "published", "step-2": "left"}
    assert said(results["a2"]) == {"step-1": "left", "step-2": "left"}
    assert {type(result.error) for result in results.values()} == {DrainTimeout}
    assert isinstance(verdict(results.values()), DrainTimeout)
    assert [record.save for record in commits(store)] == ["step-1"]
    assert verdict(Recovery(store, place).run().values()) is None
    assert len(commits(store)) == 4


class Never:
    """An event that nobody sets."""

    def is_set(self) -> bool:
        return False


def test_0_when_time_runs_out_with_nothing_complete_left(place: Path) -> None:
    owned(Execution(place, 1)).write("step-1", small("one"))
    results = Recovery(MemoryStore(), place, rule="settle:600", clock=FakeClock(limit=1100.0)).run()
    assert said(results["a1"]) == {"step-1": "abandoned"}
    assert verdict(results.values()) is None


def test_10_to_12_when_the_store_ends_it_and_no_newer_folder_is_published_instead(place: Path) -> None:
    """A newer folder's commit would fence what is left of the older one."""
    for number in (1, 2):
        owned(Execution(place, number)).save("step-1", small(number))
    store = MemoryStore()

    def denied(call: Call, do: Do) -> Any:
        if f"{1_000_001:020d}" in call.key and call.method in {"create", "upload"}:
            raise StoreDenied(call.key)
        return do()

    results = Recovery(faulty(store, denied), place).run()
    assert {name: result.state for name, result in results.items()} == {"a1": "left", "a2": "left"}
    assert isinstance(verdict(results.values()), StoreDenied)
    assert commits(store) == []


def test_33_before_all_else_when_a_commit_may_have_landed(place: Path) -> None:
    owned(Execution(place, 1)).save("step-1", small(1))
    store = FaultyStore(MemoryStore())
    Recovery(store, place).run()
    k = next(call.number for call in store.calls if call.method == "create" and call.key.startswith("commits/"))
    clock = FakeClock(limit=1500.0)
    again = owned(Execution(place / "again", 1))
    again.save("step-1", small(1))
    results = Recovery(faulty(MemoryStore(), unreachable_from(k)), again.root, clock=clock).run()
    assert isinstance(verdict(results.values()), OutcomeUnknown)


def test_a_save_that_cannot_be_published_at_all_keeps_no_execution_from_starting(place: Path) -> None:
    store = MemoryStore()
    old = owned(Execution(place, 1))
    path = old.write("step-1", small(1))
    (path / "link").symlink_to("/etc/passwd")
    bookkeeping.mark_complete(path)
    old.save("step-2", small(2))
    results = Recovery(store, place).run()
    assert said(results["a1"]) == {"step-1": "left", "step-2": "published"}
    assert (results["a1"].state, results["a1"].reason) == ("left", "")
    assert "link" in results["a1"].saves[1].reason
    assert verdict(results.values()) is None


def test_10_when_the_store_stays_away(place: Path) -> None:
    owned(Execution(place, 1)).save("step-1", small(1))
    with pytest.raises(StoreUnavailable):
        Recovery(faulty(MemoryStore(), unreachable_from(1)), place).run()


def test_a_store_that_comes_back_is_waited_for(place: Path) -> None:
    owned(Execution(place, 1)).save("step-1", small(1))
    store = MemoryStore()
    clock = FakeClock()

    def away_for_a_while(call: Call, do: Do) -> Any:
        return do() if clock.now > 1030 else fails_before(At(call.number))(call, do)

    away = faulty(store, away_for_a_while)
    assert said(Recovery(away, place, clock=clock).run()["a1"]) == {"step-1": "published"}


@pytest.mark.parametrize(("trouble", "ends"), [(TimeIsUp(), DrainTimeout), (AgentError("the volume is full"), None)])
def test_what_is_complete_is_left_also_where_the_first_pass_came_to_nothing(
    trouble: BaseException, ends: type[AgentError] | None, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time ran out, or the volume was full, while the saves were given their places."""
    old = owned(Execution(place, 1))
    for step in range(3):
        old.save(f"step-{step}", small(step))
    recovery = Recovery(MemoryStore(), place)

    def place_none(*_: object) -> None:
        raise trouble

    monkeypatch.setattr(Placer, "place", place_none)
    (result,) = recovery.run().values()
    assert result.state == "left"
    assert said(result) == dict.fromkeys(("step-0", "step-1", "step-2"), "left")
    error = verdict([result])
    assert error is None if ends is None else isinstance(error, ends)
    assert ends or all(save.reason == "the volume is full" for save in result.saves)
