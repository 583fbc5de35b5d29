"""The moment a save is published: one small object, created once and never replaced (invariants I2 and I3)."""

from __future__ import annotations

from dispatch_agent.errors import Conflict, NotStored
from dispatch_agent.publish import records
from dispatch_agent.publish.once import Patience, Taken, write_once
from dispatch_agent.publish.records import CommitRecord
from dispatch_agent.store.base import KeyMissing, Store


def check_manifests(store: Store, record: CommitRecord) -> None:
    """Look at every manifest once more, just before the commit.

    Raises NotStored (a manifest is not what was verified), StoreError.
    """
    for part in record.parts:
        _check_manifest(store, part.manifest, part.manifest_sha256)


def commit(store: Store, record: CommitRecord, *, weak: bool, patience: Patience) -> None:
    """Create the commit record, whose manifests were just checked. A retry sends the same key and bytes.

    Raises Conflict (other bytes stand under the key, which carries our own nonce), OutcomeUnknown, StoreError.
    """
    data = records.commit_bytes(record)
    if weak:
        store.put(record.key, data)
        return
    try:
        write_once(store, record.key, data, patience)
    except Taken as taken:
        msg = (
            f"{record.key} at {store.url} holds another record, though its name carries this publisher's own nonce: "
            f"something else writes into this store; stop it before you trust {record.save}"
        )
        raise Conflict(msg) from taken


def _check_manifest(store: Store, key: str, sha256: str) -> None:
    try:
        found = records.sha256(store.read(key).data)
    except KeyMissing:
        found = "nothing"
    if found != sha256:
        msg = f"manifest {key} at {store.url} should have sha256 {sha256} and has {found}; the save is uploaded again"
        raise NotStored(msg)
