"""Megatron: all ranks' files, a barrier, then `latest_checkpointed_iteration.txt`, truncated and written in place."""

from trainer import Trainer, archive, main


def train(trainer: Trainer) -> None:
    for n in trainer.numbers:
        name = f"iter_{n:07d}"
        files = {f"mp_rank_{rank:02d}/model_optim_rng.pt": archive((name, rank)) for rank in range(2)}
        trainer.plan(name, files)
        for path, data in files.items():
            (trainer.folder / name / path).parent.mkdir(parents=True)
            trainer.write(trainer.folder / name / path, data)
        trainer.write(trainer.folder / "latest_checkpointed_iteration.txt", str(n).encode())
        for _ in range(3):
            trainer.step()


main(train)
