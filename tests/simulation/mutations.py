"""Ways to break the shipped code, one per mutation: what each invariant rests on, taken away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from dispatch_agent.checkpoint import completion, generations, marks
from dispatch_agent.checkpoint import folder as bookkeeping
from dispatch_agent.checkpoint.leaving import Stays
from dispatch_agent.checkpoint.reading import SourceFile
from dispatch_agent.checkpoint.save import Snapshot
from dispatch_agent.publish import (
    claims,
    commit,
    keys,
    listing,
    once,
    oneshot,
    pointer,
    prune,
    prune_local,
    publication,
    retention,
)
from dispatch_agent.publish.placing import Placer
from dispatch_agent.publish.publication import Session
from dispatch_agent.publish.publisher import Publisher
from dispatch_agent.store.base import ConditionFailed, KeyMissing

Mutation = Callable[[], AbstractContextManager[None]]
MUTATIONS: dict[str, Mutation] = {}


def mutation(make: Callable[[], Iterator[Any]]) -> Mutation:
    made = contextmanager(make)
    MUTATIONS[make.__name__.strip("_")] = made
    return made


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _giving(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


@mutation
def the_fence_refuses_nobody() -> Iterator[None]:
    with (
        mock.patch.object(publication, "check_fence", _nothing),
        mock.patch("dispatch_agent.publish.publisher.check_fence", _nothing),
    ):
        yield


@mutation
def no_second_look_at_the_fence() -> Iterator[None]:
    def ready(session: Session, record: Any) -> None:
        publication.check_manifests(session.store, record)

    with mock.patch.object(publication, "ready", ready):
        yield


@mutation
def the_fence_knows_no_terms() -> Iterator[None]:
    def fence(store: Any, mine: claims.Claim) -> None:
        claims.check_fence(store, replace(mine, term=10_000))

    with (
        mock.patch.object(publication, "check_fence", fence),
        mock.patch("dispatch_agent.publish.publisher.check_fence", fence),
    ):
        yield


@mutation
def another_attempt_may_share_the_epoch() -> Iterator[None]:
    with mock.patch.object(claims, "_claim_epoch", _nothing):
        yield


@mutation
def a_folder_shares_its_term() -> Iterator[None]:
    with mock.patch.object(claims, "_claim_term", _giving(1)):
        yield


def _write_once(wins: bool) -> Callable[..., None]:
    def write_once(store: Any, key: str, data: bytes, _patience: Any) -> None:
        try:
            store.create(key, data)
        except ConditionFailed:
            if not wins:
                raise once.Taken(key, b"") from None

    return write_once


@mutation
def a_refused_write_is_taken_for_lost() -> Iterator[None]:
    with mock.patch.object(commit, "write_once", _write_once(wins=False)):
        yield


@mutation
def a_refused_write_is_taken_for_won() -> Iterator[None]:
    with mock.patch.object(commit, "write_once", _write_once(wins=True)):
        yield


@mutation
def a_failed_commit_is_cleaned_away() -> Iterator[None]:
    publish = publication.publish

    def cleaned(session: Session, record: Any) -> None:
        try:
            publish(session, record)
        except Exception:
            publication.discard(session, record.parts[0].prefix)
            raise

    with mock.patch.object(publication, "publish", cleaned):
        yield


@mutation
def a_commit_is_sent_under_a_new_name() -> Iterator[None]:
    """A retry after an unknown outcome prepares the save anew instead of sending the same record."""
    publish = Publisher._publish

    def forgetful(self: Publisher, record: Any) -> None:
        try:
            publish(self, record)
        finally:
            self._prepared.clear()
            self._sent.clear()

    with mock.patch.object(Publisher, "_publish", forgetful):
        yield


@mutation
def the_pointer_is_a_plain_put() -> Iterator[None]:
    def step(store: Any, order: Any, data: bytes, _found: Any) -> Any:
        store.put(keys.POINTER, data)
        return order

    with mock.patch.object(pointer, "_step", step):
        yield


@mutation
def the_pointer_is_not_compared() -> Iterator[None]:
    def step(store: Any, order: Any, data: bytes, _found: Any) -> Any:
        try:
            store.replace(keys.POINTER, data, store.read(keys.POINTER).version)
        except KeyMissing:
            store.create(keys.POINTER, data)
        return order

    with mock.patch.object(pointer, "_step", step):
        yield


@mutation
def try_numbers_come_again() -> Iterator[None]:
    with mock.patch.object(Session, "next_try", _giving(1)):
        yield


@mutation
def nonces_come_again() -> Iterator[None]:
    """A restarted publisher goes on under its last start's name."""
    opened = publication.next_prefix

    def prefix(session: Session, placed: Any) -> str:
        return opened(session, placed).replace(session.nonce, "0123456789ab")

    with mock.patch.object(publication, "next_prefix", prefix):
        yield


@mutation
def the_manifest_is_not_looked_at_again() -> Iterator[None]:
    with mock.patch.object(publication, "check_manifests", _nothing):
        yield


@mutation
def sizes_are_not_looked_at() -> Iterator[None]:
    with mock.patch.object(publication, "check_sizes", _nothing):
        yield


@mutation
def nothing_is_read_back() -> Iterator[None]:
    with mock.patch("dispatch_agent.publish.upload.read_back", _nothing):
        yield


@mutation
def the_commit_comes_before_the_upload() -> Iterator[None]:
    send = publication.upload.upload

    def later(store: Any, folder: Any, snapshot: Any, prefix: str, *, tick: Any, workers: int) -> Any:
        unsent.append(lambda: send(store, folder, snapshot, prefix, tick=tick, workers=workers))
        return publication.upload.digest(folder, snapshot, tick=tick, workers=workers)

    publish = publication.publish

    def first(session: Session, record: Any) -> None:
        publish(session, record)
        for do in unsent:
            do()
        unsent.clear()

    unsent: list[Callable[[], Any]] = []
    with (
        mock.patch.object(publication.upload, "upload", later),
        mock.patch.object(publication, "check_sizes", _nothing),
        mock.patch.object(publication, "publish", first),
    ):
        yield


@mutation
def a_change_of_the_save_is_not_noticed() -> Iterator[None]:
    """Neither of the file that is being read nor, afterwards, of the whole. Either look alone suffices."""
    with mock.patch.object(publication, "_look_again", _nothing), mock.patch.object(SourceFile, "_compare", _nothing):
        yield


@mutation
def places_are_not_durable() -> Iterator[None]:
    """Every publisher start counts for itself."""
    fresh: list[Any] = []

    def place(_folder: Any, candidates: Any) -> None:
        fresh.extend(generations.in_order(candidates))

    def places(self: Placer) -> list[Any]:
        for name, signal, content in fresh:
            self._places.append(generations.Place(len(self._places) + 1, name, signal, content))
        fresh.clear()
        return self._places

    with mock.patch.object(bookkeeping, "place", place), mock.patch.object(Placer, "places", places):
        yield


@mutation
def committed_is_not_listed_at_the_start() -> Iterator[None]:
    with mock.patch.object(Publisher, "_list_committed", _nothing):
        yield


@mutation
def what_is_already_there_is_not_remembered() -> Iterator[None]:
    with mock.patch.object(bookkeeping, "note_already", _nothing):
        yield


@mutation
def saves_of_one_look_are_ordered_by_name() -> Iterator[None]:
    with mock.patch.object(bookkeeping, "in_order", lambda candidates: sorted(candidates, key=lambda c: c[0])):
        yield


@mutation
def the_same_content_is_a_new_generation() -> Iterator[None]:
    with mock.patch.object(Publisher, "_previous", _giving(publication.Previous())):
        yield


@mutation
def another_content_counts_as_already_there() -> Iterator[None]:
    prepare = publication.prepare

    def never_again(session: Session, placed: Any, previous: Any, *rest: Any) -> Any:
        return None if previous.generation else prepare(session, placed, previous, *rest)

    with mock.patch.object(publication, "prepare", never_again):
        yield


@mutation
def any_word_is_fresh() -> Iterator[None]:
    """A marker counts whatever was written after it."""
    with (
        mock.patch("dispatch_agent.checkpoint.completion.not_fresh", _nothing),
        mock.patch("dispatch_agent.checkpoint.completion.fingerprint", _giving(mock.Mock(digest=ANY))),
    ):
        yield


class _Any(str):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


ANY = _Any()


@mutation
def the_seal_is_not_looked_for() -> Iterator[None]:
    with mock.patch.object(publication, "check_seal", _nothing):
        yield


@mutation
def a_one_shot_believes_any_commit_of_the_name() -> Iterator[None]:
    with mock.patch.object(oneshot, "_content", _giving(ANY)):
        yield


@mutation
def a_prune_moves_no_pointer() -> Iterator[None]:
    with mock.patch.object(prune, "_move_pointer", _nothing):
        yield


@mutation
def a_prune_writes_no_tombstone() -> Iterator[None]:
    with mock.patch.object(prune, "_bury", _nothing):
        yield


@mutation
def a_prune_deletes_before_its_tombstone() -> Iterator[None]:
    order: list[Any] = []
    delete, bury = prune._delete, prune._bury

    def delete_first(pruner: Any, names: Any, *, last: bool) -> None:
        delete(pruner, names, last=last)
        if last:
            bury(pruner, order.pop())

    with (
        mock.patch.object(prune, "_bury", lambda _, commit: order.append(commit)),
        mock.patch.object(prune, "_delete", delete_first),
    ):
        yield


@mutation
def a_prune_keeps_one_save_only() -> Iterator[None]:
    choose = retention.choose

    def one(*args: Any, **kwargs: Any) -> Any:
        return choose(*args, **{**kwargs, "newest": 1})

    with mock.patch.object(retention, "choose", one):
        yield


@mutation
def a_prune_takes_the_newest() -> Iterator[None]:
    with mock.patch.object(
        retention, "choose", lambda commits, pruned, **_: [o for o in commits if o not in pruned][-1:]
    ):
        yield


@mutation
def a_prune_sweeps_living_epochs() -> Iterator[None]:
    with mock.patch.object(retention, "dead_below", _giving(10**15)):
        yield


@mutation
def a_prune_seals_nothing() -> Iterator[None]:
    def named(pruner: Any, epoch: int) -> set[str]:
        found = [listing.read_commit(pruner.store, order) for order in listing.orders(pruner.store, epoch)]
        return {part.data for record in found for part in record.parts}

    with mock.patch.object(prune, "_seal", named):
        yield


@mutation
def a_prune_does_not_list_again() -> Iterator[None]:
    def seal(pruner: Any, epoch: int) -> set[str]:
        prune._write(pruner, keys.seal_key(epoch), prune.records.seal_bytes(epoch, pruner.name, ""))
        return set()

    with mock.patch.object(prune, "_seal", seal):
        yield


@mutation
def every_start_claims_a_new_term() -> Iterator[None]:
    with mock.patch.object(claims.records, "folder_of_claim", _giving("")):
        yield


@mutation
def a_change_of_owner_is_a_change_of_content() -> Iterator[None]:
    def fingerprint(snapshot: Snapshot) -> generations.Fingerprint:
        times = tuple(str(entry.ctime_ns) for entry in (snapshot.root, *snapshot.entries))
        return generations.Fingerprint(tuple(sorted((*generations.fingerprint(snapshot).parts, *times))))

    with (
        mock.patch.object(bookkeeping, "fingerprint", fingerprint),
        mock.patch.object(marks, "fingerprint", fingerprint),
        mock.patch.object(completion, "fingerprint", fingerprint),
    ):
        yield


@mutation
def what_leaves_the_volume_is_not_compared() -> Iterator[None]:
    def place_of(save: Snapshot, _marker: Any, places: list[Any], _finished: Any, commits: Any) -> Any:
        committed = [place for place in places if place.name == save.name and place.number in commits]
        if not committed:
            msg = "it is not published"
            raise Stays(msg)
        return committed[-1], committed[-1]

    with (
        mock.patch.object(prune_local, "_place_of", place_of),
        mock.patch.object(prune_local, "_check_equal", _nothing),
    ):
        yield


@mutation
def what_leaves_the_volume_is_not_published() -> Iterator[None]:
    def record_of(store: Any, *_: Any) -> Any:
        for order in listing.newest_first(store):
            return listing.read_commit(store, order)
        msg = "there is no commit at all"
        raise Stays(msg)

    with (
        mock.patch.object(prune_local, "_place_of", _giving((mock.Mock(number=1),) * 2)),
        mock.patch.object(prune_local, "_record_of", record_of),
        mock.patch.object(prune_local, "_check_equal", _nothing),
    ):
        yield


@mutation
def a_pointer_that_was_left_behind_stays_there() -> Iterator[None]:
    with mock.patch.object(Publisher, "_catch_up", _nothing):
        yield


@mutation
def a_refused_pointer_is_taken_for_moved() -> Iterator[None]:
    step = pointer._step

    def moved(store: Any, order: Any, data: bytes, found: Any) -> Any:
        try:
            return step(store, order, data, found)
        except ConditionFailed:
            return order

    with mock.patch.object(pointer, "_step", moved), mock.patch.object(Publisher, "_catch_up", _nothing):
        yield
