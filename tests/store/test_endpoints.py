"""Where the store is found and how it is reached: endpoints, addressing, proxies, CAs, by the AWS SDK's settings."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme
from tests.servers import Bucket
from tests.servers.s3 import ACCESS_KEY, SECRET_KEY
from tests.store.conftest import SEAWEED
from tests.store.front import Forward, Reply, Request, front

from dispatch_agent.errors import SettingsError, StoreUnavailable
from dispatch_agent.store.base import Store
from dispatch_agent.store.opening import open_store

pytestmark = [SEAWEED, pytest.mark.usefixtures("no_settings", "keys")]


@pytest.fixture
def bucket(shared_bucket: Bucket) -> Bucket:
    return shared_bucket


@contextmanager
def opened(bucket: Bucket, **options: Any) -> Iterator[Store]:
    """The bucket as an operator names it: what is not in `options` is found by the SDK."""
    store = open_store(f"{bucket.url}/credentials/{os.urandom(6).hex()}", options)
    try:
        yield store
    finally:
        store.close()


NOWHERE = "http://127.0.0.1:9"


@dataclass
class Recorder:
    """Lets everything through, and remembers it."""

    seen: list[Request] = field(default_factory=list)

    def __call__(self, request: Request, forward: Forward) -> Reply:
        self.seen.append(request)
        return forward(request)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


def use(store: Store) -> None:
    store.create("a", b"1")
    assert store.read("a").data == b"1"
    assert [item.key for item in store.list("")] == ["a"]


CONFIGURED = {
    "AWS_ENDPOINT_URL": ({"AWS_ENDPOINT_URL": "{here}"}, "", {}),
    "AWS_ENDPOINT_URL_S3 before AWS_ENDPOINT_URL": (
        {"AWS_ENDPOINT_URL_S3": "{here}", "AWS_ENDPOINT_URL": NOWHERE},
        "",
        {},
    ),
    "the config file": ({}, "[default]\nendpoint_url = {here}\n", {}),
    "the config file's services": ({}, "[default]\nservices = x\n[services x]\ns3 =\n  endpoint_url = {here}\n", {}),
    "a profile": ({"AWS_PROFILE": "job"}, "[profile job]\nendpoint_url = {here}\n", {}),
    "a storage option before all": ({"AWS_ENDPOINT_URL_S3": NOWHERE}, "", {"endpoint_url": "{here}"}),
}


@pytest.mark.parametrize("where", CONFIGURED)
def test_a_custom_endpoint_is_taken_from(
    where: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And is spoken to in path style: `endpoint/bucket/key`."""
    variables, config, options = CONFIGURED[where]
    recorder = Recorder()
    with front(bucket.endpoint, recorder) as here:
        for name, value in variables.items():
            monkeypatch.setenv(name, value.format(here=here))
        (tmp_path / "aws_config_file").write_text(config.format(here=here))
        with opened(bucket, **{name: value.format(here=here) for name, value in options.items()}) as store:
            use(store)
    assert len(recorder.seen) == 3
    assert all(request.target.startswith(f"/{bucket.name}") for request in recorder.seen)
    assert {request.headers["host"] for request in recorder.seen} == {here.removeprefix("http://")}


@pytest.mark.parametrize(
    ("style", "host", "path"),
    [
        ("virtual", "{bucket}.store.invalid", "/credentials/"),
        ("path", "store.invalid", "/{bucket}/credentials/"),
        ("auto", "store.invalid", "/{bucket}/credentials/"),
    ],
)
def test_the_config_file_says_how_a_bucket_is_addressed(
    style: str, host: str, path: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Asked of what goes to a proxy: no name server knows these hosts."""
    (tmp_path / "aws_config_file").write_text(f"[default]\ns3 =\n  addressing_style = {style}\n")
    recorder = Recorder()

    def answers(request: Request, _: Forward) -> Reply:
        return recorder(request, lambda _: Reply(200, [("ETag", '"1"')]))

    with front(bucket.endpoint, answers) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy)
        with opened(bucket, endpoint_url="http://store.invalid") as store:
            store.put("a", b"1")
    (request,) = recorder.seen
    assert urlsplit(request.target).netloc == host.format(bucket=bucket.name)
    assert urlsplit(request.target).path.startswith(path.format(bucket=bucket.name))


# --- proxies ----------------------------------------------------------------------------------------------------------


def test_an_http_proxy_is_used_and_no_proxy_is_heeded(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    with front(bucket.endpoint, recorder) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.replace("//", "//somebody:hush-hush@"))
        with opened(bucket, endpoint_url=bucket.endpoint) as store:
            use(store)
        assert len(recorder.seen) == 3
        assert all(request.target.startswith(bucket.endpoint) for request in recorder.seen)
        assert all("proxy-authorization" in request.headers for request in recorder.seen)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with opened(bucket, endpoint_url=bucket.endpoint) as store:
            use(store)
        assert len(recorder.seen) == 3


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_is_away_is_named_without_its_password(
    scheme: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{scheme.upper()}_PROXY", "http://somebody:hush-hush@127.0.0.1:9")
    with opened(bucket, endpoint_url=f"{scheme}://store.invalid") as store, pytest.raises(StoreUnavailable) as caught:
        store.read("a")
    assert "proxy" in str(caught.value)
    assert "127.0.0.1:9" in str(caught.value)
    assert "hush" not in "".join(traceback.format_exception(caught.value))


# --- TLS --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Authority:
    """A CA of one's own, and what a server needs that it vouches for."""

    bundle: Path
    server: ssl.SSLContext


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = trustme.CA()
    made.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.issue_cert("127.0.0.1").configure_cert(context)
    return Authority(tmp_path / "ca.pem", context)


@pytest.mark.parametrize("named", ["AWS_CA_BUNDLE", "ca_bundle"])
def test_a_store_behind_an_own_ca(
    named: str, bucket: Bucket, authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if named == "AWS_CA_BUNDLE":
        monkeypatch.setenv(named, str(authority.bundle))
    else:
        (tmp_path / "aws_config_file").write_text(f"[default]\n{named} = {authority.bundle}\n")
    with (
        front(bucket.endpoint, Recorder(), authority.server) as endpoint,
        opened(bucket, endpoint_url=endpoint) as store,
    ):
        use(store)


def test_an_unknown_ca_is_refused_with_the_variable_that_names_one(bucket: Bucket, authority: Authority) -> None:
    with (
        front(bucket.endpoint, Recorder(), authority.server) as endpoint,
        opened(bucket, endpoint_url=endpoint) as store,
        pytest.raises(StoreUnavailable, match="AWS_CA_BUNDLE"),
    ):
        store.read("a")


@pytest.mark.parametrize("what", ["missing", "no certificate"])
def test_a_ca_bundle_that_cannot_be_read_is_a_setting(
    what: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if what == "no certificate":
        (tmp_path / "bundle").write_text("nothing that is one\n")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "bundle"))
    told = pytest.raises(SettingsError, match="AWS_CA_BUNDLE")
    with opened(bucket, endpoint_url="https://127.0.0.1:9") as store, told:
        store.read("a")


def test_an_https_proxy_is_asked_for_a_tunnel(
    bucket: Bucket, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    with front(bucket.endpoint, Recorder(), authority.server) as endpoint, tunnel() as (proxy, asked):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        with opened(bucket, endpoint_url=endpoint) as store:
            use(store)
        assert set(asked) == {f"CONNECT {endpoint.removeprefix('https://')} HTTP/1.1"}


@contextmanager
def tunnel() -> Iterator[tuple[str, list[str]]]:
    """An HTTP proxy that knows CONNECT alone, and the request lines that it gets."""
    asked: list[str] = []

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline().decode().strip())
            while self.rfile.readline().strip():
                pass
            host, _, port = asked[-1].split()[1].partition(":")
            with socket.create_connection((host, int(port))) as there:
                self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=pump, args=(there, self.connection))
                back.start()
                pump(self.connection, there)
                back.join()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()
