"""`publish init`: the init container's one command, run in every pod of a job before its trainer."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from dispatch_agent.cli import display, options, recovery, signals, starting
from dispatch_agent.cluster import container
from dispatch_agent.errors import DrainTimeout, SettingsError
from dispatch_agent.publish.initialise import Bounds, Init, Ready
from dispatch_agent.publish.start import Starter
from dispatch_agent.publish.watcher import Abort, kept
from dispatch_agent.settings import checkpoint_root

POD = "AGENT_K8S_POD_UID"
ALLOW = "AGENT_ALLOW_RANK_RESTART"


@click.command("init")
@options.root
@options.destination
@options.completion
@options.publishing
@recovery.bounds
@options.option(
    "--start-timeout",
    type=options.Seconds(0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a store that does not answer is tried again before exit 10.",
)
@options.option(
    "--restore-timeout",
    type=options.Seconds(0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to go on restoring. Other ranks wait for that and --timeout.",
)
@options.fall_back
@options.option(
    "--allow-rank-restart",
    is_flag=True,
    help="Let a rank that ran under this identity run again, from what was chosen then: the identity is weakened. Also "
    f"read: {ALLOW}, as by `dispatch-agent exec`.",
)
@options.as_json
@options.logging
def init(
    root: Path | None,
    wait_owner: float,
    timeout: float,
    start_timeout: float,
    restore_timeout: float,
    fall_back: bool,
    allow_rank_restart: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Make everything ready for this execution's trainer; print the path to resume from, if there is one.

    \b
    1. The identity is checked. With AGENT_K8S_POD_UID set (the pod's metadata.uid), a rank that was ready or
       ran under it before is refused: 125.
    2. ROOT/exec/<DISPATCH_ATTEMPT>/ is made for whoever may write to ROOT, and claimed at the store.
    3. What older executions left complete is published, as `recover` does it.
    4. The newest intact save is restored to ROOT/resume/<DISPATCH_ATTEMPT>/. Nothing published is success.

    Run it in every pod: on a shared volume one rank does 2 to 4 for all, and all resume from one save.
    It may be killed at any moment and run again.

    \b
    Exits, so that no trainer starts, with
      125    no valid identity, or this rank already ran under it
      31     this epoch belongs to another attempt at the store; or an older one does whose folder here holds
             complete saves, and then what is published may be another job's
      32     ROOT/exec/<DISPATCH_ATTEMPT> is another job's or execution's
      30     a newer execution has published: this one is stale
      10-12  the store does not answer, refuses, or is too weak
      33     an older execution's commit was sent and may land: the next run finds out
      40     --timeout or --restore-timeout came. An execution that started while older saves are on their way
             would go back behind them, and fence them with its first own. Run it again, or give more time
      22     everything published is damaged, or with --no-fall-back the newest; or a later version wrote it
      20     another rank was not done in time
      143    SIGTERM
    What no later run could publish either does not keep it from starting: the log says `left` and `step back`.
    """
    identity = container.read_identity(os.environ)
    rank, _, log = starting.place_of(identity, given)
    if rank and given["shared_volume"] is None:
        msg = f"this is rank {rank}, so there are several: say --shared-volume if all of them write to one volume"
        raise SettingsError(msg)
    root = checkpoint_root(root)
    folder = root / "exec" / identity.attempt
    store = starting.store_for(given, folder, root)
    if not given["in_place"]:
        starting.check_outside(store, folder.parent)
    # Whatever the image's umask is: the trainer, with a UID of its own, reads what is restored.
    os.umask(os.umask(0) & 0o022)
    told: list[int] = []
    run = Init(
        starter=starting.starter(given, store, identity, rank, folder, log),
        root=root,
        pod=os.environ.get(POD, ""),
        allow_rank_restart=allow_rank_restart or _is_on(os.environ.get(ALLOW, "")),
        fall_back=fall_back,
        bounds=Bounds(start_timeout, wait_owner, timeout, restore_timeout),
        bound=lambda seconds: _bound(seconds, told),
    )
    try:
        with kept():
            ready = run.run()
    except Abort:
        if told:
            log.warning("aborted", reason="it was told to end; run again, it goes on where it was")
            click.get_current_context().exit(128 + told[0])
        _out_of_time(run.starter)
    signals.ignore()
    _say(ready, run, as_json)


def _bound(seconds: float, told: list[int]) -> None:
    """Raise Abort after `seconds`, or at a signal to end, of which there is a note in `told`."""

    def end(number: int, _frame: FrameType | None) -> None:
        told.append(number)
        signals.ignore()
        raise Abort

    if told:
        raise Abort
    signals.abort_within(seconds)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def _is_on(text: str) -> bool:
    return bool(text) and bool(click.BOOL.convert(text, None, None))


def _out_of_time(starter: Starter) -> NoReturn:
    msg = (
        f"time ran out before {starter.folder} was ready; run again, it goes on where it was, or give more --timeout "
        f"or --restore-timeout"
    )
    raise DrainTimeout(msg) from None


def _say(ready: Ready, run: Init, as_json: bool) -> None:
    starter = run.starter
    log = starter.log
    if ready.path is None:
        log.warning("starts from nothing", store=starter.store.url, reason="nothing is published there")
    else:
        log.info("resumes", path=str(ready.path), commit=ready.commit, store=starter.store.url)
    if as_json:
        display.print_json(
            {
                "path": None if ready.path is None else str(ready.path),
                "commit": ready.commit,
                "store": starter.store.url,
                "folder": str(starter.folder),
                "epoch": str(starter.identity.epoch),
                "attempt": starter.identity.attempt,
                "rank": starter.rank,
                "led": ready.led,
                "recovered": [recovery.as_json_of(result) for result in ready.recovered],
            }
        )
    elif ready.path is not None:
        click.echo(os.fsencode(ready.path))
