"""How the model's tests explore: the shipped code, whole or broken on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.model.actors import shipped
from tests.model.explore import Explored, Scenario, explore

Mutation = tuple[Any, str, Any]
Explore = Callable[..., Explored]


@pytest.fixture
def explored() -> Explore:
    """Explore a scenario, with parts of the product replaced: (owner, name, value)."""

    def run(scenario: Scenario, mutations: Sequence[Mutation] = (), *, steps: bool = True) -> Explored:
        with shipped(mutations, steps=steps):
            return explore(scenario)

    return run
