"""What every command of `publish` needs from its options: the destination, the clock, the variables that are known."""

from __future__ import annotations

import os
from typing import Any

import click
from click.core import ParameterSource

from dispatch_agent.clock import SystemClock
from dispatch_agent.errors import SettingsError
from dispatch_agent.settings import destination, unknown_variables
from dispatch_agent.store.base import Store
from dispatch_agent.store.opening import open_store

CLOCK = SystemClock()

SECRETS = {
    "account_key",
    "connection_string",
    "passphrase",
    "passwd",
    "password",
    "sas_token",
    "secret",
    "secret_access_key",
    "token",
}
"""Names under which fsspec's filesystems take secrets."""


def known_variables() -> set[str]:
    """Every variable that an option of any command beside the running one reads."""
    parent = click.get_current_context().parent
    group = parent.command if parent else None
    commands = group.commands.values() if isinstance(group, click.Group) else ()
    return {str(p.envvar) for command in commands for p in command.params if p.envvar}


def say_unknown_variables() -> None:
    """For commands that write no log: what a log would say of the variables is said before anything else."""
    for sentence in unknown_variables(os.environ, known_variables()):
        click.echo(f"warning: {sentence}", err=True)


def open_destination(given: dict[str, Any]) -> Store:
    """The store that `--dest` and its kin name. Raises SettingsError."""
    url = destination(given.get("dest"), os.environ)
    storage: dict[str, object] = {}
    for pair in given.get("storage_options") or ():
        key, mark, value = pair.partition("=")
        if not mark or not key:
            msg = f"--storage-option: {'the key' if mark else 'the ='} is missing; give KEY=VALUE"
            raise SettingsError(msg)
        if is_secret(key, url) and _typed("storage_options"):
            msg = (
                f"--storage-option {key}=…: a secret on the command line is seen by everybody on the node; give it by "
                f"the store's own variables or files, or in PUBLISH_STORAGE_OPTION"
            )
            raise SettingsError(msg)
        storage[key] = value
    return open_lasting(url, storage or None)


def open_lasting(url: str, storage: dict[str, object] | None = None) -> Store:
    """The store at `url`, for commands, whose stores must outlive them. Raises SettingsError."""
    if url.partition("://")[0] == "memory":
        msg = f"the destination is {url!r}: it lives in this process alone, and is gone when it ends; name a folder"
        raise SettingsError(msg)
    return open_store(url, storage)


def is_secret(key: str, url: str) -> bool:
    """Whether an option of a filesystem of this URL is one that nobody may see."""
    # To gcsfs a token is a file's path, or a word that says where to look.
    return key in SECRETS and not (key == "token" and url.startswith(("gs:", "gcs:")))


def _typed(parameter: str) -> bool:
    """Whether a parameter was given on the command line, and not by its variable."""
    return click.get_current_context().get_parameter_source(parameter) is ParameterSource.COMMANDLINE
