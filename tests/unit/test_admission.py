"""A goes above everything that was ever written, and never so far that an epoch could not hold it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch_agent.cluster.admission import next_admission
from dispatch_agent.errors import SettingsError
from dispatch_agent.identity import MAX_RESTART, epoch

COUNT = st.integers(0, MAX_RESTART)


@given(COUNT, COUNT, COUNT)
def test_it_is_one_above_the_greater_and_refused_exactly_where_no_epoch_has_room(a: int, floor: int, j: int) -> None:
    expected = max(a, floor) + 1
    if expected + j <= MAX_RESTART:
        assert next_admission(str(a), str(floor), "TrainJob x", j) == expected
        epoch(0, 1, expected + j)
    else:
        with pytest.raises(SettingsError, match="which is the bound: start a new submission"):
            next_admission(str(a), str(floor), "TrainJob x", j)


@pytest.mark.parametrize(("restarts", "fits"), [(0, True), (1, False)])
def test_the_last_that_fits(restarts: int, fits: bool) -> None:
    if fits:
        assert next_admission("999998", "0", "TrainJob x", restarts) == 999_999
    else:
        with pytest.raises(SettingsError):
            next_admission("999998", "0", "TrainJob x", restarts)


@pytest.mark.parametrize("text", [None, "", "-1", "+1", "1.0", " 1", "1\n", "٣", "1000000", "9" * 5000])
def test_what_is_no_count_is_refused_in_either_place(text: str | None) -> None:
    for a, floor in ((text, "1"), ("1", text)):
        with pytest.raises(SettingsError, match="not a count"):
            next_admission(a, floor, "TrainJob x")
