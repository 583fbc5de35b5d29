"""The local half of a pass: look at the folder, judge every save, give each complete generation its durable place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dispatch_agent.checkpoint import folder as bookkeeping
from dispatch_agent.checkpoint import formats, names, scan
from dispatch_agent.checkpoint.folder import Place
from dispatch_agent.checkpoint.save import Complete, Ignored, Settling, Snapshot, Survey, Verdict
from dispatch_agent.clock import Clock
from dispatch_agent.errors import SaveError, SourceChanged
from dispatch_agent.logs import Log
from dispatch_agent.publish.publication import Placed

Done = Callable[[Place], bool]
"""Whether a place needs nothing more."""


class Rule(Protocol):
    """A completion rule: `quiet` is the seconds since this publisher last saw the save change."""

    def judge(self, save: Snapshot, survey: Survey, quiet: float) -> Verdict:
        """What the rule says of one save in one look at its folder."""
        ...


@dataclass(frozen=True, slots=True)
class View:
    """One look at the folder, judged. Verdicts by raw name."""

    survey: Survey
    verdicts: dict[bytes, Verdict]

    @property
    def seen(self) -> int:
        """How many saves there are, finished or not, readable or not."""
        judged = sum(not isinstance(verdict, Ignored) for verdict in self.verdicts.values())
        return judged + len(self.survey.unreadable.keys() - self.verdicts.keys())

    @property
    def out_of_sight(self) -> tuple[str, ...]:
        """Saves that are said to be complete and cannot be looked at."""
        marked = self.survey.unreadable.keys() & self.survey.markers.keys()
        return tuple(sorted(names.encode(name) for name in marked))

    @property
    def complete(self) -> dict[bytes, Complete]:
        return {name: verdict for name, verdict in self.verdicts.items() if isinstance(verdict, Complete)}


class Placer:
    """Looks at one folder by one rule, and remembers since when each save has been quiet."""

    def __init__(self, folder: Path, rule: Rule, clock: Clock, log: Log) -> None:
        self.folder = folder
        self.rule = rule
        self.clock = clock
        self.log = log
        self._quiet: dict[bytes, tuple[Snapshot, float]] = {}
        self._places: list[Place] = []

    def view(self) -> View:
        """Look at every save. Never raises for what concerns one save alone."""
        survey = scan.survey(self.folder)
        verdicts = {save.name: self._judge(save, survey) for save in survey.saves}
        self._quiet = {name: seen for name, seen in self._quiet.items() if name in verdicts}
        return View(survey, verdicts)

    def look(self, name: bytes) -> tuple[Snapshot, Verdict]:
        """Look at one save anew. Raises SourceChanged if it is gone."""
        survey = scan.survey(self.folder)
        for save in survey.saves:
            if save.name == name:
                return save, self._judge(save, survey)
        msg = f"{names.encode(name)} vanished from {self.folder} while it was read"
        raise SourceChanged(msg)

    def place(self, view: View, only: bytes | None, done: Done) -> list[Placed]:
        """Give every new complete generation its place; those that are not `done` yet, in order.

        With `only`, nothing else is to be published, and what else is complete is placed only by the trainer's own
        word: another rule was chosen for that one save. A save that is complete by its rule and yet cannot be (a
        truncated file, bytes changed after the signal) is put back among the waiting in `view`.
        """
        saves = {save.name: save for save in view.survey.saves}
        mine = {n: v for n, v in view.complete.items() if only in (None, n) or v.signal.rule == "marker"}
        fresh = []
        earlier: dict[bytes, list[Place]] = {}
        for known in self.places():
            earlier.setdefault(known.name, []).append(known)
        for name, verdict in mine.items():
            seen = bookkeeping.fingerprint(saves[name])
            if bookkeeping.is_new(verdict.signal, seen, earlier.get(name, [])):
                problem = self._problem(saves[name], verdict.signal.rule)
                if problem:
                    view.verdicts[name] = Settling(problem, stuck=True)
                else:
                    fresh.append((name, verdict.signal, seen))
                    self.log.info("complete", save=names.encode(name), rule=verdict.signal.rule, why=verdict.why)
        if fresh:
            bookkeeping.place(self.folder, fresh)
        newest = self.newest()
        pending = []
        for name in mine:
            place = newest.get(name)
            if place is None or done(place):
                continue
            if place.fingerprint != bookkeeping.fingerprint(saves[name]):
                view.verdicts[name] = Settling("it changed after the signal that said it was complete", stuck=True)
            elif only in (None, name):
                pending.append(Placed(place, saves[name]))
        return sorted(pending, key=lambda placed: placed.place.number)

    def waiting(self, view: View, done: Done) -> tuple[tuple[str, Settling], ...]:
        """What is not finished, and why. Not those that are published as they stand: a tracker file names one save
        only, and says nothing any more of the ones before it."""
        newest = self.newest()
        unreadable = view.survey.unreadable
        waiting = [(names.encode(name or b"."), Settling(why, stuck=True)) for name, why in unreadable.items()]
        for save in view.survey.saves:
            verdict, place = view.verdicts[save.name], newest.get(save.name)
            if not isinstance(verdict, Settling):
                continue
            if place and done(place) and place.fingerprint == bookkeeping.fingerprint(save):
                continue
            waiting.append((names.encode(save.name), verdict))
        return tuple(waiting)

    def places(self) -> list[Place]:
        """The places of the folder. Their records never change, so each is read once."""
        self._places = bookkeeping.places(self.folder, self._places)
        return self._places

    def newest(self) -> dict[bytes, Place]:
        """The place of the newest generation of every name."""
        return {place.name: place for place in self.places()}

    def before(self, place: Place) -> set[int]:
        """The numbers of the earlier generations of the same name."""
        return {p.number for p in self.places() if p.name == place.name and p.number < place.number}

    def _judge(self, save: Snapshot, survey: Survey) -> Verdict:
        now = self.clock.monotonic()
        before = self._quiet.get(save.name)
        since = before[1] if before and not scan.differences(before[0], save) else now
        self._quiet[save.name] = (save, since)
        return self.rule.judge(save, survey, now - since)

    def _problem(self, save: Snapshot, rule: str) -> str:
        """What is wrong inside the save; '' also if it cannot be read, which its own try will say."""
        try:
            return formats.check(self.folder, save, rule)
        except SaveError:
            return ""
