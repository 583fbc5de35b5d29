"""`publish recover`: the next execution publishes what older ones left complete in their folders, oldest first.

    read     -> of every folder in `exec/` but one's own: whose it is
    list     -> every commit, once: what is fenced
    publish  -> the rest, as each folder's own publisher would: its epoch, attempt, folder id and term
    report   -> also what the fenced ones still hold

Safety rests on what it rests on everywhere: places, nonces, claims and the fence. A living owner is waited for only to
spare work. What is incomplete is reported as abandoned, and nothing is ever deleted.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

from dispatch_agent.checkpoint import folder as bookkeeping
from dispatch_agent.checkpoint import names
from dispatch_agent.checkpoint.folder import Execution, Place
from dispatch_agent.checkpoint.save import Settling, Snapshot, Survey, Verdict
from dispatch_agent.clock import Clock
from dispatch_agent.errors import (
    AgentError,
    Conflict,
    DrainTimeout,
    EpochCollision,
    IntegrityError,
    OutcomeUnknown,
    Refused,
    StoreError,
)
from dispatch_agent.identity import Identity, parse_attempt, parse_epoch
from dispatch_agent.publish import listing, watcher
from dispatch_agent.publish.claims import rank_of
from dispatch_agent.publish.once import Patience
from dispatch_agent.publish.placing import Placer, Rule, View
from dispatch_agent.publish.publisher import Publisher
from dispatch_agent.publish.start import Starter
from dispatch_agent.publish.watcher import Abort, Stop, Tally

STORE_AWAY = 60.0
"""Seconds for which a store that does not answer is tried again."""
RESCAN = 2.0
"""The longest time, in seconds, between two looks at a folder that is being recovered."""
SLACK = 2.0
"""Seconds beyond a rule's own time after which a save counts as still being written."""

OUT_OF_TIME = "time ran out while it was published"
NOT_REACHED = "the recovery ended before it was reached"

_FOLDER_ID = re.compile(r"[0-9a-f]{1,64}", re.ASCII)
_T = TypeVar("_T")

Result = Literal["published", "already", "abandoned", "left"]
State = Literal["recovered", "fenced", "left", "refused", "unknown"]


@dataclass(frozen=True, slots=True)
class Save:
    """What became of one save of an older execution. `name` is percent-encoded, `commit` a key or empty.

    `published` and `already` are what this recovery did; `abandoned` is incomplete, `left` complete and not published:
    both stay as they are, for `reason`.
    """

    name: str
    result: Result
    reason: str = ""
    commit: str = ""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What became of one entry of `exec/`. `name` is percent-encoded; `execution` is None where no record says it.

    `recovered`: everything complete in it is published. `fenced`: a newer execution has published, so nothing more of
    it is. `left`: something complete is not published. `refused` and `unknown`: not looked into, for `reason`.
    `standing` counts the saves whose newest content was published before. `error` is what ended the work on it early.
    """

    name: str
    state: State
    execution: Execution | None = None
    reason: str = ""
    standing: int = 0
    saves: tuple[Save, ...] = ()
    error: AgentError | None = None

    @property
    def worth_saying(self) -> bool:
        """Whether it is more than another execution of which nothing was left to publish."""
        return bool(self.saves) or self.state in {"unknown", "refused", "left"}


class _NotOurs(Exception):
    """Nothing can be published for this entry of `exec/`, and why."""

    def __init__(self, reason: str, state: State = "refused", execution: Execution | None = None) -> None:
        super().__init__(reason)
        self.state = state
        self.execution = execution

    def of(self, name: str) -> Recovered:
        """The result for this entry."""
        return Recovered(_encoded(name), self.state, self.execution, str(self))


@dataclass(frozen=True)
class _Old:
    """An older execution's folder. `ordinals` are those of its places that need nothing more."""

    folder: Path
    execution: Execution
    placer: Placer
    ordinals: set[int]

    @cached_property
    def view(self) -> View:
        """The first look at every file."""
        return self.placer.view()

    @property
    def name(self) -> str:
        return _encoded(self.folder.name)

    @property
    def settling(self) -> list[float]:
        """The seconds after which saves may be complete that are not yet."""
        verdicts = [verdict for verdict in self.view.verdicts.values() if isinstance(verdict, Settling)]
        return [verdict.again_in for verdict in verdicts if verdict.again_in is not None]

    @property
    def waiting(self) -> tuple[tuple[str, Settling], ...]:
        """What is not finished, and why."""
        return self.placer.waiting(self.view, lambda place: place.number in self.ordinals)

    @property
    def hopeful(self) -> bool:
        """Whether anything in it is complete, or may be without a change."""
        return bool(self.view.complete or self.settling)


@dataclass(frozen=True, slots=True)
class _InTime:
    """A rule that waits no longer for a save that does not come to rest: its trainer lives, and holds up nobody."""

    rule: Rule
    clock: Clock
    until: float

    def judge(self, save: Snapshot, survey: Survey, quiet: float) -> Verdict:
        verdict = self.rule.judge(save, survey, quiet)
        if isinstance(verdict, Settling) and verdict.again_in is not None and self.clock.monotonic() >= self.until:
            return Settling(f"it is still being written ({verdict.reason})", stuck=True)
        return verdict


def recover(starter: Starter, wait_owner: float) -> list[Recovered]:
    """Publish what older executions left complete in their folders, and say what became of every entry of `exec/`.

    `starter` is the recovering execution's: its folder is `exec/` itself, its identity says what is older (every lower
    epoch), which folder is its own, and of which job they all are, if it is known. Each folder's own starter is made
    from it. A living owner is waited for `wait_owner` seconds at most. Abort ends it early; what was not reached is
    among the results. Raises StoreError if not even the commits can be listed.
    """
    entries = [name for name in _entries(starter.folder) if name != starter.identity.attempt]
    results = {name: _unseen(name) for name in entries}  # at every moment what is true if this ends now
    try:
        _recover(starter, wait_owner, results)
    except Abort:
        starter.log.warning("aborted", reason="time ran out, or this was told to end")
    return sorted(results.values(), key=lambda result: result.execution.epoch if result.execution else 0)


@watcher.kept()
def _recover(starter: Starter, wait_owner: float, results: dict[str, Recovered]) -> None:
    executions: dict[str, Execution] = {}
    for name in results:
        try:
            executions[name] = _read(starter.folder / name, starter.identity)
        except _NotOurs as no:
            results[name] = no.of(name)
    committed = _committed(starter, executions)
    newest = max(committed, default=0)
    olds: list[_Old] = []
    for name, execution in executions.items():
        try:
            olds.append(_open(starter, name, execution, committed))
        except _NotOurs as no:
            results[name] = no.of(name)
    olds.sort(key=lambda old: old.execution.epoch)
    live = [old for old in olds if old.execution.epoch >= newest]
    fenced = [old for old in olds if old.execution.epoch < newest]
    why = f"epoch {newest} has published to {starter.store.url}"
    for old in fenced:
        results[old.folder.name] = Recovered(old.name, "fenced", old.execution, why)
    for old in live:
        results[old.folder.name] = _unreached(old)
    if any(old.hopeful for old in live):
        while_away(starter, starter.prove)
    go_on = True
    for old in live:
        if not old.hopeful:
            results[old.folder.name] = _held(old, "")
        elif go_on:
            results[old.folder.name], go_on = _publish(old, starter, wait_owner)
    for old in fenced:  # last: to look through them may take long, and changes nothing
        with suppress(OSError):
            results[old.folder.name] = _fenced(old, why)


def verdict(results: Iterable[Recovered]) -> AgentError | None:
    """What a command ends with: an unknown outcome first, then the store, a collision, what was left for want of time.

    None for what is fenced, unknown, refused, abandoned, or left because it cannot be published at all: the next
    execution must be able to start.
    """
    errors = [result.error for result in results if result.error is not None]
    kinds: tuple[type[AgentError], ...] = (OutcomeUnknown, StoreError, EpochCollision, DrainTimeout)
    return next((error for kind in kinds for error in errors if isinstance(error, kind)), None)


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []  # the first execution of all


def _read(folder: Path, mine: Identity) -> Execution:
    """Whose folder it is, if `mine` may publish for it. Raises _NotOurs."""
    try:
        execution = _record(folder)
    except (IntegrityError, OSError) as error:
        raise _NotOurs(str(error)) from error
    if execution.epoch >= mine.epoch:
        msg = f"its epoch {execution.epoch} is not lower than {mine.epoch}"
        raise _NotOurs(msg, execution=execution)
    if mine.job_id and execution.job and execution.job != mine.job_id:
        msg = f"it is of job {execution.job}, and this is job {mine.job_id}"
        raise _NotOurs(msg, execution=execution)
    return execution


def _record(folder: Path) -> Execution:
    """Whose folder it is, by its own record, which must be one that a publisher of ours could have written for it."""
    mode = folder.lstat().st_mode
    if not stat.S_ISDIR(mode):
        msg = "it is a link" if stat.S_ISLNK(mode) else "it is no folder"
        raise _NotOurs(msg, "unknown")
    os.scandir(folder).close()  # whether we may look into it at all
    execution = bookkeeping.read_execution(folder)
    if execution is None:
        msg = f"it has no .dispatch/execution.json, so no publisher ever had it{_by_hand(folder)}"
        raise _NotOurs(msg, "unknown")
    try:
        parse_attempt(execution.attempt)
        parse_epoch(str(execution.epoch))
    except Refused as error:
        msg = f"its record is damaged: {error}"
        raise _NotOurs(msg) from error
    if not _FOLDER_ID.fullmatch(execution.folder_id):
        msg = f"its record is damaged: the folder id is {execution.folder_id[:80]!r}"
        raise _NotOurs(msg)
    if execution.attempt != folder.name:
        # A copy has its original's folder id, and would give other saves the same places.
        msg = f"its record is that of attempt {execution.attempt}: a folder that was copied or renamed"
        raise _NotOurs(msg, execution=execution)
    return execution


def _by_hand(folder: Path) -> str:
    """What a folder without a record holds all the same, and how it is published; nothing if nothing is marked."""
    marked = [name for name in bookkeeping.markers(folder) if os.path.lexists(os.fsencode(folder) + b"/" + name)]
    if not marked:
        return ""
    return (
        f", and its epoch is not known here; {len(marked)} save(s) in it are marked complete, and published by hand "
        f"with DISPATCH_EPOCH=<its epoch> DISPATCH_ATTEMPT={names.shown(os.fsencode(folder.name))} publish watch --once"
    )


def _committed(starter: Starter, executions: Iterable[str]) -> dict[int, set[int]]:
    """The ordinals of all commits by epoch. The store is not asked if no folder holds anything."""
    found: dict[int, set[int]] = {}
    if any(_holds_something(starter.folder / name) for name in executions):
        for order in while_away(starter, lambda: listing.all_orders(starter.store)):
            found.setdefault(order.epoch, set()).add(order.ordinal)
    return found


def _holds_something(folder: Path) -> bool:
    try:
        return any(name != bookkeeping.NAME for name in os.listdir(os.fsencode(folder)))
    except OSError:
        return False  # it vanished


def _open(starter: Starter, name: str, execution: Execution, committed: Mapping[int, set[int]]) -> _Old:
    """Raises _NotOurs."""
    folder = starter.folder / name
    placer = Placer(folder, starter.rule, starter.clock, starter.log)
    try:
        placer.places()
        ordinals = committed.get(execution.epoch, set()) | bookkeeping.already(folder, starter.store.url)
    except (IntegrityError, OSError) as error:
        raise _NotOurs(str(error), execution=execution) from error
    return _Old(folder, execution, placer, ordinals)


def _fenced(old: _Old, why: str) -> Recovered:
    """What the folder still holds. One that is as it was when all of it was published is not looked through."""
    newest = old.placer.newest()
    saves = [entry for entry in os.scandir(os.fsencode(old.folder)) if entry.name != bookkeeping.NAME]
    if all(_as_published(old, save, newest.get(save.name)) for save in saves):
        return Recovered(old.name, "fenced", old.execution, why, standing=len(saves))
    return replace(_held(old, why), state="fenced", reason=why)


def _as_published(old: _Old, save: os.DirEntry[bytes], place: Place | None) -> bool:
    """Whether its newest place needs nothing, and it was neither changed at its top nor marked complete since."""
    if place is None or place.number not in old.ordinals:
        return False
    try:
        marker = bookkeeping.marker_of(old.folder, save.name)
    except IntegrityError:
        return False
    marked = marker is not None and marker.sequence != place.signal.sequence
    return not marked and save.stat(follow_symlinks=False).st_mtime_ns <= place.signal.newest_ns


def while_away(starter: Starter, ask: Callable[[], _T], seconds: float = STORE_AWAY) -> _T:
    """The store's answer, asked for again for so many seconds while it may come. Raises StoreError."""
    give_up = starter.clock.monotonic() + seconds
    patience, tries = Patience(starter.clock, starter.draw), 0
    while True:
        try:
            return ask()
        except StoreError as error:
            if not error.retryable or starter.clock.monotonic() >= give_up:
                raise
            starter.log.once("warning", str(error), "store away", reason=str(error))
        patience.pause(tries)
        tries += 1


def _publish(old: _Old, starter: Starter, wait_owner: float) -> tuple[Recovered, bool]:
    """All that is complete in one folder, by the loop of `publish watch --once`; and whether to go on to the next."""
    store, clock = starter.store, starter.clock
    execution = old.execution
    try:
        with bookkeeping.lock(old.folder, store.url):
            pass
    except AgentError as no:
        return replace(_held(old, str(no)), state="refused", reason=str(no)), True
    beside_from = clock.monotonic() + wait_owner
    log = starter.log.bind(epoch=str(execution.epoch), attempt=execution.attempt)
    mine = replace(
        starter,
        identity=Identity(execution.job or None, execution.epoch, execution.attempt, "ready-made"),
        folder=old.folder,
        rule=_InTime(starter.rule, clock, beside_from + 2 * max(old.settling, default=0.0) + SLACK),
        log=replace(log, said=set()),  # a name may come again in every folder
        beside_from=beside_from,
    )
    started: list[Publisher] = []

    def start() -> Publisher:
        claimed = rank_of(store, execution.epoch, execution.folder_id)
        mine.rank = starter.rank if claimed is None else claimed
        started[:] = [mine()]
        return started[0]

    tally = Tally(outcomes={})
    error: AgentError | None = None
    in_time = True
    try:
        watcher.watch(
            start, Stop(), tally, clock, mine.log, rescan=RESCAN, once=True, start_timeout=wait_owner + STORE_AWAY
        )
    except AgentError as raised:
        error = raised
    except Abort:
        in_time = False
    finally:
        mine.release()
    why = str(error or tally.fenced or ("" if in_time else OUT_OF_TIME))
    result = _reported(old, tally, started[0], why) if started else _held(old, why)
    state = result.state
    if tally.fenced:
        state = "fenced"
    elif isinstance(error, (EpochCollision, Conflict)):
        state = "refused"
    if tally.unsure:
        error = tally.verdict(asked=True)
    elif not in_time:
        error = _out_of_time(result)
    result = replace(result, state=state, reason="" if state == "recovered" else why, error=error)
    # A newer execution's commit would fence what is left of this one.
    return result, in_time and not isinstance(error, StoreError)


def _reported(old: _Old, tally: Tally, publisher: Publisher, why: str) -> Recovered:
    """What became of a folder that had a publisher, which is asked itself of a last pass that was cut short."""
    saves: dict[str, Save] = {}
    failed: dict[str, str] = {}
    for outcome in (tally.outcomes or {}).values():
        if outcome.result == "failed":
            failed[outcome.save] = str(outcome.error)
        else:
            saves[outcome.save] = Save(
                outcome.save, outcome.result, commit=outcome.record.key if outcome.record else ""
            )
    waiting = tally.incomplete if tally.passes else old.waiting
    reasons = {name: verdict.reason for name, verdict in waiting} | failed
    cut_short = tally.under_way or not tally.passes
    seen = [save.name for save in _held(old, why).saves if save.result == "left"] if cut_short else []
    left = {}
    for name in dict.fromkeys((*tally.unpublished, *publisher.pending, *seen)):
        if not publisher.committed(names.decode_name(name)):
            left[name] = reasons.get(name, why)
        elif name in publisher.pending and name not in saves:
            saves[name] = Save(name, "published")
    stand = [name for name in old.view.verdicts if publisher.committed(name) and names.encode(name) not in saves]
    return _summed_up(old, len(stand), tuple(saves.values()), left, waiting)


def _held(old: _Old, why: str) -> Recovered:
    """What a folder holds in which nothing was done."""
    places: dict[bytes, list[Place]] = {}
    for place in old.placer.places():
        places.setdefault(place.name, []).append(place)
    stand = {
        name for name, of_name in places.items() if of_name[-1].number in old.ordinals and name in old.view.verdicts
    }
    looks = {save.name: bookkeeping.fingerprint(save) for save in old.view.survey.saves}
    left = {
        names.encode(name): why
        for name, verdict in old.view.complete.items()
        if name not in stand or bookkeeping.is_new(verdict.signal, looks[name], places[name])
    }
    left |= dict.fromkeys(old.view.out_of_sight, why)
    return _summed_up(old, len(stand), (), left, old.waiting)


def _summed_up(
    old: _Old,
    standing: int,
    saves: tuple[Save, ...],
    left: Mapping[str, str],
    waiting: tuple[tuple[str, Settling], ...],
) -> Recovered:
    abandoned = [Save(name, "abandoned", verdict.reason) for name, verdict in waiting if name not in left]
    kept = [Save(name, "left", why) for name, why in left.items()]
    state: State = "left" if left else "recovered"
    return Recovered(old.name, state, old.execution, standing=standing, saves=(*saves, *kept, *abandoned))


def _unreached(old: _Old) -> Recovered:
    result = _held(old, NOT_REACHED)
    return replace(result, reason=NOT_REACHED, error=_out_of_time(result))


def _unseen(name: str) -> Recovered:
    error = DrainTimeout(f"time ran out before {_encoded(name)} was looked at")
    return Recovered(_encoded(name), "left", reason=NOT_REACHED, error=error)


def _out_of_time(result: Recovered) -> DrainTimeout | None:
    """None if nothing that is complete was left for it."""
    left = [save.name for save in result.saves if save.result == "left"]
    if not left:
        return None
    return DrainTimeout(
        f"time ran out and {', '.join(left)} of {result.name} is not published; a later recovery goes on with it as "
        f"long as no newer epoch has published"
    )


def _encoded(name: str) -> str:
    return names.encode(os.fsencode(name))
