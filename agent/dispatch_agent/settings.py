"""Settings: where each value comes from, and what contradicts what. Values only; nothing here looks at the disk.

Every option of `publish` has one variable, `PUBLISH_` and its name in capitals; options win over variables. Variables
that begin with `DISPATCH_` are the dispatcher's: read, never defined by us.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dispatch_agent.errors import SettingsError

PREFIX = "PUBLISH_"
DEST, DISPATCH_DEST, ROOT = "PUBLISH_DEST", "DISPATCH_PUBLISH_DEST", "PUBLISH_ROOT"

# Kubernetes injects these for a Service whose name begins like ours; they are links, not settings.
_SERVICE_LINK = re.compile(r".*(_PORT|_PORT_.*|_SERVICE_.*)$")


@dataclass(frozen=True, slots=True)
class PublishSettings:
    """What a publisher does differently on request."""

    accept_weak_store: bool = False
    in_place: bool = False
    workers: int = 4


def destination(option: str | None, environ: Mapping[str, str]) -> str:
    """Where to publish: `--dest`, `PUBLISH_DEST` or `DISPATCH_PUBLISH_DEST`. Two that differ are refused.

    `option` is what the command line or `PUBLISH_DEST` gave. Raises SettingsError.
    """
    given = environ.get(DISPATCH_DEST, "")
    if option and given and option.rstrip("/") != given.rstrip("/"):
        msg = (
            f"two destinations: --dest or {DEST} says {option!r}, the adapter's {DISPATCH_DEST} says {given!r}; "
            f"drop the first, or make them equal"
        )
        raise SettingsError(msg)
    if not (option or given):
        msg = f"no destination: give --dest URL (a folder or s3://bucket/prefix), or set {DEST}"
        raise SettingsError(msg)
    return option or given


def execution_folder(folder: Path | None, root: Path | None, attempt: str) -> Path:
    """The folder to watch: the one given, else `<root>/exec/<attempt>`. Raises SettingsError."""
    if folder is not None:
        return folder
    return checkpoint_root(root) / "exec" / attempt


def checkpoint_root(root: Path | None) -> Path:
    """The folder that executions write under. Raises SettingsError if none was given."""
    if root is None:
        msg = f"no checkpoint root: give --root FOLDER, or set {ROOT} to the folder that holds exec/"
        raise SettingsError(msg)
    return root


def resume_folder(root: Path | None, attempt: str) -> Path:
    """Where a pod's checkpoint to resume from is restored to: `<root>/resume/<attempt>`."""
    return checkpoint_root(root) / "resume" / attempt


def check_ranks(rank: int | None, nodes: int | None, shared_volume: bool | None) -> Literal["publish", "stand by"]:
    """What a publisher of this rank does. On a shared volume rank 0's publishes for all and the others stand by.

    `nodes`: how many the environment shows, None if nothing shows it. Raises SettingsError where several nodes are
    visible and nobody said whether they share one volume: a silent half of a checkpoint is the worst outcome.
    """
    if shared_volume is False:
        msg = "--node-local: publishing the parts of several nodes is not in this version; share one volume instead"
        raise SettingsError(msg)
    if shared_volume is None and (nodes or 1) > 1:
        msg = (
            f"this job has {nodes} nodes: say --shared-volume if all of them write to one volume (rank 0 then "
            f"publishes every rank's files); node-local volumes are not in this version"
        )
        raise SettingsError(msg)
    return "stand by" if rank else "publish"


def unknown_variables(environ: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """One sentence for every `PUBLISH_` variable that no option has: a misspelt variable is otherwise silent."""
    known = sorted(set(known))
    sentences = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in known or _SERVICE_LINK.match(name):
            continue
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        sentences.append(f"variable {name} is set and no option reads it{hint}")
    return sentences
