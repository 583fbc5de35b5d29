"""Train on several ranks with plain torch and save with Distributed Checkpoint (DCP). Also the README's example.

Run with torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from reference import Reference, options
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dispatch_agent import resume_path, save_dir


class Training:
    """A small model sharded over the ranks, and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, number: int) -> None:
        """One step on data that the number alone decides."""
        torch.manual_seed(number)
        self.model(torch.randn(8, 256)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, step: int) -> dict[str, Any]:
        """All that a run needs to go on, sharded as the ranks hold it."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, "step": step}

    def load(self, save: Path) -> int:
        """Take over a save; the step it was made after."""
        state = self.state(0)
        dcp.load(state, checkpoint_id=save)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return int(state["step"])


class Saving:
    """`dcp.save` or `dcp.async_save`; in either way at most one save is under way."""

    def __init__(self, reference: Reference, asynchronous: bool) -> None:
        self._reference = reference
        self._asynchronous = asynchronous
        # A group of its own: an asynchronous save speaks to the other ranks while training does.
        self._group = dist.new_group(backend="gloo")
        self._pending: tuple[Future[Any], Path] | None = None

    def save(self, state: dict[str, Any], folder: Path) -> None:
        """Save, or begin to."""
        self.wait()
        self._reference.begin(folder)
        if self._asynchronous:
            self._pending = (dcp.async_save(state, checkpoint_id=folder, process_group=self._group), folder)
        else:
            dcp.save(state, checkpoint_id=folder, process_group=self._group)
            self._reference.finished(folder)

    def wait(self) -> None:
        """Until no save is under way."""
        if self._pending:
            future, folder = self._pending
            self._pending = None
            future.result()
            self._reference.finished(folder)


def main() -> None:
    """Train, save every few steps, and go on from the newest published save if there is one."""
    parser = options(__doc__ or "")
    parser.add_argument("--asynchronous", action="store_true", help="save with async_save, training meanwhile")
    parser.add_argument("--again", type=Path, help="once this file exists, save over the last save, as a rollback does")
    given = parser.parse_args()

    dist.init_process_group("gloo")
    reference = Reference(given.reference, dist.get_rank(), dist.barrier)
    training, saving = Training(), Saving(reference, given.asynchronous)
    out = given.out or save_dir()
    done = 0
    if resume := resume_path():
        done = training.load(resume)
        reference.resumed(done)

    for step in range(done + 1, given.steps + 1):
        training.step(step)
        time.sleep(given.step_seconds)
        if step % given.every == 0:
            saving.save(training.state(step), out / f"step-{step}")
    saving.wait()

    if given.again:
        while dist.get_rank() == 0 and not given.again.exists():
            time.sleep(0.01)
        dist.barrier()
        training.step(given.steps + 1)
        saving.save(training.state(given.steps + 1), out / f"step-{given.steps}")
        saving.wait()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
