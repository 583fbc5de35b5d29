"""`publish prune`: what is to leave the store, or with --local the volume. Shows it first; deletes with --apply."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import click

from dispatch_agent.checkpoint import names
from dispatch_agent.cli import display, options
from dispatch_agent.cli.environment import CLOCK, open_destination, say_unknown_variables
from dispatch_agent.errors import AgentError, SettingsError, UsageError
from dispatch_agent.publish import prune as pruning
from dispatch_agent.publish import prune_local
from dispatch_agent.publish.once import Patience
from dispatch_agent.publish.prune import Doomed, Litter, Plan, Pruner
from dispatch_agent.publish.prune_local import Copy, Volume
from dispatch_agent.publish.retention import LEAST
from dispatch_agent.publish.start import publisher_name
from dispatch_agent.settings import checkpoint_root
from dispatch_agent.store.base import Store
from dispatch_agent.store.capabilities import Leftover, require
from dispatch_agent.store.probe import probe


@click.command()
@options.destination
@options.option(
    "--keep",
    type=click.IntRange(0),
    required=True,
    metavar="N",
    help="The newest saves that stay; at least two, the newest and the one to fall back to. Damaged ones do not count. "
    "With --local: so many of older executions' stay, 0 for none.",
)
@options.option(
    "--keep-every",
    type=click.IntRange(1),
    metavar="K",
    help="Of the saves before those, one in K stays. [default: none]",
)
@options.option(
    "--local", is_flag=True, help="Prune the checkpoint root: what older executions wrote, and the store has."
)
@options.root
@options.option(
    "--verify",
    is_flag=True,
    help="Read every byte at the store, with --local here too. Without, a save is whole by size: damage that keeps a "
    "file's size is not seen.",
)
@options.option("--apply", is_flag=True, help="Do it; without, only show what would go.")
@options.option("--accept-weak-store", is_flag=True, help="Go on though the store cannot refuse a lost race.")
@options.workers
@options.as_json
def prune(
    keep: int,
    keep_every: int | None,
    local: bool,
    root: Path | None,
    verify: bool,
    apply: bool,
    accept_weak_store: bool,
    workers: int,
    as_json: bool,
    **given: Any,
) -> None:
    """Delete old saves from the store, and what dead executions left there that no commit names.

    The newest --keep saves that are whole stay: whole by size, or with --verify by every byte. Safe beside publishers,
    readers and recoveries. Commit records stay, so that nothing is published twice. Saves that were published in place
    are the trainer's own and stay.

    With --local, deletes saves below ROOT/exec/ and ROOT/resume/ instead: those of executions that a newer one has
    followed, and only what stands committed and whole at the store, as it stands here. Nothing that was changed within
    the last minute, or whose publisher is alive.
    """
    say_unknown_variables()
    _check_options(keep, keep_every, local=local)
    store = open_destination(given)
    if local:
        _prune_local(store, checkpoint_root(root), keep, apply=apply, verify=verify, workers=workers, as_json=as_json)
        return
    todo = pruning.plan(store, newest=keep, every=keep_every, workers=workers, full=verify)
    if apply:
        _carry_out(store, todo, workers, accept_weak=accept_weak_store)
    if as_json:
        display.print_json(_as_json(todo, applied=apply, verified=verify))
    else:
        _show(todo, applied=apply, verified=verify)
    for problem in todo.problems[1:]:
        click.echo(f"publish: {problem}", err=True)
    if todo.problems:
        raise todo.problems[0]


def _check_options(keep: int, keep_every: int | None, *, local: bool) -> None:
    if local and keep_every is not None:
        msg = "--keep-every is for the store: with --local give --keep alone"
        raise UsageError(msg)
    if not local and keep < LEAST:
        msg = f"--keep {keep}: a store keeps at least {LEAST} saves, the newest and the one to fall back to"
        raise UsageError(msg)


def _prune_local(
    store: Store, root: Path, keep: int, *, apply: bool, verify: bool, workers: int, as_json: bool
) -> None:
    if not (root / "exec").is_dir():
        msg = f"{root / 'exec'} is not there: is {root} the checkpoint root, on the right volume?"
        raise SettingsError(msg)
    prune_local.check_apart(store, root)
    before = prune_local.claimed_epoch(store)
    volume = Volume(root, store, before, keep, full=verify, workers=workers, now=time.time_ns)
    todo = prune_local.plan(volume)
    gone: list[Copy] = []
    undone = prune_local.carry_out(volume, todo, gone.append) if apply else []
    going, left = gone if apply else todo.going, [*todo.left, *undone]
    if as_json:
        display.print_json(
            {
                "applied": apply,
                "pruned": [_copy_as_json(copy) for copy in going],
                "kept": [_copy_as_json(copy) for copy in todo.kept],
                "left": [{"path": _shown(item.path), "reason": item.reason} for item in left],
                "unfinished": [_shown(folder) for folder in todo.unfinished],
            }
        )
    else:
        for item in left:
            click.echo(f"left   {_shown(item.path)}: {item.reason}")
        for copy in todo.kept:
            click.echo(f"keep   {_shown(copy.path)}")
        for copy in going:
            click.echo(f"prune  {_shown(copy.path)} ({display.size(copy.size)}), published as {copy.record.key}")
        what = f"{len(going)} saves, {display.size(sum(copy.size for copy in going))}"
        click.echo(f"deleted {what}" if apply else f"would delete {what}. Nothing was deleted: add --apply")
    failed = [item for item in undone if not item.passing]
    if failed:
        msg = f"{len(failed)} could not be deleted; the first, {_shown(failed[0].path)}: {failed[0].reason}"
        raise AgentError(msg)


def _copy_as_json(copy: Copy) -> dict[str, Any]:
    return {"path": _shown(copy.path), "commit": copy.record.key, "size": copy.size}


def _shown(path: Path) -> str:
    return names.shown(os.fsencode(path))


def _carry_out(store: Store, todo: Plan, workers: int, *, accept_weak: bool) -> None:
    found = probe(store)
    require(found, accept_weak=accept_weak)
    pruner = Pruner(
        store=store,
        name=publisher_name(os.environ),
        weak=found.weak,
        points=found.points,
        workers=workers,
        clock=CLOCK,
        patience=Patience(CLOCK, random.random),
    )
    total = sum(todo.sizes.values())
    tick = display.progress("pruning", CLOCK)(store.url, total)

    def done(item: Doomed | Litter | Leftover) -> None:
        tick(0 if isinstance(item, Leftover) else sum(item.sizes.values()))

    pruning.carry_out(pruner, todo, done)


def _show(todo: Plan, *, applied: bool, verified: bool) -> None:
    if todo.doomed:
        rows = [
            [
                str(item.record.order.epoch),
                f"{item.record.order.term}.{item.record.order.ordinal}",
                display.shortened(display.shown_name(item.record.save)),
                display.size(sum(item.sizes.values())),
                display.printable(item.record.committed_at[:19]) + "Z",
            ]
            for item in todo.doomed
        ]
        click.echo(display.table(rows, ["EPOCH", "PLACE", "SAVE", "SIZE", "COMMITTED"]))
    gone = ", ".join(
        [
            f"{len(todo.doomed)} saves",
            f"{len(todo.litter)} uploads of dead executions that came to nothing",
            f"{len(todo.leftovers)} unfinished writes of theirs",
        ]
    )
    size = f"{display.size(sum(todo.sizes.values()))} in {len(todo.sizes)} objects"
    whole = "every byte of which is right" if verified else "that are whole by size (--verify reads every byte)"
    stay = f"{len(todo.kept)} saves stay, and --keep counts those {whole}"
    if applied:
        click.echo(f"deleted {gone}: {size}; {stay}")
    else:
        click.echo(f"would delete {gone}: {size}; {stay}. Nothing was deleted: add --apply")


def _as_json(todo: Plan, *, applied: bool, verified: bool) -> dict[str, Any]:
    return {
        "applied": applied,
        "verified": verified,
        "pruned": [{"save": i.record.save, "commit": i.record.key, **_sum(i)} for i in todo.doomed],
        "litter": [{"prefix": i.prefix, **_sum(i)} for i in todo.litter],
        "unfinished": [leftover.key for leftover in todo.leftovers],
        "kept": [{"save": record.save, "commit": record.key} for record in todo.kept],
        "problems": [str(problem) for problem in todo.problems],
    }


def _sum(item: Doomed | Litter) -> dict[str, int]:
    return {"objects": len(item.sizes), "size": sum(item.sizes.values())}
