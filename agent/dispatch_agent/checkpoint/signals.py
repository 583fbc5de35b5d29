"""What completion rules ask of one look: is a signal fresh, is the save quiet, is it being deleted. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dispatch_agent.checkpoint.names import is_temporary, shown
from dispatch_agent.checkpoint.save import Complete, Entry, Settling, Signal, Snapshot, Survey, Verdict

STUCK_AFTER = 15.0
"""Seconds without any change after which a save that lacks something is taken for one that will always lack it."""

# Timestamps come from the kernel's tick (10 ms at the coarsest), and a folder's is taken after its new entry's.
_TICK_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class Look:
    """What a rule judges: one save in one survey, unchanged for `quiet` seconds. `settle` is in seconds too."""

    save: Snapshot
    survey: Survey
    quiet: float
    settle: float
    expect_ranks: int | None

    @property
    def inside(self) -> dict[bytes, Entry]:
        """What the save holds, by path; nothing for a single-file save."""
        return {entry.path: entry for entry in self.save.entries}


Decide = Callable[[Look], Verdict]


def complete(look: Look, rule: str, mark: str, why: str) -> Complete:
    """Finished, by a signal of this mark."""
    return Complete(Signal(rule, mark, look.save.newest_ns), why)


def lacking(look: Look, reason: str) -> Settling:
    """Something is not there (yet): stuck once nothing has changed for long."""
    return Settling(reason, stuck=look.quiet >= STUCK_AFTER)


def not_fresh(
    look: Look, signal: str, signal_ns: int, *, but: Collection[bytes] = (), remedy: str = ""
) -> Settling | None:
    """The verdict if a file or link (outside `but`) is newer than the signal: the save was written to after it.

    `remedy` says what to do, if another rule is not what helps.
    """
    remedy = remedy or f"if the trainer writes on after {signal}, choose another rule, such as --complete marker"
    for entry in (look.save.root, *look.save.entries):
        if entry.kind in {"file", "link"} and entry.mtime_ns > signal_ns and entry.path not in but:
            what = shown(entry.path or look.save.name)
            reason = f"{what} is newer than {signal}, which therefore says nothing about it: {remedy}"
            # For a while it is what an overwriting save looks like: the old signal stands beside new bytes.
            return lacking(look, reason)
    return None


def not_quiet(look: Look, seconds: float) -> Settling | None:
    """The verdict if the save has not been without change for so long."""
    if look.quiet >= seconds:
        return None
    reason = f"unchanged for {look.quiet:.1f} s, counts as settled after {seconds:g} s"
    return Settling(reason, again_in=seconds - look.quiet)


def not_whole(look: Look) -> Settling | None:
    """The verdict if something in it is named as temporary, or it has no file at all."""
    for entry in look.save.entries:
        if is_temporary(entry.path.rpartition(b"/")[2]):
            return lacking(look, f"{shown(entry.path)} in it is named as unfinished")
    if not look.save.files:
        return lacking(look, "it has no file yet")
    return None


def not_by_all(look: Look) -> Settling | None:
    """The verdict if DeepSpeed wrote into it and fewer optimizer files are there than ranks are expected."""
    written = sum(path.endswith(b"_optim_states.pt") for path in look.inside)
    if look.expect_ranks is not None and 0 < written < look.expect_ranks:
        return lacking(look, f"{written} of {look.expect_ranks} ranks have an *_optim_states.pt")
    return None


def not_deleted(look: Look, *, trust_ctime: bool) -> Settling | None:
    """The verdict if entries were taken out of it while a newer save stands beside it: rotation caught half-way.

    Making an entry gives it and its folder one time; removing an entry leaves the folder newer than all that is in
    it. A rename gives the entry a new ctime only, hence `trust_ctime`, for saves that end with a rename; without it
    a remount's chown deceives nobody. Of the newest save nothing is rotated away: there it was the trainer tidying up
    (Hugging Face removes its own `checkpoint-is-incomplete.txt` last).
    """
    save = look.save
    if save.root.kind != "folder":
        return None
    times: dict[bytes, list[int]] = defaultdict(list)
    for entry in save.entries:
        times[entry.path.rpartition(b"/")[0]].append(
            max(entry.mtime_ns, entry.ctime_ns) if trust_ctime else entry.mtime_ns
        )
    newest_file = max((file.mtime_ns for file in save.files), default=save.root.mtime_ns)
    for folder in (save.root, *(entry for entry in save.entries if entry.kind == "folder")):
        if folder.mtime_ns > max(times.get(folder.path) or [newest_file]) + _TICK_NS and _has_newer(look):
            where = shown(folder.path) or "it"
            return Settling(f"files were removed from {where} and a newer save stands beside it: it is being deleted")
    return None


def _has_newer(look: Look) -> bool:
    mine = max((file.mtime_ns for file in look.save.files), default=0)
    return any(
        file.mtime_ns > mine
        for other in look.survey.saves
        if other.name != look.save.name and not is_temporary(other.name)
        for file in other.files
    )
