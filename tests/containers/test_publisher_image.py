"""The publisher image, as a cluster runs it: PID 1, no root, nothing writable, and exit codes that arrive."""

from __future__ import annotations

import io
import json
import re
import ssl
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import trustme
from tests.containers.engine import LOCKED, PUBLISHER, Run, docker
from tests.servers import Bucket
from tests.servers.s3 import seaweed, shared_bucket
from tests.store.front import front

__all__ = ["seaweed", "shared_bucket"]

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]

IMAGE = PUBLISHER
PYTHON = "/opt/dispatch-agent/bin/python"
IDENTITY = {"DISPATCH_EPOCH": "1000001", "DISPATCH_ATTEMPT": "1.17.1"}
WATCH = ("publish", "watch")
WHO = "import os; print(os.getpid(), os.getuid())"


def test_the_image_runs_as_a_numeric_user_that_is_not_root(run: Run) -> None:
    """A cluster with runAsNonRoot looks at the image before it starts anything."""
    assert _config()["User"] == "65532:65532"
    ended = run(IMAGE, "exec", "--", PYTHON, "-c", WHO, environ=IDENTITY)
    assert (ended.code, ended.out) == (0, "1 65532\n")


def test_the_image_runs_with_a_read_only_root_and_any_user(run: Run) -> None:
    """Also without a single capability, and with a user that no file of the image names."""
    ended = run(IMAGE, "exec", "--", PYTHON, "-c", WHO, environ=IDENTITY, options=LOCKED)
    assert (ended.code, ended.out) == (0, "1 12345\n")


def test_a_locked_down_container_publishes_and_lists(run: Run, tmp_path: Path) -> None:
    """The whole way from a save to a published one, where only the two volumes can be written."""
    save = tmp_path / "root" / "exec" / IDENTITY["DISPATCH_ATTEMPT"] / "step-1"
    save.mkdir(parents=True)
    (save / "weights.bin").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "store").mkdir()
    subprocess.run(["chmod", "-R", "a+rwX", tmp_path], check=True)
    for parent in tmp_path.parents:  # the container's user must get there; pytest makes them private
        if parent.name.startswith("pytest-") or parent.name.startswith("popen-"):
            parent.chmod(0o755)
    volumes = (f"--volume={tmp_path}/root:/root-of-saves", f"--volume={tmp_path}/store:/store")
    settings = {**IDENTITY, "PUBLISH_ROOT": "/root-of-saves", "PUBLISH_DEST": "/store"}
    path = f"/root-of-saves/exec/{IDENTITY['DISPATCH_ATTEMPT']}/step-1"
    options = (*LOCKED, *volumes)
    completed = run(IMAGE, "publish", "complete", path, environ=settings, options=options)
    assert completed.code == 0, completed.err
    published = run(IMAGE, "publish", "publish", path, environ=settings, options=options)
    assert published.code == 0, published.err
    latest = run(IMAGE, "publish", "latest", "--json", environ=settings, options=options)
    assert latest.code == 0, latest.err
    assert json.loads(latest.out)["save"] == "step-1"


@pytest.mark.parametrize(
    ("command", "environ", "code"),
    [
        (("publish", "watch", "--no-such-option"), IDENTITY, 2),
        (("publish", "watch"), {**IDENTITY, "PUBLISH_ROOT": "/tmp"}, 3),  # no destination
        (("exec", "--", PYTHON), {}, 125),
        (("exec", "--", "/etc/passwd"), IDENTITY, 126),
        (("exec", "--", "no-such-program"), IDENTITY, 127),
        (("exec", "--", PYTHON, "-c", "raise SystemExit(42)"), IDENTITY, 42),
    ],
)
def test_an_exit_code_arrives(run: Run, command: tuple[str, ...], environ: dict[str, str], code: int) -> None:
    """What the cluster sees is the code that the manual names; with the reason, and never with a traceback."""
    ended = run(IMAGE, *command, environ=environ, options=LOCKED)
    assert ended.code == code, ended.err
    assert code == 42 or ended.err
    assert "Traceback" not in ended.err


def test_watch_as_the_first_process_ends_on_sigterm(run: Run, docker_services: object) -> None:  # noqa: ARG001
    """A first process without a handler ignores SIGTERM, and its pod hangs until it is killed."""
    name = f"dispatch-agent-test-{uuid4().hex[:12]}"
    tmpfs = ("--tmpfs=/saves:mode=1777", "--tmpfs=/store:mode=1777")
    environ = [f"--env={key}={value}" for key, value in IDENTITY.items()]
    arguments = ("publish", "watch", "--root", "/saves", "--dest", "/store")
    docker("run", "--detach", "--name", name, "--network=none", *LOCKED, *tmpfs, *environ, IMAGE, *arguments)
    try:
        time.sleep(2)
        assert docker("inspect", "--format={{.State.Running}}", name).stdout == "true\n", docker("logs", name).stderr
        docker("stop", "--time=20", name)
        assert docker("inspect", "--format={{.State.ExitCode}}", name).stdout == "0\n", docker("logs", name).stderr
    finally:
        docker("rm", "--force", "--volumes", name, check=False)


def test_the_image_is_small_and_holds_neither_shell_nor_installer(files: set[str]) -> None:
    """What is not there has no flaws to patch, and is nothing for an intruder to go on with."""
    assert int(docker("image", "inspect", "--format={{.Size}}", IMAGE).stdout) < 72_000_000
    assert {path.split("/")[0] for path in files} - {"dev", "proc", "sys", ".dockerenv"} == {"etc", "opt", "tmp", "usr"}
    assert {path for path in files if path.startswith("usr/")} == {
        *("usr/", "usr/local/", "usr/local/bin/", "usr/local/bin/dispatch-agent", "usr/local/bin/publish"),
    }
    names = {Path(path).name for path in files}
    assert not names & {"sh", "bash", "dash", "busybox", "apt", "dpkg", "pip", "setuptools", "ensurepip", "wheel"}


def test_no_shell_starts() -> None:
    ended = docker("run", "--rm", "--network=none", "--entrypoint=sh", IMAGE, "-c", "true", check=False)
    assert ended.returncode == 127
    assert "not found" in ended.stderr


def test_every_library_comes_with_its_licence(files: set[str]) -> None:
    """Glibc's, OpenSSL's and the others' ask for it; Python's and the packages' lie beside them."""
    documents = {path.split("/")[-2] for path in files if path.endswith("/copyright")}
    assert {"libc6", "libssl3", "libgcc-s1", "zlib1g", "musl", "ca-certificates"} <= documents
    assert [path for path in files if path.endswith("/LICENSE.txt") and "site-packages" not in path]
    packages = {path.split("/")[-2] for path in files if path.endswith(".dist-info/METADATA")}
    licensed = {
        next(part for part in path.split("/") if part.endswith(".dist-info"))
        for path in files
        if ".dist-info/" in path and re.search(r"licen[sc]e|copying|notice", path, re.IGNORECASE)
    }
    assert packages == licensed


@pytest.fixture(scope="module")
def files(docker_services: object) -> set[str]:  # noqa: ARG001 (it builds the image)
    """The path of everything in the image."""
    name = docker("create", IMAGE).stdout.strip()
    try:
        exported = subprocess.run(["docker", "export", name], capture_output=True, check=True).stdout
    finally:
        docker("rm", "--force", name)
    with tarfile.open(fileobj=io.BytesIO(exported)) as archive:
        return {member.name + ("/" if member.isdir() else "") for member in archive}


# --- Its surroundings -------------------------------------------------------------------------------------------------


def test_kubernetes_may_name_either_program_as_its_command() -> None:
    """`command:` of a container replaces the entry point, and is looked for on the image's PATH."""
    ended = docker("run", "--rm", "--network=none", "--entrypoint=publish", IMAGE, "watch", "--help")
    assert ended.stdout.startswith("Usage: publish watch ")


def test_a_health_check_of_the_image_sees_a_watch_that_lives(run: Run) -> None:
    check = _config()["Healthcheck"]["Test"]
    assert check == ["CMD", "dispatch-agent", "health", "live"]
    # Where no watch listens there is nothing to be ill.
    assert run(IMAGE, *check[2:], options=LOCKED).code == 0
    away = run(IMAGE, *check[2:], environ={"PUBLISH_LISTEN": "127.0.0.1:9464"}, options=LOCKED)
    assert away.code == 1
    assert "no watch answers" in away.out

    name = f"dispatch-agent-test-{uuid4().hex[:12]}"
    settings = {**IDENTITY, "PUBLISH_ROOT": "/saves", "PUBLISH_DEST": "/store", "PUBLISH_LISTEN": "127.0.0.1:9464"}
    environ = [f"--env={key}={value}" for key, value in settings.items()]
    tmpfs = ("--tmpfs=/saves:mode=1777", "--tmpfs=/store:mode=1777")
    often = ("--health-interval=1s", "--health-retries=20")
    docker("run", "--detach", "--name", name, "--network=none", *LOCKED, *tmpfs, *environ, *often, IMAGE, *WATCH)
    try:
        for _ in range(100):
            seen = docker("inspect", "--format={{.State.Health.Status}}", name).stdout.strip()
            if seen != "starting":
                break
            time.sleep(0.2)
        assert seen == "healthy", docker("inspect", "--format={{json .State}}", name).stdout
    finally:
        docker("rm", "--force", "--volumes", name, check=False)


def test_names_of_a_private_network_are_found(run: Run) -> None:
    """A store is named, in a cluster by its DNS; the C library's resolver must have come along."""
    network = f"dispatch-agent-test-{uuid4().hex[:12]}"
    docker("network", "create", network)
    store = docker(
        "run", "--detach", f"--network={network}", "--network-alias=store", "busybox:latest", "sleep", "600"
    ).stdout.strip()
    try:
        address = docker("inspect", "--format={{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", store).stdout
        program = "import socket; print(socket.gethostbyname('store'), socket.gethostbyname('localhost'))"
        ended = run(IMAGE, "exec", "--", PYTHON, "-c", program, environ=IDENTITY, options=LOCKED, network=network)
        assert ended.out == f"{address.strip()} 127.0.0.1\n", ended.err
    finally:
        docker("rm", "--force", store, check=False)
        docker("network", "rm", network, check=False)


def test_a_store_behind_tls_is_believed_by_its_authority_alone(run: Run, shared_bucket: Bucket, tmp_path: Path) -> None:
    """Unknown: refused with the variable that names one. Named: the store is spoken to."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tmp_path.chmod(0o755)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    options = (*LOCKED, f"--volume={tmp_path}/ca.pem:/ca.pem:ro")
    probe = ("publish", "probe", f"{shared_bucket.url}/tls")
    with front(shared_bucket.endpoint, lambda request, forward: forward(request), context) as endpoint:
        settings = {**IDENTITY, **shared_bucket.environment, "AWS_ENDPOINT_URL": endpoint, "AWS_MAX_ATTEMPTS": "1"}
        unknown = run(IMAGE, *probe, environ=settings, options=options, network="host")
        assert unknown.code == 10
        assert "AWS_CA_BUNDLE" in unknown.err
        known = run(IMAGE, *probe, environ={**settings, "AWS_CA_BUNDLE": "/ca.pem"}, options=options, network="host")
        assert known.code == 0, known.err


def _config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads(docker("image", "inspect", "--format={{json .Config}}", IMAGE).stdout)
    return config
