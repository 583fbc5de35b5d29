"""`dispatch-agent` and `publish`: sends `exec` straight to the entry agent, so that it imports nothing else."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """The console script `dispatch-agent`."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["exec"] and arguments[1:2] not in (["--help"], ["-h"]):
        from dispatch_agent.prologue import main as become  # noqa: PLC0415 (exec loads nothing it does not need)

        become(arguments[1:])
    _end_on_sigterm()
    from dispatch_agent.cli.main import run  # noqa: PLC0415 (exec loads nothing it does not need)

    run(arguments)


def publish() -> NoReturn:
    """The console script `publish`: `dispatch-agent publish`."""
    _end_on_sigterm()
    from dispatch_agent.cli.main import run  # noqa: PLC0415 (exec loads nothing it does not need)

    run(["publish", *sys.argv[1:]], name="publish")


def _end_on_sigterm() -> None:
    """The kernel drops a SIGTERM that PID 1 has no handler for. Until `publish watch` sets its own, none has begun."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))


if __name__ == "__main__":
    main()
