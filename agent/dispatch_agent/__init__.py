"""Execution identity and stale-proof checkpoint publication, inside a training job's containers.

For training code, three functions that need nothing but the standard library until they are called:

    save_dir()      where this execution writes its saves
    complete(path)  say that a save is finished
    resume_path()   the published save that was restored for this execution, or None
"""

from __future__ import annotations

import os
from pathlib import Path

from dispatch_agent.errors import SettingsError

__version__ = "0.1.0"


def save_dir() -> Path:
    """`<root>/exec/<attempt>` of this execution, made if it is missing.

    Reads PUBLISH_ROOT and DISPATCH_ATTEMPT. Raises SettingsError if either is not set.
    """
    folder = _root() / "exec" / _attempt()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def resume_path() -> Path | None:
    """The save under `<root>/resume/<attempt>`, where `publish init` puts it, or `publish restore`; None if there is
    none.

    Reads PUBLISH_ROOT and DISPATCH_ATTEMPT. Raises SettingsError if either is not set, or several saves stand there.
    """
    folder = _root() / "resume" / _attempt()
    found = sorted(folder.glob("*")) if folder.is_dir() else []
    saves = [path for path in found if not (path.name.startswith(".") and path.name.endswith((".partial", ".lock")))]
    if len(saves) > 1:
        msg = f"{folder} holds {len(saves)} saves ({saves[0].name}, {saves[1].name}, …): leave the one to resume from"
        raise SettingsError(msg)
    return saves[0] if saves else None


def complete(path: str | Path, token: str = "") -> None:
    """Say that the save at `path`, directly in `save_dir()`, is finished: call it after the last byte, on one rank.

    Raises UsageError (no save there), AgentError (the marker cannot be written).
    """
    from dispatch_agent.checkpoint.folder import mark_complete  # noqa: PLC0415 (training code imports this module)

    mark_complete(Path(path), token)


def _root() -> Path:
    return Path(_variable("PUBLISH_ROOT", "the folder that holds exec/"))


def _attempt() -> str:
    return _variable("DISPATCH_ATTEMPT", "this execution's token: start the command with dispatch-agent exec")


def _variable(name: str, what: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        msg = f"{name} is not set; it is {what}"
        raise SettingsError(msg)
    return value
