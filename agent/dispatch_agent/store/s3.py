"""S3 and what speaks like it. Conditions and control objects are always one PutObject: on a multipart upload real
servers check them without a lock, or not at all."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from dispatch_agent.errors import StoreUnavailable
from dispatch_agent.store import keys, loop, s3_checksum
from dispatch_agent.store.base import ConditionFailed, Document, KeyMissing, Limits, Source, Stored, Uploaded
from dispatch_agent.store.capabilities import Checksum, Facts, Leftover
from dispatch_agent.store.parts import BESIDE, PART, Room
from dispatch_agent.store.s3_connection import Connection
from dispatch_agent.store.s3_errors import explained
from dispatch_agent.store.s3_upload import Upload, with_checksum
from dispatch_agent.support import Support

# The specification has no bound between slashes; SeaweedFS, MinIO and JuiceFS keep folders of a filesystem.
KEY_BYTES, COMPONENT_BYTES = 1024, 255
# Where the next page of a listing begins: the request's names, and the answer's.
NEXT = {
    "ContinuationToken": "NextContinuationToken",
    "KeyMarker": "NextKeyMarker",
    "UploadIdMarker": "NextUploadIdMarker",
}
RESUMES = 3  # broken downloads in a row, without one byte of progress, before giving up


class S3Store:
    """`s3://bucket/prefix`. A version is the ETag as the store gave it. `checksum` is what the probe saw honoured."""

    def __init__(self, bucket: str, prefix: str, options: Mapping[str, object], checksum: Checksum = "none") -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.checksum: Checksum = checksum
        self._bucket = bucket
        self._under = f"{prefix}/" if prefix else ""
        self.limits = Limits(key_bytes=KEY_BYTES - len(self._under.encode()), component_bytes=COMPONENT_BYTES)
        self._connection = Connection(self.url, options)
        self._room = Room(BESIDE * PART)

    def facts(self) -> Facts:
        whole = Support("yes", "catalogue", "S3 shows an object whole or not at all")
        return Facts(atomic_visibility=whole, replace_trusted=Support("yes", "catalogue", "the server judges it"))

    def create(self, key: str, data: bytes) -> str:
        return self._write(key, data, IfNoneMatch="*")

    def replace(self, key: str, data: bytes, version: str) -> str:
        try:
            return self._write(key, data, IfMatch=version)
        except ConditionFailed:
            # Ceph RGW compares without the quotes that it gives out: what it refuses is then still the current one.
            if version == version.strip('"') or self._version(key) != version:
                raise
        return self._write(key, data, IfMatch=version.strip('"'))

    def put(self, key: str, data: bytes) -> None:
        self._write(key, data)

    def read(self, key: str) -> Document:
        target = self._target(key)

        async def whole() -> Document:
            response = await self._connection.request("get_object", **target)
            async with response["Body"] as body:
                return Document(await body.read(), response["ETag"])

        with explained("read", self.url, key):
            return loop.run(whole())

    def upload(self, key: str, source: Source) -> Uploaded:
        target = self._target(key)
        upload = Upload(self._connection, self.url, key, target, source, checksum=self.checksum, room=self._room)
        try:
            return upload.run()
        except KeyMissing as error:
            msg = (
                f"{self.url}/{key}: the store dropped the upload before it was complete: upload it again; look for a"
                " lifecycle rule that aborts uploads within days"
            )
            raise StoreUnavailable(msg) from error

    def stream(self, key: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        """Goes on where a connection broke. Raises StoreUnavailable if the object changed in between."""
        at, version, broken = 0, "", 0
        while True:
            try:
                response = self._get(key, at, version)
                version = response["ETag"]
                for piece in self._pieces(key, response, chunk):
                    yield piece
                    at, broken = at + len(piece), 0
            except StoreUnavailable:
                broken += 1
                if broken > RESUMES:
                    raise
            else:
                return

    def list(self, prefix: str) -> Iterator[Stored]:
        for page in self._pages("list_objects_v2", prefix):
            for found in page.get("Contents", []):
                # A name that ends with a slash is a folder that some browser made, and no key of ours.
                if not found["Key"].endswith("/"):
                    yield Stored(found["Key"][len(self._under) :], found["Size"])

    def folders(self, prefix: str) -> Sequence[str]:
        return sorted(
            found["Prefix"].rstrip("/").rpartition("/")[2]
            for page in self._pages("list_objects_v2", prefix, Delimiter="/")
            for found in page.get("CommonPrefixes", [])
        )

    def delete(self, key: str) -> None:
        try:
            self._connection.call("delete", key, "delete_object", **self._target(key))
        except KeyMissing:
            return  # AWS says nothing about an absent key, some others 404

    def leftovers(self, prefix: str) -> Iterator[Leftover]:
        """The multipart uploads below `prefix` that are neither completed nor aborted."""
        for page in self._pages("list_multipart_uploads", prefix):
            for one in page.get("Uploads", []):
                yield Leftover(one["Key"][len(self._under) :], one["UploadId"])

    def remove(self, leftover: Leftover) -> None:
        target = {**self._target(leftover.key), "UploadId": leftover.handle}
        with suppress(KeyMissing):  # completed or aborted since
            self._connection.call("abort an upload of", leftover.key, "abort_multipart_upload", **target)

    def close(self) -> None:
        self._connection.close()

    def try_checksum(self, prefix: str, algorithm: Literal["sha256", "md5"]) -> Support:
        """Sends bytes under the checksum of others. What it stores below `prefix` the caller removes."""
        whole, parts = (
            self._target(f"{prefix}/{algorithm}.{how}.{secrets.token_hex(4)}") for how in ("whole", "parts")
        )
        return s3_checksum.attempt(self._connection, whole, parts, algorithm)

    def _target(self, key: str) -> dict[str, Any]:
        keys.split(key, self.limits)
        return {"Bucket": self._bucket, "Key": self._under + key}

    def _write(self, key: str, data: bytes, **condition: Any) -> str:
        request = {**self._target(key), "Body": data, **with_checksum(data, self.checksum), **condition}
        try:
            return str(self._connection.call("write", key, "put_object", **request)["ETag"])
        except KeyMissing as error:
            if "IfMatch" in condition:
                raise ConditionFailed(key) from None
            msg = f"{self.url}/{key}: the store lost what it was writing, as a gateway to a folder may: write it again"
            raise StoreUnavailable(msg) from error

    def _version(self, key: str) -> str | None:
        try:
            return self.read(key).version
        except KeyMissing:
            return None

    def _pages(self, method: str, prefix: str, **request: Any) -> Iterator[dict[str, Any]]:
        # botocore asks for percent-encoded keys and decodes them, so that no character breaks the XML.
        request |= {"Bucket": self._bucket, "Prefix": self._under + "/".join([*keys.split_prefix(prefix), ""])}
        while True:
            page = self._connection.call("list", prefix, method, **request)
            yield page
            if not page.get("IsTruncated"):
                return
            for ours, theirs in NEXT.items():
                if theirs in page:
                    request[ours] = page[theirs]

    def _get(self, key: str, at: int, version: str) -> dict[str, Any]:
        wanted = {"Range": f"bytes={at}-"} if at else {}
        response = self._connection.call("read", key, "get_object", **self._target(key), **wanted)
        if version not in {"", response["ETag"]}:
            msg = f"{self.url}/{key} changed while it was read ({version} became {response['ETag']}): read it again"
            raise StoreUnavailable(msg)
        return response

    def _pieces(self, key: str, response: dict[str, Any], chunk: int) -> Iterator[bytes]:
        """The rest of one answer, the next piece asked for while the caller works on this one."""
        body, missing = response["Body"], int(response["ContentLength"])
        coming = loop.submit(_piece(body, chunk))
        try:
            while missing:
                with explained("read", self.url, key):
                    piece = coming.result()
                if not piece:
                    msg = f"{self.url}/{key} ended {missing} bytes early: read it again"
                    raise StoreUnavailable(msg)
                missing -= len(piece)
                if missing:
                    coming = loop.submit(_piece(body, chunk))
                yield piece
        finally:
            coming.cancel()
            loop.soon(body.close)


async def _piece(body: Any, size: int) -> bytes:
    """`size` bytes, fewer only at the end: the socket gives what it has, and each piece costs a change of thread."""
    pieces: list[bytes] = []
    missing = size
    while missing and (piece := await body.read(missing)):
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)
