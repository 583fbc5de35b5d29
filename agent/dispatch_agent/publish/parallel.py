"""The files of one save, side by side: the first that fails ends the others, and so does an order to abort."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

Tick = Callable[[int], None]
"""Called with the bytes that went by since the last call, from any worker; raises to stop. Less than 0: they were read
back, to be verified. 0: none did, and it is only asked whether to go on."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class _Stopped(Exception):
    """Another file of the same save failed first; this one's failure says nothing."""


def each(items: Sequence[_Item], work: Callable[[_Item, Tick], _Result], tick: Tick, workers: int) -> list[_Result]:
    """What `work` gives for every item, in their order. It is to call the tick that it gets, for each piece.

    Raises what the first that fails raises, and whatever `tick` raises.
    """
    stopped = threading.Event()

    def check(size: int) -> None:
        if stopped.is_set():
            raise _Stopped
        tick(size)

    with _pool(workers, stopped) as pool:
        futures = [pool.submit(work, item, check) for item in items]
        _wait(futures)
        return [future.result() for future in futures]


def _wait(futures: Sequence[Future[Any]]) -> None:
    """Until all are done or one has failed; then that one's error."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        error = future.exception()
        if error is not None and not isinstance(error, _Stopped):
            raise error


@contextmanager
def _pool(workers: int, stopped: threading.Event) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="files")
    try:
        yield pool
    except Exception:
        # The others end at their next piece; a try is over only when nothing of it is still being sent by us.
        stopped.set()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    except BaseException:
        # Told to abort: what is still on its way is abandoned with the process.
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown(wait=True)
