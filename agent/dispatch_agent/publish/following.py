"""The pointer follows a publisher's commits: at once, or in a later pass if it cannot, and never holds one up."""

from __future__ import annotations

from dispatch_agent.errors import IntegrityError, StoreError
from dispatch_agent.logs import Log
from dispatch_agent.publish import pointer
from dispatch_agent.publish.publication import Session
from dispatch_agent.publish.records import CommitRecord


class Follower:
    """Moves the pointer for one publisher start. `points`: the store can replace conditionally, so there is one."""

    def __init__(self, session: Session, log: Log, *, points: bool) -> None:
        self.session = session
        self.log = log
        self.points = points
        self._seen = False
        self._behind: CommitRecord | None = None

    def follow(self, record: CommitRecord) -> None:
        """Have it name `record`, or a greater one that it could not be moved to before. Never raises for the store:
        the commit stands, and readers of commits need no pointer."""
        if not self.points:
            return
        if self._behind is not None and self._behind.order > record.order:
            record = self._behind
        self._behind = None
        try:
            named = pointer.advance(self.session.store, record, known=self._seen, patience=self.session.patience)
        except IntegrityError as error:
            self._seen = True  # it vanished or is damaged: to be an alarm until the next start
            self.log.once("error", str(error), "pointer", error=str(error))
            return
        except (pointer.NotMoved, StoreError) as error:
            self._seen = self._seen or (isinstance(error, pointer.NotMoved) and error.seen)
            self._behind = record
            self.log.once("warning", record.key, "pointer", error=str(error))
            return
        self._seen = True
        try:
            pointer.link(self.session.store, self.session.patience)
        except StoreError as error:
            # For people only: nothing that reads the store follows it.
            self.log.once("warning", "latest link", "no latest link", reason=str(error))
        if named.epoch > record.order.epoch:
            # Frozen between its last look at the fence and its commit: in its place, and not the newest.
            self.log.warning("superseded", save=record.save, commit=record.key, newer_epoch=str(named.epoch))

    def catch_up(self) -> None:
        """Try again what could not be done before; a pass does, also if no save comes any more."""
        if self._behind is not None:
            self.follow(self._behind)
