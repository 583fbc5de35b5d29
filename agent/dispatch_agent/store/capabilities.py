"""What is known about a destination: what its kind promises, what the probe saw, and when that is too little."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from dispatch_agent.errors import StoreTooWeak
from dispatch_agent.support import Support

Checksum = Literal["sha256", "md5", "none"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a store's kind says of itself, which no probe from one host can prove.

    `replace_trusted`: whether a conditional replace that holds here also holds against writers on other hosts.
    """

    atomic_visibility: Support
    replace_trusted: Support


@runtime_checkable
class States(Protocol):
    """A store that states facts about its kind."""

    def facts(self) -> Facts: ...


@runtime_checkable
class Checksums(Protocol):
    """A store that can send a checksum with the bytes, and so may have wrong bytes refused for it."""

    checksum: Checksum

    def try_checksum(self, prefix: str, algorithm: Literal["sha256", "md5"]) -> Support:
        """Whether wrong bytes are refused and right ones kept below `prefix`, in one request and in parts."""
        ...


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a killed writer left that is no object and that no listing shows: half a file in a folder, parts of an S3
    upload. `key` is where it stands or what it was to become, `handle` the store's own name of it."""

    key: str
    handle: str


@runtime_checkable
class Sweeps(Protocol):
    """A store in which a killed writer leaves more than objects."""

    def leftovers(self, prefix: str) -> Iterator[Leftover]:
        """Everything unfinished below `prefix`, also what a living writer is at."""
        ...

    def remove(self, leftover: Leftover) -> None:
        """Remove it; its writer, if it lives, fails. One that is gone is no fault."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one destination can do. `saw` is what the probe met, in words, one sentence each.

    `conditional_replace` has three uses: yes, the pointer is kept; unknown, it holds here but perhaps not between
    hosts, so the pointer is advisory; no, there is no pointer. `checksum` is what to send with every upload.
    """

    conditional_create: Support
    conditional_replace: Support
    atomic_visibility: Support
    list_after_write: Support
    checksums: Support
    checksum: Checksum = "none"
    saw: tuple[str, ...] = ()


def require(found: Capabilities, *, accept_weak: bool = False) -> None:
    """Raises StoreTooWeak unless lost races are refused and listings are fresh.

    `accept_weak` lets a store without conditional create pass, never one whose listing lags: the claims that replace
    the condition are found by listing.
    """
    if not found.list_after_write:
        msg = (
            f"the destination does not list what was just written ({found.list_after_write.reason}): commits could be"
            " overlooked; publish to a store with consistent listings"
        )
        raise StoreTooWeak(msg)
    if not found.conditional_create and not accept_weak:
        msg = (
            f"the destination cannot refuse a lost race ({found.conditional_create.reason}): publish to a store with"
            " conditional writes, or pass --accept-weak-store to go without"
        )
        raise StoreTooWeak(msg)
