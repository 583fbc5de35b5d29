"""One part's files to the store, side by side, each read once: digested, sent, and looked at again where it must be.

Nothing here decides that a save is published. A try that fails leaves keys that no commit will ever name.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from dispatch_agent.checkpoint import names
from dispatch_agent.checkpoint.reading import SourceFile, path_of
from dispatch_agent.checkpoint.save import Entry, Snapshot
from dispatch_agent.errors import IntegrityError
from dispatch_agent.publish.verify import CHUNK, read_back
from dispatch_agent.store.base import Limits, Store, Uploaded

Tick = Callable[[int], None]
"""Called with the bytes that went by since the last call, from any worker; raises to stop. Less than 0: they were read
back, to be verified. 0: none did, and it is only asked whether to go on."""


class _Stopped(Exception):
    """Another file of the same save failed first; this one's failure says nothing."""


def check_names(snapshot: Snapshot, prefix: str, limits: Limits) -> None:
    """Refuse a save whose keys would be too long, by the name, before anything is sent. Raises IntegrityError."""
    for file in snapshot.files:
        key = f"{prefix}/{encoded_path(snapshot, file)}"
        longest = max(key.split("/"), key=len)
        if len(key) > limits.key_bytes or len(longest) > limits.component_bytes:
            msg = (
                f"{_shown(snapshot, file)} is too long a name for this store: its key has {len(key)} bytes (at most "
                f"{limits.key_bytes}), its longest component {len(longest)} (at most {limits.component_bytes}); "
                f"rename it"
            )
            raise IntegrityError(msg)


def encoded_path(snapshot: Snapshot, file: Entry) -> str:
    """The file's path in manifest and keys: of a single-file save, its own name."""
    return names.encode_path(file.path) if file.path else names.encode(snapshot.name)


def upload(
    store: Store, folder: Path, snapshot: Snapshot, prefix: str, *, tick: Tick, workers: int
) -> dict[bytes, Uploaded]:
    """Send every file of the save below `prefix`; what was stored, by path.

    Raises SourceChanged (a file is not as in `snapshot`, or changed while it was read), IntegrityError, StoreError,
    and whatever `tick` raises.
    """

    def send(file: Entry, check: Tick) -> Uploaded:
        key = f"{prefix}/{encoded_path(snapshot, file)}"
        with SourceFile(path_of(folder, snapshot, file), file, check) as source:
            stored = store.upload(key, source)
            source.finish()
        if not stored.verified:
            read_back(store, key, stored, lambda size: check(-size))
        return stored

    return _each(snapshot, send, tick, workers)


def digest(folder: Path, snapshot: Snapshot, *, tick: Tick, workers: int) -> dict[bytes, Uploaded]:
    """Read every file of the save once without sending it anywhere. Raises like `upload`."""

    def read(file: Entry, check: Tick) -> Uploaded:
        with SourceFile(path_of(folder, snapshot, file), file, check) as source:
            sha256 = hashlib.sha256()
            while piece := source.read(CHUNK):
                sha256.update(piece)
            source.finish()
            return Uploaded(source.size, sha256.hexdigest(), verified=True)

    return _each(snapshot, read, tick, workers)


def _each(
    snapshot: Snapshot, work: Callable[[Entry, Tick], Uploaded], tick: Tick, workers: int
) -> dict[bytes, Uploaded]:
    stopped = threading.Event()

    def check(size: int) -> None:
        if stopped.is_set():
            raise _Stopped
        tick(size)

    with _pool(workers, stopped) as pool:
        futures = {file.path: pool.submit(work, file, check) for file in snapshot.files}
        _wait(list(futures.values()))
        return {path: future.result() for path, future in futures.items()}


def _wait(futures: list[Future[Uploaded]]) -> None:
    """Until all are done or one has failed; then that one's error."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        error = future.exception()
        if error is not None and not isinstance(error, _Stopped):
            raise error


@contextmanager
def _pool(workers: int, stopped: threading.Event) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="upload")
    try:
        yield pool
    except Exception:
        # The others end at their next piece; a try is over only when nothing of it is still being sent by us.
        stopped.set()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    except BaseException:
        # Told to abort: what is still being sent is abandoned with the process.
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown(wait=True)


def _shown(snapshot: Snapshot, file: Entry) -> str:
    return names.encode(snapshot.name) + (f"/{names.encode_path(file.path)}" if file.path else "")
