"""The destination equals the manifest (invariant I2): every byte that a commit will name was stored and is right."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from dispatch_agent.checkpoint.manifest import Manifest
from dispatch_agent.errors import IntegrityError
from dispatch_agent.publish import records
from dispatch_agent.publish.records import Part
from dispatch_agent.store.base import KeyMissing, Store, Uploaded

CHUNK = 1 << 20


def read_back(store: Store, key: str, expected: Uploaded, tick: Callable[[int], None]) -> None:
    """Read a stored file and digest it. Raises IntegrityError, StoreError, and whatever `tick` raises."""
    digest = hashlib.sha256()
    size = 0
    try:
        for piece in store.stream(key, CHUNK):
            digest.update(piece)
            size += len(piece)
            tick(0)
    except KeyMissing:
        msg = f"{key} is missing at {store.url} right after it was stored; it is uploaded again"
        raise IntegrityError(msg) from None
    if (size, digest.hexdigest()) != (expected.size, expected.sha256):
        msg = (
            f"{key} at {store.url} reads back as {size} bytes with sha256 {digest.hexdigest()}, but "
            f"{expected.size} bytes with {expected.sha256} were sent; it is uploaded again"
        )
        raise IntegrityError(msg)


def check_sizes(store: Store, part: Part, manifest: Manifest) -> None:
    """One listing: exactly the manifest's files are there, with its sizes. Raises IntegrityError, StoreError."""
    expected = {records.file_key(part, file.path, manifest.kind): file.size for file in manifest.files}
    found = {item.key: item.size for item in store.list(part.prefix)}
    for key, size in expected.items():
        if found.get(key) != size:
            msg = (
                f"{key} at {store.url} should have {size} bytes and has {found.get(key, 'no object')}; "
                f"the save is uploaded again"
            )
            raise IntegrityError(msg)
    surplus = sorted(found.keys() - expected.keys())
    if surplus:
        msg = f"{surplus[0]} at {store.url} is in nobody's manifest; the save is uploaded again"
        raise IntegrityError(msg)
