"""Where credentials are taken from, and what becomes of an upload whose credentials expire or are replaced.

A gate before a real SeaweedFS lets in the credentials that count at the moment, and signs for the server itself.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import botocore.auth
import botocore.awsrequest
import botocore.credentials
import pytest
from tests.protocol.checks import commits
from tests.protocol.faults import FakeClock
from tests.protocol.stories import Story, codes
from tests.servers import Bucket
from tests.servers.s3 import ACCESS_KEY, SECRET_KEY
from tests.store.conftest import SEAWEED
from tests.store.front import Forward, Reply, Request, fault, front

from dispatch_agent.errors import StoreDenied
from dispatch_agent.store.opening import open_store

pytestmark = [SEAWEED, pytest.mark.usefixtures("no_settings")]
LARGE = 17 << 20
"""Bytes: three parts."""


@pytest.fixture
def bucket(shared_bucket: Bucket) -> Bucket:
    return shared_bucket


OLD, NEW = ("OLDKEY", "old secret", "old token"), ("NEWKEY", "new secret", "new token")
Keys = tuple[str, str, str]


class Gate:
    """Lets in one set of credentials. `expires_at` chooses the request at which `expire` is called, once."""

    def __init__(self, expires_at: Callable[[Request], bool], expire: Callable[[Gate], None], code: str) -> None:
        self.allowed: Keys = OLD
        self.came: list[str] = []
        self.refused = 0
        self._expires_at, self._expire, self._code, self._lock = expires_at, expire, code, threading.Lock()

    def __call__(self, request: Request, forward: Forward) -> Reply | None:
        with self._lock:
            found = re.search(r"Credential=([^/]+)/", request.headers.get("authorization", ""))
            key, token = found[1] if found else "", request.headers.get("x-amz-security-token", "")
            if self.allowed == OLD and self._expires_at(request):
                self.allowed = NEW
                self._expire(self)
            self.came.append(key)
            let_in = (key, token) == (self.allowed[0], self.allowed[2])
            self.refused += not let_in
        return forward(signed(request)) if let_in else fault(400, self._code)


def signed(request: Request) -> Request:
    """The same request, signed with the server's own credentials."""
    ours = {"authorization", "x-amz-security-token", "x-amz-date", "x-amz-content-sha256"}
    headers = {name: value for name, value in request.headers.items() if name not in ours}
    parts = urlsplit(request.target)  # a proxy gets the whole URL
    url = f"http://{headers['host']}{parts.path}" + (f"?{parts.query}" if parts.query else "")
    sent = botocore.awsrequest.AWSRequest(request.method, url, headers=headers, data=request.body)
    sent.context["payload_signing_enabled"] = True
    credentials = botocore.credentials.Credentials(ACCESS_KEY, SECRET_KEY)
    botocore.auth.S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(sent)
    signed = {name.lower(): str(value) for name, value in sent.headers.items()}
    return Request(request.method, request.target, signed, request.body)


class Source:
    """A place where the SDK finds credentials, which a test renews."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder

    def hand_out(self, keys: Keys) -> None:
        raise NotImplementedError


class SharedFile(Source):
    """`AWS_SHARED_CREDENTIALS_FILE`, rewritten: by a Secret that is mounted, or a renewing job."""

    def hand_out(self, keys: Keys) -> None:
        names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        lines = [f"{name} = {value}\n" for name, value in zip(names, keys, strict=True)]
        (self.folder / "aws_shared_credentials_file").write_text("[default]\n" + "".join(lines))


class Process(Source):
    """`credential_process`, a program that prints them."""

    def hand_out(self, keys: Keys) -> None:
        said = self.folder / "said.json"
        said.write_text(json.dumps({"Version": 1, **_document(keys), "SessionToken": keys[2]}))
        (self.folder / "aws_config_file").write_text(f"[default]\ncredential_process = cat {said}\n")


class Container(Source):
    """`AWS_CONTAINER_CREDENTIALS_FULL_URI`: ECS, and EKS Pod Identity."""

    def hand_out(self, keys: Keys) -> None:
        answer = json.dumps({**_document(keys), "Token": keys[2], "Expiration": "2099-01-01T00:00:00Z"}).encode()
        self.server.answer = lambda _: answer  # type: ignore[attr-defined]

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        super().__init__(monkeypatch, folder)
        self.server = _answering()
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{self.server.server_port}/")


class WebIdentity(Source):
    """`AWS_WEB_IDENTITY_TOKEN_FILE`, which Kubernetes writes anew; the STS gives keys for what is in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        super().__init__(monkeypatch, folder)
        self.server = _answering()
        self.server.answer = self._assume  # type: ignore[attr-defined]
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{self.server.server_port}")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(folder / "token"))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/trainer")

    def hand_out(self, keys: Keys) -> None:
        (self.folder / "token").write_text(json.dumps(keys))

    @staticmethod
    def _assume(body: bytes) -> bytes:
        key, secret, token = json.loads(parse_qs(body.decode())["WebIdentityToken"][0])
        return (
            '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
            f"<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{secret}"
            f"</SecretAccessKey><SessionToken>{token}</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration>"
            "</Credentials><AssumedRoleUser><Arn>arn:aws:sts::1:assumed-role/trainer/x</Arn><AssumedRoleId>x:x"
            "</AssumedRoleId></AssumedRoleUser></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        ).encode()


def _document(keys: Keys) -> dict[str, str]:
    return {"AccessKeyId": keys[0], "SecretAccessKey": keys[1]}


def _answering() -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            said = self.server.answer(body)  # type: ignore[attr-defined]
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_POST = answer  # noqa: N815 (the names that http.server looks for)

        def log_message(self, *_: object) -> None:
            """Nothing that a failed test would want to see."""

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture(params=[SharedFile, Process, Container, WebIdentity])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Source]:
    made: Source = request.param(monkeypatch, tmp_path)
    made.hand_out(OLD)
    server = getattr(made, "server", None)
    if server is None:
        yield made
        return
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


def is_second_part(request: Request) -> bool:
    return "partNumber=2" in request.query


def is_data(request: Request) -> bool:
    return request.method == "PUT" and "/data/" in request.target


class Waiting(FakeClock):
    """Calls `act` when somebody waits for the third time."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act, self._waits = act, 0

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self._waits += 1
        if self._waits == 3:
            self._act()
        return super().wait(event, seconds)


@contextmanager
def through(
    bucket: Bucket, place: Path, gate: Gate, *, size: int = 1000, clock: FakeClock | None = None
) -> Iterator[Story]:
    """One complete save, and publishers that reach the store through the gate."""
    prefix = f"gate/{os.urandom(6).hex()}"
    with ExitStack() as stack:
        endpoint = stack.enter_context(front(bucket.endpoint, gate))
        via = open_store(f"{bucket.url}/{prefix}", {"endpoint_url": endpoint})
        real = open_store(f"{bucket.url}/{prefix}", bucket.options)
        stack.callback(via.close)
        stack.callback(real.close)
        story = Story(real, place, clock=clock, via=via)
        story.execution.save("save", os.urandom(size))
        yield story


def check_published(story: Story, size: int = 1000) -> None:
    assert codes([story.watch()]) == [0]
    story.check()
    (record,) = commits(story.real)
    assert record.size == size


def test_i9_credentials_that_expire_in_the_middle_of_an_upload_are_read_again(
    bucket: Bucket, source: Source, tmp_path: Path
) -> None:
    """They expired, or somebody rotated the keys in the file: the part that was being sent is sent again."""
    code = "InvalidAccessKeyId" if isinstance(source, SharedFile) else "ExpiredToken"
    gate = Gate(is_second_part, lambda _: source.hand_out(NEW), code)
    with through(bucket, tmp_path / "root", gate, size=LARGE) as story:
        check_published(story, LARGE)
    assert gate.refused > 0
    assert gate.came[-1] == NEW[0]
    assert gate.came.count(OLD[0]) > 5


@pytest.mark.parametrize(
    "meanwhile",
    ["the old ones", "", "[def", "[default]\n", "[default]\naws_access_key_id = NEWKEY\n", "[other]\n"],
    ids=["unchanged", "empty", "torn line", "no keys", "half the keys", "another profile"],
)
def test_i9_credentials_that_are_renewed_only_after_a_while_are_waited_for(
    meanwhile: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the file was met in the middle of being rewritten."""
    monkeypatch.setenv("AWS_PROFILE", "default")
    source = SharedFile(monkeypatch, tmp_path)
    source.hand_out(OLD)

    def expire(_: Gate) -> None:
        if meanwhile != "the old ones":
            (tmp_path / "aws_shared_credentials_file").write_text(meanwhile)

    gate = Gate(is_data, expire, "ExpiredToken")
    clock = Waiting(lambda: source.hand_out(NEW))
    with through(bucket, tmp_path / "root", gate, clock=clock) as story:
        check_published(story)
    assert gate.refused > 0


def test_i8_credentials_of_the_processs_own_environment_stay_what_they_are(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody can change them from outside: exit 11, and a sentence that says where to look."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OLD[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", OLD[1])
    monkeypatch.setenv("AWS_SESSION_TOKEN", OLD[2])
    gate = Gate(is_data, lambda _: None, "ExpiredToken")
    with through(bucket, tmp_path / "root", gate) as story:
        error = story.publish("save")
        assert isinstance(error, StoreDenied)
        assert "ExpiredToken" in str(error)
        assert commits(story.real) == []
