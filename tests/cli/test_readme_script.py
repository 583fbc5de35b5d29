"""The script of README.md for one machine, as it stands: it ends as what it runs ends, and leaves nobody behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cli.conftest import PATIENCE, Job, Running, eventually, flip, program

from dispatch_agent.publish import keys

README = Path(__file__).resolve().parents[2] / "README.md"
[SCRIPT] = (
    block for block in re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.M | re.S) if "wait $trainer" in block
)
IDENTITY = re.compile(r"^restart=0.*\nexport DISPATCH_EPOCH=.*\n", re.M)

# Writes one save that builds on the one it resumes from, and goes on until it is let go or told to end.
TRAINER = """
import os, signal, sys, time
from pathlib import Path
from dispatch_agent import complete, resume_path, save_dir

def save(suffix):
    path = save_dir() / f"step-{len(steps)}{suffix}"
    path.write_text(" ".join(steps))
    complete(path)

def told(number, frame):
    Path("told").write_text(signal.Signals(number).name)
    save("-last")
    sys.exit(int(os.environ.get("TOLD_EXITS", "0")))

signal.signal(signal.SIGTERM, told)
before = resume_path()
steps = [*(before.read_text().split() if before else []), os.environ["DISPATCH_EPOCH"]]
save("")
Path("trains").touch()
while not Path("go").exists():
    time.sleep(0.02)
sys.exit(int(os.environ.get("EXITS", "0")))
"""


@dataclass(frozen=True)
class Machine:
    """A folder with a `train.py`, and the shell that runs the script in it."""

    home: Path
    shell: str
    job: Job

    @contextmanager
    def started(self, script: str, **environ: str) -> Iterator[Running]:
        """The script in the background, in a process group of its own, and nothing of it afterwards."""
        log = self.home / "log"
        programs = {str(Path(program(name)).parent) for name in ("publish", "dispatch-agent")}
        path = os.pathsep.join([str(self.home / "bin"), *programs, os.environ["PATH"]])
        with log.open("wb") as out:
            process = subprocess.Popen(
                [self.shell, "-c", script],
                cwd=self.home,
                env={**os.environ, "PATH": path, **environ},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_as_from_a_terminal,  # noqa: PLW1509 (one call of signal(2))
            )
        try:
            yield Running(process, log)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @contextmanager
    def running(self, script: str = SCRIPT, **environ: str) -> Iterator[Running]:
        """The script while its trainer trains."""
        with self.started(script, **environ) as running:
            eventually((self.home / "trains").exists, lambda: running.said)
            yield running

    def ends(self, running: Running) -> int:
        """Its exit code, once it and all that it started are gone."""
        code = running.process.wait(PATIENCE)
        with pytest.raises(ProcessLookupError):
            os.killpg(running.process.pid, 0)
        return code

    def let_go(self, running: Running) -> int:
        (self.home / "go").touch()
        return self.ends(running)


def again(script: str, restart: int) -> str:
    return script.replace("restart=0", f"restart={restart}", 1)


@pytest.fixture(params=["dash", "bash"])
def machine(request: pytest.FixtureRequest, place: Path) -> Machine:
    shell = shutil.which(request.param)
    assert shell, f"{request.param} is not installed"
    (place / "bin").mkdir()
    python = place / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (place / "train.py").write_text(TRAINER)
    return Machine(place, shell, Job(place / "checkpoints", str(place / "published")))


def test_a_run_publishes_and_the_next_one_resumes(machine: Machine) -> None:
    with machine.running() as first:
        first.says("claimed")
        assert machine.let_go(first) == 0, first.said
    assert machine.job.published() == ["step-1"]
    with machine.running(again(SCRIPT, 1)) as second:
        assert machine.let_go(second) == 0, second.said
    assert machine.job.published() == ["step-1", "step-2"]
    assert (machine.job.root / "exec" / "1.1" / "step-2").read_text() == "1000000 1000001"


def test_under_slurm_the_submission_takes_the_place_of_the_pair(machine: Machine) -> None:
    slurm = {"SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": "3"}
    script, replaced = IDENTITY.subn("export DISPATCH_SUBMISSION=1\n", SCRIPT)
    assert replaced == 1
    with machine.running(script, **slurm) as running:
        running.says("claimed")
        assert machine.let_go(running) == 0, running.said
    [commit] = machine.job.commits()
    assert commit.parent.name == f"{1_000_003:020d}"


def test_it_ends_as_the_trainer_ends_and_publishes_what_is_complete(machine: Machine) -> None:
    with machine.running(EXITS="7") as running:
        running.says("claimed")
        assert machine.let_go(running) == 7, running.said
    assert machine.job.published() == ["step-1"]


def test_where_nothing_intact_is_left_nothing_is_trained(machine: Machine) -> None:
    with machine.running() as first:
        first.says("claimed")
        assert machine.let_go(first) == 0
    (machine.home / "trains").unlink()
    for path in machine.job.data():
        flip(path)
    with machine.started(again(SCRIPT, 1)) as second:
        assert machine.ends(second) == 22, second.said
    assert not (machine.home / "trains").exists()


def test_where_the_store_is_not_to_be_had_nothing_is_trained(machine: Machine) -> None:
    machine.job.store.write_bytes(b"no folder")
    with machine.started(SCRIPT) as running:
        assert machine.ends(running) != 0, running.said
    assert not (machine.home / "trains").exists()


def test_where_the_epoch_is_anothers_nothing_is_trained(machine: Machine) -> None:
    claim = machine.job.store / keys.attempt_claim_key(1_000_000)
    claim.parent.mkdir(parents=True)
    claim.write_bytes(b"another")
    with machine.started(SCRIPT) as running:
        assert machine.ends(running) == 31, running.said
    assert not (machine.home / "trains").exists()


def test_a_watch_that_ended_first_is_said_and_its_code_is_the_scripts(machine: Machine) -> None:
    with machine.running() as running:
        running.says("claimed", times=2)  # by the watch too
        children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
        [watch] = (pid for pid in children.read_text().split() if b"watch" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(int(watch), signal.SIGKILL)
        eventually(lambda: watch not in children.read_text().split(), lambda: running.said)
        assert machine.let_go(running) == 128 + signal.SIGKILL, running.said
        assert any("publish watch ended before the trainer" in line for line in running.lines)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 9)])
def test_a_signal_reaches_the_trainer_whose_last_save_is_published(
    machine: Machine, number: signal.Signals, code: int
) -> None:
    with machine.running(TOLD_EXITS=str(code)) as running:
        running.says("claimed")
        running.signal(number)
        assert machine.ends(running) == code, running.said
    assert (machine.home / "told").read_text() == "SIGTERM"
    assert machine.job.published() == ["step-1", "step-1-last"]
    assert "ended before" not in running.said


def _as_from_a_terminal() -> None:
    """A shell cannot trap what was ignored when it began, as SIGINT is where the tests run in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
