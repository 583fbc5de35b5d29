"""`[HOST]:PORT`: where a watch listens and where it is asked. Imports next to nothing: probes run it all the time."""

from __future__ import annotations

from dispatch_agent.errors import SettingsError


def parse_listen(text: str) -> tuple[str, int]:
    """Host (in ASCII; empty: all addresses) and port of `[HOST]:PORT`; an IPv6 address stands in brackets.

    Raises SettingsError.
    """
    host, colon, port = text.rpartition(":")
    if host[:1] == "[" and host[-1:] == "]":
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
    if not (colon and host.isascii() and 1 <= number <= 65535):
        msg = (
            f"--listen is {text!r}, not [HOST]:PORT: give :9464 for all addresses, 127.0.0.1:9464 or [::1]:9464 for one"
        )
        raise SettingsError(msg)
    return host, number
