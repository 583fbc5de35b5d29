"""`publish prune`: old saves leave the store, and so does what dead executions left there (invariant I6).

    look      -> every commit, tombstone and key of data; the records of what is there
    choose    -> what is to go (retention)
    pointer   -> to the newest commit, or stop: a write to it that is still on its way is then refused
    tombstone -> from here on readers pass the commit over
    delete    -> its files, then its manifest: a prune that was killed goes on where it was
    seal      -> the epochs of the dead; then look at their commits again, and delete what none of them names

Commit records stay for ever: they say what was published, so that nothing is published twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dispatch_agent.clock import Clock
from dispatch_agent.errors import (
    AgentError,
    IntegrityError,
    NewerFormat,
    OutcomeUnknown,
    StoreDenied,
    StoreTooWeak,
    StoreUnavailable,
)
from dispatch_agent.publish import keys, listing, pointer, reader, records, retention
from dispatch_agent.publish.keys import Order
from dispatch_agent.publish.once import Patience, Taken, write_once
from dispatch_agent.publish.records import CommitRecord, Part
from dispatch_agent.store.base import Store
from dispatch_agent.store.capabilities import Leftover, Sweeps


@dataclass(frozen=True, slots=True)
class Doomed:
    """One commit that is to go, and the keys of its data that are still there."""

    record: CommitRecord
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Litter:
    """What is there of one part that no commit names, in a dead execution's epoch."""

    epoch: int
    prefix: str
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a prune is to do. `kept` are the commits that stay, ascending; `doomed` ascend too.

    `problems` keep something from being pruned; they are for whoever asked to raise at the end.
    """

    kept: tuple[CommitRecord, ...]
    doomed: tuple[Doomed, ...]
    litter: tuple[Litter, ...]
    leftovers: tuple[Leftover, ...]
    problems: tuple[AgentError, ...]

    @property
    def sizes(self) -> Mapping[str, int]:
        """Every key that goes, and its bytes; those of `leftovers` no store tells."""
        going = [*(item.sizes for item in self.doomed), *(item.sizes for item in self.litter)]
        return {key: size for sizes in going for key, size in sizes.items()}


@dataclass(frozen=True, slots=True)
class Pruner:
    """Who prunes, and how. `weak`: the store cannot refuse a lost race. `points`: it has a pointer to move."""

    store: Store
    name: str
    weak: bool
    points: bool
    workers: int
    clock: Clock
    patience: Patience


def plan(store: Store, *, newest: int, every: int | None, workers: int, full: bool = False) -> Plan:
    """Look, and change nothing. `newest` and `every` as in `retention.choose`; `newest` is at least 2.

    `full`: a save counts among the newest only if every byte of it was read and is right; else by its manifest's digest
    and its files' sizes.

    Raises NewerFormat (a record that only a later version can read), IntegrityError (what executions agreed to resume
    from cannot be read), StoreError.
    """
    if newest < retention.LEAST:
        msg = f"newest is {newest}; a store keeps at least {retention.LEAST} saves"
        raise ValueError(msg)
    commits, gone = listing.all_orders(store), frozenset(listing.all_orders(store, keys.PRUNED))
    data = _data(store)
    there = [order for order in commits if order not in gone]
    found, problems = _read(store, there, workers)
    held = _resumed(store, there) | {order for order, record in found.items() if record.in_place}
    dead = retention.dead_below(commits, gone)
    doomed = set(
        retention.choose(
            commits,
            gone,
            newest=newest,
            every=every,
            whole=lambda order: order in found and _whole(store, found[order], workers, full=full),
            held=held,
        )
    )
    doomed |= _too_late(store, found, data, dead)
    named = {part.data for record in found.values() for part in record.parts}
    kept = {part.data for order, record in found.items() if order not in doomed for part in record.parts}
    # What two commits name, stays: no publisher of ours does that, and one of the two is to be kept.
    going = {prefix: sizes for prefix, sizes in data.items() if prefix not in kept}
    unreadable = {order.epoch for order in there if order not in found}
    litter: list[Litter] = []
    unfinished: dict[str, dict[str, int]] = {}
    for prefix, sizes in data.items():
        epoch = keys.epoch_of_data(prefix) or 0
        if prefix in named or epoch in unreadable:
            continue
        if epoch < dead:
            litter.append(Litter(epoch, prefix, sizes))
        else:
            unfinished[prefix] = sizes
    leftovers, denied = _leftovers(store, dead)
    return Plan(
        kept=tuple(record for order, record in found.items() if order not in doomed),
        doomed=tuple(
            sorted(
                [
                    *(_doomed(found[order], going) for order in doomed if order in found),
                    *_interrupted(store, gone, unfinished, workers),
                ],
                key=lambda item: item.record.order,
            )
        ),
        litter=tuple(sorted(litter, key=lambda item: item.prefix)),
        leftovers=leftovers,
        problems=(*problems, *denied),
    )


def carry_out(pruner: Pruner, todo: Plan, done: Callable[[Doomed | Litter | Leftover], None]) -> None:
    """Do what `plan` said; `done` is told of each thing that is gone. What is killed half-way is finished by the next.

    Raises OutcomeUnknown, IntegrityError or StoreTooWeak if the pointer cannot be moved to the newest commit (then
    nothing was deleted), StoreError.
    """
    if not (todo.doomed or todo.litter or todo.leftovers):
        return
    _move_pointer(pruner, todo)
    for item in todo.doomed:
        _bury(pruner, item.record.order)
        _delete(pruner, item.sizes, last=True)
        done(item)
    for epoch in sorted({item.epoch for item in todo.litter}):
        named = _seal(pruner, epoch)
        for part in todo.litter:
            if part.epoch == epoch and part.prefix not in named:
                _delete(pruner, part.sizes, last=False)
                done(part)
    if isinstance(pruner.store, Sweeps):
        for leftover in todo.leftovers:
            pruner.store.remove(leftover)
            done(leftover)


def _data(store: Store) -> dict[str, dict[str, int]]:
    """Every key below `data/` that is ours and its size, by the part it belongs to."""
    parts: dict[str, dict[str, int]] = {}
    for item in store.list(keys.DATA):
        prefix = keys.part_of(item.key)
        if prefix is not None:
            parts.setdefault(prefix, {})[item.key] = item.size
    return parts


def _read(
    store: Store, orders: Sequence[Order], workers: int
) -> tuple[dict[Order, CommitRecord], tuple[IntegrityError, ...]]:
    def read(order: Order) -> CommitRecord | IntegrityError:
        try:
            return listing.read_listed(store, order)
        except NewerFormat:
            raise
        except IntegrityError as error:
            return error

    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="prune") as pool:
        answers = list(zip(orders, pool.map(read, orders), strict=True))
    readable = {order: answer for order, answer in answers if isinstance(answer, CommitRecord)}
    return readable, tuple(answer for _, answer in answers if isinstance(answer, IntegrityError))


def _resumed(store: Store, there: list[Order]) -> frozenset[Order]:
    """What executions that may be starting have agreed to resume from."""
    newest = there[-1].epoch if there else 0
    held = set()
    for name in store.folders(keys.CLAIMS):
        epoch = keys.parse_epoch_folder(name)
        if epoch is None or epoch < newest:
            continue
        for item in store.list(keys.claims_prefix(epoch)):
            if keys.is_resume_claim(item.key.rpartition("/")[2]):
                held.add(records.resume_choice(store.read(item.key).data, item.key))
    return frozenset(order for order in held if order is not None)


def _whole(store: Store, record: CommitRecord, workers: int, *, full: bool) -> bool:
    """What counts as a save that is kept: whole by its sizes, or if `full` by its bytes."""
    if not full:
        return reader.whole(store, record)
    try:
        reader.verify(store, record, tick=lambda _: None, workers=workers)
    except IntegrityError:
        return False
    return True


def _too_late(
    store: Store, found: Mapping[Order, CommitRecord], data: Mapping[str, Mapping[str, int]], dead: int
) -> set[Order]:
    """Commits that landed after their epoch was sealed, and whose data went with the rest."""
    suspects = {
        order
        for order, record in found.items()
        if order.epoch < dead and any(_swept(part, data.get(part.data, ())) for part in record.parts)
    }
    sealed = {epoch for epoch in {order.epoch for order in suspects} if listing.sealed(store, epoch)}
    return {order for order in suspects if order.epoch in sealed}


def _swept(part: Part, there: Collection[str]) -> bool:
    """Whether any key is missing: of one whose manifest landed twice, only files are."""
    files = sum(not keys.is_manifest(key) for key in there)
    return part.manifest not in there or (part.names == "encoded" and files < part.files)


def _interrupted(
    store: Store, gone: frozenset[Order], unnamed: Mapping[str, Mapping[str, int]], workers: int
) -> list[Doomed]:
    """Commits with a tombstone whose data is not all gone: a prune was killed. Asked only where data is that no commit
    names: the tombstoned commits of the publishers that wrote it."""
    writers = {(keys.epoch_of_data(prefix), keys.nonce_of_part(prefix)) for prefix in unnamed}
    candidates = sorted(order for order in gone if (order.epoch, order.nonce) in writers)
    found, _ = _read(store, candidates, workers)  # one that cannot be read was said when it was pruned
    half = [_doomed(record, unnamed) for record in found.values()]
    return [item for item in half if item.sizes]


def _doomed(record: CommitRecord, data: Mapping[str, Mapping[str, int]]) -> Doomed:
    return Doomed(record, {key: size for part in record.parts for key, size in data.get(part.data, {}).items()})


def _leftovers(store: Store, dead: int) -> tuple[tuple[Leftover, ...], tuple[AgentError, ...]]:
    if not isinstance(store, Sweeps):
        return (), ()
    try:
        found = [(keys.epoch_of_data(leftover.key), leftover) for leftover in store.leftovers(keys.DATA)]
    except StoreDenied as error:
        return (), (error,)
    return tuple(leftover for epoch, leftover in found if epoch is not None and epoch < dead), ()


def _move_pointer(pruner: Pruner, todo: Plan) -> None:
    """To the newest commit that stays. Only then is a write of an older one, still on its way, sure to be refused."""
    if not pruner.points:
        at = pointer.read(pruner.store)
        if at is not None and at.order in {item.record.order for item in todo.doomed}:
            msg = (
                f"{keys.POINTER} at {pruner.store.url} names {at.commit}, which is to be pruned, and this store has no "
                f"safe way to move it: remove {keys.POINTER} by hand if nothing reads it, and prune again"
            )
            raise StoreTooWeak(msg)
    elif todo.kept:
        pointer.advance(pruner.store, todo.kept[-1], known=False, patience=pruner.patience)
        pointer.link(pruner.store, pruner.patience)


def _bury(pruner: Pruner, order: Order) -> None:
    data = records.tombstone_bytes(order, pruner.name, pruner.clock.wall())
    _write(pruner, keys.tombstone_key(order), data)


def _seal(pruner: Pruner, epoch: int) -> set[str]:
    """Seal the epoch; then the parts that its commits name. What is committed from here on is refused by its own
    publisher, who looks for the seal."""
    _write(pruner, keys.seal_key(epoch), records.seal_bytes(epoch, pruner.name, pruner.clock.wall()))
    gone = set(listing.orders(pruner.store, epoch, keys.PRUNED))
    there = [order for order in listing.orders(pruner.store, epoch) if order not in gone]
    found, problems = _read(pruner.store, there, pruner.workers)
    if problems:
        raise problems[0]
    return {part.data for record in found.values() for part in record.parts}


def _write(pruner: Pruner, key: str, data: bytes) -> None:
    if pruner.weak:
        pruner.store.put(key, data)
        return
    try:
        write_once(pruner.store, key, data, pruner.patience)
    except Taken:
        return  # another prune was here before: what counts is that it stands
    except OutcomeUnknown as error:
        msg = f"nothing was deleted that needs {key}: {error}"
        raise StoreUnavailable(msg) from error


def _delete(pruner: Pruner, names: Iterable[str], *, last: bool) -> None:
    """Delete a part's keys, its manifest `last` or first: last, and a prune that is killed knows what it was at;
    first, and a publisher that is about to commit the part sees that it cannot."""
    manifests = [name for name in names if keys.is_manifest(name)]
    files = [name for name in names if not keys.is_manifest(name)]
    with ThreadPoolExecutor(max_workers=pruner.workers, thread_name_prefix="prune") as pool:
        for batch in (files, manifests) if last else (manifests, files):
            list(pool.map(pruner.store.delete, batch))
