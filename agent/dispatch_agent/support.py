"""Three-valued support: what is known about a capability, how, and why; and what a submit makes of it.

Values and pure functions. The names and their order are the dispatcher's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, get_args

Value = Literal["unknown", "yes", "no"]
Source = Literal["declared", "probed", "catalogue"]

Capability = Literal[
    "ContainerImage",
    "NativeRequeue",
    "NativeRestart",
    "Hold",
    "PreTerminationSignal",
    "AccountingHistory",
    "AttemptInjection",
    "ReadmissionGate",
    "WorkingDirectory",
    "ProcsPerNode",
    "OutputPath",
    "OutputRead",
    "OutputFollow",
    "OutputRetained",
]
CAPABILITIES: tuple[Capability, ...] = get_args(Capability)

# Asked for in vain, these are an error that the caller sees, and not a job that quietly runs differently.
VISIBLE_ON_FAILURE: frozenset[Capability] = frozenset({"OutputRead", "OutputFollow", "OutputRetained"})

Rule = Literal["requeue", "restart", "resubmit", "hold", "escalate"]
RULES: tuple[Rule, ...] = get_args(Rule)
Enforcer = Literal["backend", "supervisor", "nobody"]


@dataclass(frozen=True, slots=True)
class Support:
    """One answer. `reason` is shown to people wherever the answer is not yes."""

    value: Value = "unknown"
    source: Source = "declared"
    reason: str = ""

    def __bool__(self) -> bool:
        return self.value == "yes"


@dataclass(frozen=True, slots=True)
class Spec:
    """Of a job's specification, what a cluster may lack. `procs_per_node`: 0 leaves it to the cluster."""

    image: bool = False
    workdir: str = ""
    procs_per_node: int = 0
    output: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a submit does: it goes on if `refused` is empty. `refused` has one sentence for each capability that is
    missing; `unverified` names those that the job goes on without knowing."""

    refused: tuple[str, ...] = ()
    unverified: tuple[Capability, ...] = ()


@dataclass(frozen=True, slots=True)
class RuleSupport:
    """One recovery rule of a policy. `perform`: whether anyone can carry it out on this cluster. `native`: whether the
    backend would enforce it itself, None if it was not asked. `compiled`: it is in the backend's offer."""

    rule: Rule
    perform: Support
    native: Support | None = None
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who enforces each rule, in policy order. `refused`: what ends the submit, each ("unsupported" | "rejected",
    sentence); the enforcers then mean nothing. `held`: a person decides instead of the rules."""

    enforcers: tuple[Enforcer | None, ...]
    unverified: tuple[Rule, ...] = ()
    refused: tuple[tuple[Literal["unsupported", "rejected"], str], ...] = ()
    held: bool = False


def needed(spec: Spec) -> tuple[Capability, ...]:
    """What a specification needs at submit, in the order of CAPABILITIES."""
    asked: dict[Capability, bool] = {
        "ContainerImage": spec.image,
        "AttemptInjection": True,
        "WorkingDirectory": spec.workdir != "",
        "ProcsPerNode": spec.procs_per_node > 0,
        "OutputPath": spec.output,
    }
    return tuple(capability for capability, is_needed in asked.items() if is_needed)


def submit(needs: Iterable[Capability], answers: Mapping[Capability, Support]) -> Verdict:
    """yes proceeds, no refuses with the reason, unknown refuses unless it is visible on failure.

    What has no answer is unknown.
    """
    refused, unverified = [], []
    for capability in needs:
        support = answers.get(capability, Support())
        if support.value == "unknown" and capability in VISIBLE_ON_FAILURE:
            unverified.append(capability)
        elif not support:
            refused.append(_refusal(capability, support))
    return Verdict(tuple(refused), tuple(unverified))


def assign(
    policy: Sequence[RuleSupport],
    *,
    supervisor: bool = False,
    accept_unverified: Mapping[Rule, Enforcer] | None = None,
    accept_unenforced: AbstractSet[Rule] = frozenset(),
    shared_checkpoint: bool = False,
) -> Assignment:
    """Who enforces the rules of a policy. With a shared checkpoint the backend is never asked: a person decides."""
    accepted = accept_unverified or {}
    enforcers: list[Enforcer | None] = []
    unverified: list[Rule] = []
    refused: list[tuple[Literal["unsupported", "rejected"], str]] = []
    for item in policy:
        offered = not shared_checkpoint and item.compiled
        enforcer: Enforcer | None = None
        if not shared_checkpoint and (wrong := _contradiction(item)):
            refused.append(("rejected", wrong))
        elif item.perform.value == "unknown" and item.rule in accepted:
            enforcer = accepted[item.rule]
            unverified.append(item.rule)
        elif not item.perform:
            refused.append(("unsupported", _refusal(f"the rule {item.rule}", item.perform)))
        elif offered:
            enforcer = "backend"
        elif supervisor:
            enforcer = "supervisor"
        elif item.rule in accept_unenforced:
            enforcer = "nobody"
        else:
            who = "no supervisor runs, and the backend does not enforce it"
            refused.append(("rejected", f"nobody enforces the rule {item.rule}: {who}; accept that, or run one"))
        enforcers.append(enforcer)
    return Assignment(tuple(enforcers), tuple(unverified), tuple(refused), held=shared_checkpoint)


def _contradiction(item: RuleSupport) -> str:
    """Why a backend's answers about one rule cannot all be true, or nothing."""
    if item.native and not item.perform:
        return f"the backend would enforce {item.rule} itself, but whether it can be done is {item.perform.value}"
    if item.compiled and not item.native:
        return f"the backend took {item.rule} into its offer, but did not say that it enforces it"
    return ""


def _refusal(what: str, support: Support) -> str:
    verb = "is not supported" if support.value == "no" else "is not known to be supported"
    return f"{what} {verb} ({support.source}{': ' + support.reason if support.reason else ''})"
