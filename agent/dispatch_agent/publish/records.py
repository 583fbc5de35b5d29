"""Every JSON document at the destination: strict to read, one byte string to write. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from dispatch_agent.checkpoint import names
from dispatch_agent.checkpoint.save import Signal
from dispatch_agent.errors import IntegrityError, NewerFormat
from dispatch_agent.publish import keys
from dispatch_agent.publish.keys import Order
from dispatch_agent.store import keys as store_keys

FORMAT = 1
GREATEST = 2**63 - 1


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

    @property
    def data(self) -> str:
        """The key prefix that this part's try alone has; its manifest is below `data/` also where its files are not."""
        return self.manifest.removesuffix(".json")


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
        return keys.commit_key(self.order)

    @property
    def signal(self) -> Signal:
        """What said that the save was complete: with it the record is of one place of its folder."""
        return Signal(self.rule, self.mark, self.newest_ns, self.sequence, self.token)

    @property
    def in_place(self) -> bool:
        """Whether it names the trainer's own files."""
        return any(part.names == "raw" for part in self.parts)

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
        return keys.commit_key(self.order)


def file_key(part: Part, path: str, kind: Literal["file", "folder"]) -> str:
    """Where one file of a manifest is. For raw names the key holds the raw bytes, surrogate-escaped."""
    whole = part.prefix if part.names == "raw" and kind == "file" else f"{part.prefix}/{path}"
    return keys.key_of(whole, part.names)


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
    order = keys.parse_commit_key(key)
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
    document = _document(data, keys.POINTER)
    order = keys.parse_commit_key(_text(document, "commit", keys.POINTER))
    if order is None:
        msg = f"{keys.POINTER} names {document['commit']!r}, which is no commit record"
        raise IntegrityError(msg)
    return Pointer(
        order=order,
        commit_sha256=_text(document, "commit_sha256", keys.POINTER),
        attempt=_text(document, "attempt", keys.POINTER),
        save=_name(document, "save", keys.POINTER),
        prefix=_inside(_text(document, "prefix", keys.POINTER), keys.POINTER),
        names=_how(document, keys.POINTER),
    )


def tombstone_bytes(order: Order, pruned_by: str, pruned_at: str) -> bytes:
    """Who pruned a commit, and when; for people."""
    return canonical(
        {"format": FORMAT, "commit": keys.commit_key(order), "pruned_by": pruned_by, "pruned_at": pruned_at}
    )


def seal_bytes(epoch: int, sealed_by: str, sealed_at: str) -> bytes:
    """Who sealed an epoch, and when; for people."""
    return canonical({"format": FORMAT, "epoch": str(epoch), "sealed_by": sealed_by, "sealed_at": sealed_at})


def resume_choice(data: bytes, key: str) -> Order | None:
    """The commit that the ranks of an execution agreed to resume from; None: from nothing. Raises IntegrityError."""
    commit = _document(data, key).get("commit")
    order = keys.parse_commit_key(commit) if isinstance(commit, str) else None
    if order is None and commit is not None:
        msg = f"{key} has commit={commit!r}, which is no commit record; it is damaged or not ours"
        raise IntegrityError(msg)
    return order


def _document(data: bytes, key: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
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
    number = int(_field(document, field, key, int, "a whole number"))
    if not 0 <= number <= GREATEST:
        msg = f"{key} has {field}={str(number)[:40]}, which nobody counts to; it is damaged or not ours"
        raise IntegrityError(msg)
    return number


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
    try:
        store_keys.split_prefix(path)
    except ValueError as error:
        msg = f"{key} names {path[:300]!r}, which is no key within the store ({error}); do not trust it"
        raise IntegrityError(msg) from error
    if not path.isascii() or not path:
        msg = f"{key} names {path[:300]!r}, which is no encoded key; do not trust it"
        raise IntegrityError(msg)
    return path
