"""Starts and ends the servers of tests."""

from __future__ import annotations

import ctypes
import http.client
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

START_SECONDS = 60.0


@dataclass
class Server:
    """What was started: where it answers, its processes in the order of their start, and the folder that it needs."""

    endpoint: str
    processes: Sequence[subprocess.Popen[bytes]]
    folder: Path
    users: int = 0


_servers: dict[str, Server] = {}


@contextmanager
def shared(name: str, start: Callable[[], Server]) -> Iterator[str]:
    """Fixtures taken into several conftest.py files are several fixtures, but one server."""
    server = _servers.get(name) or _servers.setdefault(name, start())
    server.users += 1
    try:
        yield server.endpoint
    finally:
        server.users -= 1
        if server.users == 0:
            del _servers[name]
            end(server.processes)
            shutil.rmtree(server.folder, ignore_errors=True)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill them, the last started first: SIGTERM is heeded after half a minute by some."""
    for process in reversed(processes):
        process.kill()
        process.wait()


def start(
    command: Callable[[int], list[str]], folder: Path, more: Mapping[str, str], offsets: tuple[int, ...]
) -> Server:
    """A server of one process: `command` for a port, which is free together with those at `offsets` from it.

    It has started when it answers HTTP on the port.
    """
    log = folder / "log"
    for _ in range(3):  # another program may take a port between our look and the server's start
        port = free_port(offsets)
        process = spawn(command(port), log, more)
        if _comes(lambda port=port: answers(port), process):
            return Server(f"http://127.0.0.1:{port}", (process,), folder)
        end((process,))
    raise _did_not_start(command(0)[0], log)


def spawn(command: list[str], log: Path, more: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A process that ends with this one at the latest, its output in `log`, with these variables besides."""
    with log.open("wb") as out:
        return subprocess.Popen(
            command,
            env={**os.environ, **(more or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 (one system call, and no lock is taken)
        )


def until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a process that was started to be ready; the test fails with its log if it never is."""
    if not _comes(ready, process):
        raise _did_not_start(str(process.args), log)


def children(process: int) -> list[int]:
    """The processes that this one has started, and those that they have, the deepest first."""
    direct = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return [*(deeper for child in direct for deeper in children(child)), *direct]


def program(name: str, package: str = "") -> str:
    """Beside this Python, or on PATH. A missing server fails the test: a skip would hide that nothing was tested."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        how = f"apt-get install {package}" if package else "pip install -e '.[test]'"
        pytest.fail(f"{name} is missing: {how}, or let tests/run do it", pytrace=False)
    return found


def free_port(offsets: tuple[int, ...]) -> int:
    """A port that is free together with those at `offsets`, and with the same ports + 10000 where there are several."""
    wanted = [*offsets, *(offset + 10000 for offset in offsets)] if len(offsets) > 1 else list(offsets)
    while True:
        port = random.randrange(20000, 30000)  # noqa: S311 (no secret)
        if all(_is_free(port + offset) for offset in wanted):
            return port


def answers(port: int) -> bool:
    """Whether something that is not broken answers HTTP on this port."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    return False


def _comes(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if ready():
            return True
        time.sleep(0.05)
    return False


def _did_not_start(name: str, log: Path) -> BaseException:
    return pytest.fail.Exception(f"{name} did not start:\n{log.read_text(errors='replace')[-2000:]}", pytrace=False)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed test run leaves no server


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
