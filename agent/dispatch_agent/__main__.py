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
    if arguments[:1] == ["health"]:
        from dispatch_agent.cli.health import answer, is_plain  # noqa: PLC0415 (nor does a probe)

        if is_plain(arguments[1:]):
            answer(*arguments[1:])
    _run(arguments, "dispatch-agent")


def publish() -> NoReturn:
    """The console script `publish`: `dispatch-agent publish`."""
    _run(["publish", *sys.argv[1:]], "publish")


def _run(arguments: list[str], name: str) -> NoReturn:
    # Before what takes long to import: a third of a second in which a SIGTERM may come.
    from dispatch_agent.cli import early  # noqa: PLC0415 (exec loads nothing it does not need)

    if arguments[:2] == ["publish", "watch"]:
        early.hold()
    else:
        early.end()
    from dispatch_agent.cli.main import run  # noqa: PLC0415 (as above)

    run(arguments, name=name)


if __name__ == "__main__":
    main()
