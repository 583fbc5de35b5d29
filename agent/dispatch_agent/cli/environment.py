"""What every command of `publish` needs from its options: the destination, the clock, the variables that are known."""

from __future__ import annotations

import os
from typing import Any

import click

from dispatch_agent.clock import SystemClock
from dispatch_agent.errors import SettingsError
from dispatch_agent.settings import destination
from dispatch_agent.store.base import Store
from dispatch_agent.store.opening import open_store

CLOCK = SystemClock()


def known_variables() -> set[str]:
    """Every variable that an option of any command beside the running one reads."""
    parent = click.get_current_context().parent
    group = parent.command if parent else None
    commands = group.commands.values() if isinstance(group, click.Group) else ()
    return {str(p.envvar) for command in commands for p in command.params if p.envvar}


def open_destination(given: dict[str, Any]) -> Store:
    """The store that `--dest` and its kin name. Raises SettingsError."""
    storage: dict[str, object] = {}
    for pair in given.get("storage_options") or ():
        key, mark, value = pair.partition("=")
        if not mark or not key:
            msg = f"--storage-option {pair!r}: give KEY=VALUE"
            raise SettingsError(msg)
        storage[key] = value
    return open_store(destination(given.get("dest"), os.environ), storage or None)
