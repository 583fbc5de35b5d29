"""torch.distributed.checkpoint, four ranks: shards in place (a rank without data leaves an empty one), then
`.metadata.tmp` renamed to `.metadata`."""

from trainer import Trainer, main, noise


def train(trainer: Trainer) -> None:
    for n in trainer.numbers:
        name = f"step-{n}"
        shards = {f"__{rank}_0.distcp": noise((name, rank)) if rank < 2 else b"" for rank in range(4)}
        trainer.plan(name, {**shards, ".metadata": noise(name, 500)})
        save = trainer.folder / name
        save.mkdir()
        for path, data in shards.items():
            trainer.write(save / path, data)
            trainer.step()
        trainer.write(save / ".metadata.tmp", noise(name, 500))
        (save / ".metadata.tmp").rename(save / ".metadata")
        trainer.step()


main(train)
