"""Google Cloud Storage. Control objects are one multipart request, the form in which every server honours conditions;
larger files are one resumable upload, of which nothing is seen before its last byte has come. What a killed writer
leaves unfinished, the service drops after a week."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal
from urllib.parse import quote

from dispatch_agent.errors import StoreError, StoreUnavailable
from dispatch_agent.store import checksums, keys, loop
from dispatch_agent.store.base import Document, KeyMissing, Limits, Source, Stored, Uploaded
from dispatch_agent.store.capabilities import Checksum, Facts
from dispatch_agent.store.gcs_connection import Connection, Reply, no_bucket, status
from dispatch_agent.store.parts import BESIDE, PART, WHOLE, Range, Room, Sending, in_ranges
from dispatch_agent.support import Support

# The service has no bound between slashes but for a hierarchical namespace, and the other stores keep 255.
KEY_BYTES, COMPONENT_BYTES = 1024, 255
LARGEST = 5 << 40
TYPE = "application/octet-stream"


class GcsStore:
    """`gs://bucket/prefix`. A version is the generation. `checksum` is what the probe saw honoured."""

    def __init__(self, bucket: str, prefix: str, options: Mapping[str, object]) -> None:
        self.url = f"gs://{bucket}/{prefix}".rstrip("/")
        self.checksum: Checksum = "none"
        self._objects = f"storage/v1/b/{quote(bucket, safe='')}/o"
        self._under = f"{prefix}/" if prefix else ""
        self.limits = Limits(key_bytes=KEY_BYTES - len(self._under.encode()), component_bytes=COMPONENT_BYTES)
        self._connection = Connection(self.url, options)
        self._room = Room(BESIDE * PART)

    def facts(self) -> Facts:
        whole = Support("yes", "catalogue", "Google Cloud Storage shows an object whole or not at all")
        return Facts(atomic_visibility=whole, replace_trusted=Support("yes", "catalogue", "the server judges it"))

    def create(self, key: str, data: bytes) -> str:
        return self._write(key, data, {"ifGenerationMatch": "0"})

    def replace(self, key: str, data: bytes, version: str) -> str:
        return self._write(key, data, {"ifGenerationMatch": version})

    def put(self, key: str, data: bytes) -> None:
        self._write(key, data, {})

    def read(self, key: str) -> Document:
        reply = loop.run(self._connection.request("read", key, "GET", self._path(key), {"alt": "media"}))
        return Document(reply.body, reply.headers["X-Goog-Generation"])

    def upload(self, key: str, source: Source) -> Uploaded:
        if source.size > LARGEST:
            msg = f"the file has {source.size} bytes and the service keeps at most {LARGEST} in one: save several files"
            raise StoreError(msg)
        name = self._name(key)
        with Sending[Reply](source, self._room, beside=1, also=hashlib.md5(usedforsecurity=False)) as sending:
            if source.size <= WHOLE:
                data = sending.take(source.size)
                sending.begin(lambda: self._put(key, name, data, _base64(sending.also)))
            else:
                self._in_chunks(key, name, sending)
            reply = sending.finish()[-1]
        self._compare(key, reply, sending)
        return Uploaded(size=sending.size, sha256=sending.sha256.hexdigest(), verified=self.checksum != "none")

    def stream(self, key: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        """Raises StoreUnavailable if the object changed in between."""
        path = self._path(key)

        async def fetch(at: int, version: str) -> Range:
            query = {"alt": "media", **({"generation": version} if version else {})}
            wanted = {"Range": f"bytes={at}-{at + PART - 1}"}
            try:
                reply = await self._connection.request("read", key, "GET", path, query, headers=wanted, fine=(416,))
            except KeyMissing:
                if not version:
                    raise
                msg = f"{self.url}/{key} changed while it was read: read it again"
                raise StoreUnavailable(msg) from None
            if reply.status == 416:  # an empty object has no range
                return Range(b"", "", 0)
            whole = reply.headers.get("Content-Range", f"/{len(reply.body)}").rpartition("/")[2]
            return Range(reply.body, reply.headers["X-Goog-Generation"], int(whole))

        return in_ranges(f"{self.url}/{key}", fetch, chunk)

    def list(self, prefix: str) -> Iterator[Stored]:
        for page in self._pages(prefix, {}):
            for found in page.get("items", []):
                # A name that ends with a slash is a folder that some browser made, and no key of ours.
                if not found["name"].endswith("/"):
                    yield Stored(found["name"][len(self._under) :], int(found["size"]))

    def folders(self, prefix: str) -> Sequence[str]:
        return sorted(
            found.rstrip("/").rpartition("/")[2]
            for page in self._pages(prefix, {"delimiter": "/"})
            for found in page.get("prefixes", [])
        )

    def delete(self, key: str) -> None:
        try:
            loop.run(self._connection.request("delete", key, "DELETE", self._path(key), {}))
        except KeyMissing:
            return

    def close(self) -> None:
        self._connection.close()

    def try_checksum(self, prefix: str, algorithm: Literal["sha256", "md5"]) -> Support:
        """Sends bytes under the checksum of others. What it stores below `prefix` the caller removes."""
        if algorithm != "md5":
            return Support("no", "catalogue", f"Google Cloud Storage knows no {algorithm}")
        name = self._name(f"{prefix}/{algorithm}.{secrets.token_hex(4)}")

        def whole(data: bytes, meant: bytes) -> None:
            loop.run(self._put(prefix, name, data, _digest(meant)))

        def in_chunks(data: bytes, meant: bytes) -> None:
            session = loop.run(self._begin(prefix, name))
            loop.run(self._chunk(prefix, name, session, data, 0, _digest(meant)))

        return checksums.attempt(algorithm, (whole, in_chunks), lambda error: status(error.__cause__) == 400)

    def _write(self, key: str, data: bytes, condition: Mapping[str, str]) -> str:
        reply = loop.run(self._put(key, self._name(key), data, _digest(data), condition))
        return str(reply.json["generation"])

    async def _put(
        self, key: str, name: str, data: bytes, md5: str, condition: Mapping[str, str] | None = None
    ) -> Reply:
        boundary = secrets.token_hex(16)
        resource = json.dumps({"name": name, "md5Hash": md5}).encode()
        parts = (b"application/json; charset=UTF-8", resource), (TYPE.encode(), data)
        body = b"".join(b"--%s\r\nContent-Type: %s\r\n\r\n%s\r\n" % (boundary.encode(), *part) for part in parts)
        return await self._insert(
            key,
            {"uploadType": "multipart", **(condition or {})},
            {"Content-Type": f'multipart/related; boundary="{boundary}"'},
            body + b"--%s--" % boundary.encode(),
        )

    async def _begin(self, key: str, name: str) -> str:
        """Where to send the chunks of a new resumable upload."""
        headers = {"Content-Type": "application/json; charset=UTF-8", "X-Upload-Content-Type": TYPE}
        begun = await self._insert(key, {"uploadType": "resumable"}, headers, json.dumps({"name": name}).encode())
        return begun.headers["Location"]

    async def _insert(self, key: str, query: Mapping[str, str], headers: Mapping[str, str], data: bytes) -> Reply:
        path = f"upload/{self._objects}"
        try:
            return await self._connection.request("write", key, "POST", path, query, headers=headers, data=data)
        except KeyMissing as error:
            raise no_bucket(error, "write", self.url) from error

    def _in_chunks(self, key: str, name: str, sending: Sending[Reply]) -> None:
        session = loop.run(self._begin(key, name))
        while not sending.ended:
            at, data = sending.size, sending.take(PART)
            md5 = _base64(sending.also) if sending.ended else ""
            sending.begin(partial(self._chunk, key, name, session, data, at, md5))
            del data  # else one chunk more than the room counts stays in memory

    async def _chunk(self, key: str, name: str, session: str, data: bytes, at: int, md5: str) -> Reply:
        """Send one chunk, and of it again what the service did not keep. `md5`, of the whole file, marks the last."""
        end = at + len(data)
        while True:
            headers = {"Content-Range": f"bytes {at}-{end - 1}/{end if md5 else '*'}"}
            if md5:
                headers["X-Goog-Hash"] = f"md5={md5}"
            send = self._connection.request
            reply = await send("upload", key, "PUT", session, {}, headers=headers, data=data, fine=(404, 410))
            if reply.status in {404, 410}:
                return await self._ended(key, name)
            kept = int(reply.headers.get("Range", "-").rpartition("-")[2] or -1) + 1
            if reply.status != 308 or (kept >= end and not md5):
                return reply
            if kept <= at or kept >= end:
                msg = f"could not upload {self.url}/{key}: the store kept {kept} of {end} bytes: upload it again"
                raise StoreUnavailable(msg)
            data, at = data[kept - at :], kept

    async def _ended(self, key: str, name: str) -> Reply:
        """The object of an upload that the service does not know any more: perhaps an answer was lost, and only we
        write this key."""
        try:
            return await self._connection.request("look at", key, "GET", f"{self._objects}/{quote(name, safe='')}", {})
        except KeyMissing as error:
            msg = f"could not upload {self.url}/{key}: the store dropped the upload: upload it again"
            raise StoreUnavailable(msg) from error

    def _compare(self, key: str, reply: Reply, sending: Sending[Reply]) -> None:
        """What the service says that it stored."""
        stored, sent = reply.json, (sending.size, _base64(sending.also))
        if (int(stored["size"]), stored.get("md5Hash", sent[1])) != sent:
            msg = (
                f"{self.url}/{key} holds {stored['size']} bytes of md5 {stored.get('md5Hash')} where {sent[0]} of"
                f" {sent[1]} were sent: upload it again"
            )
            raise StoreUnavailable(msg)

    def _pages(self, prefix: str, query: dict[str, str]) -> Iterator[dict[str, Any]]:
        query["prefix"] = self._under + "/".join([*keys.split_prefix(prefix), ""])
        query["fields"] = "items(name,size),prefixes,nextPageToken"
        while True:
            try:
                page = loop.run(self._connection.request("list", prefix, "GET", self._objects, query)).json
            except KeyMissing as error:
                raise no_bucket(error, "list", self.url) from error
            yield page
            if "nextPageToken" not in page:
                return
            query["pageToken"] = page["nextPageToken"]

    def _name(self, key: str) -> str:
        keys.split(key, self.limits)
        return self._under + key

    def _path(self, key: str) -> str:
        return f"{self._objects}/{quote(self._name(key), safe='')}"


def _digest(data: bytes) -> str:
    return _base64(hashlib.md5(data, usedforsecurity=False))


def _base64(digest: Any) -> str:
    return base64.b64encode(digest.digest()).decode()
