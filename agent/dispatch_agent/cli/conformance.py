"""Runs `prologue/vectors.json`, the prologue's contract, against one shell or program and says what differs.

The command of a vector is a probe: a program that reports how it was started. The one made here needs only Python; the
tests bring a compiled one, which sees more. This module prints nothing and imports no click.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROLOGUE = Path(__file__).resolve().parent.parent / "_prologue"
SCRIPT = PROLOGUE / "prologue.sh"
VECTORS = PROLOGUE / "vectors.json"

# Ends a shell that hangs: some retry a refused fork for longer than this.
TIMEOUT_SECONDS = 20
_INPUTS = ("ADMISSION", "RESTART", "EPOCH_PREFIX", "TOKEN_PREFIX", "WORKDIR")
_NOBODY_ELSE = 61_184  # a uid that is unlikely to own a process, and is mapped in a rootless container

_PYTHON_PROBE = """#!{python} -IS
import os, sys
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
lines = ["arg " + os.fsencode(word).hex() for word in sys.argv]
lines += ["env " + entry.hex() for entry in open("/proc/self/environ", "rb").read().split(b"\\0") if entry]
lines += ["fd %d" % fd for fd in range(256) if os.path.exists("/proc/self/fd/%d" % fd)]
lines += ["cwd " + os.getcwdb().hex(), "ignored " + status["SigIgn"].strip(), "blocked " + status["SigBlk"].strip()]
lines += ["umask " + status["Umask"].strip(), "pid %d" % os.getpid()]
with open({report!r}, "w") as report:
    report.write("\\n".join(lines))
sys.stdout = None
os._exit(42)
"""


def load() -> dict[str, Any]:
    """The contract, as its file has it."""
    contract: dict[str, Any] = json.loads(VECTORS.read_text(encoding="utf-8"))
    return contract


def lay_out(fixtures: Mapping[str, Any], folder: Path) -> None:
    """Make the folders, links and files that the vectors speak of."""
    for entry in fixtures["folders"]:
        name, mode = _name_and_mode(entry, 0o755)
        (folder / name).mkdir(parents=True)
        (folder / name).chmod(mode)
    for name, target in fixtures["symlinks"].items():
        (folder / name).symlink_to(target)
    for entry, text in fixtures["files"].items():
        name, mode = _name_and_mode(entry, 0o644)
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(mode)


def make_python_probe(folder: Path) -> Probe:
    """A probe for places without a compiler."""
    path, report = folder / "probe", folder / "report"
    path.write_text(_PYTHON_PROBE.format(python=sys.executable, report=str(report)), encoding="utf-8")
    path.chmod(0o755)
    return Probe(path, report, sees_signals=False)


def why_left_out(vector: Mapping[str, Any], stage: Stage) -> str | None:
    """Why this vector cannot be judged here, if so."""
    setup = vector.get("setup", {})
    if "@LOC@" in json.dumps(vector) and stage.locales is None:
        return "needs locales made for it"
    if "child_ignored" in vector["expect"] and not stage.probe.sees_signals:
        return "needs a probe that has no signal set-up of its own"
    if ("uid" in setup or "nproc1_fresh_uid" in setup) and not stage.probe.sees_signals:
        return "needs another user"
    return None


def run(vector: Mapping[str, Any], base: Mapping[str, str], runner: Runner, stage: Stage) -> list[str]:
    """Run one vector. Returns what differs from its expectation, each in one sentence; nothing is all right."""
    words = [stage.fill(word) for word in vector["argv"]]
    environ = environment(vector, base, stage)
    setup = vector.get("setup")
    stage.probe.report.write_bytes(b"")
    stage.probe.report.chmod(0o666)  # a vector may run as another user
    process = subprocess.Popen(
        runner.command(words),
        executable=runner.executable,
        env=environ,
        cwd=stage.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        close_fds=False,
        preexec_fn=_preparation(setup) if setup else None,  # noqa: PLW1509  no other thread runs beside the vectors
    )
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return [f"it did not end within {TIMEOUT_SECONDS} s"]
    seen = Seen(process.returncode, process.pid, stdout, stderr, read_report(stage.probe.report))
    return judge(vector, words, seen, stage)


def environment(vector: Mapping[str, Any], base: Mapping[str, str], stage: Stage) -> dict[bytes, bytes]:
    """The environment of a vector: the base with its changes, and its raw entries, whose names may be anything."""
    entries = {**base, **vector.get("env", {})}
    environ = {os.fsencode(name): stage.fill(value) for name, value in entries.items() if value is not None}
    for entry in vector.get("env_raw", []):
        name, _, value = stage.fill(entry).partition(b"=")
        environ[name] = value
    return environ


def judge(vector: Mapping[str, Any], words: Sequence[bytes], seen: Seen, stage: Stage) -> list[str]:
    """Compare what was seen with what a vector expects."""
    expect = vector["expect"]
    wrong = []
    if seen.exit != expect["exit"]:
        wrong.append(f"exit code {seen.exit} instead of {expect['exit']} (stderr {seen.stderr[-200:]!r})")
    if os.fsencode(expect.get("stderr", "")) not in seen.stderr:
        wrong.append(f"stderr {seen.stderr[-200:]!r} lacks {expect['stderr']!r}")
    if "stdout" in expect and seen.stdout != os.fsencode(expect["stdout"]):
        wrong.append(f"stdout {seen.stdout!r} instead of {expect['stdout']!r}")
    if (seen.report is not None) != expect["run"]:
        wrong.append("the command ran" if seen.report is not None else "the command did not run")
    if seen.report is not None and expect["run"]:
        wrong += _judge_report(expect, words, seen.pid, seen.report, stage)
    return wrong


def _judge_report(
    expect: Mapping[str, Any], words: Sequence[bytes], pid: int, report: Report, stage: Stage
) -> list[str]:
    facts: list[tuple[str, object, object]] = [
        ("arguments", report.arguments, tuple(words)),
        ("DISPATCH_EPOCH", report.environ.get(b"DISPATCH_EPOCH"), expect["epoch"].encode()),
        ("DISPATCH_ATTEMPT", report.environ.get(b"DISPATCH_ATTEMPT"), expect["attempt"].encode()),
    ]
    facts += [(name, report.environ.get(name.encode()), None) for name in map("DISPATCH_K8S_{}".format, _INPUTS)]
    for name, value in expect.get("child_env", {}).items():
        facts.append((name, report.environ.get(os.fsencode(name)), None if value is None else stage.fill(value)))
    for name, parts in expect.get("child_env_lacks", {}).items():
        value = report.environ.get(os.fsencode(name), b"").decode(errors="replace")
        facts += [(f"{name} holding {part}", part in value, False) for part in parts]
    for name in expect.get("child_ignored", []):
        facts.append((f"{name} ignored", getattr(signal, name) in report.ignored, True))
    if "cwd" in expect:
        facts.append(("folder", report.cwd, stage.fill(expect["cwd"])))
    if "child_fds" in expect:
        facts.append(("open files", report.files, frozenset({0, 1, 2, *expect["child_fds"]})))
    if "child_umask" in expect:
        facts.append(("umask", report.umask, int(expect["child_umask"], 8)))
    if "child_pid" in expect:
        facts.append(("process id", report.pid, pid))
    return [f"{what} is {got!r} instead of {wanted!r}" for what, got, wanted in facts if got != wanted]


def read_report(path: Path) -> Report | None:
    """What the probe wrote, or nothing if it did not run."""
    lines = [line.split(" ", 1) for line in path.read_text(encoding="ascii").splitlines()]
    if not lines:
        return None
    found: dict[str, list[str]] = {}
    for key, value in lines:
        found.setdefault(key, []).append(value)
    entries = [bytes.fromhex(entry) for entry in found.get("env", [])]
    return Report(
        arguments=tuple(bytes.fromhex(word) for word in found["arg"]),
        entries=tuple(entries),
        environ={name: value for name, _, value in (entry.partition(b"=") for entry in entries)},
        cwd=bytes.fromhex(found["cwd"][0]),
        files=frozenset(map(int, found.get("fd", []))),
        ignored=_signals(found["ignored"][0]),
        blocked=_signals(found["blocked"][0]),
        umask=int(found["umask"][0], 8),
        pid=int(found["pid"][0]),
    )


def _signals(mask: str) -> frozenset[int]:
    bits = int(mask, 16)
    return frozenset(number for number in range(1, 65) if bits >> (number - 1) & 1)


def _preparation(setup: Mapping[str, Any]) -> Callable[[], None]:
    """What the process does to itself before it becomes the shell."""

    def prepare() -> None:
        for name in setup.get("ignore", []):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        if setup.get("stderr") == "/dev/full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        elif setup.get("stderr") == "pipe":
            reader, writer = os.pipe()
            os.dup2(writer, 2)
            os.close(reader)
        for number in range(3, 256) if "open" in setup else ():
            _keep_from_the_shell(number)
        for number in setup.get("open", []):
            os.dup2(os.open("/dev/null", os.O_RDWR), number)
            os.set_inheritable(number, True)  # dup2 leaves it as it is where both numbers are one
        if "umask" in setup:
            os.umask(int(setup["umask"], 8))
        if setup.get("nproc1_fresh_uid"):
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        uid = _NOBODY_ELSE if setup.get("nproc1_fresh_uid") else setup.get("uid")
        if uid is not None and os.geteuid() == 0:  # anybody else is subject to permissions and limits as it is
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        for number in setup.get("close", []):
            os.close(number)

    return prepare


def _keep_from_the_shell(number: int) -> None:
    """What this process was given by its own parent says nothing about the shell."""
    try:
        os.set_inheritable(number, False)
    except OSError:  # it is not open
        return


def _name_and_mode(entry: str, mode: int) -> tuple[str, int]:
    """Fixtures are named like "notexec (0644)" or "noperm (mode 000)"."""
    name, separator, rest = entry.rpartition(" (")
    if not separator:
        return entry, mode
    return name, int(rest.removeprefix("mode ").rstrip(")"), 8)


@dataclass(frozen=True, slots=True)
class Runner:
    """How the prologue is started: `before` and then the words of the command; `executable` is what the kernel runs."""

    executable: str
    before: tuple[str, ...]

    def command(self, words: Sequence[bytes]) -> list[str | bytes]:
        return [*self.before, *words]


@dataclass(frozen=True, slots=True)
class Probe:
    """The program that a vector runs, and where it reports. A Python one cannot see signals as they were given."""

    path: Path
    report: Path
    sees_signals: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """Where vectors run. `folder` must be a resolved path."""

    folder: Path
    probe: Probe
    locales: Path | None = None

    def fill(self, text: str) -> bytes:
        for mark, path in (("@PROBE@", self.probe.path), ("@DIR@", self.folder), ("@LOC@", self.locales)):
            text = text.replace(mark, str(path))
        return os.fsencode(text)


@dataclass(frozen=True, slots=True)
class Report:
    """What the probe saw of itself. `entries` is the environment in order, `environ` the last of each name."""

    arguments: tuple[bytes, ...]
    entries: tuple[bytes, ...]
    environ: dict[bytes, bytes]
    cwd: bytes
    files: frozenset[int]
    ignored: frozenset[int]
    blocked: frozenset[int]
    umask: int
    pid: int


@dataclass(frozen=True, slots=True)
class Seen:
    """One run from outside; `exit` is negative for a signal."""

    exit: int
    pid: int
    stdout: bytes
    stderr: bytes
    report: Report | None


def shell_runner(shell: str, *options: str, text: str | None = None) -> Runner:
    """The prologue under a shell that is called by the name sh."""
    script = SCRIPT.read_text(encoding="utf-8") if text is None else text
    return Runner(shell, ("/bin/sh", *options, "-c", script, "dispatch-prologue"))


def python_runner(python: str = sys.executable) -> Runner:
    """The standalone Python file, as images run it."""
    return Runner(python, (python, "-I", "-S", str(PROLOGUE.parent / "prologue.py")))
