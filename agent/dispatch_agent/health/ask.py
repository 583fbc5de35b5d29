"""Asking the watch beside us, over loopback. Built into a few milliseconds: probes run it all the time."""

from __future__ import annotations

import _socket
from time import monotonic

from dispatch_agent.health.listening import parse_listen

PATIENCE = 2.0
"""Seconds to connect in, and for all of the answer."""
MOST = 65536
"""Bytes of an answer: a sentence is far shorter."""
PATHS = {"started": "/startupz", "live": "/livez", "ready": "/readyz", "terminating": "/terminating"}


def ask(listen: str, question: str) -> tuple[bool, str]:
    """Whether the watch that listens on `listen` says yes, and its sentence. Raises SettingsError; OSError if nothing
    answers."""
    host, port = parse_listen(listen)
    verb = "POST" if question == "terminating" else "GET"
    answer = _exchange(host, port, f"{verb} {PATHS[question]} HTTP/1.0\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if not head.startswith(b"HTTP/") or not status:
        raise OSError(0, "what answers there is no watch")
    return status[0] == b"200", body.decode("utf-8", "replace").strip()


def _exchange(host: str, port: int, request: bytes) -> bytes:
    """What comes in answer, up to MOST bytes of it. Raises OSError, also where that takes longer than PATIENCE."""
    give_up = monotonic() + PATIENCE
    # As bytes, since of a text that is no name in IDNA it raises no OSError.
    address_of = _socket.getaddrinfo((host or "127.0.0.1").encode(), port, type=_socket.SOCK_STREAM)
    family, *_, address = address_of[0]
    connection = _socket.socket(family, _socket.SOCK_STREAM)
    try:
        connection.settimeout(PATIENCE)
        connection.connect(address)
        connection.sendall(request)
        answer = b""
        while len(answer) < MOST:
            left = give_up - monotonic()
            if left <= 0:
                raise OSError(0, "timed out")
            connection.settimeout(left)
            part = connection.recv(MOST)
            if not part:
                break
            answer += part
        return answer
    finally:
        connection.close()
