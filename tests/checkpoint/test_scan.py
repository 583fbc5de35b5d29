"""Looking at an execution's folder while a trainer works in it."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dispatch_agent.checkpoint import scan
from dispatch_agent.checkpoint.folder import ensure, mark_complete, markers
from dispatch_agent.errors import IntegrityError, SourceChanged


def test_a_missing_folder_is_an_empty_look(tmp_path: Path) -> None:
    look = scan.survey(tmp_path / "nothing")
    assert (look.saves, look.markers, look.unreadable) == ((), {}, {})


def test_files_and_folders_are_saves_and_our_own_folder_and_links_are_not(exec_folder: Path) -> None:
    ensure(exec_folder, job="j", epoch=1, attempt="a", folder_id="f")
    (exec_folder / "step-1" / "sub" / "empty").mkdir(parents=True)
    (exec_folder / "step-1" / ".metadata").write_bytes(b"12345")
    (exec_folder / "step-1" / "sub" / "l").symlink_to("../.metadata")
    (exec_folder / "e.ckpt").write_bytes(b"x")
    (exec_folder / "last").symlink_to("step-1")
    (exec_folder / "latest").write_text("step-1\n")
    look = scan.survey(exec_folder)
    saves = {save.name: save for save in look.saves}
    assert list(saves) == [b"e.ckpt", b"latest", b"step-1"]
    seen = [(entry.path, entry.kind, entry.target) for entry in saves[b"step-1"].entries]
    assert seen == [
        (b".metadata", "file", b""),
        (b"sub", "folder", b""),
        (b"sub/empty", "folder", b""),
        (b"sub/l", "link", b"../.metadata"),
    ]
    assert saves[b"step-1"].entries[0].size == 5
    assert saves[b"e.ckpt"].files == (saves[b"e.ckpt"].root,)
    assert look.links == {b"last": b"step-1"}
    assert look.link_times == {b"last": (exec_folder / "last").lstat().st_mtime_ns}
    assert look.texts[b"latest"] == (b"step-1\n", (exec_folder / "latest").stat().st_mtime_ns)


def test_links_are_never_followed(exec_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("s")
    (exec_folder / "step-1").mkdir()
    (exec_folder / "step-1" / "out").symlink_to(tmp_path / "outside")
    (exec_folder / "step-1" / "round").symlink_to(".")
    assert [entry.path for entry in scan.survey(exec_folder).saves[0].entries] == [b"out", b"round"]


def test_special_files_are_seen_and_never_opened(exec_folder: Path) -> None:
    os.mkfifo(exec_folder / "pipe")
    (exec_folder / "step-1").mkdir()
    os.mkfifo(exec_folder / "step-1" / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(exec_folder)
        server.bind("sock")
        look = scan.survey(exec_folder)
    assert [(save.name, save.root.kind) for save in look.saves] == [
        (b"pipe", "other"),
        (b"sock", "other"),
        (b"step-1", "folder"),
    ]
    assert look.saves[2].entries[0].kind == "other"


def test_names_that_are_not_text_are_kept_as_they_are(exec_folder: Path) -> None:
    name = b"\xff\n" + b"x" * 253
    os.mkdir(os.path.join(os.fsencode(exec_folder), name))
    with open(os.path.join(os.fsencode(exec_folder), name, b"\xfe"), "wb"):
        pass
    (save,) = scan.survey(exec_folder).saves
    assert (save.name, save.entries[0].path) == (name, b"\xfe")
    assert scan.snapshot(exec_folder, name) == save


def test_markers_of_saves_that_are_there_are_read(exec_folder: Path) -> None:
    for name in ("a", "b"):
        (exec_folder / name).write_text("x")
        mark_complete(exec_folder / name)
    (exec_folder / "a").unlink()
    look = scan.survey(exec_folder)
    assert {name: marker.sequence for name, marker in look.markers.items()} == {b"b": 2}


def test_a_vanished_save_is_a_changed_source(exec_folder: Path) -> None:
    with pytest.raises(SourceChanged, match=r"step-1 vanished from .*1\.42\.0"):
        scan.snapshot(exec_folder, b"step-1")
    (exec_folder / "step-1").symlink_to("elsewhere")
    with pytest.raises(SourceChanged, match="is a link to elsewhere"):
        scan.snapshot(exec_folder, b"step-1")


def test_looks_stand_a_trainer_that_makes_renames_and_deletes_all_the_time(exec_folder: Path) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for path in ("s/a/b", "s/c"):
                (exec_folder / path).mkdir(parents=True, exist_ok=True)
                (exec_folder / path / "f").write_text("x")
            (exec_folder / "s").rename(exec_folder / "t")
            for path in ("t/a/b/f", "t/c/f"):
                (exec_folder / path).unlink()
            for path in ("t/a/b", "t/a", "t/c", "t"):
                (exec_folder / path).rmdir()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            assert not scan.survey(exec_folder).unreadable
    finally:
        stop.set()
        thread.join()


def test_the_first_difference_is_told_in_words(exec_folder: Path) -> None:
    save = exec_folder / "step-1"
    (save / "sub").mkdir(parents=True)
    (save / "a").write_text("one")
    (save / "l").symlink_to("a")

    def changed(change: Callable[[], object]) -> str:
        before = scan.snapshot(exec_folder, b"step-1")
        assert scan.differences(before, scan.snapshot(exec_folder, b"step-1")) == ""
        time.sleep(0.02)
        change()
        return scan.differences(before, scan.snapshot(exec_folder, b"step-1"))

    assert changed(lambda: (save / "a").write_text("longer")).startswith("size of step-1/a was 3 and is 6")
    times = (save / "a").stat()
    rewritten = changed(lambda: ((save / "a").write_text("others"), os.utime(save / "a", ns=(0, times.st_mtime_ns))))
    assert rewritten.startswith("ctime of step-1/a")
    assert changed((save / "sub" / "n").touch).startswith("mtime of step-1/sub")
    assert changed(lambda: (save / "a").chmod(0o600)).startswith("mode of step-1/a was 0o644")
    assert changed((save / "a").unlink).startswith("mtime of step-1 ")


@pytest.mark.root
def test_what_may_not_be_read_is_told_with_the_reason(
    exec_folder: Path, tmp_path: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == 0 and not path.stat().st_mode & 0o001:
            path.chmod(0o711)
    (exec_folder / "open").write_text("x")
    (exec_folder / "closed" / "inner").mkdir(parents=True)
    (exec_folder / "closed" / "inner").chmod(0o700)
    exec_folder.chmod(0o755)
    exec_folder.parent.chmod(0o755)
    program = (
        "folder = Path(sys.argv[1])\n"
        "look = scan.survey(folder); print([s.name for s in look.saves], look.unreadable)\n"
        "try: scan.snapshot(folder, b'closed')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    lines = python(program, exec_folder, uid=12345).stdout.splitlines()
    assert lines[0].startswith("[b'open'] {b'closed': \"Permission denied at ")
    assert "trainer's UID" in lines[0]
    assert lines[1].startswith("IntegrityError closed cannot be looked at: Permission denied")


def test_ten_thousand_files_are_looked_at_whole_and_in_reasonable_time(exec_folder: Path) -> None:
    for folder in range(100):
        (exec_folder / f"s{folder}").mkdir()
        for file in range(100):
            (exec_folder / f"s{folder}" / str(file)).touch()
    started = time.process_time()
    look = scan.survey(exec_folder)
    assert time.process_time() - started < 5
    assert sum(len(save.files) for save in look.saves) == 10_000
    assert not any(scan.differences(a, b) for a, b in zip(look.saves, scan.survey(exec_folder).saves, strict=True))


def test_an_unreadable_tracker_is_told(exec_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (exec_folder / "latest").write_text("x")

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(scan.os, "open", refuse)
    assert b"latest" in scan.survey(exec_folder).unreadable


def test_a_damaged_marker_is_told_and_holds_back_no_other_save(exec_folder: Path) -> None:
    (exec_folder / "a").write_text("x")
    mark_complete(exec_folder / "a")
    (exec_folder / ".dispatch" / "complete" / "a").write_text("{}")
    (exec_folder / "b").write_text("x")
    mark_complete(exec_folder / "b")
    look = scan.survey(exec_folder)
    assert list(look.markers) == [b"b"]
    assert "format 1" in look.unreadable[b"a"]
    with pytest.raises(IntegrityError, match="format 1"):
        markers(exec_folder)
