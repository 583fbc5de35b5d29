"""The simulated cluster's two shapes: what it answers, and the attempt tokens of its executions.

They model the protocol, not the real adapters: every source is declared, and what an adapter probes is a plain no here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dispatch_agent.identity import memory_kubeflow_attempt, memory_slurm_attempt
from dispatch_agent.support import CAPABILITIES, RULES, Capability, Rule, RuleSupport, Support

_YES: frozenset[Capability] = frozenset({"AttemptInjection", "Hold", "WorkingDirectory", "ProcsPerNode"})
_PERFORMED: frozenset[Rule] = frozenset({"resubmit", "hold", "escalate"})


@dataclass(frozen=True, slots=True)
class Memory:
    """A simulated cluster. `capabilities` and `rules` replace single answers. `identity_weakened`: why an execution may
    share its identity with another, or nothing."""

    shape: Literal["slurm", "kubeflow"]
    capabilities: Mapping[Capability, Support] = field(default_factory=dict)
    rules: Mapping[Rule, Support] = field(default_factory=dict)
    identity_weakened: str = ""

    def answers(self) -> dict[Capability, Support]:
        """All fourteen, in the order of CAPABILITIES."""
        yes = _YES
        if self.shape == "kubeflow":
            yes = yes - {"WorkingDirectory"} | {"ReadmissionGate"}
        return {name: self.capabilities.get(name, _declared(name in yes)) for name in CAPABILITIES}

    def policy(self) -> tuple[RuleSupport, ...]:
        return tuple(RuleSupport(rule, self.rules.get(rule, _declared(rule in _PERFORMED))) for rule in RULES)

    def attempt(self, submission: int, of: int, restart: int) -> str:
        """The token of an execution. `of`: Slurm's job id, or the count of the object's executions, by shape."""
        make = memory_slurm_attempt if self.shape == "slurm" else memory_kubeflow_attempt
        return make(submission, of, restart)


def _declared(yes: bool) -> Support:
    return Support("yes") if yes else Support("no", reason="the simulated cluster does not have it")
