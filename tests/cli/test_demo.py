"""`dispatch-agent demo`: the main job told in real commands, in under 20 seconds, on a folder."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest
from tests.cli.conftest import Job, run

TRAINING = 4.0  # seconds: some steps of one, two of a half


def test_the_demo_tells_its_story_and_latest_does_not_go_back(place: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = run("dispatch-agent", "demo", "--dir", place / "demo").passes()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of its own doing: what it computes, and what its trainers pretend to. A busy machine is not its doing.
    computed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert computed + TRAINING < 20
    assert re.search(r"Done in \d+\.\d s", result.out)
    assert [line[:3] for line in result.out.splitlines() if line.startswith("[")] == [f"[{n}]" for n in range(1, 6)]
    latest = re.findall(r"latest is (\S+) of epoch (\d+)", result.out)
    assert [epoch for _, epoch in latest] == ["1000001", "1000002", "1000002"]
    assert latest[-1] == latest[-2], "the stale save did not become the newest"
    assert "exits 30 (fenced): " in result.out
    assert "drains and exits 0" in result.out
    job = Job(place / "demo" / "root", str(place / "demo" / "store"))
    commits = job.run("list", "--json").passes().json
    assert [int(commit["epoch"]) for commit in commits] == sorted(int(commit["epoch"]) for commit in commits)
    assert (commits[-1]["save"], commits[-1]["epoch"]) == latest[-1]
    job.run("verify", "--all").passes()


def test_the_demo_works_where_an_execution_is_going_on(place: Path) -> None:
    """It is tried in containers that have an identity, a rank and a destination of their own: none may leak in."""
    job = Job(place / "root", str(place / "store"), {"JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2"})
    surroundings = job.variables({"DISPATCH_PUBLISH_DEST": "/elsewhere", "PUBLISH_IN_PLACE": "1"})
    run("dispatch-agent", "demo", "--dir", place / "demo", environ=surroundings).passes()
    assert not job.root.exists()
    assert not job.store.exists()


def test_the_demo_touches_no_folder_that_is_there(place: Path) -> None:
    (place / "mine").mkdir()
    run("dispatch-agent", "demo", "--dir", place / "mine").fails(3, str(place / "mine"), "must not exist")
    assert list((place / "mine").iterdir()) == []


@pytest.mark.parametrize("there", ["claims", "commits"])
def test_the_demo_is_refused_where_something_was_published(place: Path, there: str) -> None:
    folder = place / "store" / there / "00000000000001000001"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text("{}")
    arguments = ("--dir", place / "demo", "--dest", place / "store")
    run("dispatch-agent", "demo", *arguments).fails(3, str(place / "store"), there, "must be empty")
    assert not (place / "demo").exists()


def test_the_demo_is_refused_a_destination_that_ends_with_each_of_its_processes(place: Path) -> None:
    run("dispatch-agent", "demo", "--dir", place / "demo", "--dest", "memory://demo").fails(3, "this process alone")
