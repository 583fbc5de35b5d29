"""`publish prune --local`, `watch --keep-local`: older executions' saves leave the volume, once the store has them.

    look    -> every exec/<attempt> of a lower epoch: its saves as they stand, and the places that they were given
    compare -> the commit of each place stands at the store, whole, and is of what stands here
    keep    -> the newest few of those that might go
    move    -> out of the folder by one rename, made durable: a publisher sees all of a save, or nothing of it
    look    -> still what was compared; else it goes back
    delete  -> in `.dispatch/`: what a killed run left there is settled by the next one

Only saves go, and what `restore` brought for an older execution. The records in `.dispatch/` stay, so that a publisher
of the folder knows what is published, and so does everything beside the saves. No link is followed.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dispatch_agent.checkpoint import folder as bookkeeping
from dispatch_agent.checkpoint import leaving, names, scan, walk
from dispatch_agent.checkpoint import manifest as manifests
from dispatch_agent.checkpoint.folder import Execution, Place
from dispatch_agent.checkpoint.leaving import Stays
from dispatch_agent.checkpoint.manifest import Manifest
from dispatch_agent.checkpoint.save import Marker, Snapshot
from dispatch_agent.clock import Clock
from dispatch_agent.errors import AgentError, IntegrityError, NewerFormat, SaveError, SettingsError
from dispatch_agent.logs import Log
from dispatch_agent.publish import keys, listing, reader, upload
from dispatch_agent.publish.keys import Order
from dispatch_agent.publish.records import CommitRecord
from dispatch_agent.publish.verify import check_sizes
from dispatch_agent.store.base import Store
from dispatch_agent.store.posix import PosixStore

QUIET = 60.0
"""Seconds for which nothing of a save may have changed: whoever wrote it may not be done with it."""
AGAIN_FIRST, AGAIN_LONGEST = 60.0, 3600.0
"""Seconds after which a watch looks again at what it had to leave alone."""


@dataclass(frozen=True, slots=True)
class Volume:
    """Whose saves may go, and what for. `before`: only those of lower epochs, all of which a newer one has claimed.

    `keep`: so many of the newest stay. `full`: every byte is read, here and at the store; else names and sizes are
    compared, and the manifest's digest. `now` gives the wall clock in nanoseconds.
    """

    root: Path
    store: Store
    before: int
    keep: int
    full: bool
    workers: int
    now: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Copy:
    """A save of an older execution that the store has too. `home` is the folder it stands in, `folder` the
    execution's own, whose `.dispatch/` it leaves through."""

    folder: Path
    home: Path
    snapshot: Snapshot
    record: CommitRecord

    @property
    def path(self) -> Path:
        return self.home / os.fsdecode(self.snapshot.name)

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.size for file in self.snapshot.files)


@dataclass(frozen=True, slots=True)
class Left:
    """What stays although it is older, and why. `passing`: time alone may change that."""

    path: Path
    reason: str
    passing: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """`going` and `kept` are whole at the store; the newest first. `unfinished` are the executions' folders with what
    a run that was killed has left."""

    going: tuple[Copy, ...]
    kept: tuple[Copy, ...]
    left: tuple[Left, ...]
    unfinished: tuple[Path, ...]


def claimed_epoch(store: Store) -> int:
    """The greatest epoch that an execution has claimed; 0 if there is none. Raises StoreError."""
    epochs = (keys.parse_epoch_folder(name) for name in store.folders(keys.CLAIMS))
    for epoch in sorted((epoch for epoch in epochs if epoch is not None), reverse=True):
        found = (item.key.rpartition("/")[2] for item in store.list(keys.claims_prefix(epoch)))
        if any(name.startswith("attempt.") for name in found):
            return epoch
    return 0


def check_apart(store: Store, root: Path) -> None:
    """Raises SettingsError if the store is in the checkpoint root or around it, or the root is a store itself: then
    what stands there is no second copy, or is one that somebody reads."""
    if (root / keys.COMMITS).exists():
        msg = (
            f"saves were published in place in {root}: what stands there is what readers get, so it does not leave the "
            f"volume; remove {root / keys.COMMITS} if nobody reads them any more"
        )
        raise SettingsError(msg)
    if not isinstance(store, PosixStore):
        return
    there, here = Path(store.url).resolve(), root.resolve()
    if there.is_relative_to(here) or here.is_relative_to(there):
        msg = (
            f"the destination {store.url} and the checkpoint root {root} are one folder tree, so a save there is no "
            f"second copy: publish to another place before saves leave the volume"
        )
        raise SettingsError(msg)


def plan(volume: Volume) -> Plan:
    """Look, and change nothing. Raises StoreError, NewerFormat."""
    candidates: list[Copy] = []
    left: list[Left] = []
    unfinished: list[Path] = []
    kept: list[Copy] = []
    for folder, execution in _older(volume, left):
        if leaving.unfinished(folder):
            unfinished.append(folder)
        for home, copies in (
            (folder, _published(volume, folder, execution, left)),
            (volume.root / "resume" / folder.name, _restored(volume, folder, left)),
        ):
            for copy in copies:
                if home == folder and len(kept) < volume.keep:
                    kept.append(copy)
                else:
                    candidates.append(copy)
    known = {path.name for path in _entries(volume.root / "exec")}
    left += [
        Left(path, "there is no exec/ folder of that execution, so its epoch is not known")
        for path in _entries(volume.root / "resume")
        if path.name not in known
    ]
    return Plan(tuple(candidates), tuple(kept), tuple(left), tuple(unfinished))


def carry_out(
    volume: Volume, todo: Plan, done: Callable[[Copy], None], stopped: Callable[[], bool] = lambda: False
) -> list[Left]:
    """Do what `plan` said, until `stopped`; `done` is told of each save that is gone. What could not go, and why."""
    left: list[Left] = []
    by_folder: dict[Path, list[Copy]] = {folder: [] for folder in todo.unfinished}
    for copy in todo.going:
        by_folder.setdefault(copy.folder, []).append(copy)
    for folder, copies in by_folder.items():
        if stopped():
            break
        try:
            with bookkeeping.lock(folder, volume.store.url):
                pass  # it is there now, so that a publisher that starts meanwhile waits for it
            with leaving.alone(folder):
                left += [Left(*each) for each in leaving.finish(folder, volume.root / "resume" / folder.name)]
                for copy in copies:
                    if stopped():
                        break
                    try:
                        leaving.remove(copy.folder, copy.home, copy.snapshot)
                    except (Stays, AgentError, OSError) as error:
                        left.append(_left(copy.path, error))
                    else:
                        done(copy)
        except (Stays, AgentError, OSError) as error:
            left.append(_left(folder, error))
    return left


@dataclass(slots=True)
class Keeper:
    """`watch --keep-local`: called after every pass, it prunes once, and again while something is left that may go.

    In a thread of its own, since nothing may hold up what is to be published; unless `waits`, for a watch that ends.
    """

    volume: Volume
    log: Log
    clock: Clock
    stopped: Callable[[], bool]
    waits: bool
    _pause: float = AGAIN_FIRST
    _due: float | None = None
    _ended: bool = False
    _work: threading.Thread | None = None

    def __call__(self) -> None:
        now = self.clock.monotonic()
        if self._ended or self.stopped() or (self._due is not None and now < self._due):
            return
        if self._work is not None and self._work.is_alive():
            return
        self._due, self._pause = now + self._pause, min(AGAIN_LONGEST, self._pause * 2)
        # Killed at the end of the process, wherever it is: the next one finishes.
        self._work = threading.Thread(target=self._prune, name="keep-local", daemon=True)
        self._work.start()
        if self.waits:
            self._work.join()

    def _prune(self) -> None:
        try:
            todo = plan(self.volume)
            left = [*todo.left, *carry_out(self.volume, todo, self._gone, self.stopped)]
        except Exception as error:  # noqa: BLE001 (publishing goes on, and it is tried again)
            self.log.once("warning", str(error), "not pruned", reason=str(error), kind=type(error).__name__)
            return
        for item in left:
            self.log.once("info", f"{item.path} {item.reason}", "left", path=str(item.path), reason=item.reason)
        self._ended = not todo.unfinished and not any(item.passing for item in left)

    def _gone(self, copy: Copy) -> None:
        self.log.info("pruned", path=str(copy.path), bytes=copy.size, commit=copy.record.key)


# --- whose folders ----------------------------------------------------------------------------------------------------


def _older(volume: Volume, left: list[Left]) -> list[tuple[Path, Execution]]:
    """The folders of older executions that nobody is at work on, the newest epoch first."""
    found = []
    for folder in _entries(volume.root / "exec"):
        try:
            execution = _execution(folder)
            if execution.epoch >= volume.before:
                continue
            with leaving.alone(folder):
                found.append((folder, execution))
        except (Stays, AgentError, OSError) as error:
            left.append(_left(folder, error))
    return sorted(found, key=lambda item: item[1].epoch, reverse=True)


def _execution(folder: Path) -> Execution:
    if not stat.S_ISDIR(folder.lstat().st_mode) or (folder / os.fsdecode(bookkeeping.NAME)).is_symlink():
        msg = "it is no folder of an execution"
        raise Stays(msg)
    execution = bookkeeping.read_execution(folder)
    if execution is None:
        msg = "it has no .dispatch/execution.json, so no publisher ever had it"
        raise Stays(msg)
    if execution.attempt != folder.name:
        msg = f"its record is that of attempt {execution.attempt}: a folder that was copied or renamed"
        raise Stays(msg)
    return execution


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _left(path: Path, error: Exception) -> Left:
    reason = walk.reason(error) if isinstance(error, OSError) else str(error)
    return Left(path, reason, passing=isinstance(error, Stays) and error.passing)


# --- what the store has too -------------------------------------------------------------------------------------------


def _published(volume: Volume, folder: Path, execution: Execution, left: list[Left]) -> list[Copy]:
    """The saves of an execution's folder whose newest generation stands at the store; the newest first."""
    survey = scan.survey(folder)
    left += [Left(folder / os.fsdecode(name), why) for name, why in survey.unreadable.items()]
    if not survey.saves:
        return []
    try:
        places = bookkeeping.places(folder)
        finished = bookkeeping.already(folder, volume.store.url)
    except IntegrityError as error:
        left.append(_left(folder, error))
        return []
    commits = _commits(volume.store, execution.epoch)
    found = []
    for save in survey.saves:
        try:
            place, mine = _place_of(save, survey.markers.get(save.name), places, finished, commits)
            record = _record_of(volume.store, mine, execution, commits)
            _check_equal(volume, folder, save, record)
            found.append((place.number, Copy(folder, folder, save, record)))
        except NewerFormat:
            raise
        except (Stays, SaveError) as error:
            left.append(_left(folder / os.fsdecode(save.name), error))
    return [copy for _, copy in sorted(found, key=lambda item: item[0], reverse=True)]


def _commits(store: Store, epoch: int) -> dict[int, list[tuple[Order, bool]]]:
    """The commits of an epoch by ordinal, the greatest first, and whether each is pruned."""
    gone = set(listing.orders(store, epoch, keys.PRUNED))
    found: dict[int, list[tuple[Order, bool]]] = {}
    for order in reversed(listing.orders(store, epoch)):
        found.setdefault(order.ordinal, []).append((order, order in gone))
    return found


def _place_of(
    save: Snapshot, marker: Marker | None, places: list[Place], finished: set[int], commits: Mapping[int, object]
) -> tuple[Place, Place]:
    """The place of the save as it stands, and the one whose commit holds its content: an earlier one of its name if
    it came back to what was published last."""
    named = [place for place in places if place.name == save.name]
    if not named and marker:
        msg = "it is marked complete, and is not published"
        raise Stays(msg, passing=True)
    if not named:
        msg = "no publisher found it complete, or it is no save"
        raise Stays(msg)
    newest = named[-1]
    if newest.fingerprint != bookkeeping.fingerprint(save):
        msg = "it is not what was complete last under that name"
        raise Stays(msg)
    if marker and newest.signal.sequence is not None and marker.sequence > newest.signal.sequence:
        # Where times are coarse, the same size and time may be another content.
        msg = "it was said to be complete once more, and that is not published"
        raise Stays(msg, passing=True)
    if newest.number in commits:
        return newest, newest
    committed = [place for place in named if place.number in commits]
    if newest.number in finished and committed:
        return newest, committed[-1]
    msg = "it is not published"
    raise Stays(msg, passing=True)


def _record_of(
    store: Store, place: Place, execution: Execution, commits: Mapping[int, list[tuple[Order, bool]]]
) -> CommitRecord:
    """The commit of the place that stands. Raises Stays, IntegrityError, StoreError."""
    standing = [order for order, gone in commits[place.number] if not gone]
    if not standing:
        msg = "its copy at the store was pruned: this is the last one; delete it by hand if you do not want it"
        raise Stays(msg)
    wanted = (execution.folder_id, names.encode(place.name), place.signal)
    for order in standing:
        record = listing.read_listed(store, order)
        if (record.folder, record.save, record.signal) == wanted:
            return record
    msg = "what the store has in its place was published from another folder"
    raise Stays(msg)


def _restored(volume: Volume, folder: Path, left: list[Left]) -> list[Copy]:
    """What `restore` brought for the execution and the store still has."""
    home = volume.root / "resume" / folder.name
    found = []
    for path in _entries(home) if not home.is_symlink() else []:
        if path.name.startswith("."):
            continue
        try:
            save = scan.snapshot(home, os.fsencode(path.name))
            found.append(Copy(folder, home, save, _origin_of(volume, home, save)))
        except NewerFormat:
            raise
        except (Stays, SaveError) as error:
            left.append(_left(path, error))
    return found


def _origin_of(volume: Volume, home: Path, save: Snapshot) -> CommitRecord:
    """The commit that a restored save is a copy of: the newest of its name that it equals."""
    why: Exception = Stays("no commit of that name stands at the store")
    for order in listing.newest_first(volume.store):
        try:
            record = listing.read_listed(volume.store, order)
            if record.save == names.encode(save.name):
                _check_equal(volume, home, save, record)
                return record
        except NewerFormat:
            raise
        except (Stays, SaveError) as error:
            why = error
    raise why


def _check_equal(volume: Volume, home: Path, save: Snapshot, record: CommitRecord) -> None:
    """Raises Stays or SaveError unless the store has all of the save, elsewhere, as it stands here."""
    if volume.now() - save.newest_ns < QUIET * 1e9:
        msg = f"it was changed within the last {QUIET:.0f} seconds"
        raise Stays(msg, passing=True)
    if record.in_place or len(record.parts) != 1:
        msg = "it was published in place, or is one of several parts: the store has no whole copy of it"
        raise Stays(msg)
    (part,) = record.parts
    manifest = reader.manifest_of(volume.store, part)
    digests = {file.path: "" for file in save.files}
    if _tree(manifests.of_snapshot(save, digests, rank=0, ranks=1, token="")) != _tree(manifest):
        msg = "its files are not those that the store has"
        raise Stays(msg)
    check_sizes(volume.store, part, manifest)
    if volume.full:
        hashed = upload.digest(home, save, tick=lambda _: None, workers=volume.workers)
        digests = {path: item.sha256 for path, item in hashed.items()}
        here = manifests.of_snapshot(save, digests, rank=0, ranks=1, token="")
        if manifests.content_digest(here) != record.content:
            msg = "its bytes are not those that were published"
            raise Stays(msg)
        reader.verify(volume.store, record, tick=lambda _: None, workers=volume.workers)


def _tree(manifest: Manifest) -> tuple[object, ...]:
    """Names, sizes and links: what two looks can tell of a save without reading it."""
    files = sorted((file.path, file.size) for file in manifest.files)
    return manifest.save, manifest.kind, files, manifest.folders, manifest.links
