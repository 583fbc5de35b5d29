"""One publisher start on one folder: look, judge, place, publish in order. Every pass is the same.

All state is derived from the folder and the store: what this object remembers only spares work. A publisher that is
killed at any instant and started again goes on where the folder and the store say it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dispatch_agent.checkpoint import folder as bookkeeping
from dispatch_agent.checkpoint import names
from dispatch_agent.checkpoint.folder import Place
from dispatch_agent.checkpoint.save import Settling
from dispatch_agent.clock import Clock
from dispatch_agent.errors import (
    CommitError,
    Conflict,
    Fenced,
    IntegrityError,
    OutcomeUnknown,
    SaveError,
    SourceChanged,
    StoreDenied,
    StoreError,
)
from dispatch_agent.identity import Identity
from dispatch_agent.logs import Level, Log
from dispatch_agent.publish import listing, publication
from dispatch_agent.publish.claims import check_fence, check_job, claim
from dispatch_agent.publish.following import Follower
from dispatch_agent.publish.keys import Order
from dispatch_agent.publish.once import Patience
from dispatch_agent.publish.parallel import Tick
from dispatch_agent.publish.placing import Placer, Rule
from dispatch_agent.publish.publication import Placed, Previous, Session
from dispatch_agent.publish.records import CommitRecord
from dispatch_agent.store.base import Store

RETRY_FIRST, RETRY_LONGEST = 1.0, 60.0
"""Seconds between two tries at a save that itself is the trouble (unreadable, a link that leaves it)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one placed save in one pass."""

    save: str
    ordinal: int
    result: Literal["published", "already", "failed"]
    record: CommitRecord | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass: what was seen, what was done, what is left.

    `stand` counts the seen saves whose newest generation is published, now or before. `hopeless` are those of
    `unpublished` that no time will mend, only a change of the save. `again_in` (seconds) is when a further pass may
    differ; None if only a change can make it.
    """

    seen: int
    complete: int
    stand: int
    waiting: tuple[tuple[str, Settling], ...]
    outcomes: tuple[Outcome, ...]
    unpublished: tuple[str, ...]
    hopeless: tuple[str, ...]
    again_in: float | None


def open_session(
    store: Store,
    identity: Identity,
    folder: Path,
    *,
    rank: int,
    weak: bool,
    in_place: bool,
    workers: int,
    name: str,
    nonce: str,
    clock: Clock,
    patience: Patience,
) -> Session:
    """Mark the folder as the execution's, claim the epoch and the folder's term.

    Raises EpochCollision or Conflict (another job's destination) before anything else is written, Fenced, StoreError,
    AgentError (the folder cannot be written, or is another execution's).
    """
    execution = bookkeeping.ensure(
        folder, job=identity.job_id or "", epoch=identity.epoch, attempt=identity.attempt, folder_id=nonce
    )
    check_job(store, execution.job, identity.epoch)
    mine = claim(
        store,
        identity.epoch,
        identity.attempt,
        rank,
        execution.folder_id,
        publisher=name,
        at=clock.wall(),
        weak=weak,
        patience=patience,
    )
    check_fence(store, mine)
    return Session(
        store=store,
        claim=mine,
        job=identity.job_id or "",
        folder=folder,
        name=name,
        nonce=nonce,
        weak=weak,
        in_place=in_place,
        workers=workers,
        clock=clock,
        patience=patience,
    )


@dataclass(frozen=True, slots=True)
class _Tried:
    """How often a place failed, when it may be tried again (monotonic seconds), and whether time can help."""

    count: int
    not_before: float
    hopeless: bool


_NO_TRY = _Tried(0, 0.0, False)


class StandBy(Exception):
    """Not now: the folder is missing, another publisher has it, or it is another folder than the one that was claimed.

    The text says which. Start anew, and again, until there is something to do.
    """


class Publisher:
    """Publishes one folder `exec/<attempt>/` under one claim."""

    def __init__(
        self, session: Session, rule: Rule, log: Log, progress: Callable[[str, int], Tick], *, points: bool
    ) -> None:
        """`progress` is given a save and its bytes, and gives what is called with every piece that went by; it may
        raise to stop. `points`: the store can replace conditionally, so there is a pointer to move.
        Raises StoreError, IntegrityError, Conflict (the folder is a copy of the one that the term belongs to)."""
        self.session = session
        self.placer = Placer(session.folder, rule, session.clock, log)
        self.log = log
        self.progress = progress
        self.follower = Follower(session, log, points=points)
        self._committed: dict[int, Order] = {}
        self._finished = bookkeeping.already(session.folder, session.store.url)
        self._prepared: dict[int, CommitRecord] = {}
        self._sent: set[int] = set()
        self._retry: dict[int, _Tried] = {}
        self._litter: list[str] = []
        self._due: tuple[tuple[str, Place], ...] = ()
        self._list_committed()
        if self._committed:
            self._catch_up(self._committed[max(self._committed)])

    def _list_committed(self) -> None:
        orders = listing.orders(self.session.store, self.session.claim.epoch)
        self._committed |= {order.ordinal: order for order in orders if order.term == self.session.claim.term}

    def _catch_up(self, order: Order) -> None:
        """Move the pointer to our newest commit: a publisher killed between the two leaves it behind."""
        try:
            record = listing.read_listed(self.session.store, order)
        except IntegrityError as error:
            self.log.error("commit unreadable", commit=str(order), error=str(error))
            return
        self._check_origin(record)
        self.follower.follow(record)

    def _check_origin(self, record: CommitRecord) -> None:
        """Whether our newest commit came from this folder as it is. A copy has the same folder id and so the same
        term: its own saves would be taken for those that the other one has published in their places."""
        place = next((place for place in self.placer.places() if place.number == record.order.ordinal), None)
        if place is None or (names.encode(place.name), place.signal) != (record.save, record.signal):
            found = f"holds another save or content, {names.shown(place.name)}" if place else "is empty"
            msg = (
                f"{self.session.folder} is not the folder that {record.key} ({record.save}) was published from: its "
                f"place {record.order.ordinal} {found}. It was copied, or put back to an earlier state. To publish it "
                f"as a folder of its own, whose term fences the other one, remove execution.json, order and already "
                f"from its .dispatch"
            )
            raise Conflict(msg)

    @property
    def unsure(self) -> bool:
        """Whether a commit was sent whose outcome is still unknown."""
        return bool(self._sent)

    @property
    def pending(self) -> tuple[str, ...]:
        """The saves that were complete and not committed when it last looked."""
        return tuple(name for name, _ in self._due)

    @property
    def left(self) -> tuple[str, ...]:
        """Those of them that are not committed by now. For any thread."""
        return tuple(name for name, place in self._due if not self._done(place))

    def committed(self, name: bytes) -> Outcome | None:
        """The newest generation of the save, if it is committed already."""
        place = self.placer.newest().get(name)
        if place is None or not self._done(place):
            return None
        return Outcome(names.encode(name), place.number, "already")

    def run(self, only: bytes | None = None) -> Pass:
        """One pass over the folder, or over one save of it.

        Raises Fenced, EpochCollision, Conflict, StandBy, StoreError. What concerns one save alone is in its outcome.
        """
        execution = bookkeeping.read_execution(self.session.folder)
        if execution is None or execution.folder_id != self.session.claim.folder:
            msg = f"{self.session.folder} was replaced or cleared; it is started on anew"
            raise StandBy(msg)
        view = self.placer.view()
        pending = self.placer.place(view, only, self._done)
        self._due = tuple((placed.name, placed.place) for placed in pending)
        self.follower.catch_up()
        outcomes = [self._settle(record) for record in list(self._prepared.values())]
        due = [placed for placed in pending if self._may_try(placed)]
        if due:
            self._tidy()
            outcomes += self._attempt_all(due)
            self._tidy()
        left = [placed for placed in pending if not self._done(placed.place)]
        hopeless = [placed for placed in left if self._retry.get(placed.place.number, _NO_TRY).hopeless]
        waiting = self.placer.waiting(view, self._done)
        delays = [verdict.again_in for _, verdict in waiting if verdict.again_in is not None]
        delays += [self._delay(placed.place) for placed in left if placed not in hopeless]
        return Pass(
            seen=view.seen,
            complete=len(view.complete),
            stand=sum(self._done(place) for name, place in self.placer.newest().items() if name in view.verdicts),
            waiting=waiting,
            outcomes=tuple(outcomes),
            unpublished=(*(placed.name for placed in left), *view.out_of_sight),
            hopeless=(*(placed.name for placed in hopeless), *view.out_of_sight),
            again_in=min(delays, default=None),
        )

    def _attempt(self, placed: Placed) -> Outcome:
        number = placed.place.number
        prefix = publication.next_prefix(self.session, placed)
        try:
            record = self._prepare(placed, prefix)
        except (SaveError, StoreError) as error:
            self._litter.append(prefix)
            return self._failed(placed.name, number, error)
        if record is None:
            self._litter.append(prefix)
            self._finished.add(number)
            bookkeeping.note_already(self.session.folder, number, self.session.store.url)
            self.log.info("already", save=placed.name, ordinal=number)
            return Outcome(placed.name, number, "already")
        try:
            self._publish(record)
        except (SaveError, OutcomeUnknown) as error:
            return self._failed(placed.name, number, error)
        return Outcome(placed.name, number, "published", record)

    def _attempt_all(self, due: list[Placed]) -> list[Outcome]:
        """One save that the store does not take (too large, a key it refuses) holds back nobody; if it takes none, it
        is the store. Raises StoreError."""
        outcomes: list[Outcome] = []
        for placed in due:
            outcomes.append(self._attempt(placed))
            last = [outcome.error for outcome in outcomes[-2:]]
            if len(last) == 2 and all(isinstance(error, StoreError) for error in last):
                break
        refused = [outcome.error for outcome in outcomes if isinstance(outcome.error, StoreError)]
        if refused and len(refused) == len(outcomes):
            raise refused[-1]
        return outcomes

    def _tidy(self) -> None:
        """Remove what failed tries left, as far as the store lets us: a full one would stay full."""
        while self._litter:
            try:
                publication.discard(self.session, self._litter[-1])
            except StoreError as error:
                self.log.once("info", "litter", "not tidied", reason=str(error))
                return
            self._litter.pop()

    def _settle(self, record: CommitRecord) -> Outcome:
        """Find out about a commit that was sent and not confirmed, whatever became of the save meanwhile."""
        try:
            if self._stands(record):
                self._confirm(record)
            else:
                self._publish(record)
        except (SaveError, OutcomeUnknown) as error:
            return self._failed(record.save, record.order.ordinal, error)
        return Outcome(record.save, record.order.ordinal, "published", record)

    def _stands(self, record: CommitRecord) -> bool:
        try:
            return publication.stands(self.session, record)
        except Fenced:
            self._forget(record.order.ordinal)
            raise

    def _failed(self, save: str, ordinal: int, error: SaveError | StoreError | OutcomeUnknown) -> Outcome:
        count = self._retry.get(ordinal, _NO_TRY).count + 1
        pause = min(RETRY_LONGEST, RETRY_FIRST * 2 ** (count - 1))
        # Credentials are renewed; a key that is too long does not get shorter.
        hopeless = not (error.retryable or isinstance(error, StoreDenied))
        self._retry[ordinal] = _Tried(count, self.session.clock.monotonic() + pause, hopeless)
        level: Level = "info" if isinstance(error, SourceChanged) else "error"
        self.log.once(level, f"{save}: {error}", "not published", save=save, ordinal=ordinal, error=str(error))
        return Outcome(save, ordinal, "failed", error=error)

    def _prepare(self, placed: Placed, prefix: str) -> CommitRecord | None:
        size = sum(file.size for file in placed.snapshot.files)
        self.log.info("uploading", save=placed.name, ordinal=placed.place.number, bytes=size)
        tick = self.progress(placed.name, size)
        previous = self._previous(placed.place)
        return publication.prepare(self.session, placed, previous, prefix, self.placer.look, tick)

    def _publish(self, record: CommitRecord) -> None:
        number = record.order.ordinal
        self._prepared[number] = record
        try:
            publication.ready(self.session, record)
        except (CommitError, SaveError) as error:
            # Fenced says nothing of what was sent before: that may still land.
            if not (isinstance(error, Fenced) and number in self._sent):
                self._forget(number)
            raise
        self._sent.add(number)
        try:
            publication.publish(self.session, record)
        except OutcomeUnknown:
            # The record may have landed: the same key and bytes are sent again, never another try's.
            raise
        except CommitError:
            self._forget(number)
            raise
        self._confirm(record)

    def _forget(self, number: int) -> None:
        self._prepared.pop(number, None)
        self._sent.discard(number)

    def _confirm(self, record: CommitRecord) -> None:
        self._forget(record.order.ordinal)
        self._committed[record.order.ordinal] = record.order
        self.log.info(
            "published",
            save=record.save,
            ordinal=record.order.ordinal,
            generation=record.generation,
            files=record.files,
            bytes=record.size,
            commit=record.key,
        )
        self.follower.follow(record)

    def _previous(self, place: Place) -> Previous:
        """The last committed generation of the same name before `place`."""
        before = self.placer.before(place)
        if not before <= self._committed.keys() | self._finished:
            self._list_committed()  # another publisher of this folder may have committed them since we started
        earlier = before & self._committed.keys()
        if not earlier:
            return Previous()
        try:
            record = listing.read_listed(self.session.store, self._committed[max(earlier)])
        except IntegrityError as error:
            # Its content is unknown, so this one counts as another; how many came before is known.
            self.log.once("error", str(error), "commit unreadable", error=str(error))
            return Previous(len(earlier))
        return Previous(record.generation, record)

    def _done(self, place: Place) -> bool:
        return place.number in self._committed or place.number in self._finished

    def _delay(self, place: Place) -> float:
        return max(0.0, self._retry.get(place.number, _NO_TRY).not_before - self.session.clock.monotonic())

    def _may_try(self, placed: Placed) -> bool:
        """Not before a commit of the same name is settled: it says which generation this is."""
        unsettled = any(record.save == placed.name for record in self._prepared.values())
        return not unsettled and not self._done(placed.place) and self._delay(placed.place) == 0.0


def certain(error: Exception, publisher: Publisher | None) -> Exception:
    """The error to end with: whatever came last, a commit that may have landed is what the caller must know of."""
    if publisher is None or not publisher.unsure or isinstance(error, OutcomeUnknown):
        return error
    return OutcomeUnknown(f"a commit was sent and could not be read back; it may have landed: try again ({error})")
