"""What only a folder can get wrong: links, modes, full disks, crashes, several users and several processes."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.store.conftest import ChangedError, FileSource

from dispatch_agent.errors import SourceChanged, StoreDenied, StoreTooWeak, StoreUnavailable
from dispatch_agent.store import folders, kernel, keys, posix
from dispatch_agent.store.base import ConditionFailed, KeyMissing, Stored
from dispatch_agent.store.posix import PosixStore

NOBODY, SOMEBODY = 65534, 65533


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "store")


@pytest.fixture
def shared(tmpfs: Path) -> Path:
    """A folder that every user can reach, unlike pytest's own."""
    tmpfs.chmod(0o755)
    return tmpfs / "store"


def private_files(root: Path) -> list[Path]:
    return [path for path in root.rglob(".~dispatch*") if not path.name.endswith(".lock")]


def as_user(uid: int, act: Callable[[], object]) -> object:
    """What `act` returns or raises in a child process of another user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            result: object = act()
        except BaseException as error:  # noqa: BLE001 (handed to the parent)
            result = type(error)(str(error))
        os.write(writer, pickle.dumps(result))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        result = pickle.loads(pipe.read())  # noqa: S301 (from our own child)
    os.waitpid(child, 0)
    return result


# --- processes --------------------------------------------------------------------------------------------------------

RACER = """
import sys, time
from pathlib import Path
from dispatch_agent.store.base import ConditionFailed
from dispatch_agent.store.posix import PosixStore

root, me, go = Path(sys.argv[1]), sys.argv[2].encode(), Path(sys.argv[3])
store = PosixStore(root)
(go / sys.argv[2]).touch()
while not (go / "go").exists():
    time.sleep(0.001)
won = 0
for key in range(100):
    try:
        store.create(f"race/{key}", me)
        won += 1
    except ConditionFailed:
        pass
done = 0
while done < 25:
    count = store.read("count")
    try:
        store.replace("count", b"%d" % (int(count.data) + 1), count.version)
        done += 1
    except ConditionFailed:
        pass
print(won)
"""


def test_of_racing_processes_one_creates_each_key_and_no_replace_is_lost(store: PosixStore, tmp_path: Path) -> None:
    store.create("count", b"0")
    names = [str(number) for number in range(4)]
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, store.url, name, str(tmp_path)], stdout=subprocess.PIPE)
        for name in names
    ]
    while not all((tmp_path / name).exists() for name in names):
        time.sleep(0.01)
    (tmp_path / "go").touch()
    won = {name: int(racer.communicate()[0]) for name, racer in zip(names, racers, strict=True)}
    stand = [store.read(f"race/{key}").data.decode() for key in range(100)]
    assert won == {name: stand.count(name) for name in names}
    assert store.read("count").data == b"100"
    assert private_files(Path(store.url)) == []


WRITER = """
import os, sys
from dispatch_agent.store.posix import PosixStore

store = PosixStore(sys.argv[1])
number = 0
while True:
    number += 1
    store.create(f"commits/{number:06}.json", b"x" * 50000)
    store.put("latest.json", b"%06d" % number * 10000)
    print(number, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_only_whole_objects(store: PosixStore) -> None:
    for _ in range(5):
        shutil.rmtree(store.url, ignore_errors=True)
        with subprocess.Popen([sys.executable, "-c", WRITER, store.url], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            said = [writer.stdout.readline() for _ in range(20)][-1]
            writer.send_signal(signal.SIGKILL)
        listed = {found.key: found.size for found in store.list("")}
        latest = store.read("latest.json").data
        assert listed.pop("latest.json") == len(latest) == 60000
        assert latest == latest[:6] * 10000
        assert len(listed) >= int(said)
        assert set(listed.values()) == {50000}


def test_what_a_crash_left_is_not_listed_and_stands_in_nobodys_way(store: PosixStore) -> None:
    store.create("a/b", b"1")
    (Path(store.url) / "a/.~dispatch.draft.0123456789abcdef").write_bytes(b"half")
    assert list(store.list("")) == [Stored("a/b", 1)]
    store.delete("a/b")
    assert list(store.folders("")) == []
    store.create("a/b", b"2")


def test_what_a_crash_left_is_swept_where_nobody_writes(store: PosixStore) -> None:
    version = store.create("data/kept/object", b"1")
    store.replace("data/kept/object", b"2", version)
    store.create("other/object", b"1")
    root = Path(store.url)
    (root / "data/lost").mkdir()
    drafts = [root / name / ".~dispatch.draft.0123" for name in ("data/kept", "data/lost", "other")]
    for draft in drafts:
        draft.write_bytes(b"half")
    found = list(store.leftovers("data"))
    assert sorted(leftover.key.rpartition("/")[0] for leftover in found) == ["data/kept", "data/lost"]
    for leftover in found * 2:
        store.remove(leftover)
    assert private_files(root) == [drafts[2]]
    assert sorted(path.name for path in (root / "data").iterdir()) == ["kept"]
    assert store.read("data/kept/object").data == b"2"
    assert list(store.leftovers("no/such")) == []


# --- names and links --------------------------------------------------------------------------------------------------


def test_links_inside_the_store_lead_nowhere(store: PosixStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store.create("real/object", b"1")
    root = Path(store.url)
    (root / "folder").symlink_to(outside)
    (root / "real/file").symlink_to(outside / "secret")
    uses: list[Callable[[], object]] = [
        lambda: store.read("folder/secret"),
        lambda: store.read("real/file"),
        lambda: store.create("folder/new", b"1"),
        lambda: store.put("folder/new", b"1"),
        lambda: store.delete("folder/secret"),
        lambda: list(store.list("folder")),
        lambda: list(store.list("real")),
        lambda: store.folders("real"),
    ]
    for use in uses:
        with pytest.raises(StoreDenied, match="symbolic link"):
            use()
    assert [found.key for found in store.list("")] == ["real/object"]
    assert list(store.folders("")) == ["real"]
    store.put("real/file", b"replaces the link itself")
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"secret": b"secret"}


def test_the_root_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    PosixStore(tmp_path / "link").create("a", b"1")
    assert (tmp_path / "real/a").read_bytes() == b"1"


def test_a_fifo_does_not_hold_up_a_reader(store: PosixStore) -> None:
    store.create("a/b", b"1")
    os.mkfifo(Path(store.url) / "a/fifo")
    with pytest.raises(StoreUnavailable, match="no regular file"):
        store.read("a/fifo")
    assert [found.key for found in store.list("")] == ["a/b"]


def test_a_file_in_a_folders_place_is_named(store: PosixStore) -> None:
    store.create("a", b"1")
    with pytest.raises(StoreDenied, match="a file stands where a folder is needed"):
        store.create("a/b", b"1")
    with pytest.raises(KeyMissing):
        store.read("a/b")
    store.create("c/d", b"1")
    with pytest.raises(KeyMissing):
        store.read("c")


def test_raw_names_that_are_not_utf8_are_read_in_place(store: PosixStore) -> None:
    store.create("exec/ok", b"1")
    (Path(store.url) / "exec" / os.fsdecode(b"bad\xff.pt")).write_bytes(b"raw")
    key = os.fsdecode(b"exec/bad\xff.pt")
    assert store.read(key).data == b"raw"
    assert key in [found.key for found in store.list("exec")]
    assert os.fsencode(store.path(key)).endswith(b"exec/bad\xff.pt")


def test_the_link_for_people_moves_in_one_step(store: PosixStore) -> None:
    for name in ("one", "two"):
        store.create(f"data/{name}/file", name.encode())
        store.symlink("latest", f"data/{name}")
        assert os.readlink(store.path("latest")) == f"data/{name}"
        assert (Path(store.url) / "latest/file").read_bytes() == name.encode()
    store.symlink("deep/latest", "data/one")
    assert os.readlink(store.path("deep/latest")) == "../data/one"
    assert "latest" not in {found.key.partition("/")[0] for found in store.list("")}
    assert private_files(Path(store.url)) == []


# --- who may write ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_modes_follow_the_umask(store: PosixStore, umask: int, file: int, folder: int) -> None:
    before = os.umask(umask)
    try:
        store.create("a/b", b"1")
    finally:
        os.umask(before)
    assert stat.S_IMODE(store.path("a/b").stat().st_mode) == file
    assert stat.S_IMODE(store.path("a").stat().st_mode) == folder


def test_folders_take_over_who_may_write_to_the_root(store: PosixStore) -> None:
    root = Path(store.url)
    root.mkdir()
    root.chmod(0o2775)
    store.create("a/b/c", b"1")
    assert [stat.S_IMODE((root / name).stat().st_mode) for name in ("a", "a/b", "a/b/c")] == [0o2775, 0o2775, 0o644]


@pytest.mark.root
def test_users_who_share_a_volume_write_beside_each_other(shared: Path) -> None:
    shared.mkdir()
    shared.chmod(0o777)
    store = PosixStore(shared)
    version = as_user(SOMEBODY, lambda: store.create("latest.json", b"one"))
    assert isinstance(version, str)
    assert as_user(SOMEBODY, lambda: store.replace("latest.json", b"two", version)) == store.read("latest.json").version
    assert as_user(SOMEBODY, lambda: store.create("commits/1", b"1")) == as_user(
        NOBODY, lambda: store.create("commits/2", b"1")
    )
    two = store.read("latest.json").version
    assert as_user(NOBODY, lambda: store.replace("latest.json", b"three", two)) == store.read("latest.json").version
    assert store.read("latest.json").data == b"three"


@pytest.mark.root
def test_a_user_who_may_not_write_is_told_so(shared: Path) -> None:
    store = PosixStore(shared)
    store.create("a/b", b"1")
    denied = as_user(NOBODY, lambda: store.create("a/c", b"1"))
    assert isinstance(denied, StoreDenied)
    assert f"as uid {NOBODY}" in str(denied)
    assert as_user(NOBODY, lambda: store.read("a/b").data) == b"1"
    assert isinstance(as_user(NOBODY, lambda: store.delete("a/b")), StoreDenied)


@pytest.mark.root
class TestSmallVolume:
    @pytest.fixture
    def volume(self) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="dispatch-agent-test-"))
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
        yield folder
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()

    def test_that_is_full_says_so_and_keeps_what_stands(self, volume: Path, tmp_path: Path) -> None:
        store = PosixStore(volume)
        version = store.create("latest.json", b"x" * 200_000)
        (tmp_path / "big").write_bytes(bytes(2_000_000))
        attempts: list[Callable[[FileSource], object]] = [
            lambda source: store.upload("data/big", source),
            lambda _: store.create("big", bytes(2_000_000)),
            lambda _: store.replace("latest.json", bytes(2_000_000), version),
        ]
        for attempt in attempts:
            with FileSource(tmp_path / "big") as source, pytest.raises(StoreUnavailable, match="free some space"):
                attempt(source)
        assert list(store.list("")) == [Stored("latest.json", 200_000)]
        assert private_files(volume) == []
        store.create("small", b"fits, since the drafts were removed")

    def test_that_is_read_only_says_so(self, volume: Path) -> None:
        store = PosixStore(volume)
        store.create("a", b"1")
        subprocess.run(["mount", "-o", "remount,ro", str(volume)], check=True)
        with pytest.raises(StoreDenied, match="mount it writable"):
            store.create("b", b"1")
        assert store.read("a").data == b"1"


# --- filesystems that can do less, or more ----------------------------------------------------------------------------


def test_an_answer_that_nfs_lost_is_recognised(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(*args: object, **kwargs: object) -> None:
        real(*args, **kwargs)  # type: ignore[arg-type]
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link)
    store.create("a", b"mine")
    monkeypatch.undo()
    with pytest.raises(ConditionFailed):
        store.create("a", b"other")
    assert store.read("a").data == b"mine"


class TestWithoutHardLinks:
    @pytest.fixture(autouse=True)
    def _no_links(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def link(*_: object, **__: object) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", link)

    def test_an_exclusive_rename_refuses_as_well(self, store: PosixStore) -> None:
        store.create("a", b"one")
        with pytest.raises(ConditionFailed):
            store.create("a", b"two")
        assert store.read("a").data == b"one"
        assert private_files(Path(store.url)) == []

    def test_a_libc_without_the_call_is_no_hindrance(self, store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernel, "_wrapper", lambda: None)
        self.test_an_exclusive_rename_refuses_as_well(store)

    def test_and_without_that_it_is_too_weak(self, store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
        def cannot(*_: object) -> bool:
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(kernel, "rename_exclusive", cannot)
        with pytest.raises(StoreTooWeak, match="neither hard links nor an exclusive rename"):
            store.create("a", b"one")
        assert list(store.list("")) == []


def test_a_filesystem_without_locks_has_no_replace(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    version = store.create("a", b"one")
    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(StoreTooWeak, match="without locks"):
        store.replace("a", b"two", version)


def test_a_lock_that_is_never_released_ends_in_an_error(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "LOCK_WAIT_SECONDS", 0.1)
    version = store.create("a", b"one")
    with folders.opened(Path(store.url), []) as root:
        lock = folders.open_lock(root, keys.LOCK)
    try:
        assert posix._try_lock(lock, store.url)
        with pytest.raises(StoreUnavailable, match="hung publisher"):
            store.replace("a", b"two", version)
    finally:
        os.close(lock)
    store.replace("a", b"two", version)


def test_a_folder_that_only_a_lock_was_left_in_goes_too(store: PosixStore) -> None:
    version = store.create("a/b", b"1")
    store.replace("a/b", b"2", version)
    store.delete("a/b")
    assert [path.name for path in Path(store.url).iterdir()] == []


def test_a_lock_that_somebody_has_stays(store: PosixStore) -> None:
    version = store.create("a/b", b"1")
    store.replace("a/b", b"2", version)
    with folders.opened(Path(store.url), ["a"]) as folder:
        lock = folders.open_lock(folder, keys.LOCK)
    assert posix._try_lock(lock, store.url)
    store.delete("a/b")
    assert [path.name for path in Path(store.url, "a").iterdir()] == [keys.LOCK]
    os.close(lock)


def test_a_lock_that_was_waited_for_and_is_not_the_folders_any_more_lets_nobody_in(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder was emptied, and filled again, while a replacer waited; another one is at work under the new lock."""
    monkeypatch.setattr(posix, "LOCK_WAIT_SECONDS", 1.0)
    version = store.create("a/b", b"1")
    with folders.opened(Path(store.url), ["a"]) as folder, ThreadPoolExecutor(1) as pool:
        old = folders.open_lock(folder, keys.LOCK)
        assert posix._try_lock(old, store.url)
        waiting = pool.submit(store.replace, "a/b", b"2", version)
        time.sleep(0.2)
        os.unlink(keys.LOCK, dir_fd=folder)
        new = folders.open_lock(folder, keys.LOCK)
        assert posix._try_lock(new, store.url)
        os.close(old)
        with pytest.raises(StoreUnavailable, match="hung publisher"):
            waiting.result()
        os.close(new)
    assert store.read("a/b").data == b"1"


@pytest.mark.parametrize(
    ("magic", "value", "name"),
    [
        (0xEF53, "yes", "ext"),
        (0x6969, "unknown", "NFS"),
        (0x65735546, "unknown", "FUSE"),
        (0x1234, "unknown", "0x1234"),
    ],
)
def test_locks_are_trusted_by_the_type_of_filesystem(magic: int, value: str, name: str) -> None:
    trust = kernel.lock_trust(magic)
    assert (trust.value, trust.source) == (value, "catalogue")
    assert name in trust.reason


def test_the_type_of_a_filesystem_is_asked_of_the_kernel(tmpfs: Path) -> None:
    assert "tmpfs" in PosixStore(tmpfs / "not/there/yet").facts().replace_trusted.reason


class TestClones:
    """Where blocks can be shared. Few test machines have such a filesystem, so the kernel's part is played here."""

    @pytest.fixture(autouse=True)
    def _clone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def clone(source: int, target: int) -> bool:
            os.sendfile(target, source, 0, os.fstat(source).st_size)
            return True

        monkeypatch.setattr(kernel, "clone", clone)

    def test_are_read_back_and_so_verified(self, store: PosixStore, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(os.urandom(3_000_000))
        with FileSource(tmp_path / "file") as source:
            uploaded = store.upload("a/b", source)
            assert uploaded.verified
            assert uploaded.size == source.ticks == 3_000_000
        assert store.read("a/b").version == uploaded.sha256
        assert store.path("a/b").read_bytes() == (tmp_path / "file").read_bytes()

    def test_of_a_file_that_grew_are_dropped(self, store: PosixStore, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"1234")
        with FileSource(tmp_path / "file") as source:
            (tmp_path / "file").write_bytes(b"12345")
            with pytest.raises(SourceChanged, match="4 bytes"):
                store.upload("a/b", source)
        assert list(store.list("")) == []
        assert private_files(Path(store.url)) == []


def test_a_copy_is_left_to_the_caller_to_verify(store: PosixStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    with FileSource(tmp_path / "file") as source:
        uploaded = store.upload("a/b", source)
    assert not uploaded.verified
    assert store.path("a/b").stat().st_ino != (tmp_path / "file").stat().st_ino


def test_a_source_that_fails_leaves_no_draft(store: PosixStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(5_000_000))
    with FileSource(tmp_path / "file", fails_at=2_000_000) as source, pytest.raises(ChangedError):
        store.upload("a/b", source)
    assert private_files(Path(store.url)) == []
