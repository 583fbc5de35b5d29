"""Watching: woken by what concerns saves, by nothing of our own doing, and never the worse for lost events."""

from __future__ import annotations

import logging
import shutil
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dispatch_agent.checkpoint import folder as own
from dispatch_agent.checkpoint import scan, watch
from dispatch_agent.checkpoint.reading import SourceFile, path_of
from dispatch_agent.checkpoint.save import Signal
from dispatch_agent.checkpoint.watch import Watcher, filesystem_kind
from dispatch_agent.clock import SystemClock

MOUNTS = """\
22 1 0:20 / / rw,relatime - overlay overlay rw
30 22 0:50 / /mnt/ck rw - nfs4 server:/x rw
31 22 0:51 / /mnt/ck/local\\040disk rw - ext4 /dev/sdb rw
32 22 0:52 / /mnt/gcs rw - fuse.gcsfuse gcsfuse rw
33 22 0:53 / /mnt/over rw - ext4 /dev/sdc rw
34 22 0:54 / /mnt/over rw - fuse.juicefs JuiceFS:v rw
35 22 0:55 / /mnt/lustre rw shared:1 master:2 - lustre mgs:/l rw
short line
"""


class Woken:
    """Counts, and says whether a wake came within a time."""

    def __init__(self) -> None:
        self.count = 0
        self.said: list[str] = []
        self._came = threading.Condition()

    def __call__(self) -> None:
        with self._came:
            self.count += 1
            self._came.notify_all()

    def within(self, seconds: float) -> bool:
        with self._came:
            before = self.count
            return self._came.wait_for(lambda: self.count > before, seconds)

    def settle(self) -> None:
        while self.within(0.3):
            pass


@pytest.fixture
def woken() -> Woken:
    return Woken()


@pytest.fixture
def watching(exec_folder: Path, woken: Woken) -> Iterator[Callable[..., Watcher]]:
    started: list[Watcher] = []

    def start(folder: Path = exec_folder, **options: object) -> Watcher:
        watcher = Watcher(folder, woken, clock=SystemClock(), said=woken.said.append, **options)  # type: ignore[arg-type]
        watcher.start()
        started.append(watcher)
        woken.settle()
        return watcher

    yield start
    for watcher in started:
        watcher.stop()


@pytest.mark.parametrize(
    ("path", "kind", "local"),
    [
        ("/x", "overlay", True),
        ("/mnt/ck/a/b", "nfs4", False),
        ("/mnt/ckpt", "overlay", True),
        ("/mnt/ck/local disk/exec", "ext4", True),
        ("/mnt/gcs", "fuse.gcsfuse", False),
        ("/mnt/over/x", "fuse.juicefs", False),
        ("/mnt/lustre/x", "lustre", False),
    ],
)
def test_the_mount_that_holds_a_path_tells_whether_events_can_be_believed(path: str, kind: str, local: bool) -> None:
    assert filesystem_kind(Path(path), MOUNTS) == (kind, local)


def test_this_machine_s_disk_and_memory_are_told_from_what_is_unknown(tmp_path: Path) -> None:
    assert filesystem_kind(tmp_path / "not" / "there").local
    assert filesystem_kind(Path("/proc/self")) == ("proc", False)
    assert filesystem_kind(tmp_path, "") == ("unknown", False)


def test_a_trainer_s_write_rename_link_and_removal_each_wake(
    exec_folder: Path, watching: Callable[..., Watcher], woken: Woken
) -> None:
    assert not watching().polling
    for act in (
        (exec_folder / "step-1").mkdir,
        lambda: (exec_folder / "step-1" / "a").write_text("x"),
        lambda: (exec_folder / "step-1" / "a").rename(exec_folder / "step-1" / "b"),
        lambda: (exec_folder / "last").symlink_to("step-1"),
        lambda: (exec_folder / "step-1").rename(exec_folder / "step-2"),
        lambda: (exec_folder / "step-2" / "b").write_text("y"),
        lambda: shutil.rmtree(exec_folder / "step-2"),
    ):
        before = woken.count
        act()
        assert woken.count > before or woken.within(5)
        woken.settle()


def test_our_own_looking_reading_and_placing_wake_nobody(
    exec_folder: Path, watching: Callable[..., Watcher], woken: Woken
) -> None:
    (exec_folder / "e.ckpt").write_bytes(b"x" * 100)
    own.ensure(exec_folder, job="j", epoch=1, attempt="a", folder_id="f")
    watching()
    before = woken.count
    for n in range(3):
        look = scan.survey(exec_folder)
        with SourceFile(path_of(exec_folder, look.saves[0], look.saves[0].root), look.saves[0].root) as source:
            source.read(100)
        own.place(exec_folder, [(b"e.ckpt", Signal("x", str(n), 1), own.fingerprint(look.saves[0]))])
        with own.lock(exec_folder, "store"):
            pass
    assert not woken.within(0.7)
    assert woken.count - before <= 2  # `.dispatch` itself may have been touched; never once per act


def test_a_marker_wakes(exec_folder: Path, watching: Callable[..., Watcher], woken: Woken) -> None:
    (exec_folder / "s").write_text("x")
    own.mark_complete(exec_folder / "s")
    watching()
    before = woken.count
    own.mark_complete(exec_folder / "s")
    assert woken.count > before or woken.within(5)


def test_a_folder_that_comes_goes_and_comes_again_is_watched(
    tmp_path: Path, watching: Callable[..., Watcher], woken: Woken
) -> None:
    folder = tmp_path / "exec" / "later"
    watching(folder)
    for _ in range(2):
        folder.mkdir(parents=True)
        assert woken.within(5)
        woken.settle()
        before = woken.count
        (folder / "a").write_text("x")
        assert woken.count > before or woken.within(5)
        shutil.rmtree(folder)
        time.sleep(1.2)
        woken.settle()
    assert woken.said == []


def test_polling_wakes_by_time_and_says_why_once(
    exec_folder: Path, woken: Woken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "filesystem_kind", lambda _path: watch.Filesystem("nfs4", local=False))
    watcher = Watcher(exec_folder, woken, clock=SystemClock(), poll=0.05, said=woken.said.append)
    watcher.start()
    try:
        assert watcher.polling
        assert woken.within(5)
        assert woken.within(5)
    finally:
        watcher.stop()
    assert len(woken.said) == 1
    assert "polled every 0.05 s: its filesystem is nfs4" in woken.said[0]
    before = woken.count
    time.sleep(0.2)
    assert woken.count == before


EXHAUST = """
folder_, taken, said, woken = Path(sys.argv[1]), [], [], []
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
while (descriptor := libc.inotify_init()) >= 0:
    taken.append(descriptor)
watcher = watch.Watcher(folder_, lambda: woken.append(1), clock=SystemClock(), poll=0.05, said=said.append)
watcher.start(); time.sleep(0.3); watcher.stop()
print(len(taken) > 10, watcher.polling, len(woken) > 2, threading.active_count(), said)
"""


@pytest.mark.root
def test_a_node_whose_inotify_instances_are_used_up_is_polled(
    exec_folder: Path, tmp_path: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for path in (tmp_path, *tmp_path.parents):
        if not path.stat().st_mode & 0o001:
            path.chmod(0o755)
    ran = python(EXHAUST, exec_folder, uid=23456)
    assert ran.stdout.startswith("True True True 1 ")
    assert "max_user_instances" in ran.stdout
    assert ran.stderr == ""


def test_a_node_whose_inotify_watches_are_used_up_is_polled(
    exec_folder: Path, woken: Woken, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "inotify watch limit reached")

    monkeypatch.setattr("watchdog.observers.inotify.InotifyObserver.start", refuse)
    watcher = Watcher(exec_folder, woken, clock=SystemClock(), said=woken.said.append)
    watcher.start()
    watcher.stop()
    assert watcher.polling
    assert "max_user_watches" in woken.said[0]


def test_a_queue_that_overflowed_wakes_and_is_said_once(
    exec_folder: Path, watching: Callable[..., Watcher], woken: Woken
) -> None:
    watching()
    before = woken.count
    for _ in range(3):
        logging.getLogger("watchdog.observers.inotify_c").warning("Inotify queue overflowed; events were lost")
    assert woken.count == before + 3
    assert woken.said == [f"watching {exec_folder}: Inotify queue overflowed; events were lost; it is looked at anyway"]


def test_a_watch_whose_thread_died_is_made_again(
    exec_folder: Path, watching: Callable[..., Watcher], woken: Woken
) -> None:
    watcher = watching()
    assert watcher._observer is not None
    for emitter in watcher._observer.emitters:
        emitter.stop()
    assert woken.within(5)
    woken.settle()
    before = woken.count
    (exec_folder / "a").write_text("x")
    assert woken.count > before or woken.within(5)


def test_a_quick_deep_tree_neither_floods_nor_kills(
    exec_folder: Path, watching: Callable[..., Watcher], woken: Woken
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        watching()
        for n in range(300):
            (exec_folder / f"s{n}" / "a" / "b").mkdir(parents=True)
            (exec_folder / f"s{n}" / "a" / "b" / "w").touch()
        woken.settle()
    assert not caught
    before = woken.count
    (exec_folder / "s299" / "a" / "b" / "x").touch()
    assert woken.count > before or woken.within(5)
