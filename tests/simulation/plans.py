"""What a world consists of: folders, what trainers write into them, and the processes that publish, prune and read.

A plan is drawn from a seed and is a plain value, so that a failing one can be made smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

KINDS = ("save", "save", "save", "twice", "over", "begin", "again", "rotate", "publish", "anew", "spoil", "both")
NAMES = ("last", "step-1", "step-2", "epoch=3.ckpt")


@dataclass(frozen=True)
class Folder:
    """`exec/<attempt>` of the execution `number` on one volume."""

    number: int
    attempt: str
    volume: int = 0

    def __str__(self) -> str:
        return f"{self.attempt}@{self.volume}"


@dataclass(frozen=True)
class Step:
    """One thing that a trainer does.

    `save`: write it, over what stands there, and say that it is complete; `begin`: write it and say nothing; `say`: say
    it of what stands there; `delete`: rotate it away, file by file; `publish`: say it and run a one-shot; `sleep`.
    """

    kind: Literal["save", "begin", "say", "delete", "publish", "sleep"]
    name: str = ""
    tag: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Trainer:
    name: str
    folder: Folder
    start: float
    steps: tuple[Step, ...]
    skew: float = 0.0


@dataclass(frozen=True)
class Watch:
    """`publish watch`, started anew up to `lives` times when it dies; told to drain at `drain`, killed at `kill`."""

    name: str
    folder: Folder
    start: float
    lives: int
    drain: float
    kill: float = math.inf
    skew: float = 0.0
    rank: int = 0


@dataclass(frozen=True)
class Reader:
    """Asks for the newest again and again, and restores it."""

    name: str
    start: float
    looks: int


@dataclass(frozen=True)
class Remount:
    """The folder's volume is mounted anew: every file gets another time of change."""

    name: str
    folder: Folder
    at: float


@dataclass(frozen=True)
class Prune:
    name: str
    start: float
    runs: int
    every: int | None = None


@dataclass(frozen=True)
class Recover:
    """`publish recover` of the execution `number` on one volume."""

    name: str
    start: float
    number: int
    attempt: str
    volume: int = 0
    wait_owner: float = 0.0


@dataclass(frozen=True)
class PruneLocal:
    """Older executions' saves leave a volume, all but `keep`; `full`: after every byte was read."""

    name: str
    start: float
    keep: int
    full: bool
    volume: int = 0


@dataclass(frozen=True)
class Stall:
    """Process `name` stands still until `until` before its first write of a key that starts with `key`.

    Or before its first look, where `key` starts with the method: `list pruned/`.
    """

    name: str
    key: str
    until: float


@dataclass(frozen=True)
class Meets:
    """Process `name` meets a fault at its first write of a key that starts with `key`; a late one lands at `lands`."""

    name: str
    key: str
    fault: str
    lands: float = 0.0


Process = Trainer | Watch | Reader | Remount | Prune | PruneLocal | Recover


@dataclass(frozen=True)
class Rates:
    """Chances per point: of a fault, a death, another actor's turn, time passing early, an actor being frozen."""

    faults: float = 0.0
    crashes: float = 0.0
    switches: float = 0.0
    jumps: float = 0.0
    freezes: float = 0.0


@dataclass(frozen=True)
class Plan:
    """`weak`: the store ignores conditions and the operator accepted that. `verifies`: it rejects wrong checksums.
    `locks`: a folder's lock holds. `hints`: a trainer's word wakes the publishers of its folder. `away`: when nothing
    answers; `stuck`: keys that cannot be written, from when to when; `stalls`: who stands still or
    meets what where. `land_last`: writes
    on their way arrive only after everybody is done."""

    seed: int
    processes: tuple[Process, ...]
    rates: Rates = Rates()
    weak: bool = False
    verifies: bool = True
    locks: bool = True
    hints: bool = True
    away: tuple[tuple[float, float], ...] = ()
    stuck: tuple[tuple[str, float, float], ...] = ()
    stalls: tuple[Stall | Meets, ...] = ()
    land_last: bool = False

    @property
    def folders(self) -> tuple[Folder, ...]:
        """Every folder, by epoch and volume."""
        found = {p.folder for p in self.processes if isinstance(p, (Trainer, Watch, Remount))}
        return tuple(sorted(found, key=lambda folder: (folder.number, folder.volume, folder.attempt)))


Focus = Literal["any", "faults", "prune", "pointer", "hand over", "local"]


def drawn(seed: int, focus: Focus | None = None) -> Plan:
    """The plan of a seed: of most any kind, of some with a `focus` on what is rare otherwise."""
    draw = _Draw(seed)
    draws: dict[Focus, Callable[[], Plan]] = {
        "any": draw.any,
        "faults": draw.faulty,
        "prune": draw.prune,
        "pointer": draw.pointer,
        "hand over": draw.hand_over,
        "local": draw.local,
    }
    return draws[
        focus or draw.random.choice((*["any"] * 8, "faults", "faults", *["prune"] * 4, "pointer", "hand over", "local"))
    ]()


class _Draw:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)  # noqa: S311
        self.processes: list[Process] = []

    def any(self) -> Plan:
        """Everything at once."""
        random = self.random
        weak = random.random() < 0.1
        executions = random.choice((1, 1, 2, 2, 2, 3, 3))
        apart = random.choice((0.0, 0.0, 0.5, 3.0, 20.0))
        for number in range(1, executions + 1):
            start = apart * (number - 1)
            self._execution(Folder(number, f"a{number}"), start)
            if random.random() < 0.08:
                self._execution(Folder(number, f"b{number}"), start)  # a counter was reset: one epoch, two attempts
            elif random.random() < 0.15:
                self._execution(Folder(number, f"a{number}", volume=1), start + random.choice((0.0, 3.0)))
        last = apart * executions
        if random.random() < 0.4:
            self.processes.append(Reader("reader", random.uniform(0.0, last + 5.0), random.randint(1, 3)))
        if random.random() < 0.35:
            self.processes.append(
                Prune("prune", random.uniform(0.0, last + 8.0), random.randint(1, 4), random.choice((None, None, 2)))
            )
        if random.random() < 0.25:
            number = random.randint(2, executions + 1)
            begin = apart * (number - 1) + random.choice((0.0, 3.0))
            self.processes.append(Recover("recover", begin, number, f"a{number}", wait_owner=random.choice((0.0, 5.0))))
        if random.random() < 0.2:
            start = random.uniform(62.0, 90.0)
            self.processes.append(PruneLocal("local", start, random.randint(0, 1), random.random() < 0.3))
        return replace(
            self._plan(),
            weak=weak,
            away=((last + 1.0, last + random.choice((3.0, 40.0))),) if random.random() < 0.1 else (),
            stuck=(("latest.json", random.choice((0.0, 1.0)), math.inf),) if random.random() < 0.07 else (),
        )

    def faulty(self) -> Plan:
        """One execution that writes over its saves, and a store that does everything wrong."""
        random = self.random
        folder = Folder(1, "a1")
        kinds = [random.choice(("save", "over", "spoil", "again", "twice")) for _ in range(3)]
        steps = [step for kind in kinds for step in self._steps(random.choice(NAMES[:2]), kind)]
        self.processes.append(Trainer("trainer", folder, 0.0, tuple(steps)))
        self.processes.append(Watch("watch", folder, 0.0, lives=3, drain=30.0))
        plan = self._plan()
        rates = replace(plan.rates, faults=0.15, switches=random.choice((0.3, 0.8)))
        return replace(plan, rates=rates, verifies=random.random() < 0.5, hints=True)

    def prune(self) -> Plan:
        """Three executions and two prunes; processes rest for long where much hangs on it."""
        random = self.random
        self._three(random.choice((0.0, 0.0, 0.5)))
        for name in ("prune", "prune-too"):
            self.processes.append(Prune(name, random.uniform(0.0, 3.0), 4, random.choice((None, None, None, 2))))
        if random.random() < 0.5:
            self.processes.append(Reader("reader", random.uniform(0.0, 5.0), 3))
        stalls = [Stall("watch-a1@0", "commits/", random.uniform(2.0, 30.0))]
        if random.random() < 0.3:
            stalls.append(
                Stall("watch-a2@0", random.choice(("commits/", "data/", "latest")), random.uniform(2.0, 30.0))
            )
        return replace(self._plan(), weak=random.random() < 0.1, stalls=tuple(stalls))

    def pointer(self) -> Plan:
        """The pointer can be moved for a second and not again until a prune has run."""
        self._three(3.0)
        self.processes.append(Prune("prune", self.random.uniform(6.0, 9.0), 3))
        return replace(self._plan(), stuck=(("latest.json", 1.0, math.inf),))

    def hand_over(self) -> Plan:
        """One-shots beside a watch that has the folder and is slow."""
        random = self.random
        folder, name = Folder(1, "a1"), random.choice(NAMES)
        steps = [*self._steps(name, "anew"), *self._steps(name, random.choice(("anew", "again", "publish")))]
        self.processes.append(Trainer("trainer", folder, 0.0, tuple(steps)))
        self.processes.append(Watch("watch", folder, 0.0, lives=2, drain=30.0, kill=math.inf))
        stall = Stall("watch", random.choice(("commits/", "data/")), random.uniform(2.0, 10.0))
        return replace(self._plan(), locks=True, stalls=(stall,))

    def local(self) -> Plan:
        """Old executions, some killed early, whose saves leave the volume."""
        random = self.random
        self._three(3.0, kinds=("save", "save", "over", "spoil", "again"))
        for name in ("local", "local-too")[: random.randint(1, 2)]:
            self.processes.append(
                PruneLocal(name, random.uniform(66.0, 80.0), random.randint(0, 1), random.random() < 0.3)
            )
        if random.random() < 0.5:
            self.processes.append(Recover("recover", random.uniform(60.0, 80.0), 4, "a4"))
        return self._plan()

    def _three(self, apart: float, kinds: tuple[str, ...] = ("save",)) -> None:
        random = self.random
        for number in (1, 2, 3):
            folder, start = Folder(number, f"a{number}"), apart * (number - 1)
            steps = [
                step
                for _ in range(random.randint(1, 2))
                for step in self._steps(random.choice(NAMES), random.choice(kinds))
            ]
            self.processes.append(Trainer(f"trainer-{folder}", folder, start, tuple(steps)))
            self.processes.append(Watch(f"watch-{folder}", folder, start, lives=2, drain=start + 25.0, kill=math.inf))

    def _plan(self) -> Plan:
        random = self.random
        return Plan(
            seed=self.seed,
            processes=tuple(self.processes),
            rates=Rates(
                faults=random.choice((0.0, 0.01, 0.04, 0.15)),
                crashes=random.choice((0.0, 0.0, 0.005, 0.02)),
                switches=random.choice((0.02, 0.1, 0.3, 0.8)),
                jumps=random.choice((0.0, 0.05, 0.3)),
                freezes=random.choice((0.0, 0.0, 0.05, 0.2)),
            ),
            verifies=random.random() < 0.7,
            locks=random.random() < 0.6,
            hints=random.random() < 0.7,
            land_last=random.random() < 0.3,
        )

    def _execution(self, folder: Folder, start: float) -> None:
        random = self.random
        steps: list[Step] = []
        for _ in range(random.choice((1, 1, 2, 2, 3))):
            steps += self._steps(random.choice(NAMES), random.choice(KINDS))
        self.processes.append(
            Trainer(f"trainer-{folder}", folder, start, tuple(steps), skew=random.choice((0.0, 0.0, -30.0, 30.0)))
        )
        for number in range(random.choice((1, 1, 1, 2))):
            begin = start + random.choice((0.0, 0.0, 2.0))
            drain = begin + random.choice((2.0, 8.0, 25.0))
            self.processes.append(
                Watch(
                    f"watch{number or ''}-{folder}",
                    folder,
                    begin,
                    lives=random.randint(1, 3),
                    drain=drain,
                    kill=drain + random.choice((0.5, 30.0)),
                    skew=random.choice((0.0, 0.0, -3600.0)),
                )
            )
        if random.random() < 0.1:
            self.processes.append(Remount(f"mount-{folder}", folder, start + random.uniform(0.0, 6.0)))

    def _steps(self, name: str, kind: str) -> list[Step]:
        random = self.random
        tag = random.choice("ABC")
        pause = [Step("sleep", seconds=random.choice((0.5, 3.0, 7.0)))] if random.random() < 0.4 else []
        other, pair = random.choice("ABC"), (name, random.choice(NAMES))
        return {
            "save": [Step("save", name, tag), *pause],
            "twice": [Step("save", name, tag), *pause, Step("save", random.choice(NAMES), other)],
            "over": [Step("save", name, tag), *pause, Step("save", name, other)],
            "begin": [Step("begin", name, tag), *pause],
            "again": [Step("save", name, tag), *pause, Step("say", name)],
            "rotate": [Step("save", name, tag), *pause, Step("delete", name)],
            "publish": [Step("begin", name, tag), Step("publish", name)],
            "both": [*(Step("begin", each, tag) for each in pair), *pause, *(Step("say", each) for each in pair)],
            "spoil": [Step("save", name, tag), *pause, Step("begin", name, other)],
            "anew": [Step("save", name, tag), *pause, Step("begin", name, other), Step("publish", name)],
        }[kind]


def without(plan: Plan, index: int) -> Plan:
    """The plan without one of its processes."""
    return replace(plan, processes=plan.processes[:index] + plan.processes[index + 1 :])
