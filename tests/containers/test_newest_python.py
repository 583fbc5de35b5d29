"""The fast tests, on the newest Python that Debian has and as an ordinary user, beside those on this machine's."""

from __future__ import annotations

from uuid import uuid4

import pytest
from tests.containers.engine import ROOT, docker

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(1200)]

FAST = (
    "prologue/test_python_entry.py",
    "prologue/test_vectors.py",
    "unit",
    "checkpoint",
    "protocol",
    "store",
    "test_cold_entry.py",
)
# What takes minutes is left to the tests outside: servers, kills, races, the matrix of faults. The shells do not depend
# on Python.
CHOICE = (
    "-m",
    "not server and not docker",
    "-k",
    "not kill and not race and not test_faults and (not test_vectors or python)",
)


def test_the_fast_tests_pass_on_the_newest_python(docker_services: object) -> None:  # noqa: ARG001 (without an engine it says how to get one)
    """Released versions promise little about the next one; this is where we hear of it."""
    name = f"dispatch-agent-test-{uuid4().hex[:12]}"
    compose = (
        "compose",
        "--file",
        str(ROOT / "images" / "compose.yaml"),
        "run",
        "--build",
        "--rm",
        "-T",
        "--name",
        name,
        "newest",
    )
    folders = [f"tests/{folder}" for folder in FAST if (ROOT / "tests" / folder).exists()]
    try:
        answer = docker(*compose, *CHOICE, *folders, check=False, timeout=1000)
    finally:
        docker("rm", "--force", "--volumes", name, check=False)
    assert answer.returncode == 0, answer.stdout[-20000:]
    assert " passed" in answer.stdout
