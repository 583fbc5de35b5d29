"""`publish …`: watch, publish, complete, latest, list, restore, verify, probe."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import click

from dispatch_agent import cluster
from dispatch_agent.checkpoint import completion, names, scan
from dispatch_agent.checkpoint import folder as bookkeeping
from dispatch_agent.checkpoint.save import Complete
from dispatch_agent.cli import display, options
from dispatch_agent.clock import SystemClock
from dispatch_agent.errors import Incomplete, IntegrityError, SettingsError
from dispatch_agent.identity import Identity
from dispatch_agent.logs import Log, to_stream
from dispatch_agent.publish import oneshot, pointer, reader, watcher
from dispatch_agent.publish import restore as restoring
from dispatch_agent.publish.keys import key_of
from dispatch_agent.publish.placing import Rule
from dispatch_agent.publish.records import CommitRecord
from dispatch_agent.publish.start import Starter
from dispatch_agent.publish.watcher import Abort, Stop, Tally
from dispatch_agent.settings import (
    PublishSettings,
    check_ranks,
    checkpoint_root,
    destination,
    execution_folder,
    resume_folder,
    unknown_variables,
)
from dispatch_agent.store.base import Store
from dispatch_agent.store.capabilities import require
from dispatch_agent.store.opening import open_store
from dispatch_agent.store.posix import PosixStore
from dispatch_agent.store.probe import probe as probe_store

if TYPE_CHECKING:
    from dispatch_agent.checkpoint.watch import Watcher

CLOCK = SystemClock()
Events = Literal["auto", "events", "polling"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def publish() -> None:
    """Publish finished saves in epoch order, and get the newest intact one back.

    Every option can be given as a variable instead: PUBLISH_ and its name in capitals.
    """


@publish.command()
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@options.root
@options.destination
@options.completion
@options.publishing
@options.option("--once", is_flag=True, help="End when everything complete is published, instead of watching on.")
@options.option(
    "--on-fenced",
    type=click.Choice(["wait", "exit"]),
    default="wait",
    show_default=True,
    help="When a newer execution has published: wait for SIGTERM (a sidecar that exits is only restarted), or exit 30.",
)
@options.option(
    "--drain-timeout",
    type=click.FloatRange(0.1),
    default=20.0,
    show_default=True,
    metavar="SECONDS",
    help="After SIGTERM, how long to go on publishing what is complete.",
)
@options.option(
    "--start-timeout",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a store that does not answer at the start is tried again before exit 10.",
)
@options.option(
    "--rescan",
    type=click.FloatRange(0.1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="The longest time between two looks; events only make it look sooner.",
)
@options.option(
    "--events",
    type=click.Choice(["auto", "events", "polling"]),
    default="auto",
    show_default=True,
    help="How to notice writes; auto polls on network and FUSE filesystems and where inotify has no room.",
)
@options.logging
def watch(
    folder: Path | None,
    root: Path | None,
    once: bool,
    on_fenced: str,
    drain_timeout: float,
    start_timeout: float,
    rescan: float,
    events: Events,
    **given: Any,
) -> None:
    """Watch FOLDER (default: ROOT/exec/<DISPATCH_ATTEMPT>) and publish every complete save, until SIGTERM.

    Reads the identity as `dispatch-agent exec` does: the cluster's counters, or DISPATCH_EPOCH and DISPATCH_ATTEMPT.
    SIGTERM publishes what is complete and exits 0; a second one ends at once.
    """
    identity, rank, stand_by, log = _who(given)
    where = execution_folder(folder, root, identity.attempt)
    stop, tally = Stop(), Tally()
    _on_signals(stop, drain_timeout)
    if stand_by:
        log.info("standing by", reason=f"rank {rank}: rank 0 publishes for all ranks of a shared volume")
        with contextlib.suppress(Abort):
            stop.drain.wait()
        return
    starter = _starter(given, identity, rank, where, root, log)
    wakes = _wakes(where, stop, events, rescan, log)
    try:
        wakes.start()
        watcher.watch(starter, stop, tally, CLOCK, log, rescan=rescan, once=once, start_timeout=start_timeout)
        if tally.fenced and on_fenced == "wait" and not once:
            watcher.stand_aside(stop, tally, CLOCK, log)
        _ignore_signals()
        wakes.stop()
    except Abort:
        _ignore_signals()
    log.info(
        "ended",
        passes=tally.passes,
        failed_passes=tally.failed_passes,
        seen=tally.seen,
        published=tally.published,
        already=tally.already,
        unpublished=len(tally.unpublished),
    )
    error = tally.verdict(asked=stop.drain.is_set())
    if error is not None:
        raise error


@publish.command("publish")
@click.argument("path", type=options.SavePath())
@options.destination
@options.option(
    "--complete",
    metavar="RULE",
    help="Demand that the save is complete by this rule. [default: your word; this command marks it complete]",
)
@options.option("--expect-ranks", type=click.IntRange(1), help="As for watch.")
@options.option("--settle", type=click.FloatRange(0), metavar="SECONDS", help="As for watch.")
@options.publishing
@options.option(
    "--timeout",
    type=click.FloatRange(0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to try, or to wait for the publisher that has the folder.",
)
@options.as_json
@options.logging
def publish_one(path: Path, timeout: float, as_json: bool, **given: Any) -> None:
    """Publish the one save at PATH (a file or folder directly in an execution's folder), once.

    If a `publish watch` has that folder, hands the save over to it and waits for its commit.
    """
    path = Path(os.path.abspath(path))
    identity, rank, stand_by, log = _who(given)
    if stand_by:
        msg = f"rank {rank} does not publish on a shared volume: run this on rank 0, or give --rank 0"
        raise SettingsError(msg)
    if not os.path.lexists(path):
        msg = f"there is no save at {path}"
        raise Incomplete(msg)
    by_word = given["complete"] is None
    starter = _starter({**given, "complete": given["complete"] or "marker"}, identity, rank, path.parent, None, log)
    if by_word and not _marked(path, starter.rule):
        bookkeeping.mark_complete(path)
    outcome = oneshot.publish_one(
        starter, starter.store, path.parent, os.fsencode(path.name), CLOCK, log, epoch=identity.epoch, timeout=timeout
    )
    if as_json:
        _print_json(
            {
                "save": outcome.save,
                "ordinal": outcome.ordinal,
                "result": outcome.result,
                "commit": outcome.record.key if outcome.record else None,
            }
        )
    else:
        click.echo(f"{outcome.result}: {outcome.save} at {starter.store.url}")


@publish.command()
@click.argument("path", type=options.SavePath())
@options.option("--token", default="", help="Joins the parts of one save on many ranks: new for every save.")
def complete(path: Path, token: str) -> None:
    """Say that the save at PATH is finished, so that a `publish watch` publishes it.

    Call it after the last file is written and closed, on one rank. Makes the data durable first.
    """
    marker = bookkeeping.mark_complete(Path(os.path.abspath(path)), token)
    click.echo(f"complete: {names.shown(marker.name)} (number {marker.sequence})")


@publish.command()
@options.destination
@options.save_name
@options.as_json
def latest(save: str | None, as_json: bool, **given: Any) -> None:
    """Print the newest published save: by the commit records, which are the truth, not by the pointer."""
    store = _store_to_read(given)
    record = reader.newest(store, _encoded(save))
    if not as_json:
        click.echo(_shown_name(record))
        return
    _print_json({**_as_json(store, record), "pointer": _pointed(store)})


@publish.command("list")
@options.destination
@options.save_name
@options.as_json
def list_commits(save: str | None, as_json: bool, **given: Any) -> None:
    """List every published save, the oldest first; the last line is the newest."""
    store = _store_to_read(given)
    items = list(reader.published(store, _encoded(save)))[::-1]
    for item in items:
        if item.record is None:
            click.echo(f"unreadable: {item.error}", err=True)
    found = [item.record for item in items if item.record is not None]
    if as_json:
        _print_json([_as_json(store, record) for record in found])
    elif found:
        rows = [
            [
                str(r.order.epoch),
                f"{r.order.term}.{r.order.ordinal}",
                display.shortened(_shown_name(r)),
                str(r.generation),
                str(r.files),
                display.size(r.size),
                r.attempt,
                r.committed_at[:19] + "Z",
            ]
            for r in found
        ]
        click.echo(display.table(rows, ["EPOCH", "PLACE", "SAVE", "GEN", "FILES", "SIZE", "ATTEMPT", "COMMITTED"]))
    if len(found) != len(items):
        msg = f"{len(items) - len(found)} commit record(s) at {store.url} cannot be read; see above"
        raise IntegrityError(msg)


@publish.command()
@click.argument("target", required=False, type=click.Path(file_okay=False, path_type=Path))
@options.root
@options.destination
@options.save_name
@options.option(
    "--fall-back/--no-fall-back",
    default=True,
    show_default=True,
    help="Whether to take the save before when the newest is damaged.",
)
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

    Every byte is verified. What stands there already is never replaced. Killed half-way, it goes on where it was.
    """
    store = _store_to_read(given)
    if target is None:
        checkpoint_root(root)
        target = resume_folder(root, cluster.read_identity(os.environ).attempt)
    try:
        got = restoring.restore_newest(
            store,
            target,
            save=_encoded(save),
            fall_back=fall_back,
            progress=display.progress("restoring", CLOCK),
            damaged=lambda key, why: click.echo(f"damaged: {key}: {why}", err=True),
            workers=workers,
        )
    except Incomplete as nothing:
        if not if_any:
            raise
        if as_json:
            _print_json({"path": None})
        else:
            click.echo(f"nothing to restore: {nothing}", err=True)
        return
    if as_json:
        _print_json({**_as_json(store, got.record), "path": str(got.path), "fresh": got.fresh})
    else:
        click.echo(str(got.path))


@publish.command()
@options.destination
@options.save_name
@options.option("--all", "everything", is_flag=True, help="Every published save, not only the newest.")
@options.workers
@options.as_json
def verify(save: str | None, everything: bool, workers: int, as_json: bool, **given: Any) -> None:
    """Read what is published back and compare every byte with its sha256. Exit 22 if anything is damaged."""
    store = _store_to_read(given)
    if everything:
        items = list(reader.published(store, _encoded(save)))
        if not items:  # a mistyped destination must not pass for an intact one
            raise reader.nothing(store, _encoded(save))
    else:
        record = reader.newest(store, _encoded(save))
        items = [reader.Published(record.order, record)]
    results = [(str(item.order), *_verified(store, item, workers)) for item in items]
    if as_json:
        _print_json([{"order": order, "save": name, "problem": problem or None} for order, name, problem in results])
    else:
        for order, name, problem in results:
            click.echo(f"{'DAMAGED' if problem else 'intact '}  {order}  {name}  {problem}".rstrip())
    damaged = [name or order for order, name, problem in results if problem]
    if damaged:
        msg = f"{len(damaged)} of {len(results)} published saves at {store.url} are damaged: {damaged[0]}"
        raise IntegrityError(msg)


@publish.command()
@click.argument("url", required=False)
@options.destination
@options.option("--accept-weak-store", is_flag=True, help="Exit 0 though the store cannot refuse a lost race.")
@options.as_json
def probe(url: str | None, accept_weak_store: bool, as_json: bool, **given: Any) -> None:
    """Prove what the destination can do, on scratch keys of its own: in turn, then with racing writers. Exit 12 if it
    cannot refuse a lost race."""
    if url:
        given["dest"] = url
    store = _store_to_read(given)
    found = probe_store(store)
    rows = {
        "conditional create": found.conditional_create,
        "conditional replace": found.conditional_replace,
        "atomic visibility": found.atomic_visibility,
        "list after write": found.list_after_write,
        "checksums": found.checksums,
    }
    if as_json:
        supports = {name: {"value": s.value, "source": s.source, "reason": s.reason} for name, s in rows.items()}
        _print_json({"store": store.url, "supports": supports, "checksum": found.checksum, "saw": list(found.saw)})
    else:
        click.echo(store.url)
        click.echo(
            display.table(
                [[n, s.value, s.source, s.reason] for n, s in rows.items()],
                ["CAPABILITY", "SUPPORT", "SOURCE", "REASON"],
            )
        )
    require(found, accept_weak=accept_weak_store)


def _who(given: dict[str, Any]) -> tuple[Identity, int, bool, Log]:
    """The identity, the rank, whether this rank stands by, and a log that carries them."""
    identity = cluster.read_identity(os.environ)
    rank = given["rank"] if given["rank"] is not None else cluster.read_rank(os.environ) or 0
    log = Log(to_stream(sys.stderr), CLOCK, given["log_format"], given["log_level"]).bind(
        epoch=str(identity.epoch), attempt=identity.attempt, rank=rank
    )
    for sentence in unknown_variables(os.environ, _variables()):
        log.warning("settings", reason=sentence)
    role = check_ranks(rank, cluster.read_nodes(os.environ), given["shared_volume"])
    return identity, rank, role == "stand by", log


def _variables() -> set[str]:
    """Every variable that an option of any `publish` command reads."""
    return {
        str(parameter.envvar)
        for command in publish.commands.values()
        for parameter in command.params
        if parameter.envvar
    }


def _marked(path: Path, rule: Rule) -> bool:
    """Whether the save stands marked as it is: to mark it once more would give an old save a new place."""
    survey = scan.survey(path.parent)
    return any(
        save.name == os.fsencode(path.name) and isinstance(rule.judge(save, survey, 0.0), Complete)
        for save in survey.saves
    )


def _starter(
    given: dict[str, Any], identity: Identity, rank: int, folder: Path, root: Path | None, log: Log
) -> Starter:
    settings = PublishSettings(
        complete=given["complete"],
        expect_ranks=given["expect_ranks"],
        settle=given["settle"],
        accept_weak_store=given["accept_weak_store"],
        in_place=given["in_place"],
        workers=given["workers"],
    )
    rule = completion.parse_rule(settings.complete, expect_ranks=settings.expect_ranks, settle=settings.settle)
    store = _store(given)
    if settings.in_place:
        _check_in_place(store, folder, root)
    elif isinstance(store, PosixStore) and Path(store.url).resolve().is_relative_to(folder.resolve()):
        msg = f"the destination {store.url} lies in {folder}, whose content is published: choose a folder outside"
        raise SettingsError(msg)
    return Starter(
        store=store,
        identity=identity,
        folder=folder,
        settings=settings,
        rule=rule,
        rank=rank,
        clock=CLOCK,
        log=log,
        progress=display.progress("uploading", CLOCK),
        draw_nonce=lambda: secrets.token_hex(6),
        draw=random.random,
        environ=os.environ,
    )


def _wakes(folder: Path, stop: Stop, events: Events, rescan: float, log: Log) -> Watcher:
    try:
        from dispatch_agent.checkpoint.watch import Watcher  # noqa: PLC0415 (only this command needs watchdog)
    except ModuleNotFoundError as error:
        msg = f"publish watch needs {error.name}, which is not installed: pip install 'dispatch-agent[publish]'"
        raise SettingsError(msg) from error

    def said(reason: str) -> None:
        log.warning("events", reason=reason)

    return Watcher(folder, stop.wake.set, mode=events, clock=CLOCK, poll=rescan, said=said)


def _store_to_read(given: dict[str, Any]) -> Store:
    """For commands that write no log: what a log would say of the variables is said before anything else."""
    for sentence in unknown_variables(os.environ, _variables()):
        click.echo(f"warning: {sentence}", err=True)
    return _store(given)


def _check_in_place(store: Store, folder: Path, root: Path | None) -> None:
    """The store's root must be the checkpoint root: a commit names files by their place below it."""
    expected = root or folder.parent.parent
    if not isinstance(store, PosixStore) or store.path("exec").parent.resolve() != expected.resolve():
        msg = f"--in-place: the destination {store.url} is not the checkpoint root {expected}; make them one"
        raise SettingsError(msg)
    if folder.resolve().parent != (expected / "exec").resolve():
        msg = f"--in-place: {folder} is not directly below {expected / 'exec'}"
        raise SettingsError(msg)


def _store(given: dict[str, Any]) -> Store:
    storage: dict[str, object] = {}
    for pair in given.get("storage_options") or ():
        key, mark, value = pair.partition("=")
        if not mark or not key:
            msg = f"--storage-option {pair!r}: give KEY=VALUE"
            raise SettingsError(msg)
        storage[key] = value
    return open_store(destination(given.get("dest"), os.environ), storage or None)


def _on_signals(stop: Stop, drain_timeout: float) -> None:
    """The first SIGTERM or SIGINT drains, within a bound; a second one, or the bound, aborts."""

    def abort(_number: int, _frame: FrameType | None) -> None:
        raise Abort

    def drain(_number: int, _frame: FrameType | None) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, abort)
        signal.setitimer(signal.ITIMER_REAL, drain_timeout)
        stop.ask()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)


def _ignore_signals() -> None:
    """The end is near anyway: nothing may interrupt the last words."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def _pointed(store: Store) -> str | None:
    """The commit that the pointer names: a convenience, so a damaged one is said and keeps nobody from the truth."""
    try:
        at = pointer.read(store)
    except IntegrityError as error:
        click.echo(f"warning: {error}", err=True)
        return None
    return at.commit if at else None


def _verified(store: Store, item: reader.Published, workers: int) -> tuple[str, str]:
    if item.record is None:
        return "", str(item.error)
    name = _shown_name(item.record)
    tick = display.progress("verifying", CLOCK)(name, item.record.size)
    try:
        reader.verify(store, item.record, tick=tick, workers=workers)
    except IntegrityError as error:
        return name, str(error)
    return name, ""


def _encoded(save: str | None) -> str | None:
    return None if save is None else names.encode(os.fsencode(save))


def _shown_name(record: CommitRecord) -> str:
    return names.shown(names.decode_name(record.save))


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


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))
