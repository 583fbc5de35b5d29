"""All ranks of an execution resume from one save: two at once, with and without locks, call by call, whatever lands."""

from __future__ import annotations

import errno
import fcntl
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.protocol.checks import check_invariants, facts
from tests.protocol.faults import At, Call, Do, FakeClock, Hook, fails_before, faulty
from tests.protocol.jobs import Bench, Execution, small
from tests.protocol.test_faults_killed import files_of
from tests.protocol.test_two_publishers import every_k
from tests.protocol.writers import PROVED

from dispatch_agent.checkpoint import completion, resuming
from dispatch_agent.errors import OutcomeUnknown, StoreUnavailable
from dispatch_agent.logs import Log
from dispatch_agent.publish import keys, listing
from dispatch_agent.publish.initialise import Bounds, Init, Ready
from dispatch_agent.publish.start import Starter
from dispatch_agent.settings import PublishSettings
from dispatch_agent.store import kernel
from dispatch_agent.store.base import Store
from dispatch_agent.store.memory import MemoryStore
from dispatch_agent.support import Support


def rank_of(store: Store, execution: Execution, rank: int, lines: list[str] | None = None, **more: Any) -> Init:
    """One rank's init, in a pod of its own, in this process."""
    clock = FakeClock()
    starter = Starter(
        store=store,
        identity=execution.identity,
        folder=execution.folder,
        settings=PublishSettings(workers=1),
        rule=completion.parse_rule("marker"),
        rank=rank,
        clock=clock,
        log=Log((lines if lines is not None else []).append, clock, least="warning"),
        progress=lambda _save, _size: lambda _n: None,
        draw_nonce=lambda: secrets.token_hex(6),
        draw=lambda: 0.5,
        environ={},
        _found=PROVED,
    )
    init = Init(
        starter=starter,
        root=execution.root,
        pod=f"uid-{rank}",
        allow_rank_restart=False,
        fall_back=True,
        bounds=Bounds(60.0, 0.0, 600.0, 3600.0),
        bound=lambda _seconds: None,
    )
    return replace(init, **more)


def published(store: Store, execution: Execution, name: str) -> None:
    execution.save(name, small(name))
    assert Bench(store).run(execution) is None


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that has none, as some network and FUSE filesystems."""

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr(kernel, "lock_trust", lambda _: Support("unknown", "catalogue", "by the test"))


def at_once(
    place: Path, first: Callable[[Store, Execution], Ready], then: Callable[[Store, Execution], Any], k: int
) -> tuple[Execution, MemoryStore, Ready, list[Any]]:
    """Run `first` of execution 2, and all of `then` before its k-th call of the store."""
    before, real = Execution(place / str(k), 1), MemoryStore()
    published(real, before, "step-1")
    now = Execution(before.root, 2)
    answers: list[Any] = []

    def hook(call: Call, do: Do) -> Any:
        if call.number == k:
            answers.append(then(real, now))
        return do()

    return now, real, first(faulty(real, hook), now), answers


@pytest.mark.usefixtures("without_locks")
def test_two_ranks_that_no_lock_holds_off_resume_from_one_save(place: Path) -> None:
    def second(store: Store, now: Execution) -> Ready:
        late = Execution(now.root, 1)
        published(store, late, "step-2")  # what the first rank finds depends on when it looked
        return rank_of(store, now, 1).run()

    def run(k: int) -> bool:
        now, store, one, answers = at_once(place, lambda store, now: rank_of(store, now, 0).run(), second, k)
        for two in answers:
            assert (two.path, two.commit) == (one.path, one.commit), f"call {k}"
        assert one.path is not None
        assert files_of(one.path) == files_of(now.root / "exec" / "a1" / one.path.name), f"call {k}"
        there = [path.name for path in one.path.parent.iterdir() if not path.name.startswith(".")]
        assert there == [one.path.name], f"call {k}: a trainer finds {there}"
        check_invariants(store)
        return bool(answers)

    assert every_k(run) > 10


def test_what_lands_after_the_choice_changes_nothing(place: Path) -> None:
    chosen = set()

    def run(k: int) -> bool:
        def late(store: Store, now: Execution) -> None:
            published(store, Execution(now.root, 1), "step-2")

        now, store, one, reached = at_once(place, lambda store, now: rank_of(store, now, 0).run(), late, k)
        others = [rank_of(store, now, rank).run() for rank in (1, 2)]
        assert {(other.path, other.commit, other.led) for other in others} == {(one.path, one.commit, False)}
        assert one.path is not None
        chosen.add(one.path.name)
        return bool(reached)

    assert every_k(run) > 10
    assert chosen == {"step-1", "step-2"}, "the late save came on either side of the choice"


def test_a_choice_whose_save_is_damaged_is_followed_by_the_next_for_all(place: Path) -> None:
    """At every call: the newest save's data changes at the store."""

    def run(k: int) -> bool:
        def spoil(store: Store, _: Execution) -> None:
            newest = listing.read_commit(store, listing.all_orders(store)[-1])
            key = f"{newest.parts[0].prefix}/weights.dat"
            data = store.read(key).data
            store.put(key, data[:-1] + b"!")

        before = Execution(place / str(k), 1)
        real = MemoryStore()
        published(real, before, "step-1")
        published(real, before, "step-2")
        now, done = Execution(before.root, 2), []

        def hook(call: Call, do: Do) -> Any:
            if call.number == k:
                done.append(spoil(real, now))
            return do()

        one = rank_of(faulty(real, hook), now, 0).run()
        two = rank_of(real, now, 1).run()
        assert (two.path, two.commit) == (one.path, one.commit)
        assert one.path is not None
        assert files_of(one.path) == files_of(now.root / "exec" / "a1" / one.path.name), f"call {k}"
        numbers = [(choice.number, choice.bad) for choice in resuming.choices(now.folder)]
        assert numbers in ([(1, False)], [(1, True), (2, False)]), f"call {k}"
        assert (one.path.name == "step-1") == (len(numbers) == 2), f"call {k}"
        return bool(done)

    assert every_k(run) > 10


def test_every_call_may_fail_once_and_the_outcome_is_the_same(place: Path) -> None:
    def run(k: int) -> bool:
        before, real = Execution(place / str(k), 1), MemoryStore()
        published(real, before, "step-1")
        before.save("step-2", small("step-2"))
        reached: list[Call] = []
        fail: Hook = fails_before(At(k))

        def hook(call: Call, do: Do) -> Any:
            reached.extend([call] if call.number == k else [])
            return fail(call, do)

        got = rank_of(faulty(real, hook), Execution(before.root, 2), 0).run()
        assert got.path == before.root / "resume" / "a2" / "step-2", f"call {k}"
        assert files_of(got.path) == files_of(before.folder / "step-2")
        assert [save for save, *_ in facts(real)] == ["step-1", "step-2"]
        return bool(reached)

    assert every_k(run) > 15


def test_a_choice_that_is_pruned_before_it_is_here_is_no_damage(place: Path) -> None:
    before, real = Execution(place, 1), MemoryStore()
    published(real, before, "step-1")
    [order] = listing.all_orders(real)
    now, lines = Execution(place, 2), list[str]()

    def hook(call: Call, do: Do) -> Any:
        if call.method == "stream" and "step-1" in call.key and len(listing.all_orders(real)) == 1:
            published(real, before, "step-2")
            real.put(keys.tombstone_key(order), b"by the test")
            for item in list(real.list("data")):
                if "step-1" in item.key:
                    real.delete(item.key)
        return do()

    got = rank_of(faulty(real, hook), now, 0, lines, fall_back=False).run()
    assert got.path == place / "resume" / "a2" / "step-2"
    assert files_of(got.path) == files_of(before.folder / "step-2")
    assert [choice.bad for choice in resuming.choices(now.folder)] == [True, False]
    assert not [line for line in lines if "damaged" in line]
    assert [path.name for path in got.path.parent.iterdir()] == ["step-2"], "nothing is left of the other"


def test_nothing_is_chosen_while_an_older_commit_may_land(place: Path) -> None:
    before, real = Execution(place, 1), MemoryStore()
    published(real, before, "step-1")
    before.save("step-2", small("step-2"))

    def hook(call: Call, do: Do) -> Any:
        if call.key.startswith("commits/") and call.key.endswith(".json") and "0001.000002" in call.key:
            raise StoreUnavailable(call.key)
        return do()

    now = Execution(place, 2)
    with pytest.raises(OutcomeUnknown):
        rank_of(faulty(real, hook), now, 0).run()
    assert resuming.choices(now.folder) == []
    assert rank_of(real, now, 0).run().path == place / "resume" / "a2" / "step-2"


class TestAway:
    def test_a_restore_that_gets_further_each_time_has_new_patience(self, place: Path) -> None:
        """Outages that are each short enough, and too long together."""
        before, real = Execution(place, 1), MemoryStore()
        published(real, before, "step-1")
        before.save("step-2", {f"{number}": b"w" * 100 for number in range(8)})
        assert Bench(real).run(before) is None
        init = rank_of(real, Execution(place, 2), 0)
        clock = init.starter.clock
        assert isinstance(clock, FakeClock)
        got: set[str] = set()

        def hook(call: Call, do: Do) -> Any:
            if call.method == "stream" and call.key not in got:
                if clock.now < 1000 + 40 * (len(got) + 1):
                    raise StoreUnavailable(call.key)
                got.add(call.key)
            return do()

        starter = replace(init.starter, store=faulty(real, hook))
        ready = replace(init, starter=starter).run()
        assert ready.path == place / "resume" / "a2" / "step-2"
        assert clock.now > 1000 + 8 * 40 > 1000 + 60, "longer than a store may be away"

    def test_one_that_gets_no_further_ends(self, place: Path) -> None:
        before, real = Execution(place, 1), MemoryStore()
        published(real, before, "step-1")
        [order] = listing.all_orders(real)
        key = f"{listing.read_commit(real, order).parts[0].prefix}/inner/state.json"

        def hook(call: Call, do: Do) -> Any:
            if call.method == "stream" and call.key == key:
                raise StoreUnavailable(call.key)
            return do()

        init = rank_of(faulty(real, hook), Execution(place, 2), 0)
        with pytest.raises(StoreUnavailable):
            init.run()
        clock = init.starter.clock
        assert isinstance(clock, FakeClock)
        assert 60 < clock.now - 1000 < 200
        assert rank_of(real, Execution(place, 2), 0).run().path is not None
