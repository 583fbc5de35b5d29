"""Hugging Face Trainer, two ranks: rank 1's random state lands well after rank 0's last file."""

from hf_files import files_of, rank_0, slow_ranks
from trainer import Trainer, main


def train(trainer: Trainer) -> None:
    for n in trainer.numbers:
        name = f"checkpoint-{n}"
        files = files_of(name, 2)
        trainer.plan(name, files)
        rank_0(trainer, name, files)
        slow_ranks(trainer, name, files, pauses=10)


main(train)
