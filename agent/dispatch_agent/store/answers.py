"""What an HTTP answer means to the protocol where nothing more is known of it than its status."""

from __future__ import annotations

from dataclasses import dataclass

from dispatch_agent.errors import StoreDenied, StoreError, StoreUnavailable
from dispatch_agent.store.base import ConditionFailed, KeyMissing

LATER = "tried again later; look at the store if this stays"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said: HTTP status, its own code for it, its words."""

    status: int
    code: str
    message: str


def by_status(said: Answer, where: str, key: str) -> Exception:
    """The exception of the seam. `where` begins the sentence: what could not be done."""
    text = f"{where}: {said.status} {said.code} {said.message}".rstrip()
    if said.status == 412:
        return ConditionFailed(key)
    if said.status == 404:
        return KeyMissing(key)
    if said.status in {401, 403}:
        return StoreDenied(f"{text}: look at the credentials, their age, the clock and what their owner may do there")
    if said.status in {408, 409, 425, 429} or said.status >= 500:
        return StoreUnavailable(f"{text}: {LATER}")
    return StoreError(f"{text}: the store refuses this request, and sending it again will not help")
