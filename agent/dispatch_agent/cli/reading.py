"""The reading commands of `publish`: latest, list, restore, verify, probe. None of them changes what is published."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import click

from dispatch_agent.checkpoint import names
from dispatch_agent.cli import display, options
from dispatch_agent.cli.environment import CLOCK, open_destination, say_unknown_variables
from dispatch_agent.cluster import container
from dispatch_agent.errors import Incomplete, IntegrityError, NewerFormat, SettingsError, StoreTooWeak
from dispatch_agent.publish import listing, pointer, reader
from dispatch_agent.publish import restore as restoring
from dispatch_agent.publish.keys import key_of
from dispatch_agent.publish.records import CommitRecord
from dispatch_agent.settings import resume_folder
from dispatch_agent.store.base import Store
from dispatch_agent.store.capabilities import Capabilities, require
from dispatch_agent.store.probe import probe as probe_store


@click.command()
@options.destination
@options.save_name
@options.as_json
def latest(save: str | None, as_json: bool, **given: Any) -> None:
    """Print the newest published save: by the commit records, which are the truth, not by the pointer."""
    store = _store(given)
    record = reader.newest(store, _encoded(save))
    if not as_json:
        click.echo(display.shown_name(record.save))
        return
    display.print_json({**_as_json(store, record), "pointer": _pointed(store)})


@click.command("list")
@options.destination
@options.save_name
@options.as_json
def list_commits(save: str | None, as_json: bool, **given: Any) -> None:
    """List every published save, the oldest first; the last line is the newest."""
    store = _store(given)
    items = list(reader.published(store, _encoded(save)))[::-1]
    for item in items:
        if item.record is None:
            click.echo(f"unreadable: {item.error}", err=True)
    found = [item.record for item in items if item.record is not None]
    if not items:
        click.echo(f"publish: {reader.nothing(store, _encoded(save))}", err=True)
    if as_json:
        display.print_json([_as_json(store, record) for record in found])
    elif found:
        rows = [
            [
                str(r.order.epoch),
                f"{r.order.term}.{r.order.ordinal}",
                display.shortened(display.shown_name(r.save)),
                str(r.generation),
                str(r.files),
                display.size(r.size),
                display.printable(r.attempt),
                display.printable(r.committed_at[:19]) + "Z",
            ]
            for r in found
        ]
        click.echo(display.table(rows, ["EPOCH", "PLACE", "SAVE", "GEN", "FILES", "SIZE", "ATTEMPT", "COMMITTED"]))
    if len(found) != len(items):
        msg = f"{len(items) - len(found)} commit record(s) at {store.url} cannot be read; see above"
        raise IntegrityError(msg)


@click.command()
@click.argument("target", required=False, type=click.Path(file_okay=False, path_type=Path))
@options.root
@options.destination
@options.save_name
@options.fall_back
@options.option("--if-any", is_flag=True, help="Nothing published is success: the first execution starts from nothing.")
@options.workers
@options.as_json
def restore(
    target: Path | None,
    root: Path | None,
    save: str | None,
    fall_back: bool,
    if_any: bool,
    workers: int,
    as_json: bool,
    **given: Any,
) -> None:
    """Bring the newest intact save to TARGET/<its name> (default: ROOT/resume/<DISPATCH_ATTEMPT>/), byte for byte.

    Every byte is verified. What stands there already is never replaced. Killed half-way, it goes on where it was. The
    default target holds one save alone: once one is there, it is what this execution resumes from.
    """
    store = _store(given)
    alone = target is None
    target = target or resume_folder(root, container.read_identity(os.environ).attempt)
    try:
        got = restoring.restore_newest(
            store,
            target,
            save=_encoded(save),
            fall_back=fall_back,
            progress=display.progress("restoring", CLOCK),
            damaged=lambda key, why: click.echo(f"damaged: {key}: {why}", err=True),
            workers=workers,
            alone=alone,
        )
    except restoring.Occupied as other:
        if save is not None:
            msg = (
                f"{other.path} is what this execution resumes from; to have {save} too, name a folder to restore it to"
            )
            raise SettingsError(msg) from None
        click.echo(json.dumps({"path": str(other.path), "fresh": False}) if as_json else str(other.path))
        return
    except Incomplete as nothing:
        if not if_any:
            raise
        if as_json:
            display.print_json({"path": None})
        else:
            click.echo(f"publish: nothing to restore: {nothing}", err=True)
        return
    if as_json:
        display.print_json({**_as_json(store, got.record), "path": str(got.path), "fresh": got.fresh})
    else:
        click.echo(str(got.path))


@click.command()
@options.destination
@options.save_name
@options.option("--all", "everything", is_flag=True, help="Every published save, not only the newest.")
@options.workers
@options.as_json
def verify(save: str | None, everything: bool, workers: int, as_json: bool, **given: Any) -> None:
    """Read what is published back and compare every byte with its sha256. Exit 22 if anything is damaged, or written by
    a newer version than this, which cannot tell."""
    store = _store(given)
    if everything:
        items = list(reader.published(store, _encoded(save)))
        if not items:  # a mistyped destination must not pass for an intact one
            raise reader.nothing(store, _encoded(save))
    else:
        record = reader.newest(store, _encoded(save))
        items = [reader.Published(record.order, record)]
    results = [(str(item.order), *_verified(store, item, workers)) for item in items]
    if as_json:
        display.print_json(
            [
                {"order": order, "save": name, "state": _state(error), "problem": str(error) if error else None}
                for order, name, error in results
            ]
        )
    else:
        for order, name, error in results:
            state = _state(error)
            click.echo(f"{state.upper() if state == 'damaged' else state:7}  {order}  {name}  {error or ''}".rstrip())
    damaged = [name or order for order, name, error in results if _state(error) == "damaged"]
    if damaged:
        msg = f"{len(damaged)} of {len(results)} published saves at {store.url} are damaged: {damaged[0]}"
        raise IntegrityError(msg)
    newer = next((error for _, _, error in results if error is not None), None)
    if newer is not None:
        raise newer


@click.command()
@click.argument("url", required=False)
@options.destination
@options.option("--accept-weak-store", is_flag=True, help="Exit 0 though the store cannot refuse a lost race.")
@options.as_json
def probe(url: str | None, accept_weak_store: bool, as_json: bool, **given: Any) -> None:
    """Prove what the destination can do, on scratch keys of its own: in turn, then with racing writers. Exit 12 if it
    cannot refuse a lost race."""
    if url:
        given["dest"] = url
    store = _store(given)
    found = probe_store(store)
    refused: StoreTooWeak | None = None
    try:
        require(found, accept_weak=accept_weak_store)
    except StoreTooWeak as error:
        refused = error
    rows = {
        "conditional create": found.conditional_create,
        "conditional replace": found.conditional_replace,
        "atomic visibility": found.atomic_visibility,
        "list after write": found.list_after_write,
        "checksums": found.checksums,
    }
    if as_json:
        supports = {name: {"value": s.value, "source": s.source, "reason": s.reason} for name, s in rows.items()}
        display.print_json(
            {
                "store": store.url,
                "supports": supports,
                "checksum": found.checksum,
                "saw": list(found.saw),
                "publishing": None if refused else _follows(found),
            }
        )
    else:
        click.echo(store.url)
        click.echo(
            display.table(
                [[n, s.value, s.source, s.reason] for n, s in rows.items()],
                ["CAPABILITY", "SUPPORT", "SOURCE", "REASON"],
            )
        )
        for sentence in found.saw:
            if sentence not in {support.reason for support in rows.values()}:
                click.echo(f"seen: {sentence}")
    if refused:
        raise refused
    if not as_json:
        click.echo(f"publishing here: {_follows(found)}")


def _follows(found: Capabilities) -> str:
    """What a publisher makes of it."""
    pointer = {"yes": "latest.json is kept", "unknown": "latest.json is advisory", "no": "there is no latest.json"}
    damaged = "every upload is read back"
    if found.checksum != "none":
        damaged = f"the store refuses a damaged upload by its {found.checksum}"
    return f"{pointer[found.conditional_replace.value]}; {damaged}"


def _store(given: dict[str, Any]) -> Store:
    say_unknown_variables()
    return open_destination(given)


def _pointed(store: Store) -> str | None:
    """The commit that the pointer names: a convenience, so a damaged one is said and keeps nobody from the truth."""
    try:
        at = pointer.read(store)
    except IntegrityError as error:
        click.echo(f"warning: {error}", err=True)
        return None
    return at.commit if at else None


def _state(error: IntegrityError | None) -> Literal["intact", "newer", "damaged"]:
    if error is None:
        return "intact"
    return "newer" if isinstance(error, NewerFormat) else "damaged"


def _verified(store: Store, item: reader.Published, workers: int) -> tuple[str, IntegrityError | None]:
    """The save's name as far as it is known, and what is wrong with it."""
    if item.record is None:
        return "", item.error
    name = display.shown_name(item.record.save)
    tick = display.progress("verifying", CLOCK)(name, item.record.size)
    try:
        reader.verify(store, item.record, tick=tick, workers=workers)
    except IntegrityError as error:
        if listing.pruned(store, item.record):
            return f"{name} (pruned meanwhile)", None
        return name, error
    return name, None


def _encoded(save: str | None) -> str | None:
    return None if save is None else names.encode(os.fsencode(save))


def _as_json(store: Store, record: CommitRecord) -> dict[str, Any]:
    """A commit for programs. An epoch is a decimal string: it may not fit a JSON number."""
    return {
        "save": record.save,
        "epoch": str(record.order.epoch),
        "attempt": record.attempt,
        "term": record.order.term,
        "ordinal": record.order.ordinal,
        "generation": record.generation,
        "kind": record.kind,
        "files": record.files,
        "size": record.size,
        "commit": record.key,
        "data": [f"{store.url}/{key_of(part.prefix, part.names)}" for part in record.parts],
        "job": record.job,
        "rule": record.rule,
        "committed_at": record.committed_at,
        "publisher": record.publisher,
    }
