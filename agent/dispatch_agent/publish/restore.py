"""A published save as a local tree again: parallel, resumable, never in the place of something else.

Files come into a temporary folder beside the target that carries the commit's own name, so that a restore which was
killed goes on where it was; one rename at the end makes the tree appear whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dispatch_agent.checkpoint import manifest as manifests
from dispatch_agent.checkpoint import names
from dispatch_agent.checkpoint.manifest import Manifest, ManifestFile
from dispatch_agent.errors import AgentError, IntegrityError, NewerFormat, SettingsError
from dispatch_agent.publish import keys, listing, reader
from dispatch_agent.publish.keys import Order
from dispatch_agent.publish.parallel import Tick, each
from dispatch_agent.publish.records import CommitRecord, Part
from dispatch_agent.store.base import Store

LOCK, PARTIAL = ".restore.lock", ".partial"


@dataclass(frozen=True, slots=True)
class Restored:
    """Where the save stands now, and of which commit. `fresh`: it was brought now; else it was there already."""

    path: Path
    record: CommitRecord
    fresh: bool


class Occupied(Exception):
    """Another save stands in a target that is to hold one alone. `path` is where."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path


def restore(
    store: Store, record: CommitRecord, target: Path, *, tick: Tick, workers: int, alone: bool = False, by: str = ""
) -> Restored:
    """Bring one commit to `target`/<its save's name>, every byte verified.

    With `alone`, `target` is to hold no other save: raises Occupied if one is there. What is there by half is taken up
    again by a later restore with the same `by` alone: for a filesystem whose locks may not hold others off.

    What stands there already is kept if it is that very save, and refused (SettingsError) otherwise. Raises
    IntegrityError (damaged at the store: `target` is left as it was), StoreError, AgentError (the disk).
    """
    if len(record.parts) != 1:
        msg = f"{record.save} has {len(record.parts)} parts; restore them on their ranks' own nodes"
        raise IntegrityError(msg)
    part = record.parts[0]
    manifest = reader.manifest_of(store, part)
    final = os.path.join(os.fsencode(target), names.decode_name(record.save))
    try:
        os.makedirs(target, exist_ok=True)
        with _locked(target):
            if alone:
                _check_alone(target, final, manifest)
            return _bring(store, record, part, manifest, final, _partial(target, record, by), tick, workers)
    except OSError as error:
        where = f" ({os.fsdecode(error.filename)})" if error.filename else ""
        msg = (
            f"cannot restore {record.save} to {target}: {error.strerror}{where}; what is there of it is taken up again "
            f"by the next restore"
        )
        raise AgentError(msg) from error


def is_ours(name: bytes) -> bool:
    """Whether an entry of a target is a restore's own, and no save."""
    return name.startswith(b".") and name.endswith((LOCK.encode(), PARTIAL.encode()))


def _check_alone(target: Path, final: bytes, manifest: Manifest) -> None:
    for path in target.iterdir():
        if not is_ours(os.fsencode(path.name)) and (os.fsencode(path) != final or _difference(final, manifest)):
            raise Occupied(path)


def _bring(
    store: Store,
    record: CommitRecord,
    part: Part,
    manifest: Manifest,
    final: bytes,
    partial: Path,
    tick: Tick,
    workers: int,
) -> Restored:
    fresh = False
    if not os.path.lexists(final):
        _fill(store, part, manifest, os.fsencode(partial), tick, workers)
        fresh = _finish(manifest, os.fsencode(partial), final)
    if not fresh:
        difference = _difference(final, manifest)
        if difference:
            msg = (
                f"{names.shown(final)} is there and is not the published save ({difference}); move it away, or restore "
                f"to another folder: nothing is replaced"
            )
            raise SettingsError(msg)
        _discard(partial)
    return Restored(Path(os.fsdecode(final)), record, fresh)


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """One restore into a folder at a time: two would write the same temporary files.

    The lock file is removed by whoever holds it, so one that was waited for may be gone: then another is made.
    """
    path = target / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        # Where there are no locks, two restores may each undo the other's work; both still end with verified bytes.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_at(descriptor, path):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _fill(store: Store, part: Part, manifest: Manifest, partial: bytes, tick: Tick, workers: int) -> None:
    if manifest.kind == "folder":
        os.makedirs(partial, exist_ok=True)
        for folder in manifest.folders:
            os.makedirs(os.path.join(partial, names.decode_path(folder.path)), exist_ok=True)

    def fetch(file: ManifestFile, check: Tick) -> None:
        _fetch(store, part, manifest, file, _place(manifest, partial, file.path), check)

    each(manifest.files, fetch, tick, workers)
    for link in manifest.links:
        place = os.path.join(partial, names.decode_path(link.path))
        with contextlib.suppress(FileExistsError):
            os.symlink(manifests.decode_target(link.target), place)


def _fetch(store: Store, part: Part, manifest: Manifest, file: ManifestFile, place: bytes, tick: Tick) -> None:
    if _same(place, file):
        tick(file.size)
        return
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, file.mode)
    with os.fdopen(descriptor, "wb", buffering=0) as out:
        for piece in reader.read_file(store, part, manifest.kind, file, tick):
            view = memoryview(piece)
            while view:
                view = view[out.write(view) :]
        os.fsync(descriptor)


def _finish(manifest: Manifest, partial: bytes, final: bytes) -> bool:
    """Give the tree its name, durably; False if somebody else was faster."""
    if manifest.kind == "folder":
        for folder in manifest.folders:
            _sync_folder(os.path.join(partial, names.decode_path(folder.path)))
        _sync_folder(partial)
    # rename(2) onto a folder that holds something fails, and onto an empty one replaces nothing; a file would be
    # replaced, so the file's name is taken by link(2).
    try:
        if manifest.kind == "file":
            os.link(partial, final)
            os.unlink(partial)
        else:
            os.rename(partial, final)
    except OSError as error:
        if error.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
            raise
        return False
    _sync_folder(os.path.dirname(final))
    return True


def _sync_folder(path: bytes) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _place(manifest: Manifest, top: bytes, path: str) -> bytes:
    return top if manifest.kind == "file" else os.path.join(top, names.decode_path(path))


def _same(place: bytes, file: ManifestFile) -> bool:
    try:
        status = os.lstat(place)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
        return False
    digest = hashlib.sha256()
    with open(place, "rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest() == file.sha256


def _difference(final: bytes, manifest: Manifest) -> str:
    """What keeps the tree at `final` from being the manifest's; '' if nothing does."""
    if (manifest.kind == "folder") != (os.path.isdir(final) and not os.path.islink(final)):
        return f"it is no {manifest.kind}"
    expected = {file.path for file in manifest.files} | {link.path for link in manifest.links}
    for file in manifest.files:
        if not _same(_place(manifest, final, file.path), file):
            return f"{file.path} differs"
    if manifest.kind == "folder":
        for link in manifest.links:
            place = os.path.join(final, names.decode_path(link.path))
            if not os.path.islink(place) or os.readlink(place) != manifests.decode_target(link.target):
                return f"{link.path} differs"
        for top, folders, files in os.walk(final):
            for name in files + [f for f in folders if os.path.islink(os.path.join(top, f))]:
                path = os.path.relpath(os.path.join(top, name), final)
                if names.encode_path(path) not in expected:
                    return f"{names.encode_path(path)} is not part of it"
    return ""


def _partial(target: Path, record: CommitRecord, by: str) -> Path:
    """Where a restore of this commit gathers, to be found again by the next one."""
    return target / f".{record.order.nonce}.{record.order.ordinal:06d}{'.' if by else ''}{by}{PARTIAL}"


def discard_partial(target: Path, record: CommitRecord, by: str = "") -> None:
    """Remove what a failed restore of a damaged commit left behind."""
    _discard(_partial(target, record, by))


def _discard(partial: Path) -> None:
    if partial.is_dir():
        shutil.rmtree(partial)
    else:
        partial.unlink(missing_ok=True)


def restore_newest(
    store: Store,
    target: Path,
    *,
    save: str | None,
    fall_back: bool,
    progress: Callable[[str, int], Tick],
    damaged: Callable[[str, str], None],
    workers: int,
    alone: bool = False,
) -> Restored:
    """Bring the newest intact commit (of that encoded name) to `target`, falling back over damaged ones.

    `damaged` is told of every commit that is passed over: its key and what is wrong. What a prune takes while it is
    read is no damage: the newest is looked for again. Raises Incomplete (nothing is
    published), IntegrityError (all that is there is damaged, or the newest is and `fall_back` is off), Occupied,
    StoreError, SettingsError, AgentError.
    """
    passed: dict[Order, IntegrityError] = {}
    pruned: set[Order] = set()
    while True:
        item = next((i for i in reader.published(store, save) if i.order not in passed.keys() | pruned), None)
        if item is None:
            break
        try:
            return _one(store, item, target, progress, workers, alone=alone)
        except NewerFormat:
            # Not damaged, only beyond this version: an older save in its place would be a silent step back.
            raise
        except IntegrityError as error:
            if item.record is not None and listing.pruned(store, item.record):
                pruned.add(item.order)
                continue
            passed[item.order] = error
            damaged(keys.commit_key(item.order), str(error))
            if not fall_back:
                raise
    if passed:
        last = passed[min(passed)]
        what = f"everything published at {store.url}"
        if save is not None:
            what = f"every save named {save} at {store.url}"
        msg = f"{what} is damaged; the last: {last}"
        raise IntegrityError(msg) from last
    raise reader.nothing(store, save)


def _one(
    store: Store,
    item: reader.Published,
    target: Path,
    progress: Callable[[str, int], Tick],
    workers: int,
    *,
    alone: bool,
) -> Restored:
    if item.record is None:
        raise item.error or IntegrityError(keys.commit_key(item.order))
    tick = progress(item.record.save, item.record.size)
    try:
        return restore(store, item.record, target, tick=tick, workers=workers, alone=alone)
    except IntegrityError:
        discard_partial(target, item.record)
        raise
