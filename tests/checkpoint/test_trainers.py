"""Fake trainers that write as real frameworks were measured to: every whole save is found, no partial one ever is.

Each trainer logs beforehand what its saves will be, so any save that is judged complete can be held against what it had
to become.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dispatch_agent.checkpoint import formats, manifest, scan
from dispatch_agent.checkpoint.completion import parse_rule
from dispatch_agent.checkpoint.folder import Place, fingerprint, is_new, place, places
from dispatch_agent.checkpoint.save import Complete, Settling, Signal, Snapshot, Verdict
from dispatch_agent.errors import IntegrityError, SourceChanged

Start = Callable[..., subprocess.Popen[bytes]]
KILLS = 10
# Trainer, rule, ranks. The quiet time in tests is a tenth of a second: trainers pause for milliseconds.
TRAINERS = [
    ("dcp", "dcp", 4),
    ("dcp", "auto", None),
    ("dcp_overwrite", "dcp", None),
    ("dcp_norank", "dcp", 2),
    ("hf2rank", "hf", 2),
    ("hf_rotate", "hf", None),
    ("hf_rotate", "auto", None),
    ("lightning_samefs", "lightning", None),
    ("lightning_xdev", "lightning", None),
    ("safetensors_like", "marker", None),
    ("pointer", "pointer:latest_checkpointed_iteration.txt", None),
    ("deepspeed_early_latest", "pointer:latest", 2),
    ("symlink_flip", "symlink:last", None),
    ("nemo", "absent:*-unfinished", None),
    ("orbax", "rename", None),
    ("two_at_once", "auto", None),
]
SETTLE = 0.1
TRAINERS_FOLDER = Path(__file__).parents[1] / "trainers"


def whole(folder: Path, save: Snapshot) -> str:
    """The digest of a save's content, as the trainers log it."""
    digest = hashlib.sha256()
    for file in save.files:
        path = (
            folder / os.fsdecode(save.name) / os.fsdecode(file.path) if file.path else folder / os.fsdecode(save.name)
        )
        data = path.read_bytes()
        digest.update(f"{os.fsdecode(file.path)}\0{len(data)}\0".encode("utf-8", "surrogateescape") + data)
    return digest.hexdigest()


def planned(log: Path) -> dict[str, list[str]]:
    plans: dict[str, list[str]] = {}
    for line in log.read_text("utf-8").splitlines() if log.exists() else ():
        name, digest = line.split("\t")
        plans.setdefault(name, []).append(digest)
    return plans


class Follower:
    """What a publisher does with the disk, without a store."""

    def __init__(self, folder: Path, log: Path, rule: str, ranks: int | None, settle: float = SETTLE) -> None:
        self.folder, self.log = folder, log
        self.rule = parse_rule(rule, expect_ranks=ranks, settle=settle)
        self.seen: dict[bytes, tuple[Snapshot, float]] = {}
        self.verdicts: dict[bytes, Verdict] = {}

    def look(self) -> None:
        """One pass: judge, check, place, and hold what is complete against what it had to become."""
        survey = scan.survey(self.folder)
        known = places(self.folder)
        for save in survey.saves:
            now = time.monotonic()
            before = self.seen.get(save.name)
            since = before[1] if before and not scan.differences(before[0], save) else now
            self.seen[save.name] = (save, since)
            verdict = self.verdicts[save.name] = self.rule.judge(save, survey, now - since)
            if isinstance(verdict, Complete):
                self._take(save, verdict.signal, [p for p in known if p.name == save.name])

    def _take(self, save: Snapshot, signal: Signal, same_name: list[Place]) -> None:
        if not is_new(signal, fingerprint(save), same_name):
            return
        try:
            if formats.check(self.folder, save, signal.rule):
                return
            digest = whole(self.folder, save)
            changed = scan.differences(save, scan.snapshot(self.folder, save.name))
        except (SourceChanged, FileNotFoundError):
            return
        if not changed:
            assert digest in planned(self.log).get(os.fsdecode(save.name), []), f"{save.name!r} is partial"
            place(self.folder, [(save.name, signal, fingerprint(save))])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "plans.log"


@pytest.fixture
def run(trainer: Start, exec_folder: Path, log: Path) -> Iterator[Start]:
    running: list[subprocess.Popen[bytes]] = []

    def start(kind: str, *arguments: str, folder: Path = exec_folder) -> subprocess.Popen[bytes]:
        running.append(trainer(kind, folder, "--log", str(log), *arguments))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("kind", "rule", "ranks"), TRAINERS)
def test_a_trainer_s_saves_are_all_found_whole_and_once(
    run: Start, exec_folder: Path, log: Path, kind: str, rule: str, ranks: int | None
) -> None:
    # What stands for a while only (rotated, overwritten, pointed to) must stand for long enough on a busy machine too.
    slow = {"nemo": "0.08", "hf_rotate": "0.03", "dcp_overwrite": "0.1", "pointer": "0.08", "symlink_flip": "0.08"}
    pace = slow.get(kind, "0.005")
    process = run(kind, "--pace", pace, "--saves", "3")
    follower = Follower(exec_folder, log, rule, ranks)
    deadline = time.monotonic() + 40
    settled_at = None
    while time.monotonic() < deadline and (settled_at is None or time.monotonic() < settled_at):
        follower.look()
        if settled_at is None and process.poll() is not None:
            assert process.returncode == 0
            settled_at = time.monotonic() + 3 * SETTLE
    found = [os.fsdecode(p.name) for p in places(exec_folder)]
    expected = [name for name, digests in planned(log).items() for _ in digests]
    if kind == "deepspeed_early_latest":
        assert found == []  # rank 1 writes after `latest`: the tracker says nothing about it
        waiting = [verdict for verdict in follower.verdicts.values() if isinstance(verdict, Settling)]
        assert any("newer than latest" in verdict.reason for verdict in waiting)
    else:
        assert sorted(found) == sorted(expected)


# Forks a trainer again and again from one interpreter, and kills each at a moment that the seed gives.
KILLER = """
import os, random, runpy, signal, sys, time
import dispatch_agent.checkpoint.folder
script, top, log, kills = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
sys.path.insert(0, os.path.dirname(script))
import trainer
chance = random.Random(os.path.basename(script))
for kill in range(kills):
    folder = os.path.join(top, f"kill-{kill}", "exec", "a")
    child = os.fork()
    if not child:
        sys.argv = [script, folder, "--pace", "0.001", "--saves", "6", "--log", log]
        runpy.run_path(script, run_name="__main__")
        os._exit(0)
    while not (os.path.exists(folder) and os.listdir(folder)):
        time.sleep(0.0005)
    time.sleep(chance.uniform(0, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize(("kind", "rule", "ranks"), TRAINERS)
def test_no_partial_save_of_a_trainer_killed_at_any_moment_is_ever_complete(
    environment: dict[str, str], tmp_path: Path, log: Path, kind: str, rule: str, ranks: int | None
) -> None:
    script = TRAINERS_FOLDER / f"{kind}.py"
    killer = [sys.executable, "-c", KILLER, str(script), str(tmp_path), str(log), str(KILLS)]
    subprocess.run(killer, env=environment, check=True, timeout=60)
    found = 0
    for kill in range(KILLS):
        # Long after, as a publisher that starts on what the trainer left: everything is as quiet as it can be.
        folder = tmp_path / f"kill-{kill}" / "exec" / "a"
        follower = Follower(folder, log, rule, ranks, settle=0.0)
        follower.look()
        time.sleep(0.002)
        follower.look()
        found += len(places(folder))
    assert found or kind == "deepspeed_early_latest"


def test_saves_marked_at_once_are_placed_in_the_order_of_their_markers(run: Start, exec_folder: Path) -> None:
    run("two_at_once", "--saves", "8", "--pace", "0.001").wait()
    survey = scan.survey(exec_folder)
    rule = parse_rule("marker")
    verdicts = [(save, rule.judge(save, survey, 0.0)) for save in survey.saves]
    signals = [(s.name, v.signal, fingerprint(s)) for s, v in verdicts if isinstance(v, Complete)]
    place(exec_folder, signals)
    assert [p.signal.sequence for p in places(exec_folder)] == list(range(1, 17))


def test_saves_that_nobody_marks_are_waited_for_and_said_loudly(run: Start, exec_folder: Path) -> None:
    run("never_commits").wait()
    survey = scan.survey(exec_folder)
    for save in survey.saves:
        verdict = parse_rule("auto").judge(save, survey, 100.0)
        assert isinstance(verdict, Settling)
        assert verdict.stuck
        assert "publish complete" in verdict.reason


def test_names_that_break_clients_come_through_a_manifest(run: Start, exec_folder: Path) -> None:
    run("names", "--saves", "1", "--pace", "0").wait()
    (save,) = scan.survey(exec_folder).saves
    assert not formats.check(exec_folder, save)
    digests = {file.path: hashlib.sha256(file.path).hexdigest() for file in save.files}
    made = manifest.of_snapshot(save, digests, 0, 1, "")
    assert manifest.parse(manifest.canonical(made)) == made
    assert len(made.files) == 17
    assert [folder.path for folder in made.folders] == ["empty folder"]


def test_links_within_a_save_are_kept_and_one_that_leaves_is_named(run: Start, exec_folder: Path) -> None:
    run("links", "--saves", "1", "--pace", "0").wait()
    kept, leaving = scan.survey(exec_folder).saves
    made = manifest.of_snapshot(kept, dict.fromkeys((file.path for file in kept.files), "ab" * 32), 0, 1, "")
    assert [(link.path, link.target) for link in made.links] == [
        ("dangling", "sub/nothing"),
        ("sub/same", "%2E%2E/weights"),
    ]
    with pytest.raises(IntegrityError, match=r"leaving-1/sub/out is a link to \.\./\.\./kept-1/weights, which leaves"):
        manifest.check_entries(leaving)


def test_a_slow_rank_is_waited_for(run: Start, exec_folder: Path, log: Path) -> None:
    process = run("hf2rank", "--pace", "0.03", "--saves", "1")
    follower = Follower(exec_folder, log, "hf", 2)
    reasons = set()
    while process.poll() is None:
        follower.look()
        verdict = follower.verdicts.get(b"checkpoint-1")
        if isinstance(verdict, Settling):
            reasons.add(verdict.reason)
    assert any("rank 1 of 2 ranks has no rng_state" in reason for reason in reasons)
