"""Reading: which save is newest, and having it back byte for byte. Works from commit records alone (invariant I7).

Nothing here writes to the store. A damaged newest save makes a reader fall back to the one before, loudly; what is
newest does not change by that.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from dispatch_agent.checkpoint import manifest as manifests
from dispatch_agent.checkpoint.manifest import Manifest, ManifestFile
from dispatch_agent.errors import Incomplete, IntegrityError
from dispatch_agent.publish import listing, records
from dispatch_agent.publish import verify as verification
from dispatch_agent.publish.keys import Order
from dispatch_agent.publish.parallel import Tick
from dispatch_agent.publish.records import CommitRecord, Part
from dispatch_agent.store.base import KeyMissing, Store, Uploaded


@dataclass(frozen=True, slots=True)
class Published:
    """One commit as a reader meets it: its record, or why that cannot be read."""

    order: Order
    record: CommitRecord | None
    error: IntegrityError | None = None


def published(store: Store, save: str | None = None) -> Iterator[Published]:
    """Every commit that is not pruned, the newest first; with `save` (an encoded name) only those of that name."""
    for order in listing.newest_first(store):
        try:
            record = listing.read_listed(store, order)
        except IntegrityError as error:
            yield Published(order, None, error)
        else:
            if save in (None, record.save):
                yield Published(order, record)


def newest(store: Store, save: str | None = None) -> CommitRecord:
    """The newest commit. Raises Incomplete if nothing is published, IntegrityError if its record is damaged."""
    for item in published(store, save):
        if item.error is not None:
            raise item.error
        if item.record is not None:
            return item.record
    raise nothing(store, save)


def nothing(store: Store, save: str | None) -> Incomplete:
    """The error that says that there is nothing to read, and what is there instead. Raises StoreError."""
    there = list(dict.fromkeys(item.record.save for item in published(store) if item.record)) if save else []
    if there:
        more = f" and {len(there) - 5} more" if len(there) > 5 else ""
        return Incomplete(f"no save named {save} is published at {store.url}; there are {', '.join(there[:5])}{more}")
    return Incomplete(f"nothing is published at {store.url}; check the destination, or start without a checkpoint")


def manifest_of(store: Store, part: Part) -> Manifest:
    """The manifest that a commit names, checked against the digest in the commit. Raises IntegrityError, StoreError."""
    try:
        data = store.read(part.manifest).data
    except KeyMissing:
        msg = f"manifest {part.manifest} is missing at {store.url}"
        raise IntegrityError(msg) from None
    if records.sha256(data) != part.manifest_sha256:
        msg = (
            f"manifest {part.manifest} at {store.url} has sha256 {records.sha256(data)}, its commit says "
            f"{part.manifest_sha256}: it was changed after it was committed"
        )
        raise IntegrityError(msg)
    return manifests.parse(data)


def read_file(
    store: Store, part: Part, kind: Literal["file", "folder"], file: ManifestFile, tick: Tick
) -> Iterator[bytes]:
    """A published file's bytes, checked at the end: consume all of it before you believe any of it.

    Raises IntegrityError, StoreError, and whatever `tick` raises.
    """
    expected = Uploaded(file.size, file.sha256, verified=True)
    key = records.file_key(part, file.path, kind)
    return verification.read(store, key, expected, "it was damaged after it was published", tick)


def verify(store: Store, record: CommitRecord, *, tick: Tick, workers: int) -> None:
    """Read and digest everything a commit names. Raises IntegrityError (the first damage found), StoreError."""
    for part in record.parts:
        manifest = manifest_of(store, part)

        def check(file: ManifestFile, part: Part = part, manifest: Manifest = manifest) -> None:
            for _ in read_file(store, part, manifest.kind, file, tick):
                pass

        with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="verify") as pool:
            list(pool.map(check, manifest.files))


def whole(store: Store, record: CommitRecord) -> bool:
    """Whether the manifests are as committed and every file has its size. Raises StoreError."""
    try:
        for part in record.parts:
            manifest = manifest_of(store, part)
            if part.names == "encoded":
                verification.check_sizes(store, part, manifest)
    except IntegrityError:
        return False
    return True
