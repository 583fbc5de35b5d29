"""What is known about single frameworks' saves: one entry each, from measuring them. Pure.

An entry says what is true of the framework, not what one would wish: `cannot_know` is shown to whoever chooses it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from dispatch_agent.checkpoint.names import shown
from dispatch_agent.checkpoint.save import Entry, Ignored, Settling, Verdict
from dispatch_agent.checkpoint.signals import (
    Decide,
    Look,
    complete,
    lacking,
    not_by_all,
    not_deleted,
    not_fresh,
    not_quiet,
    not_whole,
)

_SHARD = re.compile(rb"__(\d+)_\d+\.distcp")
_RANK_METADATA = re.compile(rb"__(\d+)\.metadata")
_CHECKPOINT_N = re.compile(rb"checkpoint-\d+")
_OF_SHARDS = re.compile(rb"(.+)-(\d{5})-of-(\d{5})(\.safetensors|\.bin)")
_HF_WEIGHTS = (
    b"model.safetensors",
    b"pytorch_model.bin",
    b"adapter_model.safetensors",
    b"adapter_model.bin",
    b"pytorch_model_fsdp.bin",
)
_HF_INDEXES = (b"model.safetensors.index.json", b"pytorch_model.bin.index.json")
# What rank 0 writes before trainer_state.json, always.
_HF_BEFORE = (*_HF_WEIGHTS, *_HF_INDEXES, b"training_args.bin", b"optimizer.pt", b"scheduler.pt")
_HF_OWN = re.compile(rb"trainer_state\.json|training_args\.bin|rng_state(_\d+)?\.pth")


@dataclass(frozen=True, slots=True)
class Preset:
    """One framework. `decide` is None where the entry is not there yet; `settle` its default quiet time in seconds."""

    name: str
    signal: str
    ranks: str
    needs: str
    cannot_know: str
    settle: float = 0.0
    decide: Decide | None = None


def dcp(look: Look) -> Verdict:
    """torch.distributed.checkpoint: rank 0 renames `.metadata` into place after all ranks have written."""
    if look.save.root.kind != "folder":
        return Ignored("a DCP save is a folder")
    return _dcp_shards(look) or not_deleted(look, trust_ctime=True) or _dcp_metadata(look)


def _dcp_shards(look: Look) -> Settling | None:
    ranks = {int(match[1]) for path in look.inside if (match := _SHARD.fullmatch(path))}
    if not ranks:
        return lacking(look, "it has no .distcp file yet")
    if look.expect_ranks is not None and (missing := _missing(ranks, look.expect_ranks)):
        return lacking(look, f"{missing} of {look.expect_ranks} ranks has no __<rank>_<n>.distcp file")
    for path in look.inside:
        if path.endswith(b".metadata.tmp"):
            return lacking(look, f"{shown(path)} is there: the metadata is being written")
    return None


def _dcp_metadata(look: Look) -> Verdict:
    metadata = look.inside.get(b".metadata")
    if metadata is None:
        return _dcp_by_rank(look)
    if metadata.kind != "file" or metadata.size == 0:
        return lacking(look, ".metadata is empty")
    # An overwriting save keeps the old .metadata to the end, beside shards that are already truncated.
    return not_fresh(look, ".metadata", metadata.mtime_ns) or complete(
        look, "dcp", f"{metadata.mtime_ns}.{metadata.size}", ".metadata was written after every shard"
    )


def _dcp_by_rank(look: Look) -> Verdict:
    """Saved with use_collectives=False: every rank has its own metadata, and nothing speaks for all."""
    written = {
        int(match[1]): entry
        for path, entry in look.inside.items()
        if (match := _RANK_METADATA.fullmatch(path)) and entry.kind == "file" and entry.size
    }
    if not written:
        return lacking(look, "no .metadata yet: rank 0 writes it when all ranks are done")
    if look.expect_ranks is None:
        reason = "every rank has its own __<rank>.metadata, so the number of ranks must be known: set --expect-ranks"
        return Settling(reason, stuck=True)
    if missing := _missing(set(written), look.expect_ranks):
        return lacking(look, f"{missing} of {look.expect_ranks} ranks has no __<rank>.metadata")
    for path, entry in look.inside.items():
        shard = _SHARD.fullmatch(path)
        if shard and int(shard[1]) in written and entry.mtime_ns > written[int(shard[1])].mtime_ns:
            return Settling(f"{shown(path)} is newer than its rank's metadata: it is being written again", stuck=True)
    return not_fresh(look, "every rank's metadata", max(entry.mtime_ns for entry in written.values())) or complete(
        look, "dcp", _mark(written), f"all {look.expect_ranks} ranks have written their metadata"
    )


def hf(look: Look) -> Verdict:
    """Hugging Face Trainer: nothing on disk covers all ranks, so what every rank writes is counted, and then quiet."""
    if look.save.root.kind != "folder" or not _CHECKPOINT_N.fullmatch(look.save.name):
        return Ignored("a Trainer's save is a folder named checkpoint-<number>")
    return (
        not_whole(look)
        or _hf_rank_0(look)
        or _hf_ranks(look)
        or not_deleted(look, trust_ctime=False)
        or not_quiet(look, look.settle)
        or complete(look, "hf", "", "trainer_state.json, weights and every rank's state are there and settled")
    )


def _hf_rank_0(look: Look) -> Settling | None:
    """What rank 0 writes, in the one order that is sure: everything else of its own before trainer_state.json."""
    inside = look.inside
    for name in (b"trainer_state.json", b"training_args.bin"):
        if name not in inside or not inside[name].size:
            return lacking(look, f"{name.decode()} is missing or empty")
    if why := _hf_weights(inside):
        return lacking(look, why)
    others = {path for path in inside if path not in _HF_BEFORE}
    return not_fresh(look, "trainer_state.json", inside[b"trainer_state.json"].mtime_ns, but=others)


def _hf_weights(inside: dict[bytes, Entry]) -> str:
    """What the weights lack, in words."""
    shards = [match for path in inside if (match := _OF_SHARDS.fullmatch(path))]
    for match in shards:
        for number in range(1, int(match[3]) + 1):
            expected = b"%b-%05d-of-%b%b" % (match[1], number, match[3], match[4])
            if expected not in inside:
                return f"{shown(expected)} is missing"
    if shards and not any(index in inside for index in _HF_INDEXES):
        return "the index of its weight shards is missing"
    if any(index in inside for index in _HF_INDEXES) and not shards:
        return "the shards of its weight index are missing"
    sharded = any(path.startswith((b"pytorch_model_fsdp_", b"global_step")) for path in inside)
    if not shards and not sharded and not any(name in inside for name in _HF_WEIGHTS):
        return "no model weights yet"
    return ""


def _hf_ranks(look: Look) -> Settling | None:
    """What every rank writes besides. Nothing at all with save_only_model, where rank 0 writes everything."""
    inside = look.inside
    optimizer = any(path.startswith((b"optimizer.", b"optimizer_", b"global_step")) for path in inside)
    rng = {int(path[10:-4]) for path in inside if re.fullmatch(rb"rng_state_\d+\.pth", path)}
    alone = b"rng_state.pth" in inside
    stateful = b"scheduler.pt" in inside or bool(rng) or alone
    if stateful and not optimizer:
        return lacking(look, "it has a scheduler or random states but no optimizer.pt")
    if not optimizer or (alone and look.expect_ranks in {None, 1}):
        return None
    if look.expect_ranks is None:
        reason = "several ranks write into it and nothing on disk says how many: set --expect-ranks"
        return Settling(reason, stuck=True)
    if missing := _missing(rng, look.expect_ranks):
        return lacking(look, f"{missing} of {look.expect_ranks} ranks has no rng_state_<rank>.pth")
    return not_by_all(look)


def lightning(look: Look) -> Verdict:
    """Lightning's single file: moved into place, or grown in place if $TMPDIR is on another filesystem."""
    name = look.save.name
    if not name.endswith(b".ckpt"):
        return Ignored("a Lightning save is named *.ckpt")
    if look.save.root.kind != "file":
        reason = "it is a folder: a sharded Lightning save, for which this version has no rule; use --complete marker"
        return Settling(reason, stuck=True)
    if not look.save.root.size:
        return lacking(look, "it is empty")
    if moving := not_quiet(look, look.settle):
        return moving
    return complete(look, "lightning", "", "a whole file that has settled")


def recognise(look: Look) -> Preset | None:
    """The framework that made this save, if its look leaves no doubt."""
    inside = look.inside
    name = look.save.name
    if look.save.root.kind == "file":
        return PRESETS["lightning"] if name.endswith(b".ckpt") else None
    if _CHECKPOINT_N.fullmatch(name) and any(_HF_OWN.fullmatch(path) for path in inside):
        return PRESETS["hf"]
    # These save through DCP and go on writing after its .metadata: Lightning's meta.pt, Megatron's metadata.json.
    on_top = name.endswith(b".ckpt") or name.startswith(b"iter_") or b"metadata.json" in inside or b"meta.pt" in inside
    if b".metadata" in inside and any(_SHARD.fullmatch(path) for path in inside) and not on_top:
        return PRESETS["dcp"]
    return None


def _missing(have: set[int], ranks: int) -> str:
    missing = [str(rank) for rank in range(ranks) if rank not in have]
    return "" if not missing else f"rank {', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''}"


def _mark(entries: dict[int, Entry]) -> str:
    text = ",".join(f"{rank}.{entry.mtime_ns}.{entry.size}" for rank, entry in sorted(entries.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _later(name: str) -> Preset:
    return Preset(name, "", "", "", "")


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "dcp",
            "`.metadata`, renamed into place after all ranks have written, and no older than any file",
            "all: rank 0 writes it after a gather (with `use_collectives=False` each rank writes its own)",
            "`--expect-ranks` only with `use_collectives=False`; nothing may be written into the folder afterwards",
            "whether the trainer adds files of its own after `.metadata`",
            0.0,
            dcp,
        ),
        Preset(
            "hf",
            "none: `checkpoint-<n>` with `trainer_state.json`, `training_args.bin`, weights, optimizer and every "
            "rank's `rng_state`, then quiet",
            "only those that `--expect-ranks` counts: `trainer_state.json` is rank 0's last file, not the last file",
            "`--expect-ranks` when several processes train; `--settle` longer than the slowest `on_save` callback",
            "files that callbacks add after the quiet time",
            2.0,
            hf,
        ),
        Preset(
            "lightning",
            "none: a `*.ckpt` file that is a whole zip archive, then quiet",
            "rank 0 writes it alone",
            "nothing; `$TMPDIR` on the checkpoint volume makes each save appear whole",
            "sharded saves (folders named `*.ckpt`)",
            1.0,
            lightning,
        ),
        *map(
            _later,
            (
                "accelerate",
                "lightning-sharded",
                "deepspeed",
                "megatron",
                "nemo",
                "orbax",
                "composer",
                "torchsnapshot",
                "torchtitan",
                "tf",
                "keras",
                "lerobot",
            ),
        ),
    )
}
