"""What SIGTERM, SIGINT and the end of the time mean to a command that publishes."""

from __future__ import annotations

import signal
from types import FrameType

from dispatch_agent.cli import early
from dispatch_agent.publish.watcher import Abort, Stop


def drain_on_signals(stop: Stop, drain_timeout: float) -> None:
    """The first SIGTERM or SIGINT drains, within a bound; a second one, or the bound, aborts."""

    def drain(_number: int, _frame: FrameType | None) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, _abort)
        signal.setitimer(signal.ITIMER_REAL, drain_timeout)
        stop.ask()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)
    if early.came:
        drain(signal.SIGTERM, None)


def abort_within(seconds: float) -> None:
    """Raise Abort after `seconds`, or at the first SIGTERM or SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, _abort)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))  # 0 would mean never


def ignore() -> None:
    """The end is near anyway: nothing may interrupt the last words."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def _abort(_number: int, _frame: FrameType | None) -> None:
    ignore()  # before it is raised: nothing may interrupt those who handle it
    raise Abort
