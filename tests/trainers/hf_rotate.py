"""Hugging Face Trainer with save_total_limit=1: the previous checkpoint goes right after the new one is there."""

from hf_files import files_of, rank_0, rotate
from trainer import Trainer, main


def train(trainer: Trainer) -> None:
    for n in trainer.numbers:
        name = f"checkpoint-{n}"
        files = files_of(name, 1)
        trainer.plan(name, files)
        for _ in range(10):
            trainer.step()
        rank_0(trainer, name, files)
        if n > trainer.numbers[0]:
            rotate(trainer, f"checkpoint-{n - 1}")


main(train)
