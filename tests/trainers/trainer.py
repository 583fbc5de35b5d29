"""What all fake trainers share: a command line, a pace, slow writes, and a log of what each save must become.

    python tests/trainers/<kind>.py FOLDER [--pace 0.005] [--saves 3] [--first 1] [--log FILE]

They write in the orders in which the real frameworks were measured to write. `--log` gets one line per save before
its first byte: its name and the digest of the whole tree it will be, so that whoever looks at any moment can tell a
whole save from a partial one. A rewritten save has several lines. `FOLDER` is made if it is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Trainer:
    """One run: where it saves, how long it pauses between two steps (seconds), which saves it makes."""

    folder: Path
    pace: float
    numbers: range
    log: Path | None

    def step(self) -> None:
        time.sleep(self.pace)

    def write(self, path: Path, data: bytes, pieces: int = 3, mode: str = "wb") -> None:
        """In place, piece by piece, never all at once."""
        with open(path, mode, buffering=0) as file:
            size = max(1, -(-len(data) // pieces))
            for start in range(0, len(data), size):
                file.write(data[start : start + size])
                self.step()

    def plan(self, name: str, files: Mapping[str, bytes]) -> None:
        """Tell the log what the save will be, once it is whole."""
        if self.log is not None:
            with open(self.log, "a", encoding="utf-8") as log:
                log.write(f"{name}\t{tree_digest(files)}\n")


def tree_digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for path, data in sorted(files.items()):
        digest.update(f"{path}\0{len(data)}\0".encode("utf-8", "surrogateescape") + data)
    return digest.hexdigest()


def noise(seed: object, size: int = 20_000) -> bytes:
    return random.Random(str(seed)).randbytes(size)  # noqa: S311 - repeatable content, no secret


def archive(seed: object, size: int = 20_000) -> bytes:
    """A zip archive, which is what torch.save writes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        file.writestr(zipfile.ZipInfo("archive/data.pkl"), b"\x80\x02.")
        file.writestr(zipfile.ZipInfo("archive/data/0"), noise(seed, size))
    return buffer.getvalue()


def safetensors(seed: object, size: int = 20_000) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + noise(seed, size)


def renamed_in(trainer: Trainer, path: Path, data: bytes) -> None:
    """As safetensors 0.8 writes: `.tmpXXXXXX` of mode 0600 and of full size at once, then content, then rename."""
    temporary = path.parent / f".tmp{random.randrange(10**6):06d}"  # noqa: S311 - a name, no secret
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(descriptor, len(data))
    half = len(data) // 2
    os.pwrite(descriptor, data[:half], 0)
    trainer.step()
    os.pwrite(descriptor, data[half:], half)
    os.rename(temporary, path)
    os.close(descriptor)


def main(train: Callable[[Trainer], None]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pace", type=float, default=0.005)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    numbers = range(options.first, options.first + options.saves)
    train(Trainer(options.folder, options.pace, numbers, options.log))
