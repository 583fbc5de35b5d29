"""`publish init`, the whole command, killed by SIGKILL before and after every call, and run again, by itself or by
another rank: the same as if it had not been killed.

Covered: every call of the store, and every change of a name or a mode on disk.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest
from tests.protocol.checks import check_invariants, commits, facts
from tests.protocol.jobs import Bench, Execution, small
from tests.protocol.test_faults_killed import NEVER, files_of
from tests.protocol.test_kill import KILLED
from tests.protocol.test_two_publishers import every_k
from tests.protocol.writers import Launcher, Signal, Writer

from dispatch_agent.publish import keys
from dispatch_agent.store.posix import PosixStore

MODE = 0o2770


@pytest.fixture(params=["before", "after"])
def when(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["a call of the store", "a change of a name"])
def disk(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=["itself", "another rank"])
def again(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def left_behind(base: Path) -> tuple[Execution, PosixStore]:
    """A volume that is its group's, and a store: an execution published one save, and was killed before another."""
    before, store = Execution(base / "root", 1), PosixStore(base / "store")
    before.root.mkdir(parents=True)
    before.root.chmod(MODE)
    before.save("step-1", small("one"))
    assert Bench(store).run(before) is None
    before.save("step-2", {**small("two"), "deep/empty": b""})
    before.write("step-3", small("three"))
    before.folder.parent.chmod(MODE)
    return before, store


def test_an_init_killed_anywhere_is_finished_by_the_next(
    when: str, disk: bool, again: str, place: Path, launcher: Launcher
) -> None:
    def run(k: int) -> bool:
        base = place / str(k)
        before, store = left_behind(base)
        now = Execution(before.root, 2)
        argv = ["init", "--root", str(now.root), "--dest", store.url, "--json", "--workers", "1", "--shared-volume"]
        argv += ["--wait-owner", "0", "--complete", "marker"]
        at = Signal(signal.SIGKILL, when, k, disk=disk)
        pod = {"AGENT_K8S_POD_UID": "uid-1"}
        first = launcher.run(Writer(str(base / "log"), now.environment | pod, argv, at=at))
        assert first in {KILLED, 0}, f"call {k}: {(base / 'log').read_text()}"
        ready = now.folder / ".dispatch" / "init.0"
        if again == "itself" and ready.exists():
            assert (now.root / "resume" / now.identity.attempt / "step-2").exists(), f"call {k}: ready before it was"
            ready.unlink()  # whether its pod saw it end nobody can tell: it would be refused
        who = pod if again == "itself" else {"AGENT_K8S_POD_UID": "uid-2", "JOB_COMPLETION_INDEX": "1"}
        log = base / "again"
        assert launcher.run(Writer(str(log), now.environment | who, argv, at=NEVER)) == 0, f"{k}: {log.read_text()}"
        check_ready(now, store, log.read_text(), f"killed {when} call {k}")
        shutil.rmtree(base)
        return first == KILLED

    assert every_k(run) > (20 if disk else 15)


def check_ready(now: Execution, store: PosixStore, said: str, about: str) -> None:
    path = now.root / "resume" / now.identity.attempt / "step-2"
    facts_said = json.loads(said[said.index("{\n") :])
    assert facts_said["path"] == str(path), about
    assert files_of(path) == files_of(now.root / "exec" / "a1" / "step-2"), about
    assert [name for name in os.listdir(path.parent) if not name.startswith(".")] == ["step-2"], about
    check_invariants(store)
    assert [save for save, *_ in facts(store)] == ["step-1", "step-2"], about
    assert len(commits(store)) == 2, f"{about}: a save was published twice"
    claims = sorted(item.key.rpartition("/")[2] for item in store.list(keys.claims_prefix(now.epoch)))
    assert claims == ["00000.0001.json", "attempt.json"], f"{about}: another term"
    own = now.folder / ".dispatch"
    assert [name.name for name in (own / "resume").iterdir() if not name.name.startswith(".")] == ["1"], about
    made = [now.folder, own, own / "resume", now.root / "resume", path.parent]
    modes = {str(folder): oct(stat.S_IMODE(folder.stat().st_mode)) for folder in made}
    assert set(modes.values()) == {oct(MODE)}, f"{about}: who may write to the root may not write there: {modes}"
