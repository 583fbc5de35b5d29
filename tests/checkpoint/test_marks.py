"""`publish complete PATH`: our own marker, never durable before the data, numbered across processes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dispatch_agent.checkpoint import scan
from dispatch_agent.checkpoint.completion import parse_rule
from dispatch_agent.checkpoint.folder import ensure, mark_complete, marker_of, markers
from dispatch_agent.checkpoint.save import Complete
from dispatch_agent.errors import IntegrityError, UsageError


def test_a_marked_save_is_complete_under_every_rule(exec_folder: Path) -> None:
    save = exec_folder / "weights"
    save.mkdir()
    (save / "w").write_text("x")
    marker = mark_complete(save, "tok-1")
    look = scan.survey(exec_folder)
    assert look.markers == {b"weights": marker}
    for rule in ("auto", "marker", "hf", "dcp", "settle:5", "pointer:latest", "rename"):
        verdict = parse_rule(rule).judge(look.saves[0], look, 0.0)
        assert isinstance(verdict, Complete)
        assert (verdict.signal.sequence, verdict.signal.token) == (1, "tok-1")


def test_numbers_grow_and_a_save_has_one_marker(exec_folder: Path) -> None:
    for name in ("a", "b"):
        (exec_folder / name).write_text("x")
    numbers = [mark_complete(exec_folder / name).sequence for name in ("a", "b", "a")]
    assert numbers == [1, 2, 3]
    assert {name: marker.sequence for name, marker in markers(exec_folder).items()} == {b"a": 3, b"b": 2}
    assert marker_of(exec_folder, b"b") == markers(exec_folder)[b"b"]
    assert marker_of(exec_folder, b"c") is None
    assert markers(exec_folder / "none") == {}


def test_a_marker_is_no_older_than_any_file_even_if_clocks_disagree(exec_folder: Path) -> None:
    (exec_folder / "s").mkdir()
    (exec_folder / "s" / "w").write_text("x")
    future = time.time_ns() + 10**12
    os.utime(exec_folder / "s" / "w", ns=(future, future))
    assert mark_complete(exec_folder / "s").mtime_ns >= future


def test_long_names_that_are_not_text_can_be_marked(exec_folder: Path) -> None:
    name = b"\xff" * 255
    with open(os.path.join(os.fsencode(exec_folder), name), "wb") as file:
        file.write(b"x")
    mark_complete(exec_folder / os.fsdecode(name))
    assert list(markers(exec_folder)) == [name]
    assert list(scan.survey(exec_folder).markers) == [name]


def test_a_relative_path_is_marked_in_its_own_folder(exec_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (exec_folder / "s").mkdir()
    monkeypatch.chdir(exec_folder)
    mark_complete(Path("s/"))
    monkeypatch.chdir(exec_folder / "s")
    mark_complete(Path("../s"))
    assert list(markers(exec_folder)) == [b"s"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nothing", "No such file"),
        ("link", "is a link"),
        ("pipe", "neither a file nor a folder"),
        (".dispatch", "dispatch-agent's own"),
        (".dispatch/execution.json", "dispatch-agent's own"),
        (".", "an execution's folder"),
        ("step-1/weights", "lies inside the save .*step-1: mark that"),
        ("step-1/sub/weights", "lies inside the save .*step-1: mark that"),
    ],
)
def test_what_is_no_save_cannot_be_marked(exec_folder: Path, path: str, why: str) -> None:
    ensure(exec_folder, job="j", epoch=1, attempt="a", folder_id="f")
    (exec_folder / "step-1" / "sub").mkdir(parents=True)
    (exec_folder / "step-1" / "weights").write_text("x")
    (exec_folder / "step-1" / "sub" / "weights").write_text("x")
    (exec_folder / "link").symlink_to("step-1")
    os.mkfifo(exec_folder / "pipe")
    with pytest.raises(UsageError, match=why):
        mark_complete(exec_folder / path)
    assert not list(exec_folder.rglob("complete"))


@pytest.mark.parametrize("token", ["two words", "x" * 129, "ü", "new\nline"])
def test_a_token_is_visible_ascii(exec_folder: Path, token: str) -> None:
    (exec_folder / "s").mkdir()
    with pytest.raises(UsageError, match="token"):
        mark_complete(exec_folder / "s", token)


def test_the_data_is_made_durable_before_the_marker_exists(exec_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (exec_folder / "s" / "sub").mkdir(parents=True)
    (exec_folder / "s" / "a").write_text("x")
    (exec_folder / "s" / "sub" / "b").write_text("x")
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        done.append("marker")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    mark_complete(exec_folder / "s")
    data = {str(exec_folder / path) for path in ("s/a", "s/sub/b", "s/sub", "s", ".")}
    assert data <= set(done[: done.index("marker")])
    assert done[-1] == str(exec_folder / ".dispatch" / "complete")


def test_data_that_cannot_be_made_durable_is_not_marked(exec_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (exec_folder / "s").write_text("x")

    def fail(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(IntegrityError, match="not marked: Input/output error"):
        mark_complete(exec_folder / "s")
    assert markers(exec_folder) == {}


def test_processes_at_once_never_get_the_same_number(exec_folder: Path, environment: dict[str, str]) -> None:
    program = (
        "import sys; from pathlib import Path; from dispatch_agent.checkpoint.folder import mark_complete\n"
        "print(*[mark_complete(Path(p)).sequence for p in sys.argv[1:]])"
    )
    paths = [[str(exec_folder / f"{process}-{n}") for n in range(20)] for process in range(3)]
    for path in itertools.chain(*paths):
        Path(path).write_text("x")
    running = [
        subprocess.Popen([sys.executable, "-c", program, *group], env=environment, stdout=subprocess.PIPE)
        for group in paths
    ]
    answers = [[int(n) for n in process.communicate(timeout=60)[0].split()] for process in running]
    assert all(answer == sorted(answer) for answer in answers)
    assert sorted(itertools.chain(*answers)) == list(range(1, 61))


def test_a_marker_is_never_seen_half_written(exec_folder: Path) -> None:
    (exec_folder / "s").write_text("x")
    stop = threading.Event()

    def mark() -> None:
        while not stop.is_set():
            mark_complete(exec_folder / "s", "t" * 100)

    thread = threading.Thread(target=mark)
    thread.start()
    try:
        until = time.monotonic() + 0.7
        while time.monotonic() < until:
            assert all(marker.token == "t" * 100 for marker in markers(exec_folder).values())
    finally:
        stop.set()
        thread.join()


@pytest.mark.root
def test_trainer_and_publisher_of_two_uids_can_both_mark(
    exec_folder: Path, tmp_path: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for path in (exec_folder.parent, tmp_path, *tmp_path.parents):
        if not path.stat().st_mode & 0o001:
            path.chmod(0o755)
    os.chown(exec_folder, 12345, 12345)
    ensure(exec_folder, job="j", epoch=1, attempt="a", folder_id="f")
    (exec_folder / "root's").write_text("x")
    mark_complete(exec_folder / "root's")
    program = "p = Path(sys.argv[1]) / 'theirs'; p.write_text('x'); print(folder.mark_complete(p).sequence)"
    assert python(program, exec_folder, uid=12345).stdout == "2\n"
    assert set(markers(exec_folder)) == {b"root's", b"theirs"}
