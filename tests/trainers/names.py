"""A marked save whose file names break clients of stores: globs, not UTF-8, spaces, newlines, 255 bytes."""

import os

from trainer import Trainer, main, noise

from dispatch_agent.checkpoint.folder import mark_complete

NAMES = (
    b"a[1].pt_",
    b"q?.txt",
    b"s*.txt",
    b"bad\xff.bin_",
    "u\u0308.txt".encode(),
    b"#?%+ &=:@",
    b" leading",
    b"trailing ",
    b"trailing.",
    b"new\nline",
    b"%41",
    b"...",
    b"back\\slash",
    b".hidden",
    b"n" * 255,
    b"\xff" * 255,
)


def train(trainer: Trainer) -> None:
    for n in trainer.numbers:
        save = trainer.folder / f"step [{n}]*"
        (save / "empty folder").mkdir(parents=True)
        (save / "empty file").touch()
        for name in NAMES:
            trainer.write(save / os.fsdecode(name), noise(name, 100))
        mark_complete(save)


main(train)
