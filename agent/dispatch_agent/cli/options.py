"""How an option of `publish` is declared: one name, one variable, one meaning; and what several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dispatch_agent.settings import PREFIX

Command = TypeVar("Command", bound=Callable[..., Any])


def option(*names: str, **attributes: Any) -> Callable[[Command], Command]:
    """A click option whose variable is `PUBLISH_` and its long name in capitals."""
    long_name = next(name for name in names if name.startswith("--")).partition("/")[0]
    variable = PREFIX + long_name.removeprefix("--").replace("-", "_").upper()
    return click.option(*names, envvar=variable, show_envvar=True, **attributes)


dest = option(
    "--dest",
    metavar="URL",
    help="Where to publish: a folder, or an s3://, gs://, abfs:// or sftp:// URL. Also read: DISPATCH_PUBLISH_DEST.",
)
root = option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    help="The checkpoint root: executions write below ROOT/exec/<DISPATCH_ATTEMPT>/.",
)
as_json = option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
workers = option(
    "--workers",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Files that are read, sent or fetched side by side.",
)
storage_option = option(
    "--storage-option",
    "storage_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of the destination's filesystem, such as endpoint_url=http://host:port. Repeatable. Never secrets.",
)
log_format = option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="How log lines look."
)
log_level = option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="The least important lines that are still written.",
)
fall_back = option(
    "--fall-back/--no-fall-back",
    default=True,
    show_default=True,
    help="Whether to take the save before when the newest is damaged.",
)
save_name = option("--save", "save", metavar="NAME", help="Look only at saves of this name.")


class Seconds(click.FloatRange):
    """A length of time, up to a year: neither endless nor no number, which timers of the kernel do not take."""

    name = "seconds"

    def __init__(self, least: float) -> None:
        super().__init__(least, 366 * 86400.0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return super().convert(number, param, ctx)


class SavePath(click.Path):
    """A save's path. Empty is refused: an unset shell variable must not mean the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty; name the save", param, ctx)
        return super().convert(value, param, ctx)


def together(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several option decorators as one, shown in the given order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


destination = together(dest, storage_option)
logging = together(log_format, log_level)
completion = together(
    option(
        "--complete",
        default="auto",
        show_default=True,
        metavar="RULE",
        help="When a save is complete: auto, marker, rename, settle:SECONDS, pointer:FILE, symlink:NAME, absent:GLOB, "
        "dcp, hf, lightning.",
    ),
    option(
        "--expect-ranks",
        type=click.IntRange(1),
        help="Ranks whose files a save must hold, where the framework's signal does not cover all of them.",
    ),
    option(
        "--settle",
        type=Seconds(0),
        metavar="SECONDS",
        help="How long a save must not change, for rules that rest on quiet. [default: the rule's own]",
    ),
)
publishing = together(
    option("--rank", type=click.IntRange(0, 99_999), help="This publisher's rank. [default: the cluster's, else 0]"),
    option(
        "--shared-volume/--node-local",
        "shared_volume",
        default=None,
        help="Whether all nodes write to one volume. Must be said when the job has several nodes; --node-local is not "
        "in this version yet, and refused.",
    ),
    option(
        "--accept-weak-store",
        is_flag=True,
        help="Publish to a store that cannot refuse a lost race; two publishers of one epoch may then both go on.",
    ),
    option(
        "--in-place",
        is_flag=True,
        help="The destination is the checkpoint root itself: publish without a copy. What the trainer does to its "
        "folder later, it does to the published save.",
    ),
    workers,
)
