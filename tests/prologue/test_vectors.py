"""Every vector of the contract, under every supported shell and under Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dispatch_agent.cli import conformance
from dispatch_agent.cli.conformance import Runner, Stage


def test_the_prologue_meets_its_contract(
    implementation: str,
    vector: dict[str, Any],
    contract: dict[str, Any],
    stage: Stage,
    runner_for: Callable[..., Runner],
) -> None:
    other_user = {"uid", "nproc1_fresh_uid"} & vector.get("setup", {}).keys()
    wrong = conformance.run(
        vector, contract["base_env"], runner_for(implementation, other_user=bool(other_user)), stage
    )
    if implementation in vector.get("exceptions", ()):
        assert wrong, "this is no exception any more: take it out of the vector"
    else:
        assert wrong == []


def test_every_vector_has_a_name_of_its_own_and_says_why_it_differs(contract: dict[str, Any]) -> None:
    vectors = contract["vectors"]
    assert len({vector["name"] for vector in vectors}) == len(vectors)
    assert {vector["original"] for vector in vectors} == {"agrees", "differs"}
    assert [vector["name"] for vector in vectors if vector["original"] == "differs" and not vector["reason"]] == []
