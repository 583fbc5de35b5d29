"""Runs a training script on several ranks of this machine, as torchrun does: `launch.py SCRIPT RANKS OPTIONS…`.

The script is imported once, before the ranks are forked: importing torch costs more than a whole run here. It stays in
one process group with its ranks, so that one signal reaches all of them.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from types import ModuleType


def main() -> None:
    """Start the ranks and end as they do."""
    script, ranks, *given = sys.argv[1:]
    sys.argv[:] = [script, *given]
    module = importlib.import_module(script)
    if int(ranks) == 1:
        module.main()
        return
    os.environ.update(
        WORLD_SIZE=ranks,
        LOCAL_WORLD_SIZE=ranks,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(_free_port()),
        GLOO_SOCKET_IFNAME="lo",
    )
    children = [_fork(module, rank) for rank in range(int(ranks))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(0 if not any(codes) else f"the ranks ended with {codes}")


def _fork(module: ModuleType, rank: int) -> int:
    child = os.fork()
    if child:
        return child
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    code = 1
    try:
        module.main()
        code = 0
    except BaseException:  # noqa: BLE001 (a rank never returns into the launcher's code, whatever it raises)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not torn down: gloo's destructors hang now and then when the other rank is leaving too.
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
