"""The images of this repository, built by compose, and containers of them.

Nothing here is skipped without an engine: a test fails with the way to get one.
"""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from tests.containers.engine import LOCKED, PUBLISHER, ROOT, Ended, Run, docker, volume


@pytest.fixture(scope="session")
def docker_compose_file() -> str:
    return str(ROOT / "images" / "compose.yaml")


@pytest.fixture(scope="session")
def docker_setup() -> list[str]:
    """Only built: each test starts the containers that it needs."""
    if docker("version", check=False).returncode != 0:
        pytest.fail(
            "no container engine answers: install and start docker with its compose plugin "
            "(Debian: apt-get install docker.io docker-compose), or leave these tests out with -m 'not docker'",
            pytrace=False,
        )
    return ["build --quiet"]


@pytest.fixture(scope="session", autouse=True)
def built(docker_services: object) -> None:
    """The images of the tree as it is, also for a test that asks for nothing else."""


@pytest.fixture
def run() -> Iterator[Run]:
    """Run a container of an image to its end; it is removed, also when the test fails."""
    names = []

    def run(
        image: str,
        *command: str,
        options: tuple[str, ...] = (),
        environ: dict[str, str] | None = None,
        network: str = "none",
    ) -> Ended:
        name = f"dispatch-agent-test-{uuid4().hex[:12]}"
        names.append(name)
        variables = [f"--env={key}={value}" for key, value in (environ or {}).items()]
        # `docker run` has exit codes of its own, among them 125.
        docker("create", "--name", name, f"--network={network}", *variables, *options, image, *command)
        started = docker("start", "--attach", name, check=False)
        code = docker("inspect", "--format={{.State.ExitCode}}", name).stdout
        return Ended(int(code), started.stdout, started.stderr)

    yield run
    for name in names:
        docker("rm", "--force", "--volumes", name, check=False)


@pytest.fixture(scope="session")
def agent(built: None) -> Iterator[str]:  # noqa: ARG001 (it runs in one of them)
    """The name of a volume that an init container put the agent into, as locked down as a cluster can make it."""
    with volume() as name:
        docker("run", "--rm", "--network=none", *LOCKED, f"--volume={name}:/v", PUBLISHER, "install", "/v")
        yield name
