"""Work on fsspec's one event loop, given by the threads that use a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from fsspec.asyn import get_loop

T = TypeVar("T")


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start work on the loop."""
    return asyncio.run_coroutine_threadsafe(work, get_loop())


def soon(act: Callable[[], object]) -> None:
    """Do something short on the loop, not waited for: the loop may be gone when the interpreter ends."""
    get_loop().call_soon_threadsafe(act)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Do work on the loop. Interrupting the wait cancels it, though what was sent may still be applied."""
    future = submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
