"""One process's line to an Azure container, and what its answers mean: the only file that makes an adlfs filesystem.

adlfs finds the account and its credentials. What it does with conditions is not enough for us (it sends a write again
without them when a container is missing, and caches listings), so requests go to the SDK's own client.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from adlfs import AzureBlobFileSystem
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError
from azure.storage.blob.aio import BlobServiceClient, ContainerClient, LinearRetry

from dispatch_agent.errors import SettingsError, StoreDenied, StoreUnavailable
from dispatch_agent.store import loop
from dispatch_agent.store.answers import Answer, by_status
from dispatch_agent.store.base import ConditionFailed

# The SDK's own waits are 15 seconds and more between tries; ours come on top of them.
CONNECT_SECONDS, READ_SECONDS, TRIES_MORE = 10, 60, 3
# Not the blob is missing but what it would be in.
NO_CONTAINER = {"ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled"}
# The bytes did not arrive as they were sent, or too slowly: sending them again helps.
TRANSIT = {"Md5Mismatch", "Crc64Mismatch", "OperationTimedOut", "ServerBusy"}
# Where nobody listens to the SDK's log, Python would write its warnings between our lines.
logging.getLogger("azure").addHandler(logging.NullHandler())


class Connection:
    """Thread-safe; not for use after a fork. `options` are adlfs's own. Raises SettingsError."""

    def __init__(self, url: str, container: str, options: Mapping[str, object]) -> None:
        try:
            # Kept, because its end closes the credentials.
            self._filesystem = AzureBlobFileSystem(skip_instance_cache=True, use_listings_cache=False, **options)
        except (ValueError, TypeError, ImportError) as error:
            msg = (
                f"the storage options for {url} are not enough: {error}; set AZURE_STORAGE_ACCOUNT_NAME and a key, or"
                " AZURE_STORAGE_CONNECTION_STRING, or give them as options"
            )
            raise SettingsError(msg) from error
        known = self._filesystem.service_client
        service = BlobServiceClient(
            known.url,
            credential=known.credential,
            retry_policy=LinearRetry(backoff=1, retry_total=TRIES_MORE, random_jitter_range=1),
            connection_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
        )
        self.container: ContainerClient = service.get_container_client(container)
        # aiohttp complains at the end of the process about a session that nobody closed.
        self.close = weakref.finalize(self, _close, service)


def _close(service: BlobServiceClient) -> None:
    with suppress(RuntimeError):  # the loop is gone, and its sockets with it
        loop.run(service.close())


@contextmanager
def explained(what: str, url: str, key: str) -> Iterator[None]:
    """Raises what the seam allows in place of what the SDK raises; a fault of our own passes."""
    try:
        yield
    except AzureError as error:
        raise _meaning(error, f"could not {what} {url}/{key}".rstrip("/"), key) from error


def status(error: BaseException | None) -> int:
    """The HTTP status that an exception of the seam was made from; 0 if none."""
    return int(error.status_code or 0) if isinstance(error, HttpResponseError) else 0


def _meaning(error: AzureError, where: str, key: str) -> Exception:
    why = str(error.message).partition("\n")[0].rstrip(".") or type(error).__name__
    if isinstance(error, ClientAuthenticationError) and not status(error):
        msg = f"{where}: {why}: give an account key, a SAS token or an identity by environment or storage options"
        return StoreDenied(msg)
    if not isinstance(error, HttpResponseError) or status(error) < 400:
        msg = f"{where}: {why}: look at endpoint and network if this stays"
        return StoreUnavailable(msg)
    headers = getattr(error.response, "headers", {})
    said = Answer(status(error), headers.get("x-ms-error-code", ""), why)
    text = f"{where}: {said.status} {said.code} {said.message}"
    meant = by_status(said, where, key)
    if said.code in NO_CONTAINER:
        meant = StoreUnavailable(f"{text}: create the container or correct its name")
    elif said.code == "BlobAlreadyExists":
        meant = ConditionFailed(key)
    elif said.code == "BlobImmutableDueToPolicy":
        meant = StoreDenied(f"{text}: look at the container's immutability policy")
    elif said.code in TRANSIT:
        meant = StoreUnavailable(f"{text}: tried again later; look at the network if this stays")
    return meant
