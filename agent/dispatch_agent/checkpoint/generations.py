"""Which contents of one save name are distinct, and which of several new ones comes first. Pure.

All of it must say the same after a crash, a remount and a chown, since it decides what is published again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from dispatch_agent.checkpoint.save import Signal, Snapshot


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A save's content as far as a look can tell it: one short hash per file and link, sorted."""

    parts: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The fingerprint as one short text (hex)."""
        return hashlib.blake2b("".join(self.parts).encode(), digest_size=16).hexdigest()

    def is_part_of(self, other: Fingerprint) -> bool:
        """Whether this is `other` with something taken away and nothing new: a save that is being deleted."""
        return set(self.parts) < set(other.parts)


@dataclass(frozen=True, slots=True)
class Place:
    """A save's generation and its durable place `number` (from 1) in its folder."""

    number: int
    name: bytes
    signal: Signal
    fingerprint: Fingerprint


Candidate = tuple[bytes, Signal, Fingerprint]
_T = TypeVar("_T")


def fingerprint(snapshot: Snapshot) -> Fingerprint:
    """Path, kind, size and mtime_ns of every file; path and text of every link.

    Left out on purpose: ctime, inode, mode and links' times (a remount or chown changes them), folders and their
    times (deleting a file changes them, and a save that loses files must stay a part of what it was).
    """
    parts = []
    for entry in (snapshot.root, *snapshot.entries):
        if entry.kind == "file":
            what = b"file\0%d\0%d\0%b" % (entry.size, entry.mtime_ns, entry.path)
        elif entry.kind == "link":
            what = b"link\0%b\0%b" % (entry.target, entry.path)
        else:
            continue
        parts.append(hashlib.blake2b(what, digest_size=8).hexdigest())
    return Fingerprint(tuple(sorted(parts)))


def is_new(signal: Signal, content: Fingerprint, previous: Sequence[Place]) -> bool:
    """Whether this is a generation of its own, given the earlier places of the same name in their order.

    A signal with a mark: if that mark was never used for the name. One without: if the content differs from the last
    placed one and is not merely what a deletion left of it.
    """
    if signal.mark:
        return all(place.signal.mark != signal.mark for place in previous)
    if not previous:
        return True
    last = previous[-1].fingerprint
    return content != last and not content.is_part_of(last)


def in_order(candidates: Sequence[tuple[bytes, Signal, _T]]) -> list[tuple[bytes, Signal, _T]]:
    """Saves first seen in one look, in the order in which they shall be placed. A total order.

    Those with a sequence number keep the order of their numbers, whatever their times say. To merge the others in by
    time, each numbered one counts as no older than the numbered ones before it; at equal times numbered ones come
    first, and the raw name decides last.
    """
    numbered = [candidate for candidate in candidates if candidate[1].sequence is not None]
    numbered.sort(key=lambda c: (c[1].sequence or 0, c[1].newest_ns, c[0]))
    keyed: list[tuple[tuple[int, int, int, int, bytes], tuple[bytes, Signal, _T]]] = []
    reached = 0
    for name, signal, rest in numbered:
        reached = max(reached, signal.newest_ns)
        keyed.append(((reached, 0, signal.sequence or 0, signal.newest_ns, name), (name, signal, rest)))
    for name, signal, rest in candidates:
        if signal.sequence is None:
            keyed.append(((signal.newest_ns, 1, 0, 0, name), (name, signal, rest)))
    return [candidate for _, candidate in sorted(keyed, key=lambda pair: pair[0])]
