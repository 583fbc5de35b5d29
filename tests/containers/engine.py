"""The `docker` command, and how a container ended."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
