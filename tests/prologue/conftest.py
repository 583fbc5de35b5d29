"""The stage that prologue tests run on: a compiled probe, fixtures, locales, and every supported shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dispatch_agent.cli import conformance
from dispatch_agent.cli.conformance import Probe, Runner, Stage

# Name, binary, options. They are all called as /bin/sh, as the contract has it.
SHELLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dash": ("dash", ()),
    "bash": ("bash", ()),
    "bash --posix": ("bash", ("--posix",)),
    "busybox": ("busybox", ()),
    "mksh": ("mksh", ()),
    "lksh": ("lksh", ()),
    "ksh93": ("ksh93", ()),
    "zsh": ("zsh", ()),
    "posh": ("posh", ()),
}
IMPLEMENTATIONS = [*SHELLS, "python"]


def _runner_for(implementation: str, text: str | None = None, *, other_user: bool = False) -> Runner:
    """How to start the prologue under this name. A shell that is not installed fails the test: nothing is skipped."""
    if implementation == "python":
        return conformance.python_runner(_python_for_everybody() if other_user else sys.executable)
    binary, options = SHELLS.get(implementation, (implementation, ()))
    path = shutil.which(binary)
    assert path, f"{binary} is not installed: the contract names it, so its tests must run"
    return conformance.shell_runner(path, *options, text=text)


def _python_for_everybody() -> str:
    """An interpreter that another user can reach: the one of these tests may live in root's home."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        real = Path(python).resolve()
        folders = [*real.parents, *Path(python).parents]
        if os.geteuid() != 0 or (real.exists() and all(folder.stat().st_mode & 0o1 for folder in folders)):
            return python
    pytest.fail("no Python that another user can run: install one in /usr/bin")


def _make_locales(folder: Path, names: Sequence[str]) -> None:
    folder.mkdir()
    # Side by side, since each takes seconds. They exit 1 for warnings about the distribution's own locale sources.
    makers = [
        subprocess.Popen(["localedef", "-i", name, "-f", "UTF-8", folder / f"{name}.UTF-8"], stderr=subprocess.DEVNULL)
        for name in names
    ]
    for name, maker in zip(names, makers, strict=True):
        maker.wait()
        assert (folder / f"{name}.UTF-8" / "LC_CTYPE").exists(), f"localedef made no {name}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each implementation, or for each implementation and vector."""
    if "implementation" in metafunc.fixturenames:
        metafunc.parametrize("implementation", IMPLEMENTATIONS)
    if "vector" in metafunc.fixturenames:
        vectors = conformance.load()["vectors"]
        metafunc.parametrize(
            "vector", vectors, ids=[vector["name"].encode("ascii", "replace").decode() for vector in vectors]
        )


@pytest.fixture(scope="session")
def contract() -> dict[str, Any]:
    return conformance.load()


@pytest.fixture(scope="session")
def stage(contract: dict[str, Any]) -> Iterator[Stage]:
    # Not under pytest's own folder: that one is closed to the other users that some vectors run as.
    with tempfile.TemporaryDirectory(prefix="prologue-") as name:
        root = Path(name).resolve()
        root.chmod(0o755)
        (root / "fixtures").mkdir()
        conformance.lay_out(contract["fixtures"], root / "fixtures")
        probe = Probe(root / "probe", root / "report", sees_signals=True)
        source = Path(__file__).with_name("probe.c")
        subprocess.run(
            ["gcc", "-Wall", "-Werror", "-O1", f'-DREPORT="{probe.report}"', "-o", probe.path, source], check=True
        )
        _make_locales(root / "locales", ("tr_TR", "de_DE"))
        yield Stage(root / "fixtures", probe, root / "locales")
        (root / "fixtures" / "noperm").chmod(0o755)


@pytest.fixture(scope="session")
def runner_for() -> Callable[..., Runner]:
    return _runner_for
