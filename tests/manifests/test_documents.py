"""YAML and JSON, in and out: what is written as a text is read as that text, by every reader of YAML."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.manifests.conftest import ONE_NODE, invoke, refusal, render

from dispatch_agent.cli import documents
from dispatch_agent.errors import SettingsError

# Each is something else than a text to some version of YAML, or ends one.
TRICKY = [
    *("1e3", "0x1F", "0o17", "017", "1_000", "12:30:00", "2026-01-01", ".5", "+1", "-0", "1.", "NaN", ".inf", "1e-3"),
    *("yes", "No", "on", "OFF", "y", "N", "true", "null", "~", "", " ", "=", "<<", "!x", "&a", "*a", "- a", "? a"),
    *("a: b", "a #b", "#a", "a:", "%x", "@x", "`x", "'", '"', "\\", "{}", "[]", "a\nb", "a\n", "\n", " a", "a ", "\t"),
    *("a\r\nb", "é", "\u2028", "\x7f", "a  b\n  c\n", "\n\n a"),
]


@pytest.mark.parametrize("text", TRICKY)
def test_a_tricky_text_stays_one(text: str) -> None:
    written = documents.write_yaml([{"key": text, text: [text]}])
    assert yaml.safe_load(written) == {"key": text, text: [text]}
    assert documents.read(io.StringIO(written)) == [{"key": text, text: [text]}]


@given(st.text(st.characters(exclude_categories=("Cs", "Cc"), include_characters="\n\t"), max_size=40))
def test_every_text_stays_one(text: str) -> None:
    assert yaml.safe_load(documents.write_yaml([[text]])) == [text]


@pytest.mark.parametrize("text", TRICKY)
def test_only_what_begins_with_a_letter_and_is_no_word_is_left_unquoted(text: str) -> None:
    """go-yaml, which kubectl has, takes more forms of numbers than PyYAML."""
    [line] = documents.write_yaml([["plain/text.x", text]]).splitlines()[1:2]
    assert line.removeprefix("- ")[:1] in {'"', "|"}


def test_words_that_only_old_yaml_takes_for_something_else_are_texts() -> None:
    read = documents.read(io.StringIO("[no, on, y, 12:30:00, 2026-01-01, 017, 1_000, 0x1F, 1e3, =, 'true']"))
    assert read == [["no", "on", "y", "12:30:00", "2026-01-01", "017", "1_000", "0x1F", "1e3", "=", "true"]]


def test_true_false_null_and_decimal_numbers_are_what_they_are() -> None:
    assert documents.read(io.StringIO("{a: true, b: false, c: null, d: ~, e: 12, f: -3, g: 1.5, h: , i: 0}")) == [
        {"a": True, "b": False, "c": None, "d": None, "e": 12, "f": -3, "g": 1.5, "h": None, "i": 0}
    ]


def test_anchors_and_merges_are_read() -> None:
    text = "base: &base {a: 1, b: 1}\nmore:\n  <<: *base\n  b: 2\n"
    assert documents.read(io.StringIO(text)) == [{"base": {"a": 1, "b": 1}, "more": {"a": 1, "b": 2}}]


@pytest.mark.parametrize(
    "text",
    [
        "a: [1",
        "a: b: c",
        "\tx: 1",
        "a: !!python/object:os.system x",
        "{1: 2, [a]: b}",
        '{"a": ',
        "a: " + "9" * 5000,
        '{"a": ' + "9" * 5000 + "}",
        "[" * 20_000,
        "&a [*a, {b: *a}]: 1",
    ],
)
def test_what_is_no_document_is_said_in_one_line(text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        documents.read(io.StringIO(text))
    assert "\n" not in str(refused.value)


def test_what_is_no_text_is_said() -> None:
    stream = io.TextIOWrapper(io.BytesIO(b"name: \xff"), encoding="utf-8")
    with pytest.raises(SettingsError, match="no text in UTF-8"):
        documents.read(stream)


def test_a_list_of_objects_has_no_aliases() -> None:
    """kubectl takes them, people do not."""
    shared: dict[str, Any] = {"a": [1]}
    assert "&" not in documents.write_yaml([{"x": shared, "y": shared}])


class TestWithoutPyYaml:
    @pytest.fixture(autouse=True)
    def absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "yaml", None)

    def test_json_goes_in_and_out(self) -> None:
        printed = invoke(ONE_NODE, "--output", "json", "--kind", "pod").stdout
        assert json.loads(printed)["kind"] == "Pod"

    @pytest.mark.parametrize(("text", "arguments"), [("name: train", ("--output", "json")), (ONE_NODE, ())])
    def test_yaml_is_refused_with_the_extra_that_brings_it(self, text: Any, arguments: tuple[str, ...]) -> None:
        assert "pip install 'dispatch-agent[kubernetes]'" in refusal(text, *arguments)

    def test_damaged_json_is_said_as_that(self) -> None:
        assert "is no JSON" in refusal('{"name": ', "--output", "json")


def test_a_yaml_flow_mapping_is_yaml_and_not_damaged_json() -> None:
    assert render(
        "{name: train, image: i, command: [a], checkpoints: {size: 1Gi}, publish: {dest: s3://b/p}, agent: {image: a}}"
    )
