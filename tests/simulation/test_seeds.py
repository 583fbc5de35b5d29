"""Seeded worlds of the shipped code: trainers, publishers, restarts, overlapping executions, readers, prunes, faults.

Every world is checked against I1 to I9 after each of its steps. `--seeds N` and `--first-seed K` run as many others as
are asked for; a seed that fails is printed with the least schedule that still does.
"""

from __future__ import annotations

import pytest
from tests.simulation import plans, world
from tests.simulation.shrink import in_words, shrink

SEEDS, SHARES = 2000, 8


def pass_seeds(seeds: range) -> int:
    """Run them all; how many commits there were. Fails with the least schedule of the first that breaks something."""
    commits = 0
    for seed in seeds:
        result = world.run(plans.drawn(seed))
        if result.violation is not None:
            pytest.fail(in_words(shrink(result)), pytrace=False)
        commits += result.commits
    return commits


@pytest.mark.timeout(0)
@pytest.mark.parametrize("share", range(SHARES))
def test_no_seed_breaks_an_invariant(share: int, request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("--seeds", None) or SEEDS
    first = request.config.getoption("--first-seed", None) or 0
    seeds = range(first + share, first + count, SHARES)
    assert pass_seeds(seeds) >= len(seeds) // 2, "hardly anything is published in these worlds"


@pytest.mark.parametrize("seed", range(12))
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    one, two = world.run(plans.drawn(seed)), world.run(plans.drawn(seed))
    assert one.trace == two.trace
    assert one.decisions == two.decisions


@pytest.mark.parametrize("seed", range(12))
def test_the_decisions_of_a_run_give_the_same_run(seed: int) -> None:
    drawn = world.run(plans.drawn(seed))
    assert world.run(drawn.plan, drawn.decisions).trace == drawn.trace
