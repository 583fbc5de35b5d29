"""Azure Blob Storage. Control objects are one Put Blob; larger files are blocks, of which nothing is seen before the
list of them is committed. What a killed writer leaves uncommitted, the service drops after a week."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from azure.core import MatchConditions
from azure.core.async_paging import AsyncItemPaged
from azure.core.exceptions import HttpResponseError
from azure.storage.blob import BlobBlock, BlobProperties
from azure.storage.blob.aio import BlobPrefix

from dispatch_agent.errors import StoreError, StoreUnavailable
from dispatch_agent.store import checksums, keys, loop
from dispatch_agent.store.azure_connection import Connection, explained, status
from dispatch_agent.store.base import ConditionFailed, Document, KeyMissing, Limits, Source, Stored, Uploaded
from dispatch_agent.store.capabilities import Checksum, Facts
from dispatch_agent.store.parts import BESIDE, MIB, PART, WHOLE, Range, Room, Sending, in_ranges
from dispatch_agent.support import Support

T = TypeVar("T")
# The service has no bound between slashes but for a hierarchical namespace, and the other stores keep 255.
KEY_BYTES, COMPONENT_BYTES = 1024, 255
MOST_BLOCKS, LARGEST_BLOCK = 50_000, 4000 * MIB


class AzureStore:
    """`abfs://container/prefix`. A version is the ETag. `checksum` is what the probe saw honoured."""

    def __init__(self, url: str, container: str, prefix: str, options: Mapping[str, object]) -> None:
        self.url = url
        self.checksum: Checksum = "none"
        self._under = f"{prefix}/" if prefix else ""
        self.limits = Limits(key_bytes=KEY_BYTES - len(self._under.encode()), component_bytes=COMPONENT_BYTES)
        self._connection = Connection(self.url, container, options)
        self._container = self._connection.container
        self._room = Room(BESIDE * PART)

    def facts(self) -> Facts:
        whole = Support("yes", "catalogue", "Azure shows a blob whole or not at all")
        return Facts(atomic_visibility=whole, replace_trusted=Support("yes", "catalogue", "the server judges it"))

    def create(self, key: str, data: bytes) -> str:
        return self._do("write", key, self._put(self._name(key), data, overwrite=False))

    def replace(self, key: str, data: bytes, version: str) -> str:
        try:
            return self._do("write", key, self._put(self._name(key), data, overwrite=True, **_only(version)))
        except KeyMissing:
            raise ConditionFailed(key) from None

    def put(self, key: str, data: bytes) -> None:
        self._do("write", key, self._put(self._name(key), data, overwrite=True))

    def read(self, key: str) -> Document:
        name = self._name(key)

        async def whole() -> Document:
            blob = await self._container.download_blob(name)
            return Document(await blob.readall(), str(blob.properties.etag))

        return self._do("read", key, whole())

    def upload(self, key: str, source: Source) -> Uploaded:
        name = self._name(key)
        with explained("upload", self.url, key), Sending[object](source, self._room) as sending:
            if source.size <= WHOLE:
                data = sending.take(source.size)
                sending.begin(lambda: self._put(name, data, overwrite=True))
                sending.finish()
            else:
                self._in_blocks(name, sending, block_size(source.size))
        return Uploaded(size=sending.size, sha256=sending.sha256.hexdigest(), verified=self.checksum != "none")

    def stream(self, key: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        """Raises StoreUnavailable if the object changed in between."""
        name = self._name(key)

        async def fetch(at: int, version: str) -> Range:
            try:
                blob = await self._container.download_blob(name, offset=at, length=PART, **_only(version))
            except HttpResponseError as error:
                if at == 0 and status(error) == 416:
                    return Range(b"", "", 0)
                raise
            return Range(await blob.readall(), str(blob.properties.etag), _whole(blob.properties))

        try:
            with explained("read", self.url, key):
                yield from in_ranges(f"{self.url}/{key}", fetch, chunk)
        except ConditionFailed as error:
            msg = f"{self.url}/{key} changed while it was read: read it again"
            raise StoreUnavailable(msg) from error

    def list(self, prefix: str) -> Iterator[Stored]:
        for blob in self._listed(prefix, self._container.list_blobs(self._prefix(prefix), include=["metadata"])):
            # With a hierarchical namespace, folders are blobs too.
            if (blob.metadata or {}).get("hdi_isfolder") != "true" and not blob.name.endswith("/"):
                yield Stored(blob.name[len(self._under) :], int(blob.size))

    def folders(self, prefix: str) -> Sequence[str]:
        found = self._listed(prefix, self._container.walk_blobs(self._prefix(prefix), delimiter="/"))
        return sorted(one.name.rstrip("/").rpartition("/")[2] for one in found if isinstance(one, BlobPrefix))

    def delete(self, key: str) -> None:
        try:
            self._do("delete", key, self._delete(self._name(key)))
        except KeyMissing:
            return

    def close(self) -> None:
        self._connection.close()

    def try_checksum(self, prefix: str, algorithm: Literal["sha256", "md5"]) -> Support:
        """Sends bytes under the checksum of others. What it stores below `prefix` the caller removes."""
        if algorithm != "md5":
            return Support("no", "catalogue", f"Azure knows no {algorithm}")
        name = self._name(f"{prefix}/{algorithm}.{secrets.token_hex(4)}")

        def whole(data: bytes, meant: bytes) -> None:
            self._do("write", prefix, self._put(name, data, meant, overwrite=True))

        def in_blocks(data: bytes, meant: bytes) -> None:
            self._do("write", prefix, self._stage(name, _block_id(1), data, meant))
            self._do("write", prefix, self._commit(name, [_block_id(1)]))

        return checksums.attempt(algorithm, (whole, in_blocks), lambda error: status(error.__cause__) == 400)

    def _in_blocks(self, name: str, sending: Sending[object], size: int) -> None:
        blocks: list[str] = []
        while not sending.ended:
            data = sending.take(size)
            blocks.append(_block_id(len(blocks)))
            sending.begin(partial(self._stage, name, blocks[-1], data))
            del data  # else one block more than the room counts stays in memory
        sending.finish()
        sending.begin(lambda: self._commit(name, blocks))
        sending.finish()

    async def _put(self, name: str, data: bytes, meant: bytes | None = None, **condition: Any) -> str:
        headers = await _md5(data if meant is None else meant)
        stored = await self._container.get_blob_client(name).upload_blob(data, headers=headers, **condition)
        return str(stored["etag"])

    async def _stage(self, name: str, block: str, data: bytes, meant: bytes | None = None) -> None:
        headers = await _md5(data if meant is None else meant)
        await self._container.get_blob_client(name).stage_block(block, data, headers=headers)

    async def _commit(self, name: str, blocks: Sequence[str]) -> None:
        await self._container.get_blob_client(name).commit_block_list([BlobBlock(block) for block in blocks])

    async def _delete(self, name: str) -> None:
        await self._container.get_blob_client(name).delete_blob()

    def _listed(self, prefix: str, found: AsyncItemPaged[Any]) -> Iterator[Any]:
        pages = found.by_page()
        while (page := self._do("list", prefix, _next(pages))) is not None:
            yield from page

    def _do(self, what: str, key: str, request: Coroutine[Any, Any, T]) -> T:
        with explained(what, self.url, key):
            return loop.run(request)

    def _name(self, key: str) -> str:
        keys.split(key, self.limits)
        return self._under + key

    def _prefix(self, prefix: str) -> str:
        return self._under + "/".join([*keys.split_prefix(prefix), ""])


def block_size(size: int) -> int:
    """Bytes per block for a file of `size` bytes, whole MiB. Raises StoreError for one that is too large."""
    needed = max(PART, -(-size // (MOST_BLOCKS * MIB)) * MIB)
    if needed > LARGEST_BLOCK:
        msg = f"the file has {size} bytes and Azure keeps at most 190 TiB in one blob: save it in several files"
        raise StoreError(msg)
    return needed


def _only(version: str) -> dict[str, Any]:
    """The condition that the blob still has this version; none for the empty one."""
    return {"etag": version, "match_condition": MatchConditions.IfNotModified} if version else {}


def _block_id(number: int) -> str:
    return f"{number:08}"  # all ids of a blob have one length


async def _md5(data: bytes) -> dict[str, str]:
    """The header that makes the service refuse other bytes; computed off the loop, so that sockets go on."""

    def header() -> str:
        return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()

    return {"Content-MD5": await asyncio.get_running_loop().run_in_executor(None, header)}


def _whole(properties: BlobProperties) -> int:
    """The bytes of the whole blob, from the answer to a request for some of them."""
    return int(str(properties.content_range).rpartition("/")[2])


async def _next(pages: AsyncIterator[AsyncIterator[Any]]) -> list[Any] | None:
    async for page in pages:
        return [one async for one in page]
    return None
