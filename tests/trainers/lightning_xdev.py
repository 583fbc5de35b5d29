"""Lightning with $TMPDIR on another filesystem: the final name grows in place."""

from trainer import Trainer, archive, main


def train(trainer: Trainer) -> None:
    for n in trainer.numbers:
        name = f"epoch={n}-step={n * 10}.ckpt"
        trainer.plan(name, {"": archive(name)})
        trainer.write(trainer.folder / name, archive(name), pieces=8)
        trainer.step()


main(train)
