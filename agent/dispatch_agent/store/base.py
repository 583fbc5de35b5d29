"""The Store seam: what the protocol asks of a destination, and what each answer promises.

Promises that every store must keep, and the conformance suite tries to break:

- atomic visibility: a key is absent or holds exactly the bytes of one write, never a part or a mix;
- list after write: a key whose write was answered is in the next listing;
- no caching: every answer is asked of the destination itself.

`create` and `replace` are what a store may lack. Whether they really refuse is proved by `probe`, never believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class KeyMissing(Exception):
    """No object stands under this key. An answer, not a fault: callers decide what it means."""

    def __init__(self, key: str) -> None:
        super().__init__(f"no object at {key}")
        self.key = key


class ConditionFailed(Exception):
    """The store says that the condition of a conditional write does not hold.

    Not yet a lost race: clients and networks send a write again whose answer was lost, and the second is refused
    because of the first. The caller reads back before it believes anything (invariant I8).
    """


@dataclass(frozen=True, slots=True)
class Document:
    """A small object read whole. `version` is the store's own name of these bytes, for `replace`; opaque."""

    data: bytes
    version: str


@dataclass(frozen=True, slots=True)
class Stored:
    """One listed object: its key relative to the store's root, and its size in bytes."""

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class Uploaded:
    """What became of one upload.

    `sha256` (hex) is of the bytes that were stored. `verified` is true if the store would have refused other bytes
    (it rejects a wrong checksum, which the probe saw) or they were read back from it; else the caller reads back.
    """

    size: int
    sha256: str
    verified: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """What a key may be: bytes in all, and bytes between two slashes. Seen before anything is sent."""

    key_bytes: int
    component_bytes: int


class Source(Protocol):
    """One open local file, read once from its start.

    `read` may raise (the file changed, the publisher was told to stop): the store lets that pass and stores nothing
    under the key, or something that nobody will ever name.
    """

    @property
    def size(self) -> int:
        """Bytes the file had when it was opened; `read` ends there."""
        ...

    def fileno(self) -> int:
        """The open descriptor, for stores that can clone or copy inside the kernel."""
        ...

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size`; empty at the end."""
        ...

    def tick(self, size: int) -> None:
        """Report progress of `size` bytes that did not pass through `read`. Raises like `read`."""
        ...


class Store(Protocol):
    """A destination. Keys are relative, `/`-separated, never start or end with `/`, and hold no empty component.

    Raises, from every method: StoreUnavailable (may pass), StoreDenied, StoreError (a key that is too long); KeyMissing
    and ConditionFailed where said; StoreTooWeak from create and replace where the store has no such thing.
    Thread-safe: uploads run side by side.
    """

    @property
    def url(self) -> str:
        """Where this is, for people: never with credentials in it."""
        ...

    @property
    def limits(self) -> Limits:
        """What a key may be here."""
        ...

    def create(self, key: str, data: bytes) -> str:
        """Store `data` (small: one request) only if the key is absent; its version. Raises ConditionFailed."""
        ...

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Store `data` only if the key has `version`; the new version. Raises ConditionFailed (also if absent)."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Store `data` (small: one request) whatever stands there. Only for keys that no other writer can have."""
        ...

    def read(self, key: str) -> Document:
        """The whole object and its version, in one request. Raises KeyMissing."""
        ...

    def upload(self, key: str, source: Source) -> Uploaded:
        """Store a file of any size, whatever stands there. Only for keys that no other writer can have."""
        ...

    def stream(self, key: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        """The object's bytes in pieces of at most `chunk`. Raises KeyMissing, at the latest at the first piece."""
        ...

    def list(self, prefix: str) -> Iterator[Stored]:
        """Every object whose key starts with `prefix` + `/`, in any order; all of the store for an empty prefix."""
        ...

    def folders(self, prefix: str) -> Sequence[str]:
        """The names directly under `prefix` + `/` that have objects below them (a delimiter listing), sorted."""
        ...

    def delete(self, key: str) -> None:
        """Remove one object, by its literal key. A key that is absent is no fault."""
        ...

    def close(self) -> None:
        """Give back threads and connections."""
        ...


@runtime_checkable
class LatestLink(Protocol):
    """What a folder can do besides: a symbolic link for people, repointed atomically."""

    def symlink(self, name: str, target_key: str) -> None:
        """Have the link `name` at the store's root lead to `target_key`."""
        ...
