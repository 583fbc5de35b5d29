"""The pod of images/compose.yaml, run as its comment says: an example that no longer works teaches what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any
from uuid import uuid4

import pytest
from tests.containers.engine import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]


def test_two_executions_of_the_example_publish_and_the_second_goes_on_from_the_first(
    docker_services: object,  # noqa: ARG001 (it builds the images)
) -> None:
    """The install, the entry agent in a foreign image, init, the sidecar's end: by the README's names."""
    project = f"dispatch-agent-test-{uuid4().hex[:12]}"

    def compose(*words: str, **environ: str) -> str:
        command = ["docker", "compose", "--file", str(ROOT / "images" / "compose.yaml"), "--project-name", project]
        answer = subprocess.run(
            [*command, *words], capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **environ}
        )
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    def execution(number: int) -> tuple[list[dict[str, Any]], str]:
        """What is published after it, and what its trainer said."""
        listed = compose("run", "--rm", "-T", "pod-published", "publish", "list", "--json", RESTART=str(number))
        said = compose("--profile", "pod", "logs", "--no-log-prefix", "pod-trainer", RESTART=str(number))
        return json.loads(listed), said

    try:
        published, said = execution(1)
        assert "execution demo.1.a.0.1 goes on after step 0" in said
        assert [(save["epoch"], save["save"]) for save in published] == [("1000001", f"step-{n}") for n in (1, 2, 3)]
        published, said = execution(2)
        assert "execution demo.1.a.0.2 goes on after step 3" in said
        assert [save["save"] for save in published if save["epoch"] == "1000002"] == ["step-4", "step-5", "step-6"]
        assert len(published) == 6
    finally:
        compose("--profile", "pod", "down", "--volumes", "--timeout", "2")
