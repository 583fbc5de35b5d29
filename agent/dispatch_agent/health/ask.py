"""Asking the watch beside us, over loopback. Built into a few milliseconds: probes run it all the time."""

from __future__ import annotations

import _socket

from dispatch_agent.health.listening import parse_listen

PATIENCE = 2.0
"""Seconds for each step."""
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
    family, *_, address = _socket.getaddrinfo(host or "127.0.0.1", port, type=_socket.SOCK_STREAM)[0]
    connection = _socket.socket(family, _socket.SOCK_STREAM)
    try:
        connection.settimeout(PATIENCE)
        connection.connect(address)
        connection.sendall(request)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        return b"".join(parts)
    finally:
        connection.close()
