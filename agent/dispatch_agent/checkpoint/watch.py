"""Events as hints: something happened below a folder, so look now. The only file that knows watchdog.

Events are late, lost and invented (network filesystems send none for another node's writes, a full queue drops them,
nested folders race their watch), so nothing is read from one but that it came. Whoever is woken rescans, and rescans
without being woken too.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from dispatch_agent.checkpoint.records import NAME
from dispatch_agent.clock import Clock

Mode = Literal["auto", "events", "polling"]

# Filesystems whose every write passes through this kernel. On all others another node may write unseen.
_LOCAL = frozenset(
    {
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "tmpfs",
        "overlay",
        "zfs",
        "f2fs",
        "bcachefs",
        "ramfs",
        "rootfs",
        "devtmpfs",
    }
)
# Reading is our own doing: hashing a save must not wake us up to hash it again.
_OF_READING = frozenset({"opened", "closed_no_write"})
_ATTEND_EVERY = 1.0  # seconds between looks whether the folder is there, is the same, and is being watched
_MOST_RESTARTS = 3


class Filesystem(NamedTuple):
    """The type of a mounted filesystem, as the kernel names it, and whether events for it can be believed."""

    kind: str
    local: bool


def filesystem_kind(path: Path, mountinfo: str | None = None) -> Filesystem:
    """The filesystem that holds `path`, or would: of its nearest existing ancestor.

    `mountinfo` is the text of /proc/self/mountinfo, read if None. Kind "unknown" (not local) if it cannot be told.
    """
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
        except OSError:
            return Filesystem("unknown", local=False)
    where = os.path.realpath(path)
    best, kind = "", "unknown"
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        words, types = fields.split(" "), rest.split(" ")
        if len(words) < 5 or not types[0]:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), words[4])
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        # A later mount on the same point hides the earlier one.
        if inside and len(point) >= len(best):
            best, kind = point, types[0]
    return Filesystem(kind, local=kind in _LOCAL)


def concerns_saves(event: FileSystemEvent, folder: bytes) -> bool:
    """Whether an event can mean that a save or a marker changed, and not only that we read or wrote our own records."""
    if event.event_type in _OF_READING:
        return False
    return any(_is_relevant(os.fsencode(path), folder) for path in (event.src_path, event.dest_path) if path)


class Watcher:
    """Calls `wake` (from its own threads) whenever something may have changed below `folder`.

    With events where they can be believed and had, else every `poll` seconds. The folder need not exist yet, and may
    be removed and made again. `said` gets one sentence per reason for polling, and per loss of events.
    """

    def __init__(
        self,
        folder: Path,
        wake: Callable[[], None],
        *,
        mode: Mode = "auto",
        clock: Clock,
        poll: float = 5.0,
        said: Callable[[str], None] = lambda _sentence: None,
    ) -> None:
        self._folder = folder
        self._wake = wake
        self._mode = mode
        self._clock = clock
        self._poll = poll
        self._said = said
        self._heard: set[str] = set()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._observer: BaseObserver | None = None
        self._watched: tuple[int, int] | None = None
        self._restarts = 0
        self._logs = _Logs(self._lost)

    @property
    def polling(self) -> bool:
        """Whether it polls by now."""
        return self._mode == "polling"

    def start(self) -> None:
        """Begin. Wakes once for what was there before."""
        # watchdog 7.1 dumps its whole table of watches into each of these: a megabyte for one quick tree.
        warnings.filterwarnings("ignore", message="Callback with id", category=RuntimeWarning)
        logging.getLogger("watchdog").addHandler(self._logs)
        self._attend()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        self._wake()

    def stop(self) -> None:
        """End all threads. `wake` is not called afterwards."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._unwatch()
        logging.getLogger("watchdog").removeHandler(self._logs)

    def _run(self) -> None:
        while not self._clock.wait(self._stopped, self._poll if self.polling else _ATTEND_EVERY):
            if self.polling:
                self._wake()
            else:
                self._attend()

    def _attend(self) -> None:
        """Watch the folder that stands there now, if it is not the one being watched."""
        if self.polling:
            return
        try:
            status = self._folder.stat()
            present = (status.st_dev, status.st_ino)
        except OSError:
            present = None  # not there yet, or not any more: looked for again in a moment
        if present == self._watched and (present is None or self._is_watching()):
            return
        self._restarts = self._restarts + 1 if present == self._watched else 0
        self._unwatch()
        if self._restarts > _MOST_RESTARTS:
            self._give_up("its watch ended several times")
        elif present is not None:
            self._watch(present)
        self._wake()

    def _watch(self, present: tuple[int, int]) -> None:
        kind, local = filesystem_kind(self._folder)
        if self._mode == "auto" and not local:
            self._give_up(f"its filesystem is {kind}, where another node's writes make no events here")
            return
        observer: BaseObserver | None = None
        try:
            observer = Observer()
            observer.schedule(_Handler(self._on_event), str(self._folder), recursive=True)
            observer.start()
        except OSError as error:
            if observer is not None:
                _end(observer)
            if error.errno in {errno.ENOENT, errno.ENOTDIR}:
                return  # gone again
            limit = {
                errno.EMFILE: " (fs.inotify.max_user_instances is used up, by all processes of this UID on the node)",
                errno.ENOSPC: " (fs.inotify.max_user_watches is used up, by all processes of this UID on the node)",
            }.get(error.errno or 0, "")
            self._give_up(f"inotify refused: {error.strerror or error}{limit}")
            return
        self._observer, self._watched = observer, present

    def _is_watching(self) -> bool:
        observer = self._observer
        return observer is not None and observer.is_alive() and all(each.is_alive() for each in observer.emitters)

    def _unwatch(self) -> None:
        observer, self._observer, self._watched = self._observer, None, None
        if observer is not None:
            _end(observer)

    def _give_up(self, why: str) -> None:
        self._mode = "polling"
        self._once(f"{self._folder} is polled every {self._poll:g} s: {why}")

    def _lost(self, message: str) -> None:
        if self._stopped.is_set():
            return
        self._once(f"watching {self._folder}: {message}; it is looked at anyway")
        self._wake()

    def _once(self, sentence: str) -> None:
        if sentence not in self._heard:
            self._heard.add(sentence)
            self._said(sentence)

    def _on_event(self, event: FileSystemEvent) -> None:
        if not self._stopped.is_set() and concerns_saves(event, os.fsencode(self._folder)):
            self._wake()


class _Handler(FileSystemEventHandler):
    def __init__(self, heard: Callable[[FileSystemEvent], None]) -> None:
        self._heard = heard

    def on_any_event(self, event: FileSystemEvent) -> None:
        self._heard(event)


class _Logs(logging.Handler):
    """watchdog's warnings (a queue overflowed, a watch could not be rebuilt): the only word that events were lost."""

    def __init__(self, heard: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self._heard(record.getMessage())


def _is_relevant(path: bytes, folder: bytes) -> bool:
    own = os.path.join(folder, NAME)
    if path != own and not path.startswith(own + b"/"):
        return True
    return path.startswith(own + b"/complete")


def _end(observer: BaseObserver) -> None:
    observer.stop()
    if observer.is_alive():
        observer.join()
