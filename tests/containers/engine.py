"""The `docker` command, and how a container ended."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

ROOT = Path(__file__).parents[2]
PUBLISHER = "dispatch-agent:local"
# What Pod Security's `restricted` asks for, and a root that cannot be written.
LOCKED = ("--read-only", "--user=12345:12345", "--cap-drop=ALL", "--security-opt=no-new-privileges")


@dataclass(frozen=True)
class Ended:
    """How a container's first process ended: its own exit code, not that of the `docker` command."""

    code: int
    out: str
    err: str


Run = Callable[..., Ended]


def docker(*arguments: str, check: bool = True, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    answer = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    assert not check or answer.returncode == 0, answer.stderr
    return answer


@contextmanager
def volume() -> Iterator[str]:
    """The name of an empty volume that any user may write to, as a pod's emptyDir."""
    name = f"dispatch-agent-test-{uuid4().hex[:12]}"
    docker("volume", "create", name)
    try:
        docker("run", "--rm", "--network=none", f"--volume={name}:/v", "busybox:latest", "chmod", "1777", "/v")
        yield name
    finally:
        docker("volume", "rm", "--force", name, check=False)
