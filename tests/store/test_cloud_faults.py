"""What Azure and Google Cloud Storage answer when something is wrong, from real causes and from a front that
misbehaves, and what it means."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.servers.azurite import KEY, Container
from tests.servers.gcs import GcsBucket
from tests.store.conftest import ChangedError, FileSource
from tests.store.front import Behaviour, Forward, Reply, Request, front
from tests.store.test_upload import MEASURED, run

from dispatch_agent.errors import StoreDenied, StoreError, StoreUnavailable
from dispatch_agent.store import azure_connection, gcs_connection
from dispatch_agent.store.azure import BESIDE, LARGEST_BLOCK, MOST_BLOCKS, PART, block_size
from dispatch_agent.store.base import ConditionFailed, KeyMissing, Store
from dispatch_agent.store.opening import open_store
from dispatch_agent.store.probe import probe

pytestmark = pytest.mark.server
# Tests that share a server run in one process, so that it is started once.
AZURE = pytest.mark.xdist_group("azurite-conformance")
GOOGLE = pytest.mark.xdist_group("gcs-conformance")
LARGE = 2 * PART + 1000  # more than one request


@dataclass(frozen=True)
class Cloud:
    """One of the two, and how its requests look."""

    place: Container | GcsBucket
    part: re.Pattern[str]  # method and target of a request that carries a part of a file
    last: re.Pattern[str]  # of the one that makes the parts an object

    @contextmanager
    def opened(self, **options: Any) -> Iterator[Store]:
        store = open_store(f"{self.place.url}/faults/{os.urandom(6).hex()}", {**self.place.options, **options})
        try:
            yield store
        finally:
            store.close()

    @contextmanager
    def behind(self, behave: Behaviour) -> Iterator[Store]:
        def here(request: Request, forward: Forward) -> Reply | None:
            reply = behave(request, forward)
            if reply is None:
                return None
            # Where to send a file to, which the server says of itself.
            moved = [(n, v.replace(self.place.endpoint, f"http://{request.headers['host']}")) for n, v in reply.headers]
            return Reply(reply.status, moved, reply.body)

        with front(self.place.endpoint, here) as endpoint, self.at(endpoint=endpoint).opened() as store:
            yield store

    def at(self, **other: str) -> Cloud:
        """Reached in another way."""
        return replace(self, place=replace(self.place, **other))


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("azure_container", id="azurite", marks=AZURE),
        pytest.param("gcs_bucket", id="gcs", marks=GOOGLE),
    ],
)
def place(request: pytest.FixtureRequest) -> Container | GcsBucket:
    place: Container | GcsBucket = request.getfixturevalue(request.param)
    return place


@pytest.fixture
def cloud(place: Container | GcsBucket) -> Cloud:
    return azure(place) if isinstance(place, Container) else google(place)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(azure_connection, "TRIES_MORE", 1)
    monkeypatch.setattr(gcs_connection, "PAUSES", (0.1,))


def azure(container: Container) -> Cloud:
    return Cloud(container, re.compile(r"PUT .*comp=block&"), re.compile(r"PUT .*comp=blocklist"))


def google(bucket: GcsBucket) -> Cloud:
    return Cloud(bucket, re.compile(r"PUT .*upload_id="), re.compile(r"PUT .*upload_id="))


class Once:
    """Acts at the first request that `when` chooses, then no more."""

    def __init__(self, when: Callable[[Request], bool], act: Behaviour) -> None:
        self.done = threading.Event()
        self._when, self._act, self._lock = when, act, threading.Lock()

    def __call__(self, request: Request, forward: Forward) -> Reply | None:
        with self._lock:
            mine = not self.done.is_set() and self._when(request)
            if mine:
                self.done.set()
        return self._act(request, forward) if mine else forward(request)


def is_write(request: Request) -> bool:
    return request.method in {"PUT", "POST"}


def lose_answer(request: Request, forward: Forward) -> None:
    forward(request)


def says(status: int) -> Behaviour:
    return lambda *_: Reply(status, [("Content-Type", "text/plain")], b"said by the test")


def matches(pattern: re.Pattern[str]) -> Callable[[Request], bool]:
    return lambda request: bool(pattern.match(f"{request.method} {request.target}"))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    (tmp_path / "large").write_bytes(os.urandom(LARGE))
    return tmp_path / "large"


class TestLostAnswers:
    """The request is sent again by itself, and the second is refused because of the first."""

    def test_of_a_create_end_in_a_refusal_and_our_own_bytes(self, cloud: Cloud) -> None:
        behave = Once(is_write, lose_answer)
        with cloud.behind(behave) as store:
            with pytest.raises(ConditionFailed):
                store.create("a", b"mine")
            assert behave.done.is_set()
            assert store.read("a").data == b"mine"

    def test_of_a_replace_end_in_a_refusal_and_our_own_bytes(self, cloud: Cloud) -> None:
        behave = Once(lambda request: b"mine" in request.body, lose_answer)
        with cloud.behind(behave) as store:
            version = store.create("a", b"first")
            with pytest.raises(ConditionFailed):
                store.replace("a", b"mine", version)
            assert store.read("a").data == b"mine"

    def test_of_what_makes_the_object_are_no_fault(self, cloud: Cloud, large: Path) -> None:
        is_last = matches(cloud.last)
        if isinstance(cloud.place, GcsBucket):  # there it is the last part, which alone has a digest
            is_last = lambda request: "x-goog-hash" in request.headers  # noqa: E731
        behave = Once(is_last, lose_answer)
        with cloud.behind(behave) as store, FileSource(large) as source:
            assert store.upload("a", source).size == LARGE
            assert behave.done.is_set()
            assert b"".join(store.stream("a")) == large.read_bytes()


class TestUnavailable:
    def test_for_a_moment_is_not_noticed(self, cloud: Cloud, large: Path) -> None:
        for use in (
            lambda store: store.put("a", b"1"),
            lambda store: store.create("b", b"1"),
            lambda store: list(store.list("")),
            lambda store: store.folders(""),
            lambda store: store.delete("a"),
        ):
            with cloud.behind(Once(lambda _: True, says(503))) as store:
                use(store)
        with cloud.behind(Once(matches(cloud.part), says(503))) as store, FileSource(large) as source:
            store.upload("a", source)
            assert b"".join(store.stream("a")) == large.read_bytes()

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_for_longer_is_said(self, cloud: Cloud, status: int) -> None:
        with cloud.behind(says(status)) as store, pytest.raises(StoreUnavailable, match=f"{status}.*if this stays"):
            store.put("a", b"1")

    def test_a_missing_bucket_is_to_be_created(self, cloud: Cloud, large: Path) -> None:
        with cloud.at(name="no-such-place").opened() as store, FileSource(large) as source:
            for use in (
                lambda: store.create("a", b"1"),
                lambda: store.upload("a", source),
                lambda: list(store.list("")),
                lambda: store.folders(""),
            ):
                with pytest.raises(StoreUnavailable, match=r"create (it|the container)"):
                    use()

    def test_a_refused_connection(self, cloud: Cloud) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound and not listening
            nobody = cloud.at(endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}")
            with nobody.opened() as store, pytest.raises(StoreUnavailable, match="network"):
                store.create("a", b"1")

    def test_a_server_that_hangs_does_not_hold_who_is_told_to_stop(self, cloud: Cloud, large: Path) -> None:
        ended = threading.Event()

        class Stopping(FileSource):
            def tick(self, _: int) -> None:
                raise ChangedError

        def hang(*_: object) -> None:
            ended.wait(30)

        with cloud.behind(lambda r, f: hang() if matches(cloud.part)(r) else f(r)) as store:
            with Stopping(large) as source, pytest.raises(ChangedError):
                store.upload("a", source)
            ended.set()
            assert list(store.list("")) == []


class TestDenied:
    @pytest.mark.parametrize("status", [401, 403])
    def test_is_said_with_what_to_do(self, cloud: Cloud, status: int) -> None:
        with cloud.behind(says(status)) as store:
            for use in (lambda: store.put("a", b"1"), lambda: store.read("a"), lambda: list(store.list(""))):
                with pytest.raises(StoreDenied, match=f"{status}.*credentials"):
                    use()

    @AZURE
    def test_a_wrong_account_key(self, azure_container: Container) -> None:
        for key in (base64.b64encode(b"wrong" * 10).decode(), "no base64!"):
            with azure(azure_container).at(key=key).opened() as store, pytest.raises(StoreDenied) as denied:
                store.create("a", b"1")
            assert key not in str(denied.value)

    @GOOGLE
    def test_a_service_account_that_google_does_not_know(self, gcs_bucket: GcsBucket, tmp_path: Path) -> None:
        with refusing_tokens() as endpoint:
            (tmp_path / "key.json").write_text(json.dumps(service_account(endpoint)))
            with google(gcs_bucket).opened(token=str(tmp_path / "key.json")) as store:
                with pytest.raises(StoreDenied, match="Invalid Credentials"):
                    store.create("a", b"1")
                with pytest.raises(StoreDenied, match="give credentials"):
                    list(store.list(""))

    def test_secrets_are_not_shown(self, cloud: Cloud) -> None:
        with cloud.behind(says(403)) as store:
            with pytest.raises(StoreDenied) as denied:
                store.put("a", b"1")
            for text in (str(denied.value), repr(denied.value), repr(store), store.url):
                assert KEY not in text


class TestWrongBytes:
    @AZURE
    def test_are_refused_by_azure(self, azure_container: Container, large: Path) -> None:
        """Each block carries its MD5."""
        cloud = azure(azure_container)
        with cloud.behind(Once(matches(cloud.part), spoil)) as store, FileSource(large) as source:
            with pytest.raises(StoreError, match="MD5"):
                store.upload("a", source)
            assert list(store.list("")) == []

    @GOOGLE
    def test_are_refused_by_google(self, gcs_bucket: GcsBucket, large: Path) -> None:
        """Which the emulator does not do: here the front does."""
        with google(gcs_bucket).behind(Checking()) as store, FileSource(large) as source:
            assert probe(store).checksum == "md5"
            assert store.upload("a", source).verified
            assert b"".join(store.stream("a")) == large.read_bytes()

    @GOOGLE
    def test_are_found_out_by_what_google_says_that_it_stored(self, gcs_bucket: GcsBucket, large: Path) -> None:
        behave = Once(matches(google(gcs_bucket).part), spoil)
        again = pytest.raises(StoreUnavailable, match="upload it again")
        with google(gcs_bucket).behind(behave) as store, FileSource(large) as source, again:
            store.upload("a", source)


class TestChunks:
    """Of a resumable upload."""

    @GOOGLE
    def test_of_which_the_service_keeps_a_part_are_sent_on_from_there(self, gcs_bucket: GcsBucket, large: Path) -> None:
        def keep_a_part(request: Request, forward: Forward) -> Reply:
            begin, end = map(int, re.findall(r"\d+", request.headers["content-range"])[:2])
            half = (begin + end) // 2
            kept = {**request.headers, "content-range": f"bytes {begin}-{half}/*"}
            return forward(replace(request, headers=kept, body=request.body[: half - begin + 1]))

        behave = Once(matches(google(gcs_bucket).part), keep_a_part)
        with google(gcs_bucket).behind(behave) as store, FileSource(large) as source:
            assert store.upload("a", source).sha256 == hashlib.sha256(large.read_bytes()).hexdigest()
            assert behave.done.is_set()
            assert b"".join(store.stream("a")) == large.read_bytes()

    @GOOGLE
    def test_of_an_upload_that_the_service_forgot_are_a_new_upload(self, gcs_bucket: GcsBucket, large: Path) -> None:
        behave = Once(matches(google(gcs_bucket).part), says(410))
        with google(gcs_bucket).behind(behave) as store, FileSource(large) as source:
            with pytest.raises(StoreUnavailable, match="upload it again"):
                store.upload("a", source)
            with pytest.raises(KeyMissing):
                store.read("a")


def test_a_file_that_is_replaced_while_it_is_read_is_not_mixed(cloud: Cloud, tmp_path: Path) -> None:
    rest: list[bytes] = []
    with cloud.opened() as store:
        for number in range(2):
            (tmp_path / "file").write_bytes(bytes([number]) * (3 * PART))
            if number:
                pieces = store.stream("a")
                assert next(pieces)[0] == 0
            with FileSource(tmp_path / "file") as source:
                store.upload("a", source)
        with pytest.raises(StoreUnavailable, match="changed while it was read"):
            rest.extend(pieces)
        assert {piece[0] for piece in rest} == {0}


class TestPages:
    """A listing goes on past one page; the servers' own pages are larger than the suite's listings."""

    KEYS = frozenset({f"a/{number}/x" for number in range(5)} | {f"b/{number}" for number in range(3)})

    @AZURE
    def test_of_azure(self, azure_container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
        with azure(azure_container).opened() as store:
            container = store._connection.container  # type: ignore[attr-defined]
            for name in ("list_blobs", "walk_blobs"):
                monkeypatch.setattr(container, name, partial(getattr(container, name), results_per_page=2))
            self._look(store)

    @GOOGLE
    def test_of_google(self, gcs_bucket: GcsBucket) -> None:
        pages: list[str] = []

        def short(request: Request, forward: Forward) -> Reply:
            if request.method == "GET" and "prefix=" in request.query:
                pages.append(request.query)
                request = replace(request, target=request.target + "&maxResults=2")
            return forward(request)

        with google(gcs_bucket).behind(short) as store:
            self._look(store)
        assert any("pageToken=" in query for query in pages), "the server gave all in one page"

    def _look(self, store: Store) -> None:
        for key in self.KEYS:
            store.put(key, b"")
        assert {found.key for found in store.list("")} == self.KEYS
        assert list(store.folders("a")) == list("01234")
        assert list(store.folders("")) == ["a", "b"]


def test_memory_does_not_grow_with_the_file(cloud: Cloud) -> None:
    variables = dict(cloud.place.environment)
    options = {"endpoint_url": cloud.place.endpoint, "token": "anon"} if isinstance(cloud.place, GcsBucket) else None
    program = MEASURED.replace("open_store(sys.argv[1])", f"open_store(sys.argv[1], {options!r})")
    assert int(run(program, f"{cloud.place.url}/memory", **variables)) < 100


@AZURE
def test_the_folders_of_a_hierarchical_namespace_are_no_objects(azure_container: Container) -> None:
    """There each folder is also listed as a blob that says so."""
    with azure(azure_container).opened() as store:
        store.put("a/b", b"1")
        container = store._connection.container  # type: ignore[attr-defined]
        folder = f"{store._under}a"  # type: ignore[attr-defined]
        azure_connection.loop.run(container.upload_blob(folder, b"", metadata={"hdi_isfolder": "true"}))
        assert [found.key for found in store.list("")] == ["a/b"]
        assert list(store.folders("")) == ["a"]


@pytest.mark.parametrize("size", [1, BESIDE * PART, 600 << 30, 100 << 40])
def test_blocks_are_few_enough_for_any_file(size: int) -> None:
    assert -(-size // block_size(size)) <= MOST_BLOCKS


def test_a_file_that_no_blob_can_hold_is_refused_before_it_is_sent() -> None:
    with pytest.raises(StoreError, match="several files"):
        block_size(MOST_BLOCKS * LARGEST_BLOCK + 1)


def spoil(request: Request, forward: Forward) -> Reply:
    return forward(replace(request, body=b"?" + request.body[1:]))


class Checking:
    """Refuses bytes that do not fit the MD5 that comes with them, as Google does."""

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}

    def __call__(self, request: Request, forward: Forward) -> Reply | None:
        if "uploadType=multipart" in request.query:
            resource, data = (part.split(b"\r\n\r\n", 1)[1] for part in request.body.split(b"\r\n--")[:2])
            said = json.loads(resource)["md5Hash"]
        elif "upload_id" in request.query:
            data = self._parts[request.query] = self._parts.get(request.query, b"") + request.body
            said = request.headers.get("x-goog-hash", "").removeprefix("md5=")
        else:
            return forward(request)
        if said and said != base64.b64encode(hashlib.md5(data).digest()).decode():  # noqa: S324 (what Google has)
            return says(400)(request, forward)
        return forward(request)


@contextmanager
def refusing_tokens() -> Iterator[str]:
    """The endpoint of something that gives nobody a token."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.dumps({"error": "invalid_grant", "error_description": "Invalid JWT"}).encode()
            self.send_response(400)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nobody asks."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/token"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def service_account(token_uri: str) -> dict[str, str]:
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return {
        "type": "service_account",
        "project_id": "p",
        "private_key_id": "1",
        "private_key": key.decode(),
        "client_email": "nobody@p.iam.gserviceaccount.com",
        "token_uri": token_uri,
    }
