"""`publish …`: watch, publish and complete; the other commands are gathered here."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from dispatch_agent import __version__
from dispatch_agent.checkpoint import folder as bookkeeping
from dispatch_agent.checkpoint import names, scan
from dispatch_agent.checkpoint.save import Complete
from dispatch_agent.cli import display, initialise, options, reading, recovery, retention, sidecar, signals, starting
from dispatch_agent.cli.environment import CLOCK
from dispatch_agent.cli.sidecar import Sidecar
from dispatch_agent.cluster import container
from dispatch_agent.errors import Incomplete, SettingsError
from dispatch_agent.logs import Log
from dispatch_agent.publish import oneshot, watcher
from dispatch_agent.publish.placing import Rule
from dispatch_agent.publish.prune_local import Keeper, Volume, check_apart
from dispatch_agent.publish.start import Starter
from dispatch_agent.publish.watcher import Abort, Stop, Tally
from dispatch_agent.settings import execution_folder

if TYPE_CHECKING:
    from dispatch_agent.checkpoint.watch import Watcher

Events = Literal["auto", "events", "polling"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, package_name="dispatch-agent", prog_name="publish")
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
    type=options.Seconds(0.1),
    metavar="SECONDS",
    help="How long to go on publishing what is complete after SIGTERM, or once the trainer has ended. [default: 20 "
    "after SIGTERM, or with --grace what is left of it; else as long as it gets on]",
)
@sidecar.wanted
@options.option(
    "--start-timeout",
    type=options.Seconds(0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a store that does not answer at the start is tried again before exit 10; with --once also how long "
    "to wait for a folder that is missing, or that another publisher has, before exit 20.",
)
@options.option(
    "--rescan",
    type=options.Seconds(0.1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="The longest time between two looks; events only make it look sooner.",
)
@options.option(
    "--keep-local",
    type=click.IntRange(0),
    metavar="K",
    help="Delete older executions' saves below ROOT once the store has them whole; the newest K stay. Let the one stay "
    "that a trainer resumes from, unless it was restored. [default: all stay]",
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
    start_timeout: float,
    rescan: float,
    keep_local: int | None,
    events: Events,
    **given: Any,
) -> None:
    """Watch FOLDER (default: ROOT/exec/<DISPATCH_ATTEMPT>) and publish every complete save, until SIGTERM.

    Reads the identity as `dispatch-agent exec` does: the cluster's counters, or DISPATCH_EPOCH and DISPATCH_ATTEMPT.
    SIGTERM publishes what is complete and exits 0; a second one, a second later or more, ends at once.
    """
    stop, tally = Stop(), Tally()
    with sidecar.last_words(given["termination_message"], tally):
        identity = container.read_identity(os.environ)
        rank, stand_by, log = starting.place_of(identity, given)
        where = execution_folder(folder, root, identity.attempt)
        beside = Sidecar(tally, stop, CLOCK, log, {**given, "root": root}, rank if stand_by else None)
        if stand_by:
            log.info("standing by", reason=f"rank {rank}: rank 0 publishes for all ranks of a shared volume")
            with contextlib.suppress(Abort), watcher.kept():
                beside.listen(identity, rank)
                signals.drain_on_signals(stop, beside.drain_bound)
                beside.follow_trainer(where, identity.attempt, rank)
                stop.drain.wait()
            return
        starter = starting.starter(given, starting.store_for(given, where, root), identity, rank, where, log)
        starter.progress = beside.progress(starter.progress)
        after = _nothing
        if keep_local is not None:
            after = _keeper(starter, where, root, keep_local, stop, log, waits=once)
        wakes = _wakes(where, stop, events, rescan, log)
        beside.listen(identity, rank)
        try:
            signals.drain_on_signals(stop, beside.drain_bound)
            beside.follow_trainer(where, identity.attempt, rank)
            wakes.start()
            watcher.watch(
                beside.begin(starter),
                stop,
                tally,
                CLOCK,
                log,
                rescan=rescan,
                once=once,
                start_timeout=start_timeout,
                after=after,
            )
            if tally.fenced and on_fenced == "wait" and not once:
                watcher.stand_aside(stop, tally, CLOCK, log)
            signals.ignore()
            wakes.stop()
        except Abort:
            log.warning("aborted", reason="a second signal, or no time was left to drain")
        log.info(
            "ended",
            seen=tally.seen,
            published=tally.published,
            already=tally.already,
            standing=tally.stand,
            incomplete=len(tally.incomplete),
            unpublished=len(tally.unpublished),
            passes=tally.passes,
            failed_passes=tally.failed_passes,
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
@options.option("--settle", type=options.Seconds(0), metavar="SECONDS", help="As for watch.")
@options.publishing
@options.option(
    "--timeout",
    type=options.Seconds(0),
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
    identity = container.read_identity(os.environ)
    rank, stand_by, log = starting.place_of(identity, given)
    if stand_by:
        msg = f"rank {rank} does not publish on a shared volume: run this on rank 0, or give --rank 0"
        raise SettingsError(msg)
    if not os.path.lexists(path):
        msg = f"there is no save at {path}"
        raise Incomplete(msg)
    by_word = given["complete"] is None
    given["complete"] = given["complete"] or "marker"
    store = starting.store_for(given, path.parent, None)
    starter = starting.starter(given, store, identity, rank, path.parent, log)
    stood = _marked(path, starter.rule)
    if by_word and not stood:
        bookkeeping.mark_complete(path, anywhere=True)
    outcome = oneshot.publish_one(
        starter,
        starter.store,
        path.parent,
        os.fsencode(path.name),
        CLOCK,
        log,
        epoch=identity.epoch,
        timeout=timeout,
        stood=stood,
    )
    if as_json:
        display.print_json(
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


def _marked(path: Path, rule: Rule) -> bool:
    """Whether the save stands marked as it is: to mark it once more would give an old save a new place."""
    survey = scan.survey(path.parent)
    return any(
        save.name == os.fsencode(path.name) and isinstance(rule.judge(save, survey, 0.0), Complete)
        for save in survey.saves
    )


def _keeper(
    starter: Starter, folder: Path, root: Path | None, keep: int, stop: Stop, log: Log, *, waits: bool
) -> Keeper:
    root = root or folder.parent.parent
    if folder.resolve().parent != (root / "exec").resolve():
        msg = (
            f"--keep-local: {folder} is not directly below {root / 'exec'}, so older executions' folders are not known"
        )
        raise SettingsError(msg)
    check_apart(starter.store, root)
    before, workers = starter.identity.epoch, starter.settings.workers
    volume = Volume(root, starter.store, before, keep, full=False, workers=workers, now=time.time_ns)
    return Keeper(volume, log, CLOCK, stop.drain.is_set, waits)


def _nothing() -> None:
    return


def _wakes(folder: Path, stop: Stop, events: Events, rescan: float, log: Log) -> Watcher:
    try:
        from dispatch_agent.checkpoint.watch import Watcher  # noqa: PLC0415 (only this command needs watchdog)
    except ModuleNotFoundError as error:
        msg = f"publish watch needs {error.name}, which is not installed: pip install 'dispatch-agent[publish]'"
        raise SettingsError(msg) from error

    def said(reason: str) -> None:
        log.warning("events", reason=reason)

    return Watcher(folder, stop.wake.set, mode=events, clock=CLOCK, poll=rescan, said=said)


for command in (
    reading.latest,
    reading.list_commits,
    reading.restore,
    reading.verify,
    reading.probe,
    recovery.recover,
    initialise.init,
    retention.prune,
):
    publish.add_command(command)
