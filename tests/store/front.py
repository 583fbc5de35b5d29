"""A front that stands before a real server and misbehaves as a test says: it loses answers, spoils bytes, is racy.

`ANSWERS` is the vocabulary of what a server or a network does to one request; tests/protocol/faults.py says what each
of them is to the publisher.
"""

from __future__ import annotations

import http.client
import http.server
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from tests.servers import Bucket


@dataclass(frozen=True)
class Request:
    """One request as it came. `key` is the decoded path after the bucket."""

    method: str
    target: str
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.target).path.lstrip("/").partition("/")[2])

    @property
    def query(self) -> str:
        return urlsplit(self.target).query


@dataclass(frozen=True)
class Reply:
    status: int
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


Forward = Callable[[Request], Reply]
Behaviour = Callable[[Request, Forward], "Reply | None"]


def fault(status: int, code: str) -> Reply:
    """An error as S3 words it."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by the test</Message></Error>".encode()
    return Reply(status, [("Content-Type", "application/xml")], body)


@contextmanager
def front(endpoint: str, behave: Behaviour, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The endpoint of a proxy before `endpoint`, which also takes what is sent to an HTTP proxy.

    `behave(request, forward)` answers; what it forwards reaches the server. None closes the connection without a word,
    as a network does that loses the answer.
    """
    there = urlsplit(endpoint)

    def forward(request: Request) -> Reply:
        connection = http.client.HTTPConnection(there.hostname or "", there.port, timeout=60)
        try:
            connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name not in {"connection", "expect", "content-length", "transfer-encoding"}:
                    connection.putheader(name, value)
            connection.putheader("content-length", str(len(request.body)))
            connection.endheaders(request.body)
            answer = connection.getresponse()
            return Reply(answer.status, answer.getheaders(), answer.read())
        finally:
            connection.close()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def serve(self) -> None:
            self.close_connection = True  # one request each, so that no thread waits for a client that keeps its line
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", 0)))
            reply = behave(Request(self.command, self.path, headers, body), forward)
            if reply is None:
                return
            with suppress(ConnectionError):
                self.send_response(reply.status)
                for name, value in reply.headers:
                    if name.lower() not in {"connection", "content-length", "transfer-encoding", "date", "server"}:
                        self.send_header(name, value)
                length = {name.lower(): value for name, value in reply.headers}.get(
                    "content-length", str(len(reply.body))
                )
                self.send_header("Content-Length", length if self.command != "HEAD" or not reply.body else "0")
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(reply.body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = serve  # noqa: N815 (the names that http.server looks for)

        def log_message(self, *_: object) -> None:
            """A test that fails shows what it looked at; every request beside it would only hide that."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        # Shaken hands by the thread that serves: a client that refuses our certificate must not end the front.
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.daemon_threads = False  # so that closing waits for them
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="front")
    thread.start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Chosen:
    """Misbehaves at those requests of which `when` is true: at the k-th of them and the `more` after it."""

    def __init__(self, when: Callable[[Request], bool], act: Behaviour, k: int = 1, more: int = 0) -> None:
        self.seen: list[Request] = []
        self.met = 0
        self._when, self._act, self._k, self._more, self._lock = when, act, k, more, threading.Lock()

    def __call__(self, request: Request, forward: Forward) -> Reply | None:
        with self._lock:
            self.seen.append(request)
            self.met += self._when(request)
            mine = self._when(request) and self._k <= self.met <= self._k + self._more
        return self._act(request, forward) if mine else forward(request)


class Held:
    """Closes the connection on requests, and lets them reach the server at `deliver`, when their sender has gone."""

    def __init__(self) -> None:
        self.holds: list[Request] = []
        self._forward: Forward | None = None

    def __call__(self, request: Request, forward: Forward) -> None:
        self.holds.append(request)
        self._forward = forward

    def deliver(self) -> None:
        while self.holds and self._forward:
            self._forward(self.holds.pop(0))


def says(status: int, code: str, *, applied: bool = False) -> Behaviour:
    """Answers an error, whether or not the server has done what it was asked."""

    def act(request: Request, forward: Forward) -> Reply:
        if applied:
            forward(request)
        return fault(status, code)

    return act


def closes(*, applied: bool, after: float = 0.0) -> Behaviour:
    """Closes the connection without an answer, `after` seconds of silence."""

    def act(request: Request, forward: Forward) -> None:
        if applied:
            forward(request)
        time.sleep(after)

    return act


READ_TIMEOUT = 0.6
"""Seconds after which the clients of these tests give up waiting."""
ANSWERS: dict[str, Behaviour] = {
    "500, nothing done": says(500, "InternalError"),
    "500, done": says(500, "InternalError", applied=True),
    "503 SlowDown": says(503, "SlowDown"),
    "400 ExpiredToken": says(400, "ExpiredToken"),
    "403 ExpiredToken": says(403, "ExpiredToken"),
    "403 RequestTimeTooSkewed": says(403, "RequestTimeTooSkewed"),
    "closed, nothing done": closes(applied=False),
    "closed, done": closes(applied=True),
    "hangs, nothing done": closes(applied=False, after=2 * READ_TIMEOUT),
    "hangs, done": closes(applied=True, after=2 * READ_TIMEOUT),
}
CONDITIONAL: dict[str, Behaviour] = {
    "409 ConditionalRequestConflict": says(409, "ConditionalRequestConflict"),
    "412, nothing done": says(412, "PreconditionFailed"),
    "412, done": says(412, "PreconditionFailed", applied=True),
}
"""What is only said of a conditional write."""


def is_conditional(request: Request) -> bool:
    return request.method == "PUT" and not {"if-match", "if-none-match"}.isdisjoint(request.headers)


def check_then_act(bucket: Bucket, delay: float = 0.02) -> Behaviour:
    """Honours If-None-Match and If-Match on PUT by a look before the write: right in turn, wrong in a race."""
    client = bucket.client()

    def behave(request: Request, forward: Callable[[Request], Reply]) -> Reply | None:
        expected, absent = request.headers.get("if-match"), request.headers.get("if-none-match")
        if request.method == "PUT" and (expected or absent):
            with suppress(client.exceptions.ClientError):
                etag = None
                etag = client.head_object(Bucket=bucket.name, Key=request.key)["ETag"]
            if (absent and etag) or (expected and etag != expected):
                return fault(412, "PreconditionFailed")
            time.sleep(delay)
        return forward(request)

    return behave
