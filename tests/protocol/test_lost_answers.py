"""Every call of a whole publication fails in every way: before it, after it, refused, slow, late, or for good.

The invariants hold at once, what was sent is found out (I8), and a later pass brings everything to its place (I9).
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.protocol.checks import check_invariants, commits, facts
from tests.protocol.faults import (
    WRITES,
    At,
    FakeClock,
    FaultyStore,
    Hook,
    TimeIsUp,
    fails_after,
    fails_before,
    faulty,
    lands_late,
    refuses,
    sent_twice,
    slow,
    through,
    unreachable_from,
)
from tests.protocol.jobs import Bench, Execution, small

from dispatch_agent.errors import DrainTimeout, OutcomeUnknown, StoreUnavailable
from dispatch_agent.logs import Log
from dispatch_agent.publish import oneshot
from dispatch_agent.publish.watcher import Stop, Tally
from dispatch_agent.store.base import Store
from dispatch_agent.store.memory import MemoryStore
from dispatch_agent.store.posix import PosixStore

FAULTS: dict[str, Callable[[At, FakeClock], Hook]] = {
    "fails before": lambda at, _: fails_before(at),
    "fails after": lambda at, _: fails_after(at),
    "sent twice": lambda at, _: sent_twice(at),
    "refused": lambda at, _: refuses(at),
    "slow": lambda at, clock: slow(at, clock, 30.0),
    "lands late": lambda at, _: lands_late(at),
}
OUTAGE = 15
"""Calls that fail in a row: more than any one step of the protocol tries again."""


@pytest.fixture(params=["memory", "folder"])
def fresh_store(request: pytest.FixtureRequest, place: Path) -> Callable[[], Store]:
    """Makes an empty destination each time that it is called."""
    made = iter(range(10_000))
    if request.param == "memory":
        return MemoryStore
    return lambda: PosixStore(place / "stores" / str(next(made)))


class Job:
    """Two saves, one of them of a single file, and then another content under the first one's name."""

    def __init__(self, store: Store, root: Path, hook: Hook = through, clock: FakeClock | None = None) -> None:
        self.real = store
        self.bench = Bench(faulty(store, hook), clock or FakeClock())
        self.execution = Execution(root, 7)

    @property
    def store(self) -> FaultyStore:
        assert isinstance(self.bench.store, FaultyStore)
        return self.bench.store

    def first(self) -> None:
        self.execution.save("step-1", small("one"))
        self.execution.save("best", b"best")

    def then(self) -> None:
        self.execution.save("step-1", small("two"))

    def play(self) -> None:
        self.first()
        assert self.bench.run(self.execution) is None
        self.then()
        assert self.bench.run(self.execution) is None

    def restart(self) -> None:
        """A fresh publisher on a store that answers again."""
        self.bench.store = self.real
        assert self.bench.run(self.execution) is None


def calls_of_one_run(store: Store, root: Path) -> int:
    job = Job(store, root)
    job.play()
    check_invariants(store)
    return len(job.store.calls)


def check_what_was_written(job: Job) -> None:
    """I1: only keys with its own nonce, its claims and the pointer; deleted is only what its own tries left."""
    writes = [call for call in job.store.calls if call.method in WRITES]
    own = "|".join(job.bench.nonces)
    allowed = re.compile(
        rf"claims/{1_000_007:020d}/(attempt|00000\.0001)\.json|data/{1_000_007:020d}-a7/[^/]+/00000\.({own})\.\d{{6}}[./].*"
        rf"|commits/{1_000_007:020d}/0001\.\d{{6}}\.({own})\.json|latest(\.json)?"
    )
    assert [call for call in writes if not allowed.fullmatch(call.key)] == []
    named = {part.prefix for record in commits(job.real) for part in record.parts}
    deleted = [call.key for call in writes if call.method == "delete"]
    assert [key for key in deleted if not key.startswith("data/")] == []
    assert [key for key in deleted if any(key.startswith(prefix) for prefix in named)] == []
    uploads = Counter(call.key for call in writes if call.method == "upload")
    assert max(uploads.values(), default=0) <= 1


@pytest.mark.parametrize("fault", FAULTS)
def test_i8_one_lost_answer_anywhere_loses_and_doubles_nothing(
    fault: str, fresh_store: Callable[[], Store], place: Path
) -> None:
    expected_store = fresh_store()
    total = calls_of_one_run(expected_store, place / "0")
    for k in range(1, total + 1):
        clock = FakeClock()
        job = Job(fresh_store(), place / str(k), FAULTS[fault](At(k), clock), clock)
        job.play()
        check_invariants(job.real)
        check_what_was_written(job)
        assert facts(job.real) == facts(expected_store), f"{fault} at call {k}"


@pytest.mark.parametrize("fault", ["fails before", "fails after"])
def test_i9_an_outage_anywhere_delays_and_a_fresh_pass_finishes(
    fault: str, fresh_store: Callable[[], Store], place: Path
) -> None:
    expected_store = fresh_store()
    total = calls_of_one_run(expected_store, place / "0")
    for k in range(1, total + 1):
        clock = FakeClock()
        job = Job(fresh_store(), place / str(k), FAULTS[fault](At(k, OUTAGE), clock), clock)
        job.play()
        check_invariants(job.real, pointer_is_current=False)
        check_what_was_written(job)
        assert facts(job.real) == facts(expected_store), f"{fault} from call {k} on"
        job.restart()
        check_invariants(job.real)
        assert facts(job.real) == facts(expected_store), f"restarted after: {fault} from call {k} on"


@pytest.mark.parametrize("last", ["lost", "never"])
def test_i8_a_store_that_stays_away_is_exit_33_only_if_a_commit_was_sent(
    last: str, fresh_store: Callable[[], Store], place: Path
) -> None:
    total = calls_of_one_run(fresh_store(), place / "0")
    unknown = 0
    for k in range(1, total + 1):
        job = Job(fresh_store(), place / str(k), unreachable_from(k, last=last), FakeClock(limit=1200.0))
        job.first()
        tally = Tally()
        with contextlib.suppress(TimeIsUp, StoreUnavailable):  # a start that gives up ends with the store's own error
            job.bench.loop(lambda job=job: job.bench.publisher(job.execution), tally, Stop(), once=True)
        sent = any(c.method == "create" and c.key.startswith("commits/") for c in job.store.calls if c.number >= k)
        verdict = tally.verdict(asked=True)
        if sent:
            assert isinstance(verdict, OutcomeUnknown), f"call {k}: {verdict}"
        else:
            assert verdict is None or isinstance(verdict, DrainTimeout), f"call {k}: {verdict}"
            assert verdict is not None or len(commits(job.real)) == 2, f"call {k}: not all is published"
        unknown += sent
        check_invariants(job.real, pointer_is_current=False)
        job.bench.clock = FakeClock()
        job.restart()
        check_invariants(job.real)
        assert [(r.save, r.order.ordinal) for r in commits(job.real)] == [("step-1", 1), ("best", 2)]
    assert unknown == 2


@pytest.mark.parametrize("last", ["lost", "never"])
def test_i8_a_one_shot_whose_commit_stays_unknown_says_so(last: str, place: Path) -> None:
    """Exit 33, not 10: somebody who reads 10 believes that nothing was published."""
    total = calls_of_one_run(MemoryStore(), place / "0")
    unknown = 0
    for k in range(1, total + 1):
        job = Job(MemoryStore(), place / str(k), unreachable_from(k, last=last), FakeClock(limit=1200.0))
        job.first()
        error = one_shot(job, timeout=60.0)
        sent = any(c.method == "create" and c.key.startswith("commits/") for c in job.store.calls if c.number >= k)
        assert isinstance(error, OutcomeUnknown) == sent, f"call {k}: {error!r}"
        unknown += sent
        job.restart()
        check_invariants(job.real)
    assert unknown == 1


def one_shot(job: Job, timeout: float) -> Exception | None:
    try:
        oneshot.publish_one(
            lambda: job.bench.publisher(job.execution),
            job.bench.store,
            job.execution.folder,
            b"step-1",
            job.bench.clock,
            Log(job.bench.lines.append, job.bench.clock),
            epoch=job.execution.epoch,
            timeout=timeout,
            stood=True,
        )
    except (OutcomeUnknown, StoreUnavailable) as error:
        return error
    return None
