"""`publish publish` and `restore`, the whole commands, killed by SIGKILL before and after every call, and run again.

Covered: every call of the store, and every change of a name on disk. The others: test_kill.py, test_recover.py,
test_prune.py, test_local_prune.py.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from tests.protocol.checks import check_invariants, commits, facts
from tests.protocol.jobs import Bench, Execution, small
from tests.protocol.test_kill import KILLED
from tests.protocol.test_two_publishers import every_k
from tests.protocol.writers import Launcher, Signal, Writer

from dispatch_agent.checkpoint.folder import mark_complete
from dispatch_agent.store.posix import PosixStore

NEVER = Signal(signal.SIGKILL, "before", k=0)
"""Not killed, and spared the probe like those that are."""


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.fixture(params=["before", "after"])
def when(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["a call of the store", "a change of a name"])
def disk(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_i9_a_one_shot_killed_anywhere_is_finished_by_the_next(
    when: str, disk: bool, place: Path, launcher: Launcher
) -> None:
    def run(k: int) -> bool:
        base = place / str(k)
        execution, store = Execution(base / "root", 7), PosixStore(base / "store")
        path = execution.write("step-1", small("one"))
        execution.save("best", b"best")
        argv = ["publish", str(path), "--dest", store.url, "--json"]
        at = Signal(signal.SIGKILL, when, k, disk=disk)
        first = launcher.run(Writer(str(base / "log"), execution.environment, argv, at=at))
        assert first in {KILLED, 0}, f"call {k}"
        check_invariants(store, pointer_is_current=False)
        log = base / "again"
        assert launcher.run(Writer(str(log), execution.environment, argv, at=NEVER)) == 0, (
            f"call {k}: {log.read_text()}"
        )
        check_invariants(store)
        assert [(save, generation) for save, generation, *_ in facts(store)] == [("step-1", 1)], f"call {k}"
        assert Bench(store).run(execution) is None
        check_invariants(store)
        assert len(commits(store)) == 2, f"killed {when} call {k}: a save was published twice"
        shutil.rmtree(base)
        return first == KILLED

    assert every_k(run) > 15


def test_i7_a_restore_killed_anywhere_leaves_no_half_save_and_goes_on(
    when: str, disk: bool, place: Path, launcher: Launcher
) -> None:
    execution, store = Execution(place / "root", 7), PosixStore(place / "store")
    save = execution.save("step-1", {**small("one"), "empty": b"", "more/deep": os.urandom(3000)})
    (save / "link").symlink_to("weights.dat")
    mark_complete(save)
    assert Bench(store).run(execution) is None

    def run(k: int) -> bool:
        target = place / "back" / str(k)
        argv = ["restore", str(target), "--dest", store.url, "--workers", "1"]
        at = Signal(signal.SIGKILL, when, k, disk=disk)
        first = launcher.run(Writer(str(place / f"log-{k}"), {}, argv, at=at))
        assert first in {KILLED, 0}, f"call {k}"
        there = target / "step-1"
        assert not there.exists() or files_of(there) == files_of(save), f"killed {when} call {k}: half a save"
        log = place / f"again-{k}"
        assert launcher.run(Writer(str(log), {}, argv, at=NEVER)) == 0, f"call {k}: {log.read_text()}"
        assert files_of(there) == files_of(save), f"call {k}"
        assert os.readlink(there / "link") == "weights.dat"
        assert [path.name for path in target.iterdir()] == ["step-1"], f"killed {when} call {k}: something is left"
        return first == KILLED

    assert every_k(run) > 6
