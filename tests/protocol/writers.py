"""Publishers as real processes that die, freeze or meet others at a chosen call.

`Launcher` starts this file as a program: a process that has imported everything once, reads requests as JSON lines and
forks for each writer, so that starting one takes milliseconds and eight can be started at once. A writer is the
product's own code, either a whole command line or `publish watch --once` on a store that sends its process a signal at
a chosen call.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.protocol.faults import Call, Hook, faulty, signals_itself, through

import dispatch_agent.checkpoint.watch  # noqa: F401 (else every writer loads it anew)
from dispatch_agent.checkpoint import completion
from dispatch_agent.cli import environment
from dispatch_agent.cli.main import run
from dispatch_agent.clock import SystemClock
from dispatch_agent.errors import AgentError
from dispatch_agent.identity import Identity
from dispatch_agent.logs import Log, to_stream
from dispatch_agent.publish import recover as recovering
from dispatch_agent.publish import start, watcher
from dispatch_agent.publish.start import Starter
from dispatch_agent.publish.watcher import Stop, Tally
from dispatch_agent.settings import PublishSettings
from dispatch_agent.store.base import KeyMissing, Store
from dispatch_agent.store.capabilities import Capabilities
from dispatch_agent.store.opening import open_store
from dispatch_agent.support import Support

YES = Support("yes", "declared", "")
PROVED = Capabilities(YES, YES, YES, YES, YES)
"""What the probe would find of the stores that these tests use: it has tests of its own, and takes a while."""

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Signal:
    """A signal that a writer sends itself `before` or `after` a call.

    Which call: number `k` of all, or the `k`-th whose method is `method` and whose key starts with `key`. The methods
    are the store's, or with `disk` those of `os` that change names or modes in the store's and in the execution's
    folder.
    """

    number: int
    when: str
    k: int = 1
    method: str = ""
    key: str = ""
    disk: bool = False


@dataclass(frozen=True)
class Writer:
    """What a writer is and does. `argv`: a whole command line of `publish`, else `watch --once` on `folder`.

    `recovers`: not `watch` but `recover`, with `folder` the `exec/` that holds all executions', and without any wait.

    `stopped`: it starts by stopping itself, to be let go together with others. `naive`: not the product, but a
    publisher that reads the pointer, compares, and writes.
    """

    log: str
    environment: Mapping[str, str] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)
    stopped: bool = False
    naive: bool = False
    recovers: bool = False
    url: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    epoch: int = 0
    attempt: str = ""
    nonce: str = ""
    at: Signal | None = None


@dataclass(frozen=True)
class Running:
    """A writer's process."""

    launcher: Launcher
    writer: Writer
    pid: int

    def wait(self) -> int:
        """Its exit code when it has ended; minus the signal that killed it."""
        status = self.launcher.ask({"wait": self.pid, "options": 0})
        return os.waitstatus_to_exitcode(status)

    def wait_until_stopped(self) -> None:
        status = self.launcher.ask({"wait": self.pid, "options": os.WUNTRACED})
        assert os.WIFSTOPPED(status), f"it did not stop but ended with {status}:\n{self.said()}"

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def said(self) -> str:
        return Path(self.writer.log).read_text(errors="replace")

    def calls(self) -> list[str]:
        """Every call that it counted, when it has ended by itself."""
        return list(json.loads(self.said().splitlines()[-1])["calls"])


class Launcher:
    """Starts writers. One for a test process."""

    def __init__(self) -> None:
        self._program = subprocess.Popen(
            [sys.executable, "-m", "tests.protocol.writers"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, writer: Writer) -> Running:
        return Running(self, writer, self.ask({"start": asdict(writer)}))

    def run(self, writer: Writer) -> int:
        """Start a writer and wait for its end; its exit code."""
        return self.start(writer).wait()

    def ask(self, request: dict[str, Any]) -> int:
        program = self._program
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(json.dumps(request) + "\n")
        program.stdin.flush()
        return int(program.stdout.readline())

    def close(self) -> None:
        """Ends every writer that is left, too: they die with their parent."""
        self._program.kill()
        self._program.communicate()


# --- in the program ---------------------------------------------------------------------------------------------------


def main() -> None:
    _die_with_parent()
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            at = request["start"].pop("at")
            answer = _fork(Writer(**request["start"], at=Signal(**at) if at else None))
        else:
            answer = os.waitpid(request["wait"], request["options"])[1]
        print(answer, flush=True)


def _fork(writer: Writer) -> int:
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            _die_with_parent()
            log = os.open(writer.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(writer.environment)
            if writer.stopped:
                os.kill(os.getpid(), signal.SIGSTOP)
            code = _become(writer)
        except BaseException:  # noqa: BLE001 (nothing of a writer may go on in the program that forks)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid


def _become(writer: Writer) -> int:
    if writer.argv:
        if writer.at is not None:
            _hook_the_command(writer.at)
        run(["publish", *writer.argv], name="publish")
    store = open_store(writer.url, dict(writer.options) or None)
    if writer.naive:
        return _naive(store, writer.epoch)
    return _watch(writer, store)


def _naive(store: Store, epoch: int) -> int:
    """What a publisher does who knows that an older execution must not overwrite a newer one, and no more than that."""
    try:
        newest = int(store.read("latest.json").data)
    except KeyMissing:
        newest = 0
    if newest > epoch:
        return 30
    store.put("latest.json", str(epoch).encode())
    return 0


def _watch(writer: Writer, inner: Store) -> int:
    seen: list[Call] = []
    hook = through
    if writer.at is not None and not writer.at.disk:
        hook = signals_itself(signal.Signals(writer.at.number), writer.at.when, _counted(writer.at))
    store = faulty(inner, hook)
    if writer.at is not None and writer.at.disk:
        at = writer.at
        _watch_disk(seen, signals_itself(signal.Signals(at.number), at.when, _counted(at)))
    log = Log(to_stream(sys.stdout, SystemClock()), SystemClock())
    starter = Starter(
        store=store,
        identity=Identity(None, writer.epoch, writer.attempt, "ready-made"),
        folder=Path(writer.folder),
        settings=PublishSettings(workers=1),
        rule=completion.parse_rule("marker"),
        rank=0,
        clock=SystemClock(),
        log=log,
        progress=lambda _save, _size: lambda _n: None,
        draw_nonce=lambda: writer.nonce,
        draw=lambda: 0.5,
        environ={},
        _found=PROVED,
    )
    error: AgentError | None
    try:
        error = _recover(starter) if writer.recovers else _publish(starter, log)
    except AgentError as raised:
        error = raised
    print(error)
    print(json.dumps({"calls": [str(call) for call in seen or store.calls]}))
    return error.exit_code if error else 0


def _publish(starter: Starter, log: Log) -> AgentError | None:
    tally = Tally()
    watcher.watch(starter, Stop(), tally, SystemClock(), log, rescan=0.2, once=True, start_timeout=5.0)
    return tally.verdict(asked=False)


def _recover(starter: Starter) -> AgentError | None:
    results = recovering.recover(starter, wait_owner=0.0)
    print(*results, sep="\n")
    return recovering.verdict(results)


def _hook_the_command(at: Signal) -> None:
    """Have the store that a whole command opens, or its calls of `os`, pass the hook."""
    hook = signals_itself(signal.Signals(at.number), at.when, _counted(at))
    start.probe = lambda _: PROVED  # type: ignore[attr-defined]
    if at.disk:
        _watch_disk([], hook)
    else:
        environment.open_store = lambda *given: faulty(open_store(*given), hook)  # type: ignore[attr-defined]


def _counted(at: Signal) -> Callable[[Call], bool]:
    met = 0

    def is_it(call: Call) -> bool:
        nonlocal met
        if call.method.startswith(at.method) and call.key.startswith(at.key):
            met += 1
            return met == at.k
        return False

    return is_it


def _watch_disk(seen: list[Call], hook: Hook) -> None:
    """Have every call of `os` that changes a name or a mode pass the hook: in the store, and in `.dispatch` of the
    execution."""

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(
                Call(len(seen) + 1, name, os.fsdecode(args[-1] if name in {"link", "rename", "replace"} else args[0]))
            )
            return hook(seen[-1], lambda: original(*args, **kwargs))

        return call

    for name in ("link", "rename", "replace", "unlink", "mkdir", "chmod", "symlink"):
        setattr(os, name, watched(name, getattr(os, name)))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a test that is killed leaves no frozen writer


if __name__ == "__main__":
    main()
