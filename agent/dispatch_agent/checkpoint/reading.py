"""Reading one file of a save, and noticing when it is not the file that was looked at.

Only the same open descriptor, looked at before the first byte and after the last, says anything about the bytes that
were read; a path may name another file by then.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import final

from dispatch_agent.checkpoint.names import shown
from dispatch_agent.checkpoint.save import Entry, Snapshot
from dispatch_agent.errors import IntegrityError, SourceChanged

_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.ENXIO})


def path_of(folder: Path, save: Snapshot, entry: Entry) -> bytes:
    """Where an entry of a save is. The save itself for the root entry."""
    top = os.path.join(os.fsencode(folder), save.name)
    return os.path.join(top, entry.path) if entry.path else top


def _silent(_size: int) -> None:
    return


@final
class SourceFile:
    """One open file of a save, as a Source of the store.

    Opens at once. `on_tick` gets the bytes of every step and may raise to stop the reading; that passes through.
    Raises SourceChanged if the file is gone or is not as `entry` says, IntegrityError if it may not or cannot be read.
    """

    def __init__(self, path: bytes, entry: Entry, on_tick: Callable[[int], None] = _silent) -> None:
        self._path = path
        self._entry = entry
        self._on_tick = on_tick
        self._left = entry.size
        # O_NONBLOCK: a FIFO that took the file's place must not hang the publisher; regular files do not mind.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._descriptor = os.open(path, flags)
        except OSError as error:
            raise self._refusal(error) from error
        try:
            self._compare()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Bytes the file has, as it was looked at; `read` ends there."""
        return self._entry.size

    def fileno(self) -> int:
        """The open descriptor, for stores that can clone or copy inside the kernel."""
        return self._descriptor

    def read(self, size: int) -> bytes:
        """The next bytes: `size` of them, or all that are left; empty at the end.

        Raises SourceChanged if the file is shorter now, IntegrityError if it cannot be read.
        """
        wanted = min(size, self._left) if size >= 0 else self._left
        pieces: list[bytes] = []
        missing = wanted
        while missing:
            try:
                piece = os.read(self._descriptor, missing)
            except OSError as error:
                raise self._refusal(error) from error
            if not piece:
                there = self._entry.size - self._left + wanted - missing
                msg = f"{self._shown} ends after {there} bytes and had {self._entry.size}"
                raise SourceChanged(msg)
            pieces.append(piece)
            missing -= len(piece)
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._left -= wanted
        self._on_tick(wanted)
        return data

    def peek(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes at `offset`, apart from `read`. Raises SourceChanged, IntegrityError."""
        try:
            return os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise self._refusal(error) from error

    def tick(self, size: int) -> None:
        """Report progress of `size` bytes that did not pass through `read`."""
        self._on_tick(size)

    def finish(self) -> None:
        """Say that the bytes read are the file's: it did not change or grow meanwhile. Raises SourceChanged."""
        self._compare()
        if self.peek(1, self._entry.size):
            msg = f"{self._shown} grew beyond {self._entry.size} bytes while it was read"
            raise SourceChanged(msg)

    def close(self) -> None:
        """Give the descriptor back. More than once is no fault."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _shown(self) -> str:
        return shown(self._path)

    def _compare(self) -> None:
        try:
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise self._refusal(error) from error
        if not stat.S_ISREG(status.st_mode):
            msg = f"{self._shown} is no regular file any more"
            raise SourceChanged(msg)
        entry = self._entry
        for what, old, new in (
            ("inode", entry.inode, status.st_ino),
            ("size", entry.size, status.st_size),
            ("mtime_ns", entry.mtime_ns, status.st_mtime_ns),
            ("ctime_ns", entry.ctime_ns, status.st_ctime_ns),
        ):
            if old != new:
                msg = f"{self._shown} changed: its {what} was {old} and is {new}"
                raise SourceChanged(msg)

    def _refusal(self, error: OSError) -> SourceChanged | IntegrityError:
        if error.errno in _GONE:
            return SourceChanged(f"{self._shown} vanished or is another thing now: {error.strerror}")
        if error.errno in {errno.EACCES, errno.EPERM}:
            return IntegrityError(
                f"{self._shown} may not be read (mode {self._entry.mode:04o}, we are UID {os.geteuid()}): safetensors "
                "writes mode 0600, so run the publisher with the trainer's UID or with CAP_DAC_READ_SEARCH"
            )
        code = errno.errorcode.get(error.errno or 0, "no errno")
        return IntegrityError(f"{self._shown} cannot be read: {error.strerror} ({code})")
