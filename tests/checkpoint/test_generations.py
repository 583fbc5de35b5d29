"""Generations: what counts as new content under an old name, and what comes first of several new saves."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dispatch_agent.checkpoint import scan
from dispatch_agent.checkpoint.generations import Fingerprint, Place, fingerprint, in_order, is_new
from dispatch_agent.checkpoint.save import Signal, Snapshot

PARTS = st.sets(st.text("abcdef", min_size=1, max_size=2), max_size=6).map(lambda s: Fingerprint(tuple(sorted(s))))


@given(PARTS, PARTS, PARTS)
def test_being_a_part_is_a_strict_order(a: Fingerprint, b: Fingerprint, c: Fingerprint) -> None:
    assert not a.is_part_of(a)
    assert not (a.is_part_of(b) and b.is_part_of(a))
    if a.is_part_of(b) and b.is_part_of(c):
        assert a.is_part_of(c)


@given(PARTS, st.lists(PARTS, max_size=4))
def test_a_save_that_only_lost_files_is_never_new(whole: Fingerprint, before: list[Fingerprint]) -> None:
    quiet = Signal("hf", "", 1)
    places = [Place(n, b"s", quiet, content) for n, content in enumerate([*before, whole], 1)]
    for length in range(len(whole.parts)):
        for left in itertools.combinations(whole.parts, length):
            assert not is_new(quiet, Fingerprint(left), places)
    assert not is_new(quiet, whole, places)
    assert is_new(quiet, Fingerprint((*whole.parts, "new")), places)


def test_a_mark_counts_once_for_a_name() -> None:
    content = Fingerprint(("1",))
    places = [Place(1, b"s", Signal("dcp", "m1", 1), content), Place(2, b"s", Signal("dcp", "m2", 2), content)]
    assert not is_new(Signal("dcp", "m1", 1), Fingerprint(("2",)), places)
    assert not is_new(Signal("dcp", "m2", 2), content, places)
    assert is_new(Signal("dcp", "m3", 3), content, places)
    assert is_new(Signal("dcp", "m1", 1), content, [])


def test_a_b_a_are_three_generations() -> None:
    quiet = Signal("settle", "", 1)
    a, b = Fingerprint(("1", "2")), Fingerprint(("1", "3"))
    places: list[Place] = []
    for n, content in enumerate((a, b, a), 1):
        assert is_new(quiet, content, places)
        places.append(Place(n, b"s", quiet, content))


def test_a_fingerprint_outlives_chown_chmod_a_new_inode_and_folder_times(exec_folder: Path) -> None:
    save = exec_folder / "s"
    (save / "sub").mkdir(parents=True)
    (save / "sub" / "w").write_bytes(b"x")
    (save / "l").symlink_to("sub/w")
    seen = fingerprint(scan.snapshot(exec_folder, b"s"))
    (save / "sub" / "w").chmod(0o660)
    os.utime(save, (5, 5))
    os.utime(save / "sub", (5, 5))
    times = (save / "sub" / "w").stat()
    (save / "sub" / "w").rename(save / "old")
    (save / "sub" / "w").write_bytes((save / "old").read_bytes())
    (save / "old").unlink()
    os.utime(save / "sub" / "w", ns=(0, times.st_mtime_ns))
    assert fingerprint(scan.snapshot(exec_folder, b"s")) == seen
    (save / "l").unlink()
    assert fingerprint(scan.snapshot(exec_folder, b"s")).is_part_of(seen)
    (save / "l").symlink_to("sub")
    other = fingerprint(scan.snapshot(exec_folder, b"s"))
    assert other != seen
    assert not other.is_part_of(seen)


def test_size_mtime_and_path_each_make_another_fingerprint(built: Callable[..., Snapshot]) -> None:
    saves = [built("s", {"a": (5, 10)}), built("s", {"a": (6, 10)}), built("s", {"a": (5, 11)}), built("s", {"b": 5})]
    assert len({fingerprint(save) for save in saves}) == 4


CANDIDATES = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=2),
        st.builds(
            Signal,
            st.just("marker"),
            st.just("m"),
            st.integers(0, 5),
            st.none() | st.integers(1, 6),
        ),
        st.just(None),
    ),
    max_size=7,
    unique_by=lambda c: c[0],
)


@given(CANDIDATES, st.randoms())
def test_order_is_total_and_does_not_depend_on_how_the_saves_were_listed(candidates: list, random) -> None:  # type: ignore[no-untyped-def, type-arg]
    ordered = in_order(candidates)
    shuffled = list(candidates)
    random.shuffle(shuffled)
    assert in_order(shuffled) == ordered
    numbers = [signal.sequence for _, signal, _ in ordered if signal.sequence is not None]
    assert numbers == sorted(numbers)
    times = [(signal.newest_ns, name) for name, signal, _ in ordered if signal.sequence is None]
    assert times == sorted(times)


def test_numbers_win_over_times_and_times_over_names() -> None:
    def signal(newest: int, sequence: int | None = None) -> Signal:
        return Signal("marker", "m", newest, sequence)

    late_first = [(b"a", signal(30, 1), 0), (b"b", signal(10, 2), 0), (b"c", signal(20), 0), (b"d", signal(40), 0)]
    assert [name for name, _, _ in in_order(late_first)] == [b"c", b"a", b"b", b"d"]
    assert [name for name, _, _ in in_order([(b"b", signal(1), 0), (b"a", signal(1), 0)])] == [b"a", b"b"]
