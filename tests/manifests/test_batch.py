"""The batch script for Slurm, under a real bash with the real commands; only `srun` and `scontrol` are stood in for."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import PATIENCE, eventually, program
from tests.manifests.conftest import JOB_ID, invoke

TRICKY = [
    "costs $5",
    "$$6",
    "$(touch hacked)",
    "`touch hacked`",
    "two\nlines",
    "é",
    "",
    "*",
    "'",
    '"',
    "\\",
    "a b",
    "!x",
]

# Runs the command on the "node" as srun does: its options dropped, the rank set, signals handed on.
SRUN = """#!/bin/sh
while :; do case $1 in -*) shift ;; *) break ;; esac; done
export SLURM_PROCID=0
exec "$@"
"""

# Saves at the start, and once more when it is told to end.
TRAINER = """
import json, os, pathlib, signal, sys, time
from dispatch_agent import complete, resume_path, save_dir

def save(name):
    (save_dir() / name).write_text(os.environ["DISPATCH_EPOCH"])
    complete(save_dir() / name)

def told(number, frame):
    save("last")
    sys.exit(int(sys.argv[1]))

signal.signal(signal.SIGTERM, told)
before = resume_path()
report = [sys.argv[2:], dict(os.environ), os.getcwd(), before.read_text() if before else None]
save("first")
pathlib.Path("report").write_text(json.dumps(report))
while not pathlib.Path("go").exists():
    time.sleep(0.02)
sys.exit(int(sys.argv[1]))
"""


@dataclass
class Machine:
    """A node: the script, its working directory, and what stands in for Slurm."""

    home: Path
    restarts: int = 0

    def script(self, *, exits: int = 0, **more: Any) -> str:
        job = {
            "name": "train",
            "job_id": JOB_ID,
            "submission": 3,
            "generation": 2,
            "command": [sys.executable, "train.py", str(exits), *TRICKY],
            "workdir": str(self.home),
            "env": {"NOTE": "$(HOME) and 'quotes'"},
            "checkpoints": {"path": str(self.home / "checkpoints")},
            "publish": {"dest": str(self.home / "published"), "rescan": 0.2},
            **more,
        }
        result = invoke(job, "--kind", "sbatch")
        assert result.exception is None, result.exception
        return result.stdout

    @contextmanager
    def running(self, script: str) -> Iterator[subprocess.Popen[bytes]]:
        (self.home / "job.sbatch").write_text(script)
        programs = {str(Path(program(name)).parent) for name in ("publish", "dispatch-agent")}
        slurm = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1", "SLURM_PROCID": "0"}
        if self.restarts:
            slurm["SLURM_RESTART_COUNT"] = str(self.restarts)
        with (self.home / "log").open("wb") as out:
            process = subprocess.Popen(
                ["bash", "job.sbatch"],
                cwd=self.home,
                env={
                    **os.environ,
                    **slurm,
                    "PATH": os.pathsep.join([str(self.home / "bin"), *programs, os.environ["PATH"]]),
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def trains(self) -> Any:
        """What the trainer found, once it runs."""
        report = self.home / "report"
        eventually(lambda: report.exists() and report.read_text().endswith("]"), (self.home / "log").read_text)
        return json.loads(report.read_text())

    def let_go(self, process: subprocess.Popen[bytes]) -> int:
        (self.home / "go").touch()
        return self.ends(process)

    def ends(self, process: subprocess.Popen[bytes]) -> int:
        """Its exit code, once it and all that it started are gone."""
        code = process.wait(PATIENCE)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
        return code

    def again(self) -> Machine:
        """The same machine after a requeue."""
        for name in ("go", "report"):
            (self.home / name).unlink(missing_ok=True)
        return Machine(self.home, self.restarts + 1)

    @property
    def published(self) -> list[str]:
        words = [program("publish"), "list", "--json", "--dest", str(self.home / "published")]
        return [item["save"] for item in json.loads(subprocess.run(words, capture_output=True, check=True).stdout)]

    @property
    def requeued(self) -> str:
        log = self.home / "scontrol"
        return log.read_text() if log.exists() else ""


@pytest.fixture
def machine(place: Path) -> Machine:
    (place / "bin").mkdir()
    (place / "checkpoints").mkdir()
    (place / "train.py").write_text(TRAINER)
    for name, text in (("srun", SRUN), ("scontrol", f'#!/bin/sh\necho "$@" >>{place}/scontrol\n')):
        (place / "bin" / name).write_text(text)
        (place / "bin" / name).chmod(0o755)
    return Machine(place)


def test_a_run_gives_the_trainer_its_identity_and_publishes_its_saves(machine: Machine) -> None:
    with machine.running(machine.script()) as process:
        words, environ, folder, before = machine.trains()
        assert words == TRICKY
        assert folder == str(machine.home)
        assert environ["NOTE"] == "$(HOME) and 'quotes'"
        assert environ["DISPATCH_JOB_ID"] == JOB_ID
        assert environ["DISPATCH_EPOCH"] == "2000003000000"
        assert environ["DISPATCH_ATTEMPT"] == "3.17.0"
        assert before is None
        assert machine.let_go(process) == 0
    assert machine.published == ["first"]
    assert not (machine.home / "hacked").exists()
    assert machine.requeued == ""


def test_a_requeue_goes_on_from_what_was_published(machine: Machine) -> None:
    with machine.running(machine.script()) as process:
        machine.trains()
        machine.let_go(process)
    machine = machine.again()
    with machine.running(machine.script()) as process:
        _, environ, _, before = machine.trains()
        assert environ["DISPATCH_EPOCH"] == "2000003000001"
        assert environ["DISPATCH_ATTEMPT"] == "3.17.1"
        assert before == "2000003000000"
        assert machine.let_go(process) == 0


@pytest.mark.parametrize("exits", [0, 7], ids=["it ends well", "it ends with 7"])
def test_near_the_time_limit_the_trainer_saves_and_the_job_is_requeued(machine: Machine, exits: int) -> None:
    """Whatever the trainer exits with, it is not done: it was told to end."""
    with machine.running(machine.script(exits=exits)) as process:
        machine.trains()
        process.send_signal(signal.SIGUSR1)
        assert machine.ends(process) == exits
    assert machine.published == ["first", "last"]
    assert machine.requeued == "requeue 17\n"


def test_who_ends_the_job_ends_it(machine: Machine) -> None:
    with machine.running(machine.script()) as process:
        machine.trains()
        process.send_signal(signal.SIGTERM)
        assert machine.ends(process) == 0
    assert machine.published == ["first", "last"]
    assert machine.requeued == ""


def test_the_trainers_own_failure_is_the_jobs(machine: Machine) -> None:
    with machine.running(machine.script(exits=7)) as process:
        machine.trains()
        assert machine.let_go(process) == 7
    assert machine.published == ["first"]
    assert machine.requeued == ""


def test_a_trainer_never_starts_where_init_fails(machine: Machine) -> None:
    dest = str(machine.home / "train.py" / "no-folder")
    with machine.running(machine.script(publish={"dest": dest, "start_timeout": 0})) as process:
        assert machine.ends(process) not in {0, 127}
    assert not (machine.home / "report").exists()


def test_a_missing_working_folder_ends_the_job_before_the_trainer(machine: Machine) -> None:
    with machine.running(machine.script(workdir=str(machine.home / "nowhere"))) as process:
        assert machine.ends(process) != 0
    assert not (machine.home / "report").exists()


def test_options_of_sbatch_stand_before_every_command(machine: Machine) -> None:
    lines = machine.script(nodes=4, grace=120, sbatch={"time": "04:00:00", "exclusive": True, "gpus": 8}).splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[:last])
    assert [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")] == [
        "--job-name=train",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--time=04:00:00",
        "--exclusive",
        "--gpus=8",
        "--requeue",
        "--open-mode=append",
        "--signal=B:USR1@120",
    ]


def test_of_several_nodes_the_volume_is_said_to_be_shared(machine: Machine) -> None:
    """Slurm shows the publisher how many there are, and it would refuse to guess."""
    assert "export PUBLISH_SHARED_VOLUME=1" in machine.script(nodes=2)
    assert "PUBLISH_SHARED_VOLUME" not in machine.script(nodes=1)


@pytest.mark.parametrize("more", [{}, {"workdir": "/a b"}, {"nodes": 2, "allow_rank_restart": True, "env": {"A": "'"}}])
def test_shellcheck_has_nothing_against_it(machine: Machine, more: dict[str, Any]) -> None:
    checker = shutil.which("shellcheck")
    assert checker, "shellcheck is not installed"
    done = subprocess.run(
        [checker, "-s", "bash", "-"], input=machine.script(**more), capture_output=True, text=True, check=False
    )
    assert done.stdout == ""
    # It is seen to look: an unquoted variable is found.
    spoilt = machine.script(**more).replace('requeue "$SLURM_JOB_ID"', "requeue $SLURM_JOB_ID")
    done = subprocess.run([checker, "-s", "bash", "-"], input=spoilt, capture_output=True, text=True, check=False)
    assert done.returncode == 1
