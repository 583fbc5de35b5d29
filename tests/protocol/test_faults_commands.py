"""Every command but `watch` with every fault at every call: what each ends with, and what the next one finds.

Covered, at every call, on a folder and in memory: `publish publish`, `recover` and `prune` x FAULTS; `restore` x
(the FAULTS of a call that writes nothing, READER_FAULTS). `watch` has test_lost_answers.py; death at every call
test_kill.py (watch), test_recover.py, test_prune.py, and test_faults_killed.py (publish, restore).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.protocol.checks import check_invariants, commits, facts
from tests.protocol.faults import (
    FAULTS,
    PASSING,
    READER_FAULTS,
    At,
    Call,
    Dead,
    Do,
    FakeClock,
    Hook,
    denied,
    faulty,
    unreachable_from,
)
from tests.protocol.jobs import Bench, Execution, small
from tests.protocol.stories import Story, codes, ended, prune
from tests.protocol.test_recover import Recovery, owned

from dispatch_agent.errors import AgentError, Incomplete, IntegrityError, OutcomeUnknown, StoreDenied, StoreUnavailable
from dispatch_agent.publish import pointer, reader, restore
from dispatch_agent.publish.once import Patience
from dispatch_agent.publish.oneshot import Outcome
from dispatch_agent.publish.recover import verdict
from dispatch_agent.store.base import Store
from dispatch_agent.store.posix import PosixStore

FOR_GOOD = 10**9


# --- publish publish --------------------------------------------------------------------------------------------------


def played(real: Store, root: Path, hook: Callable[[FakeClock], Hook]) -> tuple[Story, AgentError | Outcome]:
    """The one-shot of the first save, a second one standing beside it."""
    clock = FakeClock()
    story = Story(real, root, hook(clock), clock)
    story.first()
    return story, story.publish()


def every_call(real: Store, root: Path) -> Iterator[int]:
    """The numbers of the calls of a one-shot to which nothing happens."""
    story, got = played(real, root, lambda _: lambda _call, do: do())
    assert isinstance(got, Outcome)
    story.check()
    shutil.rmtree(root)
    return iter(range(1, len(story.store.calls) + 1))


def check_that_a_fresh_publisher_finishes(story: Story, what: str) -> None:
    story.check(pointer_is_current=False)
    story.restart()
    story.check()
    assert [(save, ordinal) for save, _, _, _, _, ordinal in facts(story.real)] == [("step-1", 1), ("best", 2)], what


@pytest.mark.parametrize("fault", PASSING)
def test_i9_a_one_shot_rides_out_one_fault_anywhere(fault: str, fresh_store: Callable[[], Store], place: Path) -> None:
    for k in every_call(fresh_store(), place / "0"):
        real = fresh_store()
        story, got = played(real, place / str(k), lambda clock, k=k, real=real: FAULTS[fault](At(k), clock, real))
        assert isinstance(got, Outcome), f"{fault} at call {k}: {got!r}"
        assert [record.save for record in commits(real)] == ["step-1"], f"{fault} at call {k}"
        check_that_a_fresh_publisher_finishes(story, f"{fault} at call {k}")


@pytest.mark.parametrize("last", ["lost", "never"])
def test_i8_a_one_shot_whose_commit_stays_unknown_says_so(
    last: str, fresh_store: Callable[[], Store], place: Path
) -> None:
    """Exit 33, not 10: somebody who reads 10 believes that nothing was published."""
    for k in every_call(fresh_store(), place / "0"):
        story, got = played(fresh_store(), place / str(k), lambda _, k=k: unreachable_from(k, last=last))
        if story.settling(since=k):
            assert isinstance(got, OutcomeUnknown), f"call {k}: {got!r}"
        else:
            assert isinstance(got, StoreUnavailable | Outcome), f"call {k}: {got!r}"
            assert isinstance(got, Outcome) == bool(commits(story.real)), f"call {k}: {got!r}"
        check_that_a_fresh_publisher_finishes(story, f"{last} from call {k} on")


@pytest.mark.parametrize("more", [0, FOR_GOOD], ids=["once", "for good"])
def test_i8_a_one_shot_whose_credentials_expire_says_11_or_that_a_commit_may_stand(
    more: int, fresh_store: Callable[[], Store], place: Path
) -> None:
    for k in every_call(fresh_store(), place / "0"):
        story, got = played(fresh_store(), place / str(k), lambda _, k=k: denied(At(k, more)))
        if isinstance(got, Outcome):
            assert commits(story.real), f"call {k}: said to be published, and is not"
        elif k in story.settling():
            assert isinstance(got, OutcomeUnknown), f"call {k}: {got!r}"
        else:
            assert isinstance(got, StoreDenied), f"call {k}: {got!r}"
            assert not commits(story.real), f"call {k}: published, and said to be denied"
        check_that_a_fresh_publisher_finishes(story, f"denied from call {k} on")


# --- restore ----------------------------------------------------------------------------------------------------------

OLD, NEW = small("old") | {"empty": b""}, small("new") | {"empty": b""}


def restored(store: Store, target: Path) -> tuple[dict[str, bytes] | AgentError, list[str]]:
    """The files that `restore` brought, or what it ended with; and the commits that it called damaged."""
    damaged: list[str] = []
    try:
        got = restore.restore_newest(
            store,
            target,
            save=None,
            fall_back=True,
            progress=lambda _save, _size: lambda _n: None,
            damaged=lambda key, _why: damaged.append(key),
            workers=1,
        )
    except AgentError as error:
        return error, damaged
    return {str(p.relative_to(got.path)): p.read_bytes() for p in got.path.rglob("*") if p.is_file()}, damaged


@pytest.fixture
def two_saves(fresh_store: Callable[[], Store], place: Path) -> Store:
    """A destination with an older and a newer save."""
    store, execution = fresh_store(), Execution(place / "job", 1)
    for name, files in (("step-1", OLD), ("step-2", NEW)):
        execution.save(name, files)
        assert Bench(store).run(execution) is None
    return store


READING = {
    **{
        name: lambda at, real, name=name: FAULTS[name](at, FakeClock(), real)
        for name in ("fails before", "fails after", "denied", "hangs after")
    },
    **{name: lambda at, _real, name=name: READER_FAULTS[name](at) for name in READER_FAULTS},
}


@pytest.mark.parametrize("more", [0, FOR_GOOD], ids=["once", "for good"])
@pytest.mark.parametrize("fault", READING)
def test_i7_a_reader_has_the_right_bytes_or_says_why_whatever_a_call_answers(
    fault: str, more: int, two_saves: Store, place: Path
) -> None:
    """The newest; or, its damage having been said, the one before; or an error that says which. Then all is well."""
    counted = faulty(two_saves)
    assert restored(counted, place / "0") == (NEW, [])
    assert len(counted.calls) >= 8
    told = {"fails before": StoreUnavailable, "fails after": StoreUnavailable, "hangs after": StoreUnavailable}
    for k in range(1, len(counted.calls) + 1):
        what, target = f"{fault} at call {counted.calls[k - 1]}", place / str(k)
        got, damaged = restored(faulty(two_saves, READING[fault](At(k, more), two_saves)), target)
        if fault in READER_FAULTS:
            assert got in (NEW, OLD) or isinstance(got, IntegrityError | Incomplete), f"{what}: {got!r}"
            assert got != OLD or damaged or "folders" in what or "list:commits" in what, f"{what}: a silent step back"
        else:
            assert isinstance(got, told.get(fault, StoreDenied)), f"{what}: {got!r}"
            assert damaged == [], f"{what}: what cannot be reached is not damaged"
        there = [path.name for path in target.iterdir() if not path.name.startswith(".")] if target.exists() else []
        assert there == ([] if isinstance(got, AgentError) else ["step-2" if got == NEW else "step-1"]), what
        assert restored(two_saves, target) == (NEW, []), f"the next one, after: {what}"
        shutil.rmtree(target)


# --- recover ----------------------------------------------------------------------------------------------------------


def abandoned(root: Path) -> None:
    """An older execution's folder with two complete saves, of which its publisher did nothing but claim."""
    old = owned(Execution(root, 7))
    old.save("step-1", small("one"))
    old.save("best", b"best")


def recovers(store: Store, root: Path, clock: FakeClock) -> AgentError | None:
    return ended(lambda: verdict(Recovery(store, root, clock=clock).run().values()))


@pytest.mark.parametrize("fault", FAULTS)
def test_i9_a_recovery_rides_out_one_fault_anywhere(fault: str, fresh_store: Callable[[], Store], place: Path) -> None:
    """Credentials that expired end it, as soon as they have: the next one finishes."""
    expected_store = fresh_store()
    abandoned(place / "0")
    counted = faulty(expected_store)
    assert recovers(counted, place / "0", FakeClock()) is None
    assert len(facts(expected_store)) == 2
    for k in range(1, len(counted.calls) + 1):
        what, clock, real = f"{fault} at call {k}", FakeClock(), fresh_store()
        abandoned(place / str(k))
        error = recovers(faulty(real, FAULTS[fault](At(k), clock, real)), place / str(k), clock)
        check_invariants(real, pointer_is_current=False)
        if fault != "denied":
            assert error is None, f"{what}: {error!r}"
            assert facts(real) == facts(expected_store), what
        else:
            assert isinstance(error, StoreDenied | OutcomeUnknown | None), f"{what}: {error!r}"
        assert recovers(real, place / str(k), FakeClock()) is None, what
        assert facts(real) == facts(expected_store), what
        check_invariants(real)


# --- prune ------------------------------------------------------------------------------------------------------------

ENDS = {
    "denied": {0, 11},
    "fails before": {0, 10},
    "fails after": {0, 10},
    "hangs before": {0, 10},
    "hangs after": {0, 10},
}


def full(store: Store, root: Path) -> Store:
    """Three executions' saves, and what a killed upload of the first one left."""
    first = Execution(root, 1)
    first.save("lost", small("lost"))
    with contextlib.suppress(Dead):
        Bench(faulty(store, dies_at_the_commit)).run(first)
    for number, saves in ((2, 1), (3, 2)):
        execution = Execution(root, number)
        for step in range(saves):
            execution.save(f"step-{step}", small(f"{number}.{step}"))
        assert Bench(store).run(execution) is None
    return store


def dies_at_the_commit(call: Call, do: Do) -> object:
    if call.key.startswith("commits/"):
        raise Dead
    return do()


def copy_of(store: Store, fresh: Store) -> Store:
    """The same objects in a fresh store."""
    for item in store.list(""):
        fresh.put(item.key, store.read(item.key).data)
    if isinstance(store, PosixStore) and isinstance(fresh, PosixStore):
        pointer.link(fresh, Patience(FakeClock(), lambda: 0.5))
    return fresh


@pytest.mark.parametrize("fault", FAULTS)
def test_i6_a_prune_in_which_anything_fails_once_is_finished_by_the_next(
    fault: str, fresh_store: Callable[[], Store], place: Path
) -> None:
    origin = full(fresh_store(), place / "job")
    whole = copy_of(origin, fresh_store())
    counted = faulty(whole)
    assert prune(counted) is None
    expected = {item.key for item in whole.list("")}
    assert len(expected) < len([*origin.list("")])
    for k in range(1, len(counted.calls) + 1):
        what, clock, real = f"{fault} at {counted.calls[k - 1]}", FakeClock(), copy_of(origin, fresh_store())
        error = prune(faulty(real, FAULTS[fault](At(k), clock, real)), clock)
        assert set(codes([error])) <= ({0, 11} if fault == "denied" else {0, 10}), f"{what}: {error!r}"
        check_invariants(real)
        assert [item.record.save for item in reader.published(real) if item.record][:2] == ["step-1", "step-0"], what
        assert prune(real) is None, what
        check_invariants(real)
        # One more dead epoch may be sealed: what the first one left of a commit there is litter to the next.
        assert {item.key for item in real.list("") if not item.key.endswith("/sealed.json")} == {
            key for key in expected if not key.endswith("/sealed.json")
        }, what
