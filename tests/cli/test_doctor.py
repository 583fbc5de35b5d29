"""What a container is found to be: with real processes, real shells, and a real first process of a namespace."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import NOBODY, PATIENCE, Result, program, run

from dispatch_agent.cluster import examination, process
from dispatch_agent.support import CAPABILITIES, Support

HANDLER = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None); print('up', flush=True); time.sleep(60)"
NO_HANDLER = "import time; print('up', flush=True); time.sleep(60)"
IGNORES = HANDLER.replace("lambda *_: None", "signal.SIG_IGN")
BLOCKS = HANDLER.replace("signal.signal(signal.SIGTERM, lambda *_: None)", "signal.pthread_sigmask(0, [15])")
COUNTERS = {
    "DISPATCH_JOB_ID": "01JCXE8Q5W3V9T2N7M4K6H1G0P",
    "DISPATCH_SUBMISSION": "1",
    "DISPATCH_K8S_ADMISSION": "1",
    "DISPATCH_K8S_RESTART": "2",
    "DISPATCH_K8S_EPOCH_PREFIX": "1",
    "DISPATCH_K8S_TOKEN_PREFIX": "job.1.1",
}


def python(text: str) -> list[str]:
    return [sys.executable, "-I", "-c", text]


def quoted(text: str) -> str:
    return f'{sys.executable} -I -c "{text}"'


def doctor(*arguments: str | Path, **environ: str) -> Result:
    clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return run("dispatch-agent", "doctor", *arguments, environ={**clean, **environ})


def answers(*arguments: str | Path, **environ: str) -> dict[str, Support]:
    found = json.loads(doctor("--json", *arguments, **environ).out)["capabilities"]
    return {name: Support(**support) for name, support in found.items()}


def hears(*arguments: str) -> Support:
    return answers(*arguments)["PreTerminationSignal"]


@contextmanager
def first(*words: str) -> Iterator[int]:
    """The command as the first process of a PID namespace: its number from outside. It has said `up`."""
    with running("unshare", "-pf", "--mount-proc", "--kill-child", *words) as outside:
        inner = Path(f"/proc/{outside}/task/{outside}/children").read_text().split()
        yield int(inner[0])


@contextmanager
def running(*words: str) -> Iterator[int]:
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as started:
        try:
            assert started.stdout
            assert started.stdout.readline() == b"up\n"
            yield started.pid
        finally:
            os.killpg(started.pid, signal.SIGKILL)


@pytest.mark.root
class TestTheFirstProcess:
    """PID 1 is real: the kernel drops what it has no handler for."""

    def test_with_a_handler_hears(self) -> None:
        with first(*python(HANDLER)) as pid:
            found = hears("--pid", str(pid))
        assert (found.value, found.source) == ("yes", "probed")

    def test_a_python_without_handler_does_not(self) -> None:
        with first(*python(NO_HANDLER)) as pid:
            found = hears("--pid", str(pid))
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.1)
            assert Path(f"/proc/{pid}/status").exists(), "what is said of it is true"
        assert found.value == "no"
        assert "as the first process of its container it never gets it" in found.reason

    def test_that_ignores_or_blocks_it(self) -> None:
        with first(*python(IGNORES)) as pid:
            found = hears("--pid", str(pid))
        assert (found.value, "ignores SIGTERM" in found.reason) == ("no", True)
        with first(*python(BLOCKS)) as pid:
            assert hears("--pid", str(pid)).value == "unknown"

    @pytest.mark.parametrize("shell", ["dash", "bash", "busybox sh", "zsh"])
    def test_a_shell_before_a_pipeline_swallows_it(self, shell: str) -> None:
        with first(*shell.split(), "-c", f"{quoted(HANDLER)} | cat") as pid:
            found = hears("--pid", str(pid))
        assert found.value == "no"
        assert "ignores SIGTERM" in found.reason
        assert "a pipeline cannot be replaced" in found.reason

    @pytest.mark.parametrize("shell", ["dash", "bash", "busybox sh", "mksh", "zsh", "yash"])
    def test_a_shell_that_execs_is_gone(self, shell: str) -> None:
        with first(*shell.split(), "-c", f"true; exec {quoted(HANDLER)}") as pid:
            assert hears("--pid", str(pid)).value == "yes"

    @pytest.mark.parametrize(("shell", "stays"), [("dash", True), ("bash", False), ("busybox sh", False)])
    def test_which_shells_become_their_last_command_by_themselves(self, shell: str, stays: bool) -> None:
        with first(*shell.split(), "-c", f"true; {quoted(HANDLER)}") as pid:
            found = hears("--pid", str(pid))
        assert found.value == ("no" if stays else "yes")
        assert ("begin the last command with exec" in found.reason) is stays

    def test_a_shell_with_a_trap_is_not_known_to_pass_it_on(self) -> None:
        with first("bash", "-c", f"trap 'true' TERM; {quoted(HANDLER)} & wait") as pid:
            found = hears("--pid", str(pid))
        assert found.value == "unknown"
        assert "unless its trap does" in found.reason

    @pytest.mark.parametrize(("caught", "value"), [(True, "yes"), (False, "no")])
    def test_an_init_passes_it_on(self, caught: bool, value: str) -> None:
        child = process.Process(9, 2, ("python",), caught, ignored=False, blocked=False)
        init = process.Process(8, 1, ("/sbin/tini", "--", "python"), caught=False, ignored=False, blocked=True)
        found = process.hears(replace(init, children=(child,)))
        assert found.value == value
        assert "tini passes SIGTERM on" in found.reason

    def test_that_is_the_doctor_itself_is_not_judged(self) -> None:
        words = ["unshare", "-pf", "--mount-proc", program("dispatch-agent"), "doctor", "--json"]
        found = json.loads(subprocess.run(words, capture_output=True, check=False, timeout=PATIENCE).stdout)
        answer = found["capabilities"]["PreTerminationSignal"]
        assert answer["value"] == "unknown"
        assert "is this command itself" in answer["reason"]

    def test_that_only_starts_the_doctor_is_not_taken_for_a_wrapper_of_a_job(self) -> None:
        words = ["unshare", "-pf", "--mount-proc", "bash", "-c", f"{program('dispatch-agent')} doctor --json; true"]
        found = json.loads(subprocess.run(words, capture_output=True, check=False, timeout=PATIENCE).stdout)
        assert "behind it" not in found["capabilities"]["PreTerminationSignal"]["reason"]


class TestAnyProcess:
    def test_that_is_not_there(self) -> None:
        doctor("--pid", "4194305").fails(3, "no process 4194305", "--pid")

    def test_without_a_handler_ends_without_a_last_save(self) -> None:
        with running(*python(NO_HANDLER)) as pid:
            assert "without a last save" in hears("--pid", str(pid)).reason

    def test_that_writes_to_a_file_has_an_output_path(self, tmp_path: Path) -> None:
        with (tmp_path / "log").open("wb") as out, subprocess.Popen(["sleep", "60"], stdout=out) as started:
            found = answers("--pid", str(started.pid))["OutputPath"]
            started.kill()
        assert (found.value, found.reason) == ("yes", f"process {started.pid} writes to {tmp_path / 'log'}")


class TestACommandBeforeItRuns:
    @pytest.mark.parametrize(
        ("words", "value", "reason"),
        [
            (["sh", "-c", "python train.py | tee log"], "no", "a pipeline"),
            (["bash", "-c", "set -o pipefail; python train.py 2>&1 | tee log"], "no", "a pipeline"),
            (["bash", "-euo", "pipefail", "-c", "python train.py|tee log"], "no", "a pipeline"),
            (["bash", "-lc", "a && b |& tee log"], "no", "a pipeline"),
            (["busybox", "sh", "-c", "a | b"], "no", "a pipeline"),
            (["dash", "-c", "cd /work; python train.py"], "no", "without exec"),
            (["dash", "-c", "python train.py"], "no", "without exec"),
            (["bash", "-c", "cd /work && python train.py"], "unknown", "without exec"),
            (["sh", "-c", "a | b; exec python train.py"], "unknown", "becomes python"),
            (["sh", "-c", "cd /work\nA=1 exec python train.py\n"], "unknown", "becomes python"),
            (["bash", "-c", "exec python train.py > >(tee log)"], "unknown", "becomes python"),
            (["sh", "-c", "python -c 'print(1 | 2; 3)' x"], "unknown|no", "without exec"),
            (["sh", "-c", "trap 'kill $p' TERM; python train.py & p=$!; wait"], "unknown", "trap"),
            (["sh", "-c", "echo 'open"], "no", "no shell command"),
            (["sh", "-c", " "], "no", "no shell command"),
            (["bash", "run.sh"], "unknown", "last line must begin with exec"),
            (["bash"], "unknown", "last line must begin with exec"),
            (["python", "train.py", "|", "tee"], "unknown", "no shell"),
            (["busybox"], "unknown", "no shell"),
        ],
    )
    def test_is_judged_by_its_words(self, words: list[str], value: str, reason: str) -> None:
        program = os.path.realpath(shutil.which(words[0]) or words[0])
        found = process.judge(words, program)
        assert re.fullmatch(value, found.value), found
        assert reason in found.reason
        assert found.source == "declared"

    def test_is_not_run(self, tmp_path: Path) -> None:
        doctor("--", "touch", str(tmp_path / "ran"))
        assert not (tmp_path / "ran").exists()


class TestACommandThatIsTried:
    def test_with_a_handler_is_seen_as_soon_as_it_is_there(self) -> None:
        assert hears("--try", "30", "--", *python(HANDLER)).value == "yes"

    def test_without_one_is_looked_at_to_the_end(self) -> None:
        found = hears("--try", "0.5", "--", *python(NO_HANDLER))
        assert found.value == "no"
        assert "as the first process of its container it never gets it" in found.reason

    def test_is_gone_afterwards_with_all_that_it_started(self, tmp_path: Path) -> None:
        mark = tmp_path / "pids"
        assert hears("--try", "0.5", "--", "dash", "-c", f"sleep 61 & echo $! > {mark}; sleep 62 | cat").value == "no"
        assert not Path(f"/proc/{mark.read_text().strip()}/cwd").exists()

    def test_that_ends_by_itself_says_how(self) -> None:
        assert "ended by itself with 3" in hears("--try", "5", "--", "sh", "-c", "sleep 0.2; exit 3").reason

    def test_that_is_none(self) -> None:
        doctor("--try", "1", "--", "/no/such/program").fails(3, "/no/such/program")
        doctor("--try", "1").fails(2, "give it after --")


class TestTheIdentity:
    def test_of_counters_is_there(self) -> None:
        found = answers(**COUNTERS)["AttemptInjection"]
        assert (found.value, found.source) == ("yes", "probed")
        assert found.reason == "kubeflow: epoch 1000003, attempt job.1.1.1.2"

    def test_that_is_refused_is_said_in_the_prologues_words(self) -> None:
        result = doctor("--json", **{**COUNTERS, "DISPATCH_K8S_ADMISSION": ""})
        assert result.code == 125
        assert "admission or restart count missing" in result.json["capabilities"]["AttemptInjection"]["reason"]

    def test_without_the_other_two_variables_is_not_whole(self) -> None:
        found = answers(DISPATCH_EPOCH="1000001", DISPATCH_ATTEMPT="a")["AttemptInjection"]
        assert (found.value, ": DISPATCH_JOB_ID, DISPATCH_SUBMISSION" in found.reason) == ("no", True)

    def test_is_unknown_outside_a_job_and_missing_in_one(self) -> None:
        assert answers()["AttemptInjection"].value == "unknown"
        assert answers(JOB_COMPLETION_INDEX="0")["AttemptInjection"].value == "no"

    def test_that_is_weakened_says_so(self) -> None:
        assert "identity weakened" in answers(**COUNTERS, AGENT_K8S_JOB_RESTART="1")["AttemptInjection"].reason


class TestTheRest:
    def test_all_fourteen_are_answered_in_order(self) -> None:
        found = answers()
        assert tuple(found) == CAPABILITIES
        assert all(support.reason for support in found.values())

    def test_a_working_directory_that_is_there(self, tmp_path: Path) -> None:
        assert answers(DISPATCH_K8S_WORKDIR=str(tmp_path))["WorkingDirectory"].value == "yes"

    @pytest.mark.parametrize("kind", ["missing", "file"])
    def test_a_working_directory_that_is_none(self, tmp_path: Path, kind: str) -> None:
        (tmp_path / "file").touch()
        found = answers(DISPATCH_K8S_WORKDIR=str(tmp_path / kind))["WorkingDirectory"]
        assert (found.value, "the prologue exits 125" in found.reason) == ("no", True)

    @pytest.mark.parametrize(("shell", "fit"), [("dash", True), ("bash", True), ("/no/sh", False), ("true", False)])
    def test_a_shell_that_cannot_run_the_prologue_is_told_from_one_that_can(self, shell: str, fit: bool) -> None:
        from dispatch_agent.cli import conformance

        wrong = examination.shell_is_unfit(conformance.SCRIPT.read_text(), shutil.which(shell) or shell)
        assert (wrong == "") is fit

    @pytest.mark.parametrize(("value", "answer"), [("8", "yes"), ("auto", "unknown"), ("0", "unknown")])
    def test_procs_per_node(self, value: str, answer: str) -> None:
        assert answers(PET_NPROC_PER_NODE=value)["ProcsPerNode"].value == answer

    def test_a_misspelt_variable_and_the_links_of_a_service(self) -> None:
        result = doctor(PUBLISH_ROOTS="/x", DISPATCH_SERVICE_HOST="10.0.0.1")
        assert result.code == 3
        assert "did you mean PUBLISH_ROOT?" in result.out
        assert "enableServiceLinks: false" in result.out

    def test_a_root_that_is_no_folder(self, tmp_path: Path) -> None:
        assert "mount the volume there" in doctor(PUBLISH_ROOT=str(tmp_path / "none")).out

    @pytest.mark.root
    def test_an_execution_folder_of_another_user(self, place: Path) -> None:
        folder = place / "exec" / "job.1.1.1.2"
        folder.mkdir(parents=True)
        for path in (place, place / "exec"):
            path.chmod(0o777)
        environ = {**COUNTERS, "PUBLISH_ROOT": str(place)}
        with _as_user(NOBODY):
            (said,) = [one for one in examination.problems(environ, now=time.time()) if str(place) in one]
        assert said.startswith(f"{folder} cannot be written by user {NOBODY}: it belongs to 0:0, mode 755")

    def test_a_clock_that_was_never_set(self) -> None:
        assert [one for one in examination.problems({}, now=0.0) if "the clock says 1970-01-01" in one]

    @pytest.mark.parametrize(
        ("file", "text", "limit"),
        [
            ("memory.max", "max\n", None),
            ("memory.max", "104857600\n", 100 << 20),
            ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
            ("memory/memory.limit_in_bytes", "104857600\n", 100 << 20),
        ],
    )
    def test_the_memory_limit_of_both_kinds_of_cgroups(
        self, tmp_path: Path, file: str, text: str, limit: int | None
    ) -> None:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
        assert examination.memory_limit(tmp_path) == limit


@contextmanager
def _as_user(user: int) -> Iterator[None]:
    """os.access asks for the real user."""
    os.setresuid(user, user, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
