"""From settings to a publisher: probe the store, take the folder, claim. At every start anew, remembered nowhere."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dispatch_agent.checkpoint import folder as bookkeeping
from dispatch_agent.clock import Clock
from dispatch_agent.identity import Identity
from dispatch_agent.logs import Log
from dispatch_agent.publish.once import Patience
from dispatch_agent.publish.parallel import Tick
from dispatch_agent.publish.placing import Rule
from dispatch_agent.publish.publication import Session
from dispatch_agent.publish.publisher import Publisher, StandBy, open_session
from dispatch_agent.settings import PublishSettings
from dispatch_agent.store import kernel
from dispatch_agent.store.base import Store
from dispatch_agent.store.capabilities import Capabilities, require
from dispatch_agent.store.probe import probe


@dataclass(slots=True)
class Starter:
    """Starts publishers for one folder. `draw_nonce` and `draw` are the only randomness; both are passed in.

    `beside_from` (monotonic seconds): from then on a folder that another publisher has is published beside it.
    """

    store: Store
    identity: Identity
    folder: Path
    settings: PublishSettings
    rule: Rule
    rank: int
    clock: Clock
    log: Log
    progress: Callable[[str, int], Tick]
    draw_nonce: Callable[[], str]
    draw: Callable[[], float]
    environ: Mapping[str, str]
    beside_from: float = math.inf
    _lock: bookkeeping.FolderLock | None = None
    _found: Capabilities | None = None

    def __call__(self) -> Publisher:
        """A publisher that has claimed. Raises StandBy, StoreTooWeak, and what `open_session` raises."""
        if self.folder.is_dir():
            self._mark()
        self.prove()
        if not self.folder.is_dir():
            # Making it would make it ours: a trainer under another UID could then not write into it.
            missing = next(p for p in reversed([self.folder, *self.folder.parents]) if not p.is_dir())
            msg = f"{self.folder} is not there yet; the trainer makes it"
            if missing not in (self.folder, self.folder.parent):
                msg = f"{msg}. Not even {missing} is there: is that the right volume?"
            raise StandBy(msg)
        self.release()  # of a folder that may not be there any more
        self._lock = bookkeeping.lock(self.folder, self.store.url)
        if not self._lock.acquire():
            if self.clock.monotonic() < self.beside_from:
                msg = f"another publisher has {self.folder}"
                raise StandBy(msg)
            # The lock only spares work: nonces and places keep two publishers of one folder apart.
            self.log.warning("beside", reason=f"another publisher still has {self.folder}")
        self._say_who_may_share()
        session = self.claim()
        log = self.log.bind(term=session.claim.term)
        return Publisher(session, self.rule, log, self.progress, points=self.prove().points)

    def claim(self) -> Session:
        """Mark the folder, which must be there, and claim it at the store; its lock is not asked for.

        Raises StoreTooWeak, and what `open_session` raises.
        """
        session = open_session(
            self.store,
            self.identity,
            self.folder,
            rank=self.rank,
            weak=self.prove().weak,
            in_place=self.settings.in_place,
            workers=self.settings.workers,
            name=publisher_name(self.environ),
            nonce=self.draw_nonce(),
            clock=self.clock,
            patience=Patience(self.clock, self.draw),
        )
        self.log.bind(term=session.claim.term).info("claimed", store=self.store.url, folder=str(self.folder))
        return session

    def _mark(self) -> None:
        """Say whose folder it is before the store is asked: if that never answers, a recovery still knows."""
        bookkeeping.ensure(
            self.folder,
            job=self.identity.job_id or "",
            epoch=self.identity.epoch,
            attempt=self.identity.attempt,
            folder_id=self.draw_nonce(),
        )

    def _say_who_may_share(self) -> None:
        """A place in the folder's order is a name that is made once: where two hosts can both make it, two publishers
        of one folder may give one place to two saves. Nothing is lost by that, but their order."""
        # Not to read it: whether that is allowed, the pass finds out and says.
        folder = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            known = kernel.sharing(folder).names
        finally:
            os.close(folder)
        if not known:
            what = "let one host alone publish this folder"
            self.log.once("warning", what, what, folder=str(self.folder), reason=known.reason)

    def release(self) -> None:
        """Give the folder back to other publishers, if it was taken."""
        if self._lock is not None:
            self._lock.release()

    def prove(self) -> Capabilities:
        """What the store can do, probed once. Raises StoreTooWeak, StoreError."""
        if self._found is None:
            found = probe(self.store)
            for sentence in found.saw:
                self.log.debug("probe", saw=sentence)
            require(found, accept_weak=self.settings.accept_weak_store)
            weak = [support for support in (found.list_after_write, found.conditional_create) if not support]
            for reason in dict.fromkeys(support.reason for support in weak):
                self.log.warning("weak store", reason=reason)
            if found.conditional_replace.value != "yes":
                what = "the pointer is advisory" if found.points else "no pointer is written"
                self.log.warning(what, reason=found.conditional_replace.reason)
            self._found = found
        return self._found


def publisher_name(environ: Mapping[str, str]) -> str:
    """Who publishes, for people: the pod if it is known, the host, the process."""
    pod = environ.get("POD_NAME", "")
    return "/".join(part for part in (pod, socket.gethostname(), str(os.getpid())) if part)
