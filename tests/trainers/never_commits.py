"""A trainer that writes whole saves of a kind nobody knows and never says that they are complete."""

from trainer import Trainer, main, noise


def train(trainer: Trainer) -> None:
    for n in trainer.numbers:
        (trainer.folder / f"weights-{n}").mkdir()
        trainer.write(trainer.folder / f"weights-{n}" / "part.npy", noise(n))


main(train)
