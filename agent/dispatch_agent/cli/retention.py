"""`publish prune`: what is to leave the store. Shows it first; deletes with --apply."""

from __future__ import annotations

import os
import random
from typing import Any

import click

from dispatch_agent.cli import display, options
from dispatch_agent.cli.environment import CLOCK, known_variables, open_destination
from dispatch_agent.publish import prune as pruning
from dispatch_agent.publish.once import Patience
from dispatch_agent.publish.prune import Doomed, Litter, Plan, Pruner
from dispatch_agent.publish.retention import LEAST
from dispatch_agent.publish.start import publisher_name
from dispatch_agent.settings import unknown_variables
from dispatch_agent.store.base import Store
from dispatch_agent.store.capabilities import Leftover, require
from dispatch_agent.store.probe import probe


@click.command()
@options.destination
@options.option(
    "--keep",
    type=click.IntRange(LEAST),
    required=True,
    metavar="N",
    help="The newest saves that stay; at least two, the newest and the one to fall back to. Damaged ones do not count.",
)
@options.option(
    "--keep-every",
    type=click.IntRange(1),
    metavar="K",
    help="Of the saves before those, one in K stays. [default: none]",
)
@options.option("--apply", is_flag=True, help="Do it; without, only show what would go.")
@options.option("--accept-weak-store", is_flag=True, help="Go on though the store cannot refuse a lost race.")
@options.workers
@options.as_json
def prune(
    keep: int,
    keep_every: int | None,
    apply: bool,
    accept_weak_store: bool,
    workers: int,
    as_json: bool,
    **given: Any,
) -> None:
    """Delete old saves from the store, and what dead executions left there that no commit names.

    Safe beside publishers, readers and recoveries. Commit records stay, so that nothing is published twice. Saves that
    were published in place are the trainer's own and stay.
    """
    for sentence in unknown_variables(os.environ, known_variables()):
        click.echo(f"warning: {sentence}", err=True)
    store = open_destination(given)
    todo = pruning.plan(store, newest=keep, every=keep_every, workers=workers)
    if apply:
        _carry_out(store, todo, workers, accept_weak=accept_weak_store)
    if as_json:
        display.print_json(_as_json(todo, applied=apply))
    else:
        _show(todo, applied=apply)
    for problem in todo.problems[1:]:
        click.echo(f"publish: {problem}", err=True)
    if todo.problems:
        raise todo.problems[0]


def _carry_out(store: Store, todo: Plan, workers: int, *, accept_weak: bool) -> None:
    found = probe(store)
    require(found, accept_weak=accept_weak)
    pruner = Pruner(
        store=store,
        name=publisher_name(os.environ),
        weak=not found.conditional_create,
        points=found.conditional_replace.value != "no",
        workers=workers,
        clock=CLOCK,
        patience=Patience(CLOCK, random.random),
    )
    total = sum(todo.sizes.values())
    tick = display.progress("pruning", CLOCK)(store.url, total)

    def done(item: Doomed | Litter | Leftover) -> None:
        tick(0 if isinstance(item, Leftover) else sum(item.sizes.values()))

    pruning.carry_out(pruner, todo, done)


def _show(todo: Plan, *, applied: bool) -> None:
    if todo.doomed:
        rows = [
            [
                str(item.record.order.epoch),
                f"{item.record.order.term}.{item.record.order.ordinal}",
                display.shortened(display.shown_name(item.record.save)),
                display.size(sum(item.sizes.values())),
                item.record.committed_at[:19] + "Z",
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
    stay = f"{len(todo.kept)} saves stay"
    if applied:
        click.echo(f"deleted {gone}: {size}; {stay}")
    else:
        click.echo(f"would delete {gone}: {size}; {stay}. Nothing was deleted: add --apply")


def _as_json(todo: Plan, *, applied: bool) -> dict[str, Any]:
    return {
        "applied": applied,
        "pruned": [{"save": i.record.save, "commit": i.record.key, **_sum(i)} for i in todo.doomed],
        "litter": [{"prefix": i.prefix, **_sum(i)} for i in todo.litter],
        "unfinished": [leftover.key for leftover in todo.leftovers],
        "kept": [{"save": record.save, "commit": record.key} for record in todo.kept],
        "problems": [str(problem) for problem in todo.problems],
    }


def _sum(item: Doomed | Litter) -> dict[str, int]:
    return {"objects": len(item.sizes), "size": sum(item.sizes.values())}
