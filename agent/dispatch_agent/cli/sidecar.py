"""`publish watch` as a sidecar: what others see of it, what ends it beside SIGTERM, and its last words."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dispatch_agent import __version__
from dispatch_agent.checkpoint import records, trainer
from dispatch_agent.cli import options, signals
from dispatch_agent.clock import Clock
from dispatch_agent.errors import AgentError, SettingsError
from dispatch_agent.health import state, termination
from dispatch_agent.health.state import Answer, Facts
from dispatch_agent.identity import Identity
from dispatch_agent.logs import Log
from dispatch_agent.publish.parallel import Tick
from dispatch_agent.publish.publisher import Publisher
from dispatch_agent.publish.watcher import Stop, Tally

if TYPE_CHECKING:
    from dispatch_agent.health.metrics import Figures

DRAIN = 20.0
"""Seconds to drain in where nobody said how long: Kubernetes kills after 30."""
LOOK = 0.25
"""Seconds between two looks at whether the trainer has ended."""

wanted = options.together(
    options.option(
        "--listen",
        metavar="[HOST]:PORT",
        help="Answer /startupz, /livez, /readyz and /metrics there over HTTP. HOST empty: on all addresses. "
        "[default: nowhere]",
    ),
    options.option(
        "--stall-timeout",
        type=options.Seconds(1),
        default=600.0,
        show_default=True,
        metavar="SECONDS",
        help="How long nothing may move in a pass before /livez says no. Waiting for the trainer, or for a store that "
        "is away, does not count.",
    ),
    options.option(
        "--grace",
        type=options.Seconds(0),
        metavar="SECONDS",
        help="The pod's terminationGracePeriodSeconds: SIGTERM drains within what is left of it since `dispatch-agent "
        "health terminating` (a preStop hook), or within all of it.",
    ),
    options.option(
        "--done-file",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="Drain and end once this file is there. Relative: below ROOT/exec/<DISPATCH_ATTEMPT>/.dispatch/. It may "
        "hold the attempt; elsewhere below ROOT it must.",
    ),
    options.option(
        "--end-with-trainer",
        is_flag=True,
        help="Drain and end once the trainer has ended that `dispatch-agent exec --hold` started.",
    ),
    options.option(
        "--termination-message",
        metavar="PATH",
        help="Where to leave the verdict, as one short text. [default: /dev/termination-log, where that exists]",
    ),
)
"""The options that only a sidecar needs."""


@dataclass(slots=True)
class Sidecar:
    """One watch, as other threads see it. What they do never holds up the loop that publishes.

    `given` are the command's options. `rank_aside` is the rank of a watch that stands by for rank 0.
    """

    tally: Tally
    stop: Stop
    clock: Clock
    log: Log
    given: dict[str, Any]
    rank_aside: int | None = None
    _publisher: Publisher | None = None
    _uploaded: int = 0
    # The try under way: bytes sent, bytes sent or read back, of how many; when it began, when something last moved.
    _done: int = 0
    _went: int = 0
    _size: int = 0
    _began: float = 0.0
    _moved: float = 0.0
    # How far any try of a save came, and when one last came further: a try that fails again and again moves, too.
    _furthest: dict[str, int] = field(default_factory=dict)
    _advanced: float = 0.0
    _ending: float | None = None  # when the pod began to end
    _known: dict[str, float] = field(default_factory=dict)  # since when a save is seen to be unpublished
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, start: Callable[[], Publisher]) -> Callable[[], Publisher]:
        """`start`, with an eye on what it gives."""

        def started() -> Publisher:
            self._publisher = start()
            return self._publisher

        return started

    def progress(self, drawn: Callable[[str, int], Tick]) -> Callable[[str, int], Tick]:
        """`drawn`, with an eye on what moves."""

        def of(save: str, total: int) -> Tick:
            draw = drawn(save, total)
            with self._lock:
                self._done, self._went, self._size, self._began = 0, 0, total, self.clock.monotonic()

            def tick(count: int) -> None:
                self._count(save, count)
                draw(count)

            return tick

        return of

    def _count(self, save: str, count: int) -> None:
        if count == 0:
            return
        with self._lock:
            self._uploaded += max(count, 0)
            self._done += max(count, 0)
            self._went += abs(count)
            self._moved = self.clock.monotonic()
            if self._went > self._furthest.get(save, 0):
                self._furthest[save] = self._went
                self._advanced = self._moved

    def drain_bound(self) -> float:
        """Seconds that a SIGTERM that comes now leaves to drain in."""
        grace, cap = self.given["grace"], self.given["drain_timeout"]
        if grace is None:
            return DRAIN if cap is None else float(cap)
        return state.drain_bound(grace, None if self._ending is None else self.clock.monotonic() - self._ending, cap)

    def listen(self, identity: Identity, rank: int) -> None:
        """Answer over HTTP from now on, if that is asked for. Raises SettingsError."""
        where = self.given["listen"]
        if not where:
            return
        try:
            from dispatch_agent.health.metrics import exposition  # noqa: PLC0415 (a start without it is faster)
            from dispatch_agent.health.server import Site, serve  # noqa: PLC0415 (as above)
        except ModuleNotFoundError as error:
            msg = f"--listen needs {error.name}, which is not installed: pip install 'dispatch-agent[publish]'"
            raise SettingsError(msg) from error
        answers = {"/startupz": lambda: state.STARTED, "/livez": self._live, "/readyz": self._ready}
        labels = {
            "version": __version__,
            "job": identity.job_id or "",
            "epoch": str(identity.epoch),
            "attempt": identity.attempt,
            "rank": str(rank),
        }
        serve(where, Site(answers, exposition(self._figures, labels), self._terminating), self.log)

    def _live(self) -> Answer:
        return state.live(self.facts(), self.given["stall_timeout"])

    def _ready(self) -> Answer:
        return state.ready(self.facts())

    def _terminating(self) -> Answer:
        if self._ending is None:
            self._ending = self.clock.monotonic()
            self.log.info("terminating", reason="the pod has begun to end; SIGTERM comes once the trainer is gone")
        return Answer(True, "noted: the pod has begun to end")

    def facts(self) -> Facts:
        """What it is at now."""
        tally, began = self.tally, self.tally.pass_began
        return Facts(
            claimed=tally.claimed,
            fenced=str(tally.fenced or ""),
            failure=tally.failure,
            standing_by=tally.standing_by,
            unpublished=tally.unpublished,
            still=None if began is None else self.clock.monotonic() - max(began, self._moved),
            rank=self.rank_aside,
        )

    def _figures(self) -> Figures:
        from dispatch_agent.health.metrics import Figures  # noqa: PLC0415 (as in `listen`)

        tally, publisher, now = self.tally, self._publisher, self.clock.monotonic()
        since = tally.pass_began
        unpublished = tally.unpublished if since is None or publisher is None else publisher.left
        with self._lock:
            self._known = {name: self._known.get(name, now) for name in unpublished}
            oldest = now - min(self._known.values(), default=now)
            done, size = (0, 0) if since is None or self._began < since else (self._done, self._size)
            uploaded = self._uploaded
        return Figures(
            passes=tally.passes,
            failed_passes=tally.failed_passes,
            published=tally.published,
            already=tally.already,
            incomplete=len(tally.incomplete),
            unpublished=len(unpublished),
            oldest_unpublished=oldest,
            uploaded=uploaded,
            upload_done=done,
            upload_size=size,
            claimed=tally.claimed,
            fenced=tally.fenced is not None,
            ready=self._ready().yes,
            live=self._live().yes,
            last_commit=datetime.fromisoformat(tally.newest.committed_at).timestamp() if tally.newest else None,
        )

    def follow_trainer(self, folder: Path, attempt: str, rank: int) -> None:
        """From now on drain once the trainer has ended, if that is asked for."""
        path: Path | None = self.given["done_file"]
        if path is not None:
            path = records.own(folder) / path
        if path is not None or self.given["end_with_trainer"]:
            work = (path, folder, attempt, rank)
            threading.Thread(target=self._follow, args=work, name="trainer", daemon=True).start()

    def _follow(self, done_file: Path | None, folder: Path, attempt: str, rank: int) -> None:
        how = ""
        while not how:
            if self.clock.wait(self.stop.drain, LOOK):
                return
            if done_file is not None:
                said, reason = trainer.done(done_file, attempt, folder, self.given["root"])
                how = str(done_file) if said else ""
                if reason:
                    self.log.once("warning", reason, "done file", reason=reason)
            if not how and self.given["end_with_trainer"]:
                how = self._released(folder, rank)
        self.log.warning("trainer ended", how=how)
        with self._lock:
            self._furthest = {}
            self._advanced = self.clock.monotonic()
        self.stop.ask()
        self._press()

    def _released(self, folder: Path, rank: int) -> str:
        try:
            reason = trainer.held(folder, rank)
        except OSError as error:
            what = "cannot tell whether the trainer runs"
            self.log.once("warning", str(error), what, reason=f"{error}; say it with --done-file instead")
            return ""
        if reason:
            self.log.once("info", reason, "following the trainer", reason=reason)
            return ""
        return f"nobody holds {records.own(folder, f'started.{rank}')} any more: it ended, or closed the descriptor"

    def _press(self) -> None:
        """No kill follows where no signal came, so draining may take as long as it gets on; a store that is away for
        good must not keep the pod."""
        cap = self.given["drain_timeout"]
        began = self.clock.monotonic()
        while True:
            self.clock.wait(threading.Event(), LOOK)
            now = self.clock.monotonic()
            if (cap is not None and now - began > cap) or now - self._advanced > self.given["stall_timeout"]:
                signals.break_off()
                return


@contextmanager
def last_words(given: str | None, tally: Tally) -> Iterator[None]:
    """Leave the verdict of what runs inside where Kubernetes looks for it."""
    path = termination.path_of(given)

    def leave(code: int, sentence: str) -> None:
        counts = (
            f"published {tally.published}, already published {tally.already}, incomplete {len(tally.incomplete)}, "
            f"left unpublished {len(tally.unpublished)}, passes {tally.passes}, failed passes {tally.failed_passes}"
        )
        newest = tally.newest.key if tally.newest else "none of this watch"
        termination.write(path, code, sentence, counts, f"newest commit: {newest}")

    try:
        yield
    except AgentError as error:
        leave(error.exit_code, str(error))
        raise
    leave(0, "done")
