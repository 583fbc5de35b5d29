"""Lightning with $TMPDIR on the checkpoint volume: one rename to the final name."""

from trainer import Trainer, archive, main


def train(trainer: Trainer) -> None:
    staging = trainer.folder.parent / "tmp"
    staging.mkdir(exist_ok=True)
    for n in trainer.numbers:
        name = f"epoch={n}-step={n * 10}.ckpt"
        trainer.plan(name, {"": archive(name)})
        trainer.write(staging / f"tmp{n}", archive(name))
        (staging / f"tmp{n}").rename(trainer.folder / name)
        trainer.step()


main(train)
