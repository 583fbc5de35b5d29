"""torch.distributed.checkpoint with use_collectives=False, two ranks: each renames its own `__<rank>.metadata`."""

from trainer import Trainer, main, noise


def train(trainer: Trainer) -> None:
    for n in trainer.numbers:
        name = f"step-{n}"
        files = {}
        for rank in range(2):
            files[f"__{rank}_0.distcp"] = noise((name, rank))
            files[f"__{rank}.metadata"] = noise((name, rank, "m"), 300)
        trainer.plan(name, files)
        save = trainer.folder / name
        save.mkdir()
        for rank in range(2):
            trainer.write(save / f"__{rank}_0.distcp", files[f"__{rank}_0.distcp"])
            trainer.write(save / f"__{rank}.metadata.tmp", files[f"__{rank}.metadata"])
            (save / f"__{rank}.metadata.tmp").rename(save / f"__{rank}.metadata")
            trainer.step()


main(train)
