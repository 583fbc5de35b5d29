"""Which commits a prune takes: never what the newest two places need (I6), and the same ones at every later prune."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dispatch_agent.publish.keys import Order
from dispatch_agent.publish.retention import choose, dead_below

orders = st.builds(
    Order, st.integers(1, 3), st.integers(1, 2), st.integers(1, 12), st.sampled_from(["a" * 12, "b" * 12])
)
histories = st.sets(orders, max_size=40).map(sorted)


def order(epoch: int, ordinal: int, nonce: str = "a") -> Order:
    return Order(epoch, 1, ordinal, nonce * 12)


def ordinals(doomed: list[Order]) -> list[int]:
    return [one.ordinal for one in doomed]


def always(_: Order) -> bool:
    return True


TEN = [order(1, number) for number in range(1, 11)]


def test_the_newest_stay() -> None:
    assert ordinals(choose(TEN, set(), newest=3, every=None, whole=always)) == [1, 2, 3, 4, 5, 6, 7]


def test_one_in_so_many_of_the_older_ones_stays() -> None:
    assert ordinals(choose(TEN, set(), newest=2, every=3, whole=always)) == [2, 3, 5, 6, 8]


def test_every_one_is_no_prune() -> None:
    assert choose(TEN, set(), newest=2, every=1, whole=always) == []


def test_a_damaged_save_does_not_count_and_stays_while_it_is_among_the_newest() -> None:
    assert ordinals(choose(TEN, set(), newest=2, every=None, whole=lambda one: one.ordinal < 8)) == [1, 2, 3, 4, 5]


def test_fewer_whole_ones_than_asked_for_are_all_kept() -> None:
    assert choose(TEN, set(), newest=2, every=None, whole=lambda one: one.ordinal == 4) == []


def test_what_is_held_stays() -> None:
    assert ordinals(choose(TEN, set(), newest=2, every=None, whole=always, held={TEN[2]})) == [1, 2, 4, 5, 6, 7, 8]


def test_two_records_of_one_place_are_one_save() -> None:
    twice = [order(1, 1), order(1, 1, "b"), order(1, 2), order(1, 2, "b"), order(1, 3)]
    assert choose(twice, set(), newest=2, every=None, whole=always) == twice[:2]


def test_a_late_commit_of_an_old_execution_does_not_shift_which_ones_stay() -> None:
    first = choose(TEN, set(), newest=2, every=3, whole=always)
    late = sorted([*TEN, Order(0, 1, 1, "c" * 12)])
    assert choose(late, first, newest=2, every=3, whole=always) == [TEN[0]]


@given(histories, st.integers(2, 5), st.none() | st.integers(1, 4), st.data())
def test_i6_no_history_loses_its_newest_places(
    commits: list[Order], newest: int, every: int | None, data: st.DataObject
) -> None:
    pruned = set(data.draw(st.lists(st.sampled_from(commits), unique=True))) if commits else set()
    broken = set(data.draw(st.lists(st.sampled_from(commits), unique=True))) if commits else set()
    doomed = choose(commits, pruned, newest=newest, every=every, whole=lambda one: one not in broken)
    there = [one for one in commits if one not in pruned]
    left = [one for one in there if one not in doomed]
    places = sorted({one.place for one in there})
    assert {one.place for one in left} >= set(places[-newest:])
    # The record that readers take of a place is the greatest: it must be intact to count.
    greatest = {one.place: one for one in there}
    whole = [place for place in places if greatest[place] not in broken]
    assert {one.place for one in left} >= set(whole[-newest:])
    assert not set(doomed) & pruned


@given(histories, st.integers(2, 5), st.none() | st.integers(1, 4))
def test_a_second_prune_finds_nothing_more(commits: list[Order], newest: int, every: int | None) -> None:
    first = choose(commits, set(), newest=newest, every=every, whole=always)
    assert choose(commits, first, newest=newest, every=every, whole=always) == []


@given(histories, st.integers(1, 5), st.integers(1, 4))
def test_what_stays_of_the_older_ones_stays_for_good(commits: list[Order], more: int, every: int) -> None:
    first = choose(commits, set(), newest=2, every=every, whole=always)
    longer = [*commits, *(Order(9, 1, number, "d" * 12) for number in range(1, more + 1))]
    places = sorted({one.place for one in commits})
    older = {one for one in commits if one not in first and one.place not in places[-2:]}
    assert not older & set(choose(longer, first, newest=2, every=every, whole=always))


def test_an_execution_is_dead_once_the_two_newest_saves_are_of_later_ones() -> None:
    commits = [order(1, 1), order(2, 1), order(3, 1), order(3, 2)]
    assert dead_below(commits, set()) == 3
    assert dead_below(commits[:3], set()) == 2
    assert dead_below(commits[:1], set()) == 0
    assert dead_below(commits, {commits[3]}) == 2
    assert dead_below([order(2, 1), order(3, 1), order(3, 1, "b")], set()) == 2
