"""Only prune deletes, and never what the newest two saves need, beside publishers, readers and other prunes (I6)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.protocol.checks import check_invariants, commits
from tests.protocol.faults import Call, Do, FakeClock, Hook, everything_in, faulty, through
from tests.protocol.jobs import Bench, Execution, small

from dispatch_agent.checkpoint.folder import mark_complete
from dispatch_agent.errors import (
    AgentError,
    Fenced,
    IntegrityError,
    NewerFormat,
    OutcomeUnknown,
    StoreDenied,
    StoreTooWeak,
    StoreUnavailable,
)
from dispatch_agent.publish import keys, listing, pointer, reader, records
from dispatch_agent.publish.once import Patience
from dispatch_agent.publish.prune import Plan, Pruner, carry_out, plan
from dispatch_agent.publish.restore import restore_newest
from dispatch_agent.store.base import Store
from dispatch_agent.store.memory import MemoryStore
from dispatch_agent.store.posix import PosixStore


def pruner(store: Store, *, weak: bool = False, points: bool = True) -> Pruner:
    clock = FakeClock()
    return Pruner(store, "test", weak, points, 1, clock, Patience(clock, lambda: 0.5))


def prune(store: Store, *, keep: int = 2, every: int | None = None, full: bool = False, **how: bool) -> Plan:
    todo = plan(store, newest=keep, every=every, workers=1, full=full)
    carry_out(pruner(store, **how), todo, lambda _: None)
    return todo


def published(store: Store, root: Path, executions: int = 3, saves: int = 3) -> list[Execution]:
    """Executions 1, 2, … one after the other, each with saves step-1, step-2, …"""
    done = []
    for number in range(1, executions + 1):
        execution = Execution(root, number)
        for step in range(1, saves + 1):
            execution.save(f"step-{step}", small(f"{number}.{step}"))
        assert Bench(store).run(execution) is None
        done.append(execution)
    return done


def names(store: Store) -> list[str]:
    """What readers see, the oldest first: `execution.save`."""
    return [
        f"{item.order.epoch - 1_000_000}.{item.record.save}"
        for item in reader.published(store)
        if item.record is not None
    ][::-1]


def restored(store: Store, target: Path, said: Callable[[str, str], None] | None = None) -> str:
    got = restore_newest(
        store,
        target,
        save=None,
        fall_back=True,
        progress=lambda _save, _size: lambda _n: None,
        damaged=said or (lambda key, why: pytest.fail(f"{key} called damaged: {why}")),
        workers=1,
    )
    return (got.path / "inner/state.json").read_text()


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, place: Path) -> Store:
    return MemoryStore() if request.param == "memory" else PosixStore(place / "store")


class TestWhatGoes:
    def test_old_saves_go_and_the_newest_stay_whole(self, store: Store, place: Path) -> None:
        published(store, place)
        before = len(commits(store))
        prune(store, keep=3, every=4)
        assert names(store) == ["1.step-1", "2.step-2", "3.step-1", "3.step-2", "3.step-3"]
        check_invariants(store)
        assert len(commits(store)) == before
        assert restored(store, place / "back") == "3.3"

    def test_nothing_of_a_pruned_save_is_left_but_its_record_and_its_tombstone(self, store: Store, place: Path) -> None:
        published(store, place, executions=1, saves=3)
        first = commits(store)[0]
        prune(store)
        left = [key for key in everything_in(store) if first.order.nonce in key and "000001" in key.split("/")[-1]]
        assert sorted(left) == [keys.commit_key(first.order), keys.tombstone_key(first.order)]
        assert not [*store.list(first.parts[0].prefix)]

    def test_looking_changes_nothing(self, store: Store, place: Path) -> None:
        published(store, place)
        before = everything_in(store)
        todo = plan(store, newest=2, every=None, workers=2)
        assert len(todo.doomed) == 7
        assert everything_in(store) == before

    def test_a_second_prune_has_nothing_to_do_and_writes_nothing(self, store: Store, place: Path) -> None:
        published(store, place)
        prune(store)
        before = everything_in(store)
        todo = prune(store)
        assert not todo.sizes
        assert everything_in(store) == before

    def test_a_damaged_newest_save_does_not_count(self, store: Store, place: Path) -> None:
        published(store, place, executions=1, saves=5)
        newest = commits(store)[-1]
        store.delete(next(iter(store.list(newest.parts[0].prefix))).key)
        prune(store)
        assert names(store) == ["1.step-3", "1.step-4", "1.step-5"]

    def test_with_every_byte_read_damage_of_the_same_size_does_not_count_either(
        self, store: Store, place: Path
    ) -> None:
        published(store, place, executions=1, saves=5)
        for newest in commits(store)[-2:]:
            key = f"{newest.parts[0].prefix}/inner/state.json"
            store.put(key, store.read(key).data[::-1])
        prune(store, full=True)
        assert names(store) == ["1.step-2", "1.step-3", "1.step-4", "1.step-5"]
        assert restored(store, place / "back", lambda *_: None) == "1.3"
        prune(store)
        assert names(store) == ["1.step-4", "1.step-5"], "by size alone they are whole"

    def test_saves_that_were_published_in_place_stay(self, place: Path) -> None:
        store = PosixStore(place)
        execution = Execution(place, 1)
        bench = Bench(store)
        for step in range(4):
            execution.save(f"step-{step}", small(step))
        publisher = bench.publisher(execution, in_place=True)
        publisher.run()
        before = everything_in(store)
        assert not prune(store).sizes
        assert everything_in(store) == before

    def test_what_an_execution_agreed_to_resume_from_stays(self, store: Store, place: Path) -> None:
        published(store, place)
        chosen = commits(store)[3]
        key = f"{keys.claims_prefix(chosen.order.epoch + 7)}/resume.1.json"
        store.put(key, records.canonical({"format": 1, "commit": chosen.key}))
        prune(store)
        assert names(store) == ["2.step-1", "3.step-2", "3.step-3"]

    def test_an_agreement_that_cannot_be_read_stops_it(self, store: Store, place: Path) -> None:
        published(store, place)
        store.put(f"{keys.claims_prefix(9_000_000)}/resume.1.json", b'{"format":1,"commit":"elsewhere"}')
        before = everything_in(store)
        with pytest.raises(IntegrityError, match="elsewhere"):
            prune(store)
        assert everything_in(store) == before

    def test_of_a_weak_store_without_a_pointer_old_saves_go_too(self, place: Path) -> None:
        store = MemoryStore()
        published(store, place)
        store.delete(keys.POINTER)
        prune(store, weak=True, points=False)
        assert names(store) == ["3.step-2", "3.step-3"]

    def test_what_is_not_ours_stays(self, store: Store, place: Path) -> None:
        published(store, place)
        foreign = ["data/notes.txt", "data/00000000000000000001-x/step-1/readme", "commits/readme", "other/thing"]
        for key in foreign:
            store.put(key, b"mine")
        prune(store)
        assert {key: store.read(key).data for key in foreign} == dict.fromkeys(foreign, b"mine")


class TestLitter:
    """What killed uploads left: no commit names it, and only dead executions' is touched."""

    @staticmethod
    def killed_upload(store: Store, execution: Execution, name: str, *, at: str) -> None:
        """A publisher that died before the first call of this method on this save's data."""

        def hook(call: Call, do: Do) -> Any:
            if call.method == at and f"/{name}/" in call.key:
                raise KeyboardInterrupt
            return do()

        execution.save(name, small(name))
        with pytest.raises(KeyboardInterrupt):
            Bench(faulty(store, hook)).publisher(execution).run()

    @pytest.mark.parametrize("at", ["list", "create"])
    def test_of_a_dead_execution_goes(self, at: str, store: Store, place: Path) -> None:
        self.killed_upload(store, Execution(place, 1), "lost", at=at)
        published(store, place / "later", executions=3, saves=1)
        assert [*store.list("data")]
        todo = prune(store)
        assert len(todo.litter) == 1
        assert not [item.key for item in store.list("data") if "/lost/" in item.key]
        check_invariants(store)

    def test_of_an_execution_that_may_live_stays(self, store: Store, place: Path) -> None:
        first = Execution(place, 2)
        published(store, place / "earlier", executions=1, saves=2)
        self.killed_upload(store, first, "lost", at="create")
        published(store, place / "earlier", executions=1, saves=3)
        before = everything_in(store)
        assert not prune(store, keep=3).litter
        assert everything_in(store) == before

    def test_of_an_epoch_with_a_record_that_cannot_be_read_stays_and_that_is_said(
        self, store: Store, place: Path
    ) -> None:
        (old, *_) = published(store, place, executions=3, saves=2)
        damaged = commits(store)[0]
        store.put(damaged.key, b"garbage")
        todo = prune(store)
        assert [type(problem) for problem in todo.problems] == [IntegrityError]
        assert [*store.list(damaged.parts[0].prefix)], "nobody knows whether something names this"
        assert names(store) == ["3.step-1", "3.step-2"]
        assert old.epoch == damaged.order.epoch

    def test_half_files_of_dead_writers_go_and_those_of_living_ones_stay(self, place: Path) -> None:
        store = PosixStore(place / "store")
        executions = published(store, place)
        drafts = []
        for execution in executions:
            folder = store.path(f"data/{execution.epoch:020d}-{execution.identity.attempt}/step-1")
            drafts.append(folder / ".~dispatch.draft.0123456789abcdef")
            drafts[-1].parent.mkdir(parents=True, exist_ok=True)
            drafts[-1].write_bytes(b"half")
        todo = prune(store)
        assert len(todo.leftovers) == 2
        assert [draft.exists() for draft in drafts] == [False, False, True]


class TestBesidePublishers:
    def test_a_restart_after_a_prune_publishes_no_old_save_as_new(self, store: Store, place: Path) -> None:
        executions = published(store, place)
        prune(store)
        before = everything_in(store)
        assert Bench(store).run(executions[-1]) is None
        assert everything_in(store) == before

    def test_a_save_published_after_a_prune_has_the_next_generation(self, store: Store, place: Path) -> None:
        execution = published(store, place, executions=1, saves=3)[0]
        prune(store)
        mark_complete(execution.write("step-1", small("again")))
        assert Bench(store).run(execution) is None
        assert (commits(store)[-1].save, commits(store)[-1].generation) == ("step-1", 2)
        check_invariants(store)

    def test_a_commit_that_stalled_until_its_epoch_was_sealed_is_fenced(self, store: Store, place: Path) -> None:
        """Frozen after its last look at the fence; two newer saves and a prune later its commit lands."""
        old = Execution(place, 1)
        old.save("stalled", small("stalled"))
        frozen: list[Plan] = []

        def hook(call: Call, do: Do) -> Any:
            if call.method == "create" and call.key.startswith(keys.COMMITS) and not frozen:
                published(store, place / "newer", executions=3, saves=1)
                frozen.append(prune(store))
            return do()

        publisher = Bench(faulty(store, hook)).publisher(old)
        with pytest.raises(Fenced, match="sealed"):
            publisher.run()
        assert not publisher.unsure
        assert [item.prefix.split("/")[2] for item in frozen[0].litter] == ["stalled"]
        late = commits(store)[0]
        assert late.save == "stalled"
        assert listing.pruned(store, late)
        assert restored(store, place / "back") == "3.1"
        prune(store)
        assert "1.stalled" not in names(store)
        check_invariants(store)

    def test_a_manifest_that_lands_once_more_after_the_sweep_makes_no_damaged_save(
        self, store: Store, place: Path
    ) -> None:
        """A client had sent it twice. The publisher wakes, finds it, commits; the seal fences it, and readers pass."""
        old = Execution(place, 1)
        old.save("stalled", small("stalled"))
        woken: list[str] = []

        def hook(call: Call, do: Do) -> Any:
            if call.method == "read" and "/stalled/" in call.key and not woken:
                manifest = store.read(call.key).data
                published(store, place / "newer", executions=3, saves=1)
                prune(store)
                store.create(call.key, manifest)
                woken.append(call.key)
            return do()

        with pytest.raises(Fenced, match="sealed"):
            Bench(faulty(store, hook)).publisher(old).run()
        assert woken
        assert listing.pruned(store, commits(store)[0])
        prune(store)
        assert "1.stalled" not in names(store)
        check_invariants(store)

    def test_a_commit_that_landed_before_its_epoch_was_sealed_keeps_its_data(self, store: Store, place: Path) -> None:
        """Between the look at what is there and the seal: nothing that it names is deleted."""
        old = Execution(place, 1)
        old.save("late", small("late"))
        steps: list[str] = []

        def freeze(call: Call, do: Do) -> Any:
            if call.method == "create" and call.key.startswith(keys.COMMITS) and not steps:
                steps.append("frozen")
                published(store, place / "newer", executions=3, saves=1)
                todo = plan(store, newest=3, every=None, workers=1)
                assert len(todo.litter) == 1
                answer = do()
                carry_out(pruner(store), todo, lambda _: None)
                return answer
            return do()

        with pytest.raises(Fenced):
            Bench(faulty(store, freeze)).publisher(old).run()
        assert steps
        late = commits(store)[0]
        reader.verify(store, late, tick=lambda _: None, workers=1)
        assert not listing.pruned(store, late)

    def test_a_publisher_whose_data_was_swept_does_not_commit_it(self, store: Store, place: Path) -> None:
        """It fell asleep after the upload, and is fenced when it wakes: but even its look at the manifest says no."""
        old = Execution(place, 1)
        old.save("swept", small("swept"))

        def hook(call: Call, do: Do) -> Any:
            if call.method == "read" and "/swept/" in call.key and call.key.endswith(".json"):
                published(store, place / "newer", executions=3, saves=1)
                prune(store)
            return do()

        publisher = Bench(faulty(store, hook)).publisher(old)
        done = publisher.run()
        assert "should have sha256" in str(done.outcomes[0].error)
        assert not [record for record in commits(store) if record.save == "swept"]

    def test_a_pointer_write_that_was_on_its_way_does_not_land_after_it(self, store: Store, place: Path) -> None:
        execution = Execution(place, 1)
        pending: list[Callable[[], Any]] = []

        def hook(call: Call, do: Do) -> Any:
            if call.method == "replace" and not pending:
                pending.append(do)
                msg = "no answer (by the test)"
                raise StoreUnavailable(msg)
            return do()

        for step in range(1, 6):
            execution.save(f"step-{step}", small(step))
            Bench(faulty(store, hook) if step == 2 else store).publisher(execution).run()
        prune(store)
        with pytest.raises(Exception, match=r"latest\.json"):
            pending[0]()
        named = pointer.read(store)
        assert named is not None
        assert named.order == commits(store)[-1].order
        check_invariants(store)

    def test_a_pointer_that_lags_is_moved_before_anything_goes(self, store: Store, place: Path) -> None:
        def killed_before_the_pointer(call: Call, do: Do) -> Any:
            if call.key == keys.POINTER and len(commits(store)) == 4:
                raise KeyboardInterrupt
            return do()

        execution = Execution(place, 1)
        publisher = Bench(faulty(store, killed_before_the_pointer)).publisher(execution)
        for step in range(1, 4):
            execution.save(f"step-{step}", small(step))
        publisher.run()
        execution.save("step-4", small(4))
        with pytest.raises(KeyboardInterrupt):
            publisher.run()
        prune(store)
        named = pointer.read(store)
        assert named is not None
        assert named.save == "step-4"
        check_invariants(store)

    def test_it_stops_before_it_deletes_if_the_pointer_cannot_be_moved(self, store: Store, place: Path) -> None:
        published(store, place)
        first = commits(store)[0]
        document = store.read(keys.POINTER)
        store.replace(keys.POINTER, records.pointer_bytes(first), document.version)

        def stuck(call: Call, do: Do) -> Any:
            if call.method == "replace":
                msg = "not now (by the test)"
                raise StoreUnavailable(msg)
            return do()

        before = everything_in(store)
        with pytest.raises(OutcomeUnknown):
            prune(faulty(store, stuck))
        assert everything_in(store) == before

    def test_it_stops_if_a_pointer_that_nothing_can_move_names_what_would_go(self, store: Store, place: Path) -> None:
        published(store, place)
        document = store.read(keys.POINTER)
        store.replace(keys.POINTER, records.pointer_bytes(commits(store)[0]), document.version)
        before = everything_in(store)
        with pytest.raises(StoreTooWeak, match=r"latest\.json"):
            prune(store, weak=True, points=False)
        assert everything_in(store) == before

    def test_a_record_of_a_later_version_stops_it(self, store: Store, place: Path) -> None:
        published(store, place)
        store.put(f"commits/{9:020d}/0001.000001.{'a' * 12}.json", b'{"format":2}')
        before = everything_in(store)
        with pytest.raises(NewerFormat):
            prune(store)
        assert everything_in(store) == before

    @pytest.mark.parametrize("lost", ["pruned", "damaged"])
    def test_a_save_whose_copy_is_gone_is_published_anew_when_it_is_said_again(
        self, lost: str, store: Store, place: Path
    ) -> None:
        """Its content is that of the generation before, but the store has that no more."""
        execution = published(store, place, executions=1, saves=3)[0]
        first = commits(store)[0]
        if lost == "pruned":
            prune(store)
        else:
            store.delete(next(iter(store.list(first.parts[0].prefix))).key)
        execution.save("step-1", small("1.1"))
        assert Bench(store).run(execution) is None
        again = commits(store)[-1]
        assert (again.save, again.generation, again.content) == ("step-1", 2, first.content)
        assert restored(store, place / "back") == "1.1"

    def test_a_record_that_names_another_ones_data_takes_nothing_from_it(self, store: Store, place: Path) -> None:
        """No publisher writes such a record."""
        published(store, place)
        newest = commits(store)[-1]
        forged = replace(newest, order=replace(newest.order, epoch=5))
        store.create(forged.key, records.commit_bytes(forged))
        prune(store)
        assert restored(store, place / "back") == "3.3"


class TestBesideReaders:
    @pytest.mark.parametrize("at", ["manifest", "first file", "second file"])
    def test_a_restore_whose_save_is_pruned_under_it_takes_the_newest(self, at: str, place: Path) -> None:
        """And says nothing of damage, for there is none."""
        store = MemoryStore()
        published(store, place, executions=1, saves=1)
        streams: list[Call] = []

        def hook(call: Call, do: Do) -> Any:
            if call.method == "stream":
                streams.append(call)
            now = {"manifest": 0, "first file": 1, "second file": 2}[at]
            due = call.method == "read" and call.key.startswith("data/") if now == 0 else len(streams) == now
            if due and len(commits(store)) == 1:
                published(store, place / "newer", executions=3, saves=1)
                prune(store)
            return do()

        assert restored(faulty(store, hook), place / "back") == "3.1"
        assert [path.name for path in (place / "back").iterdir()] == ["step-1"]

    def test_damage_is_still_damage(self, store: Store, place: Path) -> None:
        published(store, place)
        prune(store)
        newest = commits(store)[-1]
        store.delete(next(iter(store.list(newest.parts[0].prefix))).key)
        said: list[str] = []
        assert restored(store, place / "back", lambda key, _: said.append(key)) == "3.2"
        assert said == [newest.key]


class TestKilled:
    """At every call of a prune: what was to stay is whole, and the next prune leaves what one prune would have left."""

    @staticmethod
    def prepared(store: Store, place: Path) -> None:
        TestLitter.killed_upload(store, Execution(place / "dead", 1), "lost", at="create")
        published(store, place)

    def outcome(self, store: Store) -> dict[str, set[str]]:
        kinds = ("commits/", "data/", "pruned/", "latest.json")
        # One more dead epoch may be sealed: what a killed prune left of a commit there is litter to the next.
        found = [key for key in everything_in(store) if key.startswith(kinds) and "sealed" not in key]
        nonces = [record.order.nonce for record in commits(store)]
        order = {nonce: str(number) for number, nonce in enumerate(dict.fromkeys(nonces))}
        plain = []
        for key in found:
            for nonce, number in order.items():
                key = key.replace(nonce, number)  # noqa: PLW2901 (which publisher, not its random mark)
            plain.append(key)
        return {kind: {key for key in plain if key.startswith(kind)} for kind in kinds}

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_at_every_call(self, when: str, place: Path) -> None:
        whole = MemoryStore()
        self.prepared(whole, place / "whole")
        watched = faulty(whole, through)
        prune(watched)
        expected, total = self.outcome(whole), len(watched.calls)
        assert total > 30
        for k in range(1, total + 1):
            store = MemoryStore()
            self.prepared(store, place / str(k))
            with pytest.raises(KeyboardInterrupt):
                prune(faulty(store, killed(k, when)))
            check_invariants(store)
            assert names(store)[-2:] == ["3.step-2", "3.step-3"]
            prune(store)
            assert self.outcome(store) == expected, f"killed {when} call {k}"

    def test_two_at_once_leave_what_one_would(self, place: Path) -> None:
        whole = MemoryStore()
        self.prepared(whole, place / "whole")
        prune(whole)
        store = MemoryStore()
        self.prepared(store, place / "both")
        together = threading.Barrier(2)
        failed: list[BaseException] = []

        def one() -> None:
            together.wait()
            try:
                prune(store)
            except AgentError as error:
                failed.append(error)

        threads = [threading.Thread(target=one) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert self.outcome(store) == self.outcome(whole)

    def test_a_store_that_lets_nothing_be_deleted_says_so_and_loses_nothing(self, store: Store, place: Path) -> None:
        published(store, place)

        def no_deletes(call: Call, do: Do) -> Any:
            if call.method == "delete":
                msg = "s3:DeleteObject is missing (by the test)"
                raise StoreDenied(msg)
            return do()

        with pytest.raises(StoreDenied):
            prune(faulty(store, no_deletes))
        check_invariants(store)
        prune(store)
        assert names(store) == ["3.step-2", "3.step-3"]


def killed(k: int, when: str) -> Hook:
    def hook(call: Call, do: Do) -> Any:
        if call.number == k and when == "before":
            raise KeyboardInterrupt
        answer = do()
        if call.number == k:
            raise KeyboardInterrupt
        return answer

    return hook
