"""One process's line to Google Cloud Storage, and what its answers mean: the only file that makes a gcsfs filesystem.

gcsfs finds the endpoint and the credentials and keeps the session. Its own requests forget what the server said (a
missing bucket and a missing object are one to it), so they are made here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import aiohttp
from gcsfs.core import GCSFileSystem  # not from the package, whose class asks each bucket for its kind over gRPC
from google.auth.exceptions import GoogleAuthError, TransportError
from yarl import URL

from dispatch_agent.errors import SettingsError, StoreDenied, StoreUnavailable
from dispatch_agent.store import loop
from dispatch_agent.store.answers import Answer, by_status
from dispatch_agent.store.base import KeyMissing

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)
PAUSES = (0.5, 1.0, 2.0)  # seconds before each further try
AGAIN = {408, 429, 500, 502, 503, 504}
CREDENTIALS = "give credentials by gcloud, a key file (token=/path), the instance or storage options"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that is no failure."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


class Connection:
    """Thread-safe; not for use after a fork. `options` are gcsfs's own. Raises SettingsError and StoreDenied."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self._url = url
        try:
            self._filesystem = GCSFileSystem(skip_instance_cache=True, use_listings_cache=False, **options)
        except GoogleAuthError as error:
            msg = f"no credentials for {url}: {error}: {CREDENTIALS}"
            raise StoreDenied(msg) from error
        except OSError:  # requests names the URL that it could not reach, and a token is in it
            msg = f"the token given for {url} could not be looked at: look at the network, or give a key file instead"
            raise StoreUnavailable(msg) from None
        except (ValueError, TypeError, KeyError) as error:
            msg = f"the storage options for {url} are not understood: {error}; {CREDENTIALS}"
            raise SettingsError(msg) from error
        self._base = str(self._filesystem.base).removesuffix("storage/v1/")

    async def request(
        self,
        what: str,
        key: str,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
        fine: tuple[int, ...] = (),
    ) -> Reply:
        """One request to a path below the endpoint, or to a URL; more tries where they can help. Raises as the seam
        allows; KeyMissing for 404, whatever is missing; a status in `fine` is no failure."""
        with _explained(f"could not {what} {self._url}/{key}".rstrip("/"), key):
            url = path
            if not path.startswith("http"):
                url = f"{self._base}{path}?{urlencode(self._filesystem._get_params(query))}"
            for pause in (*PAUSES, 0.0):
                try:
                    reply = await self._send(method, URL(url, encoded=True), headers or {}, data)
                except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
                    if not pause:
                        raise
                else:
                    if reply.status not in AGAIN or not pause:
                        break
                await asyncio.sleep(pause)
            if reply.status >= 400 and reply.status not in fine:
                raise _Refused(_answer(reply))
            return reply

    def close(self) -> None:
        """Close the sockets."""
        session = self._filesystem.session
        if session is not None:
            loop.run(session.close())

    async def _send(self, method: str, url: URL, headers: Mapping[str, str], data: bytes | None) -> Reply:
        session = await self._filesystem._set_session()
        # Off the loop, because a token that has expired is asked for anew in there, and waited for.
        signing = asyncio.get_running_loop().run_in_executor(None, self._filesystem._get_headers, headers)
        try:
            signed = await signing
        except TransportError:
            raise
        except Exception as error:  # gcsfs gives it one of many types
            raise _NoToken(str(error)) from error
        sending = session.request(
            method, url, headers=signed, data=data, timeout=TIMEOUT, allow_redirects=False, raise_for_status=False
        )
        async with sending as response:
            return Reply(response.status, response.headers, await response.read())


class _NoToken(Exception):
    """The credentials give none."""


class _Refused(Exception):
    """The server answered with a failure."""

    def __init__(self, said: Answer) -> None:
        super().__init__(f"{said.status} {said.code} {said.message}")
        self.said = said


def status(error: BaseException | None) -> int:
    """The HTTP status that an exception of the seam was made from; 0 if none."""
    return error.said.status if isinstance(error, _Refused) else 0


def no_bucket(error: KeyMissing, what: str, url: str) -> StoreUnavailable:
    """For a request that can miss nothing but the bucket."""
    return StoreUnavailable(f"could not {what} {url}/{error.key}: no such bucket: create it or correct its name")


@contextmanager
def _explained(where: str, key: str) -> Iterator[None]:
    try:
        yield
    except _Refused as error:
        raise by_status(error.said, where, key) from error
    except TransportError as error:
        msg = f"{where}: {error}: look at the network if this stays"
        raise StoreUnavailable(msg) from error
    except _NoToken as error:
        msg = f"{where}: {error}: {CREDENTIALS}"
        raise StoreDenied(msg) from error
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        msg = f"{where}: {error or type(error).__name__}: look at endpoint and network if this stays"
        raise StoreUnavailable(msg) from error


def _answer(reply: Reply) -> Answer:
    """In JSON where it comes from the service, else as something between wrote it."""
    try:
        said = reply.json["error"]
        return Answer(reply.status, str(said["errors"][0]["reason"]), str(said["message"]))
    except (ValueError, KeyError, IndexError, TypeError):
        return Answer(reply.status, "", reply.body[:200].decode(errors="replace").strip())
