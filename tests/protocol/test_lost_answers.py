"""Every call of a whole publication fails in every way: before it, after it, refused, slow, late, or for good.

The invariants hold at once, what was sent is found out (I8), and a later pass brings everything to its place (I9).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.protocol.checks import commits, facts
from tests.protocol.faults import FAULTS, PASSING, At, FakeClock, TimeIsUp, denied, unreachable_from
from tests.protocol.stories import Story, codes

from dispatch_agent.errors import DrainTimeout, OutcomeUnknown, StoreDenied, StoreUnavailable
from dispatch_agent.publish.watcher import Stop, Tally
from dispatch_agent.store.base import Store

OUTAGE = 15
"""Calls that fail in a row: more than any one step of the protocol tries again."""
FOR_GOOD = 10**9


def calls_of_one_run(store: Store, root: Path) -> int:
    story = Story(store, root)
    assert story.play() == [None, None]
    story.check()
    return len(story.store.calls)


@pytest.mark.parametrize("fault", PASSING)
def test_i8_one_fault_anywhere_loses_and_doubles_nothing(
    fault: str, fresh_store: Callable[[], Store], place: Path
) -> None:
    expected_store = fresh_store()
    total = calls_of_one_run(expected_store, place / "0")
    for k in range(1, total + 1):
        clock, real = FakeClock(), fresh_store()
        story = Story(real, place / str(k), FAULTS[fault](At(k), clock, real), clock)
        assert story.play() == [None, None], f"{fault} at call {k}"
        story.check()
        assert facts(real) == facts(expected_store), f"{fault} at call {k}"


@pytest.mark.parametrize("fault", ["fails before", "fails after"])
def test_i9_an_outage_anywhere_delays_and_a_fresh_pass_finishes(
    fault: str, fresh_store: Callable[[], Store], place: Path
) -> None:
    expected_store = fresh_store()
    total = calls_of_one_run(expected_store, place / "0")
    for k in range(1, total + 1):
        clock, real = FakeClock(), fresh_store()
        story = Story(real, place / str(k), FAULTS[fault](At(k, OUTAGE), clock, real), clock)
        ends = story.play()
        story.check(pointer_is_current=False)
        assert ends == [None, None], f"{fault} from call {k} on"
        assert facts(real) == facts(expected_store), f"{fault} from call {k} on"
        story.restart()
        story.check()
        assert facts(real) == facts(expected_store), f"restarted after: {fault} from call {k} on"


@pytest.mark.parametrize("last", ["lost", "never"])
def test_i8_a_store_that_stays_away_is_exit_33_only_if_a_commit_was_sent(
    last: str, fresh_store: Callable[[], Store], place: Path
) -> None:
    once = Story(fresh_store(), place / "0")
    once.first()
    assert once.watch() is None
    unknown = 0
    for k in range(1, len(once.store.calls) + 1):
        story = Story(fresh_store(), place / str(k), unreachable_from(k, last=last), FakeClock(limit=1200.0))
        story.first()
        tally = Tally()
        with contextlib.suppress(TimeIsUp, StoreUnavailable):  # a start that gives up ends with the store's own error
            story.bench.loop(lambda story=story: story.bench.publisher(story.execution), tally, Stop(), once=True)
        sent = bool(story.settling(since=k))
        verdict = tally.verdict(asked=True)
        if sent:
            assert isinstance(verdict, OutcomeUnknown), f"call {k}: {verdict}"
        else:
            assert verdict is None or isinstance(verdict, DrainTimeout), f"call {k}: {verdict}"
            assert verdict is not None or len(commits(story.real)) == 2, f"call {k}: not all is published"
        unknown += sent
        story.check(pointer_is_current=False)
        story.restart()
        story.check()
        assert [(r.save, r.order.ordinal) for r in commits(story.real)] == [("step-1", 1), ("best", 2)]
    assert unknown == len(once.settling())


def test_i9_credentials_that_expire_once_end_a_start_with_11_and_later_nothing(
    fresh_store: Callable[[], Store], place: Path
) -> None:
    expected_store = fresh_store()
    total = calls_of_one_run(expected_store, place / "0")
    for k in range(1, total + 1):
        story = Story(fresh_store(), place / str(k), denied(At(k)))
        ends = story.play()
        this_start = itertools.takewhile(
            lambda call: not call.key.endswith("/attempt.json"), reversed(story.store.calls[: k - 1])
        )
        sending = any(call.method == "upload" for call in this_start)
        assert set(codes(ends)) <= ({0} if sending else {0, 11}), f"call {k}: {ends}"
        story.check(pointer_is_current=False)
        story.restart()
        story.check()
        assert facts(story.real) == facts(expected_store), f"denied at call {k}"


def test_i8_credentials_that_stay_expired_end_in_11_or_in_33_if_a_commit_was_sent(
    fresh_store: Callable[[], Store], place: Path
) -> None:
    expected_store = fresh_store()
    total = calls_of_one_run(expected_store, place / "0")
    for k in range(1, total + 1):
        story = Story(fresh_store(), place / str(k), denied(At(k, FOR_GOOD)))
        ends = story.play()
        story.check(pointer_is_current=False)
        (end,) = set(codes(ends)) - {0} or {0}
        if story.settling(since=k):
            assert end == OutcomeUnknown.exit_code, f"call {k}: {ends}"
        elif end == 0:
            assert len(commits(story.real)) == len(commits(expected_store)), f"call {k}: {ends}"
        else:
            assert end == StoreDenied.exit_code, f"call {k}: {ends}"
        story.restart()
        story.check()
        assert facts(story.real) == facts(expected_store), f"denied from call {k} on"
