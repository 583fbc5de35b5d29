"""Executions as tests write them: a folder, saves in it, and a publisher of the product on it in this process."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.protocol.faults import FakeClock

from dispatch_agent.checkpoint import completion
from dispatch_agent.checkpoint.folder import mark_complete
from dispatch_agent.clock import Clock
from dispatch_agent.errors import AgentError
from dispatch_agent.identity import Identity
from dispatch_agent.logs import Log
from dispatch_agent.publish import watcher
from dispatch_agent.publish.once import Patience
from dispatch_agent.publish.publisher import Publisher, open_session
from dispatch_agent.publish.watcher import Stop, Tally
from dispatch_agent.store.base import Store

Files = dict[str, bytes]


@dataclass(frozen=True)
class Execution:
    """The `number`-th execution of a job's first submission: `root/exec/<attempt>`."""

    root: Path
    number: int
    attempt: str = ""

    @property
    def epoch(self) -> int:
        return 1_000_000 + self.number

    @property
    def identity(self) -> Identity:
        return Identity(None, self.epoch, self.attempt or f"a{self.number}", "ready-made")

    @property
    def folder(self) -> Path:
        return self.root / "exec" / self.identity.attempt

    @property
    def environment(self) -> dict[str, str]:
        return {"DISPATCH_EPOCH": str(self.epoch), "DISPATCH_ATTEMPT": self.identity.attempt}

    def write(self, name: str, files: Files | bytes) -> Path:
        """Write a save, over what stands there; not yet complete."""
        path = self.folder / name
        if isinstance(files, bytes):
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files)
            return path
        path.mkdir(parents=True, exist_ok=True)
        for file, data in files.items():
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_bytes(data)
        return path

    def save(self, name: str, files: Files | bytes) -> Path:
        """Write a save and say that it is complete."""
        path = self.write(name, files)
        mark_complete(path)
        return path


@dataclass
class Bench:
    """Publishers of the product in this process, on one store and one clock; `weak`: as on one without conditions."""

    store: Store
    clock: Clock = field(default_factory=FakeClock)
    weak: bool = False
    lines: list[str] = field(default_factory=list)
    nonces: list[str] = field(default_factory=list)

    def publisher(
        self,
        execution: Execution,
        *,
        rule: str = "marker",
        rank: int = 0,
        folder: Path | None = None,
        in_place: bool = False,
    ) -> Publisher:
        """A publisher start without the folder's lock, so that several can be at work at once."""
        self.nonces.append(secrets.token_hex(6))
        session = open_session(
            self.store,
            execution.identity,
            folder or execution.folder,
            rank=rank,
            weak=self.weak,
            in_place=in_place,
            workers=1,
            name="test",
            nonce=self.nonces[-1],
            clock=self.clock,
            patience=Patience(self.clock, lambda: 0.5),
        )
        log = Log(self.lines.append, self.clock, least="error")
        return Publisher(session, completion.parse_rule(rule), log, lambda _save, _size: lambda _n: None, points=True)

    def run(self, execution: Execution, *, rule: str = "marker") -> AgentError | None:
        """`publish watch --once`: until nothing more is to be done. What it ends with."""
        tally = Tally()
        self.loop(lambda: self.publisher(execution, rule=rule), tally, Stop(), once=True)
        return tally.verdict(asked=False)

    def loop(self, start: Callable[[], Publisher], tally: Tally, stop: Stop, *, once: bool) -> None:
        """The product's own loop around `start`."""
        log = Log(self.lines.append, self.clock, least="error")
        watcher.watch(start, stop, tally, self.clock, log, rescan=5.0, once=once, start_timeout=60.0)


def small(tag: object) -> Files:
    """A save of two small files whose content is `tag`'s alone."""
    return {"weights.dat": f"weights {tag} ".encode() * 200, "inner/state.json": f"{tag}".encode()}
