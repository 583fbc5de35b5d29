"""What is said about the rules, in the command and on the page, is one text."""

from __future__ import annotations

from pathlib import Path

import pytest

from dispatch_agent.checkpoint.explain import explain, rows, table
from dispatch_agent.errors import SettingsError

PAGE = Path(__file__).parents[2] / "docs" / "completion.md"


def test_the_page_has_the_table_as_it_is() -> None:
    assert table() in PAGE.read_text("utf-8")


def test_every_rule_says_signal_ranks_needs_and_what_it_cannot_know() -> None:
    for row in rows():
        assert all((row.signal, row.ranks, row.needs, row.cannot_know))
        assert row.signal in explain(row.name)


def test_a_rule_with_its_argument_is_explained() -> None:
    assert explain("pointer:latest").startswith("pointer:<file>")
    assert explain("settle:5").startswith("settle:<seconds>")
    assert explain("marker").startswith("marker\n")
    assert explain("marker:DONE").startswith("marker:<name>")


@pytest.mark.parametrize("rule", ["", "deepspeed", "nothing", "nothing:x"])
def test_what_is_no_rule_is_refused(rule: str) -> None:
    with pytest.raises(SettingsError, match="no completion rule"):
        explain(rule)
