"""What a cluster is said to support decides whether a job is submitted: the dispatcher's names, rules and shapes."""

from __future__ import annotations

import itertools

import pytest

from dispatch_agent.cluster.memory import Memory
from dispatch_agent.support import (
    CAPABILITIES,
    RULES,
    VISIBLE_ON_FAILURE,
    RuleSupport,
    Spec,
    Support,
    assign,
    needed,
    submit,
)

YES, NO, UNKNOWN = Support("yes"), Support("no", "probed", "the node has none"), Support()
FIRST_FIVE = ("ContainerImage", "AttemptInjection", "WorkingDirectory", "ProcsPerNode", "OutputPath")


class TestCapabilities:
    def test_there_are_fourteen_in_the_dispatchers_order(self) -> None:
        assert CAPABILITIES == (
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
        )

    def test_only_reading_output_is_visible_on_failure(self) -> None:
        assert {"OutputRead", "OutputFollow", "OutputRetained"} == VISIBLE_ON_FAILURE

    def test_an_answer_that_nobody_gave_is_unknown_and_declared(self) -> None:
        assert (Support().value, Support().source, Support().reason) == ("unknown", "declared", "")


class TestWhatASpecNeeds:
    def test_an_identity_always_and_nothing_else_by_itself(self) -> None:
        assert needed(Spec()) == ("AttemptInjection",)

    @pytest.mark.parametrize(
        ("spec", "capability"),
        [
            (Spec(image=True), "ContainerImage"),
            (Spec(workdir="/w"), "WorkingDirectory"),
            (Spec(procs_per_node=1), "ProcsPerNode"),
            (Spec(output=True), "OutputPath"),
        ],
    )
    def test_each_field_needs_its_capability_alone(self, spec: Spec, capability: str) -> None:
        assert set(needed(spec)) == {"AttemptInjection", capability}

    def test_everything_needs_the_five_in_order(self) -> None:
        assert needed(Spec(image=True, workdir="/w", procs_per_node=8, output=True)) == FIRST_FIVE


class TestSubmit:
    def test_yes_proceeds(self) -> None:
        verdict = submit(FIRST_FIVE, dict.fromkeys(CAPABILITIES, YES))
        assert (verdict.refused, verdict.unverified) == ((), ())

    @pytest.mark.parametrize("capability", CAPABILITIES)
    def test_no_refuses_with_its_reason_also_where_failure_is_visible(self, capability: str) -> None:
        (sentence,) = submit([capability], {capability: NO}).refused
        assert capability in sentence
        assert "the node has none" in sentence

    @pytest.mark.parametrize("capability", CAPABILITIES)
    @pytest.mark.parametrize("answered", [True, False])
    def test_unknown_refuses_unless_failure_is_visible_and_is_then_listed(
        self, capability: str, answered: bool
    ) -> None:
        verdict = submit([capability], {capability: UNKNOWN} if answered else {})
        visible = capability in VISIBLE_ON_FAILURE
        assert verdict.unverified == ((capability,) if visible else ())
        assert len(verdict.refused) == (0 if visible else 1)


class TestRules:
    @pytest.mark.parametrize("supervisor", [True, False])
    @pytest.mark.parametrize("shared", [True, False])
    def test_no_is_unsupported_and_nothing_can_accept_it(self, supervisor: bool, shared: bool) -> None:
        found = assign(
            [RuleSupport("restart", NO)],
            supervisor=supervisor,
            accept_unverified={"restart": "supervisor"},
            accept_unenforced={"restart"},
            shared_checkpoint=shared,
        )
        assert [kind for kind, _ in found.refused] == ["unsupported"]
        assert "the node has none" in found.refused[0][1]
        assert found.unverified == ()

    def test_unknown_is_unsupported_unless_somebody_is_named_who_enforces_it(self) -> None:
        policy = [RuleSupport("requeue", UNKNOWN)]
        assert [kind for kind, _ in assign(policy, supervisor=True).refused] == ["unsupported"]
        found = assign(policy, accept_unverified={"requeue": "backend"})
        assert (found.refused, found.enforcers, found.unverified) == ((), ("backend",), ("requeue",))

    def test_yes_goes_to_the_backend_then_the_supervisor_then_nobody_and_is_else_rejected(self) -> None:
        offered, plain = RuleSupport("requeue", YES, native=YES, compiled=True), RuleSupport("requeue", YES)
        assert assign([offered], supervisor=True).enforcers == ("backend",)
        assert assign([plain], supervisor=True, accept_unenforced={"requeue"}).enforcers == ("supervisor",)
        assert assign([plain], accept_unenforced={"requeue"}).enforcers == ("nobody",)
        assert [kind for kind, _ in assign([plain]).refused] == ["rejected"]

    def test_enforcing_natively_without_being_in_the_offer_is_no_enforcement(self) -> None:
        assert assign([RuleSupport("requeue", YES, native=YES)], supervisor=True).enforcers == ("supervisor",)

    @pytest.mark.parametrize("native", [None, UNKNOWN, NO])
    def test_an_offer_of_a_rule_that_is_not_natively_enforced_is_rejected(self, native: Support | None) -> None:
        found = assign([RuleSupport("requeue", YES, native=native, compiled=True)], supervisor=True)
        assert [kind for kind, _ in found.refused] == ["rejected"]

    @pytest.mark.parametrize("perform", [UNKNOWN, NO])
    def test_a_native_yes_for_what_cannot_be_performed_is_rejected(self, perform: Support) -> None:
        found = assign([RuleSupport("hold", perform, native=YES)], accept_unverified={"hold": "nobody"})
        assert [kind for kind, _ in found.refused] == ["rejected"]

    def test_under_a_shared_checkpoint_the_backend_has_no_say_and_a_person_decides(self) -> None:
        contradictory = RuleSupport("requeue", YES, native=NO, compiled=True)
        found = assign([contradictory], supervisor=True, shared_checkpoint=True)
        assert (found.refused, found.enforcers, found.held) == ((), ("supervisor",), True)

    def test_the_order_is_the_policys(self) -> None:
        policy = [RuleSupport(rule, YES) for rule in RULES]
        for some in itertools.permutations(policy, 3):
            found = assign(some, accept_unenforced={some[1].rule}, accept_unverified={})
            assert found.enforcers == (None, "nobody", None)
            assert [said.split("the rule ")[1].split(":")[0] for _, said in found.refused] == [
                some[0].rule,
                some[2].rule,
            ]


class TestMemory:
    def test_shaped_like_slurm(self) -> None:
        answers = Memory("slurm").answers()
        assert tuple(answers) == CAPABILITIES
        assert {name for name, support in answers.items() if support.value == "yes"} == {
            "AttemptInjection",
            "Hold",
            "WorkingDirectory",
            "ProcsPerNode",
        }
        assert {support.value for support in answers.values()} == {"yes", "no"}
        assert {support.source for support in answers.values()} == {"declared"}

    def test_shaped_like_kubeflow_it_gates_readmissions_and_has_no_working_directory(self) -> None:
        slurm, kubeflow = Memory("slurm").answers(), Memory("kubeflow").answers()
        changed = {name: kubeflow[name].value for name in CAPABILITIES if kubeflow[name] != slurm[name]}
        assert changed == {"ReadmissionGate": "yes", "WorkingDirectory": "no"}

    @pytest.mark.parametrize("shape", ["slurm", "kubeflow"])
    def test_its_rules(self, shape: str) -> None:
        performed = {item.rule: item.perform.value for item in Memory(shape).policy()}
        assert performed == {"requeue": "no", "restart": "no", "resubmit": "yes", "hold": "yes", "escalate": "yes"}

    def test_every_answer_can_be_replaced(self) -> None:
        memory = Memory("slurm", {"OutputRead": UNKNOWN}, {"restart": YES}, identity_weakened="a rank may be replaced")
        assert memory.answers()["OutputRead"] is UNKNOWN
        assert [item.perform for item in memory.policy() if item.rule == "restart"] == [YES]
        assert memory.identity_weakened == "a rank may be replaced"
        assert Memory("slurm").identity_weakened == ""

    def test_its_attempts_are_different_for_every_execution_of_an_object(self) -> None:
        assert Memory("slurm").attempt(3, 1712, 2) == "3.1712.2"
        assert Memory("kubeflow").attempt(3, 4, 2) == "3.a4.r2"
