"""`publish recover`: what the next execution runs before its trainer, or an operator by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dispatch_agent.cli import display, options, signals, starting
from dispatch_agent.cluster import container
from dispatch_agent.errors import DrainTimeout, Refused, SettingsError
from dispatch_agent.identity import Identity, parse_epoch
from dispatch_agent.publish import recover as recovering
from dispatch_agent.publish.recover import Recovered
from dispatch_agent.publish.start import Starter
from dispatch_agent.publish.watcher import Abort
from dispatch_agent.settings import checkpoint_root

bounds = options.together(
    options.option(
        "--wait-owner",
        type=options.Seconds(0),
        default=30.0,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait for a folder's own publisher that is still alive, before going on beside it. The "
        "default is Kubernetes' grace period: what was told to end is gone by then.",
    ),
    options.option(
        "--timeout",
        type=options.Seconds(0),
        default=600.0,
        show_default=True,
        metavar="SECONDS",
        help="How long to go on in all; of init, with the claim and the recovery.",
    ),
)


@click.command()
@options.root
@options.destination
@options.completion
@options.publishing
@options.option(
    "--before",
    metavar="EPOCH",
    help="Recover executions of lower epochs than this; by hand, where no identity is set. [default: this execution's]",
)
@bounds
@options.as_json
@options.logging
def recover(
    root: Path | None, before: str | None, wait_owner: float, timeout: float, as_json: bool, **given: Any
) -> None:
    """Publish what older executions left complete below ROOT/exec/, before this one's trainer starts.

    Every save is published for the execution that wrote it, under its own epoch: the oldest first, and nothing once a
    newer epoch has published. What is incomplete is listed as abandoned. Nothing is deleted. Give it the options for
    completion that `watch` has: the same environment does.

    \b
    Exits with the first that applies of
      33     a commit was sent, and whether it landed is unknown
      10-12  the store does not answer, refuses, or is too weak
      31     an older epoch belongs to another attempt at the store
      40     time ran out, or SIGTERM came, and something complete is left unpublished
      0      else, also where something is fenced, unknown, refused, abandoned, or cannot be published at all:
             the next execution must be able to start
    """
    identity = _who(before)
    rank, stand_by, log = starting.place_of(identity, given)
    folder = checkpoint_root(root) / "exec"
    results: list[Recovered] = []
    if stand_by:
        log.info("standing by", reason=f"rank {rank}: rank 0 recovers for all ranks of a shared volume")
    else:
        store = starting.store_for(given, folder / "*", root)
        starting.check_outside(store, folder)
        if not folder.parent.is_dir():
            log.warning("nothing to recover", reason=f"{folder.parent} is not there: is that the right volume?")
        results = _within(timeout, starting.starter(given, store, identity, rank, folder, log), wait_owner)
    if as_json:
        display.print_json([as_json_of(result) for result in results])
    else:
        _show(results, folder)
    error = recovering.verdict(results)
    if error is not None:
        raise error


def _within(seconds: float, starter: Starter, wait_owner: float) -> list[Recovered]:
    try:
        signals.abort_within(seconds)
        results = recovering.recover(starter, wait_owner)
    except Abort:
        msg = f"time ran out before anything in {starter.folder} was reported; run it again"
        raise DrainTimeout(msg) from None
    signals.ignore()
    return results


def _who(before: str | None) -> Identity:
    """Who recovers: this execution or, by hand, nobody but a bound to what is older."""
    try:
        mine = container.read_identity(os.environ)
    except Refused as error:
        if before is None:
            msg = f"{error}; or say with --before EPOCH which executions are older"
            raise Refused(msg) from error
        return Identity(os.environ.get("DISPATCH_JOB_ID"), parse_epoch(before), "", "ready-made")
    if before is None:
        return mine
    if parse_epoch(before) > mine.epoch:
        msg = f"--before is {before}, and this execution's own epoch is {mine.epoch}: it would recover itself; drop it"
        raise SettingsError(msg)
    return replace(mine, epoch=parse_epoch(before))


def _show(results: Sequence[Recovered], folder: Path) -> None:
    """A line for every execution that there is anything to say of, and one for each of its saves."""
    silent = 0
    for result in results:
        if not result.worth_saying:
            silent += 1
            continue
        epoch = f" (epoch {result.execution.epoch})" if result.execution else ""
        click.echo(
            f"{result.state:9}  {display.shown_name(result.name)}{epoch}{': ' if result.reason else ''}{result.reason}"
        )
        for save in result.saves:
            click.echo(f"  {save.result:9}  {display.shown_name(save.name)}{': ' if save.reason else ''}{save.reason}")
    if silent:
        which = f"{silent} older execution(s)" if silent == len(results) else f"the {silent} other(s)"
        click.echo(f"nothing    is left to publish of {which} in {folder}")
    elif not results:
        click.echo(f"nothing    to recover in {folder}")


def as_json_of(result: Recovered) -> dict[str, Any]:
    """For programs. An epoch is a decimal string: it may not fit a JSON number."""
    execution = result.execution
    return {
        "name": result.name,
        "state": result.state,
        "reason": result.reason or None,
        "epoch": str(execution.epoch) if execution else None,
        "job": execution.job or None if execution else None,
        "standing": result.standing,
        "saves": [
            {
                "save": save.name,
                "result": save.result,
                "reason": save.reason or None,
                "commit": save.commit or None,
            }
            for save in result.saves
        ],
    }
