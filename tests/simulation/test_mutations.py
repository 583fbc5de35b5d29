"""Broken builds of the shipped code: the seeds must find every one, or they prove nothing.

Each is run on the worlds that every seed draws, as `test_seeds` does; what needs a rare meeting is run on those worlds
that are drawn with an eye to it, which are among the former.
"""

from __future__ import annotations

import pytest
from tests.simulation import plans, world
from tests.simulation.mutations import MUTATIONS
from tests.simulation.plans import Focus
from tests.simulation.shrink import in_words, shrink

BUDGET = 400
"""Seeds within which a broken build must be found: a fifth of what test_seeds runs."""

FOCUS: dict[str, Focus] = {
    "a_refused_write_is_taken_for_lost": "faults",
    "a_refused_write_is_taken_for_won": "faults",
    "a_pointer_that_was_left_behind_stays_there": "faults",
    "a_refused_pointer_is_taken_for_moved": "faults",
    "any_word_is_fresh": "faults",
    "a_change_of_the_save_is_not_noticed": "faults",
    "sizes_are_not_looked_at": "faults",
    "nothing_is_read_back": "faults",
    "the_manifest_is_not_looked_at_again": "faults",
    "the_seal_is_not_looked_for": "prune",
    "a_prune_does_not_list_again": "prune",
    "a_prune_moves_no_pointer": "pointer",
    "a_one_shot_believes_any_commit_of_the_name": "hand over",
    "what_leaves_the_volume_is_not_compared": "local",
    "what_leaves_the_volume_is_not_published": "local",
}


@pytest.mark.parametrize("build", MUTATIONS)
def test_a_broken_build_is_found(build: str) -> None:
    for seed in range(BUDGET):
        with MUTATIONS[build]():
            result = world.run(plans.drawn(seed, FOCUS.get(build)))
        if result.violation is not None:
            assert result.violation.invariant.startswith("I"), result.violation
            return
    pytest.fail(f"{build} breaks nothing in {BUDGET} worlds")


def test_a_failing_seed_is_made_small_and_told_step_by_step() -> None:
    with MUTATIONS["a_prune_takes_the_newest"]():
        failing = next(
            result for seed in range(BUDGET) if (result := world.run(plans.drawn(seed))).violation is not None
        )
        least = shrink(failing)
        assert world.run(least.plan, least.decisions).trace == least.trace
    assert least.violation is not None
    assert failing.violation is not None
    assert least.violation.invariant == failing.violation.invariant
    assert len(least.plan.processes) <= 3
    assert len(least.decisions) <= 3
    told = in_words(least)
    assert told.count("create commits/") >= 1
    assert f"--first-seed {failing.plan.seed} --seeds 1" in told
    assert told.splitlines()[0] == str(least.violation)
