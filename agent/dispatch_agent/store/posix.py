"""A folder as a store: link(2) refuses the second creator, a lock and a rename the lost replace, fsync makes both last.

Every path is walked from the root by descriptor without following links, so nothing that others put into the folder
leads outside. Bytes are written beside their key under a private name, synced, and only then given the key: a key is
absent or whole, also after a crash. What a crash leaves behind under a private name is never listed.

Who may write: files and folders follow the umask (or the default ACL). Folders and the lock take over the group's and
others' write permission and the setgid bit of the root, so a volume whose root several users may write to (mode 2775
with fsGroup, or 0777) can be written to by all of them everywhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dispatch_agent.clock import Clock, SystemClock
from dispatch_agent.errors import SourceChanged, StoreTooWeak, StoreUnavailable
from dispatch_agent.store import folders, kernel, keys
from dispatch_agent.store.base import ConditionFailed, Document, KeyMissing, Limits, Source, Stored, Uploaded
from dispatch_agent.store.capabilities import Facts, Leftover
from dispatch_agent.store.drafts import Draft, drafted
from dispatch_agent.store.folders import explained
from dispatch_agent.support import Support

PIECE = 1 << 20
LOCK_WAIT_SECONDS = 1.0
PATH_BYTES = 4095  # PATH_MAX without its final NUL: we walk by descriptor, but people and `--in-place` use whole paths


class PosixStore:
    """A folder, made at the first write. A version is the content's sha256: what is replaced never has it twice."""

    def __init__(self, root: str | os.PathLike[str], clock: Clock | None = None) -> None:
        self._root = Path(os.path.abspath(root))
        self._clock = clock or SystemClock()
        self.url = str(self._root)
        self.limits = _limits(self._root)

    def facts(self) -> Facts:
        """Catalogued by the type of the filesystem. Raises StoreUnavailable, StoreDenied."""
        with explained("look at the filesystem of", self._root):
            folder = os.open(_nearest(self._root), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                locks = kernel.lock_trust(kernel.filesystem_magic(folder))
                shared = kernel.sharing(folder)
            finally:
                os.close(folder)
        whole = Support("yes", "catalogue", "rename(2) and link(2) give a key its whole content at once")
        return Facts(whole, locks, create_trusted=shared.names, listing_trusted=shared.listings)

    def path(self, key: str) -> Path:
        """Where the object of this key stands, for people and for publishing in place."""
        return self._root.joinpath(*self._split(key))

    def create(self, key: str, data: bytes) -> str:
        *parents, name = self._split(key)
        with explained("create", self.path(key)), drafted(self._root, parents, name) as draft:
            draft.write(data)
            if not draft.take_name():
                raise ConditionFailed(key)
        return _version(data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        *parents, name = self._split(key)
        with explained("replace", self.path(key)):
            try:
                with folders.opened(self._root, parents) as folder, self._locked(folder, key):
                    if _version(folders.read_file(folder, name)) != version:
                        raise ConditionFailed(key)
                    with drafted(self._root, parents, name) as draft:
                        draft.write(data)
                        draft.replace_name()
            except FileNotFoundError:
                raise ConditionFailed(key) from None
        return _version(data)

    def put(self, key: str, data: bytes) -> None:
        *parents, name = self._split(key)
        with explained("write", self.path(key)), drafted(self._root, parents, name) as draft:
            draft.write(data)
            draft.replace_name()

    def read(self, key: str) -> Document:
        data = b"".join(self.stream(key))
        return Document(data, _version(data))

    def upload(self, key: str, source: Source) -> Uploaded:
        """A clone is read back here and so verified; a copy is not. Raises SourceChanged, and as `source` does."""
        *parents, name = self._split(key)
        draft = Draft(self._root, parents, name)
        with explained("write", self.path(key)):
            draft.open()
        try:
            with explained("clone to", self.path(key)):
                cloned = kernel.clone(source.fileno(), draft.descriptor)
            uploaded = self._hash_clone(key, draft, source) if cloned else self._copy(key, draft, source)
            with explained("write", self.path(key)):
                draft.replace_name()
        finally:
            draft.close()
        return uploaded

    def stream(self, key: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        *parents, name = self._split(key)
        with explained("read", self.path(key)):
            try:
                with folders.opened(self._root, parents) as folder:
                    file = folders.open_file(folder, name)
            except FileNotFoundError:
                raise KeyMissing(key) from None
        try:
            while piece := _read(file, chunk, self.path(key)):
                yield piece
        finally:
            os.close(file)

    def list(self, prefix: str) -> Iterator[Stored]:
        """Raises StoreDenied for a symbolic link below a prefix; what has none, the root, may hold others' things."""
        parts = keys.split_prefix(prefix)
        where = self._root.joinpath(*parts)
        with explained("list", where), suppress(FileNotFoundError), folders.opened(self._root, parts) as folder:
            for path, size in folders.walk(folder, strict=bool(parts)):
                yield Stored("/".join([*parts, path]), size)

    def folders(self, prefix: str) -> Sequence[str]:
        parts = keys.split_prefix(prefix)
        where = self._root.joinpath(*parts)
        with explained("list", where), suppress(FileNotFoundError), folders.opened(self._root, parts) as folder:
            found = folders.subfolders(folder, strict=bool(parts))
            return sorted(name for name in found if folders.holds_a_file(folder, name))
        return []

    def delete(self, key: str) -> None:
        """Also removes the folders that this leaves empty, with their locks. Not synced: what a crash brings back is
        deleted again."""
        *parents, name = self._split(key)
        with explained("delete", self.path(key)):
            _unlink(self._root, parents, name)

    def leftovers(self, prefix: str) -> Iterator[Leftover]:
        """The drafts of killed writers below `prefix`, and those of living ones."""
        parts = keys.split_prefix(prefix)
        where = self._root.joinpath(*parts)
        with explained("list", where), suppress(FileNotFoundError), folders.opened(self._root, parts) as folder:
            for path in folders.drafts(folder):
                yield Leftover("/".join([*parts, path]), path)

    def remove(self, leftover: Leftover) -> None:
        *parents, name = leftover.key.split("/")
        with explained("delete", self._root / leftover.key):
            _unlink(self._root, parents, name)

    def symlink(self, key: str, target_key: str) -> None:
        """Let `key` be a relative symbolic link to `target_key`, for people; what stood there is replaced at once."""
        *parents, name = self._split(key)
        target = os.path.relpath(self.path(target_key), self.path(key).parent)
        with explained("link", self.path(key)):
            folders.point(self._root, parents, name, target)

    def close(self) -> None:
        """Nothing is held between calls."""

    def _split(self, key: str) -> Sequence[str]:
        return keys.split(key, self.limits)

    @contextmanager
    def _locked(self, folder: int, key: str) -> Iterator[None]:
        """Hold off other replacers in this folder. Raises StoreUnavailable after a second, StoreTooWeak without locks.

        Not one lock for the whole store, nor a long wait: a writer that is frozen while it holds the pointer's lock
        must not keep its successor from starting, nor from committing.
        """
        give_up = self._clock.monotonic() + LOCK_WAIT_SECONDS
        while True:
            lock = folders.open_lock(folder, keys.LOCK)
            try:
                self._wait(lock, key, give_up)
                if folders.is_at(lock, folder, keys.LOCK):
                    yield
                    return
            finally:
                os.close(lock)

    def _wait(self, lock: int, key: str, give_up: float) -> None:
        while not _try_lock(lock, self.url) or self._clock.monotonic() > give_up:
            if self._clock.monotonic() > give_up:
                msg = (
                    f"{self.path(key).parent / keys.LOCK} has been locked for {LOCK_WAIT_SECONDS:g} s, so"
                    f" {key} was not replaced: look for a hung publisher on this volume"
                )
                raise StoreUnavailable(msg)
            self._clock.wait(threading.Event(), 0.01)

    def _copy(self, key: str, draft: Draft, source: Source) -> Uploaded:
        digest = hashlib.sha256()
        size = 0
        # Reads are outside `explained`: what they raise is about the source, not about this store.
        while piece := source.read(PIECE):
            digest.update(piece)
            size += len(piece)
            with explained("write", self.path(key)):
                draft.write(piece)
        return Uploaded(size=size, sha256=digest.hexdigest(), verified=False)

    def _hash_clone(self, key: str, draft: Draft, source: Source) -> Uploaded:
        digest = hashlib.sha256()
        size = 0
        os.lseek(draft.descriptor, 0, os.SEEK_SET)
        while piece := _read(draft.descriptor, PIECE, self.path(key)):
            digest.update(piece)
            size += len(piece)
            source.tick(len(piece))
        if size != source.size:
            msg = (
                f"{key}: the file had {source.size} bytes when it was opened and {size} when it was cloned: it changed"
            )
            raise SourceChanged(msg)
        return Uploaded(size=size, sha256=digest.hexdigest(), verified=True)


def _unlink(root: Path, parents: list[str], name: str) -> None:
    with suppress(FileNotFoundError), folders.opened(root, parents) as folder:
        os.unlink(name, dir_fd=folder)
        folders.drop_lock(folder, keys.LOCK)
    folders.tidy(root, parents)


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read(file: int, size: int, path: Path) -> bytes:
    with explained("read", path):
        return os.read(file, size)


def _try_lock(lock: int, where: str) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in folders.NO_LOCKS:
            raise
        msg = f"{where} is on a filesystem without locks ({error.strerror}): mount it with locks (Lustre: -o flock)"
        raise StoreTooWeak(msg) from error
    return True


def _nearest(root: Path) -> Path:
    """The root, or the nearest folder above it that is there."""
    return next((p for p in (root, *root.parents) if p.is_dir()), Path("/"))


def _limits(root: Path) -> Limits:
    try:
        component = os.pathconf(_nearest(root), "PC_NAME_MAX")
    except (OSError, ValueError):
        component = 255  # what every Linux filesystem but a few stacked ones keeps
    return Limits(key_bytes=PATH_BYTES - len(os.fsencode(root)) - 1, component_bytes=component)
