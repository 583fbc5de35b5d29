"""A store in this process's memory, for tests and demonstrations: every promise of the seam, kept under one lock."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dispatch_agent.store import keys
from dispatch_agent.store.base import ConditionFailed, Document, KeyMissing, Limits, Source, Stored, Uploaded
from dispatch_agent.store.capabilities import Facts
from dispatch_agent.support import Support

LIMITS = Limits(key_bytes=1024, component_bytes=255)
PIECE = 1 << 20


@dataclass(slots=True)
class _Space:
    """What one name holds: key to (bytes, version). Versions count up and are never used twice."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    objects: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    writes: int = 0


_spaces: dict[str, _Space] = {}
_spaces_lock = threading.Lock()


class MemoryStore:
    """`memory://name`: stores of one name in one process share their objects; an empty name shares nothing."""

    def __init__(self, name: str = "") -> None:
        self.url = f"memory://{name}"
        self.limits = LIMITS
        with _spaces_lock:
            self._space = _spaces.setdefault(name, _Space()) if name else _Space()

    def facts(self) -> Facts:
        yes = Support("yes", "declared", "one process, one lock")
        return Facts(atomic_visibility=yes, replace_trusted=yes)

    def create(self, key: str, data: bytes) -> str:
        keys.split(key, LIMITS)
        with self._space.lock:
            if key in self._space.objects:
                raise ConditionFailed(key)
            return self._write(key, data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        keys.split(key, LIMITS)
        with self._space.lock:
            if key not in self._space.objects or self._space.objects[key][1] != version:
                raise ConditionFailed(key)
            return self._write(key, data)

    def put(self, key: str, data: bytes) -> None:
        keys.split(key, LIMITS)
        with self._space.lock:
            self._write(key, data)

    def read(self, key: str) -> Document:
        keys.split(key, LIMITS)
        with self._space.lock:
            if key not in self._space.objects:
                raise KeyMissing(key)
            return Document(*self._space.objects[key])

    def upload(self, key: str, source: Source) -> Uploaded:
        keys.split(key, LIMITS)
        data = b"".join(iter(lambda: source.read(PIECE), b""))
        self.put(key, data)
        return Uploaded(size=len(data), sha256=hashlib.sha256(data).hexdigest(), verified=True)

    def stream(self, key: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        data = self.read(key).data
        for start in range(0, len(data), chunk):
            yield data[start : start + chunk]

    def list(self, prefix: str) -> Iterator[Stored]:
        under = "/".join([*keys.split_prefix(prefix), ""])
        with self._space.lock:
            found = [Stored(key, len(data)) for key, (data, _) in self._space.objects.items() if key.startswith(under)]
        yield from found

    def folders(self, prefix: str) -> Sequence[str]:
        under = "/".join([*keys.split_prefix(prefix), ""])
        return sorted({rest[0] for s in self.list(prefix) if len(rest := s.key[len(under) :].split("/")) > 1})

    def delete(self, key: str) -> None:
        keys.split(key, LIMITS)
        with self._space.lock:
            self._space.objects.pop(key, None)

    def close(self) -> None:
        """Nothing to give back: the objects stay for the next store of this name."""

    def _write(self, key: str, data: bytes) -> str:
        self._space.writes += 1
        version = str(self._space.writes)
        self._space.objects[key] = (bytes(data), version)
        return version
