"""The shipped publisher as a program: its store and its volume ask, nothing else of it is replaced.

What is replaced is listed in `shipped`: reading the disk, and the pool of threads that uploads. All else, from the loop
of `publish watch` down to the bytes of a record, is the code that ships.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from tests.model.replay import Program, as_step, current
from tests.model.world import LOCAL, Request

from dispatch_agent.checkpoint import completion, formats, scan
from dispatch_agent.checkpoint import folder as bookkeeping
from dispatch_agent.checkpoint import records as small_files
from dispatch_agent.checkpoint.folder import Execution
from dispatch_agent.checkpoint.generations import Fingerprint, Place, fingerprint
from dispatch_agent.checkpoint.names import decode_name
from dispatch_agent.checkpoint.save import Entry, Marker, Signal, Snapshot, Survey
from dispatch_agent.errors import AgentError, NothingPublished, SourceChanged
from dispatch_agent.identity import Identity
from dispatch_agent.publish import commit, listing, pointer, prune, publication, publisher, upload, watcher
from dispatch_agent.publish.once import Patience
from dispatch_agent.publish.publisher import Publisher, open_session
from dispatch_agent.store.base import ConditionFailed, Document, Limits, Stored, Uploaded
from dispatch_agent.store.memory import LIMITS

DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Folder:
    """`exec/<attempt>/` of one execution on one volume."""

    epoch: int
    attempt: str
    volume: str = "v"

    @property
    def path(self) -> Path:
        return Path(self.volume, self.attempt)

    @property
    def id(self) -> str:
        return hashlib.sha256(str(self.path).encode()).hexdigest()[:12]

    @property
    def local(self) -> str:
        """Where the model's objects hold it."""
        return f"{LOCAL}{self.path}"

    @property
    def turns(self) -> str:
        """Where the model counts what its trainer has written."""
        return f"{LOCAL}turns/{self.path}"


@dataclass(frozen=True, slots=True)
class Save:
    """A save of one file as it stands on a volume, marked complete as the `number`-th of its folder. `mounted`: how
    often the volume was mounted anew and given to another group."""

    name: str
    content: str
    number: int
    mounted: int = 0

    def at(self, folder: Folder) -> tuple[str, bytes]:
        """Its key and value among the model's objects."""
        data = json.dumps({"content": self.content, "number": self.number, "mounted": self.mounted}).encode()
        return f"{folder.local}/{self.name}", data


@dataclass(slots=True)
class Asking:
    """A Store whose every request is asked of the run under way."""

    url: str = "model://"
    limits: Limits = LIMITS

    def create(self, key: str, data: bytes) -> str:
        return str(current().ask(Request("create", key, data)))

    def replace(self, key: str, data: bytes, version: str) -> str:
        return str(current().ask(Request("replace", key, data, version)))

    def put(self, key: str, data: bytes) -> None:
        current().ask(Request("put", key, data))

    def read(self, key: str) -> Document:
        document: Document = current().ask(Request("read", key))
        return document

    def list(self, prefix: str) -> Iterator[Stored]:
        return iter(current().ask(Request("list", prefix)))

    def folders(self, prefix: str) -> Sequence[str]:
        names: Sequence[str] = current().ask(Request("folders", prefix))
        return names

    def delete(self, key: str) -> None:
        current().ask(Request("delete", key))

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(slots=True)
class Still:
    """Time passes only while somebody waits, and then at once."""

    now: float = 0.0

    def wall(self) -> str:
        return "2026-01-01T00:00:00.000000Z"

    def monotonic(self) -> float:
        return self.now

    def wait(self, event: Any, seconds: float) -> bool:
        self.now += seconds
        assert self.now < DAY, "the program waits for ever and asks for nothing"
        return bool(event.is_set())


class Saying:
    """A Log that keeps what is claimed about a key."""

    def bind(self, **_: object) -> Saying:
        return self

    def info(self, event: str, **fields: object) -> None:
        if "commit" in fields:
            current().say(event, str(fields["commit"]))

    def once(self, _level: str, about: str, event: str, **_: object) -> None:
        current().say(event, about)

    def error(self, event: str, trace: str | None = None, **fields: object) -> None:
        if trace is not None:
            raise Unexpected(trace)
        self.info(event, **fields)

    debug = warning = info


class Unexpected(BaseException):
    """Neither an answer nor a refusal of the product: a fault of its code or of the model. It ends the run."""


def publishing(
    folder: Folder,
    writer: int,
    start: int,
    *,
    rank: int = 0,
    weak: bool = False,
    tries: int = 2,
    age: int = 1,
    turns: int = 0,
) -> Program:
    """`publish watch` on a folder until all that it will ever hold is published. `start` counts the starts of this
    writer: each draws another nonce, greater than the last one if `age` is 1, less if it is -1. `turns`: how often a
    trainer writes into the folder. Of no job: one look more at each start would say the same in every world here."""

    def program() -> str:
        clock, store = Still(), Asking()
        claimed = count()
        looks = count()
        open_: list[Publisher] = []

        def begin() -> Publisher:
            if not open_:
                session = open_session(
                    store,
                    Identity(None, folder.epoch, folder.attempt, "ready-made"),
                    folder.path,
                    rank=rank,
                    weak=weak,
                    in_place=False,
                    workers=1,
                    name=f"w{writer}",
                    nonce=nonce(writer, start, next(claimed), age),
                    clock=clock,
                    patience=Patience(clock, lambda: 0.5, tries=tries),
                )
                rule = completion.parse_rule("marker")
                open_.append(Publisher(session, rule, Saying(), _unwatched, points=not weak))
            return open_[0]

        while True:
            seen = len(current().ask(Request("list", folder.turns))) if turns else 0
            tally = watcher.Tally()
            try:
                watcher.watch(begin, watcher.Stop(), tally, clock, Saying(), rescan=1.0, once=True, start_timeout=DAY)
            except (AgentError, Unexpected) as error:
                return type(error).__name__
            verdict = tally.verdict(asked=False)
            if isinstance(verdict, NothingPublished) and next(looks) < 3:
                continue  # what it saw was written over, and another publisher was there first: it looks again
            if verdict or seen == turns:
                return type(verdict).__name__ if verdict else "done"
            current().ask(Request("wait", folder.turns, version=str(seen)))

    return program


def training(folder: Folder, saves: Sequence[Save]) -> Program:
    """A trainer that writes these saves, one after the other, and says of each that it is complete."""

    def program() -> str:
        for turn, save in enumerate(saves, 1):
            key, data = save.at(folder)
            current().ask(Request("put", key, data))
            current().ask(Request("put", f"{folder.turns}/{turn}"))
        return "done"

    return program


def pruning(*, newest: int = 2, every: int | None = None, tries: int = 2) -> Program:
    """`publish prune` once."""

    def program() -> str:
        clock, store = Still(), Asking()
        pruner = prune.Pruner(store, "pruner", False, True, 1, clock, Patience(clock, lambda: 0.5, tries=tries))
        try:
            todo = prune.plan(store, newest=newest, every=every, workers=1)
            prune.carry_out(pruner, todo, lambda _: None)
        except AgentError as error:
            return type(error).__name__
        return "done"

    return program


def nonce(writer: int, start: int, claimed: int, age: int) -> str:
    """12 hex digits that say whose they are."""
    number = start * 16 + claimed
    return f"{writer:04x}{number if age > 0 else 0xFFFFFFFF - number:08x}"


@contextmanager
def shipped(mutations: Sequence[tuple[Any, str, Any]] = (), *, steps: bool = True) -> Iterator[None]:
    """While this is open, shipped code asks the run under way. `mutations` (owner, name, value) break it on purpose;
    without `steps` every answer is remembered."""
    replaced: list[tuple[Any, str, Any]] = [
        # The disk.
        (bookkeeping, "ensure", _execution),
        (bookkeeping, "read_execution", _execution),
        (bookkeeping, "places", _places),
        (bookkeeping, "already", _already),
        (small_files, "make_folder", lambda _path: None),
        (small_files, "create", _create),
        (scan, "survey", _survey),
        (formats, "check", lambda *_: ""),
        # Threads and open files.
        (upload, "upload", _upload),
        (prune, "ThreadPoolExecutor", lambda **_: nullcontext(_InTurn())),
        *mutations,
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        for owner, name in _STEPS if steps else ():
            stack.enter_context(mock.patch.object(owner, name, as_step(getattr(owner, name))))
        yield


_STEPS: Sequence[tuple[Any, str]] = (
    (bookkeeping, "places"),
    (scan, "survey"),
    (publisher, "claim"),
    (publisher, "check_fence"),
    (publication, "check_fence"),
    (publication, "check_sizes"),
    (publication, "check_manifests"),
    (publication, "write_once"),
    (publication, "discard"),
    (publication, "stands"),
    (commit, "write_once"),
    (upload, "upload"),
    (pointer, "advance"),
    (listing, "orders"),
    (listing, "read_commit"),
    (prune, "plan"),
    (prune, "_write"),
    (prune, "_seal"),
    (prune, "_delete"),
)


class _InTurn:
    """A pool of threads that does one thing after the other."""

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return map(function, items)


def _unwatched(_save: str, _size: int) -> Callable[[int], None]:
    return lambda _n: None


def _key(path: Path) -> str:
    return f"{LOCAL}{path}"


def _execution(folder: Path, **_: Any) -> Execution:
    """Whose folder it is: written before anything that the model looks at. Its id is in its path."""
    return _OWNERS[folder]


_OWNERS: dict[Path, Execution] = {}


def own(folder: Folder) -> None:
    """Say whose the folder is."""
    _OWNERS[folder.path] = Execution("", folder.epoch, folder.attempt, folder.id)


def _places(folder: Path, _known: Sequence[Place] = ()) -> list[Place]:
    found = current().ask(Request("dump", _key(small_files.own(folder, "order"))))
    return [_place(number, json.loads(data)) for number, (_, data) in enumerate(found, 1)]


def _place(number: int, value: dict[str, Any]) -> Place:
    signal = Signal(value["rule"], value["mark"], value["newest_ns"], value["sequence"], value["token"])
    return Place(number, decode_name(value["name"]), signal, Fingerprint(tuple(value["fingerprint"])))


def _already(folder: Path, _store: str) -> set[int]:
    names = current().ask(Request("list", _key(small_files.own(folder, "already"))))
    return {int(item.key.rpartition("/")[2].partition(".")[0]) for item in names}


def _create(path: Path, value: dict[str, Any]) -> bool:
    try:
        current().ask(Request("create", _key(path), json.dumps(value, sort_keys=True).encode()))
    except ConditionFailed:
        return False
    return True


def _survey(folder: Path) -> Survey:
    saves, markers = [], {}
    for key, data in current().ask(Request("dump", _key(folder))):
        if bookkeeping.NAME.decode() in key:
            continue
        name, value = key.rpartition("/")[2].encode(), json.loads(data)
        snapshot = _snapshot(name, value)
        saves.append(snapshot)
        digest = fingerprint(snapshot).digest
        markers[name] = Marker(name, value["number"], snapshot.newest_ns + 1, content=digest)
    return Survey(tuple(saves), markers)


def _snapshot(name: bytes, value: dict[str, Any]) -> Snapshot:
    time = value["number"] * 10
    again = value["mounted"]
    return Snapshot(
        name, Entry(b"", "file", len(value["content"]), time, time + again, again, 0o664 if again else 0o644), ()
    )


def _upload(store: Asking, folder: Path, snapshot: Snapshot, prefix: str, **_: object) -> dict[bytes, Uploaded]:
    """The save's one file, read and sent."""
    found = dict(current().ask(Request("dump", _key(folder))))
    value = json.loads(found[f"{_key(folder)}/{snapshot.name.decode()}"])
    if _snapshot(snapshot.name, value) != snapshot:
        msg = f"{snapshot.name.decode()} changed while it was read"
        raise SourceChanged(msg)
    data = value["content"].encode()
    store.put(f"{prefix}/{upload.encoded_path(snapshot, snapshot.files[0])}", data)
    return {b"": Uploaded(len(data), hashlib.sha256(data).hexdigest(), verified=True)}
