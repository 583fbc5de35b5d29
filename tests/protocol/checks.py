"""What must hold of a destination whatever happened to its writers: the invariants, looked at from outside."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from dispatch_agent.publish import listing, pointer, reader, records
from dispatch_agent.publish.records import CommitRecord
from dispatch_agent.store.base import Store
from dispatch_agent.store.posix import PosixStore

Fact = tuple[str, int, str, int, int, int]


def commits(store: Store) -> list[CommitRecord]:
    """Every commit record, the oldest first; also several of one place."""
    return [
        listing.read_commit(store, order) for epoch in listing.epochs(store) for order in listing.orders(store, epoch)
    ]


def facts(store: Store) -> list[Fact]:
    """What is published, without what differs from start to start: save, generation, content and order."""
    return [
        (r.save, r.generation, r.content, r.order.epoch, r.order.term, r.order.ordinal) for r in _one_per_place(store)
    ]


def check_invariants(store: Store, *, pointer_is_current: bool = True) -> None:
    """I1 to I4, I6 and I7, as far as the store alone shows them. `pointer_is_current`: no writer died before moving it.

    What was pruned is no longer verified; that it was ever published still counts.
    """
    found = commits(store)
    there = [record for record in found if not listing.pruned(store, record)]
    for record in there:
        reader.verify(store, record, tick=lambda _: None, workers=1)  # I2: whole, and every byte as it was committed
    _nothing_is_shared(found)
    _every_place_has_one_content(found)
    _every_generation_is_committed_once(_one_per_place(store))
    named = pointer.read(store)
    if not found:
        assert named is None, "I4: the pointer names a commit where there is none"
        return
    assert there[-2:] == found[-2:], "I6: one of the newest two was pruned"
    assert reader.newest(store).order.place == found[-1].order.place, "I7: readers do not get the greatest commit"
    if named is not None:
        by_key = {record.key: record for record in found}
        assert named.commit in by_key, "I4: the pointer names a commit that does not exist"
        assert named.commit_sha256 == records.sha256(records.commit_bytes(by_key[named.commit])), "I4: not its digest"
    if pointer_is_current:
        assert named is not None, "I4: no pointer"
        assert named.order.place == found[-1].order.place, "I4: the pointer does not name the greatest commit"
        if isinstance(store, PosixStore):
            expected = Path(store.url, named.prefix)
            assert Path(store.url, "latest").resolve() == expected.resolve(), "the link names another save"


def _one_per_place(store: Store) -> list[CommitRecord]:
    places: dict[tuple[int, int, int], CommitRecord] = {}
    for record in commits(store):
        places[record.order.place] = record
    return list(places.values())


def _nothing_is_shared(found: list[CommitRecord]) -> None:
    """I1: no two commits name one object."""
    named = Counter(key for record in found for part in record.parts for key in (part.prefix, part.manifest))
    assert not [key for key, times in named.items() if times > 1], "I1: two commits share data"
    for record in found:
        for part in record.parts:
            assert record.order.nonce in part.prefix.rpartition("/")[2], "I1: data of another publisher"


def _every_place_has_one_content(found: list[CommitRecord]) -> None:
    """I3: two publishers of one folder may both commit a generation, but never two contents of it."""
    contents: dict[tuple[int, int, int], set[tuple[str, int, str]]] = {}
    for record in found:
        contents.setdefault(record.order.place, set()).add((record.save, record.generation, record.content))
    assert all(len(content) == 1 for content in contents.values()), f"I3: two contents of one place: {contents}"


def _every_generation_is_committed_once(found: list[CommitRecord]) -> None:
    """I9: no generation twice, and generations of a name count up without a gap in the order of their places."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for record in found:
        numbers.setdefault((record.folder, record.save), []).append(record.generation)
    for name, generations in numbers.items():
        assert generations == list(range(1, len(generations) + 1)), f"I9: generations of {name} are {generations}"
