"""A small HTTP server for probes and scrapes. Nothing that a client does reaches the loop that publishes."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from dispatch_agent.errors import SettingsError
from dispatch_agent.health.listening import parse_listen
from dispatch_agent.health.state import Answer
from dispatch_agent.logs import Log, redact

MOST = 32
"""Connections at once. One more, and the oldest is closed: those who hang must not keep out those who ask."""
PATIENCE = 5.0
"""Seconds that a client may take for its next line."""


@dataclass(frozen=True, slots=True)
class Page:
    """A body and its media type."""

    body: bytes
    kind: str


@dataclass(frozen=True, slots=True)
class Site:
    """What is answered: a sentence per path, the metrics for an Accept header, and who is told that the pod ends."""

    answers: Mapping[str, Callable[[], Answer]]
    metrics: Callable[[str], Page]
    terminating: Callable[[], Answer]


def serve(listen: str, site: Site, log: Log) -> None:
    """Answer on `listen` ([HOST]:PORT) from threads of their own, for as long as the process lives.

    Raises SettingsError if that is no address or cannot be listened on.
    """
    host, port = parse_listen(listen)
    try:
        server = _Server(_bound(host, port), site, log)
    except OSError as error:
        msg = (
            f"cannot listen on {listen} ({error.strerror or error}): all containers of a pod share one set of ports; "
            f"give --listen another one, to the probes too"
        )
        raise SettingsError(msg) from error
    Thread(target=server.serve_forever, kwargs={"poll_interval": 3600.0}, name="health", daemon=True).start()
    log.info("listening", on=listen)


def _bound(host: str, port: int) -> socket.socket:
    if not host:
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                raise
        return socket.create_server(("", port), backlog=128)  # a node without IPv6
    # As bytes, since of a text that is no name in IDNA it raises no OSError.
    family, *_, address = socket.getaddrinfo(host.encode(), port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=128)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # else it would remember every thread that ever answered

    def __init__(self, bound: socket.socket, site: Site, log: Log) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
        self.site = site
        self.log = log
        self._open: dict[socket.socket, None] = {}
        self._lock = Lock()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.2)  # no descriptor is free: the connection stays in the queue, and select would return at once
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) >= MOST else None
            if oldest is not None:
                del self._open[oldest]  # now: its thread may be slow to end, and the next one must close another
            self._open[request] = None
        if oldest is not None:
            _hang_up(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 (socketserver's names)
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # not a client that went away, but a fault of ours
            self.log.once("error", repr(error), "not answered", error=repr(error))


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has just ended by itself
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = PATIENCE
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = "text/plain; charset=utf-8"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        site = self.server.site
        if path in site.answers:
            self._answer(site.answers[path]())
        elif path == "/metrics":
            page = site.metrics(self.headers.get("Accept", ""))
            self._send(200, page.body, page.kind)
        elif path == "/terminating":
            self._say(405, "POST says that the pod has begun to end")
        else:
            self._say(404, f"there are {' '.join(site.answers)} /metrics")

    do_HEAD = do_GET  # noqa: N815 (http.server's name)

    def do_POST(self) -> None:
        if self.path != "/terminating":
            self._say(405, "nothing but /terminating takes a POST")
        elif not self._is_near():
            self._say(403, "only what runs in this pod may say that it ends")
        else:
            self._answer(self.server.site.terminating())

    def version_string(self) -> str:
        return "dispatch-agent"

    def log_message(self, *_: object) -> None:
        """Probes come every few seconds: the log is not for them."""

    def _is_near(self) -> bool:
        """Whether who asks is in this pod: over loopback or not, it then comes from the address that it asks at."""
        return bool(self.client_address[0] == self.connection.getsockname()[0])

    def _answer(self, answer: Answer) -> None:
        self._say(200 if answer.yes else 503, answer.sentence)

    def _say(self, status: int, sentence: str) -> None:
        self._send(status, redact(sentence).encode("utf-8", "backslashreplace") + b"\n", "text/plain; charset=utf-8")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
