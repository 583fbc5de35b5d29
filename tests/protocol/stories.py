"""Whole publications as the tests of faults play them: what is saved, which command runs, what must then hold."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.protocol.checks import check_invariants, commits
from tests.protocol.faults import WRITES, Call, Do, FakeClock, FaultyStore, Hook, faulty, through
from tests.protocol.jobs import Bench, Execution, small

from dispatch_agent.errors import AgentError
from dispatch_agent.logs import Log
from dispatch_agent.publish import listing, oneshot, pointer
from dispatch_agent.publish.once import Patience
from dispatch_agent.publish.prune import Pruner, carry_out, plan
from dispatch_agent.store.base import Store


class Story:
    """Two saves, one of them of a single file, and then another content under the first one's name.

    `store` is what the publishers use: `real` behind a hook, and behind a look at what is newest after every write.
    `via` is another way to the same store, which misbehaves by itself.
    """

    def __init__(
        self,
        real: Store,
        root: Path,
        hook: Hook = through,
        clock: FakeClock | None = None,
        number: int = 7,
        via: Store | None = None,
    ) -> None:
        self.real = real
        self.execution = Execution(root, number)
        self.store: FaultyStore = faulty(via or real, self._watched(hook))
        self.bench = Bench(self.store, clock or FakeClock())
        self._newest: list[object] = [None, None]
        self._went_back: list[str] = []
        self._looking = threading.Lock()

    def first(self) -> None:
        self.execution.save("step-1", small("one"))
        self.execution.save("best", b"best")

    def then(self) -> None:
        self.execution.save("step-1", small("two"))

    def play(self) -> list[AgentError | None]:
        """`watch --once` after the first two saves, and again after the third; what each ended with.

        One that fails is started again, on a store that answers, before the trainer goes on.
        """
        ends = []
        for act in (self.first, self.then):
            act()
            ends.append(self.watch())
            if ends[-1] is not None:
                self.restart()
        return ends

    def watch(self) -> AgentError | None:
        """`publish watch --once`."""
        return ended(lambda: self.bench.run(self.execution))

    def publish(self, save: str = "step-1", timeout: float = 60.0) -> AgentError | oneshot.Outcome:
        """`publish publish PATH`: what came of it, or what it ended with."""
        try:
            return oneshot.publish_one(
                lambda: self.bench.publisher(self.execution),
                self.bench.store,
                self.execution.folder,
                save.encode(),
                self.bench.clock,
                Log(self.bench.lines.append, self.bench.clock),
                epoch=self.execution.epoch,
                timeout=timeout,
                stood=True,
            )
        except AgentError as error:
            return error

    def next(self, hook: Hook = through, *, number: int | None = None) -> Story:
        """The next publisher start on the same folder, or the job's execution `number`; watched on for going back."""
        story = Story(self.real, self.execution.root, hook, number=number or self.execution.number)
        story.bench.nonces += self.bench.nonces
        story._newest, story._went_back, story._looking = self._newest, self._went_back, self._looking
        return story

    def restart(self) -> None:
        """A fresh publisher on a store that answers again finishes the job."""
        self.bench.store, self.bench.clock = self.real, FakeClock()
        assert self.watch() is None

    def settling(self, since: int = 1) -> list[int]:
        """The calls from number `since` on that send a commit, or find out whether it counts: an end there is 33."""
        return [
            call.number
            for call in self.store.calls
            if call.number >= since
            and ((call.method == "create" and call.key.startswith("commits/")) or call.key.endswith("/sealed.json"))
        ]

    def check(self, *, pointer_is_current: bool = True) -> None:
        """The invariants: of the destination (check_invariants), and of what was done to it on the way."""
        self.look("the end")
        check_invariants(self.real, pointer_is_current=pointer_is_current)
        assert not self._went_back, "; ".join(self._went_back)
        self._check_what_was_written()

    def _check_what_was_written(self) -> None:
        """I1: only keys with its own nonce, its claims and the pointer. I6: deleted is only what its own tries left."""
        writes = [call for call in self.store.calls if call.method in WRITES]
        own, epoch = "|".join(self.bench.nonces), f"{self.execution.epoch:020d}"
        attempt = re.escape(self.execution.identity.attempt)
        allowed = re.compile(
            rf"claims/{epoch}/(attempt|00000\.0001)\.json|data/{epoch}-{attempt}/[^/]+/00000\.({own})\.\d{{6}}[./].*"
            rf"|commits/{epoch}/0001\.\d{{6}}\.({own})\.json|latest(\.json)?"
        )
        assert [call for call in writes if not allowed.fullmatch(call.key)] == []
        named = {part.prefix for record in commits(self.real) for part in record.parts}
        deleted = [call.key for call in writes if call.method == "delete"]
        assert [key for key in deleted if not key.startswith("data/")] == []
        assert [key for key in deleted if any(key.startswith(prefix) for prefix in named)] == []
        uploads = Counter(call.key for call in writes if call.method == "upload")
        assert max(uploads.values(), default=0) <= 1

    def _watched(self, hook: Hook) -> Hook:
        """I4, I7: neither the newest commit nor the pointer ever goes back. Looked at after every write, and kept:
        a publisher's loop would take an assertion here for a failed pass."""

        def watched(call: Call, do: Do) -> Any:
            try:
                return hook(call, do)
            finally:
                if call.method in WRITES:
                    self.look(str(call))

        return watched

    def look(self, after: str) -> None:
        """Note whether what is newest went back."""
        with self._looking:
            at = pointer.read(self.real)
            now = [next(listing.newest_first(self.real), None), at.order if at else None]
            for what, old, new in zip(("the newest commit", "the pointer"), self._newest, now, strict=True):
                if old is not None and (new is None or new < old):  # type: ignore[operator]  # both are an Order
                    self._went_back.append(f"{what} went back from {old} to {new} after {after}")
            self._newest[:] = now


def prune(store: Store, clock: FakeClock | None = None) -> AgentError | None:
    """`publish prune --keep 2 --apply`; what it ends with."""
    clock = clock or FakeClock()
    pruner = Pruner(
        store, "test", weak=False, points=True, workers=1, clock=clock, patience=Patience(clock, lambda: 0.5)
    )
    try:
        carry_out(pruner, plan(store, newest=2, every=None, workers=1), lambda _: None)
    except AgentError as error:
        return error
    return None


def ended(run: Callable[[], AgentError | None]) -> AgentError | None:
    """What a command ends with, returned or raised."""
    try:
        return run()
    except AgentError as error:
        return error


def codes(ends: Sequence[object]) -> list[int]:
    """The exit codes of what commands ended with."""
    return [end.exit_code if isinstance(end, AgentError) else 0 for end in ends]
