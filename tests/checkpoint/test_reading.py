"""Reading a file of a save: exactly the file that was looked at, or SourceChanged."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch_agent.checkpoint import scan
from dispatch_agent.checkpoint.reading import SourceFile, path_of
from dispatch_agent.checkpoint.save import Entry
from dispatch_agent.errors import IntegrityError, SourceChanged


@pytest.fixture
def looked_at(exec_folder: Path) -> tuple[Path, bytes, Entry]:
    """A file of 1000 bytes, its path as bytes, and its entry."""
    (exec_folder / "s").mkdir()
    path = exec_folder / "s" / "w"
    path.write_bytes(bytes(range(250)) * 4)
    save = scan.snapshot(exec_folder, b"s")
    return path, path_of(exec_folder, save, save.files[0]), save.files[0]


def test_a_file_is_read_in_full_pieces_and_not_beyond_its_size(looked_at: tuple[Path, bytes, Entry]) -> None:
    path, raw, entry = looked_at
    ticks: list[int] = []
    with SourceFile(raw, entry, ticks.append) as source:
        assert source.size == 1000
        pieces = [source.read(300) for _ in range(5)]
        assert os.fstat(source.fileno()).st_ino == entry.inode
        source.finish()
    assert [len(piece) for piece in pieces] == [300, 300, 300, 100, 0]
    assert b"".join(pieces) == path.read_bytes()
    assert ticks == [300, 300, 300, 100, 0]


@given(st.integers(1, 400))
@settings(max_examples=20)
def test_any_piece_size_gives_the_same_bytes(size: int) -> None:
    path = Path("/proc/self/exe")
    status = path.stat()
    entry = Entry(b"", "file", status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, 0o755)
    with SourceFile(os.fsencode(path.resolve()), entry) as source:
        assert source.read(size) + source.read(size) == path.open("rb").read(2 * size)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda p: p.write_bytes(b"short"), "size was 1000 and is 5"),
        (lambda p: p.write_bytes(b"x" * 1000), "mtime_ns"),
        (lambda p: (p.write_bytes(b"x" * 1000), p.unlink(), p.write_bytes(b"y" * 1000)), "inode|mtime_ns"),
        (lambda p: p.chmod(0o600), "ctime_ns"),
        (lambda p: p.unlink(), "vanished"),
        (lambda p: (p.unlink(), p.symlink_to("/etc/passwd")), "vanished or is another thing"),
        (lambda p: (p.unlink(), p.mkdir()), "no regular file"),
        (lambda p: (p.unlink(), os.mkfifo(p)), "no regular file"),
        (lambda p: (p.unlink(), p.parent.rmdir(), p.parent.write_text("")), "vanished"),
    ],
)
def test_what_changed_since_the_look_is_noticed_at_the_opening(
    looked_at: tuple[Path, bytes, Entry], change: Callable[[Path], object], what: str
) -> None:
    path, raw, entry = looked_at
    time.sleep(0.02)
    change(path)
    with pytest.raises(SourceChanged, match=what) as raised:
        SourceFile(raw, entry)
    assert "s/w" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda p: p.write_bytes(b"x" * 1000), "mtime_ns|ctime_ns"),
        (lambda p: p.open("ab").write(b"more") and None, "size"),
        (lambda p: os.truncate(p, 900), "size"),
        (lambda p: p.unlink(), "ctime_ns"),
        (lambda p: (p.parent / "n").write_bytes(b"n") and (p.parent / "n").rename(p), "ctime_ns"),
    ],
)
def test_what_changes_during_the_reading_is_noticed_at_its_end(
    looked_at: tuple[Path, bytes, Entry], change: Callable[[Path], object], what: str
) -> None:
    path, raw, entry = looked_at
    with SourceFile(raw, entry) as source:
        source.read(500)
        time.sleep(0.02)
        change(path)
        with pytest.raises(SourceChanged, match=what):
            source.finish()


def test_a_file_that_shrinks_during_the_reading_never_gives_a_short_piece(
    looked_at: tuple[Path, bytes, Entry],
) -> None:
    path, raw, entry = looked_at
    with SourceFile(raw, entry) as source:
        source.read(100)
        os.truncate(path, 300)
        with pytest.raises(SourceChanged, match="ends after 300 bytes and had 1000"):
            source.read(500)


def test_whatever_the_progress_call_raises_passes_through(looked_at: tuple[Path, bytes, Entry]) -> None:
    class ToldToStop(Exception):
        pass

    def stop(_size: int) -> None:
        raise ToldToStop

    _, raw, entry = looked_at
    with SourceFile(raw, entry, stop) as source:
        with pytest.raises(ToldToStop):
            source.read(10)
        with pytest.raises(ToldToStop):
            source.tick(10)


def test_no_descriptor_is_left_open(looked_at: tuple[Path, bytes, Entry]) -> None:
    path, raw, entry = looked_at
    before = os.listdir("/proc/self/fd")
    with SourceFile(raw, entry):
        pass
    path.write_text("other")
    with pytest.raises(SourceChanged):
        SourceFile(raw, entry)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.root
def test_a_file_of_another_uid_and_mode_0600_is_refused_with_what_to_do(
    exec_folder: Path, tmp_path: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for path in (exec_folder, exec_folder.parent, tmp_path, *tmp_path.parents):
        if not path.stat().st_mode & 0o001:
            path.chmod(0o755)
    (exec_folder / "model.safetensors").write_bytes(b"x")
    (exec_folder / "model.safetensors").chmod(0o600)
    program = (
        "folder = Path(sys.argv[1]); save = scan.snapshot(folder, b'model.safetensors')\n"
        "try: reading.SourceFile(reading.path_of(folder, save, save.root), save.root)\n"
        "except Exception as error: print(type(error).__name__, error.exit_code, error)"
    )
    said = python(program, exec_folder, uid=12345).stdout
    assert said.startswith("IntegrityError 22 ")
    for part in ("model.safetensors", "mode 0600", "UID 12345", "trainer's UID", "CAP_DAC_READ_SEARCH"):
        assert part in said


def test_an_input_error_is_an_integrity_error(
    looked_at: tuple[Path, bytes, Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, raw, entry = looked_at

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    with SourceFile(raw, entry) as source:
        monkeypatch.setattr(os, "read", fail)
        with pytest.raises(IntegrityError, match=r"s/w cannot be read: Input/output error \(EIO\)"):
            source.read(10)
