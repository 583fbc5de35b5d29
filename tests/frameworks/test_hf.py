"""The Hugging Face Trainer: it rotates old saves away, and no file of it says that every rank has written its part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.frameworks.harness import Finished, Scene, check_published, check_published_after_kill, still_there
from tests.frameworks.reference import listing

SEAWEED = pytest.mark.xdist_group("seaweed")
TWO_RANKS = ("--expect-ranks", 2, "--settle", 0.5)


def load(save: Path) -> int:
    """Read the model as a user does, and everything else that the Trainer needs to go on; the step."""
    import torch
    from transformers import LlamaForCausalLM

    assert LlamaForCausalLM.from_pretrained(save).config.hidden_size == 128
    for path in [save / "optimizer.pt", save / "scheduler.pt", *save.glob("rng_state*.pth")]:
        torch.load(path, weights_only=False)
    torch.load(save / "training_args.bin", weights_only=False)
    return int(json.loads((save / "trainer_state.json").read_text())["global_step"])


@SEAWEED
def test_one_rank_needs_no_option(s3_scene: Scene) -> None:
    watch = s3_scene.watch()
    training = s3_scene.train("train_hf", "--steps", 40)
    training.finish()
    watch.stop()
    finished = training.finished
    stayed = still_there(s3_scene.saves, finished)
    assert [one.save for one in stayed] == ["checkpoint-30", "checkpoint-40"]
    check_published(s3_scene.published(), finished, stayed)
    restored = s3_scene.restore()
    assert listing(restored) == finished[-1].tree
    assert load(restored) == 40


def test_a_slow_rank_is_waited_for(scene: Scene) -> None:
    watch = scene.watch(*TWO_RANKS)
    # The other rank's file comes later than the settle time after what looks like the last file.
    training = scene.train("train_hf", "--steps", 40, "--late-seconds", 1.5, ranks=2)
    training.finish()
    watch.stop()
    finished = training.finished
    assert all({"trainer_state.json", "rng_state_0.pth", "rng_state_1.pth"} <= one.tree.keys() for one in finished)
    stayed = still_there(scene.saves, finished)
    assert [one.save for one in stayed] == ["checkpoint-30", "checkpoint-40"]
    check_published(scene.published(), finished, stayed)
    restored = scene.restore()
    assert listing(restored) == finished[-1].tree
    assert load(restored) == 40


def test_several_ranks_that_nobody_announced_are_not_published_but_reported(scene: Scene) -> None:
    watch = scene.watch()
    training = scene.train("train_hf", "--steps", 10, ranks=2)
    training.finish()
    watch.stop()
    assert scene.published() == []
    assert any("--expect-ranks" in event["reason"] for event in watch.events("waiting"))

    watch = scene.watch(*TWO_RANKS)
    watch.wait_published("checkpoint-10")
    watch.stop()
    check_published(scene.published(), training.finished, training.finished)


def train_and_kill(scene: Scene, save: int, seed: int) -> list[Finished]:
    watch = scene.watch(*TWO_RANKS)
    training = scene.train("train_hf", "--late-seconds", 0.3, ranks=2)
    in_flight = training.kill_in_save(save, seed)
    watch.stop()
    return check_published_after_kill(scene, training, in_flight, load)


def test_a_killed_run_leaves_nothing_partial_published(scene: Scene) -> None:
    train_and_kill(scene, save=2, seed=1)


def test_a_killed_run_goes_on_from_its_newest_published_save(scene: Scene) -> None:
    finished = train_and_kill(scene, save=3, seed=2)
    scene.next_execution()
    last = load(scene.restore())
    assert finished[-1].save == f"checkpoint-{last}"
    watch = scene.watch(*TWO_RANKS)
    resumed = scene.train("train_hf", "--steps", last + 10, ranks=2)
    resumed.finish()
    watch.stop()
    assert resumed.resumed_after == last
    check_published(scene.published(), finished + resumed.finished, resumed.finished)
