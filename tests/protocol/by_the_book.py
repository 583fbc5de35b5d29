"""A publisher and a reader written from docs/protocol.md alone, for a plain folder: nothing of the product is in it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any


class Fenced(Exception):
    pass


def spelled(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def create(store: Path, key: str, data: bytes) -> None:
    """Conditional create on a local folder: complete content under another name, then link(2)."""
    (store / key).parent.mkdir(parents=True, exist_ok=True)
    draft = store / f"draft-{secrets.token_hex(8)}"
    draft.write_bytes(data)
    try:
        os.link(draft, store / key)
    except FileExistsError:
        if (store / key).read_bytes() != data:
            raise
    finally:
        draft.unlink()


def epochs(store: Path) -> list[int]:
    return sorted(int(folder.name) for folder in (store / "commits").glob("*"))


def publish(
    store: Path, epoch: int, attempt: str, folder: str, ordinal: int, save: str, files: dict[str, bytes], nonce: str
) -> str:
    """Publish one save of one folder, whose publisher start has this nonce. The key of its commit."""
    number = f"{epoch:020d}"
    create(store, f"claims/{number}/attempt.json", attempt.encode())
    term = 1
    while (claim := store / f"claims/{number}/00000.{term:04d}.json").exists():
        if json.loads(claim.read_bytes())["folder"] == folder:
            break
        term += 1
    else:
        claimed = {"format": 1, "folder": folder, "publisher": "by the book", "claimed_at": "today"}
        create(store, f"claims/{number}/00000.{term:04d}.json", spelled(claimed) + b"\n")

    def fence() -> None:
        later = store / f"claims/{number}/00000.{term + 1:04d}.json"
        if max(epochs(store), default=0) > epoch or later.exists():
            raise Fenced

    fence()
    prefix = f"data/{number}-{attempt}/{save}/00000.{nonce}.{ordinal:06d}"
    listed = []
    for path, data in sorted(files.items()):
        create(store, f"{prefix}/{path}", data)
        listed.append({"path": path, "size": len(data), "sha256": sha256(data), "mode": 420})
    folders = sorted({str(above) for path in files for above in Path(path).parents} - {"."})
    content = {
        "kind": "folder",
        "files": listed,
        "folders": [{"path": path, "mode": 493} for path in folders],
        "links": [],
    }
    manifest = spelled({"format": 1, "save": save, "rank": 0, "ranks": 1, "token": "", **content})
    create(store, f"{prefix}.json", manifest)
    fence()
    assert (store / f"{prefix}.json").read_bytes() == manifest
    size = sum(map(len, files.values()))
    part = {"rank": 0, "prefix": prefix, "names": "encoded", "manifest": f"{prefix}.json"}
    part |= {"manifest_sha256": sha256(manifest), "files": len(files), "size": size}
    record = {"format": 1, "epoch": str(epoch), "term": term, "ordinal": ordinal, "nonce": nonce, "attempt": attempt}
    record |= {"job": "", "folder": folder, "save": save, "kind": "folder", "generation": 1}
    record |= {"content": sha256(spelled(content)), "rule": "book", "mark": "", "newest_ns": "0", "sequence": None}
    record |= {"token": "", "parts": [part], "committed_at": "today", "publisher": "by the book"}
    key = f"commits/{number}/{term:04d}.{ordinal:06d}.{nonce}.json"
    create(store, key, spelled(record) + b"\n")
    if (store / f"pruned/{number}/sealed.json").exists():
        raise Fenced
    return key


def newest(store: Path) -> dict[str, bytes]:
    """The files of the newest save, verified."""
    for epoch in reversed(epochs(store)):
        for commit in sorted((store / f"commits/{epoch:020d}").iterdir(), reverse=True):
            if (store / f"pruned/{epoch:020d}" / commit.name).exists():
                continue
            (part,) = json.loads(commit.read_bytes())["parts"]
            manifest = (store / part["manifest"]).read_bytes()
            assert sha256(manifest) == part["manifest_sha256"]
            files = {}
            for file in json.loads(manifest)["files"]:
                data = (store / part["prefix"] / file["path"]).read_bytes()
                assert (len(data), sha256(data)) == (file["size"], file["sha256"])
                files[re.sub("%(..)", lambda found: chr(int(found[1], 16)), file["path"])] = data
            return files
    raise FileNotFoundError
