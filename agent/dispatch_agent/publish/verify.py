"""The destination equals the manifest (invariant I2): every byte that a commit will name was stored and is right."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

from dispatch_agent.checkpoint.manifest import Manifest
from dispatch_agent.errors import IntegrityError, NotStored
from dispatch_agent.publish import records
from dispatch_agent.publish.records import Part
from dispatch_agent.store.base import KeyMissing, Store, Uploaded

CHUNK = 1 << 20


def read_back(store: Store, key: str, expected: Uploaded, tick: Callable[[int], None]) -> None:
    """Read what was just stored. Raises NotStored, StoreError, and what `tick` raises."""
    try:
        for _ in read(store, key, expected, "it is uploaded again", tick):
            pass
    except IntegrityError as error:
        raise NotStored(str(error)) from error


def read(store: Store, key: str, expected: Uploaded, otherwise: str, tick: Callable[[int], None]) -> Iterator[bytes]:
    """A stored file's bytes, compared at the end: consume all of them before you believe any.

    `otherwise` ends the sentence about bytes that differ. Raises IntegrityError, StoreError, and what `tick` raises.
    """
    digest = hashlib.sha256()
    size = 0
    try:
        for piece in store.stream(key, CHUNK):
            digest.update(piece)
            size += len(piece)
            tick(len(piece))
            yield piece
    except KeyMissing:
        msg = f"{key} is missing at {store.url}: {otherwise}"
        raise IntegrityError(msg) from None
    if (size, digest.hexdigest()) != (expected.size, expected.sha256):
        msg = (
            f"{key} at {store.url} has {size} bytes with sha256 {digest.hexdigest()} where {expected.size} bytes with "
            f"{expected.sha256} were stored: {otherwise}"
        )
        raise IntegrityError(msg)


def check_sizes(store: Store, part: Part, manifest: Manifest) -> None:
    """One listing: exactly the manifest's files are there, with its sizes. Raises NotStored, StoreError."""
    expected = {records.file_key(part, file.path, manifest.kind): file.size for file in manifest.files}
    found = {item.key: item.size for item in store.list(part.prefix)}
    for key, size in expected.items():
        if found.get(key) != size:
            msg = (
                f"{key} at {store.url} should have {size} bytes and has {found.get(key, 'no object')}; "
                f"the save is uploaded again"
            )
            raise NotStored(msg)
    surplus = sorted(found.keys() - expected.keys())
    if surplus:
        msg = f"{surplus[0]} at {store.url} is in nobody's manifest; the save is uploaded again"
        raise NotStored(msg)
