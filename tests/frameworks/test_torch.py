"""Plain torch.save: a file that nothing on disk tells finished from half written, but for the word of the script."""

from __future__ import annotations

import os
from pathlib import Path

from tests.frameworks.harness import Scene, check_published, check_published_after_kill
from tests.frameworks.reference import listing

from dispatch_agent.checkpoint.marks import marker_of


def load(save: Path) -> int:
    """Read a save as a user does; its step."""
    import torch

    state = torch.load(save)
    assert state["model"]["0.weight"].shape == (1024, 256)
    return int(state["step"])


def load_marked(save: Path) -> int:
    """The same of a save that the script called complete, which is what makes it whole."""
    assert marker_of(save.parent, os.fsencode(save.name))
    return load(save)


def test_saves_that_the_script_calls_complete_are_published_once(scene: Scene) -> None:
    watch = scene.watch()
    training = scene.train("train_torch")
    training.finish()
    watch.stop()
    finished = training.finished
    assert [one.save for one in finished] == [f"step-{step}.pt" for step in range(10, 70, 10)]
    check_published(scene.published(), finished, finished)
    restored = scene.restore()
    assert listing(restored) == finished[-1].tree
    assert load(restored) == 60


def test_a_killed_run_goes_on_from_its_newest_published_save(scene: Scene) -> None:
    watch = scene.watch()
    training = scene.train("train_torch")
    in_flight = training.kill_in_save(4, seed=6)
    watch.stop()
    finished = check_published_after_kill(scene, training, in_flight, load_marked)

    scene.next_execution()
    last = load(scene.restore())
    assert finished[-1].save == f"step-{last}.pt"
    watch = scene.watch()
    resumed = scene.train("train_torch", "--steps", last + 20)
    resumed.finish()
    watch.stop()
    assert resumed.resumed_after == last
    check_published(scene.published(), finished + resumed.finished, resumed.finished)
