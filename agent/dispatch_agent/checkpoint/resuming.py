"""What an execution resumes from, decided once for all its ranks, and which of them are ready for their trainer.

    .dispatch/resume/<k>      the k-th choice: a commit and its save's name, or nothing; written once
             resume/<k>.bad   the k-th cannot be had: the next one counts; written once
             resume.lock      held by the rank that does the work for all
             init.<rank>      this rank is ready, and in which pod; written once
             started.<rank>   its command ran; the entry agent's

The choice rests on link(2) alone. The lock only keeps two ranks from doing the same work.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dispatch_agent.checkpoint import records
from dispatch_agent.checkpoint.folder import FolderLock
from dispatch_agent.checkpoint.names import decode_name
from dispatch_agent.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class Choice:
    """What to resume from. `save` is its raw name below `resume/<attempt>`, None for a start from nothing.

    `commit` is the key of its commit; None also for a save that stood there before anything was chosen.
    `bad`: it could not be had.
    """

    number: int
    commit: str | None
    save: bytes | None
    bad: bool


def choices(folder: Path) -> list[Choice]:
    """All choices of the execution, the k-th at index k-1; only the last may not be bad. Raises IntegrityError."""
    where = records.own(folder, "resume")
    found: list[Choice] = []
    while (value := records.read(where / str(len(found) + 1))) is not None:
        number = len(found) + 1
        found.append(_parsed(where / str(number), value, number, bad=os.path.lexists(where / f"{number}.bad")))
    return found


def choose(folder: Path, number: int, commit: str | None, save: str | None) -> None:
    """Make the `number`-th choice, unless somebody has made it: look then. `save` is percent-encoded.

    Raises AgentError if nothing can be written.
    """
    where = records.own(folder, "resume")
    records.make_folder(where)
    records.create(where / str(number), {"commit": commit, "save": save})


def reject(folder: Path, number: int, reason: str) -> None:
    """Say that the `number`-th choice cannot be had. Raises AgentError if nothing can be written."""
    records.create(records.own(folder, "resume", f"{number}.bad"), {"reason": reason})


def lock(folder: Path) -> FolderLock:
    """The lock of the rank that does the work for all, not yet taken."""
    return FolderLock(records.own(folder, "resume.lock"))


def ready_in(folder: Path, rank: int) -> str | None:
    """The UID of the pod in which the rank was made ready; None if it never was. Raises IntegrityError."""
    path = records.own(folder, f"init.{rank}")
    value = records.read(path)
    if value is None:
        return None
    if not isinstance(value.get("pod"), str):
        msg = f"{path} is damaged: the pod is {value.get('pod')!r}"
        raise IntegrityError(msg)
    return str(value["pod"])


def mark_ready(folder: Path, rank: int, pod: str) -> bool:
    """Write that the rank is ready in this pod; whether nobody had. Raises AgentError if nothing can be written."""
    return records.create(records.own(folder, f"init.{rank}"), {"pod": pod})


def has_started(folder: Path, rank: int) -> bool:
    """Whether the rank's command ran already, as the entry agent marks it."""
    return os.path.lexists(records.own(folder, f"started.{rank}"))


def _parsed(path: Path, value: dict[str, object], number: int, *, bad: bool) -> Choice:
    commit, save = value.get("commit"), value.get("save")
    if not isinstance(commit, str | None) or not isinstance(save, str | None):
        msg = f"{path} is damaged: the commit is {commit!r} and the save {save!r}"
        raise IntegrityError(msg)
    try:
        return Choice(number, commit, None if save is None else decode_name(save), bad)
    except ValueError as error:
        msg = f"{path} is damaged: {error}"
        raise IntegrityError(msg) from error
