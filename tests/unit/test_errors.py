"""One class, one exit code: the codes are an interface, and the tree in the docstring is what the classes are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from dispatch_agent import errors, identity
from dispatch_agent.errors import AgentError

# One code for several classes: a base has that of what is below it, and an epoch out of range is a refusal.
SHARED = {
    22: {"IntegrityError", "NewerFormat", "NotStored"},
    10: {"StoreError", "StoreUnavailable"},
    20: {"SaveError", "Incomplete"},
    33: {"CommitError", "OutcomeUnknown"},
    125: {"Refused", "InvalidEpoch"},
}


def tree(kind: type[AgentError], depth: int = 0) -> Iterator[tuple[int, type[AgentError]]]:
    yield depth, kind
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from tree(below, depth + 1)


KINDS = [kind for _, kind in tree(AgentError)]


def test_the_docstring_shows_the_tree_as_it_is() -> None:
    written = re.findall(r"^    ( *)([A-Z]\w+)(?: +(\d+))?(?:  .*)?$", errors.__doc__ or "", re.MULTILINE)
    drawn = [(len(indent) // 2, name) for indent, name, _ in written]
    assert drawn == [(depth, kind.__name__) for depth, kind in tree(AgentError)]
    codes = {name: int(code) for _, name, code in written if code}
    assert codes == {kind.__name__: kind.exit_code for kind in KINDS if kind.__name__ in codes}
    silent = {kind.__name__ for kind in KINDS} - set(codes)
    assert silent == {"StoreError", "SaveError", "CommitError"}, "bases that nobody raises"


def test_no_two_classes_share_a_code_but_a_base_and_what_is_below_it() -> None:
    by_code: dict[int, set[str]] = {}
    for kind in KINDS:
        by_code.setdefault(kind.exit_code, set()).add(kind.__name__)
    shared = {code: names for code, names in by_code.items() if len(names) > 1}
    assert shared == SHARED


def test_no_code_is_one_that_shells_or_signals_use() -> None:
    for kind in KINDS:
        assert 0 < kind.exit_code < 126


def test_every_name_stands_once() -> None:
    assert [name for name, count in Counter(kind.__name__ for kind in KINDS).items() if count > 1] == []


@pytest.mark.parametrize("name", ["StoreUnavailable", "SourceChanged", "OutcomeUnknown"])
def test_what_may_pass_by_itself_is_retryable(name: str) -> None:
    assert getattr(errors, name).retryable


def test_nothing_else_is_retryable() -> None:
    assert {kind.__name__ for kind in KINDS if kind.retryable} == {
        "StoreUnavailable",
        "SourceChanged",
        "NotStored",
        "OutcomeUnknown",
    }


def test_an_invalid_epoch_is_a_refusal_and_a_value_error() -> None:
    with pytest.raises(errors.Refused):
        identity.parse_epoch("x")
    with pytest.raises(ValueError, match="'x'"):
        identity.parse_epoch("x")
