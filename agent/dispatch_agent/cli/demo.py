"""`dispatch-agent demo`: the main job on an embedded default, every step a real command in a real process."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click

from dispatch_agent.cli import demo_job
from dispatch_agent.cli.environment import open_lasting
from dispatch_agent.clock import SystemClock
from dispatch_agent.errors import AgentError, Fenced, SettingsError
from dispatch_agent.identity import new_job_id
from dispatch_agent.publish import keys

AGENT = (sys.executable, "-I", "-m", "dispatch_agent")
PATIENCE = 30.0
"""Seconds that any one step of the demo may take."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of the demo's job: its trainer and, beside it, its publisher."""

    epoch: int
    attempt: str
    trainer: subprocess.Popen[bytes]
    sidecar: subprocess.Popen[bytes]
    log: Path

    def send(self, number: signal.Signals) -> None:
        for process in (self.trainer, self.sidecar):
            process.send_signal(number)


@click.command()
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to work; must not exist yet. [default: a new folder under the temporary folder]",
)
@click.option("--dest", help="Publish there instead of to a folder; must be empty.")
def demo(folder: Path | None, dest: str | None) -> None:
    """A preempted job in under 20 seconds: no cluster, no cloud.

    A first execution publishes, is frozen, is replaced by a second one with a higher epoch, and wakes up: its late save
    must not replace the newer one.
    """
    if dest is not None:
        _check_empty(dest)
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="dispatch-demo-"))
    else:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            msg = f"--dir {folder}: {error.strerror}; it must not exist yet, and what it lies in must be writable"
            raise SettingsError(msg) from error
    clock = SystemClock()
    started = clock.monotonic()
    stage = Stage(folder, dest or str(folder / "store"), new_job_id(int(time.time() * 1000), secrets.token_bytes(10)))
    with contextlib.ExitStack() as running:
        _play(stage, running)
    click.echo()
    click.echo(f"Done in {clock.monotonic() - started:.1f} s. Look around:")
    command = Path(sys.executable).with_name("publish")
    publish = str(command) if command.exists() else f"{sys.executable} -m dispatch_agent publish"
    click.echo(f"  {publish} list --dest {stage.dest}")
    click.echo(f"  {publish} verify --all --dest {stage.dest}")
    click.echo(f"  ls {folder}/root/exec/*/          what each execution wrote")
    click.echo(f"  cat {folder}/execution-1.log      what the stale publisher saw")


def _check_empty(dest: str) -> None:
    """Every demo plays the same epochs, and what was published there before has them under another attempt."""
    with contextlib.closing(open_lasting(dest)) as store:
        there = [prefix for prefix in (keys.CLAIMS, keys.COMMITS) if store.folders(prefix)]
    if there:
        msg = f"--dest {dest}: something was published there before ({there[0]}/); it must be empty, name another place"
        raise SettingsError(msg)


def _play(stage: Stage, running: contextlib.ExitStack) -> None:
    _say("1", "The first execution starts: the trainer behind `dispatch-agent exec`, `publish watch` beside it.")
    first = running.enter_context(stage.execution(1, steps=1000, pace=1.0))
    _saw(stage.wait_for(lambda latest: latest["ordinal"] >= 2))

    _say("2", "It is frozen (SIGSTOP), as a lost node or a bad network freezes it. Nobody told it that it is over.")
    first.send(signal.SIGSTOP)

    _say("3", "The second execution starts with a higher epoch: `publish restore`, then the trainer resumes.")
    second = running.enter_context(stage.execution(2, steps=2, pace=0.5))
    newest = stage.wait_for(lambda latest: latest["epoch"] != str(first.epoch) and latest["ordinal"] == 2)
    _saw(newest)

    _say("4", "The first one wakes up (SIGCONT), finishes its next save and tries to publish it.")
    first.send(signal.SIGCONT)
    code = first.sidecar.wait(PATIENCE)
    if code != Fenced.exit_code:
        msg = f"the stale publisher exited {code}, expected {Fenced.exit_code}; see {first.log}"
        raise AgentError(msg)
    click.echo(f"     its publisher exits {code} (fenced): {_last_error(first.log)}")
    click.echo(f"     its saves are still there, locally: {stage.root}/exec/{first.attempt}/")

    _say("5", "Nothing went back:")
    after = stage.latest()
    _saw(after)
    if after is None or after["commit"] != newest["commit"]:
        msg = f"latest went from {newest} to {after}; see the logs in {stage.folder}"
        raise AgentError(msg)
    second.sidecar.send_signal(signal.SIGTERM)
    click.echo(f"     the second publisher drains and exits {second.sidecar.wait(PATIENCE)}")
    click.echo()
    click.echo(stage.command("publish", "list", "--dest", stage.dest).stdout, nl=False)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the demo plays."""

    folder: Path
    dest: str
    job: str

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def command(self, *arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """One short command, run to its end."""
        return subprocess.run(
            [*AGENT, *arguments],
            env=environ or _surroundings(),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )

    def latest(self) -> dict[str, Any] | None:
        got = self.command("publish", "latest", "--json", "--dest", self.dest)
        return json.loads(got.stdout) if got.returncode == 0 else None

    def wait_for(self, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        clock = SystemClock()
        deadline = clock.monotonic() + PATIENCE
        while clock.monotonic() < deadline:
            latest = self.latest()
            if latest is not None and reached(latest):
                return latest
        msg = f"nothing new was published within {PATIENCE:g} s; see the logs in {self.folder}"
        raise AgentError(msg)

    @contextlib.contextmanager
    def execution(self, number: int, *, steps: int, pace: float) -> Iterator[Execution]:
        """Start an execution as a cluster does: counters in the environment, one process for each container."""
        environ = self._environ(number)
        log = self.folder / f"execution-{number}.log"
        self.command("publish", "restore", "--if-any", "--dest", self.dest, environ=environ)
        with log.open("wb") as out:
            trainer = self._start(
                out, environ, "exec", "--", sys.executable, "-I", demo_job.__file__, str(steps), str(pace)
            )
            sidecar = self._start(out, environ, "publish", "watch", "--dest", self.dest, "--on-fenced", "exit")
        who = json.loads(self.command("identity", "--json", environ=environ).stdout)
        execution = Execution(int(who["epoch"]), who["attempt"], trainer, sidecar, log)
        try:
            yield execution
        finally:
            for process in (trainer, sidecar):
                if process.poll() is None:
                    process.send_signal(signal.SIGCONT)
                    process.kill()
                process.wait()

    def _start(self, out: IO[bytes], environ: Mapping[str, str], *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*AGENT, *arguments], env=environ, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def _environ(self, number: int) -> dict[str, str]:
        """What the Kubeflow adapter gives a container: the admission count is the only thing that moves."""
        return {
            **_surroundings(),
            "DISPATCH_JOB_ID": self.job,
            "DISPATCH_SUBMISSION": "1",
            "DISPATCH_K8S_EPOCH_PREFIX": "1",
            "DISPATCH_K8S_TOKEN_PREFIX": f"{self.job}.1.1",
            "DISPATCH_K8S_ADMISSION": str(number),
            "DISPATCH_K8S_RESTART": "0",
            "PUBLISH_ROOT": str(self.root),
        }


def _surroundings() -> dict[str, str]:
    """The environment without what an execution that goes on around the demo put into it."""
    foreign = ("DISPATCH_", "PUBLISH_", "AGENT_", "SLURM_", "PET_", "JOB_COMPLETION_INDEX")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def _say(step: str, text: str) -> None:
    click.echo(f"\n[{step}] {text}")


def _saw(latest: Mapping[str, Any] | None) -> None:
    if latest:
        click.echo(f"     latest is {latest['save']} of epoch {latest['epoch']} ({latest['commit']})")


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if "is stale" in line]
    return lines[-1].partition("publish: ")[2] or lines[-1] if lines else "(no reason in its log)"
