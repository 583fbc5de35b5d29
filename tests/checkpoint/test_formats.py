"""Cheap checks of content: truncated, empty, zeroed and hostile files are named, whole ones pass, nothing raises."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatch_agent.checkpoint import formats, scan
from dispatch_agent.errors import SourceChanged


def archive(size: int = 5000, *, comment: bytes = b"", zip64: bool = False) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.comment = comment
        with file.open(zipfile.ZipInfo("archive/data/0"), "w", force_zip64=zip64) as member:
            member.write(random.Random(size).randbytes(size))  # noqa: S311 - content, no secret
    return buffer.getvalue()


def zip64_archive() -> bytes:
    """An archive whose end says 0xFFFF and 0xFFFFFFFF, as those above 4 GiB or 65,535 entries do."""
    data = archive(zip64=True)
    end = data.rfind(b"PK\x05\x06")
    entries, length, offset = struct.unpack_from("<HII", data, end + 10)
    end64 = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, entries, entries, length, offset)
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, end, 1)
    return (
        data[:end]
        + end64
        + locator
        + b"PK\x05\x06"
        + struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, 0)
    )


def tensors(size: int = 100, **header: object) -> bytes:
    text = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def check(folder: Path, **files: bytes) -> str:
    """The problem of a save `s` with these files; `__` in a name stands for a dot, `___` for a slash."""
    (folder / "s").mkdir(exist_ok=True)
    for name, data in files.items():
        path = folder / "s" / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return formats.check(folder, scan.snapshot(folder, b"s"))


def test_whole_files_pass(exec_folder: Path) -> None:
    index = json.dumps({"weight_map": {"a": "m1.safetensors", "b": "m1.safetensors"}}).encode()
    assert not check(
        exec_folder,
        m1__safetensors=tensors(),
        empty__safetensors=struct.pack("<Q", 2) + b"{}",
        meta__safetensors=tensors(5, __metadata__={"format": "pt"}),
        model__safetensors__index__json=index,
        optimizer__pt=archive(),
        commented__pth=archive(comment=b"c" * 300),
        large__bin=zip64_archive(),
        legacy__pt=b"\x80\x02pickle.",
        raw__bin=b"\x01\x02",
        notes__txt=b"",
        trainer_state__json=b'{"a": NaN}',
    )


def test_empty_shards_of_dcp_pass_and_empty_weights_do_not(exec_folder: Path) -> None:
    assert not check(exec_folder, __0_0__distcp=b"")
    for name in ("w__safetensors", "w__bin", "w__pt", "w__pth", "sub___w__ckpt"):
        assert check(exec_folder, **{name: b""}).endswith("is empty")
        (exec_folder / "s" / name.replace("___", "/").replace("__", ".")).unlink()


@pytest.mark.parametrize("size", [1, 7, 8, 20, 60, -1, -50])
def test_a_truncated_safetensors_file_is_named(exec_folder: Path, size: int) -> None:
    assert check(exec_folder, sub___w__safetensors=tensors()[:size]).startswith("s/sub/w.safetensors is ")


@pytest.mark.parametrize(
    "data",
    [
        tensors() + b"x",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 0) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"\xff\xff",
        struct.pack("<Q", 50_000) + b"[" * 50_000,
        tensors(w2={"data_offsets": [0, "x"]}),
        tensors(w2={"data_offsets": [0]}),
        tensors(w2={"data_offsets": [0, True]}),
        tensors(w2=7),
        tensors(w2={"data_offsets": [0, 10**30]}),
    ],
)
def test_a_damaged_or_hostile_safetensors_file_is_named(exec_folder: Path, data: bytes) -> None:
    assert check(exec_folder, w__safetensors=data).startswith("s/w.safetensors is ")


@pytest.mark.parametrize("whole", [archive(), archive(comment=b"hello"), zip64_archive()])
def test_a_torch_archive_truncated_anywhere_is_named(exec_folder: Path, whole: bytes) -> None:
    for size in (4, 30, 1000, len(whole) // 2, len(whole) - 1):
        assert "s/w.pt is " in check(exec_folder, w__pt=whole[:size]) + " "
    assert check(exec_folder, w__pt=whole + b"x").startswith("s/w.pt is truncated")


def test_an_archive_whose_directory_is_elsewhere_is_named(exec_folder: Path) -> None:
    whole = archive()
    end = whole.rfind(b"PK\x05\x06")
    for offset in (0, len(whole), 2**32 - 2):
        moved = whole[: end + 16] + struct.pack("<I", offset) + whole[end + 20 :]
        assert "directory" in check(exec_folder, w__pt=moved)
    locator = zip64_archive()
    at = locator.rfind(b"PK\x06\x07")
    for offset in (0, 2**64 - 1):
        assert "zip64" in check(exec_folder, w__pt=locator[: at + 8] + struct.pack("<Q", offset) + locator[at + 16 :])


def test_zeros_are_what_a_crash_leaves(exec_folder: Path) -> None:
    assert check(exec_folder, w__pt=bytes(500)).startswith("s/w.pt begins with zeros")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (archive(), ""),
        (b"\x80\x02legacy.", ""),
        (archive()[:3000], "e.ckpt is truncated"),
        (b"not one", "e.ckpt is neither a zip archive nor a pickle"),
        (bytes(100), "e.ckpt begins with zeros"),
        (b"", "e.ckpt is empty"),
    ],
)
def test_a_single_ckpt_file_is_a_whole_archive(exec_folder: Path, data: bytes, problem: str) -> None:
    (exec_folder / "e.ckpt").write_bytes(data)
    said = formats.check(exec_folder, scan.snapshot(exec_folder, b"e.ckpt"), "lightning")
    assert said.startswith(problem)
    assert bool(said) == bool(problem)


def test_a_ckpt_of_another_framework_is_the_trainers_own_business(exec_folder: Path) -> None:
    """I9: a marker is the trainer's own word, and not every .ckpt is torch's."""
    (exec_folder / "e.ckpt").write_bytes(b"msgpack, say")
    assert not formats.check(exec_folder, scan.snapshot(exec_folder, b"e.ckpt"), "marker")


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "gone.safetensors"}}',
        b'{"weight_map": {"a": "../../etc/passwd"}}',
        b'{"weight_map": {"a": "\\ud800"}}',
        b"[" * 100_000,
    ],
)
def test_an_index_whose_shards_are_not_there_is_named(exec_folder: Path, index: bytes) -> None:
    assert check(exec_folder, model__safetensors__index__json=index).startswith("s/model.safetensors.index.json ")


def test_a_trainer_state_that_a_kill_left_half_written_is_named(exec_folder: Path) -> None:
    assert "no whole JSON" in check(exec_folder, trainer_state__json=b'{"global_step": 5, "log_his')


@given(st.binary(max_size=300), st.sampled_from(["w.safetensors", "w.pt", "m.bin.index.json", "trainer_state.json"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_no_content_raises(exec_folder: Path, data: bytes, name: str) -> None:
    (exec_folder / "s").mkdir(exist_ok=True)
    for start in (b"", b"PK\x03\x04", struct.pack("<Q", max(0, len(data) - 2))):
        (exec_folder / "s" / name).write_bytes(start + data)
        assert isinstance(formats.check(exec_folder, scan.snapshot(exec_folder, b"s")), str)
    (exec_folder / "s" / name).unlink()


def test_a_file_that_changed_since_the_look_is_no_format_problem(exec_folder: Path) -> None:
    (exec_folder / "w.pt").write_bytes(archive())
    look = scan.snapshot(exec_folder, b"w.pt")
    os.truncate(exec_folder / "w.pt", 10)
    with pytest.raises(SourceChanged):
        formats.check(exec_folder, look)
