"""The invariants of the protocol, looked at before and after every change of the store, and at what processes report.

What trainers really wrote is known here (`Truth`), so a commit is held against it and not only against its manifest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.scheduler import Actor, Scheduler, violated
from tests.simulation.store import Bucket, digest

from dispatch_agent.checkpoint import folder as bookkeeping
from dispatch_agent.checkpoint import manifest as manifests
from dispatch_agent.checkpoint import names
from dispatch_agent.errors import IntegrityError
from dispatch_agent.publish import keys, records
from dispatch_agent.publish.keys import Order
from dispatch_agent.publish.publisher import Outcome
from dispatch_agent.publish.records import CommitRecord

Content = dict[str, bytes]
"""A save's files by path; of a single-file save one file with the save's name."""
Place = tuple[int, int, int]
GRACE = 2  # places that no prune may touch


@dataclass
class Truth:
    """What trainers did.

    `standing`: what stands in a folder under a name now, and the number of the word that it is complete if that holds.
    `finished`: what was said to be complete, by folder and by the number of the word.
    """

    folders: list[Path] = field(default_factory=list)
    standing: dict[tuple[Path, str], tuple[Content, int | None]] = field(default_factory=dict)
    finished: dict[tuple[Path, int], tuple[str, Content]] = field(default_factory=dict)
    _ids: dict[str, Path] = field(default_factory=dict)

    def folder(self, folder_id: str) -> Path | None:
        """The folder that has this id, or had it before it was cleared."""
        if folder_id not in self._ids:
            for path in self.folders:
                execution = bookkeeping.read_execution(path)
                if execution is not None:
                    self._ids[execution.folder_id] = path
        return self._ids.get(folder_id)

    def content(self, record: CommitRecord) -> Content | None:
        """What the trainer had written when it gave the word that the commit names."""
        path = self.folder(record.folder)
        name, content = self.finished.get((path, sequence_of(record.mark)), ("", None)) if path else ("", None)
        return content if name == record.save else None


def sequence_of(mark: str) -> int:
    return int(mark.partition(".")[0] or 0)


class Invariants:
    """Holds every change against I1 to I9. Raises Violation."""

    def __init__(self, truth: Truth, scheduler: Scheduler, *, weak: bool, points: bool) -> None:
        self.truth = truth
        self.scheduler = scheduler
        self.weak = weak
        self.points = points
        self.bucket: Bucket
        self.nonces: dict[str, list[str]] = defaultdict(list)
        self.born: dict[str, int] = {}
        self.pruners: set[str] = set()
        self.commits: dict[Order, CommitRecord] = {}
        self.landed: dict[Order, int] = {}
        self.late: set[Order] = set()  # landed when their epoch was sealed
        self.gone: dict[Order, int] = {}  # since when there is a tombstone
        self.sealed: set[int] = set()
        self.sent: dict[str, dict[Order, CommitRecord]] = defaultdict(dict)
        self.unconfirmed: dict[Order, str] = {}
        self.newest: Order | None = None
        self.pointer: Order | None = None
        self._uploads: set[str] = set()
        self._attempts: dict[int, set[str]] = defaultdict(set)
        self._term: dict[tuple[int, int, str], int] = {}
        self._terms: dict[tuple[int, int], int] = {}
        self._knew: dict[str, tuple[int, dict[tuple[int, int], int]]] = {}

    # --- what processes do ----------------------------------------------------------------------------------------

    def start(self, actor: Actor, nonce: str) -> None:
        """A publisher start has drawn its nonce."""
        self.nonces[actor.name].append(nonce)
        self.born[nonce] = self.scheduler.count

    def sends(self, actor: Actor, method: str, key: str, data: bytes) -> None:
        if method == "upload":
            if key in self._uploads:
                violated("I1", f"{key} is sent a second time: a try's number was used again")
            self._uploads.add(key)
        order = keys.parse_commit_key(key)
        if order is None or method not in ("create", "put"):
            self._knew[actor.name] = (self._newest_epoch, dict(self._terms))
            return
        record = records.parse_commit(data, key)
        self.sent[actor.name][order] = record
        epoch, terms = self._knew.get(actor.name, (0, {}))
        if epoch > order.epoch:
            violated("I7", f"{key} is sent, and epoch {epoch} had published before the write before it: stale")
        if terms.get((order.epoch, record.parts[0].rank), 0) > order.term:
            violated("I7", f"{key} is sent, and a later folder of its rank had claimed before: stale")

    def writes(self, actor: Actor, key: str, data: bytes) -> None:
        self._may_write(actor, key)
        order = keys.parse_commit_key(key)
        before = self.bucket.objects.get(key)
        if key != keys.POINTER:
            same = before == data or (
                self.weak and (key.startswith("pruned/") or _folder(key, before) == _folder(key, data) != "")
            )
            if before is not None and not (same and (self.weak or order is None)):
                violated("I3" if order else "I1", f"{key} is written over")
        elif before is not None:
            self._pointer_goes_up(records.parse_pointer(before).order, records.parse_pointer(data).order)

    def written(self, key: str) -> None:
        data = self.bucket.objects[key]
        folder, _, rest = key.partition("/")
        if folder == "claims":
            self._claimed(key, data)
        elif folder == "data":
            epoch = int(rest[:20])
            self._attempts[epoch].add(rest[21:].partition("/")[0])
            self._is_the_epochs_own(key, epoch)
        elif folder == "commits":
            self._committed(key, data)
        elif folder == "pruned":
            self._pruned(key)
        elif key == keys.POINTER:
            self._pointed(data)

    def deletes(self, actor: Actor, key: str) -> None:
        if not key.startswith("data/"):
            violated("I6", f"{actor.name} deletes {key}")
        for order, record in self.commits.items():
            if not _names(record, key):
                continue
            if order.place in self.newest_places():
                violated("I6", f"{actor.name} deletes {key}, which one of the newest {GRACE} saves needs")
            if order not in self.gone and not (order in self.late and actor.name in self.pruners):
                violated("I6", f"{actor.name} deletes {key}, which {order} names")
        if actor.name in self.pruners:
            if not any(_names(self.commits[order], key) for order in self.gone if order in self.commits):
                self._is_dead(actor, key)
            return
        for name, sent in self.sent.items():
            if any(_names(record, key) for record in sent.values()):
                violated("I8", f"{actor.name} deletes {key}, which a commit names that {name} sent and may land")
        if not any(nonce in key for nonce in self.nonces[actor.name]):
            violated("I6", f"{actor.name} deletes {key}, which is another's")

    def reports(self, actor: Actor, folder: Path, outcome: Outcome) -> None:
        """A publisher says what became of a save."""
        if outcome.result == "published" and outcome.record is not None:
            order = outcome.record.order
            if outcome.record.key not in self.bucket.objects:
                violated("I8", f"{actor.name} says that {order} is published, and it is not there")
            if order in self.late:
                violated("I6", f"{actor.name} says that {order} is published, and its epoch was sealed before")
        if outcome.result == "already":
            place = bookkeeping.places(folder)[outcome.ordinal - 1]
            mine = [
                r for r in self.commits.values() if self.truth.folder(r.folder) == folder and r.save == outcome.save
            ]
            last = max((r for r in mine if r.order.ordinal <= outcome.ordinal), key=lambda r: r.order, default=None)
            # A one-shot beside a watch speaks of what stands there, which may have no place of its own yet.
            right = [self.truth.finished[folder, sequence_of(place.signal.mark)][1]]
            right.append(self.truth.standing.get((folder, outcome.save), ({}, None))[0])
            if last is None or self.truth.content(last) not in right:
                violated("I9", f"{actor.name} says that {outcome.save} (place {outcome.ordinal}) is already there")

    def ends(self, actor: Actor, code: int, begun: set[Order]) -> None:
        """A process ended by itself with this exit code. `begun`: what it had sent before this life."""
        if code == 33:
            return
        for order in self.sent[actor.name].keys() - begun:
            if keys.commit_key(order) not in self.bucket.objects:
                self.scheduler.say(actor.name, f"ended with {code}, though {order} may still land")
                self.unconfirmed[order] = f"{actor.name} ended with {code}"

    def generations_count_up(self) -> None:
        """A commit has the number after that of its name's commit before, if its publisher could know of that one: it
        stood when that publisher started, or was its own. What lands later is in its place, and its number is not new.
        Nor has it that one's content, unless a prune had taken it.
        """
        last: dict[tuple[str, str], CommitRecord] = {}
        for order, record in sorted(self.commits.items()):
            before = last.get((record.folder, record.save))
            if before is None or before.order.place != order.place:
                last[record.folder, record.save] = record
            if before is None or before.order.place == order.place:
                continue
            known = self.landed[before.order] < self.born[order.nonce] or before.order.nonce == order.nonce
            if known and record.generation != before.generation + 1:
                violated("I9", f"{order} is generation {record.generation}, and {before.order} {before.generation}")
            taken = self.gone.get(before.order, math.inf) < self.landed[order]
            if known and record.content == before.content and not taken:
                violated("I9", f"{order} has the content that {before.order} has")

    @property
    def uploads(self) -> int:
        """How many files were ever sent."""
        return len(self._uploads)

    # --- what holds of the store ----------------------------------------------------------------------------------

    def newest_places(self) -> list[Place]:
        """The newest places that are not pruned, which every reader may need."""
        return sorted({order.place for order in self.commits if order not in self.gone})[-GRACE:]

    def terms(self, epoch: int) -> int:
        """How many folders of one rank have claimed the epoch."""
        return max((term for (of, _), term in self._terms.items() if of == epoch), default=0)

    @property
    def _newest_epoch(self) -> int:
        return self.newest.epoch if self.newest else 0

    def _may_write(self, actor: Actor, key: str) -> None:
        if actor.name in self.pruners:
            if key.startswith("pruned/") or key == keys.POINTER:
                return
        elif key.startswith(("data/", "commits/")):
            if any(nonce in key for nonce in self.nonces[actor.name]):
                return
        elif key == keys.POINTER or key.startswith("claims/"):
            return
        violated("I1", f"{actor.name} writes {key}, which is not its own")

    def _claimed(self, key: str, data: bytes) -> None:
        _, epoch, name = key.split("/")
        claim = keys.parse_folder_claim(name)
        if claim is None:
            return
        where = (int(epoch), claim[0])
        self._terms[where] = max(self._terms.get(where, 0), claim[1])
        folder = (*where, records.folder_of_claim(data, key))
        if self._term.setdefault(folder, claim[1]) != claim[1]:
            violated("I9", f"{key}: the folder had term {self._term[folder]} before")

    def _is_the_epochs_own(self, key: str, epoch: int) -> None:
        if len(self._attempts[epoch]) > 1:
            violated("I5", f"{key}: two attempts have data under one epoch")
        if not self.weak:
            owner = self.bucket.objects.get(keys.attempt_claim_key(epoch))
            if owner is None or owner.decode() not in self._attempts[epoch]:
                violated("I5", f"{key} is written, and the epoch is claimed by {owner!r}")

    def _committed(self, key: str, data: bytes) -> None:
        record = records.parse_commit(data, key)
        order = record.order
        if order in self.commits:
            return  # the same bytes again, where a store cannot refuse
        if order.epoch in self.sealed:
            self.late.add(order)
        else:
            self._is_whole(record)
        self._is_the_only_content(record)
        self.commits[order] = record
        self.landed[order] = self.scheduler.count
        if order in self.unconfirmed:
            violated("I8", f"{order} lands, and {self.unconfirmed[order]}: nobody was told that it may")
        self._newest_goes_up()

    def _is_whole(self, record: CommitRecord) -> None:
        stored = stored_content(self.bucket, record)
        if isinstance(stored, str):
            violated("I2", f"{record.key} appears, and {stored}")
        if stored != self.truth.content(record):
            violated("I2", f"{record.key} appears, and what it names is not what the trainer said to be complete")

    def _is_the_only_content(self, record: CommitRecord) -> None:
        for other in self.commits.values():
            if other.order.place != record.order.place:
                continue
            if (other.save, other.generation, other.content) != (record.save, record.generation, record.content):
                violated("I3", f"{record.key} and {other.key} have one place and two contents")
            if self.landed[other.order] < self.born.get(record.order.nonce, 0):
                violated("I9", f"{record.key} is published again: {other.key} stood before its publisher started")

    def _newest_goes_up(self) -> None:
        newest = max((order for order in self.commits if order not in self.gone), default=None)
        if self.newest and (newest is None or newest.place < self.newest.place):
            violated("I7", f"the newest was {self.newest} and is {newest}")
        self.newest = newest

    def _pruned(self, key: str) -> None:
        order = keys.parse_commit_key(key, keys.PRUNED)
        if order is None:
            epoch = int(key.split("/")[1])
            self.sealed.add(epoch)
            if not self.newest_places() or epoch >= self.newest_places()[0][0]:
                violated("I6", f"{key}: the epoch is not dead yet")
            return
        if order.place in self.newest_places():
            violated("I6", f"{key}: it is one of the newest {GRACE}")
        if self.points and self.pointer == order:
            violated("I6", f"{key}: the pointer still names it")
        self.gone.setdefault(order, self.scheduler.count)
        self._newest_goes_up()

    def _is_dead(self, actor: Actor, key: str) -> None:
        epoch = keys.epoch_of_data(key)
        if epoch not in self.sealed:
            violated("I6", f"{actor.name} deletes {key}, whose epoch is not sealed and whose commit has no tombstone")

    def _pointer_goes_up(self, before: Order, after: Order) -> None:
        if after < before:
            violated("I4", f"the pointer goes back from {before} to {after}")

    def _pointed(self, data: bytes) -> None:
        pointer = records.parse_pointer(data)
        record = self.commits.get(pointer.order)
        if record is None:
            violated("I4", f"the pointer names {pointer.order}, which does not exist")
        if pointer.commit_sha256 != digest(records.commit_bytes(record)):
            violated("I4", f"the pointer has another digest than {pointer.order}")
        if self.pointer is not None:
            self._pointer_goes_up(self.pointer, pointer.order)
        if pointer.order in self.gone:
            violated("I4", f"the pointer names {pointer.order}, which was pruned")
        self.pointer = pointer.order


def stored_content(bucket: Bucket, record: CommitRecord) -> Content | str:
    """What a commit names, read from the store; or what is wrong with it."""
    found: Content = {}
    for part in record.parts:
        data = bucket.objects.get(part.manifest)
        if data is None or digest(data) != part.manifest_sha256:
            return f"its manifest {part.manifest} is missing or another"
        try:
            manifest = manifests.parse(data)
        except IntegrityError as error:
            return str(error)
        for file in manifest.files:
            stored = bucket.objects.get(records.file_key(part, file.path, manifest.kind))
            if stored is None or (len(stored), digest(stored)) != (file.size, file.sha256):
                return f"{file.path} is missing or has other bytes"
            found[names.decode_path(file.path).decode()] = stored
    return found


def _names(record: CommitRecord, key: str) -> bool:
    return any(key == part.manifest or key.startswith(part.prefix + "/") for part in record.parts)


def _folder(key: str, claim: bytes | None) -> str:
    return records.folder_of_claim(claim, key) if claim and keys.parse_folder_claim(key.rpartition("/")[2]) else ""
