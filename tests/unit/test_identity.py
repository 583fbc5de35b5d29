"""Epochs, attempt tokens and job ids: their bounds, and that one value has one text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch_agent import identity
from dispatch_agent.errors import InvalidEpoch, Refused
from dispatch_agent.identity import Identity

JOB = "01J8ZQ4T7M9W2K5X3R6Y8N0PVB"


@given(st.integers(0, 18_000_000), st.integers(1, 999_999), st.integers(0, 999_999))
def test_an_epoch_is_split_back_into_what_it_was_made_of(generation: int, submission: int, restart: int) -> None:
    value = identity.epoch(generation, submission, restart)
    assert identity.split_epoch(value) == (generation, submission, restart)
    assert identity.parse_epoch(str(value)) == value


@given(*[st.tuples(st.integers(0, 18_000_000), st.integers(1, 999_999), st.integers(0, 999_999))] * 2)
def test_name_order_is_epoch_order(one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    first, second = identity.epoch(*one), identity.epoch(*other)
    assert (first < second) == (one < other) == (identity.format_epoch(first) < identity.format_epoch(second))


def test_the_greatest_epoch_fits_64_bits_but_no_signed_ones() -> None:
    assert identity.MAX_EPOCH == 18_000_000_999_999_999_999
    assert 1 << 63 < identity.MAX_EPOCH < 1 << 64
    assert identity.format_epoch(identity.MAX_EPOCH) == "18000000999999999999"
    assert identity.format_epoch(1_000_000) == "00000000000001000000"


@pytest.mark.parametrize(
    "parts", [(-1, 1, 0), (18_000_001, 1, 0), (0, 0, 0), (0, 1_000_000, 0), (0, 1, -1), (0, 1, 1_000_000)]
)
def test_a_part_outside_its_range_makes_no_epoch(parts: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidEpoch, match="is out of range: an epoch needs one from"):
        identity.epoch(*parts)


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "999999", "01000000", "+1000000", "-1000000", " 1000000", "1000000 ", "1000000\n", "1_000_000"),
        *("\u0661\u0660\u0660\u0660\u0660\u0660\u0660", "\uff11000000", "0x100000", "1000000.0", "1e6", "9" * 5000),
        *("18000001000001000000", "18446744073709551616", "12000000000001", "18000000000000000000"),
    ],
)
def test_only_the_plain_decimal_text_of_a_possible_epoch_is_read(text: str) -> None:
    with pytest.raises(InvalidEpoch):
        identity.parse_epoch(text)


def test_an_invalid_epoch_is_a_refusal_and_a_value_error() -> None:
    with pytest.raises(ValueError, match="'x'") as caught:
        identity.parse_epoch("x")
    assert isinstance(caught.value, Refused)
    assert caught.value.exit_code == 125


@pytest.mark.parametrize("value", [0, 999_999, identity.MAX_EPOCH + 1, -1_000_000])
def test_an_impossible_epoch_becomes_no_name(value: int) -> None:
    with pytest.raises(InvalidEpoch):
        identity.format_epoch(value)


def test_a_job_id_is_a_ulid_in_upper_case() -> None:
    assert identity.parse_job_id(JOB) == JOB
    with pytest.raises(Refused, match=f"write it in upper case, {JOB}"):
        identity.parse_job_id(JOB.lower())


@pytest.mark.parametrize(
    "text", ["", JOB[:-1], JOB + "0", "8" + JOB[1:], JOB[:-1] + "U", JOB + "\n", JOB[:-1] + "\u0660"]
)
def test_what_is_no_ulid_is_no_job_id(text: str) -> None:
    with pytest.raises(Refused, match="is not a ULID"):
        identity.parse_job_id(text)


def test_new_job_ids_are_the_ulids_of_their_time_and_randomness() -> None:
    assert identity.new_job_id(0, bytes(10)) == "0" * 26
    assert identity.new_job_id((1 << 48) - 1, b"\xff" * 10) == "7" + "Z" * 25
    # The example of the ULID specification.
    assert identity.new_job_id(1_469_918_176_385, bytes(10)).startswith("01ARYZ6S41")


@given(st.integers(0, (1 << 48) - 1), st.integers(0, (1 << 48) - 1), st.binary(min_size=10, max_size=10))
def test_new_job_ids_are_valid_and_sort_by_time(early: int, late: int, randomness: bytes) -> None:
    one, other = identity.new_job_id(early, randomness), identity.new_job_id(late, randomness)
    assert identity.parse_job_id(one) == one
    assert (one < other) == (early < late)


@pytest.mark.parametrize(("time_ms", "randomness"), [(-1, bytes(10)), (1 << 48, bytes(10)), (0, b""), (0, bytes(11))])
def test_no_job_id_is_made_from_what_does_not_fit(time_ms: int, randomness: bytes) -> None:
    with pytest.raises(Refused, match="no job id from time"):
        identity.new_job_id(time_ms, randomness)


@pytest.mark.parametrize("text", [f"{JOB}.3.1.7.5", "3.4711.0", "3.a2.r1", "0", "a" * 199, "0aZ._-"])
def test_an_attempt_is_any_one_safe_folder_name(text: str) -> None:
    assert identity.parse_attempt(text) == text


@pytest.mark.parametrize("text", ["", ".", "..", ".a", "-a", "_a", "a/b", "a b", "a\n", "\u00e9", "a\0", "a" * 200])
def test_an_attempt_that_is_no_safe_folder_name_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="is not a folder name"):
        identity.parse_attempt(text)


def test_the_longest_attempt_and_its_epoch_are_still_one_file_name() -> None:
    name = f"{identity.format_epoch(identity.MAX_EPOCH)}-{'a' * identity.MAX_ATTEMPT_LENGTH}"
    assert len(name) <= 255 - len(".json.12345678.partial")


def test_the_simulated_clusters_have_the_tokens_of_the_identity_table() -> None:
    assert identity.memory_slurm_attempt(3, 4711, 2) == "3.4711.2"
    assert identity.memory_kubeflow_attempt(3, 5, 1) == "3.a5.r1"


def test_an_identity_cannot_be_changed() -> None:
    value = Identity(None, 1_000_000, "a", "ready-made")
    with pytest.raises(AttributeError):
        value.epoch = 2_000_000  # type: ignore[misc]
