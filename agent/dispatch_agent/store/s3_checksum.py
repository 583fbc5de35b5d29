"""Whether an S3 store refuses bytes that do not fit the checksum sent with them, in one request and in parts."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

from dispatch_agent.store import checksums
from dispatch_agent.store.base import KeyMissing
from dispatch_agent.store.s3_connection import Connection
from dispatch_agent.store.s3_errors import answer
from dispatch_agent.store.s3_upload import with_checksum
from dispatch_agent.support import Support


def attempt(
    connection: Connection, whole: dict[str, Any], parts: dict[str, Any], algorithm: Literal["sha256", "md5"]
) -> Support:
    """Sends to these two targets (Bucket and Key). Raises StoreUnavailable and StoreDenied."""

    def in_one(data: bytes, meant: bytes) -> None:
        connection.call("write", "", "put_object", **whole, Body=data, **with_checksum(meant, algorithm))

    def in_parts(data: bytes, meant: bytes) -> None:
        sums = with_checksum(meant, algorithm)
        chosen = {"ChecksumAlgorithm": "SHA256"} if algorithm == "sha256" else {}
        begun = connection.call("write", "", "create_multipart_upload", **parts, **chosen)
        upload = {**parts, "UploadId": begun["UploadId"]}
        try:
            sent = connection.call("write", "", "upload_part", **upload, PartNumber=1, Body=data, **sums)
            part = {"PartNumber": 1, "ETag": sent["ETag"], **{k: v for k, v in sums.items() if k != "ContentMD5"}}
            connection.call("write", "", "complete_multipart_upload", **upload, MultipartUpload={"Parts": [part]})
        except BaseException:
            with suppress(KeyMissing):  # rclone drops an upload whose part it refused
                connection.call("abort the upload of", "", "abort_multipart_upload", **upload)
            raise

    return checksums.attempt(algorithm, (in_one, in_parts), lambda error: answer(error).status in {400, 422})
