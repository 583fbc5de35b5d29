"""Cheap checks of what is in a save's files, for the faults that no completion signal tells: truncated, empty, zeroed.

A few bytes of each file are read, nothing is unpickled or loaded. Content of any kind gives an answer, never an
exception; only a file that vanished, changed or may not be read raises.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from dispatch_agent.checkpoint.names import shown
from dispatch_agent.checkpoint.reading import SourceFile, path_of
from dispatch_agent.checkpoint.save import Entry, Snapshot

_WEIGHTS = (b".safetensors", b".ckpt", b".pt", b".pth", b".bin")
_INDEXES = (b".safetensors.index.json", b".bin.index.json")
# Rank 0's last file of a Trainer's save, written in place: the one that a kill leaves half-written.
_STATE = b"trainer_state.json"
_GREATEST_HEADER = 100_000_000  # what the safetensors library itself takes
_GREATEST_INDEX = 64 << 20
_END = b"PK\x05\x06"
_END_BYTES, _LOCATOR_BYTES, _END64_BYTES = 22, 20, 56
_NO_16, _NO_32 = 0xFFFF, 0xFFFFFFFF


def check(folder: Path, save: Snapshot, rule: str = "") -> str:
    """The first problem of a save in an execution's folder, naming the file; empty if there is none.

    `rule` is what said that the save is complete: where it was `lightning`, a `.ckpt` must be what Lightning writes.
    Raises SourceChanged if a file is not as in the snapshot, IntegrityError if one may not be read.
    """
    present = {entry.path for entry in save.entries if entry.kind in {"file", "link"}}
    for file in save.files:
        name = (file.path or save.name).rpartition(b"/")[2]
        if not name.endswith(_INDEXES + _WEIGHTS) and name != _STATE:
            continue
        if not file.size:
            problem = "is empty"
        else:
            with SourceFile(path_of(folder, save, file), file) as source:
                if name == _STATE:
                    problem = _state(source)
                elif name.endswith(_INDEXES):
                    problem = _index(source, file, present)
                elif name.endswith(b".safetensors"):
                    problem = _safetensors(source)
                else:
                    problem = _torch(source, lightning=rule == "lightning")
        if problem:
            return f"{shown(save.name + (b'/' + file.path if file.path else b''))} {problem}"
    return ""


def _safetensors(source: SourceFile) -> str:
    """8 bytes of header length, a JSON header, and exactly the bytes up to the last tensor's end."""
    start = source.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 0 < length <= min(_GREATEST_HEADER, source.size - 8):
        return f"is no whole safetensors file: its header would have {length} bytes, the file has {source.size}"
    header = _json(source.read(length))
    if not isinstance(header, dict):
        return "is no whole safetensors file: its header is no JSON object"
    end = 0
    for key, tensor in header.items():
        offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        if key == "__metadata__":
            continue
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
            return f"is no whole safetensors file: {key[:80]!r} has no data_offsets"
        end = max(end, offsets[1])
    if 8 + length + end != source.size:
        return f"is truncated or damaged: its header says {8 + length + end} bytes, the file has {source.size}"
    return ""


def _state(source: SourceFile) -> str:
    whole = source.size <= _GREATEST_INDEX and isinstance(_json(source.read(source.size)), dict)
    return "" if whole else f"is no whole JSON object: {source.size} bytes"


def _index(source: SourceFile, file: Entry, present: set[bytes]) -> str:
    """Every shard that the index names stands beside it."""
    if source.size > _GREATEST_INDEX:
        return f"is no shard index: it has {source.size} bytes"
    index = _json(source.read(source.size))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        return "is no shard index: it has no weight_map of names"
    beside = file.path.rpartition(b"/")[0]
    for name in sorted(set(weight_map.values())):
        raw = name.encode("utf-8", "surrogatepass")
        if (beside + b"/" + raw if beside else raw) not in present:
            return f"names the shard {name[:200]!r}, which is not there"
    return ""


def _torch(source: SourceFile, *, lightning: bool) -> str:
    """torch.save writes a zip archive (whole only with its directory at the end), before 1.6 a pickle."""
    start = source.read(8)
    if start.startswith(b"PK\x03\x04"):
        return _zip(source)
    if not start.strip(b"\0"):
        return "begins with zeros: it was never written, or lost by a crash"
    if lightning and not start.startswith(b"\x80"):
        return f"is neither a zip archive nor a pickle: it begins with {start!r}"
    return ""


def _zip(source: SourceFile) -> str:
    size = source.size
    tail_at = max(0, size - _END_BYTES - _NO_16)
    tail = source.peek(size - tail_at, tail_at)
    at = tail.rfind(_END)
    while at >= 0:
        if at + _END_BYTES <= len(tail):
            comment = struct.unpack_from("<H", tail, at + 20)[0]
            if tail_at + at + _END_BYTES + comment == size:
                return _directory(source, tail[at : at + _END_BYTES], tail_at + at)
        at = tail.rfind(_END, 0, at)
    return f"is truncated: a zip archive of {size} bytes without its central directory at the end"


def _directory(source: SourceFile, end: bytes, end_at: int) -> str:
    entries, length, offset = struct.unpack_from("<HII", end, 10)
    if entries == _NO_16 or _NO_32 in (length, offset):
        locator = source.peek(_LOCATOR_BYTES, max(0, end_at - _LOCATOR_BYTES))
        if not locator.startswith(b"PK\x06\x07") or len(locator) < _LOCATOR_BYTES:
            return "is damaged: its zip64 directory has no locator"
        end_at = struct.unpack_from("<Q", locator, 8)[0]
        end64 = source.peek(_END64_BYTES, end_at) if end_at < source.size else b""
        if not end64.startswith(b"PK\x06\x06") or len(end64) < _END64_BYTES:
            return "is damaged: its zip64 directory is not where the locator says"
        entries, length, offset = struct.unpack_from("<QQQ", end64, 32)
    if offset + length > end_at or (entries and source.peek(4, offset) != b"PK\x01\x02"):
        return f"is damaged: its zip directory is not at byte {offset}, where its end says"
    return ""


def _json(data: bytes) -> object:
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value
