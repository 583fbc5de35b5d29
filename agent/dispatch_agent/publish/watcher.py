"""The loop of `publish watch`: wake, pass, report, wait; drain when told to end. The only broad except, and it counts.

An event only wakes the loop. Every pass is the same, and one that fails is tried again with growing pauses: a sidecar
that gives up is worse than a store that comes back.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dispatch_agent.checkpoint.save import Settling
from dispatch_agent.clock import Clock
from dispatch_agent.errors import (
    AgentError,
    CommitError,
    DrainTimeout,
    Fenced,
    Incomplete,
    NothingPublished,
    OutcomeUnknown,
    Refused,
    SettingsError,
    StoreError,
    StoreTooWeak,
)
from dispatch_agent.logs import Level, Log
from dispatch_agent.publish.publisher import Outcome, Pass, Publisher, StandBy, certain
from dispatch_agent.publish.records import CommitRecord

BACKOFF_FIRST, BACKOFF_LONGEST = 0.5, 30.0
"""Seconds between two passes that failed as a whole."""
REST_LONGEST = 1.0
"""Seconds: after a pass, its own duration again, so that a trainer that writes all the time costs us half a core at
most."""
BUSY = 2.0
"""Seconds between two looks at whether another publisher still has the folder."""


class Abort(BaseException):
    """End now, whatever is under way. Not an Exception: nothing on the way may take it for a failure to mend."""


@contextmanager
def kept() -> Iterator[None]:
    """Abort stays Abort: raised by a signal inside the code of a lock, it makes that raise something else instead."""
    try:
        yield
    except Exception as error:
        before = error.__context__
        while before is not None and not isinstance(before, Abort):
            before = before.__context__
        if before is None:
            raise
        raise Abort from error


@dataclass(frozen=True, slots=True)
class Stop:
    """What the outside tells the loop. `wake`: look now. `drain`: finish what is complete, then end."""

    wake: threading.Event = field(default_factory=threading.Event)
    drain: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        """Tell the loop to drain."""
        self.drain.set()
        self.wake.set()


@dataclass(slots=True)
class Tally:
    """Counted over the life of one watch, so that a silent stop cannot hide.

    `published` and `already` are what this watch did; `stand` are the saves whose newest content is published, by it or
    before; `incomplete` and `unpublished` are what the last pass left. `outcomes`, where asked for, are the last of
    every place by its ordinal: for a watch that lasts they would be many. `claimed`: a publisher has the folder.
    `failure`, `standing_by`: why the last pass failed or found nothing to do yet; empty once one did not. `pass_began`
    (monotonic seconds): None between two passes. `newest`: what was committed last, if anything was.
    """

    passes: int = 0
    failed_passes: int = 0
    seen: int = 0
    published: int = 0
    already: int = 0
    stand: int = 0
    outcomes: dict[int, Outcome] | None = None
    incomplete: tuple[tuple[str, Settling], ...] = ()
    unpublished: tuple[str, ...] = ()
    unsure: bool = False
    under_way: bool = False
    fenced: Fenced | None = None
    claimed: bool = False
    failure: str = ""
    standing_by: str = ""
    pass_began: float | None = None
    newest: CommitRecord | None = None

    def stands_by(self, reason: str) -> None:
        """A pass found that there is nothing to do yet."""
        self.under_way, self.claimed, self.pass_began = False, False, None
        self.failure, self.standing_by = "", reason

    def verdict(self, *, asked: bool) -> AgentError | None:
        """What the watch ends with: None, or the first that applies. `asked`: it was told to end."""
        if self.unsure:
            return OutcomeUnknown(
                "a commit was sent and could not be read back; it may have landed: start a publisher on this folder "
                "again"
            )
        if self.fenced:
            return self.fenced
        if self.unpublished or self.under_way:
            left = ", ".join(self.unpublished) or "what the last pass was at"
            return DrainTimeout(
                f"left unpublished at the end: {left}; a later publisher on this folder goes on with it as long as no "
                f"newer epoch has published"
            )
        if not asked and self.seen and not self.published + self.already + self.stand:
            return NothingPublished(
                f"saw {self.seen} save(s) and published none; see the reasons above, and choose a rule with --complete"
            )
        return None


@kept()
def watch(
    start: Callable[[], Publisher],
    stop: Stop,
    tally: Tally,
    clock: Clock,
    log: Log,
    *,
    rescan: float,
    once: bool,
    start_timeout: float,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Publish until told to drain or, with `once`, until nothing more is to be done. `tally` holds what happened.

    `start` claims; it raises StandBy as long as there is nothing to do, and is tried again for `start_timeout` seconds
    while the store does not answer. `rescan` is the longest time, in seconds, between two looks. `after` is called
    after every pass that did not fail. Raises EpochCollision, Conflict, StoreTooWeak, SettingsError; Fenced is in the
    tally; a StoreError only from the start.
    """
    publisher: Publisher | None = None
    pause = BACKOFF_FIRST
    give_up = clock.monotonic() + start_timeout
    while True:
        stop.wake.clear()
        began = clock.monotonic()
        ending = once or stop.drain.is_set()
        tally.under_way, tally.pass_began = True, began
        try:
            with kept():
                publisher = publisher or start()
                tally.claimed = True
                done = publisher.run()
            tally.under_way = False
            pause, next_look = BACKOFF_FIRST, done.again_in
            _count(tally, done, publisher)
            last = ending and next_look is None and not publisher.unsure and done.unpublished == done.hopeless
            _report(log, done, last=last)
            after()
            if last:
                return
        except Fenced as fenced:
            tally.fenced, tally.pass_began = fenced, None
            _count_left(tally, publisher)
            return
        except StandBy as reason:
            tally.stands_by(str(reason))
            log.once("warning", str(reason), "standing by", reason=str(reason))
            if publisher is None and stop.drain.is_set():
                return
            if once and clock.monotonic() >= give_up:
                msg = f"{reason}; gave up after {start_timeout:g} s"
                raise Incomplete(msg) from None
            publisher, next_look = None, BUSY
        except (SettingsError, StoreTooWeak, Refused):
            raise
        except Abort:
            _count_left(tally, publisher)
            raise
        except Exception as error:  # noqa: BLE001 (the only one: it counts, and a sidecar goes on)
            if _ends(error, started=publisher is not None, once=once, late=clock.monotonic() >= give_up):
                raise certain(error, publisher) from error.__cause__
            _count_failure(tally, error, publisher, log)
            # No event helps a store that is away; only being told to end makes it worth trying sooner.
            draining = stop.drain.is_set()
            clock.wait(threading.Event() if draining else stop.drain, min(pause, BUSY) if draining else pause)
            pause = min(BACKOFF_LONGEST, pause * 2)
            continue
        clock.wait(stop.drain, min(REST_LONGEST, clock.monotonic() - began))
        clock.wait(stop.wake, rescan if next_look is None else min(rescan, next_look))


@kept()
def stand_aside(stop: Stop, tally: Tally, clock: Clock, log: Log) -> None:
    """A fenced sidecar says so once and waits to be told to end: one that exits is only restarted."""
    log.error("fenced", error=str(tally.fenced))
    while not stop.drain.is_set():
        clock.wait(stop.drain, 3600.0)


def _ends(error: Exception, *, started: bool, once: bool, late: bool) -> bool:
    """Whether to end on this error instead of trying again."""
    retryable = isinstance(error, AgentError) and error.retryable
    if isinstance(error, CommitError) and not retryable:
        return True
    if started:
        return once and late and not retryable
    return late or (isinstance(error, StoreError) and not retryable)


def _count(tally: Tally, done: Pass, publisher: Publisher) -> None:
    tally.passes += 1
    tally.seen = max(tally.seen, done.seen)
    tally.stand = done.stand
    tally.published += sum(outcome.result == "published" for outcome in done.outcomes)
    tally.already += sum(outcome.result == "already" for outcome in done.outcomes)
    if tally.outcomes is not None:
        tally.outcomes |= {outcome.ordinal: outcome for outcome in done.outcomes}
    tally.incomplete = done.waiting
    tally.unpublished = done.unpublished
    tally.unsure = publisher.unsure
    tally.failure, tally.standing_by, tally.pass_began = "", "", None
    tally.newest = max(
        (outcome.record for outcome in done.outcomes if outcome.record is not None),
        key=lambda record: record.order,
        default=tally.newest,
    )


def _count_left(tally: Tally, publisher: Publisher | None) -> None:
    if publisher is not None:
        tally.unpublished, tally.unsure = publisher.left, publisher.unsure


def _count_failure(tally: Tally, error: Exception, publisher: Publisher | None, log: Log) -> None:
    tally.failed_passes += 1
    tally.failure, tally.standing_by, tally.pass_began = str(error), "", None
    tally.unsure = publisher is not None and publisher.unsure
    trace = None if isinstance(error, (AgentError, OSError)) else _trace(error)
    log.error("pass failed", error=str(error), kind=type(error).__name__, trace=trace)


def _report(log: Log, done: Pass, *, last: bool) -> None:
    for save, verdict in done.waiting:
        level: Level = "warning" if verdict.stuck or last else "debug"
        event = "left incomplete" if last else "waiting"
        log.once(level, f"{save}: {verdict.reason}", event, save=save, reason=verdict.reason)


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))
