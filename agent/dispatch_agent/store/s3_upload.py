"""Uploads to S3 with bounded memory: one request up to 16 MiB, else parts sent side by side while the file is read.

s3fs's own multipart upload holds up to 100 MiB per file, leaves orphans when it is cancelled, and cannot send a
checksum with each part.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dispatch_agent.errors import StoreError
from dispatch_agent.store import loop
from dispatch_agent.store.base import KeyMissing, Source, Uploaded
from dispatch_agent.store.capabilities import Checksum
from dispatch_agent.store.parts import MIB, PART, WHOLE, Room, Sending
from dispatch_agent.store.s3_connection import Connection
from dispatch_agent.store.s3_errors import explained

MOST_PARTS = 9000  # S3 takes 10,000; a store that counts otherwise still has room
LARGEST = 5 << 40
ABORT_SECONDS = 15.0

Part = dict[str, Any]


def part_size(size: int) -> int:
    """Bytes per part for a file of `size` bytes, whole MiB. Raises StoreError above 5 TiB, before anything is sent."""
    if size > LARGEST:
        msg = f"the file has {size} bytes and S3 keeps at most {LARGEST} in one object: save it in several files"
        raise StoreError(msg)
    return max(PART, -(-size // (MOST_PARTS * MIB)) * MIB)


def with_checksum(data: bytes, checksum: Checksum) -> dict[str, Any]:
    """The request's argument that makes a store refuse other bytes."""
    if checksum == "sha256":
        return {"ChecksumSHA256": base64.b64encode(hashlib.sha256(data).digest()).decode()}
    if checksum == "md5":
        return {"ContentMD5": base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()}
    return {}


@dataclass(slots=True)
class Upload:
    """One file on its way to one key. `run` once."""

    connection: Connection
    url: str
    key: str
    target: dict[str, Any]  # Bucket and Key of every request
    source: Source
    checksum: Checksum
    room: Room
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def run(self) -> Uploaded:
        """Raises as the seam allows and as the source does; then no object is there and no part is left."""
        size = part_size(self.source.size)
        with explained("upload", self.url, self.key), Sending[Part](self.source, self.room) as sending:
            if self.source.size <= WHOLE:
                data = sending.take(self.source.size)
                sending.begin(lambda: self._put(data))
                sending.finish()
            else:
                self._in_parts(sending, size)
        return Uploaded(sending.size, sending.sha256.hexdigest(), verified=self.checksum != "none")

    def _in_parts(self, sending: Sending[Part], size: int) -> None:
        algorithm = {"ChecksumAlgorithm": "SHA256"} if self.checksum == "sha256" else {}
        begun = self.connection.call("upload", self.key, "create_multipart_upload", **self.target, **algorithm)
        upload = {**self.target, "UploadId": begun["UploadId"]}
        try:
            self._complete(upload, self._send_all(sending, size, upload), sending.size)
        except BaseException:
            # What ended the upload is what the caller must hear, in bounded time; parts that an abort could not remove
            # are never an object, and cost space until the bucket's lifecycle rule drops them.
            wait({loop.submit(self._abort(upload))}, ABORT_SECONDS)
            raise

    def _send_all(self, sending: Sending[Part], size: int, upload: dict[str, Any]) -> list[Part]:
        number = 0
        while not sending.ended:
            data, number = sending.take(size), number + 1
            sending.begin(partial(self._send, upload, number, data))
            del data  # else one part more than the room counts stays in memory
        return sorted(sending.finish(), key=lambda part: int(part["PartNumber"]))

    async def _put(self, data: bytes) -> Part:
        sums = {} if self.checksum == "none" else await self._checksum(data)
        return await self.connection.request("put_object", **self.target, Body=data, **sums)

    async def _send(self, upload: dict[str, Any], number: int, data: bytes) -> Part:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 (for the type checker: this runs as a task)
        self._tasks.add(task)
        try:
            sums = await self._checksum(data)
            answer = await self.connection.request("upload_part", **upload, PartNumber=number, Body=data, **sums)
        finally:
            self._tasks.discard(task)
        # A checksum that was announced has to be named again when the parts are joined; an MD5 is not.
        named = {name: value for name, value in sums.items() if name != "ContentMD5"}
        return {"PartNumber": number, "ETag": answer["ETag"], **named}

    async def _checksum(self, data: bytes) -> dict[str, Any]:
        """Off the loop, so that sockets go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(None, with_checksum, data, self.checksum)

    def _complete(self, upload: dict[str, Any], parts: list[Part], size: int) -> None:
        try:
            self.connection.call(
                "complete", self.key, "complete_multipart_upload", **upload, MultipartUpload={"Parts": parts}
            )
        except KeyMissing:
            # The upload is gone: completed by a request that was sent again because its first answer was lost. Only
            # we write this key, so an object of our size is ours.
            there = self.connection.call("look at", self.key, "head_object", **self.target)
            if there["ContentLength"] != size:
                raise

    async def _abort(self, upload: dict[str, Any]) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.connection.request("abort_multipart_upload", **upload)
