"""`dispatch-agent install` killed at every step, over a damaged tree, many at once: a reader never gets half an agent.

Over a small tree that stands for the real one; the container tests install that.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from dispatch_agent.cli import install as module
from dispatch_agent.cli.install import install, install_tree
from dispatch_agent.errors import AgentError, SettingsError


def make(folder: Path, version: str, program: str = "#!/bin/sh\nexit 0\n") -> Path:
    """A tree whose files all say which version they are of."""
    for name in ("bin", "lib/deep", "empty"):
        (folder / name).mkdir(parents=True)
    (folder / "bin" / "python").write_text(program)
    (folder / "bin" / "python").chmod(0o700)
    for number in range(4):
        (folder / "lib" / "deep" / f"{number}.py").write_text(version * (number + 1))
    (folder / "exec.py").write_text(version)
    (folder / "digest").write_text(f"{version * 40}\n")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make(tmp_path / "one", "1")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return make(tmp_path / "two", "2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "volume" / "with space"


def contents(tree: Path) -> dict[str, bytes]:
    return {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def installed(folder: Path) -> Path:
    """The one tree that all of a folder's names lead to."""
    tree = (folder / "bin").resolve().parent
    assert (folder / "exec.py").resolve() == tree / "exec.py"
    assert tree.parent == folder / "trees"
    return tree


def in_a_child(work: Callable[[], object]) -> int:
    """Run it in a forked process; its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


CHANGES = ("os.mkdir", "os.chmod", "os.rename", "os.symlink", "os.remove", "os.rmdir", "open", "subprocess.Popen")


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Run `work` in a process that gets SIGKILL before its change number `step`; false if it makes no so many."""

    def start() -> None:
        seen = 0

        def count(event: str, _: object) -> None:
            nonlocal seen
            if event in CHANGES:
                seen += 1
                if seen == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()

    code = in_a_child(start)
    assert code in {0, -signal.SIGKILL}
    return code != 0


def test_the_tree_is_there_for_everybody_whatever_the_umask(source: Path, folder: Path) -> None:
    before = os.umask(0o077)
    try:
        assert install_tree(source, folder)
    finally:
        os.umask(before)
    tree = installed(folder)
    assert contents(tree) == contents(source)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tree, *tree.rglob("*")) if path.is_dir()}
    assert modes == {0o755}
    assert stat.S_IMODE((tree / "bin" / "python").stat().st_mode) == 0o755
    assert stat.S_IMODE((tree / "exec.py").stat().st_mode) == 0o644


@pytest.mark.root
def test_a_second_run_changes_nothing_and_needs_no_right_to(source: Path, folder: Path) -> None:
    """A pod's next start, as another user and over a volume that is mounted read-only."""
    install_tree(source, folder)
    for path in (source.parent, *source.parent.parents, source / "bin" / "python"):
        if path.stat().st_mode & 0o055 != 0o055:
            path.chmod(0o755)
    before = {path: path.lstat().st_ctime_ns for path in folder.rglob("*")}

    def again() -> None:
        os.setgid(65534)
        os.setuid(65534)
        assert install_tree(source, folder) is False

    assert in_a_child(again) == 0
    assert {path: path.lstat().st_ctime_ns for path in folder.rglob("*")} == before


@pytest.mark.root
def test_a_folder_that_cannot_be_written_is_said_with_who_could_not(source: Path, tmp_path: Path) -> None:
    for path in (source.parent, *source.parent.parents):
        if path.stat().st_mode & 0o055 != 0o055:
            path.chmod(0o755)

    def as_nobody() -> None:
        os.setgid(65534)
        os.setuid(65534)
        with pytest.raises(AgentError, match=r"volume cannot be written by uid 65534: mount a volume"):
            install_tree(source, tmp_path / "volume")

    (tmp_path / "volume").mkdir(mode=0o755)
    assert in_a_child(as_nobody) == 0


def test_killed_at_any_step_of_the_first_install_nothing_half_can_be_started(source: Path, tmp_path: Path) -> None:
    step = 0
    while True:
        step += 1
        place = tmp_path / f"killed-{step}" / "v"
        alive = not killed_at(step, lambda place=place: install_tree(source, place))  # type: ignore[misc]
        if (place / "bin" / "python").exists():
            assert contents((place / "bin").resolve().parent) == contents(source)
        if (place / "exec.py").exists():
            assert contents((place / "exec.py").resolve().parent) == contents(source)
        install_tree(source, place)
        assert contents(installed(place)) == contents(source)
        assert [path.name for path in (place / "trees").iterdir()] == ["1" * 16], "the dead one's leftovers"
        if alive:
            break
    assert step > 20


def test_killed_at_any_step_of_an_upgrade_there_is_the_old_or_the_new_and_whole(
    source: Path, other: Path, tmp_path: Path
) -> None:
    step = 0
    seen = set()
    while True:
        step += 1
        place = tmp_path / f"killed-{step}"
        install_tree(source, place)
        alive = not killed_at(step, lambda place=place: install_tree(other, place))  # type: ignore[misc]
        found = contents(installed(place))
        assert found in (contents(source), contents(other))
        seen.add(found["exec.py"])
        install_tree(other, place)
        assert contents(installed(place)) == contents(other)
        assert contents(place / "trees" / ("1" * 16)) == contents(source), "what runs from the old one lost its files"
        if alive:
            break
    assert seen == {b"1", b"2"}


def test_of_three_versions_the_first_goes_and_an_older_one_comes_back(
    source: Path, other: Path, folder: Path, tmp_path: Path
) -> None:
    for tree in (source, other, make(tmp_path / "three", "3")):
        install_tree(tree, folder)
    assert {path.name for path in (folder / "trees").iterdir()} == {"2" * 16, "3" * 16}
    install_tree(source, folder)
    assert contents(installed(folder)) == contents(source)


@pytest.mark.parametrize("damage", ["cut short", "missing"])
def test_a_tree_that_a_crash_of_the_machine_cut_short_is_replaced(damage: str, source: Path, folder: Path) -> None:
    install_tree(source, folder)
    path = installed(folder) / "lib" / "deep" / "3.py"
    path.write_bytes(b"") if damage == "cut short" else path.unlink()
    assert install_tree(source, folder)
    assert contents(installed(folder)) == contents(source)
    assert [path.name for path in (folder / "trees").iterdir()] == ["1" * 16]


@pytest.mark.parametrize("locks", [True, False])
def test_twenty_at_once_all_succeed_and_readers_see_only_whole_trees(
    locks: bool, source: Path, other: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten of either version, on a filesystem with locks and on one without."""

    def unsupported(*_: object) -> None:
        raise OSError(95, "no locks here")

    if not locks:
        monkeypatch.setattr(module.fcntl, "flock", unsupported)
    install_tree(source, folder)
    children = []
    for number in range(20):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                install_tree((source, other)[number % 2], folder)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    codes = []
    for child in children:
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            tree = (folder / "bin").resolve().parent
            assert contents(tree) in (contents(source), contents(other))
            time.sleep(0.001)
        codes.append(os.waitstatus_to_exitcode(ended[1]))
    assert codes == [0] * 20
    install_tree(source, folder)
    assert {path.name for path in (folder / "trees").iterdir()} == {"1" * 16, "2" * 16}


def test_an_install_that_hangs_is_waited_for_and_then_gone_past(
    source: Path, other: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A frozen one still has the lock: what it is at is left alone, for it may go on."""
    monkeypatch.setattr(module, "_LOCK_WAIT", 0.0)
    install_tree(source, folder)
    unfinished = folder / "trees" / ".new.abcdef"
    unfinished.mkdir()
    holder = os.open(folder / "trees", os.O_RDONLY)
    try:
        module.fcntl.flock(holder, module.fcntl.LOCK_EX)
        assert install_tree(other, folder)
    finally:
        os.close(holder)
    assert contents(installed(folder)) == contents(other)
    assert unfinished.is_dir()
    assert capsys.readouterr().err == f"waiting for another install in {folder}\n"


@pytest.mark.parametrize("name", ["bin", "exec.py", "current"])
def test_a_folder_that_holds_other_things_is_refused_and_left_alone(name: str, source: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / name).write_text("somebody's")
    with pytest.raises(SettingsError, match="is not the agent's"):
        install_tree(source, folder)
    assert [path.name for path in folder.iterdir()] == [name]


def test_a_tree_that_does_not_run_there_is_never_switched_to(source: Path, folder: Path, tmp_path: Path) -> None:
    install_tree(source, folder)
    broken = make(tmp_path / "broken", "9", "#!/bin/sh\necho 'wrong machine' >&2; exit 125\n")
    with pytest.raises(AgentError, match="does not run there: wrong machine"):
        install_tree(broken, folder)
    assert contents(installed(folder)) == contents(source)
    assert [path.name for path in (folder / "trees").iterdir()] == ["1" * 16]


def test_a_package_of_pip_says_what_can_be_installed_instead(tmp_path: Path) -> None:
    """This very Python: it would run nowhere but here."""
    result = CliRunner().invoke(install, [str(tmp_path / "v")])
    assert isinstance(result.exception, SettingsError)
    assert "the publisher image" in str(result.exception)
    assert "images/training/Dockerfile" in str(result.exception)
    assert not (tmp_path / "v").exists()
