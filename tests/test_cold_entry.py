"""`exec` is on the path of every start of a job: it loads nothing that it does not need, and says nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dispatch_agent

PROLOGUE = Path(dispatch_agent.__file__).with_name("prologue.py")
HEAVY = {"click", "fsspec", "s3fs", "watchdog", "botocore", "aiobotocore", "asyncio", "ssl", "logging"}
IDENTITY = {"DISPATCH_EPOCH": "1000001", "DISPATCH_ATTEMPT": "1.17.1"}


def test_the_standalone_file_imports_only_what_is_built_into_the_interpreter() -> None:
    """Beyond an empty program's, `posix` and `_signal` are all: both are compiled into the interpreter."""
    empty = _modules_loaded("-I", "-S", "-c", "import posix; posix.execv('/bin/true', ['true'])")
    ours = _modules_loaded("-I", "-S", str(PROLOGUE), "true")
    assert ours - empty <= {"_signal", "posix"}


@pytest.mark.parametrize(
    "program",
    [("-m", "dispatch_agent", "exec", "--", "true"), ("-I", "-m", "dispatch_agent", "exec", "--", "true")],
    ids=["python -m", "python -I -m"],
)
def test_exec_of_the_package_imports_nothing_heavy(program: tuple[str, ...]) -> None:
    """No command framework, no store and no watcher stand between the start and the user's command."""
    loaded = _modules_loaded(*program)
    assert "dispatch_agent.prologue" in loaded, "this looked at something else"
    assert {name.partition(".")[0] for name in loaded} & HEAVY == set()


def test_importing_the_package_imports_nothing_of_others() -> None:
    """A training script that asks for its folder must not pay for the publisher."""
    loaded = _modules_loaded("-c", "import dispatch_agent")
    assert "dispatch_agent" in loaded
    assert {name.partition(".")[0] for name in loaded} & HEAVY == set()


def _modules_loaded(*arguments: str) -> set[str]:
    """The modules that a Python program imports, as it reports them by itself until it becomes another program."""
    answer = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        env={"PATH": "/usr/bin:/bin", **IDENTITY},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    lines = answer.stderr.splitlines()
    assert all(line.startswith("import time:") for line in lines), answer.stderr
    return {line.rpartition("|")[2].strip() for line in lines[1:]}
