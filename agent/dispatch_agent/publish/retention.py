"""Which commits stay: the newest, one in so many of the older ones, and whatever somebody still needs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby

from dispatch_agent.publish.keys import Order

LEAST = 2
"""A store never has fewer saves after a prune: the newest, and the one to fall back to when it is damaged."""


def choose(
    commits: Sequence[Order],
    pruned: Collection[Order],
    *,
    newest: int,
    every: int | None,
    whole: Callable[[Order], bool],
    held: Collection[Order] = (),
) -> list[Order]:
    """The commits to prune, ascending. `commits` are all there ever were, ascending; `pruned` those that are gone.

    The `newest` places whose save is `whole` stay, and everything above the least of them. Of what is below, one place
    in `every` stays (none if None), counted over all places from one that stays to the next, so that the same ones stay
    at every later prune. What is `held` stays.
    """
    places = [list(group) for _, group in groupby(commits, key=lambda order: order.place)]
    there = [[order for order in place if order not in pruned] for place in places]
    doomed: list[Order] = []
    kept_at: int | None = None
    for number, place in enumerate(there[: _window(there, newest, whole)]):
        if not place:
            continue
        if every and (kept_at is None or number - kept_at >= every):
            kept_at = number
        elif not any(order in held for order in place):
            doomed += place
    return doomed


def dead_below(commits: Sequence[Order], pruned: Collection[Order]) -> int:
    """The epoch of the second newest place that is there: every execution below it is fenced for good. 0 if none is."""
    places = sorted({order.place for order in commits if order not in pruned})
    return places[-2][0] if len(places) > 1 else 0


def _window(places: Sequence[Sequence[Order]], newest: int, whole: Callable[[Order], bool]) -> int:
    """The index of the least of the `newest` whole places; 0 if there are fewer."""
    missing = newest
    for number in range(len(places) - 1, -1, -1):
        if places[number] and whole(places[number][-1]):
            missing -= 1
        if missing == 0:
            return number
    return 0
