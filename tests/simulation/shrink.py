"""From a failing world to the least that still fails: fewer processes, steps, faults and turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.simulation import world
from tests.simulation.plans import Plan, Trainer, Watch
from tests.simulation.scheduler import Decision, Decisions, Point
from tests.simulation.world import Result

TRIES = 2000


@dataclass
class Shrinker:
    """Holds the least failing run so far. `left`: how many more runs may be tried."""

    best: Result
    left: int = TRIES

    def accept(self, plan: Plan, decisions: Decisions) -> bool:
        """Try a smaller world; whether the same invariant is still broken."""
        if self.left == 0:
            return False
        self.left -= 1
        result = world.run(plan, decisions)
        invariant = self.best.violation.invariant if self.best.violation else ""
        if result.violation is None or result.violation.invariant != invariant:
            return False
        self.best = result
        return True

    def decide_less(self) -> bool:
        """Whether some decisions could be left out: halves of them, quarters, and at last each."""
        smaller = False
        size = max(1, len(self.best.decisions) // 2)
        while self.best.decisions:
            points = list(self.best.decisions)
            for start in range(0, len(points), size):
                gone = set(points[start : start + size])
                kept = {p: d for p, d in self.best.decisions.items() if p not in gone}
                if len(kept) < len(self.best.decisions):
                    smaller = self.accept(self.best.plan, kept) or smaller
            if size == 1:
                break
            size = max(1, size // 2)
        return smaller

    def decide_simpler(self) -> bool:
        """Whether a decision could lose one of its two halves."""
        smaller = False
        for point, decision in list(self.best.decisions.items()):
            for simpler in (Decision(to=decision.to), Decision(fault=decision.fault)):
                if simpler != decision and simpler != Decision():
                    smaller = self.accept(self.best.plan, {**self.best.decisions, point: simpler}) or smaller
        return smaller

    def plan_less(self) -> bool:
        """Whether the plan could lose something."""
        smaller = False
        progress = True
        while progress:
            progress = False
            for plan in list(_smaller(self.best.plan)):
                if self.accept(plan, _without_the_lost(self.best.decisions, plan)):
                    smaller = progress = True
                    break
        return smaller


def shrink(result: Result, tries: int = TRIES) -> Result:
    """The least world found that breaks the same invariant."""
    again = world.run(result.plan, result.decisions)
    assert again.trace == result.trace, "the recorded decisions do not give the same run"
    shrinker = Shrinker(result, tries)
    while any([shrinker.plan_less(), shrinker.decide_less(), shrinker.decide_simpler()]) and shrinker.left:
        pass
    return shrinker.best


def in_words(result: Result) -> str:
    """What happened, step by step, and how to see it again."""
    plan = result.plan
    conditions = [
        *(["the store ignores conditions"] if plan.weak else []),
        *([] if plan.verifies else ["the store verifies no checksum"]),
        *([] if plan.locks else ["a folder's lock does not hold"]),
        *(f"no answer from {since:g} to {until:g} s" for since, until in plan.away),
        *(f"nobody can write {key} from {since:g} to {until:g} s" for key, since, until in plan.stuck),
        *(f"{stall}" for stall in plan.stalls),
        *(["writes on their way arrive last"] if plan.land_last else []),
    ]
    return "\n".join(
        [
            f"{result.violation}",
            f"the least schedule found for seed {plan.seed} ({len(result.decisions)} decisions):",
            *(f"  {process}" for process in plan.processes),
            *(f"  {condition}" for condition in conditions),
            *(
                f"  at point {number} of {actor}: {_said(decision)}"
                for (actor, number), decision in sorted(result.decisions.items())
            ),
            "step by step (seconds, who, what):",
            *result.trace,
            f"{result.violation}",
            f"again: pytest tests/simulation/test_seeds.py --first-seed {plan.seed} --seeds 1",
        ]
    )


def _said(decision: Decision) -> str:
    return ", ".join(
        [
            *([f"fault {decision.fault!r}"] if decision.fault else []),
            *([f"{decision.to} goes on"] if decision.to else []),
        ]
    )


def _without_the_lost(decisions: Decisions, plan: Plan) -> Decisions:
    names = {process.name for process in plan.processes}

    def stays(point: Point) -> bool:
        name = point[0].removeprefix("kubelet-")
        return name in names or name == "start" or name.startswith("write ")

    return {point: decision for point, decision in decisions.items() if stays(point)}


def _smaller(plan: Plan) -> Iterator[Plan]:
    for index in range(len(plan.processes)):
        yield replace(plan, processes=plan.processes[:index] + plan.processes[index + 1 :])
    for index, process in enumerate(plan.processes):
        for simpler in _simpler(process):
            yield replace(plan, processes=(*plan.processes[:index], simpler, *plan.processes[index + 1 :]))
    plain: dict[str, object] = {
        "weak": False,
        "verifies": True,
        "locks": True,
        "hints": True,
        "away": (),
        "stuck": (),
        "stalls": (),
        "land_last": False,
    }
    for field, value in plain.items():
        if getattr(plan, field) != value:
            yield replace(plan, **{field: value})  # type: ignore[arg-type]


def _simpler(process: object) -> Iterator[object]:
    if isinstance(process, Trainer):
        for index in range(len(process.steps)):
            yield replace(process, steps=process.steps[:index] + process.steps[index + 1 :])
    if isinstance(process, (Trainer, Watch)) and process.skew:
        yield replace(process, skew=0.0)
    if isinstance(process, Watch) and process.lives > 1:
        yield replace(process, lives=process.lives - 1)
