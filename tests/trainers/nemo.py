"""NeMo: `<name>-unfinished` beside the save before its first and until after its last file, and around deletion."""

import shutil

from trainer import Trainer, archive, main


def train(trainer: Trainer) -> None:
    for n in trainer.numbers:
        name = f"model--step={n}"
        files = {"weights/common.pt": archive(name), "context/io.json": b"{}"}
        trainer.plan(name, files)
        sign = trainer.folder / f"{name}-unfinished"
        sign.touch()
        for path, data in files.items():
            (trainer.folder / name / path).parent.mkdir(parents=True)
            trainer.write(trainer.folder / name / path, data)
            trainer.step()
        sign.unlink()
        trainer.step()
        if n - 2 in trainer.numbers:
            old = trainer.folder / f"model--step={n - 2}"
            sign = trainer.folder / f"{old.name}-unfinished"
            sign.touch()
            (old / "weights" / "common.pt").unlink()
            trainer.step()
            shutil.rmtree(old)
            sign.unlink()


main(train)
