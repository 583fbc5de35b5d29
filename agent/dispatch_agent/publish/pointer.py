"""`latest.json`: the mutable name of the newest commit, moved only forward (invariant I4).

A convenience for readers of one key. The greatest commit record is the truth, so losing the pointer costs nobody a
save; moving it back would. It therefore moves by compare-and-swap alone, and one that vanished is an alarm.
"""

from __future__ import annotations

from dispatch_agent.errors import IntegrityError, OutcomeUnknown, StoreError
from dispatch_agent.publish import keys, listing, records
from dispatch_agent.publish.keys import Order
from dispatch_agent.publish.once import Patience
from dispatch_agent.publish.records import CommitRecord, Pointer
from dispatch_agent.store.base import ConditionFailed, Document, KeyMissing, LatestLink, Store

LINK = "latest"


class NotMoved(OutcomeUnknown):
    """Whether the pointer names the commit is not known. `seen`: it was there at some try."""

    def __init__(self, message: str, *, seen: bool) -> None:
        super().__init__(message)
        self.seen = seen


def advance(store: Store, record: CommitRecord, *, known: bool, patience: Patience) -> Order:
    """Have the pointer name `record` or a greater commit; which one it names. `record` must be confirmed to exist.

    `known` says that this publisher has seen the pointer, as does a try of this call: then its absence raises
    IntegrityError instead of making a new one, for whatever deleted it may have hidden a greater one. Raises
    NotMoved, StoreError.
    """
    data = records.pointer_bytes(record)
    last: Exception | None = None
    for _ in patience.attempts():
        try:
            found = _find(store, known)
            known = known or found is not None
            return _step(store, record.order, data, found)
        except (ConditionFailed, StoreError) as error:
            if isinstance(error, StoreError) and not error.retryable:
                raise
            last = error
    msg = (
        f"whether {keys.POINTER} at {store.url} names {record.key} is unknown after {patience.tries} tries (last "
        f"answer: {last}); the commit itself stands, readers of commits/ are not affected"
    )
    raise NotMoved(msg, seen=known) from last


def read(store: Store) -> Pointer | None:
    """The pointer, or None if there is none. Raises IntegrityError, StoreError."""
    try:
        return records.parse_pointer(store.read(keys.POINTER).data)
    except KeyMissing:
        return None


def _find(store: Store, known: bool) -> Document | None:
    """The pointer as it stands. Raises IntegrityError if it is absent though it was `known` to be there."""
    try:
        return store.read(keys.POINTER)
    except KeyMissing:
        if not known:
            return None
        msg = (
            f"{keys.POINTER} at {store.url} has vanished: something deletes objects there (a bucket lifecycle "
            f"rule? a cleaner?). It is not made anew; commits go on. Find what deleted it, then restart"
        )
        raise IntegrityError(msg) from None


def _step(store: Store, order: Order, data: bytes, found: Document | None) -> Order:
    """One try, after which the pointer names this commit or a greater one. ConditionFailed: to be tried again."""
    if found is None:
        data = _newest(store, order) or data
        store.create(keys.POINTER, data)
        return records.parse_pointer(data).order
    named = records.parse_pointer(found.data).order
    if named >= order:
        return named
    store.replace(keys.POINTER, data, found.version)
    return order


def _newest(store: Store, order: Order) -> bytes | None:
    """What a pointer made anew has to say if a greater commit than `order` is there; that it is missing may be because
    something deleted it. Asked for only where there is no pointer at all."""
    newest = next(listing.newest_first(store), order)
    if newest <= order:
        return None
    try:
        return records.pointer_bytes(listing.read_commit(store, newest))
    except KeyMissing as missing:
        raise ConditionFailed(missing.key) from missing  # commit records never go: look again before it is believed


def link(store: Store, patience: Patience) -> None:
    """On a folder, point the `latest` symlink where the pointer points. Raises StoreError (say, something else has that
    name), IntegrityError."""
    if not isinstance(store, LatestLink):
        return
    for attempt in patience.attempts():
        try:
            _link(store, store)
        except StoreError as error:
            if not error.retryable or attempt + 1 == patience.tries:
                raise
        else:
            return


def _link(store: Store, links: LatestLink) -> None:
    """Until the pointer says after the write what it said before."""
    pointer = read(store)
    while pointer is not None:
        links.symlink(LINK, keys.key_of(pointer.prefix, pointer.names))
        again = read(store)
        if again == pointer:
            return
        pointer = again
