"""A SIGTERM that comes before a command can handle it. Imported first, so it imports next to nothing."""

from __future__ import annotations

import os
import signal

came: list[int] = []
"""The signals that came early, for `signals.drain_on_signals`."""


def hold() -> None:
    """Keep SIGTERM for later: a sidecar whose trainer ended at once has saves to publish."""
    signal.signal(signal.SIGTERM, lambda number, _frame: came.append(number))


def end() -> None:
    """End at SIGTERM also as PID 1, for which the kernel drops one that has no handler."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))
