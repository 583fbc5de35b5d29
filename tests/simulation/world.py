"""One world: a plan, run by one source of decisions, checked after every step and at the end."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from tests.protocol.checks import check_invariants
from tests.protocol.jobs import Execution
from tests.protocol.writers import PROVED
from tests.simulation.disk import Disk, simulated
from tests.simulation.invariants import Content, Invariants, Truth, sequence_of, stored_content
from tests.simulation.plans import Folder, Plan, Prune, PruneLocal, Reader, Recover, Remount, Step, Trainer, Watch
from tests.simulation.scheduler import (
    Actor,
    ActorsClock,
    Crash,
    Decisions,
    Drawn,
    Recorded,
    Scheduler,
    Source,
    Violation,
    violated,
)
from tests.simulation.store import Bucket, Handle

from dispatch_agent.checkpoint import completion, marks, names
from dispatch_agent.clock import Clock
from dispatch_agent.errors import (
    AgentError,
    Conflict,
    EpochCollision,
    Fenced,
    Incomplete,
    NothingPublished,
    OutcomeUnknown,
    StoreError,
)
from dispatch_agent.logs import Log
from dispatch_agent.publish import oneshot, prune, prune_local, recover, restore, retention, watcher
from dispatch_agent.publish.once import Patience
from dispatch_agent.publish.publisher import Outcome, Pass, Publisher
from dispatch_agent.publish.start import Starter
from dispatch_agent.publish.watcher import Stop, Tally
from dispatch_agent.settings import PublishSettings
from dispatch_agent.store.capabilities import Capabilities
from dispatch_agent.support import Support

LONGEST = 20_000
NO = Support("no", "declared", "")
WEAK = Capabilities(NO, NO, PROVED.atomic_visibility, PROVED.list_after_write, PROVED.checksums)
RULE = completion.parse_rule("marker")


@dataclass(frozen=True)
class Result:
    """What became of a world: the first violation, everything that happened, and the decisions that led there."""

    plan: Plan
    violation: Violation | None
    trace: tuple[str, ...]
    decisions: Decisions
    published: tuple[str, ...]
    """Every commit in its order, as `<execution>.<term>.<ordinal> <save>`."""

    @property
    def commits(self) -> int:
        return len(self.published)

    def happened(self, what: str) -> bool:
        """Whether there was such a step."""
        return any(what in line for line in self.trace)


def files_of(name: str, tag: str) -> Content:
    """A save's content: two files, or one of the save's name."""
    data = f"{name} {tag}".encode()
    return {name: data * 4} if name.endswith(".ckpt") else {"weights": data * 4, "in/state": data}


class World:
    """Everything that the processes of one plan share."""

    def __init__(self, plan: Plan, source: Source, top: Path) -> None:
        self.plan = plan
        self.top = top
        self.scheduler = Scheduler(source, LONGEST)
        self.disk = Disk()
        self.truth = Truth([self.execution(folder).folder for folder in plan.folders])
        self.invariants = Invariants(self.truth, self.scheduler, weak=plan.weak, points=not plan.weak)
        self.bucket = Bucket(
            self.scheduler,
            self.invariants,
            verifies=plan.verifies,
            conditions=not plan.weak,
            away=plan.away,
            stuck=plan.stuck,
            stalls=list(plan.stalls),
        )
        self.invariants.bucket = self.bucket
        self.found = WEAK if plan.weak else PROVED
        self.stops: dict[Folder, list[Stop]] = {}
        self.skews: dict[str, float] = {}
        self.disk.step = self._disk_step
        self.disk.clock = lambda: self.scheduler.stamp(self.skews.get(self._name, 0.0))

    @property
    def _name(self) -> str:
        return self.scheduler.current.name if self.scheduler.current else ""

    def execution(self, folder: Folder) -> Execution:
        return Execution(self.top / str(folder.volume), folder.number, folder.attempt)

    def _disk_step(self) -> None:
        actor = self.scheduler.current
        if actor is not None and self.scheduler.point(actor, ("crash",)):
            self.scheduler.say(actor.name, "DIES")
            actor.dead = True
            raise Crash

    # --- the main part --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All processes until they have ended, then what is left is published without faults. Raises Violation."""
        for process in self.plan.processes:
            do: Callable[[Actor], None] = {
                Trainer: self._trainer,
                Watch: self._watch,
                Reader: self._reader,
                Remount: self._remount,
                Prune: self._prune,
                PruneLocal: self._prune_local,
                Recover: self._recover,
            }[type(process)](process)  # type: ignore[operator]
            self.skews[process.name] = getattr(process, "skew", 0.0)
            self.scheduler.add(process.name, do)
        self.scheduler.run()
        self.scheduler.source = Recorded({})
        self.bucket.away = self.bucket.stuck = ()
        if not self.plan.land_last:
            self.scheduler.land_all()
        self._finish()
        if self.plan.land_last:
            self.scheduler.land_all()
            self._check_end()

    def clock(self, actor: Actor) -> ActorsClock:
        return ActorsClock(self.scheduler, actor, self.skews.get(actor.name, 0.0))

    def sleep(self, actor: Actor, until: float) -> None:
        if until > self.scheduler.now:
            self.scheduler.wait(actor, threading.Event(), until - self.scheduler.now)

    def starter(self, actor: Actor, execution: Execution, rank: int = 0) -> Starter:
        clock = self.clock(actor)
        return _Checked(
            store=Handle(self.bucket, actor),
            identity=execution.identity,
            folder=execution.folder,
            settings=PublishSettings(workers=1),
            rule=RULE,
            rank=rank,
            clock=clock,
            log=self.log(clock),
            progress=lambda _save, _size: lambda _n: None,
            draw_nonce=lambda: self._nonce(actor),
            draw=lambda: 0.5,
            environ={"POD_NAME": actor.name},
            _found=self.found,
            reports=lambda folder, outcome: self.invariants.reports(actor, folder, outcome),
        )

    def log(self, clock: Clock) -> Log:
        return Log(lambda line: self.scheduler.say(self._name, f"# {line}"), clock, least="error")

    def _nonce(self, actor: Actor) -> str:
        count = len(self.invariants.nonces[actor.name])
        nonce = hashlib.sha256(f"{self.plan.seed}/{actor.name}/{count}".encode()).hexdigest()[:12]
        self.invariants.start(actor, nonce)
        return nonce

    def _ended(self, actor: Actor, execution: Execution, error: AgentError | None, begun: set[Any]) -> None:
        code = error.exit_code if error else 0
        self.scheduler.say(actor.name, f"ends with {code}" + (f": {error}" if error else ""))
        if isinstance(error, Fenced):
            self._is_stale(execution, error)
        elif isinstance(error, EpochCollision):
            if len({f.attempt for f in self.plan.folders}) == len({f.number for f in self.plan.folders}):
                violated("I5", f"{actor.name} ends with {error}, and there is one attempt")
        elif isinstance(error, Conflict) and not self.plan.weak:
            violated("I8", f"{actor.name} ends with {error}, and nobody else writes")
        self.invariants.ends(actor, code, begun)

    def _is_stale(self, execution: Execution, error: Fenced) -> None:
        newest = self.invariants.newest
        terms = self.invariants.terms(execution.epoch)
        if (newest is None or newest.epoch <= execution.epoch) and terms < 2:
            violated("I9", f"{error}, and nothing newer is published")

    # --- processes ------------------------------------------------------------------------------------------------

    def _watch(self, plan: Watch) -> Callable[[Actor], None]:
        execution = self.execution(plan.folder)

        def kubelet(actor: Actor, watch: Actor, stop: Callable[[], Stop]) -> None:
            self.sleep(actor, plan.drain)
            if watch in self.scheduler.actors:
                self.scheduler.say("kubelet", f"SIGTERM to {watch.name}")
                stop().ask()
            if math.isinf(plan.kill):
                return
            self.sleep(actor, plan.kill)
            if watch in self.scheduler.actors:
                self.scheduler.say("kubelet", f"SIGKILL to {watch.name}")
                watch.dead = True
                stop().ask()

        def run(actor: Actor) -> None:
            stops = [Stop()]
            self.scheduler.add(f"kubelet-{actor.name}", lambda own: kubelet(own, actor, lambda: stops[-1]))
            self.sleep(actor, plan.start)
            for _ in range(plan.lives):
                if self.scheduler.now >= plan.kill:
                    return
                actor.dead = False
                begun = set(self.invariants.sent[actor.name])
                stop = Stop()
                if self.scheduler.now >= plan.drain:
                    stop.ask()
                stops.append(stop)
                self.stops.setdefault(plan.folder, []).append(stop)
                starter = self.starter(actor, execution, plan.rank)
                try:
                    error = self._life(actor, starter, stop)
                    self._ended(actor, execution, error, begun)
                    if error is None or isinstance(error, Fenced):
                        return
                except Crash:
                    pass
                finally:
                    starter.release()

        return run

    def _life(self, actor: Actor, starter: Starter, stop: Stop, *, once: bool = False) -> AgentError | None:
        tally = Tally()
        clock = self.clock(actor)
        try:
            watcher.watch(
                starter,
                stop,
                tally,
                clock,
                self.log(clock),
                rescan=5.0,
                once=once,
                start_timeout=60.0,
            )
        except AgentError as error:
            return error
        return tally.verdict(asked=not once)

    def _trainer(self, plan: Trainer) -> Callable[[Actor], None]:
        execution = self.execution(plan.folder)

        def run(actor: Actor) -> None:
            self.sleep(actor, plan.start)
            execution.folder.mkdir(parents=True, exist_ok=True)
            try:
                for step in plan.steps:
                    self._step(actor, plan, execution, step)
            except FileNotFoundError as error:
                self.scheduler.say(actor.name, f"stops: {error}")  # its save was taken away under its hands

        return run

    def _step(self, actor: Actor, plan: Trainer, execution: Execution, step: Step) -> None:
        if step.kind == "sleep":
            self.sleep(actor, self.scheduler.now + step.seconds)
            return
        folder = execution.folder
        where = (folder, names.encode(step.name.encode()))
        if step.kind == "delete":
            self._delete(actor, folder / step.name, where, plan.skew)
        elif step.kind in ("save", "begin"):
            self._write(actor, folder / step.name, where, files_of(step.name, step.tag), plan.skew)
        if step.kind in ("save", "say", "publish") and (folder / step.name).exists():
            stood = self.truth.standing[where][1] is not None
            self._say_complete(actor, folder / step.name, where)
            if step.kind == "publish":
                self._one_shot(actor, execution, step.name, stood=stood)

    def _write(self, actor: Actor, path: Path, where: tuple[Path, str], content: Content, skew: float) -> None:
        single = path.name in content
        for file, data in content.items():
            self._disk_step()
            self.truth.standing[where] = (content, None)
            target = path if single else path / file
            above = [] if single else [path, target.parent] if target.parent != path else [path]
            for made in above:
                made.mkdir(exist_ok=True)
            target.write_bytes(data)
            for touched in (target, *reversed(above)):
                self.disk.touch(touched, self.scheduler.stamp(skew))
            self.scheduler.say(actor.name, f"writes {path.name}/{file}")

    def _delete(self, actor: Actor, path: Path, where: tuple[Path, str], skew: float) -> None:
        if not path.exists():
            return
        for top, folders, files in os.walk(path, topdown=False):
            for name in sorted(files):
                self._disk_step()
                self.truth.standing[where] = ({}, None)
                Path(top, name).unlink()
                self.disk.touch(Path(top), self.scheduler.stamp(skew))
                self.scheduler.say(actor.name, f"removes {Path(top, name).relative_to(path.parent)}")
            for name in sorted(folders):
                Path(top, name).rmdir()
                self.disk.touch(Path(top), self.scheduler.stamp(skew))
        self._disk_step()
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
        self.truth.standing.pop(where, None)
        self.scheduler.say(actor.name, f"removes {path.name}")

    def _say_complete(self, actor: Actor, path: Path, where: tuple[Path, str]) -> None:
        content = self.truth.standing[where][0]
        marker = marks.mark_complete(path)
        self.truth.standing[where] = (content, marker.sequence)
        self.truth.finished[where[0], marker.sequence] = (where[1], content)
        self.scheduler.say(actor.name, f"says that {path.name} is complete (word {marker.sequence})")
        if self.plan.hints:
            for folder, stops in self.stops.items():
                if self.execution(folder).folder == where[0]:
                    for stop in stops:
                        stop.wake.set()

    def _one_shot(self, actor: Actor, execution: Execution, name: str, *, stood: bool) -> None:
        begun = set(self.invariants.sent[actor.name])
        starter = self.starter(actor, execution)
        clock = self.clock(actor)
        error: AgentError | None = None
        try:
            outcome = oneshot.publish_one(
                starter,
                starter.store,
                execution.folder,
                name.encode(),
                clock,
                self.log(clock),
                epoch=execution.epoch,
                timeout=20.0,
                stood=stood,
            )
            self.invariants.reports(actor, execution.folder, outcome)
        except AgentError as raised:
            error = raised
        finally:
            starter.release()
        self._ended(actor, execution, error, begun)

    def _reader(self, plan: Reader) -> Callable[[Actor], None]:
        def run(actor: Actor) -> None:
            store = Handle(self.bucket, actor)
            self.sleep(actor, plan.start)
            for look in range(plan.looks):
                try:
                    self._restore(actor, store, self.top / "restored" / f"{actor.name}-{look}")
                except (Crash, StoreError):
                    actor.dead = False
                self.sleep(actor, self.scheduler.now + 3.0)

        return run

    def _restore(self, actor: Actor, store: Handle, target: Path) -> None:
        before = self.invariants.newest
        damaged: list[str] = []
        try:
            got = restore.restore_newest(
                store,
                target,
                save=None,
                fall_back=True,
                progress=lambda _save, _size: lambda _n: None,
                damaged=lambda key, what: damaged.append(f"{key}: {what}"),
                workers=1,
            )
        except Incomplete:
            if before is not None:
                violated("I7", f"{actor.name} finds nothing published, and {before} is")
            return
        self.scheduler.say(actor.name, f"restores {got.record.order}")
        if before is not None and got.record.order.place < before.place:
            violated("I7", f"{actor.name} gets {got.record.order}, and {before} was there before it looked")
        if damaged:
            violated("I2", f"{actor.name} meets a damaged save: {damaged[0]}")
        if content_of(got.path) != self.truth.content(got.record):
            violated("I9", f"{actor.name} gets {got.record.order} back as something else than was written")

    def _remount(self, plan: Remount) -> Callable[[Actor], None]:
        def run(actor: Actor) -> None:
            self.sleep(actor, plan.at)
            self.scheduler.say(actor.name, "every file has another owner and time of change")
            self.disk.remount(self.execution(plan.folder).folder, self.scheduler.stamp())

        return run

    def _prune(self, plan: Prune) -> Callable[[Actor], None]:
        self.invariants.pruners.add(plan.name)

        def run(actor: Actor) -> None:
            self.sleep(actor, plan.start)
            for _ in range(plan.runs):
                try:
                    self._prune_once(actor, plan.every)
                except Crash:
                    actor.dead = False
                except (StoreError, OutcomeUnknown) as error:
                    self.scheduler.say(actor.name, f"ends with {error.exit_code}: {error}")
                self.sleep(actor, self.scheduler.now + 4.0)

        return run

    def _prune_once(self, actor: Actor, every: int | None) -> None:
        store, clock = Handle(self.bucket, actor), self.clock(actor)
        pruner = prune.Pruner(
            store,
            actor.name,
            weak=self.plan.weak,
            points=not self.plan.weak,
            workers=1,
            clock=clock,
            patience=Patience(clock, lambda: 0.5),
        )
        todo = prune.plan(store, newest=retention.LEAST, every=every, workers=1)
        if todo.problems:
            violated("I6", f"{actor.name} cannot prune: {todo.problems[0]}")
        prune.carry_out(pruner, todo, lambda _: None)

    def _prune_local(self, plan: PruneLocal) -> Callable[[Actor], None]:
        def gone(actor: Actor, copy: prune_local.Copy) -> None:
            name = names.encode(copy.snapshot.name)
            self.scheduler.say(actor.name, f"has removed {copy.path}")
            stood, _ = self.truth.standing.pop((copy.folder, name), ({}, None))
            if copy.record.order not in self.invariants.commits or self.truth.content(copy.record) != stood:
                violated("I9", f"{actor.name} removes {name}, and {copy.record.order} is no copy of it")

        def run(actor: Actor) -> None:
            self.sleep(actor, plan.start)
            store = Handle(self.bucket, actor)
            try:
                volume = prune_local.Volume(
                    root=self.top / str(plan.volume),
                    store=store,
                    before=prune_local.claimed_epoch(store),
                    keep=plan.keep,
                    full=plan.full,
                    workers=1,
                    now=self.scheduler.stamp,
                )
                prune_local.carry_out(volume, prune_local.plan(volume), lambda copy: gone(actor, copy))
            except StoreError as error:
                self.scheduler.say(actor.name, f"ends with {error.exit_code}: {error}")

        return run

    def _recover(self, plan: Recover) -> Callable[[Actor], None]:
        execution = self.execution(Folder(plan.number, plan.attempt, plan.volume))

        def run(actor: Actor) -> None:
            self.sleep(actor, plan.start)
            starter = self.starter(actor, execution)
            starter.folder = execution.folder.parent
            try:
                error = recover.verdict(recover.recover(starter, plan.wait_owner))
            except AgentError as raised:
                error = raised
            self._ended(actor, execution, error, set())

        return run

    # --- the end --------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """A last publisher for every folder, the oldest execution first; then nothing is left to do."""
        done = [folder for folder in self.plan.folders if self._last(folder, "last") is None]
        for folder in done:
            self._is_published(folder)
        self._pointer_is_current(done)
        if any(isinstance(process, Prune) for process in self.plan.processes):
            self._check_end()
            self.invariants.pruners.add("last-prune")
            self.scheduler.add("last-prune", lambda actor: self._prune_once(actor, None))
            self.scheduler.run()
        before, sent = dict(self.bucket.objects), self.invariants.uploads
        for folder in done:
            self._last(folder, "again")
            if self.bucket.objects != before or self.invariants.uploads != sent:
                violated("I9", f"a publisher of {folder} that has nothing to do changes the store")
        self._check_end()

    def _last(self, folder: Folder, name: str) -> AgentError | None:
        execution = self.execution(folder)
        if not execution.folder.is_dir():
            return Incomplete("no folder")
        ends: list[AgentError | None] = []

        def run(actor: Actor) -> None:
            starter = self.starter(actor, execution)
            try:
                ends.append(self._life(actor, starter, Stop(), once=True))
                self._ended(actor, execution, ends[-1], set())
            finally:
                starter.release()

        self.scheduler.longest = self.scheduler.count + LONGEST
        self.scheduler.add(f"{name}-{folder}", run)
        self.scheduler.run()
        error = ends[0]
        refused = isinstance(error, (Fenced, EpochCollision)) or (self.plan.weak and isinstance(error, Conflict))
        words = [word for where, (_, word) in self.truth.standing.items() if where[0] == execution.folder and word]
        nothing = isinstance(error, NothingPublished) and not words
        if error is not None and not refused and not nothing:
            violated("I9", f"a last publisher of {folder} ends with {error.exit_code}: {error}")
        return error

    def _pointer_is_current(self, done: list[Folder]) -> None:
        """I4: it names the newest commit once a publisher of its folder has started with nothing in its way."""
        newest, pointer = self.invariants.newest, self.invariants.pointer
        if newest is None or self.plan.weak:
            return
        folder = self.truth.folder(self.invariants.commits[newest].folder)
        if folder in [self.execution(each).folder for each in done] and (
            pointer is None or pointer.place < newest.place
        ):
            violated("I4", f"the pointer names {pointer} at the end, and {newest} is the newest")

    def _is_published(self, folder: Folder) -> None:
        path = self.execution(folder).folder
        mine = [r for r in self.invariants.commits.values() if self.truth.folder(r.folder) == path]
        for (where, name), (content, word) in self.truth.standing.items():
            if where != path or word is None:
                continue
            newest = max((record for record in mine if record.save == name), key=lambda r: r.order, default=None)
            if newest is None or self.truth.content(newest) != content:
                violated("I9", f"{name} of {folder} is complete (word {word}) and its content is not published")

    def _check_end(self) -> None:
        quiet = _Quiet(self.bucket)
        commits = sorted(self.invariants.commits.values(), key=lambda record: record.order)
        for first, second in pairwise(commits):
            if first.folder == second.folder and sequence_of(first.mark) > sequence_of(second.mark):
                violated("I9", f"{first.order} is before {second.order}, and was complete after it")
        self.invariants.generations_count_up()
        for record in commits:
            if record.order not in self.invariants.gone.keys() | self.invariants.late:
                stored = stored_content(self.bucket, record)
                if isinstance(stored, str):
                    violated("I2", f"{record.key}: {stored}")
        if not (self.invariants.gone or self.invariants.late):
            try:
                check_invariants(quiet, pointer_is_current=False)
            except AssertionError as error:
                if "generations of" not in str(error):
                    violated(str(error)[:2], str(error))
        if self.invariants.newest is not None:
            actor = Actor("the last reader")
            self._restore(actor, quiet, Path(tempfile.mkdtemp(dir=self.top)))


@dataclass(slots=True)
class _Checked(Starter):
    """Starts publishers whose reports are looked at."""

    reports: Callable[[Path, Outcome], None] = lambda _folder, _outcome: None

    def __call__(self) -> Publisher:
        publisher = Starter.__call__(self)
        run, reports = publisher.run, self.reports

        def checked(only: bytes | None = None) -> Pass:
            done = run(only)
            for outcome in done.outcomes:
                reports(publisher.session.folder, outcome)
            return done

        publisher.run = checked  # type: ignore[method-assign]
        return publisher


class _Quiet(Handle):
    """The store as it is, asked outside of the run."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket, Actor("look"))

    def _point(self, *_: object) -> str:
        return ""

    def _say(self, *_: str) -> None:
        return


def content_of(path: Path) -> Content:
    if path.is_file():
        return {path.name: path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def run(plan: Plan, decisions: Decisions | None = None) -> Result:
    """Run a plan by these decisions, or by those that its seed draws."""
    rates = plan.rates
    random = Random(f"{plan.seed}/schedule")  # noqa: S311
    source: Drawn | Recorded = (
        Drawn(random, rates.faults, rates.crashes, rates.switches, rates.jumps, rates.freezes)
        if decisions is None
        else Recorded(decisions)
    )
    top = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None, prefix="dispatch-agent-sim-"))
    world = World(plan, source, top)
    violation: Violation | None = None
    try:
        with simulated(world.disk):
            try:
                world.run()
            except Violation as found:
                violation = found
            finally:
                world.scheduler.end()
    finally:
        shutil.rmtree(top)
    trace = tuple(line.replace(str(top), "") for line in world.scheduler.trace)
    published = tuple(
        f"{order.epoch % 1_000_000}.{order.term}.{order.ordinal} {record.save}"
        for order, record in sorted(world.invariants.commits.items())
    )
    return Result(plan, violation, trace, dict(source.decisions), published)
