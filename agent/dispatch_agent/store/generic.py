"""Any other URL that fsspec knows: written and read one path at a time, without conditions.

fsspec's own `mode="create"` is ignored by some classes and a check before the write in others, so it is never used.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import fsspec

from dispatch_agent.errors import SettingsError, StoreDenied, StoreError, StoreTooWeak, StoreUnavailable
from dispatch_agent.store import keys
from dispatch_agent.store.base import Document, KeyMissing, Limits, Source, Stored, Uploaded
from dispatch_agent.store.capabilities import Facts
from dispatch_agent.support import Support

PIECE = 1 << 20
LIMITS = Limits(key_bytes=1024, component_bytes=255)
# What these store is visible while it is written, so it gets its name only when it is whole.
RENAMES = {"sftp", "ssh", "ftp", "smb", "dir", "local"}


class GenericStore:
    """`scheme://...` through fsspec. Versions are sha256 of the content."""

    def __init__(self, url: str, scheme: str, options: Mapping[str, object]) -> None:
        try:
            self._fs, root = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
        except OSError as error:  # some of its classes connect at once
            msg = f"could not reach {url}: {error}: look at the server if this stays"
            raise StoreUnavailable(msg) from error
        except Exception as error:  # its classes refuse a URL or an option with whatever they run into
            msg = f"the destination {url!r} cannot be used: {error or type(error).__name__}: correct the URL or options"
            raise SettingsError(msg) from error
        self.url = url.rstrip("/")
        self.limits = LIMITS
        self._root = root.rstrip("/")
        self._renames = scheme in RENAMES

    def facts(self) -> Facts:
        none = Support("no", "catalogue", "no conditional writes are known for this kind of URL")
        return Facts(Support("unknown", "catalogue", "depends on the server"), none)

    def create(self, key: str, data: bytes) -> NoReturn:
        raise StoreTooWeak(self._no_conditions(key, len(data)))

    def replace(self, key: str, data: bytes, version: str) -> NoReturn:
        raise StoreTooWeak(self._no_conditions(f"{key} at {version}", len(data)))

    def put(self, key: str, data: bytes) -> None:
        with self._writing(key) as file:
            file.write(data)

    def read(self, key: str) -> Document:
        with self._explained("read", key):
            data = bytes(self._fs.cat_file(self._path(key)))
        return Document(data, hashlib.sha256(data).hexdigest())

    def upload(self, key: str, source: Source) -> Uploaded:
        digest, size = hashlib.sha256(), 0
        with self._writing(key) as file:
            while piece := source.read(PIECE):
                digest.update(piece)
                size += len(piece)
                file.write(piece)
        return Uploaded(size=size, sha256=digest.hexdigest(), verified=False)

    def stream(self, key: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        with self._explained("read", key), self._fs.open(self._path(key), "rb", cache_type="none") as file:
            while piece := file.read(chunk):
                yield piece

    def list(self, prefix: str) -> Iterator[Stored]:
        for found in self._entries(prefix):
            if found["type"] == "directory":
                yield from self.list(found["key"])
            elif found["type"] == "file":
                yield Stored(found["key"], int(found["size"]))

    def folders(self, prefix: str) -> Sequence[str]:
        below = [found["key"] for found in self._entries(prefix) if found["type"] == "directory"]
        return sorted(key.rpartition("/")[2] for key in below if next(self.list(key), None) is not None)

    def delete(self, key: str) -> None:
        try:
            with self._explained("delete", key):
                self._fs.rm_file(self._path(key))
        except KeyMissing:
            return

    def close(self) -> None:
        """fsspec closes what it holds when it is collected."""

    def _path(self, key: str) -> str:
        return "/".join([self._root, *keys.split(key, LIMITS)])

    def _entries(self, prefix: str) -> Iterator[dict[str, Any]]:
        parts = keys.split_prefix(prefix)
        try:
            with self._explained("list", prefix):
                self._fs.invalidate_cache()
                found = self._fs.ls("/".join([self._root, *parts]), detail=True)
        except KeyMissing:
            return
        for one in found:
            name = one["name"].rstrip("/").rpartition("/")[2]
            if not name.startswith(keys.PRIVATE):
                yield {**one, "key": "/".join([*parts, name])}

    @contextmanager
    def _writing(self, key: str) -> Iterator[Any]:
        """A file that gets its name when the block ends well. What the source raises passes as it is."""
        final = self._path(key)
        folder, _, _ = final.rpartition("/")
        path = f"{folder}/{keys.DRAFT}{secrets.token_hex(8)}" if self._renames else final
        with self._explained("write", key):
            self._fs.makedirs(folder, exist_ok=True)
            file = self._fs.open(path, "wb")
        try:
            yield file
        except BaseException:
            self._drop(file, path)
            raise
        with self._explained("write", key):
            file.close()
            if self._renames:
                self._fs.mv(path, final)

    def _drop(self, file: Any, path: str) -> None:
        """Give up a file that was begun. What ended the write is what the caller must hear, not what this meets."""
        if self._renames:
            with suppress(Exception):
                file.close()
            with suppress(Exception):
                self._fs.rm_file(path)
        else:
            with suppress(Exception):
                file.discard()

    @contextmanager
    def _explained(self, what: str, key: str) -> Iterator[None]:
        where = f"could not {what} {self.url}/{key}"
        try:
            yield
        except (StoreError, KeyMissing):
            raise
        except FileNotFoundError:
            raise KeyMissing(key) from None
        except PermissionError as error:
            msg = f"{where}: {error}: look at the credentials and permissions"
            raise StoreDenied(msg) from error
        except Exception as error:
            msg = f"{where}: {error or type(error).__name__}: look at the server if this stays"
            raise StoreUnavailable(msg) from error

    def _no_conditions(self, key: str, size: int) -> str:
        return (
            f"{self.url} knows no conditional writes, so {key} ({size} bytes) was not written: publish to a folder or"
            " to S3, or pass --accept-weak-store"
        )
