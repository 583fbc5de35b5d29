"""What each completion rule is worth, for `publish rules` and docs/completion.md. Pure."""

from __future__ import annotations

from dispatch_agent.checkpoint.presets import PRESETS, Preset
from dispatch_agent.errors import SettingsError

_RULES = (
    Preset(
        "auto",
        "our own marker; else the preset of the framework that a save's look leaves no doubt about, and quiet; else it "
        "waits and asks for a rule",
        "as the preset that it follows",
        "`--expect-ranks` for a Trainer with several processes",
        "who wrote a save that looks like no framework's",
    ),
    Preset(
        "marker",
        "`publish complete PATH`, called after the save; no older than any file of it",
        "whatever the caller waited for: call it after a barrier, on one rank",
        "one line in the trainer",
        "nothing: it is the trainer's own word",
    ),
    Preset(
        "marker:<name>",
        "a file of that name inside the save, or `<save><name>` beside it, no older than any other file",
        "whatever its writer waited for",
        "a trainer that writes it last",
        "whether it is really written last",
    ),
    Preset(
        "rename",
        "it stands under a name that is not temporary, holds nothing temporary, and two looks saw the same",
        "those that wrote before the rename",
        "a trainer that renames a finished file or folder to its final name",
        "a rename itself: a look sees only names, so a save written under its final name passes as soon as it pauses",
    ),
    Preset(
        "pointer:<file>",
        "the tracker file beside the saves names it (name, path, Megatron's iteration or TensorFlow's "
        "`model_checkpoint_path`), is no older than any of its files, and quiet",
        "whatever the tracker's writer waited for; DeepSpeed's rank 0 waits for nobody, so count with `--expect-ranks`",
        "`--expect-ranks` for DeepSpeed",
        "a save that was named only between two looks",
    ),
    Preset(
        "symlink:<name>",
        "the link beside the saves points to it and is no older than any of its files",
        "whatever the link's writer waited for",
        "nothing",
        "a save that was pointed to only between two looks",
    ),
    Preset(
        "absent:<glob>",
        "nothing that matches, inside it or as `<save><glob>` beside it, and quiet",
        "whatever the sign's writer waited for",
        "a trainer that makes the sign before the first file",
        "a save whose sign was never made",
    ),
    Preset(
        "settle:<seconds>",
        "no change of any path, size, mtime, ctime or inode over that time, and nothing named as temporary",
        "all, if the time is longer than the slowest rank's pause",
        "a time longer than any pause within a save",
        "whether a writer pauses or is done",
    ),
)


def rows() -> tuple[Preset, ...]:
    """Every rule that can be chosen, the general ones first."""
    return (*_RULES, *(preset for preset in PRESETS.values() if preset.decide is not None))


def explain(rule: str) -> str:
    """One rule in words, over several lines. Raises SettingsError if there is none of that name."""
    name = rule.partition(":")[0]
    for row in rows():
        if rule == row.name or (":" in rule and row.name.startswith(f"{name}:")):
            return (
                f"{row.name}\n  signal: {row.signal}\n  ranks: {row.ranks}\n  needs: {row.needs}\n"
                f"  cannot know: {row.cannot_know}\n"
            )
    msg = f"{rule!r} is no completion rule: expected one of {', '.join(row.name for row in rows())}"
    raise SettingsError(msg)


def table() -> str:
    """All rules as a Markdown table."""
    lines = ["| `--complete` | signal | ranks it covers | needs | cannot know |", "|---|---|---|---|---|"]
    lines += [f"| `{row.name}` | {row.signal} | {row.ranks} | {row.needs} | {row.cannot_know} |" for row in rows()]
    return "\n".join(lines) + "\n"
