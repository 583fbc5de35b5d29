"""What is known about a destination: what its kind promises, what the probe saw, and when that is too little."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from dispatch_agent.errors import StoreTooWeak
from dispatch_agent.support import Support

Checksum = Literal["sha256", "md5", "none"]


ONE_SERVER = Support("yes", "catalogue", "one server answers all hosts")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a store's kind says of itself, which no probe from one host can prove.

    `replace_trusted`, `create_trusted`: whether a condition that holds here also holds against writers on other hosts.
    `listing_trusted`: whether what is listed here at once is listed on other hosts at once.
    """

    atomic_visibility: Support
    replace_trusted: Support
    create_trusted: Support = ONE_SERVER
    listing_trusted: Support = ONE_SERVER


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

    @property
    def weak(self) -> bool:
        """Whether it cannot be relied on to refuse a lost race."""
        return not self.conditional_create

    @property
    def points(self) -> bool:
        """Whether there is a pointer to move."""
        return self.conditional_replace.value != "no"


def require(found: Capabilities, *, accept_weak: bool = False) -> None:
    """Raises StoreTooWeak unless lost races are refused and listings are fresh.

    `accept_weak` lets a store pass of which either is not known, or that has no conditional create; never one whose
    listing is known to lag: the claims that replace the condition are found by listing.
    """
    listing, create = found.list_after_write, found.conditional_create
    if listing.value == "no" or not (listing or accept_weak):
        msg = (
            f"the destination {_verb(listing)} list at once what was written ({listing.reason}): commits could be"
            " overlooked; publish to a store with consistent listings"
        )
        raise StoreTooWeak(msg)
    if not (create or accept_weak):
        msg = (
            f"the destination {_verb(create)} refuse a lost race ({create.reason}): publish to a store with"
            " conditional writes, or pass --accept-weak-store to go without"
        )
        raise StoreTooWeak(msg)


def _verb(support: Support) -> str:
    return "cannot" if support.value == "no" else "is not known to"
