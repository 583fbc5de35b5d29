"""Any other URL that fsspec knows: written and read one path at a time, without conditions.

fsspec's own `mode="create"` is ignored by some classes and a check before the write in others, so it is never used.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import fsspec
from fsspec import AbstractFileSystem

from dispatch_agent.errors import SettingsError, StoreDenied, StoreError, StoreTooWeak, StoreUnavailable
from dispatch_agent.store import keys
from dispatch_agent.store.base import Document, KeyMissing, Limits, Source, Stored, Uploaded
from dispatch_agent.store.capabilities import Facts, Leftover
from dispatch_agent.support import Support

PIECE = 1 << 20
LIMITS = Limits(key_bytes=1024, component_bytes=255)
NO_CONDITIONS = "no conditional writes are known for this kind of URL"
ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
SFTP = {"sftp", "ssh"}
# What these store is visible while it is written, so it gets its name only when it is whole.
RENAMES = SFTP | {"ftp", "smb", "dir", "local"}


class GenericStore:
    """`scheme://...` through fsspec. Versions are sha256 of the content."""

    def __init__(self, url: str, scheme: str, options: Mapping[str, object]) -> None:
        self.url = url.rstrip("/")
        self.limits = LIMITS
        self._renames = scheme in RENAMES
        self._make = partial(_make, url, scheme, options)
        try:
            filesystem, root = self._make()
        except PermissionError as error:
            msg = f"could not reach {url}: {error}: look at the credentials"
            raise StoreDenied(msg) from error
        except OSError as error:  # some of its classes connect at once
            msg = f"could not reach {url}: {error}: look at the server if this stays"
            raise StoreUnavailable(msg) from error
        except Exception as error:  # its classes refuse a URL or an option with whatever they run into
            msg = f"the destination {url!r} cannot be used: {error or type(error).__name__}: correct the URL or options"
            raise SettingsError(msg) from error
        self._root = root.rstrip("/")
        self._idle = [filesystem]
        self._made: set[str] = set()

    def facts(self) -> Facts:
        none = Support("no", "catalogue", NO_CONDITIONS)
        renamed = Support("yes", "catalogue", "an object gets its name by a rename, when it is whole")
        return Facts(renamed if self._renames else Support("unknown", "catalogue", "depends on the server"), none)

    def create(self, key: str, data: bytes) -> NoReturn:
        del data
        keys.split(key, LIMITS)
        raise StoreTooWeak(NO_CONDITIONS)

    def replace(self, key: str, data: bytes, version: str) -> NoReturn:
        del data, version
        keys.split(key, LIMITS)
        raise StoreTooWeak(NO_CONDITIONS)

    def put(self, key: str, data: bytes) -> None:
        self._write(key, iter([data]))

    def read(self, key: str) -> Document:
        path = self._path(key)
        with self._using("read", key) as filesystem:
            data = bytes(filesystem.cat_file(path))
        return Document(data, hashlib.sha256(data).hexdigest())

    def upload(self, key: str, source: Source) -> Uploaded:
        digest, size = hashlib.sha256(), 0

        def pieces() -> Iterator[bytes]:
            nonlocal size
            while piece := source.read(PIECE):
                digest.update(piece)
                size += len(piece)
                yield piece

        self._write(key, pieces())
        return Uploaded(size=size, sha256=digest.hexdigest(), verified=False)

    def stream(self, key: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        path = self._path(key)
        with self._using("read", key) as filesystem, filesystem.open(path, "rb", cache_type="none") as file:
            while piece := file.read(chunk):
                yield piece

    def list(self, prefix: str) -> Iterator[Stored]:
        for key, found in self._walk(prefix):
            if not key.rpartition("/")[2].startswith(keys.PRIVATE):
                yield Stored(key, int(found["size"]))

    def folders(self, prefix: str) -> Sequence[str]:
        below = [key for key, found in self._entries(prefix) if found["type"] == "directory"]
        return sorted(key.rpartition("/")[2] for key in below if next(self.list(key), None) is not None)

    def leftovers(self, prefix: str) -> Iterator[Leftover]:
        """The drafts of killed writers below `prefix`, and those of living ones."""
        for key, _ in self._walk(prefix):
            if key.rpartition("/")[2].startswith(keys.DRAFT):
                yield Leftover(key, key)

    def remove(self, leftover: Leftover) -> None:
        self._remove(f"{self._root}/{leftover.key}", leftover.key)

    def delete(self, key: str) -> None:
        self._remove(self._path(key), key)

    def close(self) -> None:
        while self._idle:
            _close(self._idle.pop())

    def _path(self, key: str) -> str:
        return "/".join([self._root, *keys.split(key, LIMITS)])

    def _remove(self, path: str, key: str) -> None:
        with suppress(KeyMissing), self._using("delete", key) as filesystem:
            filesystem.rm_file(path)

    def _walk(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for key, found in self._entries(prefix):
            if found["type"] == "directory":
                yield from self._walk(key)
            elif found["type"] == "file":
                yield key, found

    def _entries(self, prefix: str) -> Sequence[tuple[str, dict[str, Any]]]:
        """What stands directly below a prefix: its key, and what fsspec says of it."""
        parts = keys.split_prefix(prefix)
        try:
            with self._using("list", prefix) as filesystem:
                filesystem.invalidate_cache()
                entries = filesystem.ls("/".join([self._root, *parts]), detail=True)
        except KeyMissing:
            return ()
        return [("/".join([*parts, one["name"].rstrip("/").rpartition("/")[2]]), one) for one in entries]

    def _write(self, key: str, pieces: Iterator[bytes]) -> None:
        """A file that gets its name when all of it was written. What `pieces` raises passes as it is."""
        final = self._path(key)
        folder = final.rpartition("/")[0]
        path = f"{folder}/{keys.DRAFT}{secrets.token_hex(8)}" if self._renames else final
        with self._borrowed() as filesystem:
            file = None
            try:
                with self._explained("write", key):
                    if folder not in self._made:
                        _make_folders(filesystem, folder)
                        self._made.add(folder)
                    file = filesystem.open(path, "wb")
                for piece in pieces:
                    with self._explained("write", key):
                        file.write(piece)
                with self._explained("write", key):
                    file.close()
                    if self._renames:
                        filesystem.mv(path, final)
            except BaseException:
                self._made.discard(folder)  # somebody may have removed it
                if file is not None:
                    self._drop(filesystem, file, path)
                raise

    def _drop(self, filesystem: AbstractFileSystem, file: Any, path: str) -> None:
        """Give up a file that was begun. What ended the write is what the caller must hear, not what this meets."""
        if self._renames:
            with suppress(Exception):
                file.close()
            with suppress(Exception):
                filesystem.rm_file(path)
        else:
            with suppress(Exception):
                file.discard()

    @contextmanager
    def _using(self, what: str, key: str) -> Iterator[AbstractFileSystem]:
        with self._borrowed() as filesystem, self._explained(what, key):
            yield filesystem

    @contextmanager
    def _borrowed(self) -> Iterator[AbstractFileSystem]:
        """A filesystem for this use alone, since some of fsspec's are one connection and cannot serve two threads. One
        that failed is not used again."""
        try:
            filesystem = self._idle.pop()
        except IndexError:
            with self._explained("reach", ""):
                filesystem, _ = self._make()
        try:
            yield filesystem
        except (KeyMissing, StoreDenied):
            self._idle.append(filesystem)
            raise
        except BaseException:
            _close(filesystem)
            raise
        self._idle.append(filesystem)

    @contextmanager
    def _explained(self, what: str, key: str) -> Iterator[None]:
        where = f"could not {what} {self.url}/{key}".rstrip("/")
        try:
            yield
        except (StoreError, KeyMissing):
            raise
        except PermissionError as error:
            msg = f"{where}: {error}: look at the credentials and permissions"
            raise StoreDenied(msg) from error
        except Exception as error:
            if what != "write" and isinstance(error, ABSENT):
                raise KeyMissing(key) from None
            msg = f"{where}: {error or type(error).__name__}: look at the server if this stays"
            raise StoreUnavailable(msg) from error


def _make(url: str, scheme: str, options: Mapping[str, object]) -> tuple[AbstractFileSystem, str]:
    """A filesystem of its own, and the path of `url` in it."""
    if scheme in SFTP:
        from dispatch_agent.store.sftp import KnownHostSFTP  # noqa: PLC0415 (the others must not need paramiko)

        given = {**KnownHostSFTP._get_kwargs_from_urls(url), **options}
        return KnownHostSFTP(skip_instance_cache=True, **given), KnownHostSFTP._strip_protocol(url)
    filesystem, path = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
    return filesystem, str(path)


def _make_folders(filesystem: AbstractFileSystem, folder: str) -> None:
    """Another writer may make one of them at the same moment, which some classes take for a failure."""
    for _ in range(folder.count("/")):
        with suppress(OSError):
            filesystem.makedirs(folder, exist_ok=True)
            return
    filesystem.makedirs(folder, exist_ok=True)


def _close(filesystem: AbstractFileSystem) -> None:
    """Few of fsspec's classes have something to close; the others' sockets end when they are collected."""
    with suppress(Exception):
        getattr(filesystem, "close", lambda: None)()
