"""Whether SIGTERM reaches a command: what /proc says of a process, and what a shell's words will do with one.

The first process of a container is special: the kernel drops every signal that it has no handler for, and nobody passes
one on to its children. A training command behind a shell therefore hears of its end only when it is killed.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dispatch_agent.support import Support, Value

_SHELLS = frozenset({"sh", "dash", "bash", "ash", "ksh", "ksh93", "mksh", "zsh", "yash", "posh", "rbash"})
# They take SIGTERM by sigwait, and send it to their child.
_FORWARDERS = frozenset({"tini", "dumb-init", "docker-init", "catatonit"})
_MULTICALL = frozenset({"busybox", "toybox"})
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_EXEC = "begin the last command with exec, or have no shell before it"


@dataclass(frozen=True, slots=True)
class Process:
    """A process as /proc shows it. `pid` is the one in our namespace, `own_pid` the one in its own."""

    pid: int
    own_pid: int
    words: tuple[str, ...]
    caught: bool
    ignored: bool
    blocked: bool
    children: tuple[Process, ...] = ()

    @property
    def name(self) -> str:
        first = os.path.basename(self.words[0]).lstrip("-") if self.words else ""
        return os.path.basename(self.words[1]) if first in _MULTICALL and len(self.words) > 1 else first

    @property
    def said(self) -> str:
        """For people: its number and the beginning of its command line."""
        line = shlex.join(self.words) or "(no command line)"
        return f"process {self.pid} ({line[:80]}{'...' if len(line) > 80 else ''})"


def read(pid: int, proc: Path = Path("/proc")) -> Process | None:
    """A process and its descendants, None if there is none. What another user may not see is left out."""
    parents: dict[int, list[int]] = {}
    for entry in proc.iterdir():
        if entry.name.isdecimal() and (status := _status(entry)):
            parents.setdefault(int(status.get("PPid", "0")), []).append(int(entry.name))
    return _read(pid, parents, proc)


def _read(pid: int, parents: dict[int, list[int]], proc: Path) -> Process | None:
    status = _status(proc / str(pid))
    if not status or status.get("State", "").startswith(("Z", "X")):
        return None
    try:
        line = (proc / str(pid) / "cmdline").read_bytes()
    except OSError:
        line = b""
    words = tuple(os.fsdecode(word) for word in line.split(b"\0")[:-1]) or (status.get("Name", ""),)
    children = (_read(child, parents, proc) for child in sorted(parents.get(pid, ())) if child != os.getpid())
    return Process(
        pid,
        int(status.get("NSpid", str(pid)).split()[-1]),
        words,
        caught=_has_sigterm(status, "SigCgt"),
        ignored=_has_sigterm(status, "SigIgn"),
        blocked=_has_sigterm(status, "SigBlk"),
        children=tuple(child for child in children if child),
    )


def _has_sigterm(status: Mapping[str, str], mask: str) -> bool:
    return bool(int(status.get(mask, "0"), 16) >> (signal.SIGTERM - 1) & 1)


def _status(folder: Path) -> dict[str, str]:
    """The fields of a process's status; none if it has gone."""
    try:
        lines = (folder / "status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def hears(process: Process, *, first: bool | None = None) -> Support:
    """Whether this process acts on SIGTERM. `first`: it is, or will be, the first of its container; None looks.

    A handler is a yes: what it does in it, nobody can see from outside.
    """
    is_first = process.own_pid == 1 if first is None else first
    if process.name in _FORWARDERS and process.children:
        return _through(process, is_first)
    if process.name in _SHELLS and process.children:
        return _behind_shell(process, is_first)
    if process.ignored:
        return _probed("no", f"{process.said} ignores SIGTERM: somebody before it said trap '', take that out")
    if process.caught:
        return _probed("yes", f"{process.said} has a handler for SIGTERM")
    if process.blocked:
        return _probed("unknown", f"{process.said} blocks SIGTERM: whether it waits for it otherwise cannot be seen")
    if is_first:
        effect = "as the first process of its container it never gets it, and is killed when the grace period ends"
    else:
        effect = "it ends at once, without a last save"
    return _probed("no", f"{process.said} has no handler for SIGTERM: {effect}; install one that saves")


def _through(process: Process, is_first: bool) -> Support:
    if len(process.children) > 1:
        return _probed("unknown", f"{process.said} has several children, of which it tells one")
    child = hears(process.children[0], first=False)
    where = "" if is_first else ", which is not the first process itself"
    return _probed(child.value, f"{process.name} passes SIGTERM on{where}; {child.reason}")


def _behind_shell(shell: Process, is_first: bool) -> Support:
    child = shell.children[0].said
    if shell.caught:
        return _probed(
            "unknown",
            f"{shell.said} catches SIGTERM itself, and {child} is behind it: a shell passes nothing on unless its trap "
            f"does, and runs a trap only when the command before it has ended; {_EXEC}",
        )
    how = "ignores SIGTERM" if shell.ignored or is_first else "ends by SIGTERM and tells nobody"
    remedy = _EXEC
    if len(shell.children) > 1:
        remedy = "a pipeline cannot be replaced by its command: exec the command, and let the kubelet keep its output"
    return _probed("no", f"{shell.said} {how}, and {child} behind it never gets it; {remedy}")


def judge(command: Sequence[str], program: str) -> Support:
    """What can be said of a command before it runs: only a shell's words tell. `program`: the file that its first word
    names, links followed, since `sh` is another shell in every image."""
    words = [os.path.basename(command[0]), *command[1:]]
    if words[0] in _MULTICALL:
        words = words[1:] or words
    if words[0] not in _SHELLS:
        return _declared("unknown", f"{command[0]} is no shell: whether it has a handler shows when it runs")
    script = _script(words[1:])
    if script is None:
        return _declared("unknown", f"{words[0]} runs a file or its input: its last line must begin with exec")
    return _judge_script(words[0], script, stays=os.path.basename(program) == "dash")


def _judge_script(shell: str, script: str, *, stays: bool) -> Support:
    """`stays`: this shell never becomes its last command by itself."""
    try:
        last, is_pipeline = _last_command(script)
    except ValueError as error:
        return _declared("no", f"{shell} -c has words that are no shell command: {error}")
    if is_pipeline:
        return _declared(
            "no",
            f"{shell} -c runs a pipeline, stays before it and passes no SIGTERM on: exec the command alone, and let "
            f"the kubelet keep its output, or write `exec COMMAND > >(tee FILE)` for bash",
        )
    if last[:1] == ["exec"] and len(last) > 1:
        return _declared("unknown", f"{shell} becomes {last[1]}: whether it has a handler shows when it runs")
    if "trap" in script:
        return _declared("unknown", f"{shell} -c sets a trap: whether that passes SIGTERM on shows when it runs")
    who = "stays before it and passes no SIGTERM on" if stays else "may stay before it and pass no SIGTERM on"
    return _declared("no" if stays else "unknown", f"{shell} -c runs a command without exec, and {who}; {_EXEC}")


def _script(arguments: Sequence[str]) -> str | None:
    """The text of -c, also where it stands among other letters, as in -ec; None if there is none."""
    for position, word in enumerate(arguments):
        if not word.startswith(("-", "+")):
            return None
        if not word.startswith("--") and "c" in word:
            rest = [after for after in arguments[position + 1 :] if not after.startswith("-") or after == "-"]
            return rest[0] if rest else None
        if word.endswith("o") and not word.startswith("--"):  # as in -euo pipefail
            return _script(arguments[position + 2 :])
    return None


def _last_command(script: str) -> tuple[list[str], bool]:
    """Its words, without the variables before it, and whether it is a pipeline. Raises ValueError."""
    lexer = shlex.shlex(script.replace("\\\n", " ").replace("\n", " ; "), posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    pipelines: set[int] = set()
    for token in lexer:
        if token in (";", "&&", "||", "&", ";;"):
            commands.append([])
        elif token in ("|", "|&"):
            pipelines.add(len(commands))
        else:
            commands[-1].append(token)
    filled = [number for number, command in enumerate(commands, 1) if command]
    if not filled:
        message = "there is no command"
        raise ValueError(message)
    last = commands[filled[-1] - 1]
    while last and _ASSIGNMENT.match(last[0]):
        last = last[1:]
    return last, filled[-1] in pipelines


def _declared(value: Value, reason: str) -> Support:
    return Support(value, "declared", reason)


def _probed(value: Value, reason: str) -> Support:
    return Support(value, "probed", reason)
