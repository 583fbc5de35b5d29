"""Whole publications to a real S3 server behind a front that misbehaves at request k, in its own words.

Covered: (ANSWERS x every kind of request, CONDITIONAL x conditional writes), once where the library tries again, and
three times in a row where it does not; at seeded k, at every k with --exhaustive. The requests of a multipart upload by
themselves. Writes that the front delivers when their sender has died, or when its successor has committed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.protocol.checks import commits, facts
from tests.protocol.faults import Call, Dead, Do, Hook, through
from tests.protocol.stories import Story, codes
from tests.servers import Bucket
from tests.store.front import (
    ANSWERS,
    CONDITIONAL,
    READ_TIMEOUT,
    Behaviour,
    Chosen,
    Held,
    Request,
    front,
    is_conditional,
)

from dispatch_agent.errors import AgentError, Fenced
from dispatch_agent.publish import reader
from dispatch_agent.store.base import Store
from dispatch_agent.store.memory import MemoryStore
from dispatch_agent.store.opening import open_store

pytestmark = pytest.mark.xdist_group("seaweed")
FACES = {**ANSWERS, **CONDITIONAL}
DENIED = {name for name in FACES if "Token" in name or "Skewed" in name}
# How often the library sends one request, the faults more than one in a row, and how many k CI takes.
TIMES = {"once, and the library tries again": (2, 0, 1), "in a row, and it does not": (1, 2, 2)}


def quick(attempts: int) -> dict[str, Any]:
    retries = {"mode": "standard", "total_max_attempts": attempts}
    return {"config_kwargs": {"connect_timeout": 2, "read_timeout": READ_TIMEOUT, "retries": retries}}


@contextmanager
def opened(bucket: Bucket, prefix: str, attempts: int) -> Iterator[Store]:
    store = open_store(f"{bucket.url}/{prefix}", {**bucket.options, **quick(attempts)})
    try:
        yield store
    finally:
        store.close()


@contextmanager
def behind(
    bucket: Bucket, place: Path, behave: Behaviour, *, attempts: int = 1, hook: Hook = through
) -> Iterator[Story]:
    """A story whose publishers reach the server through the front, and which looks at it directly."""
    prefix = os.urandom(6).hex()
    with (
        front(bucket.endpoint, behave) as endpoint,
        opened(bucket, prefix, 4) as real,
        opened(bucket.behind(endpoint), prefix, attempts) as via,
    ):
        yield Story(real, place / prefix, hook, via=via)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The same story in memory, where nothing goes wrong."""
    story = Story(MemoryStore(), tmp_path_factory.mktemp("expected"))
    assert story.play() == [None, None]
    return story


@pytest.fixture(scope="module")
def requests(shared_bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> list[Request]:
    """Every request of the story."""
    nothing = Chosen(lambda _: False, ANSWERS["503 SlowDown"])
    with behind(shared_bucket, tmp_path_factory.mktemp("requests"), nothing) as story:
        assert story.play() == [None, None]
    return nothing.seen


def some(what: str, number: int, total: int, exhaustive: bool) -> Sequence[int]:
    """Seeded k of 1 to `total`, or all of them."""
    every = range(1, total + 1)
    return every if exhaustive else sorted(random.Random(what).sample(every, number))  # noqa: S311 (repeatable)


def check_the_end(story: Story, ends: list[AgentError | None], expected: Story, fault: str, what: str) -> None:
    """The exit codes are right, the invariants hold, and a fresh publisher finishes the job."""
    assert set(codes(ends)) <= ({0, 11, 33} if fault in DENIED else {0}), f"{what}: {ends}"
    story.check(pointer_is_current=False)
    story.restart()
    story.check()
    assert facts(story.real) == facts(expected.real), what


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("fault", FACES)
def test_i8_i9_whatever_the_server_says_at_any_request_nothing_is_lost(
    fault: str,
    times: str,
    shared_bucket: Bucket,
    place: Path,
    requests: list[Request],
    expected: Story,
    exhaustive: bool,
) -> None:
    attempts, more, number = TIMES[times]
    when = is_conditional if fault in CONDITIONAL else lambda _: True
    for k in some(f"{fault} {times}", number, sum(map(when, requests)), exhaustive):
        with behind(shared_bucket, place, Chosen(when, FACES[fault], k, more), attempts=attempts) as story:
            check_the_end(story, story.play(), expected, fault, f"{fault}, {times}, at request {k}")


LARGE = 17 << 20
"""Bytes: three parts."""


def of_multipart(request: Request) -> bool:
    return "uploads" in request.query or "uploadId" in request.query


@pytest.mark.parametrize("fault", ANSWERS)
def test_i2_a_multipart_upload_in_which_anything_fails_is_published_whole(
    fault: str, shared_bucket: Bucket, place: Path, exhaustive: bool
) -> None:
    """Five requests: begin, three parts, complete."""
    data = random.Random(fault).randbytes(LARGE)  # noqa: S311 (repeatable)
    for k in some(f"parts {fault}", 1, 5, exhaustive):
        what, faulty = f"{fault} at request {k}", Chosen(of_multipart, ANSWERS[fault], k)
        with behind(shared_bucket, place, faulty) as story:
            story.execution.save("large", data)
            assert codes([story.watch()]) == [0], what
            assert faulty.met > k, what
            story.check()
            (record,) = commits(story.real)
            assert record.size == LARGE, what


# --- delivered late ---------------------------------------------------------------------------------------------------


def is_write(request: Request) -> bool:
    return request.method in {"PUT", "POST", "DELETE"}


@pytest.mark.parametrize("moment", ["after its sender died", "after its successor committed"])
def test_i7_i9_a_request_that_the_network_delivers_late(
    moment: str, shared_bucket: Bucket, place: Path, requests: list[Request], expected: Story, exhaustive: bool
) -> None:
    for k in some(moment, 3, sum(map(is_write, requests)), exhaustive):
        held = Held()

        def dies(_: Call, do: Do, held: Held = held) -> Any:
            if held.holds:  # its other thread had not heard yet
                raise Dead
            try:
                return do()
            finally:
                if held.holds:
                    raise Dead

        with behind(shared_bucket, place, Chosen(is_write, held, k), hook=dies) as story:
            with pytest.raises(Dead):
                story.play()
            what = f"write {k}, {held.holds[0].key}, {moment}"
            if moment == "after its sender died":
                story.restart()
                held.deliver()
                story.look(what)
                story.then()
                story.restart()
                story.check()
                assert facts(story.real) == facts(expected.real), what
            else:
                successor = story.next(number=8)
                assert successor.play() == [None, None], what
                held.deliver()
                successor.check()
                assert reader.newest(story.real).attempt == "a8", what
                assert isinstance(story.next().watch(), Fenced), what
                successor.check()
