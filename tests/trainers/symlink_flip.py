"""LeRobot: the save, then the link `last` is unlinked and made again (with a gap)."""

from trainer import Trainer, archive, main


def train(trainer: Trainer) -> None:
    last = trainer.folder / "last"
    for n in trainer.numbers:
        name = f"{n:06d}"
        files = {"pretrained_model/config.json": b"{}", "training_state/optimizer.pt": archive(name)}
        trainer.plan(name, files)
        for path, data in files.items():
            (trainer.folder / name / path).parent.mkdir(parents=True)
            trainer.write(trainer.folder / name / path, data)
        last.unlink(missing_ok=True)
        trainer.step()
        last.symlink_to(name)
        for _ in range(3):
            trainer.step()


main(train)
