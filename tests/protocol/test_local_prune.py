"""Older executions' saves leave the volume: only what the store has whole, and never under anybody's hands.

`publish prune --local` and `watch --keep-local`. What a killed one leaves is settled by the next, and a publisher at
work in the folder sees all of a save or nothing of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.protocol.checks import check_invariants, commits, facts
from tests.protocol.faults import everything_in
from tests.protocol.jobs import Bench, Execution, Files, small
from tests.protocol.writers import Launcher, Writer
from tests.servers import Bucket

from dispatch_agent.checkpoint import leaving
from dispatch_agent.checkpoint.folder import lock as folder_lock
from dispatch_agent.checkpoint.folder import mark_complete
from dispatch_agent.cli.publish import publish
from dispatch_agent.clock import SystemClock
from dispatch_agent.errors import AgentError, IntegrityError, SettingsError, StoreUnavailable
from dispatch_agent.logs import Log
from dispatch_agent.publish import keys, prune_local, records, watcher
from dispatch_agent.publish.prune_local import Keeper, Plan, Volume
from dispatch_agent.publish.restore import restore
from dispatch_agent.publish.watcher import Stop, Tally
from dispatch_agent.store.memory import MemoryStore
from dispatch_agent.store.opening import open_store
from dispatch_agent.store.posix import PosixStore

HOUR_AGO = time.time_ns() - 3600 * 10**9
ANY = "settle:0.001"
"""The rule that takes whatever stands there."""
SAVES: dict[str, Files | bytes] = {"step-1": small("1"), "step-2": small("2"), "best.ckpt": b"best"}


def aged(path: Path, later: int = 0) -> Path:
    """Written an hour ago, `later` seconds after what was written first: the trainer is done with it."""
    when = (HOUR_AGO + later * 10**9,) * 2
    for top, folders, files in os.walk(path):
        for name in (*folders, *files):
            os.utime(Path(top, name), ns=when, follow_symlinks=False)
    os.utime(path, ns=when)
    return path


def save(execution: Execution, name: str, files: Files | bytes, later: int = 0) -> Path:
    path = aged(execution.write(name, files), later)
    mark_complete(path)
    return path


class World:
    """An old execution whose saves are published, and a newer one that has claimed."""

    def __init__(self, place: Path, store: MemoryStore | PosixStore | None = None) -> None:
        self.root = place / "root"
        self.store = store or MemoryStore()
        self.old, self.new = Execution(self.root, 1), Execution(self.root, 2)

    def publish(self, execution: Execution) -> None:
        assert Bench(self.store).run(execution) is None

    def filled(self) -> World:
        for name, files in SAVES.items():
            save(self.old, name, files)
        self.publish(self.old)
        self.claim()
        return self

    def claim(self) -> None:
        self.new.folder.mkdir(parents=True, exist_ok=True)
        self.publish(self.new)

    def volume(self, **other: Any) -> Volume:
        volume = Volume(self.root, self.store, prune_local.claimed_epoch(self.store), 0, False, 1, time.time_ns)
        return replace(volume, **other)

    def prune(self, **other: Any) -> tuple[list[str], dict[str, str]]:
        """Plan and do it: the names that went, and the reasons of what was left by name."""
        todo = prune_local.plan(self.volume(**other))
        went: list[str] = []
        left = prune_local.carry_out(self.volume(**other), todo, lambda copy: went.append(copy.path.name))
        return went, {item.path.name: item.reason for item in (*todo.left, *left)}

    @property
    def there(self) -> set[str]:
        """What stands in the old execution's folder, but `.dispatch`."""
        return {path.name for path in self.old.folder.iterdir()} - {".dispatch"}


@pytest.fixture
def world(place: Path) -> World:
    return World(place).filled()


# --- what goes --------------------------------------------------------------------------------------------------------


def test_saves_of_an_older_execution_go_and_nothing_else(world: World) -> None:
    (world.old.folder / "notes.txt").write_text("of the user")
    (world.old.folder / "step-3").mkdir()
    (world.old.folder / "last").symlink_to("step-2")
    (world.root / "dataset").mkdir()
    save(world.new, "step-9", small(9))
    world.publish(world.new)
    before, own = everything_in(world.store), list((world.old.folder / ".dispatch").rglob("*"))
    went, _ = world.prune()
    assert set(went) == set(SAVES)
    assert world.there == {"notes.txt", "step-3", "last"}
    assert set(own) <= set((world.old.folder / ".dispatch").rglob("*"))
    assert (world.new.folder / "step-9").is_dir()
    assert (world.root / "dataset").is_dir()
    assert everything_in(world.store) == before
    check_invariants(world.store)


def test_a_publisher_of_that_folder_still_knows_what_is_published(world: World) -> None:
    world.prune()
    before = everything_in(world.store)
    world.publish(world.old)
    assert everything_in(world.store) == before


def test_a_dry_run_changes_nothing(world: World) -> None:
    before = sorted(world.root.rglob("*"))
    todo = prune_local.plan(world.volume())
    assert {copy.path.name for copy in todo.going} == set(SAVES)
    assert sorted(world.root.rglob("*")) == before


def test_the_newest_stay_counted_over_all_older_executions(place: Path) -> None:
    world = World(place)
    third = Execution(world.root, 3)
    for number, execution in ((1, world.old), (2, world.new)):
        for step in (1, 2):
            save(execution, f"step-{step}", small(f"{number} {step}"))
            world.publish(execution)
    third.folder.mkdir()
    world.publish(third)
    todo = prune_local.plan(world.volume(keep=3))
    assert [(copy.folder.name, copy.path.name) for copy in todo.kept] == [
        ("a2", "step-2"),
        ("a2", "step-1"),
        ("a1", "step-2"),
    ]
    assert [(copy.folder.name, copy.path.name) for copy in todo.going] == [("a1", "step-1")]


def test_a_save_whose_content_came_back_goes_by_the_commit_it_came_back_to(world: World) -> None:
    """Written and marked again with the content that was published last: it has a place, and no commit of its own."""
    save(world.old, "step-2", small("2"))
    path = world.old.folder / "step-2"
    os.utime(path / "weights.dat", ns=(HOUR_AGO + 10**9,) * 2)
    mark_complete(path)
    world.publish(world.old)
    assert len(commits(world.store)) == len(SAVES)
    went, left = world.prune()
    assert ("step-2" in went, left) == (True, {})


@pytest.mark.parametrize(
    "name",
    [
        "-rf",
        "a b\nc",
        "100%",
        "\udcff\udcfe",
        ".hidden",
        "é" * 30,
        "x" * 200,
        "leaving.exec.1.a",
        "gone.1",
        "*",
        "$(reboot)",
    ],
)
def test_whatever_a_save_is_called_it_alone_goes(place: Path, name: str) -> None:
    world = World(place)
    save(world.old, name, small(1))
    (world.old.folder / "other").mkdir()
    (world.old.folder / "other" / "file").write_text("stays")
    world.publish(world.old)
    world.claim()
    went, _ = world.prune()
    assert went == [name]
    assert world.there == {"other"}
    assert (world.old.folder / "other" / "file").read_text() == "stays"


def test_links_in_a_save_go_and_what_they_name_stays(place: Path) -> None:
    world = World(place)
    path = world.old.write("step-1", small(1))
    (path / "link").symlink_to("inner")
    mark_complete(aged(path))
    outside = place / "precious"
    outside.mkdir()
    (outside / "file").write_text("precious")
    world.publish(world.old)
    world.claim()
    # Where a run that was killed left a save, somebody puts links.
    own = world.old.folder / ".dispatch"
    (own / "gone.1" / "inner").mkdir(parents=True)
    (own / "gone.1" / "inner" / "out").symlink_to(outside)
    (own / "gone.2").symlink_to(outside)
    went, _ = world.prune()
    assert went == ["step-1"]
    assert not leaving.unfinished(world.old.folder)
    assert (outside / "file").read_text() == "precious"


@pytest.mark.root
def test_a_save_in_which_something_is_mounted_stays(place: Path) -> None:
    """Also by a bind mount of the same filesystem, which no device number tells."""
    world = World(place).filled()
    theirs, at = place / "their files", world.old.folder / "step-1" / "inner"
    theirs.mkdir()
    shutil.copy2(at / "state.json", theirs)
    aged(theirs)
    subprocess.run(["mount", "--bind", theirs, at], check=True)
    try:
        went, left = world.prune()
        assert "a filesystem is mounted in it" in left["step-1"]
        assert "step-1" not in went
        assert [path.name for path in theirs.iterdir()] == ["state.json"]
    finally:
        subprocess.run(["umount", at], check=True)


# --- what stays, and why ----------------------------------------------------------------------------------------------


def _rewritten(world: World) -> None:
    aged(world.old.write("step-1", {"weights.dat": b"other"}))


def _half_deleted(world: World) -> None:
    (world.old.folder / "step-1" / "weights.dat").unlink()


def _touched(world: World) -> None:
    os.utime(world.old.folder / "step-1" / "inner")


def _unpublished(world: World) -> None:
    save(world.old, "step-1", small("another"))


def _marked_again(world: World) -> None:
    """Another content of the same size, at the same time as far as the filesystem can tell."""
    save(world.old, "step-1", small("9"))


def _new_and_unpublished(world: World) -> None:
    shutil.rmtree(world.old.folder / "step-1")
    world.old.write("step-1", small(8))


def _commit_of(world: World, name: str) -> records.CommitRecord:
    return next(record for record in commits(world.store) if record.save == name)


def _pruned_at_the_store(world: World) -> None:
    order = _commit_of(world, "step-1").order
    world.store.put(keys.tombstone_key(order), records.tombstone_bytes(order, "test", "now"))


def _file_gone_at_the_store(world: World) -> None:
    world.store.delete(f"{_commit_of(world, 'step-1').parts[0].prefix}/weights.dat")


def _file_cut_at_the_store(world: World) -> None:
    world.store.put(f"{_commit_of(world, 'step-1').parts[0].prefix}/weights.dat", b"short")


def _manifest_damaged(world: World) -> None:
    world.store.put(_commit_of(world, "step-1").parts[0].manifest, b"{}")


def _commit_damaged(world: World) -> None:
    world.store.put(_commit_of(world, "step-1").key, b"{}")


def _commit_of_another_folder(world: World) -> None:
    record = _commit_of(world, "step-1")
    world.store.put(record.key, records.commit_bytes(replace(record, folder="0" * 12)))


def _commit_of_another_content(world: World) -> None:
    """As a copy of the volume that went on by itself would commit it in the same place."""
    record = _commit_of(world, "step-1")
    world.store.put(record.key, records.commit_bytes(replace(record, mark="another", newest_ns=1)))


def _in_place(world: World) -> None:
    record = _commit_of(world, "step-1")
    part = replace(record.parts[0], prefix="exec/a1/step-1", names="raw")
    world.store.put(record.key, records.commit_bytes(replace(record, parts=(part,))))


STAYS: dict[str, tuple[Callable[[World], None], str]] = {
    "written over": (_rewritten, "not what was complete last"),
    "half deleted": (_half_deleted, "not what was complete last"),
    "being written": (_touched, "changed within the last 60 seconds"),
    "complete, not published": (_unpublished, "not what was complete last"),
    "marked once more": (_marked_again, "said to be complete once more"),
    "written anew": (_new_and_unpublished, "not what was complete last"),
    "pruned at the store": (_pruned_at_the_store, "pruned: this is the last one; delete it by hand"),
    "a file missing at the store": (_file_gone_at_the_store, "should have"),
    "a file cut at the store": (_file_cut_at_the_store, "should have"),
    "its manifest damaged": (_manifest_damaged, "changed after it was committed"),
    "its commit damaged": (_commit_damaged, "commits/"),
    "its commit from another folder": (_commit_of_another_folder, "published from another folder"),
    "its commit of other content": (_commit_of_another_content, "published from another folder"),
    "published in place": (_in_place, "published in place"),
}


@pytest.mark.parametrize("case", STAYS)
def test_one_that_the_store_does_not_surely_have_stays_and_the_others_go(world: World, case: str) -> None:
    do, reason = STAYS[case]
    do(world)
    for keep in (1, 0):  # it does not count among those that are kept either
        went, left = world.prune(keep=keep)
        assert set(went) == ({"step-2"} if keep else {"best.ckpt"}), left
        assert list(left) == ["step-1"]
        assert reason in left["step-1"]
    assert world.there == {"step-1"}


def test_what_was_marked_complete_after_the_execution_was_fenced_is_said_to_be_unpublished(world: World) -> None:
    save(world.new, "step-9", small(9))
    world.publish(world.new)
    save(world.old, "late", small("late"))
    _, left = world.prune()
    assert left == {"late": "it is marked complete, and is not published"}
    assert world.there == {"late"}


@pytest.mark.parametrize("side", ["here", "there"])
def test_every_byte_is_compared_on_demand(world: World, side: str) -> None:
    """Same names, sizes and times: only reading shows it."""
    if side == "here":
        path = world.old.folder / "step-1" / "weights.dat"
        path.write_bytes(bytes(reversed(path.read_bytes())))
        aged(world.old.folder / "step-1")
    else:
        key = f"{_commit_of(world, 'step-1').parts[0].prefix}/weights.dat"
        world.store.put(key, bytes(reversed(world.store.read(key).data)))
    went, left = world.prune(full=True)
    assert set(went) == {"step-2", "best.ckpt"}
    assert list(left) == ["step-1"]


def test_nothing_goes_before_a_newer_execution_has_claimed(place: Path) -> None:
    world = World(place)
    save(world.old, "step-1", small(1))
    world.publish(world.old)
    assert world.prune() == ([], {})
    # A folder of claims without an attempt is no claim.
    world.store.put(keys.folder_claim_key(world.new.epoch, 0, 1), b"{}")
    assert prune_local.claimed_epoch(world.store) == world.old.epoch
    assert world.prune() == ([], {})
    world.store.put(keys.weak_attempt_claim_key(world.new.epoch, "x"), b"x")
    assert world.prune() == (["step-1"], {})


@pytest.mark.parametrize("which", ["this", "another"])
def test_a_folder_whose_publisher_is_alive_stays(world: World, which: str) -> None:
    url = world.store.url if which == "this" else "s3://another/store"
    with folder_lock(world.old.folder, url) as held:
        assert held.held
        todo = prune_local.plan(world.volume())
        assert [(item.path, item.reason, item.passing) for item in todo.left] == [
            (world.old.folder, "a publisher has it", True)
        ]
        assert (todo.going, todo.kept) == ((), ())
    stale = prune_local.plan(world.volume())
    with folder_lock(world.old.folder, url):
        assert [i.reason for i in prune_local.carry_out(world.volume(), stale, lambda _: None)] == [
            "a publisher has it"
        ]
    assert world.there == set(SAVES)
    assert set(world.prune()[0]) == set(SAVES)


def test_a_folder_that_is_not_what_it_says_stays(world: World, place: Path) -> None:
    """Copied, linked, without a record: none of them is the folder that published."""
    shutil.copytree(world.old.folder, world.root / "exec" / "copy")
    (world.root / "exec" / "link").symlink_to(world.old.folder)
    (world.root / "exec" / "bare" / "step-1").mkdir(parents=True)
    (world.root / "exec" / "file").write_text("")
    shutil.copytree(world.old.folder / ".dispatch", place / "dispatch")
    (world.root / "exec" / "a1" / ".dispatch").rename(place / "moved")
    (world.root / "exec" / "a1" / ".dispatch").symlink_to(place / "moved")
    before = sorted(world.root.rglob("*"))
    went, left = world.prune()
    assert went == []
    assert {name: reason.partition(",")[0].partition(":")[0] for name, reason in left.items()} == {
        "a1": "it is no folder of an execution",
        "bare": "it has no .dispatch/execution.json",
        "copy": "its record is that of attempt a1",
        "file": "it is no folder of an execution",
        "link": "it is no folder of an execution",
    }
    assert sorted(world.root.rglob("*")) == before


def test_a_store_that_does_not_answer_prunes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: str) -> Iterator[Any]:
        msg = "away"
        raise StoreUnavailable(msg)

    volume = world.volume()
    monkeypatch.setattr(world.store, "list", away)
    with pytest.raises(StoreUnavailable):
        prune_local.plan(volume)
    assert world.there == set(SAVES)


@pytest.mark.parametrize("inside", ["", "published", "exec/a1/store", ".."])
def test_a_store_in_the_same_folder_tree_is_no_second_copy(place: Path, inside: str) -> None:
    (place / "root").mkdir()
    (place / "alias").symlink_to(place / "root")
    with pytest.raises(SettingsError, match="are one folder tree"):
        prune_local.check_apart(PosixStore(place / "alias" / inside), place / "root")
    prune_local.check_apart(PosixStore(place / "root-of-another"), place / "root")


# --- restored copies --------------------------------------------------------------------------------------------------


def test_what_was_restored_for_an_older_execution_goes_too(place: Path) -> None:
    world = World(place).filled()
    third = Execution(world.root, 3)
    for execution, name in ((world.new, "step-2"), (world.new, "best.ckpt"), (third, "step-2")):
        target = world.root / "resume" / execution.identity.attempt
        restore(world.store, _commit_of(world, name), target, tick=lambda _: None, workers=1)
        aged(target / name)
    unknown = world.root / "resume" / "nobody"
    unknown.mkdir()
    written = world.root / "resume" / "a2" / "step-7"
    written.mkdir()
    aged(written)
    third.folder.mkdir()
    world.publish(third)
    went, left = world.prune(keep=2)
    assert sorted(went) == ["best.ckpt", "best.ckpt", "step-2"] or sorted(went) == ["best.ckpt", "step-1", "step-2"]
    assert [path.name for path in (world.root / "resume" / "a2").iterdir()] == ["step-7"]
    assert [path.name for path in (world.root / "resume" / "a3").iterdir()] == ["step-2"]
    assert "no commit of that name" in left["step-7"]
    assert "its epoch is not known" in left["nobody"]


def test_a_restored_copy_that_was_written_into_stays(world: World) -> None:
    third = Execution(world.root, 3)
    target = world.root / "resume" / "a2"
    restore(world.store, _commit_of(world, "step-2"), target, tick=lambda _: None, workers=1)
    (target / "step-2" / "more").write_text("of the trainer")
    aged(target / "step-2")
    third.folder.mkdir()
    world.publish(third)
    _, left = world.prune()
    assert "not those that the store has" in left["step-2"]
    assert (target / "step-2" / "more").exists()


# --- beside others, and killed ----------------------------------------------------------------------------------------


def test_a_save_that_changes_between_the_look_and_the_move_goes_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename
    met = set()

    def rename(source: Any, target: Any, **where: int) -> None:
        if source == b"step-1" and source not in met:
            met.add(source)
            world.old.write("step-1", {"weights.dat": b"of the trainer"})
        real(source, target, **where)

    monkeypatch.setattr(leaving.os, "rename", rename)
    went, left = world.prune()
    assert set(went) == {"step-2", "best.ckpt"}
    assert "it changed while it was looked at" in left["step-1"]
    assert (world.old.folder / "step-1" / "weights.dat").read_bytes() == b"of the trainer"
    assert not leaving.unfinished(world.old.folder)
    assert Bench(world.store).run(world.old, rule=ANY) is None
    assert [record.generation for record in commits(world.store) if record.save == "step-1"] == [1, 2]


def test_a_save_that_cannot_go_back_is_kept_beside_the_one_that_has_its_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def rename(source: Any, target: Any, **where: int) -> None:
        if (
            source in {b"step-1", b"best.ckpt"}
            and not (world.old.folder / os.fsdecode(source)).with_suffix(".x").exists()
        ):
            path = world.old.folder / os.fsdecode(source)
            path.with_suffix(".x").touch()
            world.old.write(os.fsdecode(source), {"weights.dat": b"changed"} if path.is_dir() else b"changed")
            real(source, target, **where)
            world.old.write(os.fsdecode(source), {"new": b"new"} if source == b"step-1" else b"new")
        else:
            real(source, target, **where)

    monkeypatch.setattr(leaving.os, "rename", rename)
    _, left = world.prune()
    assert "another save has its name by now" in left["step-1"]
    assert "another save has its name by now" in left["best.ckpt"]
    moved = {path.name.split(".", 3)[3]: path for path in (world.old.folder / ".dispatch").glob("leaving.*")}
    assert (moved["step-1"] / "weights.dat").read_bytes() == b"changed"
    assert moved["best.ckpt"].read_bytes() == b"changed"
    assert (world.old.folder / "step-1" / "new").read_bytes() == b"new"
    assert (world.old.folder / "best.ckpt").read_bytes() == b"new"
    monkeypatch.undo()
    _, left = world.prune()  # nor does the next one lose it
    assert sum("another save has its name by now" in reason for reason in left.values()) == 2
    assert moved["best.ckpt"].read_bytes() == b"changed"


@contextmanager
def publisher_at_work(world: World, bench: Bench) -> Iterator[None]:
    """A recovery of the old folder, by a rule that takes whatever stands there, where no lock keeps it out."""
    ended = threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            publisher = bench.publisher(world.old, rule=ANY)
            while not ended.is_set():
                publisher.run()
        except BaseException as error:  # noqa: BLE001 (told to the test)
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert failed == []


def test_i9_a_publisher_at_work_sees_all_of_a_save_or_nothing(place: Path) -> None:
    """Not one more generation, nothing half-removed published, however its looks and the removal fall together."""
    world = World(place)
    for number in range(15):
        save(world.old, f"step-{number}", {f"{part}/{file}": b"x" * 10 for part in range(3) for file in range(4)})
    assert Bench(world.store).run(world.old, rule=ANY) is None
    bench = Bench(world.store, SystemClock())
    world.store.put(keys.attempt_claim_key(world.new.epoch), b"a2")
    before = facts(world.store)
    with publisher_at_work(world, bench):
        went, left = world.prune()
    assert (len(went), left) == (15, {})
    assert Bench(world.store).run(world.old, rule=ANY) is None
    assert facts(world.store) == before
    assert bench.lines == []
    assert world.there == set()


def test_i9_a_trainer_that_lives_on_beside_it_loses_nothing(place: Path) -> None:
    """The old trainer goes on saving, over what stands there, and rotating, and no lock keeps anybody out: each save
    that it did not take back itself is in its place or published, and whole."""
    chance = random.Random(7)  # noqa: S311 (repeatable, not secret)
    world = World(place)
    save(world.old, "step-0", small("step-0 at first"))
    world.publish(world.old)
    world.store.put(keys.attempt_claim_key(world.new.epoch), b"a2")
    written: dict[str, str] = {}
    ended = threading.Event()
    failed: list[str] = []

    def trainer() -> None:
        for number in range(150):
            name = f"step-{chance.randrange(6)}"
            written.pop(name, None)
            with contextlib.suppress(OSError, AgentError):  # it left the volume while it was written
                if chance.random() < 0.2:
                    shutil.rmtree(world.old.folder / name)
                    continue
                save(world.old, name, small(f"{name} at {number}"), later=number)
                written[name] = f"{name} at {number}"

    def publisher() -> None:
        Bench(world.store, SystemClock()).publisher(world.old).run()

    def until_it_ended(work: Callable[[], Any]) -> None:
        try:
            while not ended.is_set():
                work()
        except BaseException:  # noqa: BLE001 (told to the test)
            failed.append(traceback.format_exc())

    others = [threading.Thread(target=until_it_ended, args=[work]) for work in (publisher, publisher, world.prune)]
    for thread in others:
        thread.start()
    try:
        trainer()
    finally:
        ended.set()
        for thread in others:
            thread.join()
    assert failed == []
    world.prune()  # what a look kept from its place is put back
    assert Bench(world.store, SystemClock()).run(world.old) is None
    check_invariants(world.store)
    published = set()
    for record in commits(world.store):
        read = {key.rpartition("/")[2]: world.store.read(key).data for key in _keys(world, record)}
        published.add(read["state.json"].decode())
        assert read["weights.dat"] == small(read["state.json"].decode())["weights.dat"], "two contents in one save"
    assert set(written.values()) <= published


def _keys(world: World, record: records.CommitRecord) -> list[str]:
    return [item.key for item in world.store.list(record.parts[0].prefix)]


def in_a_process(do: Callable[[], None], kill_at: int) -> tuple[bool, int]:
    """Run `do` in a process that kills itself before its `kill_at`-th change of a name; whether it was killed."""
    pid = os.fork()
    if pid == 0:
        met = 0

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal met
                met += 1
                if met == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            return call

        code = 1
        try:
            for name in ("rename", "mkdir", "unlink", "rmdir", "link", "fsync"):
                setattr(os, name, counted(getattr(os, name)))
            do()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"it failed at step {kill_at}"
    return os.WIFSIGNALED(status), kill_at


def test_killed_at_every_step_the_next_one_finishes(place: Path) -> None:
    """Meanwhile nothing is published that is not whole, and every save is whole in its place or out of sight."""
    template = World(place / "template", PosixStore(place / "template" / "store")).filled()
    restored = "resume/a1/step-1"
    target = (template.root / restored).parent
    restore(template.store, _commit_of(template, "step-1"), target, tick=lambda _: None, workers=1)
    aged(template.root / restored)
    os.utime(template.root / restored / "weights.dat", ns=(HOUR_AGO + 10**9,) * 2)  # in exec/ it would be another save
    trees = {name: _tree(template.old.folder / name) for name in SAVES}
    step = 0
    killed = True
    while killed:
        step += 1
        base = place / str(step)
        shutil.copytree(place / "template", base, symlinks=True)
        world = World(base, PosixStore(base / "store"))
        before = facts(world.store)
        killed, _ = in_a_process(lambda world=world: _prune_all(world), step)  # type: ignore[misc]
        for name in world.there:
            assert _tree(world.old.folder / name) == trees[name], f"step {step}: {name} is not whole"
        if (world.root / restored).exists():
            assert _tree(world.root / restored) == trees["step-1"], f"step {step}: {restored} is not whole"
        assert Bench(world.store).run(world.old, rule=ANY) is None
        assert facts(world.store) == before, f"step {step}: something was published"
        _prune_all(world)
        _prune_all(world)
        assert (world.there, (world.root / restored).exists()) == (set(), False), f"step {step}"
        assert not leaving.unfinished(world.old.folder), f"step {step}"
        shutil.rmtree(base)
    assert step > 20


def _prune_all(world: World) -> None:
    prune_local.carry_out(world.volume(), prune_local.plan(world.volume()), lambda _: None)


def _tree(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.root
def test_as_another_user_what_may_not_be_moved_stays_and_what_may_goes(place: Path) -> None:
    """A sidecar that is not the trainer: what it may not change it says, and leaves as it was."""
    world = World(place, PosixStore(place / "store")).filled()
    for path in (place, world.root, world.root / "exec", place / "store", *(place / "store").rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    (world.old.folder / "step-1" / "inner").chmod(0o555)
    for path in (world.old.folder, *world.old.folder.rglob("*")):
        os.chown(path, 65534, 65534)
    os.chown(world.old.folder / "step-2", 0, 0)  # not ours: rename(2) would have to change its `..`
    (world.old.folder / "step-2").chmod(0o755)
    report = place / "report"
    report.touch()
    report.chmod(0o666)
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            report.write_text(json.dumps(world.prune()))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    went, left = json.loads(report.read_text())
    assert sorted(went) == ["best.ckpt", "step-1"]
    assert list(left) == ["step-2"]
    assert "Permission denied" in left["step-2"]
    assert world.there == {"step-2"}
    assert not leaving.unfinished(world.old.folder)


def test_a_volume_that_cannot_be_written_loses_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(leaving.os, "rename", read_only)
    went, left = world.prune()
    assert went == []
    assert set(left.values()) == {"Read-only file system"}
    assert world.there == set(SAVES)
    assert not leaving.unfinished(world.old.folder)


def test_a_volume_that_is_full_can_be_emptied(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not even a folder can be made any more, which takes a block."""

    def full(path: Any, *_: Any, **__: Any) -> None:
        raise OSError(17 if Path(path).exists() else 28, "the volume is full")

    monkeypatch.setattr(os, "mkdir", full)
    assert set(world.prune()[0]) == set(SAVES)


# --- the commands -----------------------------------------------------------------------------------------------------


class Commands:
    """The real commands on a volume with one older execution, and a folder or a bucket as the store."""

    def __init__(self, place: Path, launcher: Launcher, bucket: Bucket | None = None) -> None:
        self.place, self.launcher, self.bucket = place, launcher, bucket
        self.url = f"{bucket.url}/{os.urandom(6).hex()}" if bucket else str(place / "store")
        self.root = place / "root"
        self.old, self.new = Execution(self.root, 1), Execution(self.root, 2)

    def run(self, *argv: str, execution: Execution | None = None) -> int:
        (self.place / "log").write_text("")
        environment = {"PUBLISH_ROOT": str(self.root), "PUBLISH_DEST": self.url}
        environment |= execution.environment if execution else {}
        environment |= self.bucket.environment if self.bucket else {}
        return self.launcher.run(Writer(log=str(self.place / "log"), environment=environment, argv=[*argv]))

    def filled(self) -> Commands:
        for name, files in SAVES.items():
            save(self.old, name, files)
        assert self.watch(self.old) == 0
        self.new.folder.mkdir()
        return self

    def watch(self, execution: Execution, *options: str) -> int:
        return self.run("watch", "--once", "--complete", "marker", *options, execution=execution)

    @property
    def said(self) -> str:
        return (self.place / "log").read_text()

    @property
    def there(self) -> set[str]:
        return {path.name for path in self.old.folder.iterdir()} - {".dispatch"}


@pytest.fixture
def commands(place: Path, launcher: Launcher) -> Commands:
    return Commands(place, launcher).filled()


def test_the_command_shows_first_and_then_deletes(commands: Commands) -> None:
    assert commands.watch(commands.new) == 0
    assert commands.there == set(SAVES), "off by default"
    assert commands.run("prune", "--local", "--keep", "1") == 0
    assert "would delete 2 saves" in commands.said
    assert "Nothing was deleted: add --apply" in commands.said
    assert commands.there == set(SAVES)
    assert commands.run("prune", "--local", "--keep", "1", "--verify", "--apply", "--json") == 0
    answer = json.loads(commands.said)
    assert (answer["applied"], answer["left"], answer["unfinished"]) == (True, [], [])
    assert [Path(item["path"]).name for item in answer["kept"]] == list(commands.there)
    assert len(answer["pruned"]) == 2
    assert all(item["commit"].startswith("commits/") for item in answer["pruned"])
    assert len(commits(PosixStore(commands.url))) == len(SAVES)


def test_the_command_fails_when_what_it_was_to_delete_stays(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    assert commands.watch(commands.new) == 0
    monkeypatch.setattr(leaving.os, "rename", denied)
    argv = ["prune", "--local", "--keep", "1", "--root", str(commands.root), "--dest", commands.url, "--apply"]
    result = CliRunner().invoke(publish, argv)
    assert "deleted 0 saves" in result.output
    assert isinstance(result.exception, AgentError)
    assert "2 could not be deleted; the first, " in str(result.exception)
    assert "Permission denied; run the publisher with the trainer's UID" in str(result.exception)


def test_a_watch_prunes_after_it_has_claimed(commands: Commands) -> None:
    assert commands.watch(commands.new, "--keep-local", "1") == 0
    assert commands.said.count(" pruned ") == 2
    assert len(commands.there) == 1
    assert commands.watch(commands.new, "--keep-local", "0") == 0
    assert commands.there == set()
    # Everything is still to be had.
    for record in commits(PosixStore(commands.url)):
        restore(PosixStore(commands.url), record, commands.place / "back", tick=lambda _: None, workers=1)
    assert {path.name for path in (commands.place / "back").iterdir()} == set(SAVES)


def test_a_watch_leaves_its_own_saves_and_newer_ones(commands: Commands) -> None:
    assert commands.watch(commands.new) == 0
    assert commands.watch(commands.old, "--keep-local", "0") == 0
    assert commands.there == set(SAVES)


@pytest.mark.xdist_group("seaweed")
def test_from_a_volume_to_s3(place: Path, launcher: Launcher, shared_bucket: Bucket) -> None:
    commands = Commands(place, launcher, shared_bucket).filled()
    store = open_store(commands.url, shared_bucket.options)
    assert commands.watch(commands.new, "--keep-local", "1") == 0, commands.said
    assert len(commands.there) == 1
    check_invariants(store)
    store.close()


@pytest.mark.parametrize(
    ("argv", "code", "word"),
    [
        (["--keep", "0"], 2, "at least 2"),
        (["--local", "--keep", "2", "--keep-every", "2"], 2, "--keep-every is for the store"),
        (["--local"], 2, "--keep"),
        (["--local", "--keep", "1", "--dest", "ROOT/published"], 3, "one folder tree"),
        (["--local", "--keep", "1", "--dest", "ROOT"], 3, "one folder tree"),
        (["--local", "--keep", "1", "--root", "ROOT/exec"], 3, "is not there"),
    ],
)
def test_what_makes_no_sense_is_refused(commands: Commands, argv: list[str], code: int, word: str) -> None:
    assert commands.run("prune", *(word.replace("ROOT", str(commands.root)) for word in argv)) == code
    assert word in commands.said
    assert commands.there == set(SAVES)


def test_a_watch_that_publishes_in_place_prunes_nothing(place: Path, launcher: Launcher) -> None:
    commands = Commands(place, launcher)
    commands.url = str(commands.root)
    save(commands.old, "step-1", small(1))
    assert commands.watch(commands.old, "--in-place") == 0
    commands.new.folder.mkdir()
    for options in (["--in-place"], ["--dest", str(place / "another")]):  # nor the save that readers get from there
        assert commands.watch(commands.new, *options, "--keep-local", "0") == 3
        assert "published in place" in commands.said
    assert commands.there == {"step-1"}


def test_a_watch_looks_again_for_what_was_in_use_and_not_for_ever(world: World) -> None:
    """Seldom while something may yet go, and never again when nothing can."""
    bench = Bench(world.store)
    asked = 0
    planned = prune_local.plan

    def plan(volume: Volume) -> Plan:
        nonlocal asked
        asked += 1
        return planned(volume)

    stop = Stop()
    keeper = Keeper(world.volume(), _log(bench), bench.clock, stop.drain.is_set, waits=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prune_local, "plan", plan)
        with folder_lock(world.old.folder, world.store.url):
            for _ in range(10):
                keeper()
            assert asked == 1
        bench.clock.now += 61  # type: ignore[attr-defined]
        keeper()
        assert asked == 2
        assert world.there == set()
        bench.clock.now += 100_000  # type: ignore[attr-defined]
        keeper()
        assert asked == 2


def test_pruning_holds_up_nothing_that_is_to_be_published(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that hangs, thousands of saves to compare: the watch's next pass does not wait for that."""
    let_go = threading.Event()
    planned = prune_local.plan
    monkeypatch.setattr(prune_local, "plan", lambda volume: planned(volume) if let_go.wait(30) else None)
    bench = Bench(world.store)
    keeper = Keeper(world.volume(), _log(bench), bench.clock, lambda: False, waits=False)
    keeper()
    bench.clock.now += 1000  # type: ignore[attr-defined]
    keeper()  # nor does a second one begin
    assert [thread.name for thread in threading.enumerate()].count("keep-local") == 1
    assert world.there == set(SAVES)
    let_go.set()
    next(thread for thread in threading.enumerate() if thread.name == "keep-local").join()
    assert world.there == set()


def test_a_watch_goes_on_publishing_when_pruning_cannot(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(_: Volume) -> Plan:
        msg = "damaged"
        raise IntegrityError(msg)

    bench = Bench(world.store)
    monkeypatch.setattr(prune_local, "plan", damaged)
    save(world.new, "step-9", small(9))
    keeper = Keeper(world.volume(), _log(bench), bench.clock, lambda: False, waits=True)
    tally = Tally()
    watcher.watch(
        lambda: bench.publisher(world.new),
        Stop(),
        tally,
        bench.clock,
        _log(bench),
        rescan=5.0,
        once=True,
        start_timeout=1.0,
        after=keeper,
    )
    assert tally.published == 1
    assert any("not pruned" in line for line in bench.lines)


def _log(bench: Bench) -> Log:
    return Log(bench.lines.append, bench.clock, least="info")
