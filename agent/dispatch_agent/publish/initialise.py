"""`publish init`: everything that must be so before an execution's trainer starts, in every pod of the job.

    lay      -> exec/<attempt>/, for whoever may write to the checkpoint root; marked as this execution's
    refuse   -> a rank that was ready, or ran, under this identity before
    one rank, under a lock, for all of them:
      claim    -> the epoch and the folder's term, as the sidecar takes them again
      recover  -> what older executions left complete
      choose   -> the newest commit, once for all ranks
      restore  -> it, to resume/<attempt>/
    the others wait, and follow the choice
    mark     -> this rank is ready

The choice is a record that is written once. Whoever takes over, comes later, or is let in by a lock that holds nobody
off, follows it, whatever is published meanwhile.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from dispatch_agent.checkpoint import folder as bookkeeping
from dispatch_agent.checkpoint import names, records, resuming, trainer
from dispatch_agent.checkpoint.resuming import Choice
from dispatch_agent.errors import Incomplete, IntegrityError, NewerFormat, Refused, SettingsError, StoreError
from dispatch_agent.logs import Log
from dispatch_agent.publish import keys, listing, reader, recover
from dispatch_agent.publish import restore as restoring
from dispatch_agent.publish.claims import check_one_volume
from dispatch_agent.publish.once import Patience
from dispatch_agent.publish.recover import Recovered
from dispatch_agent.publish.start import Starter
from dispatch_agent.store import kernel

LOOK_FIRST, LOOK_LONGEST = 0.05, 2.0
"""Seconds between two looks at whether another rank has done the work."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The longest times, in seconds: for a store that does not answer, for an older execution's living owner, for the
    claim and the recovery, and for the restore."""

    store_away: float
    wait_owner: float
    recovery: float
    restore: float


@dataclass(frozen=True, slots=True)
class Ready:
    """What a rank is ready with. `path` to resume from, None for a start from nothing; `commit` its key, if known.

    `led`: this rank did the work for all; then `recovered` is what became of older executions, if it got to that.
    """

    path: Path | None
    commit: str | None
    led: bool
    recovered: tuple[Recovered, ...] = ()


class _Pruned(Exception):
    """The chosen commit was pruned before it was here: something newer is published."""


@dataclass(frozen=True)
class Init:
    """One rank's run. `starter` is this execution's, its folder `root/exec/<attempt>`; `pod` the pod's UID or empty.

    `bound` has Abort raised after so many seconds, in place of what it was told before, or at once if this was told to
    end meanwhile.
    """

    starter: Starter
    root: Path
    pod: str
    allow_rank_restart: bool
    fall_back: bool
    bounds: Bounds
    bound: Callable[[float], None]

    @property
    def folder(self) -> Path:
        """What this execution's trainer writes under."""
        return self.starter.folder

    @property
    def target(self) -> Path:
        """What is to hold the save to resume from, and nothing else."""
        return self.root / "resume" / self.starter.identity.attempt

    @cached_property
    def by(self) -> str:
        """Empty where a lock holds all other ranks off, else what tells this pod's half restore from another's."""
        descriptor = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            trusted = kernel.lock_trust(kernel.filesystem_magic(descriptor))
        finally:
            os.close(descriptor)
        return "" if trusted else names.encode(os.fsencode(self.pod or socket.gethostname()))

    def run(self) -> Ready:
        """All of it. Raises Refused (this rank ran before), SettingsError, Incomplete (the rank that does the work is
        not done in time), what a claim, a recovery and a restore raise, and Abort."""
        self._lay()
        self._check_first()
        ready = self._agree()
        if self.pod and not resuming.mark_ready(self.folder, self.starter.rank, self.pod):
            self._check_first()
        return ready

    def _lay(self) -> None:
        if not self.root.is_dir():
            msg = f"the checkpoint root {self.root} is not there: mount the volume there, or make the folder"
            raise SettingsError(msg)
        _lay(self.folder)
        mine = self.starter.identity
        bookkeeping.ensure(
            self.folder,
            job=mine.job_id or "",
            epoch=mine.epoch,
            attempt=mine.attempt,
            folder_id=self.starter.draw_nonce(),
        )

    def _check_first(self) -> None:
        """Whether this rank never was ready under this identity. Without a pod's UID nobody can tell that from an init
        that is run twice for one trainer."""
        why = _ran_before(self.folder, self.starter.rank, self.pod) if self.pod else None
        if why is None:
            return
        if not self.allow_rank_restart:
            msg = (
                f"rank {self.starter.rank} already ran under attempt {self.starter.identity.attempt}: {why}; start a "
                f"new execution, or weaken the identity with --allow-rank-restart"
            )
            raise Refused(msg)
        reason = f"{why}; it resumes again from what was chosen then, whatever was published since"
        self.starter.log.once("warning", "rank restart", "identity weakened", reason=reason)
        try:
            trainer.forget(self.folder, self.starter.rank)
        except OSError as error:
            told = f"a watch that ends with its trainer may end before it: its mark cannot be written: {error}"
            self.starter.log.once("warning", told, "mark", reason=told)

    def _agree(self) -> Ready:
        """Do the work for all ranks, or wait until it is done."""
        clock, log = self.starter.clock, self.starter.log
        patience = self.bounds.recovery + self.bounds.restore
        give_up = clock.monotonic() + patience
        pause = LOOK_FIRST
        lock = resuming.lock(self.folder)
        self.bound(patience + LOOK_LONGEST)
        while (ready := self._settled()) is None and not lock.acquire():
            if clock.monotonic() >= give_up:
                msg = (
                    f"another rank has {self.folder}/.dispatch/resume.lock and has not brought what to resume from "
                    f"within {patience:g} s; look at its log, or give more --restore-timeout"
                )
                raise Incomplete(msg)
            log.once("info", "waiting", "waiting", reason="another rank brings what to resume from, for all")
            clock.wait(threading.Event(), pause)
            pause = min(LOOK_LONGEST, pause * 2)
        try:
            return ready or self._settled() or self._lead()
        finally:
            lock.release()

    def _settled(self) -> Ready | None:
        """What was chosen and is there. Its rename is the proof: no rank but the one that brought it reads it all."""
        choices = resuming.choices(self.folder)
        choice = choices[-1] if choices else None
        if choice is None or choice.bad:
            return None
        path = self._path(choice)
        if path is not None and not os.path.lexists(path):
            return None
        return Ready(path, choice.commit, led=False)

    def _path(self, choice: Choice) -> Path | None:
        return None if choice.save is None else self.target / os.fsdecode(choice.save)

    def _lead(self) -> Ready:
        starter = self.starter
        self.bound(self.bounds.recovery)
        recover.while_away(starter, self._claim, self.bounds.store_away)
        recovered: list[Recovered] = []
        if not resuming.choices(self.folder):
            everything = replace(starter, folder=self.folder.parent, rank=0)
            recovered = recover.recover(everything, self.bounds.wait_owner)
        self.bound(self.bounds.restore)
        _report(recovered, starter.log)
        if (error := recover.verdict(recovered)) is not None:
            raise error
        choice = self._bring_while_it_comes()
        self._say_steps_back(choice, recovered)
        return Ready(self._path(choice), choice.commit, led=True, recovered=tuple(recovered))

    def _claim(self) -> None:
        starter = self.starter
        if starter.rank:
            execution = bookkeeping.read_execution(self.folder)
            check_one_volume(starter.store, starter.identity.epoch, execution.folder_id if execution else "")
        session = replace(starter, rank=0).claim()
        if session.claim.term > 1:
            starter.log.once(
                "warning",
                "term",
                "identity weakened",
                reason=f"this execution had another folder before (term {session.claim.term}), which went with its "
                f"pod, and that was replaced without a new execution",
            )

    def _bring_while_it_comes(self) -> Choice:
        """The choice that can be had, restored: again and again while every try gets further than those before it, and
        for as long as a store may be away. Raises what `_bring` raises."""
        clock, log = self.starter.clock, self.starter.log
        patience, furthest, tries = Patience(clock, self.starter.draw), 0, 0
        give_up = clock.monotonic() + self.bounds.store_away
        while True:
            came: list[int] = []
            try:
                return self._bring(came.append)
            except StoreError as error:
                if sum(came) > furthest:
                    furthest, tries, give_up = sum(came), 0, clock.monotonic() + self.bounds.store_away
                if not error.retryable or clock.monotonic() >= give_up:
                    raise
                log.once("warning", str(error), "store away", reason=str(error))
            patience.pause(tries)
            tries += 1

    def _bring(self, came: Callable[[int], None]) -> Choice:
        """The choice that can be had, restored. Raises IntegrityError (nothing is intact, or the newest is not and
        there is to be no falling back), StoreError, AgentError (the disk)."""
        while True:
            choices = resuming.choices(self.folder)
            if not choices or choices[-1].bad:
                self._choose(choices)
                continue
            choice = choices[-1]
            path = self._path(choice)
            if path is None or choice.commit is None or os.path.lexists(path):
                return choice
            try:
                self._restore(choice.commit, came)
            except NewerFormat:
                raise  # not damaged, only beyond this version
            except _Pruned:
                resuming.reject(self.folder, choice.number, "it was pruned")
            except IntegrityError as error:
                self._passed_over(choice.commit, error)
                resuming.reject(self.folder, choice.number, str(error))

    def _choose(self, before: list[Choice]) -> None:
        """The next choice: the newest commit that was not chosen before."""
        number = len(before) + 1
        if not before and (there := _standing(self.target)):
            resuming.choose(self.folder, number, None, there)
            return
        bad = {choice.commit for choice in before}
        unreadable: IntegrityError | None = None
        for item in reader.published(self.starter.store):
            key = keys.commit_key(item.order)
            if key in bad:
                continue
            if item.record is not None:
                resuming.choose(self.folder, number, key, item.record.save)
                return
            if isinstance(item.error, NewerFormat):
                raise item.error
            unreadable = item.error or IntegrityError(key)
            self._passed_over(key, unreadable)
        if bad or unreadable:
            msg = f"everything published at {self.starter.store.url} is damaged, see above: nothing to resume from"
            raise IntegrityError(msg) from unreadable
        resuming.choose(self.folder, number, None, None)

    def _restore(self, commit: str, came: Callable[[int], None]) -> None:
        starter = self.starter
        order = keys.parse_commit_key(commit)
        if order is None:
            msg = f"{self.folder}/.dispatch/resume names {commit!r}, which is no commit"
            raise SettingsError(msg)
        record = listing.read_listed(starter.store, order)
        _lay(self.target)
        starter.log.info("restoring", save=record.save, bytes=record.size, commit=commit)
        show = starter.progress(record.save, record.size)

        def tick(size: int) -> None:
            came(size)
            show(size)

        try:
            restoring.restore(
                starter.store,
                record,
                self.target,
                tick=tick,
                workers=starter.settings.workers,
                alone=True,
                by=self.by,
            )
        except IntegrityError as error:
            restoring.discard_partial(self.target, record, self.by)
            if listing.pruned(starter.store, record):
                raise _Pruned from error
            raise
        except restoring.Occupied as other:
            msg = (
                f"{other.path} stands where {names.shown(names.decode_name(record.save))} is to be restored, which is "
                f"what this execution resumes from: move it away"
            )
            raise SettingsError(msg) from None

    def _passed_over(self, commit: str, error: IntegrityError) -> None:
        self.starter.log.once("error", commit, "damaged", commit=commit, error=str(error))
        if not self.fall_back:
            raise error

    def _say_steps_back(self, choice: Choice, recovered: list[Recovered]) -> None:
        """Of everything complete on the volume that this execution does not resume from: it goes back behind it."""
        order = keys.parse_commit_key(choice.commit) if choice.commit else None
        newest = order.epoch if order else 0
        chosen = names.shown(choice.save) if choice.save else "nothing"
        for result in recovered:
            if result.execution is None or result.execution.epoch < newest:
                continue
            for save in result.saves:
                if save.result == "left":
                    self.starter.log.error(
                        "step back",
                        left=f"{result.name}/{save.name}",
                        reason=save.reason or result.reason,
                        resuming_from=chosen,
                    )


def _lay(folder: Path) -> None:
    """Make `folder`, two levels below the root, for whoever may write to the root, whatever our umask."""
    if not folder.parent.is_symlink():
        records.make_folder(folder.parent)
    records.make_folder(folder)


def _ran_before(folder: Path, rank: int, pod: str) -> str | None:
    """Which way this rank got ready, or ran, under this identity before; None if it did not."""
    before = resuming.ready_in(folder, rank)
    if before is None:
        if not resuming.has_started(folder, rank):
            return None
        return (
            f"{folder}/.dispatch/started.{rank} is there, so its command ran: its container was started again, or the "
            f"counters repeated"
        )
    if before == pod:
        return (
            f"{folder}/.dispatch/init.{rank} is of this very pod ({pod}), so its containers were restarted in place "
            f"(RestartAllContainers, or JobSet's InPlaceRestart), which raises no counter"
        )
    return (
        f"{folder}/.dispatch/init.{rank} is of pod {before}, and this is pod {pod}: the rank was replaced alone (a "
        f"podFailurePolicy with Ignore or Count, a backoffLimit, JobSet's RestartJob), or the counters repeated"
    )


def _standing(target: Path) -> str | None:
    """The one save that somebody has put there, percent-encoded. Raises SettingsError if there are several, or if
    it is no folder."""
    try:
        found = sorted(name for name in os.listdir(os.fsencode(target)) if not restoring.is_ours(name))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        msg = f"{target} is no folder, and what to resume from is restored into it: move it away"
        raise SettingsError(msg) from None
    if len(found) > 1:
        msg = f"{target} holds {len(found)} saves: leave the one to resume from, or none"
        raise SettingsError(msg)
    return names.encode(found[0]) if found else None


def _report(recovered: list[Recovered], log: Log) -> None:
    """What became of older executions; their publishers have said what they published."""
    for result in recovered:
        if result.state != "recovered" and result.worth_saying:
            log.warning("not recovered", execution=result.name, state=result.state, reason=result.reason)
        for save in result.saves:
            if save.result in {"left", "abandoned"}:
                log.warning(save.result, execution=result.name, save=save.name, reason=save.reason)
