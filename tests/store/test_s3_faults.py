"""What S3 answers when something is wrong, from real causes and from a front that misbehaves, and what it means."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.servers import Bucket
from tests.store.conftest import SEAWEED, ChangedError, FileSource
from tests.store.front import Behaviour, Chosen, Forward, Reply, Request, fault, front

from dispatch_agent.errors import SettingsError, StoreDenied, StoreError, StoreTooWeak, StoreUnavailable
from dispatch_agent.store.base import ConditionFailed, KeyMissing, Store
from dispatch_agent.store.capabilities import Sweeps
from dispatch_agent.store.opening import open_store

pytestmark = SEAWEED
MIB = 1 << 20
QUICK = {"config_kwargs": {"connect_timeout": 2, "read_timeout": 2, "retries": {"total_max_attempts": 2}}}


@pytest.fixture
def bucket(shared_bucket: Bucket) -> Bucket:
    return shared_bucket


@contextmanager
def opened(bucket: Bucket, **options: Any) -> Iterator[Store]:
    store = open_store(f"{bucket.url}/faults/{os.urandom(6).hex()}", {**bucket.options, **QUICK, **options})
    try:
        yield store
    finally:
        store.close()


@contextmanager
def behind(bucket: Bucket, behave: Behaviour) -> Iterator[Store]:
    with front(bucket.endpoint, behave) as endpoint, opened(bucket.behind(endpoint)) as store:
        yield store


def once(when: Callable[[Request], bool], act: Behaviour) -> Chosen:
    """Misbehaves at the first request that `when` chooses, then no more."""
    return Chosen(when, act)


def always(when: Callable[[Request], bool], act: Behaviour) -> Chosen:
    """Misbehaves at every request that `when` chooses."""
    return Chosen(when, act, more=10**9)


def is_put(request: Request) -> bool:
    return request.method == "PUT"


def lose_answer(request: Request, forward: Forward) -> None:
    forward(request)


def answer_500(request: Request, forward: Forward) -> Reply:
    forward(request)
    return fault(500, "InternalError")


def hang(ended: threading.Event) -> None:
    ended.wait(20)


class TestDenied:
    def test_a_wrong_secret(self, bucket: Bucket) -> None:
        with opened(bucket, secret="wrong") as store, pytest.raises(StoreDenied, match="SignatureDoesNotMatch"):
            store.create("a", b"1")

    def test_an_unknown_key(self, bucket: Bucket) -> None:
        with opened(bucket, key="nobody") as store, pytest.raises(StoreDenied, match="InvalidAccessKeyId"):
            list(store.list(""))

    def test_no_credentials_at_all(self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        with opened(bucket, key=None, secret=None) as store, pytest.raises(StoreDenied, match="credentials"):
            store.read("a")

    @pytest.mark.parametrize(
        ("status", "code"), [(403, "AccessDenied"), (401, "Unauthorized"), (400, "ExpiredToken"), (400, "InvalidToken")]
    )
    def test_what_the_server_says_of_the_credentials(self, bucket: Bucket, status: int, code: str) -> None:
        with behind(bucket, lambda *_: fault(status, code)) as store, pytest.raises(StoreDenied, match=code):
            store.put("a", b"1")


def test_an_expired_token_is_read_again_from_where_it_came(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """s3fs reads files and variables once; a token that was renewed meanwhile is only seen by a new session."""
    files = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(files))
    files.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = old\n")

    def behave(request: Request, forward: Forward) -> Reply | None:
        if "Credential=old/" in request.headers["authorization"]:
            files.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = testsecret\n")
            return fault(400, "ExpiredToken")
        return forward(request)

    with front(bucket.endpoint, behave) as endpoint, opened(bucket.behind(endpoint), key=None, secret=None) as store:
        store.create("a", b"1")
        assert store.read("a").data == b"1"


class TestUnavailable:
    def test_a_missing_bucket(self, rclone: str) -> None:
        """Not from SeaweedFS, which makes a bucket for whoever may."""
        with opened(Bucket(rclone, "no-such-bucket")) as store:
            for use in (lambda: store.put("a", b"1"), lambda: store.read("a"), lambda: list(store.list(""))):
                with pytest.raises(StoreUnavailable, match="create the bucket"):
                    use()

    def test_a_refused_connection(self, bucket: Bucket) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound and not listening
            nobody = bucket.behind(f"http://127.0.0.1:{taken.getsockname()[1]}")
            with opened(nobody) as store, pytest.raises(StoreUnavailable):
                store.create("a", b"1")

    def test_an_unknown_host(self, bucket: Bucket) -> None:
        with opened(bucket.behind("http://no-such-host.invalid")) as store, pytest.raises(StoreUnavailable):
            store.read("a")

    def test_a_server_that_does_not_answer(self, bucket: Bucket) -> None:
        ended = threading.Event()
        with behind(bucket, lambda *_: hang(ended)) as store:
            with pytest.raises(StoreUnavailable, match="imeout"):
                store.read("a")
            ended.set()

    @pytest.mark.parametrize(
        ("status", "code"),
        [(500, "InternalError"), (503, "SlowDown"), (409, "ConditionalRequestConflict"), (400, "RequestTimeout")],
    )
    def test_what_the_server_says_may_pass(self, bucket: Bucket, status: int, code: str) -> None:
        with behind(bucket, lambda *_: fault(status, code)) as store, pytest.raises(StoreUnavailable, match=code):
            store.create("a", b"1")

    def test_a_busy_moment_is_waited_out(self, bucket: Bucket) -> None:
        with behind(bucket, once(is_put, lambda *_: fault(503, "SlowDown"))) as store:
            store.create("a", b"1")
            assert store.read("a").data == b"1"


class TestLostAnswers:
    """The first request is applied, its answer lost, the request sent again: the store says no to its own success."""

    @pytest.mark.parametrize("lose", [lose_answer, answer_500])
    def test_a_create_is_said_to_have_failed_and_stands(self, bucket: Bucket, lose: Any) -> None:
        with behind(bucket, once(is_put, lose)) as store:
            with pytest.raises(ConditionFailed):
                store.create("a", b"mine")
            assert store.read("a").data == b"mine"

    @pytest.mark.parametrize("lose", [lose_answer, answer_500])
    def test_a_replace_is_said_to_have_failed_and_stands(self, bucket: Bucket, lose: Any) -> None:
        with behind(bucket, once(lambda r: "if-match" in r.headers, lose)) as store:
            version = store.create("a", b"old")
            with pytest.raises(ConditionFailed):
                store.replace("a", b"mine", version)
            assert store.read("a").data == b"mine"

    def test_a_multipart_upload_that_was_completed_is_done(self, bucket: Bucket, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(os.urandom(17 * MIB))
        completes = once(lambda r: r.method == "POST" and "uploadId" in r.query, lose_answer)
        with behind(bucket, completes) as store, FileSource(tmp_path / "file") as source:
            assert store.upload("a", source).size == 17 * MIB
            assert b"".join(store.stream("a")) == (tmp_path / "file").read_bytes()


class TestConditions:
    @pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "NotImplemented")])
    def test_that_a_store_does_not_know_make_it_too_weak(self, bucket: Bucket, status: int, code: str) -> None:
        with behind(bucket, always(lambda r: "if-none-match" in r.headers, lambda *_: fault(status, code))) as store:
            with pytest.raises(StoreTooWeak, match=code):
                store.create("a", b"1")
            store.put("a", b"1")

    def test_compared_without_quotes_hold_as_well(self, bucket: Bucket) -> None:
        """Ceph RGW gives an ETag in quotes and refuses it in quotes."""

        def quoted(request: Request) -> bool:
            return request.headers.get("if-match", "").startswith('"')

        with behind(bucket, always(quoted, lambda *_: fault(412, "PreconditionFailed"))) as store:
            old = store.create("a", b"one")
            store.replace("a", b"two", old)
            assert store.read("a").data == b"two"
            with pytest.raises(ConditionFailed):
                store.replace("a", b"three", old)
            assert store.read("a").data == b"two"

    def test_on_a_vanished_key_have_failed(self, bucket: Bucket) -> None:
        """AWS says 404 to If-Match on an absent key, SeaweedFS 412."""
        with behind(bucket, always(lambda r: "if-match" in r.headers, lambda *_: fault(404, "NoSuchKey"))) as store:
            version = store.create("a", b"one")
            with pytest.raises(ConditionFailed):
                store.replace("a", b"two", version)


@pytest.mark.parametrize("write", ["put", "create"])
def test_a_write_that_the_server_loses_may_be_tried_again(bucket: Bucket, write: str) -> None:
    """`juicefs gateway` answers 404 to a PUT beside a delete that leaves its folder empty."""
    with behind(bucket, once(is_put, lambda *_: fault(404, "NoSuchKey"))) as store:
        with pytest.raises(StoreUnavailable, match="write it again"):
            getattr(store, write)("a", b"1")
        getattr(store, write)("a", b"1")
        assert store.read("a").data == b"1"


class TestDownloads:
    def test_go_on_where_the_connection_broke(self, bucket: Bucket) -> None:
        def cut(request: Request, forward: Forward) -> Reply:
            whole = forward(request)
            return Reply(whole.status, whole.headers, whole.body[: len(whole.body) // 2])

        gets = once(lambda r: r.method == "GET", cut)
        with behind(bucket, gets) as store:
            data = os.urandom(5 * MIB)
            store.put("a", data)
            assert b"".join(store.stream("a")) == data
        assert "bytes=" in gets.seen[-1].headers["range"]

    def test_that_break_every_time_end_in_an_error(self, bucket: Bucket) -> None:
        def cut(request: Request, forward: Forward) -> Reply:
            whole = forward(request)
            return Reply(whole.status, whole.headers, b"")

        with behind(bucket, always(lambda r: r.method == "GET", cut)) as store:
            store.put("a", bytes(5 * MIB))
            with pytest.raises(StoreUnavailable):
                list(store.stream("a"))

    def test_never_join_two_objects(self, bucket: Bucket) -> None:
        def cut_and_change(request: Request, forward: Forward) -> Reply:
            whole = forward(request)
            client.put_object(Bucket=bucket.name, Key=request.key, Body=bytes(5 * MIB))
            return Reply(whole.status, whole.headers, whole.body[: len(whole.body) // 2])

        client = bucket.client()
        with behind(bucket, once(lambda r: r.method == "GET", cut_and_change)) as store:
            store.put("a", os.urandom(5 * MIB))
            with pytest.raises(StoreUnavailable, match="changed while it was read"):
                list(store.stream("a"))


class TestUploads:
    def test_that_fail_leave_no_parts(self, s3_bucket: Bucket, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(70 * MIB))
        with opened(s3_bucket) as store:
            with FileSource(tmp_path / "file", fails_at=60 * MIB) as source, pytest.raises(ChangedError):
                store.upload("a", source)
            assert list(store.list("")) == []
        assert not s3_bucket.client().list_multipart_uploads(Bucket=s3_bucket.name).get("Uploads")

    def test_that_were_killed_are_swept(self, s3_bucket: Bucket) -> None:
        client = s3_bucket.client()
        with opened(s3_bucket) as store:
            under = store.url.removeprefix(f"{s3_bucket.url}/")
            for key in ("data/1/a", "data/1/b", "data/2/a"):
                client.create_multipart_upload(Bucket=s3_bucket.name, Key=f"{under}/{key}")
            assert isinstance(store, Sweeps)
            found = list(store.leftovers("data/1"))
            assert sorted(leftover.key for leftover in found) == ["data/1/a", "data/1/b"]
            for leftover in found * 2:
                store.remove(leftover)
        left = client.list_multipart_uploads(Bucket=s3_bucket.name)["Uploads"]
        assert [upload["Key"] for upload in left] == [f"{under}/data/2/a"]

    def test_that_the_store_dropped_may_be_tried_again(self, bucket: Bucket, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(17 * MIB))
        path = tmp_path / "file"
        dropped = always(lambda r: "partNumber=2" in r.query, lambda *_: fault(404, "NoSuchUpload"))
        told = pytest.raises(StoreUnavailable, match="dropped the upload")
        with behind(bucket, dropped) as store, FileSource(path) as source, told:
            store.upload("a", source)

    def test_whose_server_fails_leave_no_parts(self, s3_bucket: Bucket, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(70 * MIB))
        third = always(lambda r: "partNumber=3" in r.query, lambda *_: fault(403, "AccessDenied"))
        path = tmp_path / "file"
        with behind(s3_bucket, third) as store, FileSource(path) as source, pytest.raises(StoreDenied):
            store.upload("a", source)
        assert not s3_bucket.client().list_multipart_uploads(Bucket=s3_bucket.name).get("Uploads")

    @pytest.mark.parametrize("size", [MIB, 40 * MIB])
    def test_to_a_hung_server_end_when_the_source_says_so(self, bucket: Bucket, tmp_path: Path, size: int) -> None:
        """`tick` is asked while the store waits, so a publisher that is told to stop does stop."""
        (tmp_path / "file").write_bytes(bytes(size))
        ended = threading.Event()

        class Impatient(FileSource):
            def tick(self, size: int) -> None:
                ended.set()
                raise ChangedError(size)

        hung = always(is_put, lambda *_: hang(ended))
        path = tmp_path / "file"
        with behind(bucket, hung) as store, Impatient(path) as source, pytest.raises(ChangedError):
            store.upload("a", source)

    @pytest.mark.parametrize("checksum", ["sha256", "md5"])
    @pytest.mark.parametrize("size", [MIB, 17 * MIB])
    def test_whose_bytes_are_spoilt_on_the_way_store_nothing(
        self, bucket: Bucket, tmp_path: Path, checksum: str, size: int
    ) -> None:
        (tmp_path / "file").write_bytes(os.urandom(size))

        def spoil(request: Request, forward: Forward) -> Reply:
            spoilt = b"spoilt" + request.body[6:]
            # As on a connection over TLS, where the body is not signed: only our checksum covers it.
            return forward(Request(request.method, request.target, request.headers, spoilt))

        with behind(bucket, always(is_put, spoil)) as store, FileSource(tmp_path / "file") as source:
            store.checksum = checksum  # type: ignore[attr-defined]
            with pytest.raises(StoreError):
                store.upload("a", source)
            assert list(store.list("")) == []


def test_a_wrong_region_is_a_setting(bucket: Bucket) -> None:
    malformed = fault(400, "AuthorizationHeaderMalformed")
    with behind(bucket, lambda *_: malformed) as store, pytest.raises(SettingsError, match="region"):
        store.put("a", b"1")


def test_a_profile_that_is_not_there_is_a_setting(bucket: Bucket) -> None:
    with opened(bucket, profile="nobody") as store, pytest.raises(SettingsError, match="nobody"):
        store.put("a", b"1")


def test_options_that_nobody_knows_are_a_setting(bucket: Bucket) -> None:
    with pytest.raises(SettingsError, match="no_such_option"), opened(bucket, no_such_option=1) as store:
        store.put("a", b"1")


def test_no_error_shows_the_secret(bucket: Bucket) -> None:
    with opened(bucket, secret="hush-hush") as store, pytest.raises(StoreDenied) as caught:
        store.put("a", b"1")
    assert "hush" not in str(caught.value)


def test_keys_are_missing_and_nothing_else(bucket: Bucket) -> None:
    with opened(bucket) as store, pytest.raises(KeyMissing):
        store.read("a")
