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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

START_SECONDS = 30.0


@dataclass
class Server:
    endpoint: str
    process: subprocess.Popen[bytes]
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
            server.process.kill()  # not SIGTERM, which SeaweedFS heeds after half a minute
            server.process.wait()
            shutil.rmtree(server.folder, ignore_errors=True)


def start(
    command: Callable[[int], list[str]], folder: Path, more: Mapping[str, str], offsets: tuple[int, ...]
) -> Server:
    log = folder / "log"
    for _ in range(3):  # another program may take a port between our look and the server's start
        port = free_port(offsets)
        with log.open("wb") as out:
            process = subprocess.Popen(
                command(port),
                env={**os.environ, **more},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 (one system call, and no lock is taken)
            )
        endpoint = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            if answers(port):
                return Server(endpoint, process, folder)
            time.sleep(0.05)
        process.kill()
        process.wait()
    pytest.fail(f"{command(0)[0]} did not start:\n{log.read_text(errors='replace')[-2000:]}", pytrace=False)


def program(name: str) -> str:
    """Beside this Python, or on PATH. A missing server fails the test: a skip would hide that nothing was tested."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is missing: pip install -e '.[test]'", pytrace=False)
    return found


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed test run leaves no server


def free_port(offsets: tuple[int, ...]) -> int:
    """A port that is free together with those at `offsets`, and with the same ports + 10000 where there are several."""
    wanted = [*offsets, *(offset + 10000 for offset in offsets)] if len(offsets) > 1 else list(offsets)
    while True:
        port = random.randrange(20000, 30000)  # noqa: S311 (no secret)
        if all(_is_free(port + offset) for offset in wanted):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    return False
