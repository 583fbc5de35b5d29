"""Every key name and every JSON document at the destination, and the order that stands in the names. Pure.

    claims/<epoch>/attempt.json                     who owns the epoch: the attempt alone
    claims/<epoch>/<rank>.<term>.json               which folder publishes for a rank
    data/<epoch>-<attempt>/<save>/<rank>.<nonce>.<try>/…      one part's files, as the framework wrote them
    data/<epoch>-<attempt>/<save>/<rank>.<nonce>.<try>.json   its manifest
    commits/<epoch>/<term>.<ordinal>.<nonce>.json   the truth: the greatest name is the newest
    pruned/<epoch>/<term>.<ordinal>.<nonce>.json    written before a commit's data goes
    latest.json                                     the pointer, moved only forward

Numbers are zero-padded (epoch 20 digits, rank 5, term 4, ordinal and try 6), so byte order is number order.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from dispatch_agent.checkpoint import names
from dispatch_agent.errors import IntegrityError, NewerFormat

FORMAT = 1
POINTER = "latest.json"
COMMITS = "commits"
PRUNED = "pruned"
NONCE_DIGITS = 12

_COMMIT_NAME = re.compile(r"^(\d{4})\.(\d{6})\.([0-9a-f]{12})\.json$")
_FOLDER_CLAIM = re.compile(r"^(\d{5})\.(\d{4})(?:\.([0-9a-f]+))?\.json$")
_EPOCH_NAME = re.compile(r"^\d{20}$")


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


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's files: where they are, and the manifest that lists them.

    `prefix` is the key that every file's path is below. `names` says how: `encoded` for `data/…`, where the path of
    the manifest is the key, `raw` for a save published in place, whose files keep the names their writer gave them
    (`prefix` is then percent-encoded too).
    """

    rank: int
    prefix: str
    names: Literal["encoded", "raw"]
    manifest: str
    manifest_sha256: str
    files: int
    size: int


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A published save. `save` is the percent-encoded raw name; `newest_ns` and `sequence` are its keys of order."""

    order: Order
    attempt: str
    job: str
    folder: str
    save: str
    kind: Literal["file", "folder"]
    generation: int
    content: str
    rule: str
    mark: str
    newest_ns: int
    sequence: int | None
    token: str
    parts: tuple[Part, ...]
    committed_at: str
    publisher: str

    @property
    def key(self) -> str:
        return commit_key(self.order)

    @property
    def size(self) -> int:
        """Bytes of all files of all parts."""
        return sum(part.size for part in self.parts)

    @property
    def files(self) -> int:
        return sum(part.files for part in self.parts)


@dataclass(frozen=True, slots=True)
class Pointer:
    """What `latest.json` says: the newest commit, its digest, and enough to read one key only."""

    order: Order
    commit_sha256: str
    attempt: str
    save: str
    prefix: str
    names: Literal["encoded", "raw"]

    @property
    def commit(self) -> str:
        return commit_key(self.order)


def attempt_claim_key(epoch: int) -> str:
    return f"claims/{epoch:020d}/attempt.json"


def weak_attempt_claim_key(epoch: int, attempt: str) -> str:
    """On a store that cannot refuse: the attempt's hash in the name, so that two never overwrite each other."""
    return f"claims/{epoch:020d}/attempt.{sha256(attempt.encode())[:16]}.json"


def claims_prefix(epoch: int) -> str:
    return f"claims/{epoch:020d}"


def folder_claim_key(epoch: int, rank: int, term: int) -> str:
    return f"claims/{epoch:020d}/{rank:05d}.{term:04d}.json"


def weak_folder_claim_key(epoch: int, rank: int, term: int, folder: str) -> str:
    return f"claims/{epoch:020d}/{rank:05d}.{term:04d}.{folder}.json"


def parse_folder_claim(name: str) -> tuple[int, int] | None:
    """(rank, term) of a folder claim's last component; None for anything else."""
    match = _FOLDER_CLAIM.match(name)
    return (int(match[1]), int(match[2])) if match else None


def commit_key(order: Order) -> str:
    return f"{COMMITS}/{order}.json"


def tombstone_key(order: Order) -> str:
    return f"{PRUNED}/{order}.json"


def parse_commit_key(key: str, folder: str = COMMITS) -> Order | None:
    """The order in a commit's (or tombstone's) key; None for a key that is neither."""
    head, _, rest = key.partition("/")
    epoch, _, name = rest.partition("/")
    match = _COMMIT_NAME.match(name)
    if head != folder or not match or not _EPOCH_NAME.match(epoch):
        return None
    return Order(int(epoch), int(match[1]), int(match[2]), match[3])


def parse_epoch_folder(name: str) -> int | None:
    return int(name) if _EPOCH_NAME.match(name) else None


def part_prefix(epoch: int, attempt: str, save: str, rank: int, nonce: str, try_number: int) -> str:
    return f"data/{epoch:020d}-{attempt}/{save}/{rank:05d}.{nonce}.{try_number:06d}"


def manifest_key(prefix: str) -> str:
    return f"{prefix}.json"


def in_place_prefix(attempt: str, save: str) -> str:
    return f"exec/{attempt}/{save}"


def in_place_manifest_key(epoch: int, attempt: str, save: str, rank: int, nonce: str, try_number: int) -> str:
    return manifest_key(part_prefix(epoch, attempt, save, rank, nonce, try_number))


def file_key(part: Part, path: str, kind: Literal["file", "folder"]) -> str:
    """Where one file of a manifest is. For raw names the key holds the raw bytes, surrogate-escaped."""
    whole = part.prefix if part.names == "raw" and kind == "file" else f"{part.prefix}/{path}"
    return key_of(whole, part.names)


def key_of(path: str, how: Literal["encoded", "raw"]) -> str:
    """The key that an encoded path stands for: itself, or its raw bytes, surrogate-escaped."""
    if how == "encoded":
        return path
    return "/".join(names.decode(piece).decode("utf-8", "surrogateescape") for piece in path.split("/"))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical(document: dict[str, Any]) -> bytes:
    """One document, one byte string: sorted keys, no spaces, ASCII, a newline at the end."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def folder_claim_bytes(folder: str, publisher: str, claimed_at: str) -> bytes:
    return canonical({"format": FORMAT, "folder": folder, "publisher": publisher, "claimed_at": claimed_at})


def folder_of_claim(data: bytes, key: str) -> str:
    """The folder id in a folder claim. Raises IntegrityError."""
    return _text(_document(data, key), "folder", key)


def commit_bytes(record: CommitRecord) -> bytes:
    """The record's bytes. An epoch is a decimal string: the greatest fit neither an int64 nor a JSON number."""
    return canonical(
        {
            "format": FORMAT,
            "epoch": str(record.order.epoch),
            "term": record.order.term,
            "ordinal": record.order.ordinal,
            "nonce": record.order.nonce,
            "attempt": record.attempt,
            "job": record.job,
            "folder": record.folder,
            "save": record.save,
            "kind": record.kind,
            "generation": record.generation,
            "content": record.content,
            "rule": record.rule,
            "mark": record.mark,
            "newest_ns": str(record.newest_ns),
            "sequence": record.sequence,
            "token": record.token,
            "parts": [
                {
                    "rank": part.rank,
                    "prefix": part.prefix,
                    "names": part.names,
                    "manifest": part.manifest,
                    "manifest_sha256": part.manifest_sha256,
                    "files": part.files,
                    "size": part.size,
                }
                for part in record.parts
            ],
            "committed_at": record.committed_at,
            "publisher": record.publisher,
        }
    )


def parse_commit(data: bytes, key: str) -> CommitRecord:
    """Raises IntegrityError: not ours, damaged, of a newer format, or not what its key says."""
    document = _document(data, key)
    order = parse_commit_key(key)
    if order is None:
        msg = f"{key} is not the key of a commit record; the store holds a key that nobody here writes"
        raise IntegrityError(msg)
    sequence = document.get("sequence")
    record = CommitRecord(
        order=Order(
            _decimal(document, "epoch", key),
            _number(document, "term", key),
            _number(document, "ordinal", key),
            _text(document, "nonce", key),
        ),
        attempt=_text(document, "attempt", key),
        job=_text(document, "job", key),
        folder=_text(document, "folder", key),
        save=_name(document, "save", key),
        kind=_kind(document, key),
        generation=_number(document, "generation", key),
        content=_text(document, "content", key),
        rule=_text(document, "rule", key),
        mark=_text(document, "mark", key),
        newest_ns=_decimal(document, "newest_ns", key),
        sequence=None if sequence is None else _number(document, "sequence", key),
        token=_text(document, "token", key),
        parts=tuple(_part(part, key) for part in _list(document, "parts", key)),
        committed_at=_text(document, "committed_at", key),
        publisher=_text(document, "publisher", key),
    )
    if record.order != order:
        msg = f"{key} holds the record of {record.order}: it was copied or renamed; do not trust it"
        raise IntegrityError(msg)
    return record


def pointer_bytes(record: CommitRecord) -> bytes:
    return canonical(
        {
            "format": FORMAT,
            "commit": record.key,
            "commit_sha256": sha256(commit_bytes(record)),
            "epoch": str(record.order.epoch),
            "attempt": record.attempt,
            "save": record.save,
            "prefix": record.parts[0].prefix,
            "names": record.parts[0].names,
        }
    )


def parse_pointer(data: bytes) -> Pointer:
    """Raises IntegrityError."""
    document = _document(data, POINTER)
    order = parse_commit_key(_text(document, "commit", POINTER))
    if order is None:
        msg = f"{POINTER} names {document['commit']!r}, which is no commit record"
        raise IntegrityError(msg)
    return Pointer(
        order=order,
        commit_sha256=_text(document, "commit_sha256", POINTER),
        attempt=_text(document, "attempt", POINTER),
        save=_name(document, "save", POINTER),
        prefix=_inside(_text(document, "prefix", POINTER), POINTER),
        names=_how(document, POINTER),
    )


def _document(data: bytes, key: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError as error:
        msg = f"{key} is not JSON ({error}); it is damaged or not ours"
        raise IntegrityError(msg) from error
    if not isinstance(document, dict):
        msg = f"{key} holds {type(document).__name__} where an object is expected; it is not ours"
        raise IntegrityError(msg)
    version = document.get("format")
    if type(version) is int and version > FORMAT:
        msg = f"{key} has format {version}, this version of dispatch-agent reads {FORMAT}: use a newer one"
        raise NewerFormat(msg)
    if type(version) is not int or version != FORMAT:
        msg = f"{key} has format {version!r} where {FORMAT} is expected; it is damaged or not ours"
        raise IntegrityError(msg)
    return document


def _field(document: dict[str, Any], field: str, key: str, kind: type, what: str) -> Any:
    value = document.get(field)
    if not isinstance(value, kind) or isinstance(value, bool):
        msg = f"{key} has {field}={value!r} where {what} is expected; it is damaged or not ours"
        raise IntegrityError(msg)
    return value


def _text(document: dict[str, Any], field: str, key: str) -> str:
    return str(_field(document, field, key, str, "a text"))


def _name(document: dict[str, Any], field: str, key: str) -> str:
    text = _text(document, field, key)
    try:
        names.decode_name(text)
    except ValueError as error:
        msg = f"{key} has {field}={text!r}, which is no encoded name ({error})"
        raise IntegrityError(msg) from error
    return text


def _number(document: dict[str, Any], field: str, key: str) -> int:
    return int(_field(document, field, key, int, "a whole number"))


def _decimal(document: dict[str, Any], field: str, key: str) -> int:
    text = _text(document, field, key)
    if not re.fullmatch(r"-?\d{1,20}", text, re.ASCII):
        msg = f"{key} has {field}={text!r} where a decimal is expected; it is damaged or not ours"
        raise IntegrityError(msg)
    return int(text)


def _kind(document: dict[str, Any], key: str) -> Literal["file", "folder"]:
    kind = document.get("kind")
    if kind == "file":
        return "file"
    if kind == "folder":
        return "folder"
    msg = f"{key} has kind={kind!r} where file or folder is expected; it is damaged or not ours"
    raise IntegrityError(msg)


def _how(document: dict[str, Any], key: str) -> Literal["encoded", "raw"]:
    how = document.get("names")
    if how == "encoded":
        return "encoded"
    if how == "raw":
        return "raw"
    msg = f"{key} has names={how!r} where encoded or raw is expected; use a newer dispatch-agent"
    raise IntegrityError(msg)


def _list(document: dict[str, Any], field: str, key: str) -> list[Any]:
    value = _field(document, field, key, list, "a list")
    if not value:
        msg = f"{key} has no {field}; it is damaged or not ours"
        raise IntegrityError(msg)
    return list(value)


def _part(document: Any, key: str) -> Part:
    if not isinstance(document, dict):
        msg = f"{key} has a part that is {document!r} where an object is expected"
        raise IntegrityError(msg)
    return Part(
        rank=_number(document, "rank", key),
        prefix=_inside(_text(document, "prefix", key), key),
        names=_how(document, key),
        manifest=_inside(_text(document, "manifest", key), key),
        manifest_sha256=_text(document, "manifest_sha256", key),
        files=_number(document, "files", key),
        size=_number(document, "size", key),
    )


def _inside(path: str, key: str) -> str:
    if any(piece in ("", ".", "..") for piece in path.split("/")):
        msg = f"{key} names {path!r}, which leaves the store; do not trust it"
        raise IntegrityError(msg)
    return path
