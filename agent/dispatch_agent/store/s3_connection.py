"""One process's line to an S3 store: the only file that makes an s3fs filesystem."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import botocore.exceptions as boto
import s3fs

from dispatch_agent.errors import SettingsError
from dispatch_agent.store import loop
from dispatch_agent.store.s3_errors import MISTAKEN, answer, explained, may_be_renewed

# Ours where neither the user's options nor the SDK's own variables say otherwise. Checksums of botocore's own choosing
# are off: many stores reject them, and we send the ones that the probe saw honoured.
CONFIG: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 60, "max_pool_connections": 32}
CONFIG_BY_VARIABLE: dict[str, tuple[str, Any]] = {
    "AWS_MAX_ATTEMPTS": ("retries", {"mode": "standard", "total_max_attempts": 4}),
    "AWS_REQUEST_CHECKSUM_CALCULATION": ("request_checksum_calculation", "when_required"),
    "AWS_RESPONSE_CHECKSUM_VALIDATION": ("response_checksum_validation", "when_required"),
}


class Connection:
    """Thread-safe; not for use after a fork. `options` are s3fs's own."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self._url = url
        self._options = dict(options)
        self._lock = threading.Lock()
        self._filesystem = self._open()

    def call(self, what: str, key: str, method: str, **request: Any) -> dict[str, Any]:
        """One S3 request, and once more with fresh credentials if these do not count. Raises as the seam allows."""
        with explained(what, self._url, key, conditional="IfMatch" in request or "IfNoneMatch" in request):
            return loop.run(self.request(method, **request))

    async def request(self, method: str, **request: Any) -> dict[str, Any]:
        """One S3 request, for use on the loop. Raises what botocore and aiohttp raise."""
        filesystem = self._filesystem
        try:
            return await self._send(filesystem, method, request)
        except Exception as error:
            if not may_be_renewed(error):
                raise
        # Variables, files and endpoints are asked once by a session: only a new one sees what was renewed meanwhile.
        fresh = self._replaced(filesystem, self._open)
        try:
            return await self._send(fresh, method, request)
        except MISTAKEN as error:
            # Whoever renews a file may be in the middle of it: the next request reads it again.
            self._replaced(fresh, lambda: filesystem)
            raise boto.CredentialRetrievalError(provider="AWS configuration", error_msg=str(error)) from error

    def close(self) -> None:
        """Close the sockets."""
        filesystem = self._filesystem
        creator = getattr(filesystem, "_s3creator", None)  # set by the first request
        if creator is not None:
            loop.run(creator.__aexit__(None, None, None))

    async def _send(self, filesystem: s3fs.S3FileSystem, method: str, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            client = await filesystem.set_session()
        except (TypeError, ValueError) as error:  # s3fs hands what it does not know to botocore
            msg = (
                f"the storage options for {self._url} are not understood: {error}; an endpoint is endpoint_url=http://…"
            )
            raise SettingsError(msg) from error
        # The same handler under the same id is registered once, however often it is asked for.
        client.meta.events.register("before-sign.s3", _trust_checksum, unique_id="dispatch-agent-checksum")
        try:
            response: dict[str, Any] = await filesystem._call_s3(method, **request)
        except OSError as error:
            # s3fs's own types say less than what they were made from, and a TimeoutError loses it between threads.
            if answer(error).status and error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        return response

    def _replaced(self, old: s3fs.S3FileSystem, make: Callable[[], s3fs.S3FileSystem]) -> s3fs.S3FileSystem:
        """The filesystem in use, another one if that was still `old`: many requests find out at once that it is."""
        with self._lock:
            if self._filesystem is old:
                self._filesystem = make()
            return self._filesystem

    def _open(self) -> s3fs.S3FileSystem:
        ours = dict(CONFIG)
        for variable, (name, value) in CONFIG_BY_VARIABLE.items():
            if variable not in os.environ:
                ours[name] = value
        options = {"anon": False, "use_listings_cache": False, **self._options}
        given = options.get("config_kwargs") or {}
        if not isinstance(given, Mapping):
            msg = f"the storage option config_kwargs is {given!r}: give a mapping of botocore's Config arguments"
            raise SettingsError(msg)
        options["config_kwargs"] = {**ours, **given}
        filesystem = s3fs.S3FileSystem(skip_instance_cache=True, **options)
        # botocore already tries again; a second ladder on top would multiply the waiting.
        filesystem.retries = 1
        return filesystem


def _trust_checksum(request: Any, **_: object) -> None:
    """Let botocore leave the body unsigned over TLS where our own checksum header, which is signed, covers it.

    It does so by itself for the checksums that it computes, and would hash every byte a second time for ours.
    """
    if "x-amz-checksum-sha256" in request.headers:
        chosen = {"in": "header", "name": "x-amz-checksum-sha256", "algorithm": "sha256"}
        request.context.setdefault("checksum", {})["request_algorithm"] = chosen
