"""The probe finds out what a destination really does: real servers, and one that only fails when two writers race."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from tests.cli.conftest import run
from tests.servers import Bucket
from tests.store.conftest import SEAWEED, FileSource, Opener
from tests.store.front import Behaviour, check_then_act, front
from tests.store.matrix import Kind

from dispatch_agent.errors import StoreDenied, StoreTooWeak, StoreUnavailable
from dispatch_agent.store import kernel
from dispatch_agent.store.base import ConditionFailed, Document, Stored
from dispatch_agent.store.capabilities import Capabilities, Checksum, require
from dispatch_agent.store.memory import MemoryStore
from dispatch_agent.store.opening import open_store
from dispatch_agent.store.posix import PosixStore
from dispatch_agent.store.probe import probe
from dispatch_agent.store.s3 import S3Store
from dispatch_agent.support import Support

RCLONE = pytest.mark.xdist_group("seaweed")  # the same process as SeaweedFS: two servers at once fill two cores


class Broken(MemoryStore):
    """A store with one fault, which the probe must name."""


@contextmanager
def opened(bucket: Bucket) -> Iterator[S3Store]:
    store = open_store(f"{bucket.url}/{os.urandom(6).hex()}", bucket.options)
    assert isinstance(store, S3Store)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def behind(bucket: Bucket, behave: Behaviour) -> Iterator[S3Store]:
    with front(bucket.endpoint, behave) as endpoint, opened(bucket.behind(endpoint)) as store:
        yield store


def test_each_kind_is_found_to_be_what_the_matrix_says_and_left_as_it_was(opener: Opener, kind: Kind) -> None:
    store = opener()
    store.put("probe/other", b"not the probe's")
    found = probe(store)
    if kind.fair:
        assert (found.conditional_create.value, found.conditional_replace.value) == (kind.create, kind.replace)
    assert found.list_after_write
    assert found.atomic_visibility or kind.whole == "no"
    assert (found.checksum, found.checksums.value) == (kind.checksum, "no" if kind.checksum == "none" else "yes")
    assert [left.key for left in store.list("")] == ["probe/other"]
    with nullcontext() if found.conditional_create else pytest.raises(StoreTooWeak, match=r"\(.+\)"):
        require(found)
    require(found, accept_weak=True)


@RCLONE
def test_the_command_shows_what_was_seen_and_what_follows(rclone_bucket: Bucket, tmp_path: Path) -> None:
    def table(said: str) -> dict[str, list[str]]:
        return {row[0]: row[1:] for row in (re.split("  +", line) for line in said.splitlines()) if len(row) == 4}

    good = run("publish", "probe", tmp_path, environ={**os.environ}).passes().out
    assert {name: row[0] for name, row in table(good).items()} == {
        "CAPABILITY": "SUPPORT",
        "conditional create": "yes",
        "conditional replace": "yes",
        "atomic visibility": "yes",
        "list after write": "yes",
        "checksums": "no",
    }
    assert "seen: " in good
    assert good.splitlines()[-1] == "publishing here: latest.json is kept; every upload is read back"
    environ = {**os.environ, **rclone_bucket.environment}
    refused = run("publish", "probe", rclone_bucket.url, environ=environ)
    refused.fails(12, "cannot refuse a lost race", "a create over an existing object was not refused")
    assert table(refused.out)["conditional replace"] == ["no", "probed", "a replace of an old version was not refused"]
    assert "publishing here" not in refused.out
    accepted = run("publish", "probe", rclone_bucket.url, "--accept-weak-store", environ=environ).passes().out
    assert "publishing here: there is no latest.json; the store refuses a damaged upload by its md5" in accepted


@SEAWEED
class TestChecksums:
    def test_that_the_store_honours_are_sent_from_then_on(self, shared_bucket: Bucket, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"x")
        with opened(shared_bucket) as store:
            assert store.checksum == "none"
            assert probe(store).checksum == store.checksum == "sha256"
            with FileSource(tmp_path / "file") as source:
                assert store.upload("a", source).verified

    @RCLONE
    def test_fall_back_to_md5(self, rclone_bucket: Bucket) -> None:
        with opened(rclone_bucket) as store:
            found = probe(store)
            assert (found.checksum, bool(found.checksums)) == ("md5", True)

    def test_that_nobody_proved_are_not_believed(self, shared_bucket: Bucket, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"x")
        with opened(shared_bucket) as store, FileSource(tmp_path / "file") as source:
            assert not store.upload("a", source).verified


def test_checksums_that_the_store_ignores_are_not_sent() -> None:
    class Ignoring(Broken):
        checksum: Checksum = "sha256"

        def try_checksum(self, prefix: str, algorithm: str) -> Support:
            assert prefix.startswith("probe/")
            return Support("no", "probed", f"wrong {algorithm} stored")

    store = Ignoring()
    found = probe(store)
    assert (found.checksum, store.checksum, found.checksums.value) == ("none", "none", "no")
    assert found.checksums.reason.startswith("wrong sha256 stored; wrong md5 stored; bytes are read back")


@RCLONE
class TestRclone:
    """`rclone serve s3` takes every condition and ignores it."""

    def test_is_found_out_and_refused(self, rclone_bucket: Bucket) -> None:
        with opened(rclone_bucket) as store:
            found = probe(store)
            assert (found.conditional_create.value, found.conditional_replace.value) == ("no", "no")
            assert "not refused" in found.conditional_create.reason
            with pytest.raises(StoreTooWeak) as refused:
                require(found)
            assert refused.value.exit_code == 12
            assert found.conditional_create.reason in str(refused.value)
            assert list(store.list("")) == []

    def test_is_taken_by_who_says_so(self, rclone_bucket: Bucket) -> None:
        with opened(rclone_bucket) as store:
            require(probe(store), accept_weak=True)


@RCLONE
class TestCheckThenAct:
    """A server that looks before it writes: right in turn, and two writers win a race."""

    def test_passes_in_turn(self, rclone_bucket: Bucket) -> None:
        with behind(rclone_bucket, check_then_act(rclone_bucket)) as store:
            version = store.create("a", b"one")
            for refused in (lambda: store.create("a", b"two"), lambda: store.replace("b", b"two", version)):
                with pytest.raises(ConditionFailed):
                    refused()
            store.replace("a", b"two", version)
            with pytest.raises(ConditionFailed):
                store.replace("a", b"three", version)
            assert store.read("a").data == b"two"

    def test_fails_the_race_and_is_refused(self, rclone_bucket: Bucket) -> None:
        with behind(rclone_bucket, check_then_act(rclone_bucket)) as store:
            found = probe(store)
            assert "racing create" in found.conditional_create.reason
            assert "racing replace" in found.conditional_replace.reason
            with pytest.raises(StoreTooWeak, match="another's bytes stand") as refused:
                require(found)
            assert refused.value.exit_code == 12


def test_a_lagging_listing_is_refused_even_from_who_accepts_a_weak_store() -> None:
    class Lagging(Broken):
        def list(self, prefix: str) -> Iterator[Stored]:
            return iter(sorted(super().list(prefix), key=lambda found: found.key)[:-1])

    found = probe(Lagging())
    assert found.list_after_write.value == "no"
    with pytest.raises(StoreTooWeak, match="list"):
        require(found, accept_weak=True)


def test_a_lagging_folder_listing_is_refused() -> None:
    class Lagging(Broken):
        def folders(self, prefix: str) -> Sequence[str]:
            return super().folders(prefix)[:-1]

    assert probe(Lagging()).list_after_write.value == "no"


def test_a_reader_that_sees_parts_is_said() -> None:
    class Torn(Broken):
        def put(self, key: str, data: bytes) -> None:
            super().put(key, data[: len(data) // 2])
            for _ in range(200):
                super().read(key)
            super().put(key, data)

        def read(self, key: str) -> Document:
            found = super().read(key)
            return Document(found.data[:1000], found.version) if len(found.data) > 1000 else found

    found = probe(Torn())
    assert found.atomic_visibility.value == "no"
    assert any("1000 bytes" in sentence for sentence in found.saw)


def test_a_replace_that_is_always_refused_is_no_replace() -> None:
    class Refusing(Broken):
        def replace(self, key: str, data: bytes, version: str) -> str:  # noqa: ARG002 (the seam's)
            raise ConditionFailed(key)

    found = probe(Refusing())
    assert (found.conditional_create.value, found.conditional_replace.value) == ("yes", "no")
    require(found)


def test_a_replace_that_creates_is_no_replace() -> None:
    class Creating(Broken):
        def replace(self, key: str, data: bytes, version: str) -> str:
            if "absent" in key:
                return super().create(key, data)
            return super().replace(key, data, version)

    assert "absent" in probe(Creating()).conditional_replace.reason


def test_a_lost_answer_is_read_back_and_not_held_against_the_store() -> None:
    class Forgetful(Broken):
        def create(self, key: str, data: bytes) -> str:
            super().create(key, data)
            raise ConditionFailed(key)

        def replace(self, key: str, data: bytes, version: str) -> str:
            super().replace(key, data, version)
            msg = "no answer"
            raise StoreUnavailable(msg)

    found = probe(Forgetful())
    assert (found.conditional_create.value, found.conditional_replace.value) == ("yes", "yes")


@pytest.mark.parametrize(
    ("mounted", "value"), [("fuse.somefs", "unknown"), ("fuse.seaweedfs", "no"), ("virtiofs", "yes")]
)
def test_a_name_that_other_hosts_may_make_too_is_not_believed_from_one_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounted: str, value: str
) -> None:
    monkeypatch.setattr("dispatch_agent.store.kernel.filesystem_magic", lambda _: kernel.FUSE)
    monkeypatch.setattr("dispatch_agent.store.kernel.mounted_as", lambda _: mounted)
    found = probe(PosixStore(tmp_path))
    assert found.conditional_create.value == value
    with pytest.raises(StoreTooWeak, match=f"(?i){mounted.rpartition('.')[2]}") if value != "yes" else nullcontext():
        require(found)


def test_a_lock_that_may_not_hold_between_hosts_makes_replace_advisory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch_agent.store.kernel.filesystem_magic", lambda _: 0x6969)
    found = probe(PosixStore(tmp_path))
    assert (found.conditional_replace.value, found.conditional_replace.source) == ("unknown", "catalogue")
    assert "NFS" in found.conditional_replace.reason
    require(found)


def test_scratch_keys_that_cannot_be_removed_are_said() -> None:
    class Undeletable(Broken):
        def delete(self, key: str) -> None:
            msg = f"may not delete {key}"
            raise StoreDenied(msg)

    found = probe(Undeletable())
    assert any("were left" in sentence and "may not delete" in sentence for sentence in found.saw)
    require(found)


def test_a_store_that_does_not_answer_is_an_error_and_no_finding() -> None:
    class Down(Broken):
        def put(self, key: str, data: bytes) -> None:  # noqa: ARG002 (the seam's)
            msg = f"{key}: down"
            raise StoreUnavailable(msg)

    with pytest.raises(StoreUnavailable):
        probe(Down())


@pytest.mark.parametrize("value", ["no", "unknown"])
def test_what_is_not_known_to_refuse_is_refused(value: str) -> None:
    yes = Support("yes", "probed")
    weak = Support(value, "probed", "seen to be so")  # type: ignore[arg-type]
    with pytest.raises(StoreTooWeak, match="seen to be so"):
        require(Capabilities(weak, yes, yes, yes, yes))
