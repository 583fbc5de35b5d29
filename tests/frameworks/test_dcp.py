"""torch's Distributed Checkpoint on two ranks: synchronous, asynchronous, over an older save, and killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.frameworks.harness import Finished, Scene, check_published, check_published_after_kill
from tests.frameworks.reference import listing

SEAWEED = pytest.mark.xdist_group("seaweed")


def load(save: Path) -> int:
    """Read every tensor of a save; its step."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = save.with_name("whole.pt")
    dcp_to_torch_save(save, whole)
    state = torch.load(whole, weights_only=True)
    whole.unlink()
    assert state["model"]["0.weight"].shape == (1024, 256)
    assert state["optimizer"]["state"]["0.weight"]["step"] == state["step"]
    return int(state["step"])


def test_every_save_is_published_once_and_comes_back_as_torch_wrote_it(scene: Scene) -> None:
    watch = scene.watch()
    training = scene.train("train_dcp", ranks=2)
    training.finish()
    watch.stop()
    finished = training.finished
    assert [one.save for one in finished] == [f"step-{step}" for step in range(10, 70, 10)]
    check_published(scene.published(), finished, finished)
    for one, step in ((finished[-1], 60), (finished[1], 20)):
        restored = scene.folder / one.save
        assert scene.publish("restore", "--save", one.save, scene.folder).returncode == 0
        assert listing(restored) == one.tree
        assert load(restored) == step


@SEAWEED
def test_an_asynchronous_save_is_published_once_it_is_written(s3_scene: Scene) -> None:
    watch = s3_scene.watch()
    training = s3_scene.train("train_dcp", "--asynchronous", ranks=2)
    training.finish()
    watch.stop()
    finished = training.finished
    assert len(finished) == 6
    check_published(s3_scene.published(), finished, finished)
    restored = s3_scene.restore()
    assert listing(restored) == finished[-1].tree
    assert load(restored) == 60


def test_a_save_over_an_older_one_is_published_as_another(scene: Scene) -> None:
    again = scene.folder / "again"
    watch = scene.watch()
    training = scene.train("train_dcp", "--steps", 20, "--again", again, ranks=2)
    watch.wait_published("step-20")
    again.touch()
    training.finish()
    watch.stop()
    commits, finished = scene.published(), training.finished
    check_published(commits, finished, finished)
    assert [(commit.save, commit.said["generation"]) for commit in commits] == [
        ("step-10", 1),
        ("step-20", 1),
        ("step-20", 2),
    ]
    assert load(scene.restore()) == 21


def train_and_kill(scene: Scene, save: int, seed: int) -> list[Finished]:
    watch = scene.watch()
    training = scene.train("train_dcp", ranks=2)
    in_flight = training.kill_in_save(save, seed)
    watch.stop()
    return check_published_after_kill(scene, training, in_flight, load)


def test_a_killed_run_leaves_nothing_partial_published(scene: Scene) -> None:
    train_and_kill(scene, save=3, seed=6)


def test_a_killed_run_goes_on_from_its_newest_published_save(scene: Scene) -> None:
    finished = train_and_kill(scene, save=4, seed=5)
    scene.next_execution()
    last = load(scene.restore())
    assert finished[-1].save == f"step-{last}"
    watch = scene.watch()
    resumed = scene.train("train_dcp", "--steps", last + 20, ranks=2)
    resumed.finish()
    watch.stop()
    assert resumed.resumed_after == last
    check_published(scene.published(), finished + resumed.finished, resumed.finished)


@pytest.mark.parametrize("seed", [2, 5])
def test_a_kill_while_a_save_is_written_over_publishes_no_mix_of_both(scene: Scene, seed: int) -> None:
    again = scene.folder / "again"
    watch = scene.watch()
    training = scene.train("train_dcp", "--steps", 10, "--again", again, ranks=2)
    watch.wait_published("step-10")
    again.touch()
    training.kill_in_save(2, seed)
    watch.stop()
    first = training.finished[0]
    on_disk = Finished("step-10", listing(scene.saves / "step-10"))
    # The old metadata stays until the new is renamed into its place, which is the last that happens.
    whole = on_disk.tree.get(".metadata") not in {None, first.tree[".metadata"]}
    commits = scene.published()
    assert [commit.finished for commit in commits] == ([first, on_disk] if whole else [first])
    assert load(scene.restore()) == (11 if whole else 10)
