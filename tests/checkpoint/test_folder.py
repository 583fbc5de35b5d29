"""`.dispatch/`: whose folder it is, the order of its saves, its lock. The same after a crash and with two at once."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dispatch_agent.checkpoint import folder as own
from dispatch_agent.checkpoint import records
from dispatch_agent.checkpoint.folder import Fingerprint
from dispatch_agent.checkpoint.save import Signal
from dispatch_agent.errors import AgentError, Conflict, EpochCollision, IntegrityError

GREATEST = 18_000_000 * 10**12 + 999_999 * 10**6 + 999_999


def marked(mark: str, newest: int = 1, sequence: int | None = None) -> Signal:
    return Signal("marker", mark, newest, sequence, "tok")


def test_an_execution_is_written_once_and_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "exec" / "a"
    assert own.read_execution(folder) is None
    first = own.ensure(folder, job="j", epoch=GREATEST, attempt="a", folder_id="one")
    assert first == own.read_execution(folder)
    again = own.ensure(folder, job="j", epoch=GREATEST, attempt="a", folder_id="two")
    assert again.folder_id == "one"
    assert json.loads((folder / ".dispatch" / "execution.json").read_text())["epoch"] == str(GREATEST)
    assert not [name for name in os.listdir(folder / ".dispatch") if name.startswith(".tmp")]


def test_one_epoch_under_two_attempts_is_a_collision_and_another_epoch_a_conflict(exec_folder: Path) -> None:
    own.ensure(exec_folder, job="j", epoch=7, attempt="a", folder_id="f")
    with pytest.raises(EpochCollision, match="attempt 'a' of epoch 7, and this is attempt 'b'"):
        own.ensure(exec_folder, job="j", epoch=7, attempt="b", folder_id="f")
    with pytest.raises(Conflict, match="own exec/<attempt> folder"):
        own.ensure(exec_folder, job="j", epoch=8, attempt="a", folder_id="f")
    with pytest.raises(Conflict, match="job 'j'"):
        own.ensure(exec_folder, job="k", epoch=7, attempt="a", folder_id="f")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 2}', '{"format": 1, "epoch": 5}', "\xff"])
def test_a_damaged_execution_record_is_never_taken_for_none(exec_folder: Path, text: str) -> None:
    own.ensure(exec_folder, job="j", epoch=7, attempt="a", folder_id="f")
    (exec_folder / ".dispatch" / "execution.json").write_text(text, "latin-1")
    with pytest.raises(IntegrityError, match=r"execution\.json"):
        own.read_execution(exec_folder)


def test_places_are_given_in_order_and_kept(exec_folder: Path) -> None:
    a, b = Fingerprint(("1",)), Fingerprint(("2",))
    two = own.place(exec_folder, [(b"s\xff", marked("m1", 9), a), (b"t", marked("m1", 5), b)])
    assert [(p.number, p.name) for p in two] == [(2, b"s\xff"), (1, b"t")]
    assert own.place(exec_folder, [(b"s\xff", marked("m1", 9), a)]) == [two[0]]
    (third,) = own.place(exec_folder, [(b"s\xff", marked("m2", 10), b)])
    assert third.number == 3
    assert own.place(exec_folder, [(b"s\xff", marked("m1", 9), a)]) == [two[0]]
    everything = own.places(exec_folder)
    assert everything == [two[1], two[0], third]
    assert everything[1].signal == marked("m1", 9)
    assert own.places(exec_folder, everything[:1]) == everything
    assert own.place(exec_folder, []) == []


def test_a_save_that_loses_files_keeps_its_last_place(exec_folder: Path) -> None:
    quiet = Signal("hf", "", 5)
    (whole,) = own.place(exec_folder, [(b"s", quiet, Fingerprint(("1", "2", "3")))])
    for left in (("1", "3"), ("3",), ()):
        assert own.place(exec_folder, [(b"s", quiet, Fingerprint(left))]) == [whole]
    assert own.place(exec_folder, [(b"s", quiet, Fingerprint(("1", "4")))])[0].number == 2


def test_a_gap_or_a_damaged_record_in_the_order_is_an_integrity_error(exec_folder: Path) -> None:
    own.place(exec_folder, [(name, marked("m"), Fingerprint(("1",))) for name in (b"a", b"b", b"c")])
    order = exec_folder / ".dispatch" / "order"
    whole = (order / "000002").read_bytes()
    (order / "000002").unlink()
    with pytest.raises(IntegrityError, match="no record 2"):
        own.places(exec_folder)
    for damaged in (b"", whole[:-5], whole.replace(b'"m"', b"7"), whole.replace(b'"b"', b'"a/b"')):
        (order / "000002").write_bytes(damaged)
        with pytest.raises(IntegrityError, match="000002"):
            own.places(exec_folder)


PLACER = """
import json, sys
from pathlib import Path
from dispatch_agent.checkpoint import folder as own
from dispatch_agent.checkpoint.save import Signal
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
names = [f"s{n}".encode() for n in range(40)]
names = names[seed:] + names[:seed]
got = {}
for start in range(0, 40, 5):
    chosen = [(n, Signal("marker", "m", int(n[1:])), own.Fingerprint((n.decode(),))) for n in names[start:start + 5]]
    for place in own.place(folder, chosen):
        got[place.name.decode()] = place.number
print(json.dumps(got))
"""


def test_publishers_at_once_give_every_save_the_same_place(exec_folder: Path, environment: dict[str, str]) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PLACER, str(exec_folder), str(seed)], env=environment, stdout=subprocess.PIPE
        )
        for seed in (0, 3, 20)
    ]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in running]
    assert answers[0] == answers[1] == answers[2]
    assert sorted(answers[0].values()) == list(range(1, 41))
    assert [place.name.decode() for place in own.places(exec_folder)] == sorted(answers[0], key=answers[0].__getitem__)


@pytest.mark.parametrize("seed", range(10))
def test_a_publisher_killed_at_any_moment_leaves_whole_records(
    exec_folder: Path, environment: dict[str, str], seed: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PLACER, str(exec_folder), "0"], env=environment, stdout=subprocess.DEVNULL
    )
    order = exec_folder / ".dispatch" / "order"
    deadline = time.monotonic() + 30
    while not order.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(seed * 0.004)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = own.places(exec_folder)
    after = own.place(exec_folder, [(b"s39", marked("m"), Fingerprint(("s39",)))])
    assert own.places(exec_folder)[: len(before)] == before
    assert after[0] in own.places(exec_folder)


def test_only_one_holds_the_lock_until_it_is_given_back_or_its_holder_dies(
    exec_folder: Path, environment: dict[str, str]
) -> None:
    first, second = own.lock(exec_folder, "store"), own.lock(exec_folder, "store")
    assert first.acquire()
    assert first.acquire()
    assert not second.acquire()
    first.release()
    with second:
        assert second.held
    program = (
        "import sys,time; from pathlib import Path; from dispatch_agent.checkpoint import folder as f\n"
        'l = f.lock(Path(sys.argv[1]), "store"); print(l.acquire(), flush=True); time.sleep(60)'
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(exec_folder)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "True\n"
    assert not first.acquire()
    child.kill()
    child.communicate()
    assert first.acquire()
    first.release()


def test_a_filesystem_without_locks_does_not_stop_a_publisher(
    exec_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with own.lock(exec_folder, "store") as lock:
        assert lock.held


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "volume is full"),
        (errno.EROFS, "mounted read-only"),
        (errno.EACCES, "trainer's UID"),
        (errno.EDQUOT, "quota"),
    ],
)
def test_a_folder_that_cannot_be_written_says_why_and_what_to_do(
    exec_folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(AgentError, match=f"execution.json cannot be written: .*{hint}"):
        own.ensure(exec_folder, job="j", epoch=1, attempt="a", folder_id="f")
    assert os.listdir(exec_folder / ".dispatch") == []


def test_a_filesystem_without_hard_links_is_told(exec_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(AgentError, match="no hard links"):
        own.ensure(exec_folder, job="j", epoch=1, attempt="a", folder_id="f")


def test_a_full_volume_is_told_and_nothing_half_written_stays(
    exec_folder: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    program = (
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "try: folder.ensure(Path(sys.argv[1]), job='j', epoch=1, attempt='a', folder_id='f')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    assert python(program, exec_folder).stdout.startswith("AgentError")
    assert os.listdir(exec_folder / ".dispatch") == []
    assert own.read_execution(exec_folder) is None


def test_what_stands_in_the_place_of_our_folder_is_told(exec_folder: Path) -> None:
    (exec_folder / ".dispatch").write_text("")
    with pytest.raises(AgentError, match="no folder: dispatch-agent keeps its records there"):
        own.place(exec_folder, [(b"s", marked("m"), Fingerprint(()))])


@pytest.mark.root
def test_our_folder_belongs_to_whoever_owns_the_execution_s_folder(exec_folder: Path) -> None:
    os.chown(exec_folder, 1234, 2345)
    exec_folder.chmod(0o2770)
    own.place(exec_folder, [(b"s", marked("m"), Fingerprint(()))])
    for path in (".dispatch", ".dispatch/order"):
        status = (exec_folder / path).stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (1234, 2345, 0o2770)
    assert (exec_folder / ".dispatch" / "order" / "000001").stat().st_mode & 0o444 == 0o444


def test_a_record_is_replaced_whole(exec_folder: Path) -> None:
    path = exec_folder / "r"
    for value in range(3):
        records.replace(path, {"value": value}, 10**9 * value)
        assert (records.read(path) or {})["value"] == value
        assert path.stat().st_mtime_ns == 10**9 * value
