"""What a key is: checked before anything is sent, so that no store sees a name that could lead elsewhere."""

from __future__ import annotations

import os

from dispatch_agent.errors import StoreError
from dispatch_agent.store.base import Limits

# No encoded name holds `~` (records percent-encode it), so a store may use names that begin so for what it never lists.
PRIVATE = ".~dispatch"
DRAFT = PRIVATE + ".draft."
LOCK = PRIVATE + ".lock"


def split(key: str, limits: Limits) -> list[str]:
    """The components of a key. Raises ValueError for what is no key, StoreError for one too long for the store."""
    parts = key.split("/")
    for part in parts:
        if part in {"", ".", ".."} or "\0" in part or part.startswith(PRIVATE):
            msg = f"{key!r} is not a key: the component {part!r} is not allowed"
            raise ValueError(msg)
    check_length(key, parts, limits)
    return parts


def split_prefix(prefix: str) -> list[str]:
    """The components of a listing's prefix; none for the empty prefix. Raises ValueError for what is no prefix."""
    return split(prefix, Limits(key_bytes=1 << 30, component_bytes=1 << 30)) if prefix else []


def check_length(key: str, parts: list[str], limits: Limits) -> None:
    """Raises StoreError naming what is too long, its length and the limit, in bytes."""
    size = len(os.fsencode(key))
    if size > limits.key_bytes:
        msg = (
            f"the name {key!r} has {size} bytes, the store keeps {limits.key_bytes}: shorten the names inside the save"
        )
        raise StoreError(msg)
    for part in parts:
        if (size := len(os.fsencode(part))) > limits.component_bytes:
            msg = (
                f"{part!r} (in {key!r}) has {size} bytes, the store keeps {limits.component_bytes} between two slashes:"
                " shorten the name"
            )
            raise StoreError(msg)
