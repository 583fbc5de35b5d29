"""The prologue under every shell, as a container's own test says it: `dispatch-agent prologue test --shell X`."""

from __future__ import annotations

import json

import pytest
from tests.containers.engine import LOCKED, Run

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]

IMAGE = "dispatch-agent-shells:local"
TEST = ("/opt/dispatch/bin/dispatch-agent", "prologue", "test", "--json", "--shell")


@pytest.mark.parametrize(
    ("shell", "fits"),
    [
        *((name, True) for name in ("dash", "bash", "busybox", "mksh", "lksh", "ksh93", "zsh", "posh")),
        ("yash", False),  # it loses bytes of arguments that are not UTF-8
    ],
)
def test_each_shell_is_told_whether_it_may_run_the_prologue(shell: str, fits: bool, run: Run, agent: str) -> None:
    """In an image that has no Python: the installed agent is what asks."""
    options = (*LOCKED, f"--volume={agent}:/opt/dispatch:ro", "--tmpfs=/tmp:exec,mode=1777")
    ended = run(IMAGE, *TEST, shell, options=options)
    assert ended.code == (0 if fits else 1), ended.err
    answer = json.loads(ended.out)
    assert answer["met"] > 200
    assert bool(answer["wrong"]) is not fits


def test_a_place_that_runs_no_programs_is_told_from_a_wrong_shell(run: Run, agent: str) -> None:
    options = (*LOCKED, f"--volume={agent}:/opt/dispatch:ro", "--tmpfs=/tmp:noexec,mode=1777")
    ended = run(IMAGE, *TEST, "dash", options=options)
    assert ended.code == 3
    assert "set TMPDIR to a folder whose programs may be run" in ended.err
