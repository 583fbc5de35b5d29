"""The publisher image, as a cluster runs it: PID 1, no root, nothing writable, and exit codes that arrive."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.containers.engine import Run, docker

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]

IMAGE = "dispatch-agent:local"
IDENTITY = {"DISPATCH_EPOCH": "1000001", "DISPATCH_ATTEMPT": "1.17.1"}
LOCKED = ("--read-only", "--user=12345:12345", "--cap-drop=ALL", "--security-opt=no-new-privileges")
WHO = "import os; print(os.getpid(), os.getuid())"


def test_the_image_runs_as_a_numeric_user_that_is_not_root(run: Run) -> None:
    """A cluster with runAsNonRoot looks at the image before it starts anything."""
    assert _config()["User"] == "65532:65532"
    ended = run(IMAGE, "exec", "--", "python3", "-c", WHO, environ=IDENTITY)
    assert (ended.code, ended.out) == (0, "1 65532\n")


def test_the_image_runs_with_a_read_only_root_and_any_user(run: Run) -> None:
    """Also without a single capability, and with a user that no file of the image names."""
    ended = run(IMAGE, "exec", "--", "python3", "-c", WHO, environ=IDENTITY, options=LOCKED)
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
        (("exec", "--", "python3"), {}, 125),
        (("exec", "--", "/etc/passwd"), IDENTITY, 126),
        (("exec", "--", "no-such-program"), IDENTITY, 127),
        (("exec", "--", "python3", "-c", "raise SystemExit(42)"), IDENTITY, 42),
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


def test_the_image_is_small_and_holds_no_installer(run: Run) -> None:
    """What is not there has no flaws to patch: ours is the environment, beside the base image."""
    program = (
        "import os; print(sum(os.lstat(f'{folder}/{name}').st_size"
        " for folder, _, names in os.walk('/opt/dispatch-agent') for name in names) // 2**20)"
    )
    ended = run(IMAGE, "exec", "--", "python3", "-c", program, environ=IDENTITY)
    assert int(ended.out) < 48
    listed = run(IMAGE, "exec", "--", "/opt/dispatch-agent/bin/python", "-c", "import pip", environ=IDENTITY)
    assert listed.code == 1


def _config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads(docker("image", "inspect", "--format={{json .Config}}", IMAGE).stdout)
    return config
