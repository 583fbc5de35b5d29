"""What is committed, found out by listing: the truth that needs no pointer (invariant I7)."""

from __future__ import annotations

from collections.abc import Iterator

from dispatch_agent.errors import IntegrityError
from dispatch_agent.publish import keys, records
from dispatch_agent.publish.keys import Order
from dispatch_agent.publish.records import CommitRecord, Part
from dispatch_agent.store.base import KeyMissing, Store


def epochs(store: Store) -> list[int]:
    """Every epoch with a commit, ascending: one delimiter listing, whatever the number of commits."""
    found = (keys.parse_epoch_folder(name) for name in store.folders(keys.COMMITS))
    return sorted(epoch for epoch in found if epoch is not None)


def orders(store: Store, epoch: int, folder: str = keys.COMMITS) -> list[Order]:
    """Every commit (or, in `pruned`, tombstone) of one epoch, ascending."""
    found = (keys.parse_commit_key(item.key, folder) for item in store.list(f"{folder}/{epoch:020d}"))
    return sorted(order for order in found if order is not None)


def all_orders(store: Store, folder: str = keys.COMMITS) -> list[Order]:
    """Every commit (or tombstone) there is, ascending: one listing of all of them."""
    found = (keys.parse_commit_key(item.key, folder) for item in store.list(folder))
    return sorted(order for order in found if order is not None)


def sealed(store: Store, epoch: int) -> bool:
    """Whether a prune has sealed the epoch: what is committed there from then on may have lost its data."""
    return _stands(store, keys.seal_key(epoch))


def pruned(store: Store, record: CommitRecord) -> bool:
    """Whether a prune took the commit's data: what a reader asks before it calls what is missing damaged."""
    if _stands(store, keys.tombstone_key(record.order)):
        return True
    if not sealed(store, record.order.epoch):
        return False
    return any(_incomplete(store, part) for part in record.parts)


def _incomplete(store: Store, part: Part) -> bool:
    if not _stands(store, part.manifest):
        return True
    # A manifest that was sent twice may have landed once more, after all of it was swept.
    return part.names == "encoded" and sum(1 for _ in store.list(part.prefix)) < part.files


def newest_first(store: Store) -> Iterator[Order]:
    """Every commit that is not pruned, the newest first; of two records of one place only the first.

    What is pruned is not the newest: a tombstone means that two greater places are there. So once one is seen, whether
    a newer epoch has come is asked again, lest an old list of epochs hides what new tombstones make room for.
    """
    pending = epochs(store)
    greatest = pending[-1:]
    while pending:
        epoch = pending.pop()
        gone = set(orders(store, epoch, keys.PRUNED))
        if gone and [epoch] == greatest:
            now = epochs(store)
            if now[-1:] > greatest:
                pending, greatest = now, now[-1:]
                continue
        seen: set[tuple[int, int, int]] = set()
        for order in reversed(orders(store, epoch)):
            if order not in gone and order.place not in seen:
                seen.add(order.place)
                yield order


def read_commit(store: Store, order: Order) -> CommitRecord:
    """Raises KeyMissing, IntegrityError, StoreError."""
    key = keys.commit_key(order)
    return records.parse_commit(store.read(key).data, key)


def read_listed(store: Store, order: Order) -> CommitRecord:
    """A commit that a listing shows. Raises IntegrityError also if it is missing: commit records never go."""
    try:
        return read_commit(store, order)
    except KeyMissing as missing:
        msg = f"{missing.key} was listed and is missing at {store.url}: commit records never go"
        raise IntegrityError(msg) from None


def _stands(store: Store, key: str) -> bool:
    try:
        store.read(key)
    except KeyMissing:
        return False
    return True
