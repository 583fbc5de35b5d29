"""Write a key once, and believe nothing about it but what is read back (invariants I3 and I8).

Every answer of a conditional write but success is *unknown*: s3fs, botocore and aiohttp send a PUT again whose answer
was lost, and the store then refuses the second because of the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dispatch_agent.clock import Clock
from dispatch_agent.errors import OutcomeUnknown, StoreError
from dispatch_agent.store.base import ConditionFailed, KeyMissing, Store


class Taken(Exception):
    """Other bytes stand under the key. `data` holds them."""

    def __init__(self, key: str, data: bytes) -> None:
        super().__init__(f"{key} holds other bytes")
        self.key = key
        self.data = data


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long to try again before an outcome stays unknown.

    `draw` gives a number in [0, 1): jitter, so that writers who met once do not meet again.
    """

    clock: Clock
    draw: Callable[[], float]
    tries: int = 6
    first: float = 0.1
    longest: float = 5.0

    def attempts(self) -> Iterator[int]:
        """Count the tries from 0, with a wait before every one but the first."""
        for number in range(self.tries):
            if number:
                self.pause(number - 1)
            yield number

    def pause(self, after: int) -> None:
        """Wait after the given try, counted from 0."""
        self.clock.wait(
            threading.Event(), min(self.longest, self.first * 2 ** min(after, 32)) * (0.5 + self.draw() / 2)
        )


def write_once(store: Store, key: str, data: bytes, patience: Patience) -> None:
    """Have `data` stand under `key`, which nobody else may have written.

    Sending it again is harmless: same key, same bytes. Raises Taken if other bytes stand there, OutcomeUnknown if
    that could not be found out, StoreError if the store refused for good and holds nothing.
    """
    last: Exception | None = None
    for _ in patience.attempts():
        try:
            store.create(key, data)
        except (ConditionFailed, KeyMissing, StoreError) as error:
            last = error
        else:
            return
        try:
            found = store.read(key).data
        except KeyMissing:
            if isinstance(last, StoreError) and not last.retryable:
                raise last from None
        except StoreError as error:
            if isinstance(last, StoreError) and not (last.retryable or error.retryable):
                raise last from None
            last = error
        else:
            if found == data:
                return
            raise Taken(key, found)
    msg = (
        f"whether {key} was written to {store.url} is unknown after {patience.tries} tries (last answer: {last}); "
        f"it may still land: try again, nothing was deleted"
    )
    raise OutcomeUnknown(msg) from last
