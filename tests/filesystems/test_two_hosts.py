"""A volume that two hosts share: what one writes, the other publishes; what the volume cannot keep apart is found out.

JuiceFS as a store is one of tests/store/matrix.py, with every other client on the other mount.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import Job, Running
from tests.protocol.checks import check_invariants
from tests.servers.mounts import Mounts

from dispatch_agent.store.opening import open_store

JUICEFS = pytest.param("juicefs_mounts", marks=pytest.mark.xdist_group("juicefs-mounts-conformance"))
SEAWEEDFS = pytest.param("seaweed_mounts", marks=pytest.mark.xdist_group("seaweed"))
ROUNDS = 300
NAMES = [f"step-{number}" for number in range(5)]


@pytest.fixture(scope="session")
def mounts(request: pytest.FixtureRequest) -> Mounts:
    mounts: Mounts = request.getfixturevalue(request.param)
    return mounts


@pytest.fixture
def trainer(mounts: Mounts, tmp_path: Path) -> Job:
    """An execution on one host."""
    job = Job(mounts.here / f"root-{os.urandom(4).hex()}", str(tmp_path / "store"))
    job.folder.mkdir(parents=True)
    return job


@pytest.fixture
def elsewhere(mounts: Mounts, trainer: Job) -> Job:
    """The same execution, as the other host sees it."""
    return replace(trainer, root=mounts.there / trainer.root.name)


@pytest.fixture
def start() -> Iterator[Callable[[Job], Running]]:
    """Starts `publish watch` and ends it with the test."""
    running: list[Running] = []

    def start(job: Job) -> Running:
        running.append(job.start("--rescan", "0.3"))
        return running[-1]

    yield start
    for each in running:
        each.process.kill()
        each.process.wait()


@pytest.mark.parametrize("mounts", [JUICEFS, SEAWEEDFS], indirect=True)
def test_what_one_host_saves_the_other_publishes_by_looking(
    trainer: Job, elsewhere: Job, start: Callable[[Job], Running]
) -> None:
    watch = start(elsewhere)
    watch.says("where another node's writes make no events here")
    for name in NAMES:
        trainer.save(name)
    for name in NAMES:
        watch.says(f"published save={name}")
    watch.stop().passes()
    assert elsewhere.published() == NAMES
    elsewhere.run("verify", "--all").passes()


@pytest.mark.parametrize("mounts", [JUICEFS], indirect=True)
def test_of_two_hosts_with_one_folder_one_stands_by(
    trainer: Job, elsewhere: Job, start: Callable[[Job], Running]
) -> None:
    """A lock holds for all mounts of JuiceFS."""
    first = start(trainer)
    first.says("claimed")
    second = start(elsewhere)
    second.says("another publisher has")
    trainer.save("step-1")
    first.says("published save=step-1")
    first.process.kill()
    second.says("claimed")
    trainer.save("step-2")
    second.says("published save=step-2")
    second.stop().passes()
    assert trainer.published() == ["step-1", "step-2"]


@pytest.mark.parametrize("mounts", [SEAWEEDFS], indirect=True)
class TestSeaweedfs:
    """Two mounts of it make one name twice, by link(2) and by O_EXCL, hold one lock twice, and list late."""

    def test_two_mounts_both_make_one_name(self, mounts: Mounts) -> None:
        """What is catalogued is so. If this fails, SeaweedFS has learnt it: look at the catalogue in kernel.py."""
        names = [mounts.here / "made", mounts.there / "made"]
        names[0].mkdir()
        barrier = threading.Barrier(2)

        def make(folder: Path, number: int) -> bool:
            mine = folder / f"{number}.{folder.parent.name}"
            mine.write_bytes(b"x")
            barrier.wait()
            try:
                os.link(mine, folder / str(number))
            except FileExistsError:
                return False
            return True

        with ThreadPoolExecutor(2) as pool:
            for number in range(ROUNDS):
                if all(pool.map(make, names, [number, number])):
                    return
        pytest.fail(f"in {ROUNDS} rounds no name was made twice")

    def test_is_refused_as_a_store_whatever_one_accepts(self, trainer: Job, mounts: Mounts) -> None:
        on_it = replace(trainer, dest=str(mounts.here / f"store-{os.urandom(4).hex()}"))
        save = on_it.save("step-1")
        for command in (["publish", save], ["watch", "--once"], ["probe"]):
            on_it.run(*command, PUBLISH_ACCEPT_WEAK_STORE="1").fails(12, "SeaweedFS")
        store = open_store(on_it.dest)
        assert list(store.list("")) == [], "the probe tidies up, and nothing else was written"
        store.close()

    def test_with_two_publishers_of_a_folder_says_so_and_overwrites_nothing(
        self, trainer: Job, elsewhere: Job, start: Callable[[Job], Running]
    ) -> None:
        """I1, I3: both may be at work, since the lock holds for one mount. One may stop at a record that the volume has
        lost; what is published is whole, once in its place, and no publisher is the other's."""
        watches = [start(trainer), start(elsewhere)]
        for watch in watches:
            watch.says("let one host alone publish this folder")
            watch.says("claimed")
        for name in NAMES:
            trainer.save(name)
        for watch in watches:
            watch.signal()
        said = [watch.end().err for watch in watches]
        assert sum("published save=" in text for text in said), said
        store = open_store(trainer.dest)
        check_invariants(store)
        store.close()
