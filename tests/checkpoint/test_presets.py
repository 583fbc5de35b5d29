"""The presets: what was measured of DCP, the Hugging Face Trainer and Lightning, and what is not complete of theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dispatch_agent.checkpoint.completion import parse_rule
from dispatch_agent.checkpoint.save import Complete, Ignored, Settling, Snapshot, Survey, Verdict

LONG = 10_000.0
Built = Callable[..., Snapshot]
DCP = {"__0_0.distcp": 4, "__1_0.distcp": (4, 0), ".metadata": 5}
HF = {
    "config.json": 1,
    "model.safetensors": 2,
    "training_args.bin": 3,
    "optimizer.pt": 4,
    "scheduler.pt": 5,
    "rng_state.pth": 6,
    "trainer_state.json": 7,
}
MANY = {**{path: at for path, at in HF.items() if path != "rng_state.pth"}, "rng_state_0.pth": 6, "rng_state_1.pth": 9}


def judge(rule: str, save: Snapshot, *beside: Snapshot, quiet: float = LONG, ranks: int | None = None) -> Verdict:
    return parse_rule(rule, expect_ranks=ranks).judge(save, Survey((save, *beside)), quiet)


def says(verdict: Verdict, *words: str) -> Settling:
    assert isinstance(verdict, Settling), verdict
    assert all(word in verdict.reason for word in words), verdict.reason
    return verdict


def without(files: dict[str, int], *paths: str) -> dict[str, int]:
    return {path: at for path, at in files.items() if path not in paths}


# dcp


def test_dcp_is_complete_at_once_with_empty_shards(built: Built) -> None:
    verdict = judge("dcp", built("s", DCP), quiet=0.0)
    assert isinstance(verdict, Complete)
    assert verdict.signal.mark


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"__0_0.distcp": 4}, "no .metadata yet"),
        ({".metadata": 5}, "no .distcp"),
        ({**DCP, ".metadata": (5, 0)}, ".metadata is empty"),
        ({**DCP, ".metadata.tmp": 5}, ".metadata.tmp is there"),
        ({**DCP, "__0_0.distcp": 6}, "__0_0.distcp is newer than .metadata"),
        ({**DCP, "__1_0.distcp": (6, 0)}, "__1_0.distcp is newer than .metadata"),
        ({**DCP, "train_state.json": 6}, "train_state.json is newer than .metadata"),
    ],
)
def test_dcp_that_is_not_finished_or_is_being_written_over_is_not_complete(
    built: Built, files: dict[str, int], words: str
) -> None:
    says(judge("dcp", built("s", files)), words)


def test_dcp_counts_ranks_if_it_is_told_how_many(built: Built) -> None:
    assert isinstance(judge("dcp", built("s", DCP), ranks=2), Complete)
    says(judge("dcp", built("s", DCP), ranks=4), "rank 2, 3 of 4")


def test_dcp_saved_again_is_another_signal(built: Built) -> None:
    marks = set()
    for at in (5, 8):
        verdict = judge("dcp", built("s", {"__0_0.distcp": at - 1, ".metadata": at}))
        assert isinstance(verdict, Complete)
        marks.add(verdict.signal.mark)
    assert len(marks) == 2


def test_dcp_with_a_metadata_per_rank_needs_the_number_of_ranks(built: Built) -> None:
    files = {"__0_0.distcp": 4, "__0.metadata": 5, "__1_0.distcp": 6, "__1.metadata": 7}
    assert says(judge("dcp", built("s", files)), "--expect-ranks").stuck
    assert isinstance(judge("dcp", built("s", files), ranks=2), Complete)
    says(judge("dcp", built("s", without(files, "__1.metadata")), ranks=2), "rank 1 of 2")
    says(judge("dcp", built("s", {**files, "__1.metadata.tmp": 7}), ranks=2), "__1.metadata.tmp")
    says(judge("dcp", built("s", {**files, "__0_0.distcp": 6}), ranks=2), "__0_0.distcp is newer than its rank's")


def test_dcp_that_is_being_purged_is_not_complete(built: Built) -> None:
    old, new = built("s-1", without(DCP, "__0_0.distcp"), folder_at=9), built("s-2", {"__0_0.distcp": 9})
    says(judge("dcp", old, new), "being deleted")


def test_dcp_is_a_folder(built: Built) -> None:
    assert isinstance(judge("dcp", built("s.distcp")), Ignored)


# hf


def test_a_single_process_trainer_needs_no_option(built: Built) -> None:
    for rule in ("hf", "auto"):
        verdict = judge(rule, built("checkpoint-5", HF), quiet=2.0)
        assert isinstance(verdict, Complete)
        assert verdict.signal.mark == ""
        assert says(judge(rule, built("checkpoint-5", HF), quiet=1.5), "counts as settled").again_in == 0.5


def test_several_ranks_without_their_number_ask_for_it(built: Built) -> None:
    for rule in ("hf", "auto"):
        assert says(judge(rule, built("checkpoint-5", MANY)), "--expect-ranks").stuck


def test_every_rank_that_is_expected_must_have_written(built: Built) -> None:
    assert isinstance(judge("hf", built("checkpoint-5", MANY), ranks=2), Complete)
    says(judge("hf", built("checkpoint-5", without(MANY, "rng_state_1.pth")), ranks=2), "rank 1 of 2")
    says(judge("hf", built("checkpoint-5", MANY), ranks=8), "rank 2, 3, 4, 5, 6 and more of 8")
    says(judge("hf", built("checkpoint-5", HF), ranks=2), "rank 0, 1 of 2")


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("trainer_state.json", "trainer_state.json is missing"),
        ("training_args.bin", "training_args.bin is missing"),
        ("model.safetensors", "no model weights"),
        ("optimizer.pt", "no optimizer.pt"),
    ],
)
def test_a_trainer_s_save_without_one_of_its_files_is_not_complete(built: Built, gone: str, words: str) -> None:
    says(judge("hf", built("checkpoint-5", without(HF, gone))), words)


@pytest.mark.parametrize(
    "weights",
    [
        {"pytorch_model.bin": 2},
        {"adapter_model.safetensors": 2},
        {
            "model-00001-of-00002.safetensors": 2,
            "model-00002-of-00002.safetensors": 2,
            "model.safetensors.index.json": 2,
        },
        {"pytorch_model_fsdp_0/__0_0.distcp": 2, "pytorch_model_fsdp_0/.metadata": 2},
        {"global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt": 2, "latest": 2},
    ],
)
def test_all_kinds_of_weights_are_known(built: Built, weights: dict[str, int]) -> None:
    assert isinstance(judge("hf", built("checkpoint-5", {**without(HF, "model.safetensors"), **weights})), Complete)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (
            {"model-00001-of-00002.safetensors": 2, "model.safetensors.index.json": 2},
            "model-00002-of-00002.safetensors is missing",
        ),
        ({"model-00001-of-00001.safetensors": 2}, "index of its weight shards"),
        ({"model.safetensors.index.json": 2}, "shards of its weight index"),
    ],
)
def test_a_shard_that_is_missing_is_named(built: Built, weights: dict[str, int], words: str) -> None:
    says(judge("hf", built("checkpoint-5", {**without(HF, "model.safetensors"), **weights})), words)


def test_save_only_model_is_complete_without_optimizer_or_random_state(built: Built) -> None:
    files = without(HF, "optimizer.pt", "scheduler.pt", "rng_state.pth")
    assert isinstance(judge("hf", built("checkpoint-5", files)), Complete)
    assert isinstance(judge("hf", built("checkpoint-5", files), ranks=8), Complete)


def test_weights_newer_than_the_trainer_s_state_are_a_save_being_written_again(built: Built) -> None:
    verdict = judge("hf", built("checkpoint-5", {**HF, "model.safetensors": 8}))
    assert says(verdict, "model.safetensors is newer than trainer_state.json").stuck
    assert isinstance(judge("hf", built("checkpoint-5", {**HF, "README.md": 8})), Complete)


@pytest.mark.parametrize("name", ["checkpoint-is-incomplete.txt", ".tmpAb1", "sub/x.tmp"])
def test_a_trainer_s_save_with_an_unfinished_thing_in_it_is_not_complete(built: Built, name: str) -> None:
    says(judge("hf", built("checkpoint-5", {**HF, name: 7})), name)


@pytest.mark.parametrize("name", ["checkpoint-5-tmp", "checkpoint-", "checkpoint-x", "runs", "best"])
def test_other_folders_are_no_trainer_s_saves(built: Built, name: str) -> None:
    assert isinstance(judge("hf", built(name, HF)), Ignored)
    assert isinstance(judge("hf", built("model.safetensors")), Ignored)


def test_rotation_caught_half_way_is_not_complete_in_any_order_of_deletion(built: Built) -> None:
    new = built("checkpoint-6", {path: at + 10 for path, at in HF.items()})
    whole = built("checkpoint-5", HF)
    assert isinstance(judge("hf", whole, new), Complete)
    for path in HF:
        left = built("checkpoint-5", without(HF, path), folder_at=20)
        assert isinstance(judge("hf", left, new), Settling)


def test_the_newest_save_from_which_the_trainer_removed_its_own_sign_is_complete(built: Built) -> None:
    # HF's JIT checkpoint removes checkpoint-is-incomplete.txt as its last act.
    jit = built("checkpoint-6", HF, folder_at=20)
    assert isinstance(judge("hf", jit, built("checkpoint-5", dict.fromkeys(HF, 1))), Complete)


# lightning


def test_lightning_is_one_file_that_has_settled(built: Built) -> None:
    for rule in ("lightning", "auto"):
        verdict = judge(rule, built("epoch=1-step=10.ckpt", at=5), quiet=2.0)
        assert isinstance(verdict, Complete)
        assert verdict.signal.mark == ""
    assert says(judge("lightning", built("e.ckpt"), quiet=0.25), "settled after 1 s").again_in == 0.75
    says(judge("lightning", built("e.ckpt", size=0)), "empty")


def test_what_is_no_lightning_file_is_told_apart(built: Built) -> None:
    assert isinstance(judge("lightning", built("hparams.yaml")), Ignored)
    assert isinstance(judge("lightning", built("e.tmp.ckpt")), Ignored)
    assert says(judge("lightning", built("e.ckpt", {"meta.pt": 1})), "sharded Lightning").stuck
