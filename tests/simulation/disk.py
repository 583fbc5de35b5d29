"""The simulated side of the disk: times that only the simulation gives, steps at which another process may come in.

Files are real, on a filesystem in memory. What the kernel would decide by itself is replaced: times of change (a volume
that is mounted anew gives every file another), the trainer's clock, threads that read files side by side.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import greenlet

from dispatch_agent.checkpoint import folder, marks, reading, records, walk
from dispatch_agent.checkpoint.save import Entry
from dispatch_agent.publish import parallel, prune, reader, start


class Disk:
    """Times of change by inode. `step` is called before every step of ours; `clock` gives the time of a marker."""

    def __init__(self) -> None:
        self.changed: dict[int, int] = {}
        self.step: Callable[[], None] = lambda: None
        self.clock: Callable[[], int] = lambda: 0
        self.locks = True

    def touch(self, path: Path, now: int) -> None:
        """Give a file or folder the time `now`."""
        os.utime(path, ns=(now, now))
        self.changed[path.stat().st_ino] = now

    def remount(self, top: Path, now: int) -> None:
        """What a new mount that gives all files to another group does: no content changes, every ctime does."""
        for where, _, files in os.walk(top):
            for path in (where, *(os.path.join(where, file) for file in files)):
                self.changed[os.stat(path).st_ino] = now


def _keep_in_memory(_: int) -> None:
    """fsync(2) where there is no disk."""


class _Inline(AbstractContextManager[Any]):
    """A pool of one worker that works at once: nothing is side by side, so nothing depends on the machine."""

    def __init__(self, **_: Any) -> None:
        self._failed = False

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if not self._failed:
            try:
                future.set_result(work(*args))
            except BaseException as error:
                if isinstance(error, greenlet.GreenletExit):
                    raise
                self._failed = True
                future.set_exception(error)
        return future

    def map(self, work: Callable[..., Any], items: Any) -> Iterator[Any]:
        return iter([work(item) for item in items])

    def shutdown(self, **_: Any) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


@contextmanager
def simulated(disk: Disk) -> Iterator[None]:
    """The product sees `disk`'s times and threads inside of this."""
    entry, create, replace_record, marker = walk._entry, records.create, records.replace, folder.marker_of
    acquire = folder.FolderLock.acquire

    def dated(path: bytes, status: os.stat_result, target: bytes) -> Entry:
        return replace(entry(path, status, target), ctime_ns=disk.changed.get(status.st_ino, 0))

    def fstat(descriptor: int) -> Any:
        status = os.fstat(descriptor)
        return SimpleNamespace(
            st_mode=status.st_mode,
            st_ino=status.st_ino,
            st_size=status.st_size,
            st_mtime_ns=status.st_mtime_ns,
            st_ctime_ns=disk.changed.get(status.st_ino, 0),
        )

    def stepped(do: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            disk.step()
            return do(*args, **kwargs)

        return step

    def lock(self: folder.FolderLock) -> bool:
        return acquire(self) if disk.locks else True

    kernel = {name: getattr(os, name) for name in dir(os) if not name.startswith("__")}
    with (
        mock.patch.object(walk, "_entry", dated),
        mock.patch.object(reading, "os", SimpleNamespace(**{**kernel, "fstat": fstat})),
        mock.patch.object(marks, "time", SimpleNamespace(time_ns=disk.clock)),
        mock.patch.object(records, "create", stepped(create)),
        mock.patch.object(records, "replace", stepped(replace_record)),
        mock.patch.object(folder, "marker_of", stepped(marker)),
        mock.patch.object(folder.FolderLock, "acquire", lock),
        mock.patch.object(parallel, "ThreadPoolExecutor", _Inline),
        mock.patch.object(prune, "ThreadPoolExecutor", _Inline),
        mock.patch.object(reader, "ThreadPoolExecutor", _Inline),
        mock.patch.object(start, "publisher_name", lambda environ: environ["POD_NAME"]),
        mock.patch.object(os, "fsync", _keep_in_memory),
    ):
        yield
