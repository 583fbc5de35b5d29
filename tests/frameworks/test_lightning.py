"""Lightning's ModelCheckpoint: saves that arrive by a rename or grow in place, and a `last.ckpt` beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.frameworks.harness import HERE, Finished, Scene, check_published, check_published_after_kill, still_there
from tests.frameworks.reference import listing

SEAWEED = pytest.mark.xdist_group("seaweed")


@pytest.fixture(autouse=True)
def _scripts_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


def load(save: Path) -> int:
    """Read a save into the model as a user does; its step."""
    import torch
    from train_lightning import Small

    model = Small.load_from_checkpoint(save, map_location="cpu", weights_only=True)
    assert sum(weights.numel() for weights in model.parameters()) > 500_000
    return int(torch.load(save, weights_only=True)["global_step"])


def check_whole_run(scene: Scene, save_last: str, tmp: Path | None) -> None:
    watch = scene.watch()
    training = scene.train("train_lightning", "--save-last", save_last, tmp=tmp)
    training.finish()
    watch.stop()
    finished = training.finished
    stayed = still_there(scene.saves, finished)
    lasting = [one for one in finished if one.save != "last.ckpt"]
    assert len(lasting) == 6
    assert len(stayed) == (7 if save_last == "copy" else 6)
    check_published(scene.published(), finished, stayed)
    restored = scene.restore()
    assert listing(restored) == finished[-1].tree
    assert load(restored) == 60


def test_saves_that_arrive_by_a_rename_are_published_once(scene: Scene) -> None:
    check_whole_run(scene, "copy", scene.folder)


def test_saves_that_grow_in_place_are_published_when_they_are_whole(scene: Scene, other_filesystem: Path) -> None:
    check_whole_run(scene, "link", other_filesystem)


@SEAWEED
def test_a_last_file_that_grows_in_place_over_itself_is_published_whole(
    s3_scene: Scene, other_filesystem: Path
) -> None:
    check_whole_run(s3_scene, "copy", other_filesystem)


def train_and_kill(scene: Scene, save: int, seed: int, tmp: Path) -> list[Finished]:
    watch = scene.watch()
    training = scene.train("train_lightning", "--save-last", "link", tmp=tmp)
    in_flight = training.kill_in_save(save, seed)
    watch.stop()
    return check_published_after_kill(scene, training, in_flight, load)


def test_a_run_that_is_killed_while_a_save_grows_leaves_nothing_partial_published(
    scene: Scene, other_filesystem: Path
) -> None:
    train_and_kill(scene, save=3, seed=3, tmp=other_filesystem)


def test_a_killed_run_goes_on_from_its_newest_published_save(scene: Scene) -> None:
    finished = train_and_kill(scene, save=5, seed=6, tmp=scene.folder)
    scene.next_execution()
    last = load(scene.restore())
    assert finished[-1].save.endswith(f"step={last}.ckpt")
    watch = scene.watch()
    resumed = scene.train("train_lightning", "--save-last", "copy", "--steps", last + 20, tmp=scene.folder)
    resumed.finish()
    watch.stop()
    assert resumed.resumed_after == last
    check_published(scene.published(), finished + resumed.finished, still_there(scene.saves, resumed.finished))
