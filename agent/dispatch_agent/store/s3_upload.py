"""Uploads to S3 with bounded memory: one request up to 16 MiB, else parts sent side by side while the file is read.

s3fs's own multipart upload holds up to 100 MiB per file, leaves orphans when it is cancelled, and cannot send a
checksum with each part.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from dispatch_agent.errors import StoreError
from dispatch_agent.store.base import KeyMissing, Source, Uploaded
from dispatch_agent.store.capabilities import Checksum
from dispatch_agent.store.s3_connection import Connection
from dispatch_agent.store.s3_errors import explained

MIB = 1 << 20
WHOLE = 16 * MIB  # up to here one request
# Measured: 4 parts of 8 MiB take 70 MiB of memory, 4 of 16 MiB take 145 and are no faster. Python below 3.12 copies
# what a socket cannot take at once.
PART = 8 * MIB
MOST_PARTS = 9000  # S3 takes 10,000; a store that counts otherwise still has room
LARGEST = 5 << 40
BESIDE = 4  # parts of one upload on their way at once
TICK_SECONDS = 1.0
ABORT_SECONDS = 15.0


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


class Room:
    """The bytes that all uploads of one store together may hold in memory. One part is let in whatever its size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        self._changed = threading.Condition()

    def take(self, size: int, tick: Callable[[], None]) -> None:
        """Wait for room, calling `tick` about once a second; what it raises ends the wait."""
        with self._changed:
            while self._used and self._used + size > self._size:
                self._changed.wait(TICK_SECONDS)
                tick()
            self._used += size

    def give(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify_all()


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
    _whole: Any = field(default_factory=hashlib.sha256)
    _size: int = 0
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def run(self) -> Uploaded:
        """Raises as the seam allows and as the source does; then no object is there and no part is left."""
        size = part_size(self.source.size)
        if self.source.size <= WHOLE:
            self._in_one()
        else:
            self._in_parts(size)
        return Uploaded(size=self._size, sha256=self._whole.hexdigest(), verified=self.checksum != "none")

    def _in_one(self) -> None:
        reserved = max(1, self.source.size)
        self.room.take(reserved, self._tick)
        try:
            data = self._read(WHOLE)
            with explained("upload", self.url, self.key):
                sent = self.connection.submit(self._put(data))
                try:
                    self._await({sent})
                    sent.result()
                except BaseException:
                    sent.cancel()
                    raise
        finally:
            self.room.give(reserved)

    def _in_parts(self, size: int) -> None:
        algorithm = {"ChecksumAlgorithm": "SHA256"} if self.checksum == "sha256" else {}
        begun = self.connection.call("upload", self.key, "create_multipart_upload", **self.target, **algorithm)
        upload = {**self.target, "UploadId": begun["UploadId"]}
        try:
            parts = self._send_parts(size, upload)
            self._complete(upload, parts)
        except BaseException:
            # What ended the upload is what the caller must hear, in bounded time; parts that an abort could not remove
            # are never an object, and cost space until the bucket's lifecycle rule drops them.
            wait({self.connection.submit(self._abort(upload))}, ABORT_SECONDS)
            raise

    def _send_parts(self, size: int, upload: dict[str, Any]) -> list[dict[str, Any]]:
        sent: set[Future[dict[str, Any]]] = set()
        parts: list[dict[str, Any]] = []
        while True:
            self.room.take(size, self._tick)
            try:
                data = self._read(size)
            except BaseException:
                self.room.give(size)
                raise
            if not data:
                self.room.give(size)
                break
            number = len(parts) + len(sent) + 1
            sent.add(self.connection.submit(self._send(upload, number, data, size)))
            del data  # else one part more than the room counts stays in memory
            while len(sent) >= BESIDE:
                parts += self._collect(sent)
        while sent:
            parts += self._collect(sent)
        return sorted(parts, key=lambda part: int(part["PartNumber"]))

    def _collect(self, sent: set[Future[dict[str, Any]]]) -> list[dict[str, Any]]:
        done = self._await(sent)
        sent -= done
        with explained("upload", self.url, self.key):
            return [future.result() for future in done]

    def _await(self, futures: set[Future[Any]]) -> set[Future[Any]]:
        """The futures that are done, at least one. The source is asked meanwhile whether to go on."""
        while True:
            done, _ = wait(futures, TICK_SECONDS, FIRST_COMPLETED)
            if done:
                return done
            self._tick()

    def _tick(self) -> None:
        self.source.tick(0)

    def _read(self, size: int) -> bytes:
        """The next `size` bytes, fewer only at the end."""
        pieces: list[bytes] = []
        missing = size
        while missing and (piece := self.source.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._whole.update(data)
        self._size += len(data)
        return data

    async def _put(self, data: bytes) -> None:
        sums = {} if self.checksum == "none" else await self._checksum(data)
        await self.connection.request("put_object", **self.target, Body=data, **sums)

    async def _send(self, upload: dict[str, Any], number: int, data: bytes, reserved: int) -> dict[str, Any]:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 (for the type checker: this runs as a task)
        self._tasks.add(task)
        try:
            sums = await self._checksum(data)
            answer = await self.connection.request("upload_part", **upload, PartNumber=number, Body=data, **sums)
        finally:
            self._tasks.discard(task)
            self.room.give(reserved)
        # A checksum that was announced has to be named again when the parts are joined; an MD5 is not.
        named = {name: value for name, value in sums.items() if name != "ContentMD5"}
        return {"PartNumber": number, "ETag": answer["ETag"], **named}

    async def _checksum(self, data: bytes) -> dict[str, Any]:
        """Off the loop, so that sockets go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(None, with_checksum, data, self.checksum)

    def _complete(self, upload: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        try:
            self.connection.call(
                "complete", self.key, "complete_multipart_upload", **upload, MultipartUpload={"Parts": parts}
            )
        except KeyMissing:
            # The upload is gone: completed by a request that was sent again because its first answer was lost. Only
            # we write this key, so an object of our size is ours.
            there = self.connection.call("look at", self.key, "head_object", **self.target)
            if there["ContentLength"] != self._size:
                raise

    async def _abort(self, upload: dict[str, Any]) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.connection.request("abort_multipart_upload", **upload)
