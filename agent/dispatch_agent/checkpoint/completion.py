"""When is a save complete: the rules, as `--complete` names them. Pure over what was looked at.

No signal is right for every framework, so the rule is configured. Our own marker counts under every rule. `auto`
follows a preset only where a save's look leaves no doubt about who wrote it, and else asks for a rule: a silent half
checkpoint is worse than a loud question.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dispatch_agent.checkpoint.generations import fingerprint
from dispatch_agent.checkpoint.names import is_temporary, shown
from dispatch_agent.checkpoint.presets import PRESETS, recognise
from dispatch_agent.checkpoint.save import Complete, Ignored, Settling, Signal, Snapshot, Survey, Verdict
from dispatch_agent.checkpoint.signals import (
    Decide,
    Look,
    complete,
    lacking,
    not_by_all,
    not_deleted,
    not_fresh,
    not_quiet,
    not_whole,
)
from dispatch_agent.errors import SettingsError

_CHOOSE = (
    "call `publish complete PATH` after each save, or choose a rule with --complete (dcp, hf, lightning, rename, "
    "pointer:<file>, symlink:<name>, absent:<glob>, settle:<seconds>, marker:<name>)"
)
_TRACKERS = frozenset({b"latest", b"latest_universal", b"latest_checkpointed_iteration.txt", b"checkpoint"})
_TF_PATH = re.compile(rb'^model_checkpoint_path:\s*"([^"]*)"', re.MULTILINE)
_LONGEST_SETTLE = 86_400.0


@dataclass(frozen=True, slots=True)
class Rule:
    """A completion rule as configured. `settle` in seconds."""

    text: str
    decide: Decide
    settle: float
    expect_ranks: int | None = None

    def judge(self, save: Snapshot, survey: Survey, quiet: float) -> Verdict:
        """What this rule says of one save in one look, unchanged for `quiet` seconds as this publisher saw it."""
        if save.root.kind not in {"file", "folder"}:
            return Ignored("it is no file or folder (a FIFO, socket or device)")
        look = Look(save, survey, quiet, self.settle, self.expect_ranks)
        marked = own_marker(look)
        if isinstance(marked, Complete):
            return marked
        if is_temporary(save.name):
            return Ignored("its name is a temporary one")
        if marked is not None and self.text in {"auto", "marker"}:
            return marked
        return self.decide(look)


def parse_rule(text: str, *, expect_ranks: int | None = None, settle: float | None = None) -> Rule:
    """The rule that `--complete` names. `settle` (seconds) None means the rule's own default.

    Raises SettingsError for an unknown rule, a missing argument or a number out of range, naming what is allowed.
    """
    if expect_ranks is not None and expect_ranks < 1:
        msg = f"--expect-ranks is {expect_ranks}, expected at least 1"
        raise SettingsError(msg)
    if settle is not None and not 0 <= settle <= _LONGEST_SETTLE:
        msg = f"the settle time is {settle} s, expected 0 to {_LONGEST_SETTLE:g}"
        raise SettingsError(msg)
    name, colon, argument = text.partition(":")
    if text in PRESETS:
        preset = PRESETS[text]
        if preset.decide is None:
            msg = f"--complete {text} is not there yet: {_CHOOSE}"
            raise SettingsError(msg)
        return Rule(text, preset.decide, preset.settle if settle is None else settle, expect_ranks)
    if text in _SIMPLE:
        decide, default = _SIMPLE[text]
        return Rule(text, decide, default if settle is None else settle, expect_ranks)
    if name == "settle" and colon:
        return Rule(text, _settled, _seconds(argument), expect_ranks)
    if name in _WITH_NAME and colon:
        if not argument or argument.startswith("/") or ".." in argument.split("/"):
            msg = f"--complete {text}: a name is expected after {name}:, relative and without .."
            raise SettingsError(msg)
        if "/" in argument and name != "marker":
            msg = f"--complete {text}: {argument} has a slash, but only what stands beside the saves is looked at"
            raise SettingsError(msg)
        make, default = _WITH_NAME[name]
        return Rule(text, make(os.fsencode(argument)), default if settle is None else settle, expect_ranks)
    known = ", ".join(
        [
            "auto",
            "marker",
            "rename",
            "settle:<seconds>",
            *(f"{n}:<name>" for n in _WITH_NAME),
            *(n for n, p in PRESETS.items() if p.decide),
        ]
    )
    msg = f"--complete {text!r} is no completion rule: expected one of {known}"
    raise SettingsError(msg)


def own_marker(look: Look) -> Verdict | None:
    """What our own marker says, or None if the save has none."""
    marker = look.survey.markers.get(look.save.name)
    if marker is None:
        return None
    again = "call `publish complete` again once it is finished"
    if stale := not_fresh(look, "its completion marker", marker.mtime_ns, remedy=again):
        return stale
    if marker.content and marker.content != fingerprint(look.save).digest:
        return lacking(look, f"it is not what it was when `publish complete` was called for it: {again}")
    # The time too: whoever deletes .dispatch/ makes the numbers start again.
    mark = f"{marker.sequence}.{marker.mtime_ns}"
    signal = Signal("marker", mark, look.save.newest_ns, marker.sequence, marker.token)
    return Complete(signal, "`publish complete` was called for it")


def _auto(look: Look) -> Verdict:
    name = look.save.name
    if look.save.root.kind == "file" and name in _TRACKERS:
        return Ignored("it is a tracker file, which names a save")
    preset = recognise(look)
    if preset is None or preset.decide is None:
        return lacking(look, f"no sign of who wrote it or when it is finished: {_CHOOSE}")
    verdict = preset.decide(look)
    if isinstance(verdict, Complete):
        # Recognised, not promised: whoever writes into the folder after the framework's signal gets the time to do so.
        why = f"recognised as {preset.name}: {verdict.why}"
        return not_quiet(look, look.settle) or Complete(verdict.signal, why)
    if isinstance(verdict, Settling):
        return Settling(f"recognised as {preset.name}: {verdict.reason}", verdict.again_in, verdict.stuck)
    return verdict


def _marker(look: Look) -> Verdict:
    return lacking(look, "it has no completion marker: call `publish complete PATH` after each save")


def _named_marker(name: bytes) -> Decide:
    def decide(look: Look) -> Verdict:
        save = look.save
        saves = {other.name: other for other in look.survey.saves}
        if save.name.endswith(name) and save.name[: -len(name)] in saves:
            return Ignored(f"it is the marker of {shown(save.name[: -len(name)])}")
        beside = saves.get(save.name + name)
        marker = look.inside.get(name) or (beside.root if beside else None)
        if marker is None or marker.kind != "file":
            return lacking(look, f"it has no {shown(name)}, inside or as {shown(save.name + name)} beside it")
        but = {name} if name in look.inside else ()
        if stale := not_fresh(look, shown(name), marker.mtime_ns, but=but) or not_deleted(look, trust_ctime=True):
            return stale
        return complete(
            look, "marker", f"{marker.mtime_ns}.{marker.size}", f"{shown(name)} was written after all of it"
        )

    return decide


def _rename(look: Look) -> Verdict:
    return _quiet(look, "rename", "it stands under a final name and did not change between two looks")


def _settled(look: Look) -> Verdict:
    return _quiet(look, "settle", f"it has not changed for {look.settle:g} s")


def _quiet(look: Look, rule: str, why: str) -> Verdict:
    verdict = not_whole(look) or not_deleted(look, trust_ctime=True) or not_quiet(look, look.settle)
    # Nothing is quiet at its first sight, however short the time that is asked for.
    if verdict is None and look.quiet <= 0:
        verdict = Settling("seen for the first time", again_in=max(look.settle, 0.1))
    return verdict or complete(look, rule, "", why)


def _pointer(name: bytes) -> Decide:
    def decide(look: Look) -> Verdict:
        if look.save.name == name:
            return Ignored("it is the tracker file itself")
        if name not in look.survey.texts:
            return lacking(look, f"there is no tracker file {shown(name)} that names it")
        text, mtime_ns = look.survey.texts[name]
        if not text.strip():
            return lacking(look, f"{shown(name)} is empty: it is being written")
        if not _names(text, look.save.name):
            # Not stuck: this is how every save looks once the next one is named.
            return Settling(f"{shown(name)} names {shown(text.strip()[:80])}, not this")
        mark = f"{mtime_ns}.{hashlib.sha256(text).hexdigest()[:16]}"
        # Quiet too: DeepSpeed's rank 0 names a save while slower ranks are still writing theirs.
        return (
            not_fresh(look, shown(name), mtime_ns)
            or not_deleted(look, trust_ctime=True)
            or not_whole(look)
            or not_by_all(look)
            or not_quiet(look, look.settle)
            or complete(look, "pointer", mark, f"{shown(name)} names it and is newer than all of it")
        )

    return decide


def _names(text: bytes, save: bytes) -> bool:
    """Whether a tracker's content names a save: by name, as the last part of a path, or as Megatron's iteration."""
    found = _TF_PATH.search(text)
    said = (found[1] if found else text.strip()).rstrip(b"/").rpartition(b"/")[2]
    iteration = b"iter_%07d" % int(said) if re.fullmatch(rb"\d{1,18}", said) else b""
    return save in {said, iteration}


def _symlink(name: bytes) -> Decide:
    def decide(look: Look) -> Verdict:
        target = look.survey.links.get(name)
        if target is None:
            return lacking(look, f"there is no link {shown(name)} that points to it")
        if target.rstrip(b"/").rpartition(b"/")[2] != look.save.name:
            return Settling(f"the link {shown(name)} points to {shown(target)}, not to this")
        time_ns = look.survey.link_times.get(name, 0)
        if stale := not_fresh(look, f"the link {shown(name)}", time_ns) or not_deleted(look, trust_ctime=True):
            return stale
        return complete(
            look, "symlink", f"{time_ns}", f"the link {shown(name)} points to it and is newer than all of it"
        )

    return decide


def _absent(glob: bytes) -> Decide:
    pattern = glob.decode("latin-1")

    def decide(look: Look) -> Verdict:
        name = look.save.name
        if fnmatchcase(name.decode("latin-1"), pattern):
            return Ignored(f"it is a sign that another save is unfinished ({shown(glob)})")
        for path in look.inside:
            if fnmatchcase(path.rpartition(b"/")[2].decode("latin-1"), pattern):
                return lacking(look, f"{shown(path)} in it says that it is unfinished")
        for other in (*(save.name for save in look.survey.saves), *look.survey.links):
            if other != name and _speaks_of(other, name, pattern):
                return lacking(look, f"{shown(other)} beside it says that it is unfinished")
        return _quiet(look, "absent", f"nothing is named {shown(glob)} and it has settled")

    return decide


def _speaks_of(other: bytes, save: bytes, pattern: str) -> bool:
    """Whether `other` is `<save><pattern>`. NeMo leaves `.ckpt` and `-EMA` out of the save's name for it."""
    stem = save.removesuffix(b".ckpt")
    for start in {save, stem, stem.removesuffix(b"-EMA")}:
        rest = other.removeprefix(start).decode("latin-1")
        # Without the leading star: step=10 must not wait for step=100-unfinished.
        if other.startswith(start) and fnmatchcase(rest, pattern.lstrip("*")):
            return True
    return False


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_SETTLE:
        msg = f"--complete settle:{text}: expected seconds, more than 0 and at most {_LONGEST_SETTLE:g}"
        raise SettingsError(msg)
    return seconds


_SIMPLE: dict[str, tuple[Decide, float]] = {"auto": (_auto, 2.0), "marker": (_marker, 0.0), "rename": (_rename, 1.0)}
_WITH_NAME: dict[str, tuple[Callable[[bytes], Decide], float]] = {
    "marker": (_named_marker, 0.0),
    "pointer": (_pointer, 2.0),
    "symlink": (_symlink, 0.0),
    "absent": (_absent, 2.0),
}
