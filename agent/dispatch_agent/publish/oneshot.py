"""`publish publish PATH`: one save, once, and its outcome. Beside a running publisher it hands the save over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dispatch_agent.checkpoint import folder as bookkeeping
from dispatch_agent.checkpoint import manifest as manifests
from dispatch_agent.checkpoint import names, scan
from dispatch_agent.clock import Clock
from dispatch_agent.errors import AgentError, Incomplete
from dispatch_agent.logs import Log
from dispatch_agent.publish import listing, upload
from dispatch_agent.publish.publisher import Outcome, Pass, Publisher, StandBy, certain
from dispatch_agent.store.base import Store

LOOK = 0.3
"""Seconds between two looks for a commit that another publisher is to make."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """Not done: look again in `pause` seconds; if there is no more time, `error` is why."""

    error: AgentError
    pause: float


def publish_one(
    start: Callable[[], Publisher],
    store: Store,
    folder: Path,
    name: bytes,
    clock: Clock,
    log: Log,
    *,
    epoch: int,
    timeout: float,
    stood: bool,
) -> Outcome:
    """Publish the save `name` in `folder` and say what became of it: published, or already. `stood`: it was said to be
    complete before this command, so that somebody may have published it.

    If another publisher has the folder, wait for its commit. Raises Incomplete (not complete by the rule, or not
    committed within `timeout` seconds), the error of the last try, and what `start` raises.
    """
    deadline = clock.monotonic() + timeout
    publisher: Publisher | None = None
    never = threading.Event()
    last: AgentError | None = None
    while True:
        try:
            publisher = publisher or start()
            step = _outcome(publisher, publisher.run(only=name), name, last)
        except StandBy as reason:
            publisher = None
            step = _handed_over(store, folder, name, epoch, str(reason), stood=stood)
            stood = False
        except AgentError as error:
            if not error.retryable:
                raise certain(error, publisher) from error.__cause__
            step = _Wait(error, LOOK)
        if isinstance(step, Outcome):
            return step
        last = step.error
        log.once("warning", str(step.error), "not yet", save=names.encode(name), reason=str(step.error))
        if clock.monotonic() + step.pause > deadline:
            raise certain(step.error, publisher) from None
        clock.wait(never, step.pause)


def _outcome(publisher: Publisher, done: Pass, name: bytes, last: AgentError | None) -> Outcome | _Wait:
    save = names.encode(name)
    pause = LOOK if done.again_in is None else max(LOOK, done.again_in)
    for outcome in done.outcomes:
        if outcome.save == save and outcome.error is None:
            return outcome
        if outcome.save == save and isinstance(outcome.error, AgentError):
            if save in done.hopeless:
                raise outcome.error
            return _Wait(outcome.error, pause)
    for waiting, verdict in done.waiting:
        if waiting == save:
            error = Incomplete(f"{save} is not complete: {verdict.reason}")
            if verdict.again_in is None:
                raise error
            return _Wait(error, pause)
    if save in done.unpublished:
        return _Wait(last or Incomplete(f"{save} could not be published in time"), pause)
    committed = publisher.committed(name)
    if committed is None:
        msg = f"{save} is not in {publisher.session.folder}, or is named like something temporary"
        raise Incomplete(msg)
    return committed


def _handed_over(store: Store, folder: Path, name: bytes, epoch: int, reason: str, *, stood: bool) -> Outcome | _Wait:
    """Whether the publisher that has the folder has committed the newest generation of the save."""
    wait = _Wait(Incomplete(f"{reason}, and has not committed {names.encode(name)} in time; it goes on with it"), LOOK)
    execution = bookkeeping.read_execution(folder)
    mine = {place.number for place in bookkeeping.places(folder) if place.name == name}
    if execution is None or not mine:
        return wait
    committed = [listing.read_listed(store, order) for order in listing.orders(store, epoch) if order.ordinal in mine]
    ours = {record.order.ordinal: record for record in committed if record.folder == execution.folder_id}
    if not ours:
        return wait
    newest = ours[max(ours)]
    if newest.order.ordinal == max(mine):
        return Outcome(newest.save, newest.order.ordinal, "already" if stood else "published", newest)
    if newest.content == _content(folder, name):
        return Outcome(newest.save, max(mine), "already", newest)
    return wait


def _content(folder: Path, name: bytes) -> str:
    snapshot = scan.snapshot(folder, name)
    digests = upload.digest(folder, snapshot, tick=lambda _: None, workers=1)
    manifest = manifests.of_snapshot(snapshot, {p: d.sha256 for p, d in digests.items()}, rank=0, ranks=1, token="")
    return manifests.content_digest(manifest)
