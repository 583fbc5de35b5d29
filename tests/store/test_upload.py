"""How S3 uploads are cut, how much memory they take, and where the store finds its endpoint and keys."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.servers import Bucket
from tests.store.conftest import SEAWEED

from dispatch_agent.errors import StoreError
from dispatch_agent.store.parts import MIB, PART, Room
from dispatch_agent.store.s3_upload import LARGEST, MOST_PARTS, part_size

GIB, TIB = 1 << 30, 1 << 40


@pytest.mark.parametrize(
    ("size", "part"),
    [(1, PART), (5 * MIB, PART), (50 * GIB, PART), (600 * GIB, 69 * MIB), (5 * TIB, 583 * MIB)],
)
def test_parts_are_few_enough_for_any_file(size: int, part: int) -> None:
    assert part_size(size) == part
    assert -(-size // part) <= MOST_PARTS


def test_a_file_that_no_object_can_hold_is_refused_before_it_is_sent() -> None:
    with pytest.raises(StoreError, match="several files"):
        part_size(LARGEST + 1)


class TestRoom:
    def test_is_shared_by_all(self) -> None:
        room = Room(10)
        room.take(6, list)
        entered = threading.Event()

        def second() -> None:
            room.take(6, list)
            entered.set()

        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.1)
        room.give(6)
        assert entered.wait(5)
        thread.join()

    def test_lets_in_one_part_of_any_size(self) -> None:
        Room(10).take(100, list)

    def test_is_not_waited_for_by_who_is_told_to_stop(self) -> None:
        def stop() -> None:
            raise InterruptedError

        room = Room(10)
        room.take(10, list)
        with pytest.raises(InterruptedError):
            room.take(1, stop)


def run(program: str, *arguments: str, **environment: str) -> str:
    # One endpoint, one set of keys, nothing of this process's own: what a container would have.
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env={**kept, **environment}, check=True, stdout=subprocess.PIPE
    )
    return done.stdout.decode()


MEASURED = """
import hashlib, resource, sys
from dispatch_agent.store.opening import open_store

class Zeros:
    size = 160 << 20
    at = 0
    def fileno(self):
        raise AssertionError
    def read(self, size):
        size = min(size, self.size - self.at)
        self.at += size
        return bytes(size)
    def tick(self, size):
        pass

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

store = open_store(sys.argv[1])
store.put("warm", b"")
before = peak()
uploaded = store.upload("zeros", Zeros())
digest = hashlib.sha256()
for piece in store.stream("zeros"):
    digest.update(piece)
assert digest.hexdigest() == uploaded.sha256
print(peak() - before)
store.close()
"""


@SEAWEED
def test_memory_does_not_grow_with_the_file(rclone_bucket: Bucket) -> None:
    assert int(run(MEASURED, f"{rclone_bucket.url}/memory", **rclone_bucket.environment)) < 100


ROUND_TRIP = """
import sys
from dispatch_agent.store.opening import open_store
store = open_store(sys.argv[1])
store.create("a", b"1")
print(store.read("a").data == b"1")
store.close()
"""


@SEAWEED
class TestSettings:
    def test_come_from_the_environment(self, shared_bucket: Bucket) -> None:
        assert run(ROUND_TRIP, f"{shared_bucket.url}/env", **shared_bucket.environment) == "True\n"

    def test_come_from_the_files_of_the_sdk(self, shared_bucket: Bucket, tmp_path: Path) -> None:
        (tmp_path / "config").write_text(
            f"[profile training]\nregion = us-east-1\nendpoint_url = {shared_bucket.endpoint}\n"
        )
        (tmp_path / "credentials").write_text(
            "[training]\naws_access_key_id = test\naws_secret_access_key = testsecret\n"
        )
        answer = run(
            ROUND_TRIP,
            f"{shared_bucket.url}/files",
            AWS_PROFILE="training",
            AWS_CONFIG_FILE=str(tmp_path / "config"),
            AWS_SHARED_CREDENTIALS_FILE=str(tmp_path / "credentials"),
        )
        assert answer == "True\n"

    def test_a_host_name_is_no_part_of_a_bucket_name(self, shared_bucket: Bucket) -> None:
        """Virtual-host addressing would ask for `bucket.localhost`."""
        by_name = shared_bucket.environment | {
            "AWS_ENDPOINT_URL": shared_bucket.endpoint.replace("127.0.0.1", "localhost")
        }
        assert run(ROUND_TRIP, f"{shared_bucket.url}/name", **by_name) == "True\n"


FORKED = """
import os, sys
from dispatch_agent.store.opening import open_store
store = open_store(sys.argv[1])
store.put("parent", b"1")
child = os.fork()
if child == 0:
    mine = open_store(sys.argv[1])
    mine.put("child", mine.read("parent").data)
    mine.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(store.read("child").data == b"1")
store.close()
"""


@SEAWEED
def test_a_forked_process_opens_its_own(shared_bucket: Bucket) -> None:
    assert run(FORKED, f"{shared_bucket.url}/fork", **shared_bucket.environment) == "True\n"


@SEAWEED
def test_what_another_process_wrote_is_seen_at_once(shared_bucket: Bucket) -> None:
    """s3fs answers from listings that it remembers, also about sizes; nothing here may."""
    from dispatch_agent.store.opening import open_store

    url = f"{shared_bucket.url}/stale"
    store = open_store(url, shared_bucket.options)
    store.put("a", b"old")
    assert [found.size for found in store.list("")] == [3]
    program = "import sys; from dispatch_agent.store.opening import open_store as o; o(sys.argv[1]).put('a', b'newer')"
    run(program, url, **shared_bucket.environment)
    assert [found.size for found in store.list("")] == [5]
    assert store.read("a").data == b"newer"
    assert hashlib.sha256(b"".join(store.stream("a"))).digest() == hashlib.sha256(b"newer").digest()
    store.close()
