"""From what a watch is at to its answers: started, live, ready; and how long it may drain. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FLOOR = 2.0
"""Seconds that a kubelet leaves a sidecar even where the trainer used up the whole grace period."""
MARGIN = 1.0
"""Seconds kept back from what is left: to break off, say so and end before the kill."""
QUIET = 60.0
"""Seconds after which a pass in which nothing moves may be waiting for a store that is away: a network that swallows
packets fails no request for minutes."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a watch is at, as of one moment. Times are in seconds.

    `failure` and `standing_by`: why the last pass failed, or found nothing to do yet; empty if neither. `unpublished`:
    the complete saves that the last pass left, since they could not be stored. `still`: how
    long nothing has moved in the pass under way (a file read, a piece sent, another pass begun), None between passes.
    `rank` is that of a watch that stands by for rank 0 on a shared volume, else None.
    """

    claimed: bool = False
    fenced: str = ""
    failure: str = ""
    standing_by: str = ""
    unpublished: tuple[str, ...] = ()
    still: float | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Yes or no, and one sentence that says why."""

    yes: bool
    sentence: str


STARTED = Answer(True, "started")
"""Whatever the store does: a start-up probe that fails keeps the trainer from starting."""


def live(facts: Facts, stall_timeout: float) -> Answer:
    """Whether what is under way moves. Waiting, standing by, fenced and a store that is away are all alive."""
    if facts.still is not None and facts.still > stall_timeout:
        return Answer(
            False,
            f"stalled: nothing moved for {facts.still:.0f} s, neither a read nor a write; more than {stall_timeout:g} "
            f"s (--stall-timeout) is taken for an upload that stopped",
        )
    return Answer(True, "live")


def ready(facts: Facts) -> Answer:
    """Whether what the trainer completes gets published."""
    if facts.rank is not None:
        return Answer(True, f"ready: rank {facts.rank} stands by, rank 0 publishes for all")
    quiet = facts.still is not None and facts.still > QUIET
    reasons = (
        (facts.fenced, f"fenced: {facts.fenced}"),
        (facts.failure, f"the last pass failed: {facts.failure}"),
        (facts.standing_by, f"standing by: {facts.standing_by}"),
        (not facts.claimed, "not claimed yet: the store was not asked, or has not answered"),
        (facts.unpublished, f"complete and not published, see the log for why: {', '.join(facts.unpublished)}"),
        (quiet, f"nothing moved for {facts.still or 0:.0f} s: the store may be away"),
    )
    return next((Answer(False, sentence) for applies, sentence in reasons if applies), Answer(True, "ready"))


def drain_bound(grace: float, ending_for: float | None, cap: float | None) -> float:
    """Seconds to drain in, of a grace period of `grace`: what is left of it, less a margin; `cap` at most.

    `ending_for`: how long ago the pod began to end, None if nothing said so (then the trainer ended by itself, and all
    of the grace period is left).
    """
    left = max(FLOOR, grace - (ending_for or 0.0)) - MARGIN
    return left if cap is None else min(left, cap)
