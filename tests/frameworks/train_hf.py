"""Train a small language model with the Hugging Face Trainer, on one rank or several. Also the README's example.

The model is made from a configuration with random weights: nothing is downloaded.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reference import Reference, options
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from dispatch_agent import resume_path, save_dir


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sentences, the same in every run."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 256, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Recorded(TrainerCallback):
    """Paces the steps, and notes each save once every rank has returned from it."""

    def __init__(self, reference: Reference, step_seconds: float) -> None:
        self._reference = reference
        self._step_seconds = step_seconds

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        time.sleep(self._step_seconds)
        if state.global_step % state.save_steps == 0:
            self._reference.begin(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        self._reference.finished(Path(args.output_dir) / f"checkpoint-{state.global_step}")


class UnevenTrainer(Trainer):
    """A Trainer whose other ranks are slow to save, as a busy node's are."""

    late_seconds = 0.0

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.process_index > 0:
            time.sleep(self.late_seconds)
        super()._save_rng_state(output_dir)


def main() -> None:
    """Train, save every few steps, and go on from the newest published save if there is one."""
    parser = options(__doc__ or "")
    parser.add_argument("--late-seconds", type=float, default=0.0, help="how much later the other ranks save")
    parser.add_argument("--keep", type=int, default=2, help="save_total_limit")
    given = parser.parse_args()

    arguments = TrainingArguments(
        output_dir=given.out or save_dir(),
        max_steps=given.steps,
        save_steps=given.every,
        save_total_limit=given.keep,
        per_device_train_batch_size=2,
        use_cpu=True,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
    )
    trainer = UnevenTrainer(model=LlamaForCausalLM(shape), args=arguments, train_dataset=Tokens())
    trainer.late_seconds = given.late_seconds
    barrier = dist.barrier if dist.is_initialized() else lambda: None
    reference = Reference(given.reference, arguments.process_index, barrier)
    trainer.add_callback(Recorded(reference, given.step_seconds))

    resume = resume_path()
    if resume:
        reference.resumed(TrainerState.load_from_json(str(resume / "trainer_state.json")).global_step)
    trainer.train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    main()
