"""The demo's training job: resumes from what was restored, writes one save per step, says when each is finished.

python demo_job.py STEPS SECONDS_PER_STEP
"""

from __future__ import annotations

import json
import os
import sys
import time

import click

import dispatch_agent


def main(steps: int, pace: float) -> None:
    resumed = dispatch_agent.resume_path()
    first = json.loads((resumed / "state.json").read_text())["step"] + 1 if resumed else 1
    click.echo(
        f"job: epoch {os.environ['DISPATCH_EPOCH']}, " + (f"resumes from {resumed.name}" if resumed else "starts anew")
    )
    for step in range(first, first + steps):
        time.sleep(pace)
        save = dispatch_agent.save_dir() / f"step-{step}"
        save.mkdir()
        (save / "weights.bin").write_bytes(os.urandom(1 << 20))
        (save / "state.json").write_text(json.dumps({"step": step, "attempt": os.environ["DISPATCH_ATTEMPT"]}))
        dispatch_agent.complete(save)
        click.echo(f"job: epoch {os.environ['DISPATCH_EPOCH']}, saved {save.name}")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
