"""One save, once: upload, verify, manifest, commit. The order of these steps is the protocol.

    look  -> the save is what it was when it was placed
    send  -> every file below a prefix that this try alone has
    look  -> still the same, still complete by the same signal
    check -> sizes at the store, digests where the store proves nothing
    write -> the manifest, then (not fenced?) the commit record
    look  -> not sealed by a prune: the commit came in time

A failure anywhere leaves keys that nothing names, and no other try has: they are removed when the store lets us.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dispatch_agent.checkpoint import manifest as manifests
from dispatch_agent.checkpoint import names, scan
from dispatch_agent.checkpoint.folder import Place
from dispatch_agent.checkpoint.manifest import Manifest
from dispatch_agent.checkpoint.save import Complete, Snapshot, Verdict
from dispatch_agent.clock import Clock
from dispatch_agent.errors import Conflict, OutcomeUnknown, SourceChanged, StoreUnavailable
from dispatch_agent.publish import keys, listing, reader, records, upload
from dispatch_agent.publish.claims import Claim, check_fence, check_seal
from dispatch_agent.publish.commit import check_manifests, commit
from dispatch_agent.publish.keys import Order
from dispatch_agent.publish.once import Patience, Taken, write_once
from dispatch_agent.publish.parallel import Tick
from dispatch_agent.publish.records import CommitRecord, Part
from dispatch_agent.publish.verify import check_sizes
from dispatch_agent.store.base import KeyMissing, Store, Uploaded

Look = Callable[[bytes], tuple[Snapshot, Verdict]]
"""Looks at one save anew and judges it. Raises SourceChanged if it is gone."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A complete generation of a save in its place, as it was looked at."""

    place: Place
    snapshot: Snapshot

    @property
    def name(self) -> str:
        return names.encode(self.snapshot.name)


@dataclass(frozen=True, slots=True)
class Previous:
    """The last committed generation of the same name in the same folder: its number, and its record if it is known."""

    generation: int = 0
    record: CommitRecord | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """What stays the same over all saves of one publisher start.

    `name` tells people who publishes; `nonce` (12 hex digits) is drawn anew at every start. `weak`: the store cannot
    refuse a lost race, and the operator accepted that.
    """

    store: Store
    claim: Claim
    job: str
    folder: Path
    name: str
    nonce: str
    weak: bool
    in_place: bool
    workers: int
    clock: Clock
    patience: Patience
    _tries: list[int] = field(default_factory=lambda: [0])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next_try(self) -> int:
        """A number never given before since this start: spent, whatever becomes of the try."""
        with self._lock:
            self._tries[0] += 1
            return self._tries[0]


def next_prefix(session: Session, placed: Placed) -> str:
    """A data prefix that no other try has: of this one alone."""
    claim = session.claim
    return keys.part_prefix(claim.epoch, claim.attempt, placed.name, claim.rank, session.nonce, session.next_try())


def prepare(
    session: Session, placed: Placed, previous: Previous, prefix: str, look: Look, tick: Tick
) -> CommitRecord | None:
    """Everything up to the commit: the record to commit, whose bytes are all stored and verified.

    None if the content is that of the previous generation, which the store still has whole. Raises Fenced,
    SourceChanged, IntegrityError, Conflict, StoreError, and whatever `tick` raises.
    """
    check_fence(session.store, session.claim)
    manifests.check_entries(placed.snapshot)
    stored = _store(session, placed, prefix, tick)
    _look_again(placed, look)
    digests = {path: item.sha256 for path, item in stored.items()}
    manifest = manifests.of_snapshot(
        placed.snapshot, digests, rank=session.claim.rank, ranks=1, token=placed.place.signal.token
    )
    content = manifests.content_digest(manifest)
    if previous.record and content == previous.record.content and _still_there(session, previous.record):
        return None
    part = _part(session, placed, manifest, prefix)
    if part.names == "encoded":
        check_sizes(session.store, part, manifest)
    _write_manifest(session, part, manifest)
    return _record(session, placed, manifest, content, previous.generation + 1, part)


def ready(session: Session, record: CommitRecord) -> None:
    """Look once more before the commit is sent: not fenced, and every manifest as it was written.

    Raises Fenced, IntegrityError, StoreError.
    """
    check_fence(session.store, session.claim)
    check_manifests(session.store, record)


def publish(session: Session, record: CommitRecord) -> None:
    """Commit what `prepare` gave and `ready` passed. To be called again with the same record after OutcomeUnknown.

    Raises Conflict, OutcomeUnknown, StoreError; Fenced if it stands and came too late.
    """
    commit(session.store, record, weak=session.weak, patience=session.patience)
    check_seal(session.store, session.claim, record.key)


def discard(session: Session, prefix: str) -> None:
    """Remove what a try left that came to nothing: no commit names it, and none ever will. Raises StoreError.

    A write of it that is still on its way may land afterwards, under a key that nobody else has.
    """
    for item in [*session.store.list(prefix)]:
        session.store.delete(item.key)
    session.store.delete(keys.manifest_key(prefix))


def stands(session: Session, record: CommitRecord) -> bool:
    """Whether the record is there after all. Raises StoreError; Fenced if it stands and came too late."""
    try:
        there = session.store.read(record.key).data == records.commit_bytes(record)
    except KeyMissing:
        return False
    if there:
        check_seal(session.store, session.claim, record.key)
    return there


def _still_there(session: Session, record: CommitRecord) -> bool:
    """Whether the store still has that content: a copy that was pruned or lost is no reason not to send it again."""
    return not listing.pruned(session.store, record) and reader.whole(session.store, record)


def _store(session: Session, placed: Placed, prefix: str, tick: Tick) -> dict[bytes, Uploaded]:
    if session.in_place:
        return upload.digest(session.folder, placed.snapshot, tick=tick, workers=session.workers)
    upload.check_names(placed.snapshot, prefix, session.store.limits)
    return upload.upload(session.store, session.folder, placed.snapshot, prefix, tick=tick, workers=session.workers)


def _look_again(placed: Placed, look: Look) -> None:
    now, verdict = look(placed.snapshot.name)
    changed = scan.differences(placed.snapshot, now)
    if changed:
        msg = f"{placed.name} changed while it was read ({changed}); it is looked at again"
        raise SourceChanged(msg)
    if not isinstance(verdict, Complete) or verdict.signal.mark != placed.place.signal.mark:
        why = verdict.why if isinstance(verdict, Complete) else verdict.reason
        msg = f"{placed.name} is no longer complete by the signal it was read for ({why})"
        raise SourceChanged(msg)


def _part(session: Session, placed: Placed, manifest: Manifest, prefix: str) -> Part:
    data = manifests.canonical(manifest)
    return Part(
        rank=session.claim.rank,
        prefix=keys.in_place_prefix(session.claim.attempt, placed.name) if session.in_place else prefix,
        names="raw" if session.in_place else "encoded",
        manifest=keys.manifest_key(prefix),
        manifest_sha256=records.sha256(data),
        files=len(manifest.files),
        size=sum(file.size for file in manifest.files),
    )


def _write_manifest(session: Session, part: Part, manifest: Manifest) -> None:
    data = manifests.canonical(manifest)
    if session.weak:
        session.store.put(part.manifest, data)
        return
    try:
        write_once(session.store, part.manifest, data, session.patience)
    except Taken as taken:
        msg = (
            f"{part.manifest} at {session.store.url} holds other bytes, though its name carries this publisher's own "
            f"nonce: something else writes into this store; stop it"
        )
        raise Conflict(msg) from taken
    except OutcomeUnknown as error:
        # Whether a manifest landed matters to nobody: no commit names it, and the next try has another name.
        msg = f"the manifest of a try could not be written: {error}"
        raise StoreUnavailable(msg) from error


def _record(
    session: Session, placed: Placed, manifest: Manifest, content: str, generation: int, part: Part
) -> CommitRecord:
    signal = placed.place.signal
    return CommitRecord(
        order=Order(session.claim.epoch, session.claim.term, placed.place.number, session.nonce),
        attempt=session.claim.attempt,
        job=session.job,
        folder=session.claim.folder,
        save=placed.name,
        kind=manifest.kind,
        generation=generation,
        content=content,
        rule=signal.rule,
        mark=signal.mark,
        newest_ns=signal.newest_ns,
        sequence=signal.sequence,
        token=signal.token,
        parts=(part,),
        committed_at=session.clock.wall(),
        publisher=session.name,
    )
