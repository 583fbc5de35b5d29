"""`dispatch-agent` and `publish`: sends `exec` straight to the entry agent, so that it imports nothing else."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """The console script `dispatch-agent`."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["exec"] and arguments[1:2] not in (["--help"], ["-h"]):
        from dispatch_agent.prologue import main as become  # noqa: PLC0415 (exec loads nothing it does not need)

        become(arguments[1:])
    from dispatch_agent.cli.main import run  # noqa: PLC0415 (exec loads nothing it does not need)

    run(arguments)


def publish() -> NoReturn:
    """The console script `publish`: `dispatch-agent publish`."""
    from dispatch_agent.cli.main import run  # noqa: PLC0415 (exec loads nothing it does not need)

    run(["publish", *sys.argv[1:]], name="publish")


if __name__ == "__main__":
    main()
