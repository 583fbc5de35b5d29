"""Names: bytes on disk to plain ASCII at the store and back, one spelling each, and nothing that leaves its folder."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch_agent.checkpoint import names

KEPT = re.compile(r"[A-Za-z0-9._=+@\- %]+")


@given(st.binary(min_size=1, max_size=255))
def test_any_bytes_come_back_from_their_encoding(raw: bytes) -> None:
    text = names.encode(raw)
    assert names.decode(text) == raw
    assert KEPT.fullmatch(text)
    assert text not in {".", ".."}
    assert not text.endswith(".")


@given(st.lists(st.binary(min_size=1, max_size=20).filter(lambda b: b"/" not in b and b"\0" not in b), min_size=1))
def test_relative_paths_come_back_unless_a_component_is_a_dot_or_two(components: list[bytes]) -> None:
    raw = b"/".join(components)
    text = names.encode_path(raw)
    if b"." in components or b".." in components:
        with pytest.raises(ValueError, match="leave its folder"):
            names.decode_path(text)
    else:
        assert names.decode_path(text) == raw


@given(st.text(max_size=30))
def test_decode_takes_only_what_encode_gives(text: str) -> None:
    try:
        raw = names.decode(text)
    except ValueError:
        return
    assert names.encode(raw) == text


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"epoch=3-val_loss=0.1.ckpt", "epoch=3-val_loss=0.1.ckpt"),
        (b"a b", "a b"),
        (b".metadata", ".metadata"),
        (b".", "%2E"),
        (b"..", "%2E%2E"),
        (b"a.", "a%2E"),
        (b"...", "..%2E"),
        (b"%41", "%2541"),
        (b"bad\xff.pt", "bad%FF.pt"),
        (b"a[1]?*", "a%5B1%5D%3F%2A"),
        ("ü".encode(), "%C3%BC"),
    ],
)
def test_what_stores_keep_stays_readable_and_the_rest_is_encoded(raw: bytes, text: str) -> None:
    assert names.encode(raw) == text


@pytest.mark.parametrize("text", ["", "%41", "%4", "%zz", "%ff", "a.", "ü", "a/b", "*", "\n", "."])
def test_a_second_spelling_of_a_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an encoded name"):
        names.decode(text)


@pytest.mark.parametrize("text", ["", "/a", "a/", "a//b", "%2E%2E/a", "a/%2E/b", "a%2Fb", "a/..", "../a", "%00"])
def test_paths_that_could_leave_their_folder_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"refused|not an encoded name"):
        names.decode_path(text)


def test_a_name_is_one_component() -> None:
    assert names.decode_name("step-1") == b"step-1"
    with pytest.raises(ValueError, match="slash"):
        names.decode_name("a/b")


@pytest.mark.parametrize(
    "name",
    [
        ".tmpAb12",
        "model.tmp",
        "x.tmp123",
        "tmp-checkpoint-5",
        "ckpt-1_temp",
        "checkpoint_tmp",
        "w.part",
        "1.orbax-checkpoint-tmp",
        "d.__lock",
        "step=1-unfinished",
        "checkpoint-is-incomplete.txt",
        ".nfs0001",
        ".metadata.tmp",
    ],
)
def test_names_that_frameworks_give_to_unfinished_things_are_temporary(name: str) -> None:
    assert names.is_temporary(name.encode())


@pytest.mark.parametrize("name", ["step-1", ".metadata", "template.bin", "partial.pt", "attempt", "temp", "\n"])
def test_ordinary_names_are_not_temporary(name: str) -> None:
    assert not names.is_temporary(name.encode())


def test_a_name_is_shown_without_control_characters() -> None:
    assert names.shown(b"a\nb\xff\x1b[31m") == r"a\nb\xff\x1b[31m"
