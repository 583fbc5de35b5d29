"""The invariants I1 to I9 of the protocol, each as a question to one state or to one step between two.

An answer is what is wrong, in words that begin with the invariant's name; empty if nothing is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tests.model.replay import Event
from tests.model.world import Objects, Request, below, version
from tests.model.world import apply as answer_of

from dispatch_agent.publish import keys, listing, records
from dispatch_agent.publish.keys import Order
from dispatch_agent.publish.records import CommitRecord, Pointer
from dispatch_agent.store.base import Document, KeyMissing, Stored

KEPT = 2
"""The newest places that prune never touches."""


@dataclass(frozen=True, slots=True)
class Looking:
    """A Store over objects that only answers, for the shipped reader."""

    objects: Objects
    url: str = "model://"

    def read(self, key: str) -> Document:
        if key not in self.objects:
            raise KeyMissing(key)
        return Document(self.objects[key], version(self.objects[key]))

    def list(self, prefix: str) -> Iterator[Stored]:
        return iter(answer_of(self.objects, Request("list", prefix))[0].value)

    def folders(self, prefix: str) -> Sequence[str]:
        return tuple(answer_of(self.objects, Request("folders", prefix))[0].value)


_commit = lru_cache(None)(records.parse_commit)
_pointer = lru_cache(None)(records.parse_pointer)


@dataclass(slots=True)
class View:
    """What one state of the destination says to whoever sees all of it at once."""

    objects: Objects
    commits: dict[Order, CommitRecord] = field(init=False)
    unpruned: tuple[Order, ...] = field(init=False)
    pointer: Pointer | None = field(init=False)
    wrong: str = field(init=False)

    def __post_init__(self) -> None:
        found = {key: keys.parse_commit_key(key) for key in below(self.objects, keys.COMMITS)}
        self.commits = {order: _commit(self.objects[key], key) for key, order in found.items() if order}
        self.unpruned = tuple(listing.newest_first(Looking(self.objects)))  # type: ignore[arg-type]
        data = self.objects.get(keys.POINTER)
        self.pointer = None if data is None else _pointer(data)
        self.wrong = next(filter(None, (check(self) for check in _OF_A_STATE)), "")

    @property
    def newest(self) -> Order | None:
        """What a reader gets."""
        return self.unpruned[0] if self.unpruned else None

    @property
    def epoch(self) -> int:
        """The greatest epoch that has a commit."""
        return max((order.epoch for order in self.commits), default=0)

    def pruned(self, order: Order) -> bool:
        """Whether it says of the commit that its data is gone, or may be."""
        return keys.tombstone_key(order) in self.objects or self.swept(order)

    def swept(self, order: Order) -> bool:
        """Whether the commit came too late for the prune that swept its epoch: then it never counted."""
        if keys.seal_key(order.epoch) not in self.objects or keys.tombstone_key(order) in self.objects:
            return False
        return self.missing(self.commits[order]) != ""

    def holds(self, record: CommitRecord, content: bytes) -> bool:
        """Whether the save of one file that was committed has this content."""
        data = self.objects.get(record.parts[0].manifest)
        return data is not None and json.loads(data)["files"][0]["sha256"] == records.sha256(content)

    def missing(self, record: CommitRecord) -> str:
        """The first key that the commit names and that is not there as it was verified."""
        for part in record.parts:
            data = self.objects.get(part.manifest)
            if data is None or records.sha256(data) != part.manifest_sha256:
                return part.manifest
            for file in json.loads(data)["files"]:
                key = records.file_key(part, file["path"], record.kind)
                if key not in self.objects or records.sha256(self.objects[key]) != file["sha256"]:
                    return key
        return ""


def i2_a_commit_names_only_what_is_there(view: View) -> str:
    for order, record in view.commits.items():
        if not view.pruned(order) and (key := view.missing(record)):
            return f"I2: commit {order} names {key}, which is not there as it was verified"
    return ""


def i3_a_place_has_one_content(view: View) -> str:
    contents: dict[tuple[int, int, int], tuple[str, int, str]] = {}
    for order, record in view.commits.items():
        content = (record.save, record.generation, record.content)
        if contents.setdefault(order.place, content) != content:
            return f"I3: place {order.place} has two contents: {contents[order.place]} and {content}"
    return ""


def i4_the_pointer_names_a_commit(view: View) -> str:
    if view.pointer is None:
        return ""
    data = view.objects.get(view.pointer.commit)
    if data is None or records.sha256(data) != view.pointer.commit_sha256:
        return f"I4: the pointer names {view.pointer.commit}, which is not there or is another"
    if view.pruned(view.pointer.order):
        return f"I4: the pointer names {view.pointer.commit}, which was pruned"
    return ""


def i5_an_epoch_has_one_attempt(view: View) -> str:
    attempts: dict[int, str] = {}
    for order, record in view.commits.items():
        if attempts.setdefault(order.epoch, record.attempt) != record.attempt:
            return f"I5: epoch {order.epoch} has commits of {attempts[order.epoch]} and of {record.attempt}"
    return ""


def i6_the_newest_places_are_kept(view: View) -> str:
    places = sorted({order.place for order in view.commits})[-KEPT:]
    for order in view.commits:
        if order.place in places and view.pruned(order) and not _stands_elsewhere(view, order):
            return f"I6: {order} is one of the newest {KEPT} places and was pruned"
    return ""


def _stands_elsewhere(view: View, order: Order) -> bool:
    return any(o.place == order.place and not view.pruned(o) for o in view.commits)


def i9_places_are_in_the_order_of_the_saves(view: View) -> str:
    last: dict[tuple[int, int], tuple[int, Order]] = {}
    for order in sorted(view.commits):
        sequence = view.commits[order].sequence or 0
        before = last.get((order.epoch, order.term))
        if before and sequence < before[0]:
            return f"I9: {order} is an older save than {before[1]}, in a place after it"
        last[order.epoch, order.term] = (sequence, order)
    return ""


def i9_generations_never_go_down(view: View) -> str:
    """They need not differ: a commit whose writer was killed may land when its successor could no longer count it."""
    seen: dict[tuple[str, str], int] = {}
    for order in sorted({order.place: order for order in view.commits}.values()):
        record = view.commits[order]
        before = seen.get((record.folder, record.save), 0)
        if record.generation < before:
            return f"I9: {order} is generation {record.generation} of {record.save}, after generation {before}"
        seen[record.folder, record.save] = record.generation
    return ""


_OF_A_STATE = (
    i2_a_commit_names_only_what_is_there,
    i3_a_place_has_one_content,
    i4_the_pointer_names_a_commit,
    i5_an_epoch_has_one_attempt,
    i6_the_newest_places_are_kept,
    i9_places_are_in_the_order_of_the_saves,
    i9_generations_never_go_down,
)


def i3_no_commit_changes(before: View, after: View) -> str:
    for order in before.commits:
        key = keys.commit_key(order)
        if after.objects.get(key) != before.objects[key]:
            return f"I3: {key} was written again or removed"
    return ""


def i4_the_pointer_only_moves_up(before: View, after: View) -> str:
    if before.pointer is None or after.pointer is None or after.pointer.order >= before.pointer.order:
        return ""
    return f"I4: the pointer went back from {before.pointer.order} to {after.pointer.order}"


def i7_what_is_newest_never_goes_backwards(before: View, after: View) -> str:
    if before.newest is None or (after.newest is not None and after.newest >= before.newest):
        return ""
    return f"I7: the newest save was {before.newest} and is {after.newest}"


def of_a_change(before: View, after: View) -> str:
    """What is wrong with one change of the destination, whoever made it."""
    if after.wrong:
        return after.wrong
    changes = (i3_no_commit_changes, i4_the_pointer_only_moves_up, i7_what_is_newest_never_goes_backwards)
    return next(filter(None, (check(before, after) for check in changes)), "")


def i8_what_is_said_is_so(said: Sequence[Event], after: View) -> str:
    for what, key in said:
        if what != "published":
            continue
        order = keys.parse_commit_key(key)
        if order not in after.commits:
            return f"I8: {key} is said to be published and is not there"
        if after.swept(order):
            return f"I8: {key} is said to be published and was swept"
    return ""
