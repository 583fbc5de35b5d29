"""One save, once: it must not disturb the order of the others, nor get a new place by being asked for twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.protocol.checks import commits
from tests.protocol.faults import everything_in
from tests.protocol.jobs import Bench, Execution, small

from dispatch_agent.logs import Log
from dispatch_agent.publish import oneshot
from dispatch_agent.publish.publisher import Outcome
from dispatch_agent.store.memory import MemoryStore
from dispatch_agent.store.posix import PosixStore


@pytest.fixture
def execution(tmp_path: Path) -> Execution:
    return Execution(tmp_path, 1)


def once(bench: Bench, execution: Execution, name: str) -> Outcome:
    log = Log(bench.lines.append, bench.clock)
    return oneshot.publish_one(
        lambda: bench.publisher(execution),
        bench.store,
        execution.folder,
        name.encode(),
        bench.clock,
        log,
        epoch=execution.epoch,
        timeout=60.0,
        stood=True,
    )


def published(bench: Bench) -> list[tuple[str, int]]:
    return [(record.save, record.order.ordinal) for record in commits(bench.store)]


def command(execution: Execution, dest: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-m", "dispatch_agent", "publish", *arguments, "--dest", str(dest)],
        env={**os.environ, **execution.environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_save_that_was_complete_before_keeps_its_place_before_the_one_asked_for(execution: Execution) -> None:
    """I9: in its own place. Publishing step-2 at once must not make the older step-1 the newest."""
    bench = Bench(MemoryStore("oneshot-order"))
    execution.save("step-1", small(1))
    execution.save("step-2", small(2))
    assert once(bench, execution, "step-2").ordinal == 2
    assert published(bench) == [("step-2", 2)]
    assert bench.run(execution) is None
    assert published(bench) == [("step-1", 1), ("step-2", 2)]


def test_asking_again_for_an_old_save_does_not_make_it_the_newest(execution: Execution, tmp_path: Path) -> None:
    """I7: a retried command is the same wish, not a newer save."""
    dest = tmp_path / "store"
    for name in ("step-1", "step-2"):
        execution.write(name, small(name))
    for name in ("step-1", "step-2", "step-1"):
        assert command(execution, dest, "publish", str(execution.folder / name)).returncode == 0
    assert [(r.save, r.order.ordinal) for r in commits(PosixStore(dest))] == [("step-1", 1), ("step-2", 2)]


def test_the_same_content_marked_anew_is_read_once_and_never_again(execution: Execution) -> None:
    bench = Bench(MemoryStore("already-once"))
    execution.save("step-1", small(1))
    assert bench.run(execution) is None
    execution.save("step-1", small(1))
    assert bench.run(execution) is None
    before = everything_in(bench.store)
    for _ in range(3):
        assert bench.run(execution) is None
    assert everything_in(bench.store) == before
    assert published(bench) == [("step-1", 1)]


def test_what_is_already_in_one_store_is_published_to_another(execution: Execution) -> None:
    """I9 holds for each store by itself."""
    bench = Bench(MemoryStore("already-here"))
    for _ in range(2):
        execution.save("step-1", small(1))
        assert bench.run(execution) is None
    assert len(published(bench)) == 1
    other = Bench(MemoryStore("already-there"))
    assert other.run(execution) is None
    assert [save for save, _ in published(other)] == ["step-1"]


def test_a_damaged_pointer_does_not_hide_what_is_newest(execution: Execution, tmp_path: Path) -> None:
    """I7, in the command that people ask."""
    dest = tmp_path / "store"
    execution.write("step-1", small(1))
    assert command(execution, dest, "publish", str(execution.folder / "step-1")).returncode == 0
    (dest / "latest.json").write_text("{")
    answer = command(execution, dest, "latest", "--json")
    assert answer.returncode == 0
    assert json.loads(answer.stdout)["save"] == "step-1"
    assert json.loads(answer.stdout)["pointer"] is None
    assert "warning: latest.json" in answer.stderr
