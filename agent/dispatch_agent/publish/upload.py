"""One part's files to the store, side by side, each read once: digested, sent, and looked at again where it must be.

Nothing here decides that a save is published. A try that fails leaves keys that no commit will ever name.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from dispatch_agent.checkpoint import names
from dispatch_agent.checkpoint.reading import SourceFile, path_of
from dispatch_agent.checkpoint.save import Entry, Snapshot
from dispatch_agent.errors import IntegrityError
from dispatch_agent.publish.parallel import Tick, each
from dispatch_agent.publish.verify import CHUNK, read_back
from dispatch_agent.store.base import Limits, Store, Uploaded


def check_names(snapshot: Snapshot, prefix: str, limits: Limits) -> None:
    """Refuse a save whose keys would be too long, by the name, before anything is sent. Raises IntegrityError."""
    for file in snapshot.files:
        key = f"{prefix}/{encoded_path(snapshot, file)}"
        longest = max(key.split("/"), key=len)
        if len(key) > limits.key_bytes or len(longest) > limits.component_bytes:
            msg = (
                f"{_shown(snapshot, file)} is too long a name for this store: its key has {len(key)} bytes (at most "
                f"{limits.key_bytes}), its longest component {len(longest)} (at most {limits.component_bytes}); "
                f"rename it"
            )
            raise IntegrityError(msg)


def encoded_path(snapshot: Snapshot, file: Entry) -> str:
    """The file's path in manifest and keys: of a single-file save, its own name."""
    return names.encode_path(file.path) if file.path else names.encode(snapshot.name)


def upload(
    store: Store, folder: Path, snapshot: Snapshot, prefix: str, *, tick: Tick, workers: int
) -> dict[bytes, Uploaded]:
    """Send every file of the save below `prefix`; what was stored, by path.

    Raises SourceChanged (a file is not as in `snapshot`, or changed while it was read), IntegrityError, StoreError,
    and whatever `tick` raises.
    """

    def send(file: Entry, check: Tick) -> Uploaded:
        key = f"{prefix}/{encoded_path(snapshot, file)}"
        with SourceFile(path_of(folder, snapshot, file), file, check) as source:
            stored = store.upload(key, source)
            source.finish()
        if not stored.verified:
            read_back(store, key, stored, lambda size: check(-size))
        return stored

    return _by_path(snapshot, each(snapshot.files, send, tick, workers))


def digest(folder: Path, snapshot: Snapshot, *, tick: Tick, workers: int) -> dict[bytes, Uploaded]:
    """Read every file of the save once without sending it anywhere. Raises like `upload`."""

    def read(file: Entry, check: Tick) -> Uploaded:
        with SourceFile(path_of(folder, snapshot, file), file, check) as source:
            sha256 = hashlib.sha256()
            while piece := source.read(CHUNK):
                sha256.update(piece)
            source.finish()
            return Uploaded(source.size, sha256.hexdigest(), verified=True)

    return _by_path(snapshot, each(snapshot.files, read, tick, workers))


def _by_path(snapshot: Snapshot, stored: list[Uploaded]) -> dict[bytes, Uploaded]:
    return {file.path: what for file, what in zip(snapshot.files, stored, strict=True)}


def _shown(snapshot: Snapshot, file: Entry) -> str:
    return names.encode(snapshot.name) + (f"/{names.encode_path(file.path)}" if file.path else "")
