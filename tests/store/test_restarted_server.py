"""A server goes away in the middle of an upload and comes back: the save is published, once, and nothing before it is
whole."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Job, eventually, tree_of
from tests.servers.azurite import Container, start_azurite
from tests.servers.gcs import GcsBucket, start_gcs
from tests.servers.processes import Server, answers, children, end, spawn, until
from tests.servers.sftp import SftpFolder, greets, start_sftp

from dispatch_agent.store.opening import open_store

MIB = 1 << 20
ODD = (b"\xff\xfe not UTF-8", b" spaces ", b"..two dots", b"%2F", b"line\nbreak", b"x" * 200, b"back\\slash", b"~")
TREE = {b"%02d.bin" % number: b"%02d" % number * (MIB // 2) for number in range(48)} | dict.fromkeys(ODD, b"odd")
IN_THE_MIDDLE = 2 * MIB  # of 24


@dataclass(frozen=True)
class Keeping:
    """A server that keeps what it was given in `data` over its own end, and a destination there."""

    server: Server
    data: Path
    place: Any  # has url, options and environment
    ready: Callable[[int], bool]
    # azurite saves its index every five seconds and at SIGTERM; killed, it would lose what it had answered for.
    by: signal.Signals = signal.SIGKILL

    @property
    def size(self) -> int:
        """Bytes of the large files that it has so far."""
        sizes = (_size(Path(top, name)) for top, _, names in os.walk(self.data) for name in names)
        return sum(size for size in sizes if size >= MIB // 4)

    def go_away(self) -> None:
        """With the processes of its connections, which sshd's would outlive it."""
        (process,) = self.server.processes
        connections = children(process.pid)
        process.send_signal(self.by)
        for connection in connections:
            with suppress(ProcessLookupError):
                os.kill(connection, self.by)
        process.wait()

    @contextmanager
    def come_back(self) -> Iterator[None]:
        (gone,) = self.server.processes
        log = self.server.folder / "again.log"
        process = spawn(list(gone.args), log)  # type: ignore[arg-type]
        try:
            until(lambda: self.ready(int(self.server.endpoint.split(":")[2].split("/")[0])), process, log)
            yield
        finally:
            end((process,))


def _azurite(folder: Path) -> Keeping:
    server = start_azurite(folder, "--location", str(folder / "data"))
    place = Container(server.endpoint, f"c-{uuid.uuid4().hex[:12]}").create()
    return Keeping(server, folder / "data", place, answers, signal.SIGTERM)


def _gcs(folder: Path) -> Keeping:
    server = start_gcs(folder, "-backend", "filesystem", "-filesystem-root", str(folder / "data"))
    place = GcsBucket(server.endpoint, f"b-{uuid.uuid4().hex[:12]}").create()
    return Keeping(server, folder / "data", place, answers)


def _sftp(folder: Path) -> Keeping:
    server = start_sftp(folder)
    (folder / "data").mkdir()
    place = SftpFolder(int(server.endpoint.split(":")[2].split("/")[0]), folder / "data", folder)
    return Keeping(server, folder / "data", place, greets)


@pytest.fixture(scope="module", params=[_azurite, _gcs, _sftp], ids=["azurite", "gcs", "sftp"])
def keeping(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeping]:
    keeping: Keeping = request.param(tmp_path_factory.mktemp("keeping"))
    yield keeping
    end(keeping.server.processes)


@pytest.mark.server
def test_a_save_is_published_once_though_its_server_was_away(keeping: Keeping, tmp_path: Path) -> None:
    url = f"{keeping.place.url}/job"
    job = Job(tmp_path / "root", url, {**keeping.place.environment, "PUBLISH_ACCEPT_WEAK_STORE": "1"})
    job.folder.mkdir(parents=True)
    job.save("step-1")
    with job.watch("--workers", "1") as watch:  # so that there is time to end the server in the middle
        watch.says("published save=step-1")
        before = keeping.size
        saved = job.save("step-2", TREE)
        eventually(lambda: keeping.size - before > IN_THE_MIDDLE, lambda: f"nothing arrives:\n{watch.said}")
        keeping.go_away()
        assert "published save=step-2" not in watch.said, "it was too fast for this test"
        watch.says("not published save=step-2")
        with keeping.come_back():
            assert job.published() == ["step-1"]
            watch.says("published save=step-2")
            watch.stop().passes()
            assert job.published() == ["step-1", "step-2"]
            job.run("restore", tmp_path / "restored").passes()
            assert tree_of(tmp_path / "restored" / "step-2") == tree_of(saved)
            store = open_store(url, keeping.place.options)
            assert len(list(store.list("commits"))) == 2
            store.close()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a draft that has its name meanwhile
        return 0
