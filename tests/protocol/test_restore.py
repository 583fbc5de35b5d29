"""Having a published save back: byte for byte, never half, never in the place of something else."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dispatch_agent import resume_path, save_dir
from dispatch_agent.checkpoint import completion
from dispatch_agent.checkpoint.folder import mark_complete
from dispatch_agent.clock import SystemClock
from dispatch_agent.errors import Incomplete, IntegrityError, NewerFormat, SettingsError
from dispatch_agent.identity import Identity
from dispatch_agent.logs import Log
from dispatch_agent.publish import reader, records, restore
from dispatch_agent.publish.once import Patience
from dispatch_agent.publish.publisher import Publisher, open_session
from dispatch_agent.publish.records import CommitRecord
from dispatch_agent.store.posix import PosixStore

Publish = Callable[..., list[CommitRecord]]
CLOCK = SystemClock()
ODD_NAMES = [
    b"plain.bin",
    b"bad\xff\xfe.pt",
    b"new\nline",
    b" leading and trailing ",
    b"-rf",
    b"%41",
    b"#?&=+:@*[1]",
    "ü".encode(),
    b"trailing.",
    b"...",
    b"x" * 200,
]


OTHERS = {"changed": {"a": b"1", "b": b"!"}, "more": {"a": b"1", "b": b"2", "c": b"3"}, "less": {"a": b"1"}}


def quiet(_save: str, _size: int) -> Callable[[int], None]:
    return lambda _: None


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "store")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "root" / "exec" / "1.42.0"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def publish(store: PosixStore, folder: Path) -> Publish:
    """Publish the named saves of the folder in the given order; their commit records."""
    drawn = random.Random(7)  # noqa: S311 (nonces of a test)

    def publish(*saves: Path) -> list[CommitRecord]:
        session = open_session(
            store,
            Identity(None, 1_000_001, "1.42.0", "ready-made"),
            folder,
            rank=0,
            weak=False,
            in_place=False,
            workers=2,
            name="test",
            nonce=f"{drawn.getrandbits(48):012x}",
            clock=CLOCK,
            patience=Patience(CLOCK, drawn.random),
        )
        log = Log(lambda _: None, CLOCK)
        publisher = Publisher(session, completion.parse_rule("marker"), log, quiet, points=True)
        committed = []
        for save in saves:
            mark_complete(save)
            committed += [outcome.record for outcome in publisher.run().outcomes if outcome.record]
        return committed

    return publish


def tree(top: Path) -> dict[bytes, object]:
    """What stands below `top`: bytes of files, text of links, None for folders; and which files are executable."""
    found: dict[bytes, object] = {}
    for where, folders, files in os.walk(os.fsencode(top)):
        for name in folders + files:
            path = os.path.join(where, name)
            key = os.path.relpath(path, os.fsencode(top))
            if os.path.islink(path):
                found[key] = os.readlink(path)
            elif os.path.isdir(path):
                found[key] = None
            else:
                found[key] = (Path(os.fsdecode(path)).read_bytes(), bool(os.stat(path).st_mode & 0o100))
    return found


def newest(store: PosixStore, target: Path, **options: object) -> restore.Restored:
    wanted: dict[str, object] = {"save": None, "fall_back": True, "damaged": lambda *_: None, **options}
    return restore.restore_newest(store, target, progress=quiet, workers=2, **wanted)  # type: ignore[arg-type] # a dict


def test_a_restored_tree_is_the_published_one_whatever_its_names(
    publish: Publish, store: PosixStore, folder: Path, tmp_path: Path
) -> None:
    save = folder / "step-1"
    for number, name in enumerate(ODD_NAMES):
        inner = os.path.join(os.fsencode(save), b"dir-%d" % number, name)
        os.makedirs(inner)
        Path(os.fsdecode(os.path.join(inner, name))).write_bytes(name * (number + 1))
    (save / ".hidden").write_bytes(b"")
    (save / "empty" / "folder").mkdir(parents=True)
    (save / "link").symlink_to("dir-0/plain.bin/plain.bin")
    (save / "dangling").symlink_to("nowhere")
    (save / "run.sh").write_bytes(b"#!/bin/sh\n")
    (save / "run.sh").chmod(0o755)
    publish(save)
    got = newest(store, tmp_path / "there")
    assert got.path == tmp_path / "there" / "step-1"
    assert tree(got.path) == tree(save)


def test_a_single_file_comes_back_as_a_file(publish: Publish, store: PosixStore, folder: Path, tmp_path: Path) -> None:
    save = folder / "epoch=3-step=10.ckpt"
    save.write_bytes(b"\x80weights")
    publish(save)
    got = newest(store, tmp_path)
    assert got.path.name == save.name
    assert got.path.read_bytes() == b"\x80weights"


def test_restoring_twice_keeps_what_is_there(publish: Publish, store: PosixStore, folder: Path, tmp_path: Path) -> None:
    save = make(folder, "step-1", a=b"1")
    publish(save)
    assert newest(store, tmp_path / "there").fresh
    inode = (tmp_path / "there" / "step-1" / "a").stat().st_ino
    assert not newest(store, tmp_path / "there").fresh
    assert (tmp_path / "there" / "step-1" / "a").stat().st_ino == inode


@pytest.mark.parametrize("other", [*OTHERS, "a file"])
def test_what_stands_in_the_way_is_never_replaced(
    publish: Publish, store: PosixStore, folder: Path, tmp_path: Path, other: str
) -> None:
    publish(make(folder, "step-1", a=b"1", b=b"2"))
    there = tmp_path / "there"
    if other == "a file":
        there.mkdir()
        (there / "step-1").write_bytes(b"mine")
    else:
        make(there, "step-1", **OTHERS[other])
    before = tree(there)
    with pytest.raises(SettingsError, match="nothing is replaced"):
        newest(store, there)
    assert tree(there) == before


def test_a_restore_that_was_cut_short_goes_on_where_it_was(
    publish: Publish, store: PosixStore, folder: Path, tmp_path: Path
) -> None:
    save = make(folder, "step-1", **{f"f{n}": bytes([n]) * 1000 for n in range(6)})
    (record,) = publish(save)
    seen = 0

    def stop_after_three(size: int) -> None:
        nonlocal seen
        seen += size
        if seen > 3000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore.restore(store, record, tmp_path / "there", tick=stop_after_three, workers=1)
    assert not (tmp_path / "there" / "step-1").exists()
    fetched: list[str] = []
    stream = store.stream
    store.stream = lambda key, chunk=1 << 20: (fetched.append(key), stream(key, chunk))[1]  # type: ignore[method-assign]
    got = restore.restore(store, record, tmp_path / "there", tick=lambda _: None, workers=1)
    assert tree(got.path) == tree(save)
    assert 0 < len(fetched) < 6
    assert set(os.listdir(tmp_path / "there")) == {"step-1"}


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "no manifest", "record", "no record"])
def test_a_damaged_newest_save_falls_back_loudly_and_what_is_newest_stays(
    publish: Publish, store: PosixStore, folder: Path, tmp_path: Path, damage: str
) -> None:
    """I7: falling back changes what is read, never what is newest."""
    first, second = publish(make(folder, "step-1", a=b"1" * 100), make(folder, "step-2", a=b"2" * 100))
    part = second.parts[0]
    harm(store, damage, file=f"{part.prefix}/a", manifest=part.manifest, record=second.key)
    told: list[str] = []
    got = newest(store, tmp_path / "there", damaged=lambda key, why: told.append(f"{key}: {why}"))
    assert got.record == first
    if damage != "no record":
        assert told
        assert told[0].startswith(second.key)
        with pytest.raises(IntegrityError):
            newest(store, tmp_path / "elsewhere", fall_back=False)
        assert next(reader.published(store)).order == second.order
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"step-1"}


def test_everything_damaged_is_said_and_nothing_is_left_behind(
    publish: Publish, store: PosixStore, folder: Path, tmp_path: Path
) -> None:
    (record,) = publish(make(folder, "step-1", a=b"1" * 100))
    harm(store, "flip", file=f"{record.parts[0].prefix}/a", manifest="", record="")
    with pytest.raises(IntegrityError, match=r"everything published at .* is damaged"):
        newest(store, tmp_path / "there")
    assert os.listdir(tmp_path / "there") == []


def test_of_a_named_save_no_more_is_called_damaged_than_bears_the_name(
    publish: Publish, store: PosixStore, folder: Path, tmp_path: Path
) -> None:
    _, named = publish(make(folder, "step-1", a=b"1" * 100), make(folder, "step-2", a=b"2" * 100))
    harm(store, "flip", file=f"{named.parts[0].prefix}/a", manifest="", record="")
    with pytest.raises(IntegrityError, match=r"^every save named step-2 at .* is damaged; the last: "):
        newest(store, tmp_path / "there", save="step-2")
    assert newest(store, tmp_path / "there", save="step-1").path.name == "step-1"


@pytest.mark.parametrize("what", ["record", "manifest"])
def test_a_newest_save_of_a_later_version_is_refused_and_no_older_one_taken_for_it(
    publish: Publish, store: PosixStore, folder: Path, tmp_path: Path, what: str
) -> None:
    """I7: an old reader must not silently step back."""
    _, second = publish(make(folder, "step-1", a=b"1"), make(folder, "step-2", a=b"2"))
    commit = json.loads(store.read(second.key).data)
    if what == "record":
        commit["format"] = 2
    else:
        manifest = json.loads(store.read(second.parts[0].manifest).data)
        later = json.dumps({**manifest, "format": 2}).encode()
        store.put(second.parts[0].manifest, later)
        commit["parts"][0]["manifest_sha256"] = records.sha256(later)
    store.put(second.key, json.dumps(commit).encode())
    with pytest.raises(NewerFormat, match="use a newer one"):
        newest(store, tmp_path / "there")
    assert not (tmp_path / "there" / "step-1").exists()


def test_restored_files_follow_the_umask(publish: Publish, store: PosixStore, folder: Path, tmp_path: Path) -> None:
    publish(make(folder, "step-1", a=b"1"))
    before = os.umask(0o077)
    try:
        got = newest(store, tmp_path / "there")
    finally:
        os.umask(before)
    assert (got.path / "a").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("path", ["../escape", "/tmp/escape", "a/../../escape", "%2E%2E/escape", "a%2Fb", ""])
def test_a_manifest_whose_names_leave_the_target_is_refused(
    publish: Publish, store: PosixStore, folder: Path, tmp_path: Path, path: str
) -> None:
    (record,) = publish(make(folder, "step-1", a=b"1"))
    part = record.parts[0]
    manifest = json.loads(store.read(part.manifest).data)
    manifest["files"][0]["path"] = path
    hostile = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    store.put(part.manifest, hostile)
    commit = json.loads(store.read(record.key).data)
    commit["parts"][0]["manifest_sha256"] = records.sha256(hostile)
    store.put(record.key, json.dumps(commit).encode())
    with pytest.raises(IntegrityError):
        newest(store, tmp_path / "deep" / "there")
    assert not list(tmp_path.rglob("escape"))


def test_nothing_published_is_said_as_that(store: PosixStore, tmp_path: Path) -> None:
    with pytest.raises(Incomplete, match="nothing is published"):
        newest(store, tmp_path)
    with pytest.raises(Incomplete, match="nothing is published"):
        newest(store, tmp_path, save="step-9")


def test_training_code_finds_its_folders(
    publish: Publish, store: PosixStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="PUBLISH_ROOT is not set"):
        save_dir()
    monkeypatch.setenv("PUBLISH_ROOT", str(tmp_path / "root"))
    with pytest.raises(SettingsError, match="DISPATCH_ATTEMPT is not set"):
        save_dir()
    monkeypatch.setenv("DISPATCH_ATTEMPT", "1.42.0")
    assert save_dir() == folder
    assert resume_path() is None
    publish(make(folder, "step-1", a=b"1"), make(folder, "step-2", a=b"2"))
    target = tmp_path / "root" / "resume" / "1.42.0"
    newest(store, target)
    assert resume_path() == target / "step-2"
    newest(store, target, save="step-1")
    with pytest.raises(SettingsError, match="holds 2 saves"):
        resume_path()


def make(folder: Path, name: str, **files: bytes) -> Path:
    save = folder / name
    save.mkdir(parents=True)
    for file, data in files.items():
        (save / file).write_bytes(data)
    return save


def harm(store: PosixStore, how: str, *, file: str, manifest: str, record: str) -> None:
    key = {"manifest": manifest, "no manifest": manifest, "record": record, "no record": record}.get(how, file)
    path = store.path(key)
    data = path.read_bytes()
    path.unlink()
    if how in ("flip", "manifest", "record"):
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif how == "truncate":
        path.write_bytes(data[:-1])
