"""A node that runs pods, an S3 server in a container beside them, and a fresh destination for every test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import docker
import pytest
from docker.types import Mount
from tests.containers.pods.job import Destination, Job
from tests.containers.pods.pod import BUSYBOX, Manifest, Node, Pod, address, get, until
from tests.servers import ACCESS_KEY, SECRET_KEY, fresh_bucket
from tests.servers.processes import program
from tests.servers.s3 import SEAWEED_ENVIRONMENT, seaweed_command, seaweed_folder

PORT = 8333


@pytest.fixture(scope="session")
def node(docker_services: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:  # noqa: ARG001 (images)
    """An engine with a network of its own; whatever was made on it is removed in the end."""
    engine = docker.from_env()
    label = f"dispatch-agent-test-{uuid4().hex[:8]}"
    secrets = {"store": {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}}
    node = Node(engine, label, label, tmp_path_factory.mktemp("node"), secrets)
    try:
        engine.networks.create(label, labels=node.labels)
        yield node
    finally:
        node.remove_all()
        engine.close()


class Server:
    """SeaweedFS in a container: `store` in the pods' network."""

    def __init__(self, node: Node, folder: Path) -> None:
        seaweed_folder(folder)
        command = seaweed_command("/weed", Path("/server"), PORT, "0.0.0.0")  # noqa: S104 (of a private network)
        self._network = node.network
        self.container = node.engine.containers.run(
            BUSYBOX,
            # Ended, it comes back at the same address, unless it is to stay away.
            ["sh", "-c", 'while :; do [ -e /away ] && sleep 0.1 || "$@"; done', "sh", *command],
            name=f"{node.label}-store",
            hostname="store",
            detach=True,
            environment=SEAWEED_ENVIRONMENT,
            labels=node.labels,
            network=node.network,
            mounts=[
                Mount("/weed", str(Path(program("weed")).resolve()), type="bind", read_only=True),
                Mount("/server/s3.json", str(folder / "s3.json"), type="bind", read_only=True),
                Mount("/server/data", node.volume()),
            ],
        )
        self.wait()
        self.bucket = fresh_bucket(self.endpoint)

    @property
    def address(self) -> str:
        return address(self.container, self._network)

    @property
    def endpoint(self) -> str:
        """As this process reaches it."""
        return f"http://{self.address}:{PORT}"

    def wait(self) -> None:
        until(lambda: 0 < get(self.address, PORT, "/")[0] < 500, lambda: "the S3 server answers")

    @contextmanager
    def away(self) -> Iterator[None]:
        """Killed: connections are refused. Started again afterwards, with all that it had stored."""
        assert self.container.exec_run(["sh", "-c", "touch /away; killall -KILL weed"]).exit_code == 0
        try:
            yield
        finally:
            self.container.exec_run(["rm", "/away"])
            self.wait()

    def destination(self) -> Destination:
        """A new one."""
        inside = self.bucket.behind(f"http://{self.container.name}:{PORT}").environment
        not_secret = {name: inside[name] for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_EC2_METADATA_DISABLED")}
        return Destination(f"{self.bucket.url}/jobs/{uuid4().hex[:8]}", not_secret, "store", self.bucket.options)


@pytest.fixture(scope="session")
def server(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return Server(node, tmp_path_factory.mktemp("store"))


@pytest.fixture
def destination(server: Server) -> Iterator[Destination]:
    destination = server.destination()
    yield destination
    destination.store.close()


@pytest.fixture
def job(destination: Destination) -> Job:
    """Its pods' volumes go with them."""
    return Job(destination)


@pytest.fixture
def shared(node: Node, destination: Destination) -> Job:
    """All its pods have one volume."""
    return Job(destination, claim=node.volume())


class Pods:
    """Starts the pods of one test."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._pods: list[Pod] = []

    def __call__(self, manifest: Manifest) -> Pod:
        pod = Pod(self._node, manifest)
        self._pods.append(pod)
        return pod.start()

    def release(self) -> None:
        for pod in self._pods:
            pod.remove()


@pytest.fixture
def pods(node: Node) -> Iterator[Pods]:
    started = Pods(node)
    yield started
    started.release()
