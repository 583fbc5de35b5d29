"""What SIGTERM, SIGINT and the end of the time mean to a command that publishes."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from dispatch_agent.cli import early
from dispatch_agent.publish.watcher import Abort, Stop

TOGETHER = 1.0
"""Seconds within which two SIGTERM are one order: timeout(1) and batch systems tell a process, then its group."""


def drain_on_signals(stop: Stop, bound: Callable[[], float]) -> None:
    """The first SIGTERM or SIGINT drains, within as many seconds as `bound` then says; a further one, or the bound,
    aborts."""

    def drain(_number: int, _frame: FrameType | None) -> None:
        began = time.monotonic()

        def again(number: int, frame: FrameType | None) -> None:
            if time.monotonic() - began > TOGETHER:
                _abort(number, frame)

        signal.signal(signal.SIGTERM, again)
        for number in (signal.SIGINT, signal.SIGALRM):
            signal.signal(number, _abort)
        signal.setitimer(signal.ITIMER_REAL, bound())
        stop.ask()

    sys.unraisablehook = _raise_again
    signal.signal(signal.SIGALRM, _abort)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)
    if early.came:
        drain(signal.SIGTERM, None)


def abort_within(seconds: float) -> None:
    """Raise Abort after `seconds`, or at the first SIGTERM or SIGINT."""
    sys.unraisablehook = _raise_again
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, _abort)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))  # 0 would mean never


def break_off() -> None:
    """Raise Abort in the main thread, from any other."""
    signal.setitimer(signal.ITIMER_REAL, 1e-3)


def ignore() -> None:
    """The end is near anyway: nothing may interrupt the last words."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def _abort(_number: int, _frame: FrameType | None) -> None:
    ignore()  # before it is raised: nothing may interrupt those who handle it
    raise Abort


def _raise_again(swallowed: sys.UnraisableHookArgs) -> None:
    """What a signal raises inside a finaliser, or where a weak reference ends, the interpreter swallows. Measured: one
    Abort in eighty, beside uploads; then nothing would end the command any more."""
    if not isinstance(swallowed.exc_value, Abort):
        sys.__unraisablehook__(swallowed)
        return
    signal.signal(signal.SIGALRM, _abort)
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
