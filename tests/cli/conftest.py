"""One execution of a job and the real commands on it: real processes, real folders, real servers."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.servers import Bucket, rclone, rclone_bucket, seaweed, shared_bucket

__all__ = ["rclone", "rclone_bucket", "seaweed", "shared_bucket"]

# Tests that share a server run in one process, so that only one server is started.
SEAWEED = pytest.mark.xdist_group("seaweed")
PATIENCE = 30.0
NOBODY = 65534
EPOCH, ATTEMPT = 1_000_001, "1.17.1"

Tree = Mapping[str, bytes] | Mapping[bytes, bytes]

# Takes long enough to be interrupted on its way.
LARGE: Tree = {f"{number:02}.bin": b"%02d" % number * (4 << 20) for number in range(40)}


@dataclass(frozen=True)
class Result:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """The one sentence that says why the command failed: the last line, and no other is like it."""
        assert "Traceback" not in self.err + self.out, self.err
        said = [line for line in self.err.splitlines() if re.match(r"(publish|dispatch-agent): ", line)]
        assert len(said) == 1, self.err
        assert self.err.splitlines()[-1] == said[0], self.err
        return said[0].partition(": ")[2]

    def fails(self, code: int, *words: str) -> str:
        """The sentence of a command that must have failed with this code, and must name these."""
        sentence = self.sentence
        assert self.code == code, self.err
        assert [word for word in words if word not in sentence] == [], sentence
        return sentence

    def passes(self) -> Result:
        assert self.code == 0, self.err
        assert "Traceback" not in self.err, self.err
        return self


@dataclass
class Running:
    """A command that goes on until it is told to end."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def lines(self) -> list[str]:
        return self.said.splitlines()

    def says(self, text: str, *, times: int = 1) -> None:
        """Wait until it has said this so often."""
        eventually(lambda: self.said.count(text) >= times, lambda: f"{text!r} x{times} is not in:\n{self.said[-3000:]}")

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> Result:
        """How it ends by itself."""
        code = self.process.wait(PATIENCE)
        return Result(code, "", self.said)

    def stop(self) -> Result:
        """SIGTERM, and how it ends."""
        self.signal()
        return self.end()


@dataclass(frozen=True)
class Job:
    """One execution: its checkpoint root, its destination, its identity."""

    root: Path
    dest: str
    environ: Mapping[str, str] = field(default_factory=dict)
    epoch: int = EPOCH
    attempt: str = ATTEMPT
    user: int | None = None

    @property
    def folder(self) -> Path:
        return self.root / "exec" / self.attempt

    @property
    def store(self) -> Path:
        return Path(self.dest)

    def later(self, epoch: int = EPOCH + 1, attempt: str = "1.17.2") -> Job:
        """The execution that replaces this one."""
        return replace(self, epoch=epoch, attempt=attempt)

    def write(self, name: str | bytes, tree: Tree | bytes | None = None) -> Path:
        """A save as a trainer writes it: a folder of files, or one file."""
        path = self.folder / os.fsdecode(name)
        write_tree(path, {"weights.bin": b"w" * 1000, "state.json": b"{}"} if tree is None else tree)
        return path

    def save(self, name: str | bytes, tree: Tree | bytes | None = None) -> Path:
        """A save that its trainer says is complete."""
        path = self.write(name, tree)
        self.run("complete", path).passes()
        return path

    def run(self, command: str, *arguments: str | bytes | Path, **environ: str) -> Result:
        """One `publish` command, run to its end."""
        return run("publish", command, *arguments, environ=self.variables(environ), user=self.user)

    def start(self, *arguments: str | Path, **environ: str) -> Running:
        """`publish watch` in the background; it is killed at the end of the test."""
        log = self.root / f"watch-{time.monotonic_ns()}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command("publish", self.user), "watch", *(os.fspath(argument) for argument in arguments)],
                env=self.variables(environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 (one call into libc)
            )
        return Running(process, log)

    @contextmanager
    def watch(self, *arguments: str | Path, **environ: str) -> Iterator[Running]:
        running = self.start("--rescan", "0.3", *arguments, **environ)
        try:
            yield running
        finally:
            if running.process.poll() is None:
                running.process.send_signal(signal.SIGCONT)
                running.process.kill()
            running.process.wait()

    def published(self) -> list[str]:
        """The names of all published saves, the oldest first."""
        return [item["save"] for item in self.run("list", "--json").passes().json]

    def commits(self) -> list[Path]:
        return sorted(self.store.glob("commits/*/*.json"))

    def data(self) -> list[Path]:
        """Every file of every save in the store."""
        return sorted(p for p in self.store.glob("data/*/*/*/**/*") if p.is_file())

    def variables(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        identity = {"DISPATCH_EPOCH": str(self.epoch), "DISPATCH_ATTEMPT": self.attempt}
        place = {"PUBLISH_ROOT": str(self.root), "PUBLISH_DEST": self.dest}
        merged = {**os.environ, **identity, **place, **self.environ, **(more or {})}
        return {name: value for name, value in merged.items() if value != UNSET}


UNSET = "(unset)"
"""As a variable's value: the command does not get the variable."""


def program(name: str) -> str:
    """The installed command, as a user calls it."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is not installed: pip install -e ."
    return found


def command(name: str, user: int | None = None) -> list[str]:
    """How a command is started, as another user if asked for. For tests marked `root` then."""
    if user is None:
        return [program(name)]
    return [sys.executable, "-I", "-c", _AS_ANOTHER, str(user)]


# Whoever runs the tests may have Python and the checkout where no other user may look, so all is imported before.
_AS_ANOTHER = """
import importlib, os, pkgutil, sys
import dispatch_agent.__main__, watchdog.observers
for module in pkgutil.walk_packages(dispatch_agent.__path__, "dispatch_agent."):
    importlib.import_module(module.name)
user = int(sys.argv.pop(1))
os.setgroups([])
os.setgid(user)
os.setuid(user)
dispatch_agent.__main__.publish()
"""


def run(
    name: str, *arguments: str | bytes | Path, environ: Mapping[str, str] | None = None, user: int | None = None
) -> Result:
    answer = subprocess.run(
        [*command(name, user), *(os.fspath(argument) for argument in arguments)],
        env=environ,
        capture_output=True,
        check=False,
        timeout=2 * PATIENCE,
        stdin=subprocess.DEVNULL,
    )
    return Result(answer.returncode, answer.stdout.decode(errors="replace"), answer.stderr.decode(errors="replace"))


def eventually(reached: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        if time.monotonic() > deadline:
            pytest.fail(otherwise())
        time.sleep(0.02)


def write_tree(path: Path, tree: Tree | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(tree, bytes):
        path.write_bytes(tree)
        return
    path.mkdir(exist_ok=True)
    for name, data in tree.items():
        file = path / os.fsdecode(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def tree_of(path: Path) -> dict[bytes, bytes | None]:
    """Everything below a path: files with their bytes, folders with None, links as their text; by raw name."""
    if path.is_file():
        return {b"": path.read_bytes()}
    found: dict[bytes, bytes | None] = {}
    for top, folders, files in os.walk(os.fsencode(path)):
        for name in folders + files:
            place = os.path.join(top, name)
            key = os.path.relpath(place, os.fsencode(path))
            if os.path.islink(place):
                found[key] = b"-> " + os.readlink(place)
            elif os.path.isdir(place):
                found[key] = None
            else:
                found[key] = Path(os.fsdecode(place)).read_bytes()
    return found


def flip(path: Path) -> None:
    """One byte becomes another, as a bad disk does it."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory, where fsync costs nothing, that other users may enter too."""
    memory = Path("/dev/shm")  # in a container it is often too small
    room = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30
    folder = Path(tempfile.mkdtemp(dir=memory if room else None, prefix="dispatch-cli-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def job(place: Path) -> Job:
    """An execution whose destination is a folder."""
    job = Job(place / "root", str(place / "store"))
    job.folder.mkdir(parents=True)
    return job


def on_s3(job: Job, bucket: Bucket, **more: str) -> Job:
    return replace(job, dest=f"{bucket.url}/{os.urandom(6).hex()}", environ={**bucket.environment, **more})


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed test run leaves no watcher


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A filesystem of its own, so small that it can be filled. For tests marked `root`."""
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill(path: Path) -> Path:
    """A file that takes all space that is left."""
    ballast = path / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return ballast
