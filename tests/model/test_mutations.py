"""The model can fail: the product with one protective step left out or done wrong, and the invariant that this breaks.

Each is found as the shortest schedule that does it. What breaks nothing is listed too: it only saves work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.model import actors
from tests.model.actors import Save
from tests.model.conftest import Explore, Mutation
from tests.model.explore import LYING, Scenario
from tests.model.scenarios import one_folder, pruned, racing, trained, two_attempts, two_folders

from dispatch_agent.checkpoint import completion, generations
from dispatch_agent.checkpoint import folder as bookkeeping
from dispatch_agent.errors import OutcomeUnknown
from dispatch_agent.publish import claims, commit, keys, listing, pointer, prune, publication, records, retention
from dispatch_agent.publish.once import Taken
from dispatch_agent.publish.publication import Session
from dispatch_agent.publish.publisher import Publisher
from dispatch_agent.publish.records import CommitRecord
from dispatch_agent.store.base import ConditionFailed, Document, Store


@dataclass(frozen=True)
class Broken:
    """What is done wrong, where it shows, and which invariant it breaks."""

    what: str
    mutations: Sequence[Mutation]
    scenario: Callable[[], Scenario]
    breaks: str


def nothing(*_: Any, **__: Any) -> None:
    """What a step does that was left out."""


def lost_at_412(store: Store, key: str, data: bytes, _patience: Any) -> None:
    try:
        store.create(key, data)
    except ConditionFailed:
        raise Taken(key, b"another's") from None


def won_at_412(store: Store, key: str, data: bytes, _patience: Any) -> None:
    try:
        store.create(key, data)
    except ConditionFailed:
        return


def everywhere(name: str, value: Any) -> list[Mutation]:
    return [(module, name, value) for module in (claims, commit, publication)]


def without_a_second_look(session: Session, record: CommitRecord) -> None:
    commit.check_manifests(session.store, record)


def pointer_without_condition(store: Store, order: keys.Order, data: bytes, found: Document | None) -> keys.Order:
    named = order if found is None else records.parse_pointer(found.data).order
    if named <= order:
        store.put(keys.POINTER, data)
    return max(named, order)


def pointer_whatever_it_names(store: Store, order: keys.Order, data: bytes, found: Document | None) -> keys.Order:
    if found is None:
        store.create(keys.POINTER, data)
    else:
        store.replace(keys.POINTER, data, found.version)
    return order


_advance = pointer.advance


def pointer_that_forgets(store: Store, record: CommitRecord, *, patience: Any, **_: Any) -> keys.Order:
    return _advance(store, record, known=False, patience=patience)


_publish, _write_manifest = publication.publish, publication._write_manifest
_manifests: dict[str, tuple[Any, ...]] = {}


def keep_the_manifest_for_later(session: Session, part: Any, manifest: Any) -> None:
    _manifests[part.manifest] = (session, part, manifest)


def commit_then_manifest(session: Session, record: CommitRecord) -> None:
    _publish(session, record)
    _, part, manifest = _manifests[record.parts[0].manifest]
    _write_manifest(session, part, manifest)


def seal_looked_at_before(session: Session, record: CommitRecord) -> None:
    claims.check_seal(session.store, session.claim, record.key)
    commit.commit(session.store, record, weak=session.weak, patience=session.patience)


_record = publication._record


def ordinal_by_commit(session: Session, *args: Any) -> CommitRecord:
    record = _record(session, *args)
    number = len(listing.orders(session.store, session.claim.epoch)) + 1
    return replace(record, order=replace(record.order, ordinal=number))


def newest_by_time(store: Store) -> Any:
    found = [listing.read_commit(store, order) for order in listing.all_orders(store)]
    return iter([r.order for r in sorted(found, key=lambda r: (r.newest_ns, r.order.epoch % 2), reverse=True)])


def newest_by_name(store: Store) -> Any:
    found = [listing.read_commit(store, order) for order in listing.all_orders(store)]
    return iter([r.order for r in sorted(found, key=lambda r: (r.save, -r.order.epoch), reverse=True)])


def always_a_new_term(store: Store, epoch: int, rank: int, _folder: str, data: bytes, *rest: Any) -> int:
    while True:
        term = max(claims._terms(store, epoch, rank), default=0) + 1
        try:
            claims.write_once(store, keys.folder_claim_key(epoch, rank, term), data, rest[-1])
        except Taken:
            continue
        return term


def one_term_for_all(store: Store, epoch: int, rank: int, _folder: str, data: bytes, *rest: Any) -> int:
    with suppress(Taken):
        claims.write_once(store, keys.folder_claim_key(epoch, rank, 1), data, rest[-1])
    return 1


def data_then_tombstone(pruner: prune.Pruner, todo: prune.Plan, _done: Any) -> None:
    prune._move_pointer(pruner, todo)
    for item in todo.doomed:
        prune._delete(pruner, item.sizes, last=True)
        prune._bury(pruner, item.record.order)


def sweep_without_seal(pruner: prune.Pruner, epoch: int) -> set[str]:
    there = listing.orders(pruner.store, epoch)
    return {part.data for order in there for part in listing.read_commit(pruner.store, order).parts}


def sweep_without_a_second_look(pruner: prune.Pruner, epoch: int) -> set[str]:
    prune._write(pruner, keys.seal_key(epoch), records.seal_bytes(epoch, pruner.name, pruner.clock.wall()))
    return set()


_in_order = generations.in_order
_publish_and_confirm = Publisher._publish


def forget_when_unknown(publisher: Publisher, record: CommitRecord) -> None:
    try:
        _publish_and_confirm(publisher, record)
    except OutcomeUnknown:
        publisher._forget(record.order.ordinal)
        raise


_bury = prune._bury


def bury_all_of_it(pruner: prune.Pruner, order: keys.Order) -> None:
    _bury(pruner, order)
    pruner.store.delete(keys.commit_key(order))


def by_ctime(snapshot: Any) -> generations.Fingerprint:
    return generations.Fingerprint((f"{snapshot.root.size} {snapshot.root.ctime_ns}",))


BROKEN = [
    Broken(
        "no second look at the fence", [(publication, "ready", without_a_second_look)], lambda: racing(1, 1), "stale"
    ),
    Broken("412 taken as lost", everywhere("write_once", lost_at_412), lambda: racing(1, faults=1), "I8"),
    Broken("412 taken as won", everywhere("write_once", won_at_412), lambda: two_attempts(1), "I5"),
    Broken(
        "a commit's 412 taken as won",
        [(commit, "write_once", won_at_412)],
        lambda: racing(1, faults=1),
        "I8",
    ),
    Broken(
        "the pointer written without a condition",
        [(pointer, "_step", pointer_without_condition)],
        lambda: racing(1, 1),
        "I4",
    ),
    Broken(
        "the pointer moved without looking where it is",
        [(pointer, "_step", pointer_whatever_it_names)],
        lambda: racing(1, 1),
        "I4",
    ),
    Broken(
        "a vanished pointer made anew", [(pointer, "advance", pointer_that_forgets)], lambda: racing(2, losses=1), "I4"
    ),
    Broken("a pointer made anew without a listing", [(pointer, "_newest", nothing)], lambda: racing(1, 1), "I4"),
    Broken("one number for all tries", [(Session, "next_try", lambda _: 1)], lambda: racing(1, faults=1), "I1"),
    Broken(
        "the commit before the manifest",
        [
            (publication, "_write_manifest", keep_the_manifest_for_later),
            (publication, "check_manifests", nothing),
            (publication, "publish", commit_then_manifest),
        ],
        lambda: racing(1),
        "I2",
    ),
    Broken(
        "no look at the manifest before the commit",
        [(publication, "check_manifests", nothing)],
        lambda: racing(1, faults=1, kinds=LYING),
        "I2",
    ),
    Broken(
        "no look at what was uploaded",
        [(publication, "check_sizes", nothing)],
        lambda: racing(1, faults=1, kinds=LYING),
        "I2",
    ),
    Broken(
        "the data before the tombstone", [(prune, "carry_out", data_then_tombstone)], lambda: pruned(before=(3,)), "I2"
    ),
    Broken(
        "data deleted without moving the pointer",
        [(prune, "_move_pointer", nothing)],
        lambda: pruned(1, 1, before=(1,)),
        "I4",
    ),
    Broken("swept without a seal", [(prune, "_seal", sweep_without_seal)], lambda: pruned(1, 2), "I2"),
    Broken(
        "swept without looking at the commits again",
        [(prune, "_seal", sweep_without_a_second_look)],
        lambda: pruned(1, 2),
        "I6",
    ),
    Broken("no look for the seal", [(publication, "check_seal", nothing)], lambda: pruned(1, 2), "I8"),
    Broken(
        "the seal looked for before the commit",
        [(publication, "publish", seal_looked_at_before)],
        lambda: pruned(1, 2),
        "I8",
    ),
    Broken("the newest by time", [(listing, "newest_first", newest_by_time)], lambda: racing(1, 1), "I7"),
    Broken("the newest by name", [(listing, "newest_first", newest_by_name)], lambda: racing(1, 1), "I7"),
    Broken("the ordinal by commit", [(publication, "_record", ordinal_by_commit)], lambda: racing(2, faults=1), "I9"),
    Broken("a new term at every start", [(claims, "_claim_term", always_a_new_term)], lambda: one_folder(1), "I9"),
    Broken("one term for all folders", [(claims, "_claim_term", one_term_for_all)], lambda: two_folders(1), "I8"),
    Broken("the epoch not claimed", [(claims, "_claim_epoch", nothing)], lambda: two_attempts(1), "I5"),
    Broken(
        "two saves of one look placed the wrong way",
        [(bookkeeping, "in_order", lambda c: _in_order(c)[::-1])],
        lambda: racing(2),
        "I9",
    ),
    Broken("every look a new generation", [(bookkeeping, "is_new", lambda *_: True)], lambda: one_folder(1), "I9"),
    Broken("no look at the fence", [(publication, "check_fence", nothing)], lambda: racing(1, 1), "stale"),
    Broken(
        "the pointer left behind at a start", [(Publisher, "_catch_up", nothing)], lambda: racing(1, faults=1), "I4"
    ),
    Broken(
        "a commit without an answer forgotten",
        [(Publisher, "_publish", forget_when_unknown)],
        lambda: racing(1, faults=2),
        "I1",
    ),
    Broken(
        "one nonce for all starts",
        [(actors, "nonce", lambda writer, *_: f"{writer:012x}")],
        lambda: racing(1, faults=1),
        "I1",
    ),
    Broken("commit records pruned too", [(prune, "_bury", bury_all_of_it)], lambda: pruned(before=(3,)), "I6"),
    Broken(
        "a prune that keeps one save",
        [(retention, "_window", lambda places, *_: len(places) - 1)],
        lambda: pruned(before=(2,)),
        "I6",
    ),
    Broken(
        "the content told by times of this mount",
        [(bookkeeping, "fingerprint", by_ctime), (completion, "fingerprint", by_ctime)],
        lambda: trained(Save("last", "A", 1), Save("last", "A", 1, 1)),
        "I8",
    ),
]

ONLY_SAVES_WORK = [
    Broken(
        "no list of what is committed at the start",
        [(Publisher, "_list_committed", nothing)],
        lambda: racing(1, faults=1),
        "",
    ),
    Broken(
        "no look at the manifest before the commit",
        [(publication, "check_manifests", nothing)],
        lambda: pruned(1, 2),
        "",
    ),
    Broken("no look at what was uploaded", [(publication, "check_sizes", nothing)], lambda: racing(1, 1, faults=1), ""),
]
"""The looks at what was uploaded are for stores that say something is stored and lose it (see above). A commit that
names a manifest which a prune has swept is known by the seal, to its publisher and to every reader."""


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.what)
def test_a_broken_protocol_is_found_out(explored: Explore, broken: Broken) -> None:
    found = explored(broken.scenario(), broken.mutations)
    assert found.violation is not None, f"{found.states} states, and nothing is wrong"
    assert found.violation.what.startswith(broken.breaks), str(found.violation)


@pytest.mark.parametrize("left_out", ONLY_SAVES_WORK, ids=lambda left_out: left_out.what)
def test_what_breaks_nothing_only_saves_work(explored: Explore, left_out: Broken) -> None:
    found = explored(left_out.scenario(), left_out.mutations)
    assert found.violation is None, str(found.violation)
    assert found.ends
