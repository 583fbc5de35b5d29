"""Train a small model with Lightning and its ModelCheckpoint. Also the README's example.

Lightning writes a save to $TMPDIR first and moves it: onto the same filesystem a save arrives whole, by a rename, and
from another one it grows under its final name.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from reference import Reference, options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dispatch_agent import resume_path, save_dir


class Small(pl.LightningModule):
    """A few megabytes with its optimizer, so that a save takes a while to write."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        super().__init__()
        self.step_seconds = step_seconds
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(self.step_seconds)
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class RecordedTrainer(pl.Trainer):
    """A Trainer that notes each save once Lightning has returned from it."""

    reference: Reference

    def save_checkpoint(self, filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        self.reference.begin(Path(filepath))
        super().save_checkpoint(filepath, *args, **kwargs)
        self.reference.finished(Path(filepath))


def main() -> None:
    """Train, save every few steps, and go on from the newest published save if there is one."""
    parser = options(__doc__ or "")
    parser.add_argument("--save-last", choices=["no", "copy", "link"], default="no", help="last.ckpt too, and how")
    given = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    checkpoint = ModelCheckpoint(
        dirpath=given.out or save_dir(),
        every_n_train_steps=given.every,
        save_top_k=-1,
        save_last={"no": None, "copy": True, "link": "link"}[given.save_last],
    )
    trainer = RecordedTrainer(
        max_steps=given.steps,
        callbacks=[checkpoint],
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.reference = Reference(given.reference)
    batches = DataLoader(TensorDataset(torch.randn(256, 256)), batch_size=8)

    resume = resume_path()
    if resume:
        # Read by the test alone; Lightning finds its own place.
        trainer.reference.resumed(torch.load(resume, weights_only=True)["global_step"])
    trainer.fit(Small(given.step_seconds), batches, ckpt_path=resume)


if __name__ == "__main__":
    main()
