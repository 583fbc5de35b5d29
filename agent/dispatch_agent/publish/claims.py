"""Who may publish: the epoch's attempt, the folder's term, and the fence (invariant I5).

An epoch belongs to one attempt, and under it each rank's folders have terms 1, 2, …: one per folder, claimed at the
folder's first publisher start and taken again by every later one. Claims are created, never replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatch_agent.errors import (
    Conflict,
    EpochCollision,
    Fenced,
    IntegrityError,
    OutcomeUnknown,
    SettingsError,
    StoreTooWeak,
    StoreUnavailable,
)
from dispatch_agent.identity import split_epoch
from dispatch_agent.publish import keys, records
from dispatch_agent.publish.listing import epochs, orders, read_listed, sealed
from dispatch_agent.publish.once import Patience, Taken, write_once
from dispatch_agent.store.base import Store


@dataclass(frozen=True, slots=True)
class Claim:
    """What this publisher may write under: an epoch's attempt, a rank, and the term of one folder."""

    epoch: int
    attempt: str
    rank: int
    folder: str
    term: int


def claim(
    store: Store,
    epoch: int,
    attempt: str,
    rank: int,
    folder: str,
    *,
    publisher: str,
    at: str,
    weak: bool,
    patience: Patience,
) -> Claim:
    """Claim the epoch for the attempt and a term for the folder; both are found again by a later start.

    `publisher` and `at` tell people who and when. `weak`: the store cannot refuse, so every claim has a name of its
    own and all are listed after they are written. Raises EpochCollision, Fenced (a later folder of this rank has
    taken over), StoreError.
    """
    try:
        _claim_epoch(store, epoch, attempt, weak, patience)
        data = records.folder_claim_bytes(folder, publisher, at)
        term = _claim_term(store, epoch, rank, folder, data, weak, patience)
    except OutcomeUnknown as error:
        # A claim that landed unseen is found again by the next start: to whoever waits, the store is just not there.
        msg = f"epoch {epoch} could not be claimed: {error}"
        raise StoreUnavailable(msg) from error
    return Claim(epoch, attempt, rank, folder, term)


def rank_of(store: Store, epoch: int, folder: str) -> int | None:
    """The rank that a folder was claimed for; None if it never was. Raises IntegrityError, StoreError."""
    for item in store.list(keys.claims_prefix(epoch)):
        parsed = keys.parse_folder_claim(item.key.rpartition("/")[2])
        if parsed and records.folder_of_claim(store.read(item.key).data, item.key) == folder:
            return parsed[0]
    return None


def check_one_volume(store: Store, epoch: int, folder: str) -> None:
    """Before a rank but the first claims for all of them: on a volume of its own it would fence the first one's folder.

    Raises SettingsError if another folder has claimed the epoch, StoreError.
    """
    for item in store.list(keys.claims_prefix(epoch)):
        if keys.parse_folder_claim(item.key.rpartition("/")[2]):
            other = records.folder_of_claim(store.read(item.key).data, item.key)
            if other != folder:
                msg = (
                    f"{item.key} at {store.url} is of another folder ({other}) of this execution than the one here "
                    f"({folder}): the ranks do not share one volume, so drop --shared-volume; volumes of their own are "
                    f"not in this version"
                )
                raise SettingsError(msg)


def check_job(store: Store, job: str, epoch: int) -> None:
    """Whether what is published is of this job, or of one that it supersedes: those have lower generations. A listing
    and a small read more than the fence takes; nothing is asked where `job` is empty.

    Raises Conflict, StoreError. Of two jobs that share a destination each would fence the other, and resume from it.
    """
    newest = max(epochs(store), default=0) if job else 0
    if not newest or split_epoch(newest)[0] != split_epoch(epoch)[0]:
        return
    try:
        other = read_listed(store, orders(store, newest)[-1]).job
    except IntegrityError:
        return  # it says of itself that it is damaged to everybody who reads; whose it was nobody can tell
    if other not in {"", job}:
        msg = (
            f"{store.url} is job {other}'s, whose newest save is of epoch {newest}, and this is job {job} of the same "
            f"generation: give each job its own destination, or raise the generation of one that supersedes another"
        )
        raise Conflict(msg)


def check_fence(store: Store, mine: Claim) -> None:
    """Two listings. Raises Fenced if a newer epoch has a commit, or a later folder publishes for this rank."""
    newest = max(epochs(store), default=0)
    if newest > mine.epoch:
        msg = (
            f"epoch {mine.epoch} (attempt {mine.attempt}) is stale: epoch {newest} has published to {store.url}; "
            f"nothing of this execution is lost locally, and nothing more of it will be published"
        )
        raise Fenced(msg)
    latest_term = max(_terms(store, mine.epoch, mine.rank), default=0)
    if latest_term > mine.term:
        msg = (
            f"term {mine.term} of rank {mine.rank} in epoch {mine.epoch} is over: another folder of the same execution "
            f"publishes to {store.url} as term {latest_term}; this folder ({mine.folder}) is fenced"
        )
        raise Fenced(msg)


def check_seal(store: Store, mine: Claim, commit: str) -> None:
    """Whether `commit`, which is there, came in time. One small read.

    Raises Fenced if a prune has sealed the epoch: it removes there what no commit named when it looked, and this one
    may have landed after that.
    """
    if not sealed(store, mine.epoch):
        return
    msg = (
        f"epoch {mine.epoch} (attempt {mine.attempt}) is sealed: newer executions have published to {store.url} and "
        f"the rest of this one was pruned. {commit} came too late to count on; the save itself is untouched"
    )
    raise Fenced(msg)


def _claim_epoch(store: Store, epoch: int, attempt: str, weak: bool, patience: Patience) -> None:
    if weak:
        own = keys.weak_attempt_claim_key(epoch, attempt)
        store.put(own, attempt.encode())
        for item in store.list(keys.claims_prefix(epoch)):
            name = item.key.rpartition("/")[2]
            if name.startswith("attempt.") and item.key != own:
                raise _collision(store, epoch, attempt, store.read(item.key).data)
        return
    try:
        write_once(store, keys.attempt_claim_key(epoch), attempt.encode(), patience)
    except Taken as taken:
        raise _collision(store, epoch, attempt, taken.data) from taken


def _collision(store: Store, epoch: int, attempt: str, other: bytes) -> EpochCollision:
    return EpochCollision(
        f"epoch {epoch} at {store.url} belongs to attempt {other.decode(errors='replace')!r}, not to {attempt!r}: a "
        f"counter was reset or two jobs share a destination; give each job its own destination, or raise the generation"
    )


def _claim_term(store: Store, epoch: int, rank: int, folder: str, data: bytes, weak: bool, patience: Patience) -> int:
    while True:
        terms = _terms(store, epoch, rank)
        for term, claims in terms.items():
            for key in claims:
                if records.folder_of_claim(store.read(key).data, key) == folder:
                    _check_alone(store, claims)
                    return term
        term = max(terms, default=0) + 1
        if weak:
            store.put(keys.weak_folder_claim_key(epoch, rank, term, folder), data)
            _check_alone(store, _terms(store, epoch, rank).get(term, []))
            return term
        try:
            write_once(store, keys.folder_claim_key(epoch, rank, term), data, patience)
        except Taken:
            continue
        return term


def _check_alone(store: Store, claims: list[str]) -> None:
    """Only a store that cannot refuse holds two claims of one term. Neither folder can know whether the other goes on:
    both are refused, at every start, until somebody decides."""
    if not claims:
        msg = f"{store.url} does not list the claim that was just written: two publishers could overlook each other"
        raise StoreTooWeak(msg)
    if len(claims) > 1:
        msg = (
            f"{len(claims)} folders have claimed one term at {store.url}, which cannot refuse a lost race: "
            f"{' and '.join(sorted(claims))}; stop the publisher of one, remove its claim and start the other again, "
            f"or use a store with conditional writes"
        )
        raise Conflict(msg)


def _terms(store: Store, epoch: int, rank: int) -> dict[int, list[str]]:
    terms: dict[int, list[str]] = {}
    for item in store.list(keys.claims_prefix(epoch)):
        parsed = keys.parse_folder_claim(item.key.rpartition("/")[2])
        if parsed and parsed[0] == rank:
            terms.setdefault(parsed[1], []).append(item.key)
    return terms
