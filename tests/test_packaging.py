"""What is shipped: built as a release would be, installed where nothing else is, and used from there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import dispatch_agent

ROOT = Path(__file__).parents[1]
IDENTITY = {"DISPATCH_EPOCH": "1000001", "DISPATCH_ATTEMPT": "1.17.1"}

# One worker builds and installs once for all of these.
pytestmark = pytest.mark.xdist_group("packaging")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that has the wheel and what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    _run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--retries", "10", str(wheel))
    return folder / "bin"


def test_the_wheel_holds_the_package_alone_with_script_and_vectors(wheel: Path) -> None:
    """One import name; the prologue and its contract come along through the link in the source tree."""
    names = zipfile.ZipFile(wheel).namelist()
    version = dispatch_agent.__version__
    assert {name.partition("/")[0] for name in names} == {"dispatch_agent", f"dispatch_agent-{version}.dist-info"}
    for name in ("prologue.sh", "vectors.json"):
        assert (
            zipfile.ZipFile(wheel).read(f"dispatch_agent/_prologue/{name}") == (ROOT / "prologue" / name).read_bytes()
        )
    assert {"dispatch_agent/py.typed", "dispatch_agent/cluster/example.yaml"} <= set(names)
    assert [name for name in names if "__pycache__" in name] == []


def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    """Who builds from the release's source gets what we ship, byte for byte."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    again = _build("wheel", source, tmp_path / "again")
    assert _contents(again) == _contents(wheel)


def test_the_wheel_alone_requires_click_alone(installed: Path) -> None:
    """A training image that only needs `exec` gets nothing that could collide with the trainer's own packages."""
    listed = _run(installed / "python", "-m", "pip", "list", "--format=freeze").stdout.split()
    names = {line.partition("==")[0] for line in listed}
    assert names - {"pip", "setuptools"} == {"click", "dispatch-agent"}


@pytest.mark.parametrize("program", ["dispatch-agent", "publish"])
def test_a_console_script_explains_itself(installed: Path, program: str) -> None:
    """Also where the extras are not installed, since that is where one looks for what to install."""
    answer = _run(installed / program, "--help")
    assert "Usage" in answer.stdout
    assert answer.stderr == ""


def test_exec_works_from_the_wheel(installed: Path) -> None:
    """The whole entry path, as installed."""
    command = 'import os; print(os.environ["DISPATCH_EPOCH"])'
    answer = _run(
        installed / "dispatch-agent", "exec", "--", str(installed / "python"), "-c", command, environ=IDENTITY
    )
    assert answer.stdout == f"{IDENTITY['DISPATCH_EPOCH']}\n"


@pytest.mark.parametrize("extra", ["publish", "s3", "azure", "gcs", "sftp"])
def test_publishing_without_its_extra_names_the_extra(installed: Path, tmp_path: Path, extra: str) -> None:
    """One sentence that says what to install, and no traceback."""
    save = tmp_path / "exec" / IDENTITY["DISPATCH_ATTEMPT"] / "step-1"
    save.mkdir(parents=True)
    (save / "weights").write_bytes(b"1")
    destinations = {
        "publish": f"file://{tmp_path}",
        "azure": "abfs://container",
        "gcs": "gs://bucket",
        "sftp": "sftp://host",
    }
    destination = destinations.get(extra, f"{extra}://bucket") + "/job"
    arguments = ("watch", "--root", str(tmp_path), "--dest", destination)
    answer = _run(installed / "publish", *arguments, environ=IDENTITY, code=None)
    assert answer.returncode != 0
    assert "Traceback" not in answer.stderr
    assert re.search(rf"dispatch-agent\[[^]]*{extra}", answer.stderr), answer.stderr


def test_the_version_is_the_changelogs_newest() -> None:
    """A release that forgot its notes, or notes that forgot their release."""
    newest = re.search(r"^## \[?v?([0-9][^\s\]]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == dispatch_agent.__version__


def _build(target: str, source: Path, destination: Path) -> Path:
    _run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(destination), folder=source)
    (built,) = destination.iterdir()
    return built


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _run(
    *command: str | Path, environ: dict[str, str] | None = None, folder: Path | None = None, code: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Run a program with an environment of the machine's settings for pip, and `environ`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    answer = subprocess.run(
        [str(word) for word in command],
        env={**kept, **(environ or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert code is None or answer.returncode == code, answer.stdout + answer.stderr
    return answer
