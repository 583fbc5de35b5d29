"""Every key name at the destination, and the order of commits that stands in the names. Pure.

    claims/<epoch>/attempt.json                     who owns the epoch: the attempt alone
    claims/<epoch>/<rank>.<term>.json               which folder publishes for a rank
    data/<epoch>-<attempt>/<save>/<rank>.<nonce>.<try>/…      one part's files, as the framework wrote them
    data/<epoch>-<attempt>/<save>/<rank>.<nonce>.<try>.json   its manifest
    commits/<epoch>/<term>.<ordinal>.<nonce>.json   the truth: the greatest name is the newest
    pruned/<epoch>/<term>.<ordinal>.<nonce>.json    tombstone: written before a commit's data goes
    pruned/<epoch>/sealed.json                      no data of this epoch is safe without a commit any more
    latest.json                                     the pointer, moved only forward

Numbers are zero-padded (epoch 20 digits, rank 5, term 4, ordinal and try 6), so byte order is number order.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

from dispatch_agent.checkpoint import names

POINTER = "latest.json"
CLAIMS = "claims"
COMMITS = "commits"
DATA = "data"
PRUNED = "pruned"

_COMMIT_NAME = re.compile(r"([0-9]{4})\.([0-9]{6})\.([0-9a-f]{12})\.json")
_FOLDER_CLAIM = re.compile(r"([0-9]{5})\.([0-9]{4})(?:\.([0-9a-f]+))?\.json")
_RESUME = re.compile(r"resume\.([0-9]+)\.json")
_EPOCH_NAME = re.compile(r"[0-9]{20}")
_PART = re.compile(r"(data/[0-9]{20}-[^/]+/[^/]+/[0-9]{5}\.[0-9a-f]{12}\.[0-9]{6})(?:\.json|/.+)", re.DOTALL)
_DATA_EPOCH = re.compile(r"data/([0-9]{20})-")


@dataclass(frozen=True, slots=True, order=True)
class Order:
    """The place of a commit among all: compared as (epoch, term, ordinal), then nonce, which only breaks ties."""

    epoch: int
    term: int
    ordinal: int
    nonce: str

    @property
    def place(self) -> tuple[int, int, int]:
        """What two publishers of one folder have in common for one generation of one save."""
        return (self.epoch, self.term, self.ordinal)

    def __str__(self) -> str:
        return f"{self.epoch:020d}/{self.term:04d}.{self.ordinal:06d}.{self.nonce}"


def attempt_claim_key(epoch: int) -> str:
    return f"claims/{epoch:020d}/attempt.json"


def weak_attempt_claim_key(epoch: int, attempt: str) -> str:
    """On a store that cannot refuse: the attempt's hash in the name, so that two never overwrite each other."""
    return f"claims/{epoch:020d}/attempt.{hashlib.sha256(attempt.encode()).hexdigest()[:16]}.json"


def claims_prefix(epoch: int) -> str:
    return f"claims/{epoch:020d}"


def folder_claim_key(epoch: int, rank: int, term: int) -> str:
    return f"claims/{epoch:020d}/{rank:05d}.{term:04d}.json"


def weak_folder_claim_key(epoch: int, rank: int, term: int, folder: str) -> str:
    return f"claims/{epoch:020d}/{rank:05d}.{term:04d}.{folder}.json"


def parse_folder_claim(name: str) -> tuple[int, int] | None:
    """(rank, term) of a folder claim's last component; None for anything else."""
    match = _FOLDER_CLAIM.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def is_resume_claim(name: str) -> bool:
    """Whether a claim's last component is what the ranks of an execution agreed to resume from."""
    return _RESUME.fullmatch(name) is not None


def commit_key(order: Order) -> str:
    return f"{COMMITS}/{order}.json"


def tombstone_key(order: Order) -> str:
    return f"{PRUNED}/{order}.json"


def seal_key(epoch: int) -> str:
    return f"{PRUNED}/{epoch:020d}/sealed.json"


def parse_commit_key(key: str, folder: str = COMMITS) -> Order | None:
    """The order in a commit's (or tombstone's) key; None for a key that is neither."""
    head, _, rest = key.partition("/")
    epoch, _, name = rest.partition("/")
    match = _COMMIT_NAME.fullmatch(name)
    if head != folder or not match or not _EPOCH_NAME.fullmatch(epoch):
        return None
    return Order(int(epoch), int(match[1]), int(match[2]), match[3])


def parse_epoch_folder(name: str) -> int | None:
    return int(name) if _EPOCH_NAME.fullmatch(name) else None


def part_prefix(epoch: int, attempt: str, save: str, rank: int, nonce: str, try_number: int) -> str:
    return f"data/{epoch:020d}-{attempt}/{save}/{rank:05d}.{nonce}.{try_number:06d}"


def manifest_key(prefix: str) -> str:
    return f"{prefix}.json"


def part_of(key: str) -> str | None:
    """The prefix of the part that a file or a manifest below `data/` belongs to; None for a key that is neither."""
    match = _PART.fullmatch(key)
    return match[1] if match else None


def is_manifest(key: str) -> bool:
    """Of a key that belongs to a part: whether it is its manifest."""
    return part_of(key) == key.removesuffix(".json")


def nonce_of_part(prefix: str) -> str:
    return prefix.split(".")[-2]


def epoch_of_data(key: str) -> int | None:
    """The epoch in anything below `data/`; None where there is none."""
    match = _DATA_EPOCH.match(key)
    return int(match[1]) if match else None


def in_place_prefix(attempt: str, save: str) -> str:
    return f"exec/{attempt}/{save}"


def key_of(path: str, how: Literal["encoded", "raw"]) -> str:
    """The key that an encoded path stands for: itself, or its raw bytes, surrogate-escaped."""
    if how == "encoded":
        return path
    return "/".join(names.decode(piece).decode("utf-8", "surrogateescape") for piece in path.split("/"))
