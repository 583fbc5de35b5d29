"""Real training beside a real publisher: both are started as processes, killed or ended, and compared.

A `Scene` is one job with one checkpoint root and one destination. Each of its executions has its own attempt and a
greater epoch than the one before, as a cluster gives them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.frameworks.reference import Listing, listing
from tests.servers import Bucket

HERE = Path(__file__).parent
PATIENCE = 120.0
"""Seconds after which a process that has not done what is waited for is taken to hang. Far above what is seen."""


def wait_until(reached: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not reached():
        assert time.monotonic() < deadline, f"not within {patience:g} s: {what}"
        time.sleep(0.002)


@dataclass(frozen=True)
class Finished:
    """A save that a framework finished, and what it held then."""

    save: str
    tree: Listing


@dataclass(frozen=True)
class Commit:
    """One published save: what `publish list` says of it, and what really stands in the destination."""

    said: dict[str, Any]
    tree: Listing

    @property
    def save(self) -> str:
        return str(self.said["save"])

    @property
    def finished(self) -> Finished:
        return Finished(self.save, self.tree)


@dataclass
class Training:
    """One training run, with all its ranks."""

    process: subprocess.Popen[bytes]
    log: Path
    reference: Path

    def finish(self) -> None:
        """Wait for the end, which must be a success."""
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
        assert code == 0, f"training ended with {code}\n{self.said()}"

    def kill(self) -> None:
        """SIGKILL to every rank at once, as when a node is lost."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill_in_save(self, number: int, seed: int) -> str:
        """Kill while the save with this number is written, at a part of the time that the one before took; its name."""
        wait_until(lambda: self.begun(number) or self.process.poll() is not None, f"save {number} begins")
        assert self.process.poll() is None, f"training ended before save {number}\n{self.said()}"
        begun, finished = self._events("begin"), self._events("finished")
        took = finished[number - 2]["at"] - begun[number - 2]["at"]
        moment = begun[number - 1]["at"] + took * random.Random(seed).random()  # noqa: S311 (the same at each run)
        time.sleep(max(0.0, moment - time.monotonic()))
        self.kill()
        return str(self._events("begin")[-1]["save"])

    def begun(self, number: int) -> bool:
        return len(self._events("begin")) >= number

    @property
    def finished(self) -> list[Finished]:
        """What the frameworks finished, in this order."""
        return [Finished(event["save"], event["listing"]) for event in self._events("finished")]

    @property
    def resumed_after(self) -> int | None:
        """The step that the run went on after, or None if it started anew."""
        return next((int(event["step"]) for event in self._events("resumed")), None)

    def said(self) -> str:
        """The end of what its ranks printed."""
        return self.log.read_text(errors="replace")[-4000:]

    def _events(self, kind: str) -> list[dict[str, Any]]:
        lines = self.reference.read_text().splitlines() if self.reference.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]


@dataclass
class Watch:
    """A running `publish watch`."""

    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> None:
        """SIGTERM: it publishes what is complete and ends with success."""
        self.process.terminate()
        code = self.process.wait(PATIENCE)
        assert code == 0, f"publish watch ended with {code}\n{self.log.read_text()[-6000:]}"

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Its log lines of one kind."""
        # The last line may be half written.
        lines = [line for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def wait_published(self, save: str, times: int = 1) -> None:
        """Until it has published a save of this name so often."""
        wait_until(
            lambda: sum(event["save"] == save for event in self.events("published")) >= times,
            f"{save} is published {times} times\n{self.log.read_text()[-6000:]}",
        )


@dataclass
class Scene:
    """One job: its folder on this machine, its destination, and all processes that it started."""

    folder: Path
    dest: str
    bucket: Bucket | None
    execution: int = 1
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def saves(self) -> Path:
        """Where the current execution writes."""
        return self.root / "exec" / self._attempt

    @property
    def _attempt(self) -> str:
        return f"1.a{self.execution}.r0"

    def environment(self) -> dict[str, str]:
        """What a container of the current execution is given."""
        return {
            **os.environ,
            **(self.bucket.environment if self.bucket else {}),
            "DISPATCH_EPOCH": str(10**6 + self.execution),
            "DISPATCH_ATTEMPT": self._attempt,
            "PUBLISH_ROOT": str(self.root),
            "PUBLISH_DEST": self.dest,
        }

    def next_execution(self) -> None:
        """The job is started again."""
        self.execution += 1

    def train(self, script: str, *given: object, ranks: int = 1, tmp: Path | None = None) -> Training:
        """Start a training script on so many ranks of this machine."""
        reference, log = (self.folder / f"{script}.{self.execution}.{kind}" for kind in ("reference", "log"))
        environment = {**self.environment(), "OMP_NUM_THREADS": "1", "TRANSFORMERS_OFFLINE": "1"}
        if tmp:
            environment["TMPDIR"] = str(tmp)
        self.root.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(HERE / "launch.py"), script, ranks, "--reference", reference, *given]
        return Training(self._start(command, log, environment), log, reference)

    def watch(self, *given: object) -> Watch:
        """Start `publish watch` for the current execution."""
        self.root.mkdir(parents=True, exist_ok=True)
        log = self.folder / f"watch.{self.execution}.{len(self._processes)}.log"
        return Watch(self._start([*_PUBLISH, "watch", "--log-format", "json", "--drain-timeout", 60, *given], log), log)

    def publish(self, *given: object) -> subprocess.CompletedProcess[str]:
        """Run one `publish` command to its end."""
        return subprocess.run(
            [*_PUBLISH, *map(str, given)],
            check=False,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def published(self) -> list[Commit]:
        """All that is published, the oldest first, read from the destination itself and not through `restore`."""
        result = self.publish("list", "--json")
        assert result.returncode == 0, result.stderr
        commits = []
        for number, said in enumerate(json.loads(result.stdout)):
            fetched = self.folder / "fetched" / f"{self.execution}.{len(self._processes)}.{number}"
            [source] = said["data"]
            self._fetch(source, fetched)
            commits.append(Commit(said, listing(fetched / said["save"] if said["kind"] == "file" else fetched)))
        return commits

    def restore(self, *given: object) -> Path:
        """`publish restore` into the current execution's own place; the path that it names."""
        result = self.publish("restore", "--json", *given)
        assert result.returncode == 0, result.stderr
        return Path(json.loads(result.stdout)["path"])

    def close(self) -> None:
        """End whatever a failed test left running."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start(
        self, command: list[object], log: Path, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            process = subprocess.Popen(
                list(map(str, command)),
                env=environment or self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def _fetch(self, source: str, target: Path) -> None:
        if not self.bucket:
            target.parent.mkdir(exist_ok=True)
            target.symlink_to(source)
            return
        prefix = source.removeprefix(f"{self.bucket.url}/") + "/"
        client = self.bucket.client()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket.name, Prefix=prefix):
            for thing in page.get("Contents", []):
                path = target / thing["Key"].removeprefix(prefix)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(client.get_object(Bucket=self.bucket.name, Key=thing["Key"])["Body"].read())
        client.close()


_PUBLISH = [sys.executable, "-m", "dispatch_agent", "publish"]


def still_there(saves: Path, finished: list[Finished]) -> list[Finished]:
    """Those finished saves that nobody rotated away or wrote over, in the order in which they were finished."""
    newest = {one.save: one for one in finished}
    return [
        one
        for one in finished
        if newest[one.save] is one and os.path.lexists(saves / one.save) and listing(saves / one.save) == one.tree
    ]


def check_published(commits: list[Commit], finished: list[Finished], stayed: list[Finished]) -> None:
    """What was published is what was finished: nothing partial, nothing twice, in order, and all that stayed."""
    published = [commit.finished for commit in commits]
    for one in published:
        assert one in finished, f"{one.save} is published as no finished save was: {differences(one, finished)}"
    places = [finished.index(one) for one in published]
    assert places == sorted(set(places)), f"published twice or out of order: {[one.save for one in published]}"
    missing = [one.save for one in stayed if one not in published]
    assert not missing, f"complete and never published: {missing}"


def differences(one: Finished, finished: list[Finished]) -> list[str]:
    """How a published tree differs from each finished save of its name."""
    return [
        ", ".join(
            sorted(path for path in one.tree.keys() | other.tree.keys() if one.tree.get(path) != other.tree.get(path))
        )
        for other in finished
        if other.save == one.save
    ] or ["no save of this name was finished"]


Load = Callable[[Path], int]
"""Reads a whole save with its framework and gives the step it was made after; raises if it cannot."""


def check_published_after_kill(scene: Scene, training: Training, in_flight: str, load: Load) -> list[Finished]:
    """As `check_published`, where the save that was being written may have become whole before the kill.

    It counts as whole if it holds all that another save of the run does and its framework reads it, and is then to be
    published; else it is not. All that was finished, in order.
    """
    finished = training.finished
    on_disk = (
        Finished(in_flight, listing(scene.saves / in_flight)) if os.path.lexists(scene.saves / in_flight) else None
    )
    if on_disk and on_disk not in finished and on_disk.tree.keys() == finished[0].tree.keys():
        with contextlib.suppress(Exception):  # whatever a framework raises about half a file
            load(scene.saves / in_flight)
            finished.append(on_disk)
    check_published(scene.published(), finished, still_there(scene.saves, finished))
    return finished
