"""Orbax: everything under `<step>.orbax-checkpoint-tmp`, its inner `commit_success.txt` too, then one rename."""

from trainer import Trainer, main, noise


def train(trainer: Trainer) -> None:
    for n in trainer.numbers:
        files = {"default/d/0": noise(n), "default/commit_success.txt": b"ok", "commit_success.txt": b"ok"}
        trainer.plan(str(n), files)
        temporary = trainer.folder / f"{n}.orbax-checkpoint-tmp"
        inner = temporary / "default.orbax-checkpoint-tmp"
        (inner / "d").mkdir(parents=True)
        trainer.write(inner / "d" / "0", files["default/d/0"])
        trainer.write(inner / "commit_success.txt", b"ok")
        inner.rename(temporary / "default")
        trainer.write(temporary / "commit_success.txt", b"ok")
        temporary.rename(trainer.folder / str(n))
        trainer.step()


main(train)
