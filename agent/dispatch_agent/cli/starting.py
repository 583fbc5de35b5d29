"""From the options that `watch`, `publish` and `recover` share to what starts their publishers."""

from __future__ import annotations

import os
import random
import secrets
import sys
from pathlib import Path
from typing import Any

from dispatch_agent.checkpoint import completion
from dispatch_agent.cli import display
from dispatch_agent.cli.environment import CLOCK, known_variables, open_destination
from dispatch_agent.cluster import container
from dispatch_agent.errors import SettingsError
from dispatch_agent.identity import Identity
from dispatch_agent.logs import Log, to_stream
from dispatch_agent.publish.start import Starter
from dispatch_agent.settings import PublishSettings, check_ranks, unknown_variables
from dispatch_agent.store.base import Store
from dispatch_agent.store.posix import PosixStore


def place_of(identity: Identity, given: dict[str, Any]) -> tuple[int, bool, Log]:
    """This publisher's rank, whether it stands by, and a log that carries identity and rank. Raises SettingsError."""
    rank = given["rank"] if given["rank"] is not None else container.read_rank(os.environ) or 0
    style = given["log_format"]
    log = Log(to_stream(sys.stderr, CLOCK, style), CLOCK, style, given["log_level"]).bind(
        epoch=str(identity.epoch), attempt=identity.attempt, rank=rank
    )
    for sentence in unknown_variables(os.environ, known_variables()):
        log.warning("settings", reason=sentence)
    counters = container.read_counters(os.environ)
    if counters.seen:
        log.info("jobset", **counters.seen)
    for sentence in counters.weakened:
        log.warning("identity weakened", reason=sentence)
    role = check_ranks(rank, container.read_nodes(os.environ), given["shared_volume"])
    return rank, role == "stand by", log


def starter(given: dict[str, Any], store: Store, identity: Identity, rank: int, folder: Path, log: Log) -> Starter:
    """What starts publishers for `folder`. Raises SettingsError."""
    settings = PublishSettings(
        accept_weak_store=given["accept_weak_store"],
        in_place=given["in_place"],
        workers=given["workers"],
    )
    rule = completion.parse_rule(given["complete"], expect_ranks=given["expect_ranks"], settle=given["settle"])
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


def store_for(given: dict[str, Any], folder: Path, root: Path | None) -> Store:
    """The destination of what is published from `folder`. Raises SettingsError, also for one that lies inside it."""
    store = open_destination(given)
    if given["in_place"]:
        _check_in_place(store, folder, root)
    else:
        check_outside(store, folder)
    return store


def check_outside(store: Store, folder: Path) -> None:
    """Nobody publishes what he publishes. Raises SettingsError."""
    if isinstance(store, PosixStore) and Path(store.url).resolve().is_relative_to(folder.resolve()):
        msg = f"the destination {store.url} lies in {folder}, whose content is published: choose a folder outside"
        raise SettingsError(msg)


def _check_in_place(store: Store, folder: Path, root: Path | None) -> None:
    """The store's root must be the checkpoint root: a commit names files by their place below it."""
    expected = root or folder.parent.parent
    if not isinstance(store, PosixStore) or store.path("exec").parent.resolve() != expected.resolve():
        msg = f"--in-place: the destination {store.url} is not the checkpoint root {expected}; make them one"
        raise SettingsError(msg)
    if folder.resolve().parent != (expected / "exec").resolve():
        msg = f"--in-place: {folder} is not directly below {expected / 'exec'}"
        raise SettingsError(msg)
