"""The entry agent baked into a training image: the user's command is the first process and finds nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.containers.engine import Run

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]

IMAGE = "dispatch-agent-training:local"
COUNTERS = {
    "DISPATCH_K8S_ADMISSION": "0",
    "DISPATCH_K8S_RESTART": "1",
    "DISPATCH_K8S_EPOCH_PREFIX": "1",
    "DISPATCH_K8S_TOKEN_PREFIX": "job.1.a",
}


def test_the_command_is_the_first_process_and_has_its_identity(run: Run) -> None:
    """Exec, not a supervisor: signals of the cluster reach the trainer itself."""
    program = "import os; print(os.getpid(), os.environ['DISPATCH_EPOCH'], os.environ['DISPATCH_ATTEMPT'])"
    ended = run(IMAGE, "python3", "-c", program, environ=COUNTERS)
    assert (ended.code, ended.out, ended.err) == (0, "1 1000001 job.1.a.0.1\n", "")


def test_the_trainers_python_sees_nothing_of_the_agent(run: Run) -> None:
    """Its packages, its search path and its variables are those of the image without the agent."""
    program = (
        "import importlib.util, os, shutil, sys;"
        "print([name for name in ('dispatch_agent', 'click') if importlib.util.find_spec(name)],"
        " [path for path in sys.path if 'dispatch' in path],"
        " sorted(name for name, value in os.environ.items() if 'dispatch' in value or name.startswith('DISPATCH')),"
        " shutil.which('dispatch-agent'))"
    )
    ended = run(IMAGE, "python3", "-c", program, environ=COUNTERS)
    assert (ended.code, ended.out) == (0, "[] [] ['DISPATCH_ATTEMPT', 'DISPATCH_EPOCH'] None\n")


def test_a_hostile_pythonpath_reaches_the_trainer_and_not_the_agent(run: Run, tmp_path: Any) -> None:
    """The user's own modules may have any name, and may even be broken."""
    for name in ("sitecustomize", "posix", "os", "dispatch_agent"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the agent imported the module of a user')")
    tmp_path.chmod(0o755)
    options = (f"--volume={tmp_path}:/hostile:ro",)
    ended = run(IMAGE, "printenv", "PYTHONPATH", environ={**COUNTERS, "PYTHONPATH": "/hostile"}, options=options)
    assert (ended.code, ended.out, ended.err) == (0, "/hostile\n", "")


@pytest.mark.parametrize(("command", "environ", "code"), [("true", {}, 125), ("no-such", COUNTERS, 127)])
def test_a_refusal_is_the_containers_exit_code(run: Run, command: str, environ: dict[str, str], code: int) -> None:
    """With one line that says why; the trainer never starts under a doubtful identity."""
    ended = run(IMAGE, command, environ=environ)
    assert ended.code == code
    assert ended.err.startswith("dispatch: ")
    assert ended.err.count("\n") == 1


def test_a_locked_down_container_starts_its_command(run: Run) -> None:
    """Nothing has to be written, no user has to exist, no capability is needed."""
    options = ("--read-only", "--user=12345:12345", "--cap-drop=ALL", "--security-opt=no-new-privileges")
    ended = run(IMAGE, "sh", "-c", "exit 41", environ=COUNTERS, options=options)
    assert ended.code == 41
