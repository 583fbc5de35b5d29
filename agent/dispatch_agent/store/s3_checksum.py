"""Whether an S3 store refuses bytes that do not fit the checksum sent with them. Many take the header and ignore it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

from dispatch_agent.errors import StoreDenied, StoreError, StoreUnavailable
from dispatch_agent.store.base import KeyMissing
from dispatch_agent.store.s3_connection import Connection
from dispatch_agent.store.s3_errors import answer
from dispatch_agent.store.s3_upload import with_checksum
from dispatch_agent.support import Support

RIGHT, WRONG = b"the bytes that were meant", b"the bytes that were sent!"


def attempt(connection: Connection, targets: list[dict[str, Any]], algorithm: Literal["sha256", "md5"]) -> Support:
    """Right bytes whole and in parts, then wrong ones both ways, under three keys. Raises StoreDenied."""
    whole, parts, wrong = targets
    sums = with_checksum(RIGHT, algorithm)
    try:
        connection.call("write", "", "put_object", **whole, Body=RIGHT, **sums)
        _join(connection, parts, algorithm, sums)
    except (StoreUnavailable, StoreDenied):
        raise
    except StoreError as error:
        return Support("no", "probed", f"{algorithm} is not understood: {error}")
    if _takes(connection, "put_object", wrong, sums) or _takes_part(connection, wrong, algorithm, sums):
        return Support("no", "probed", f"bytes with a wrong {algorithm} were stored")
    return Support("yes", "probed", f"bytes with a wrong {algorithm} were refused, whole and in parts")


def _begin(connection: Connection, target: dict[str, Any], algorithm: str) -> dict[str, Any]:
    chosen = {"ChecksumAlgorithm": "SHA256"} if algorithm == "sha256" else {}
    begun = connection.call("write", "", "create_multipart_upload", **target, **chosen)
    return {**target, "UploadId": begun["UploadId"]}


def _join(connection: Connection, target: dict[str, Any], algorithm: str, sums: dict[str, Any]) -> None:
    upload = _begin(connection, target, algorithm)
    sent = connection.call("write", "", "upload_part", **upload, PartNumber=1, Body=RIGHT, **sums)
    part = {"PartNumber": 1, "ETag": sent["ETag"], **{k: v for k, v in sums.items() if k != "ContentMD5"}}
    connection.call("write", "", "complete_multipart_upload", **upload, MultipartUpload={"Parts": [part]})


def _takes_part(connection: Connection, target: dict[str, Any], algorithm: str, sums: dict[str, Any]) -> bool:
    upload = _begin(connection, target, algorithm)
    try:
        return _takes(connection, "upload_part", {**upload, "PartNumber": 1}, sums)
    finally:
        with suppress(KeyMissing):  # rclone drops an upload whose part it refused
            connection.call("abort the upload of", "", "abort_multipart_upload", **upload)


def _takes(connection: Connection, method: str, target: dict[str, Any], sums: dict[str, Any]) -> bool:
    try:
        connection.call("write", "", method, **target, Body=WRONG, **sums)
    except StoreError as error:
        if answer(error).status in {400, 422}:
            return False
        raise
    return True
