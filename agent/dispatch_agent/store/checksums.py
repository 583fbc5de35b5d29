"""Whether a store refuses bytes that do not fit the checksum sent with them. Many take the checksum and ignore it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dispatch_agent.errors import StoreDenied, StoreError, StoreUnavailable
from dispatch_agent.support import Support

RIGHT, WRONG = b"the bytes that were meant", b"the bytes that were sent!"

Send = Callable[[bytes, bytes], object]
"""Sends the first bytes under the checksum of the second."""


def attempt(algorithm: str, sends: Sequence[Send], refused: Callable[[StoreError], bool]) -> Support:
    """Right bytes, then wrong ones, in each way of sending. `refused` tells a refusal of the bytes from other failures.

    Raises StoreUnavailable and StoreDenied.
    """
    try:
        for send in sends:
            send(RIGHT, RIGHT)
    except (StoreUnavailable, StoreDenied):
        raise
    except StoreError as error:
        return Support("no", "probed", f"{algorithm} is not understood: {error}")
    if any(_takes(send, refused) for send in sends):
        return Support("no", "probed", f"bytes with a wrong {algorithm} were stored")
    return Support("yes", "probed", f"bytes with a wrong {algorithm} were refused, whole and in parts")


def _takes(send: Send, refused: Callable[[StoreError], bool]) -> bool:
    try:
        send(WRONG, RIGHT)
    except StoreError as error:
        if refused(error):
            return False
        raise
    return True
