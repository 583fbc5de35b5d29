"""torch.distributed.checkpoint saving over one folder again and again: the old `.metadata` stays to the end while
shards are truncated and written, is unlinked, and the new one is renamed in."""

from trainer import Trainer, main, noise


def train(trainer: Trainer) -> None:
    save = trainer.folder / "last"
    save.mkdir(exist_ok=True)
    for n in trainer.numbers:
        shards = {f"__{rank}_0.distcp": noise((n, rank)) for rank in range(2)}
        trainer.plan("last", {**shards, ".metadata": noise(n, 500)})
        for path, data in shards.items():
            trainer.write(save / path, data)
        trainer.write(save / ".metadata.tmp", noise(n, 500))
        (save / ".metadata").unlink(missing_ok=True)
        (save / ".metadata.tmp").rename(save / ".metadata")
        for _ in range(4):
            trainer.step()


main(train)
