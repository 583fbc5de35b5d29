"""Two publishers at once: on one folder, of two executions, of one epoch under two attempts, of two folders of a rank.

Interleaved call by call: at every call k of the first one, the second one does all of its work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.protocol.checks import check_invariants, commits, facts
from tests.protocol.faults import Call, Do, faulty
from tests.protocol.jobs import Bench, Execution, small
from tests.protocol.writers import Launcher, Writer

from dispatch_agent.clock import SystemClock
from dispatch_agent.errors import AgentError, Conflict, EpochCollision, Fenced, OutcomeUnknown, StoreUnavailable
from dispatch_agent.publish import reader
from dispatch_agent.publish.publisher import Publisher
from dispatch_agent.store.memory import MemoryStore
from dispatch_agent.store.posix import PosixStore


def result(bench: Bench, execution: Execution) -> AgentError | None:
    try:
        return bench.run(execution)
    except AgentError as error:
        return error


def interleave(
    first: Callable[[Bench], Any], second: Callable[[Bench], Any], k: int
) -> tuple[MemoryStore, Any, Any, bool]:
    """Run `first`, and all of `second` before its k-th call: the store, both results, and whether k was reached."""
    real = MemoryStore()
    answers: list[Any] = []

    def hook(call: Call, do: Do) -> Any:
        if call.number == k:
            answers.append(second(Bench(real)))
        return do()

    store = faulty(real, hook)
    answer = first(Bench(store))
    return real, answer, answers[0] if answers else None, bool(answers)


def every_k(run: Callable[[int], bool]) -> int:
    """`run(k)` for k = 1, 2, … until it says that there is no such call; how many there were."""
    k = 1
    while run(k):
        k += 1
    return k - 1


def test_i9_two_publishers_of_one_folder_agree_on_every_place(place: Path) -> None:
    def run(k: int) -> bool:
        execution = Execution(place / str(k), 1)
        for name in ("step-1", "step-2", "step-3"):
            execution.save(name, small(name))
        store, one, two, reached = interleave(lambda b: result(b, execution), lambda b: result(b, execution), k)
        assert (one, two) == (None, None), f"call {k}"
        check_invariants(store)
        assert [(save, ordinal) for save, _, _, _, _, ordinal in facts(store)] == [
            ("step-1", 1),
            ("step-2", 2),
            ("step-3", 3),
        ], f"call {k}"
        return reached

    assert every_k(run) > 40


def test_i9_one_publisher_meets_a_generation_that_the_other_has_published(place: Path) -> None:
    """The first one has started and knows of no commit; the second publishes a generation, and the save changes."""

    def run(k: int) -> bool:
        execution = Execution(place / str(k), 1)
        execution.save("last", small("A"))

        def second(bench: Bench) -> None:
            assert bench.run(execution) is None
            execution.save("last", small("B"))

        store, one, _, reached = interleave(lambda b: result(b, execution), second, k)
        assert one is None, f"call {k}"
        assert Bench(store).run(execution) is None
        check_invariants(store)
        got = [(generation, ordinal) for _, generation, _, _, _, ordinal in facts(store)]
        assert got == ([(1, 1), (2, 2)] if reached else [(1, 1)]), f"call {k}"
        return reached

    assert every_k(run) > 15


def test_i9_two_publishers_of_one_folder_side_by_side(place: Path) -> None:
    """Two threads on a real folder, without the lock that usually keeps them apart."""
    for number in range(10):
        execution = Execution(place / str(number), 1)
        for name in range(4):
            execution.save(f"step-{name}", small(name))
        store = PosixStore(place / str(number) / "store")
        with ThreadPoolExecutor(2) as pool:
            errors = pool.map(lambda x: result(Bench(*x[:2]), x[2]), [(store, SystemClock(), execution)] * 2)
            assert list(errors) == [None, None]
        check_invariants(store)
        assert [ordinal for *_, ordinal in facts(store)] == [1, 2, 3, 4]


def test_i7_a_newer_execution_publishes_at_any_call_of_an_older_one(place: Path) -> None:
    def run(k: int) -> bool:
        old, new = Execution(place / str(k), 1), Execution(place / str(k), 2)
        old.save("step-8", small("old 8"))
        old.save("step-9", small("old 9"))
        new.save("step-3", small("new"))
        store, one, two, reached = interleave(lambda b: result(b, old), lambda b: result(b, new), k)
        assert two is None, f"call {k}"
        assert one is None or isinstance(one, Fenced), f"call {k}"
        check_invariants(store)
        stale = [record for record in commits(store) if record.order.epoch == old.epoch]
        assert len(stale) == 2 or isinstance(one, Fenced), f"call {k}: not published, and nobody was told"
        if reached:
            assert reader.newest(store).attempt == "a2", f"call {k}"
        return reached

    assert every_k(run) > 30


def test_i7_an_older_execution_publishes_at_any_call_of_a_newer_one(place: Path) -> None:
    def run(k: int) -> bool:
        old, new = Execution(place / str(k), 1), Execution(place / str(k), 2)
        old.save("step-9", small("old"))
        new.save("step-3", small("new"))
        store, one, two, reached = interleave(lambda b: result(b, new), lambda b: result(b, old), k)
        assert one is None, f"call {k}"
        assert two is None or isinstance(two, Fenced), f"call {k}"
        check_invariants(store)
        assert reader.newest(store).attempt == "a2", f"call {k}"
        return reached

    every_k(run)


def test_i5_one_epoch_under_two_attempts_is_refused_before_any_data(place: Path) -> None:
    def run(k: int) -> bool:
        one, two = Execution(place / str(k), 1, "first"), Execution(place / str(k), 1, "second")
        one.save("step-1", small("first"))
        two.save("step-1", small("second"))
        store, first, second, reached = interleave(lambda b: result(b, one), lambda b: result(b, two), k)
        if reached:
            refused, went_on = (first, second) if isinstance(first, EpochCollision) else (second, first)
            assert isinstance(refused, EpochCollision), f"call {k}"
            assert went_on is None, f"call {k}"
            loser = "first" if refused is first else "second"
            assert not [item.key for item in store.list("") if f"-{loser}/" in item.key], f"call {k}"
        check_invariants(store)
        assert len(commits(store)) == 1
        return reached

    every_k(run)


def test_i5_the_command_exits_31_and_has_written_nothing(place: Path, launcher: Launcher) -> None:
    store = PosixStore(place / "store")
    one, two = Execution(place / "one", 1, "first"), Execution(place / "two", 1, "second")
    one.save("step-1", small("first"))
    assert Bench(store, SystemClock()).run(one) is None
    before = {item.key for item in store.list("")}
    path = two.write("step-1", small("second"))
    writer = Writer(
        log=str(place / "log"), environment=two.environment, argv=["publish", str(path), "--dest", str(place / "store")]
    )
    assert launcher.run(writer) == EpochCollision.exit_code
    assert {item.key for item in store.list("")} == before


def test_i7_a_later_folder_of_the_same_rank_fences_the_earlier_one(place: Path) -> None:
    def run(k: int) -> bool:
        earlier, later = Execution(place / "earlier" / str(k), 1), Execution(place / "later" / str(k), 1)
        earlier.save("step-8", small("8"))
        earlier.save("step-9", small("9"))
        later.save("step-1", small("1"))
        store, one, two, reached = interleave(lambda b: result(b, earlier), lambda b: result(b, later), k)
        claims = sorted(item.key for item in store.list(f"claims/{earlier.epoch:020d}"))
        check_invariants(store)
        if reached and two is None and reader.newest(store).save == "step-1":
            # The later folder has the greater term. What the earlier one still committed lies below it.
            assert reader.newest(store).order.term == 2
            assert one is None or isinstance(one, Fenced), f"call {k}"
            assert isinstance(result(Bench(store), earlier), Fenced | type(None))
            earlier.save("step-10", small("10"))
            before = commits(store)
            assert isinstance(result(Bench(store), earlier), Fenced), f"call {k}"
            assert commits(store) == before
        elif reached:
            # It came first, before the earlier one had its term, and fences nobody but is fenced itself.
            assert reader.newest(store).order.term == 2
            assert len(claims) == 3
        return reached

    assert every_k(run) > 30


def test_i7_the_command_on_a_fenced_folder_exits_30(place: Path, launcher: Launcher) -> None:
    url = str(place / "store")
    earlier, later = Execution(place / "earlier", 1), Execution(place / "later", 1)
    for execution in (earlier, later):
        execution.save("step-1", small(execution.root))
        assert Bench(PosixStore(url), SystemClock()).run(execution) is None
    path = earlier.write("step-2", small("2"))
    writer = Writer(log=str(place / "log"), environment=earlier.environment, argv=["publish", str(path), "--dest", url])
    assert launcher.run(writer) == Fenced.exit_code
    assert [record.save for record in commits(PosixStore(url))] == ["step-1", "step-1"]


def test_i3_on_a_weak_store_two_folders_never_share_a_term_also_after_a_restart(place: Path) -> None:
    """The store cannot refuse the second claim of a term, so one of them or both see it, and stop at every start."""

    def run(k: int) -> bool:
        one, two = Execution(place / "one" / str(k), 1), Execution(place / "two" / str(k), 1)
        one.save("step-1", small("one"))
        two.write("step-1", small("two"))
        real = MemoryStore()
        other: list[Publisher] = []

        def hook(call: Call, do: Do) -> Any:
            if call.number == k:
                other.append(Bench(real, weak=True).publisher(two))
            return do()

        for store in (faulty(real, hook), real):
            error = result(Bench(store, weak=True), one)
            assert error is None or isinstance(error, Fenced | Conflict), f"call {k}: {error}"
        two.save("step-1", small("two"))
        for publisher in other:
            with contextlib.suppress(Fenced):
                publisher.run()
        check_invariants(real, pointer_is_current=False)
        return bool(other)

    assert every_k(run) > 15


def test_i8_a_fenced_publisher_that_has_found_out_about_its_commit_is_not_unsure(place: Path) -> None:
    """Its commit was answered, the look for a seal was not; then a newer execution commits."""
    old, new = Execution(place, 1), Execution(place, 2)
    old.save("step-1", small("old 1"))
    old.save("step-2", small("old 2"))
    store = MemoryStore()
    looks: list[Call] = []

    def hook(call: Call, do: Do) -> Any:
        if call.key.endswith("sealed.json"):
            looks.append(call)
            if len(looks) == 1:
                msg = "no answer (by the test)"
                raise StoreUnavailable(msg)
            if len(looks) == 2:
                new.save("step-1", small("new"))
                assert Bench(store).run(new) is None
        return do()

    ended = Bench(faulty(store, hook)).run(old)
    assert len(looks) > 1
    assert isinstance(ended, Fenced)


def test_i8_a_fenced_publisher_whose_commit_may_still_land_is_unsure(place: Path) -> None:
    """Its commit had no answer; before it is sent again a newer execution commits."""
    old, new = Execution(place, 1), Execution(place, 2)
    old.save("step-1", small("old"))
    store = MemoryStore()
    sent: list[Call] = []

    def hook(call: Call, do: Do) -> Any:
        if call.key.startswith(f"commits/{old.epoch:020d}/"):
            sent.append(call)
            if len(sent) <= 12:
                msg = "no answer (by the test)"
                raise StoreUnavailable(msg)
            if len(sent) == 13:
                new.save("step-1", small("new"))
                assert Bench(store).run(new) is None
        return do()

    assert isinstance(Bench(faulty(store, hook)).run(old), OutcomeUnknown)
