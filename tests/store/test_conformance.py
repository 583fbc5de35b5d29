"""What every store promises (store/base.py), tried on each of tests/store/matrix.py."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.store.conftest import ChangedError, FileSource, Opener
from tests.store.matrix import Kind, Place

from dispatch_agent.errors import StoreError
from dispatch_agent.store.base import ConditionFailed, KeyMissing, Store, Stored
from dispatch_agent.store.capabilities import Sweeps

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
# As names arrive here: percent-encoded where a store could not keep them, so ASCII, but no tamer than that.
NAMES = (
    "plain.json",
    "with space",
    " space at both ends ",
    "a+b=c@d-e_f",
    "%41%2F%00",
    "100%",
    ".hidden",
    "..two dots",
    "-dash",
    "x" * 255,
    "/".join(["deep"] * 40),
    "/".join(["y" * 200] * 4),
)


def read(store: Store, key: str) -> bytes:
    return store.read(key).data


@pytest.mark.needs("create")
class TestCreate:
    def test_stores_an_absent_key_and_gives_its_version(self, store: Store) -> None:
        version = store.create("a/b.json", b"one")
        assert store.read("a/b.json") == type(store.read("a/b.json"))(b"one", version)

    def test_refuses_a_key_that_is_there_and_leaves_it(self, store: Store) -> None:
        store.create("a/b.json", b"one")
        with pytest.raises(ConditionFailed):
            store.create("a/b.json", b"two")
        assert read(store, "a/b.json") == b"one"

    def test_refuses_the_same_bytes_too(self, store: Store) -> None:
        store.create("a", b"one")
        with pytest.raises(ConditionFailed):
            store.create("a", b"one")

    def test_refuses_what_another_client_created(self, opener: Opener) -> None:
        mine, other = opener(), opener()
        assert list(mine.list("")) == []
        other.create("a", b"other")
        with pytest.raises(ConditionFailed):
            mine.create("a", b"mine")

    def test_takes_a_deleted_key_again(self, store: Store) -> None:
        store.create("a", b"one")
        store.delete("a")
        store.create("a", b"two")
        assert read(store, "a") == b"two"

    @pytest.mark.needs("fair")
    def test_of_racing_writers_one_wins_and_its_bytes_stand(self, opener: Opener, kind: Kind, rounds: int) -> None:
        stores = [opener() for _ in range(kind.writers)]
        for turn in range(rounds):
            bodies = [f"{turn} {writer}".encode() for writer in range(kind.writers)]
            won = race(stores, lambda s, body, turn=turn: s.create(f"race/{turn}", body), bodies)
            assert won == [read(stores[0], f"race/{turn}")]


@pytest.mark.needs("create", "replace")
class TestReplace:
    def test_stores_over_the_current_version(self, store: Store) -> None:
        first = store.create("a/latest.json", b"one")
        second = store.replace("a/latest.json", b"two", first)
        assert second != first
        assert (read(store, "a/latest.json"), store.read("a/latest.json").version) == (b"two", second)

    def test_takes_the_version_that_read_gave(self, store: Store) -> None:
        store.put("a", b"one")
        store.replace("a", b"two", store.read("a").version)
        assert read(store, "a") == b"two"

    def test_refuses_an_old_version_and_leaves_the_object(self, store: Store) -> None:
        first = store.create("a", b"one")
        store.replace("a", b"two", first)
        with pytest.raises(ConditionFailed):
            store.replace("a", b"three", first)
        assert read(store, "a") == b"two"

    def test_refuses_an_absent_key_and_creates_nothing(self, store: Store) -> None:
        version = store.create("a", b"one")
        for absent in ("b", "no/such/folder/b"):
            with pytest.raises(ConditionFailed):
                store.replace(absent, b"two", version)
        assert [found.key for found in store.list("")] == ["a"]

    def test_sees_what_another_client_wrote(self, opener: Opener) -> None:
        mine, other = opener(), opener()
        version = mine.create("a", b"one")
        assert read(other, "a") == b"one"
        other.replace("a", b"other", version)
        with pytest.raises(ConditionFailed):
            mine.replace("a", b"mine", version)
        assert read(mine, "a") == b"other"

    @pytest.mark.needs("fair")
    def test_of_racing_writers_one_wins_and_its_bytes_stand(self, opener: Opener, kind: Kind, rounds: int) -> None:
        version = opener().create("a", b"start")
        stores = [opener() for _ in range(kind.writers)]
        for turn in range(rounds):
            bodies = [f"{turn} {writer}".encode() for writer in range(kind.writers)]
            won = race(stores, lambda s, body, v=version: s.replace("a", body, v), bodies)
            version = stores[0].read("a").version
            assert won == [read(stores[1], "a")]


class TestReadAndStream:
    def test_an_absent_key_is_missing(self, store: Store) -> None:
        store.put("a/b", b"one")
        for absent in ("c", "a", "a/b/c", "a/bb", "a/"[:-1] + "/x"):
            with pytest.raises(KeyMissing):
                store.read(absent)
            with pytest.raises(KeyMissing):
                next(store.stream(absent))

    def test_pieces_are_never_larger_than_asked(self, store: Store) -> None:
        data = os.urandom(1000)
        store.put("a", data)
        pieces = list(store.stream("a", chunk=64))
        assert b"".join(pieces) == data
        assert max(map(len, pieces)) <= 64

    def test_an_empty_object_is_an_object(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        store.put("put", b"")
        with FileSource(tmp_path / "empty") as source:
            uploaded = store.upload("uploaded", source)
        assert (uploaded.size, uploaded.sha256) == (0, hashlib.sha256(b"").hexdigest())
        assert [read(store, key) for key in ("put", "uploaded")] == [b"", b""]
        assert list(store.stream("uploaded")) == []
        assert {found.size for found in store.list("")} == {0}

    def test_a_stream_that_is_left_early_leaves_nothing_behind(self, store: Store) -> None:
        store.put("a", os.urandom(4 * MIB))
        pieces = store.stream("a", chunk=1000)
        assert len(next(pieces)) == 1000
        pieces.close()  # type: ignore[attr-defined]
        assert len(read(store, "a")) == 4 * MIB


class TestUpload:
    @pytest.mark.parametrize("size", [1, 16 * MIB, 16 * MIB + 1, 40 * MIB])
    def test_the_bytes_arrive_and_are_hashed(self, store: Store, tmp_path: Path, size: int) -> None:
        data = os.urandom(size)
        (tmp_path / "file").write_bytes(data)
        with FileSource(tmp_path / "file") as source:
            uploaded = store.upload("data/save/model.safetensors", source)
        assert (uploaded.size, uploaded.sha256) == (size, hashlib.sha256(data).hexdigest())
        assert b"".join(store.stream("data/save/model.safetensors")) == data
        assert list(store.list("data")) == [Stored("data/save/model.safetensors", size)]

    @pytest.mark.parametrize("size", [100, 40 * MIB])
    def test_what_the_source_raises_passes_and_no_object_is_left(self, store: Store, tmp_path: Path, size: int) -> None:
        (tmp_path / "file").write_bytes(bytes(size))
        with FileSource(tmp_path / "file", fails_at=size // 2) as source, pytest.raises(ChangedError):
            store.upload("data/file", source)
        assert list(store.list("")) == []

    def test_side_by_side_uploads_do_not_mix(self, store: Store, tmp_path: Path) -> None:
        digests = {}
        for number in range(6):
            data = os.urandom(3 * MIB + number)
            (tmp_path / str(number)).write_bytes(data)
            digests[number] = hashlib.sha256(data).hexdigest()

        def upload(number: int) -> str:
            with FileSource(tmp_path / str(number)) as source:
                return store.upload(f"data/{number}", source).sha256

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(upload, digests)) == list(digests.values())
        for number, digest in digests.items():
            assert hashlib.sha256(b"".join(store.stream(f"data/{number}"))).hexdigest() == digest


class TestListing:
    def test_has_what_was_written_at_once(self, opener: Opener) -> None:
        writer, reader = opener(), opener()
        for number in range(10):
            writer.put(f"commits/{number:03}/x.json", b"1")
            assert len(list(reader.list("commits"))) == number + 1
            assert len(reader.folders("commits")) == number + 1

    def test_has_not_what_was_deleted(self, opener: Opener) -> None:
        writer, reader = opener(), opener()
        writer.put("a/b", b"1")
        writer.put("a/c", b"1")
        assert len(list(reader.list("a"))) == 2
        writer.delete("a/b")
        assert [found.key for found in reader.list("a")] == ["a/c"]

    def test_goes_by_whole_components(self, store: Store, kind: Kind) -> None:
        for key in ("a/x", "ab/x", "a.json", *(("a",) if kind.flat else ())):
            store.put(key, b"1")
        assert [found.key for found in store.list("a")] == ["a/x"]
        assert store.folders("") == ["a", "ab"]

    def test_of_nothing_is_empty(self, store: Store) -> None:
        assert (list(store.list("")), list(store.list("a/b")), list(store.folders("")), list(store.folders("a"))) == (
            [],
            [],
            [],
            [],
        )

    def test_folders_are_only_those_directly_below(self, store: Store) -> None:
        for key in ("c/2/x/y", "c/1/z", "c/file", "d/3/x"):
            store.put(key, b"1")
        assert list(store.folders("c")) == ["1", "2"]
        assert list(store.folders("")) == ["c", "d"]

    def test_goes_on_past_one_page(self, store: Store) -> None:
        keys = {f"many/{number % 7}/{number:05}" for number in range(1010)}
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b""), keys))
        assert {found.key for found in store.list("many")} == keys
        assert list(store.folders("many")) == list("0123456")


class TestDelete:
    def test_takes_a_name_literally(self, store: Store) -> None:
        """fsspec's rm would take `a%3F`'s raw form, `a?`, for a pattern; a key with one is deleted alone."""
        names = ("ab", "a+", "a=b", "[ab]", "a*", "a?")
        for name in names:
            store.put(f"x/{name}", b"1")
        for name in ("a?", "a*", "[ab]"):
            store.delete(f"x/{name}")
        assert sorted(found.key for found in store.list("x")) == ["x/a+", "x/a=b", "x/ab"]

    def test_of_an_absent_key_is_no_fault(self, store: Store) -> None:
        store.put("a/b", b"1")
        for absent in ("a/c", "c", "x/y/z"):
            store.delete(absent)
        assert read(store, "a/b") == b"1"

    def test_of_the_last_object_takes_its_folder_from_the_listing(self, store: Store) -> None:
        store.put("a/b/c", b"1")
        store.put("d/e", b"1")
        store.delete("a/b/c")
        assert list(store.list("a")) == []
        assert "d" in store.folders("")

    @pytest.mark.needs("calm")
    def test_beside_a_writer_costs_the_writer_nothing(self, store: Store) -> None:
        """A folder is tidied away when it is empty, perhaps just when a writer has made it."""
        ended = threading.Event()

        def tidy() -> None:
            while not ended.is_set():
                store.put("a/b/c/gone", b"")
                store.delete("a/b/c/gone")

        with ThreadPoolExecutor(1) as pool:
            tidying = pool.submit(tidy)
            try:
                for number in range(60):
                    store.put(f"a/b/c/{number}", b"kept")
                    assert read(store, f"a/b/c/{number}") == b"kept"
                    store.delete(f"a/b/c/{number}")
            finally:
                ended.set()
            tidying.result()


class TestKeys:
    @pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:12])
    def test_come_back_as_they_were(self, store: Store, name: str) -> None:
        key = f"names/{name}"
        store.put(key, b"content")
        assert read(store, key) == b"content"
        assert [found.key for found in store.list("names")] == [key]
        assert [found.key for found in store.list("")] == [key]
        if "/" in name:
            assert list(store.folders("names")) == [name.partition("/")[0]]
        store.delete(key)
        assert list(store.list("")) == []

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "a/../b", ".", "./a", "..", "a\0b", ".~dispatch.lock"])
    def test_that_could_lead_elsewhere_are_no_keys(self, store: Store, key: str) -> None:
        for use in (store.read, store.delete, lambda key: store.put(key, b""), lambda key: store.create(key, b"")):
            with pytest.raises(ValueError, match="is not a key"):
                use(key)

    def test_that_are_too_long_are_refused_by_their_name(self, store: Store) -> None:
        limits = store.limits
        too_long = "/".join(["n" * limits.component_bytes] * (limits.key_bytes // limits.component_bytes + 1))
        for key in ("n" * (limits.component_bytes + 1), too_long):
            with pytest.raises(StoreError, match="shorten"):
                store.put(key, b"")

    def test_of_the_greatest_length_are_kept(self, store: Store) -> None:
        component, most = store.limits.component_bytes, store.limits.key_bytes
        key = "/".join(["n" * (component - 1)] * (most // component))
        store.put(key, b"1")
        assert [found.key for found in store.list("")] == [key]


@pytest.mark.needs("whole")
def test_a_reader_never_sees_a_part(opener: Opener) -> None:
    writer, reader = opener(), opener()
    bodies = [bytes([65 + number]) * (300_000 + number) for number in range(2)]
    writer.put("a/whole", bodies[0])
    ended = threading.Event()

    def overwrite() -> None:
        try:
            for number in range(30):
                writer.put("a/whole", bodies[number % 2])
        finally:
            ended.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(overwrite)
        while not ended.is_set():
            assert read(reader, "a/whole") in bodies
        writing.result()
    assert [found.key for found in reader.list("")] == ["a/whole"]


# Uploads as a publisher that is killed when half of the file has been read.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from tests.store.conftest import FileSource
from dispatch_agent.store.opening import open_store

class Killed(FileSource):
    def read(self, size):
        if self._at >= self.size // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(size)

url, options, path = json.loads(sys.argv[1])
open_store(url, options).upload("data/killed", Killed(Path(path)))
"""


@pytest.mark.needs("outside")
def test_a_killed_writer_leaves_no_object_and_what_it_leaves_can_be_removed(
    store: Store, place: Place, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(os.urandom(60 * MIB))
    asked = json.dumps([place.url, place.options, str(tmp_path / "file")])
    killed = subprocess.run([sys.executable, "-c", KILLED, asked], cwd=ROOT, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list(store.list("")) == []
    if isinstance(store, Sweeps):
        found = list(store.leftovers("data"))
        assert found
        for leftover in found * 2:
            store.remove(leftover)
        assert list(store.leftovers("")) == []
    with FileSource(tmp_path / "file") as source:
        assert store.upload("data/killed", source).size == 60 * MIB


def test_the_url_is_for_people(store: Store) -> None:
    assert store.url
    assert "secret" not in store.url


def race(stores: list[Store], write: object, bodies: list[bytes]) -> list[bytes]:
    """Let all writers go at once, each through its own client; the bodies of those that were told they won."""
    barrier = threading.Barrier(len(bodies))

    def attempt(store: Store, body: bytes) -> bool:
        barrier.wait()
        try:
            write(store, body)  # type: ignore[operator]
        except ConditionFailed:
            return False
        return True

    with ThreadPoolExecutor(len(bodies)) as pool:
        told = list(pool.map(attempt, stores, bodies))
    return [body for body, won in zip(bodies, told, strict=True) if won]
