"""Train with plain torch in one process and save with `torch.save`. Also the README's example.

Nothing on disk says when such a save is finished, so the script says it: `complete(path)`.
"""

from __future__ import annotations

import time

import torch
from reference import Reference, options
from torch import nn

from dispatch_agent import complete, resume_path, save_dir


def main() -> None:
    """Train, save every few steps, and go on from the newest published save if there is one."""
    given = options(__doc__ or "").parse_args()
    reference = Reference(given.reference)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    out = given.out or save_dir()
    done = 0
    if resume := resume_path():
        state = torch.load(resume)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
        reference.resumed(done)

    for step in range(done + 1, given.steps + 1):
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(given.step_seconds)
        if step % given.every == 0:
            path = out / f"step-{step}.pt"
            reference.begin(path)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
            complete(path)
            reference.finished(path)


if __name__ == "__main__":
    main()
