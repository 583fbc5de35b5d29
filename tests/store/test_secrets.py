"""Secrets are nowhere but where they were given: whole commands, at their most talkative, with failures of every kind.

Looked through afterwards: what they printed and logged, their command lines and their children's, every file below the
checkpoint root and the restore's target, every key and every byte in the store, what `--json` says.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.protocol.checks import commits
from tests.protocol.jobs import Execution, small
from tests.servers import Bucket
from tests.store.conftest import SEAWEED
from tests.store.front import ANSWERS, CONDITIONAL, Forward, Reply, Request, front, is_conditional
from tests.store.test_credentials import signed

from dispatch_agent.store.opening import open_store

pytestmark = [SEAWEED, pytest.mark.usefixtures("no_settings")]
SECRETS = {
    "secret key": "hush/Key+wJalrXUtnFEMI",
    "session token": "hush-Token+IQoJb3JpZ2luX2Vj/EA==",
    "proxy password": "hush-Proxy-p4ssw0rd",
    "endpoint password": "hush-Endpoint-p4ssw0rd",
}
FACES = {**ANSWERS, **CONDITIONAL}


class Grumpy:
    """Signs for the server, and does everything that a server can do wrong once, when the first file has come.

    Its errors repeat what they were sent, as those of S3 do: `SignatureDoesNotMatch` shows the whole request.
    """

    def __init__(self) -> None:
        self.left = dict(FACES)
        self.count = 0
        self.sent: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, request: Request, forward: Forward) -> Reply | None:
        with self._lock:
            self.sent |= {value for name, value in request.headers.items() if name != "host"}
            self.count += self.count > 0 or "/data/" in request.target
            fits = [name for name in self.left if name not in CONDITIONAL or is_conditional(request)]
            name = fits[-1] if fits and self.count % 4 == 1 else ""
            behave = self.left.pop(name, None)
        if behave is None:
            return forward(signed(request))
        reply = behave(request, lambda r: forward(signed(r)))
        if reply is None or reply.status < 400:
            return reply
        echo = " ".join(f"{header}: {value}" for header, value in request.headers.items())
        return Reply(reply.status, reply.headers, reply.body.replace(b"</Message>", f" {echo}</Message>".encode()))


@pytest.fixture
def command_lines() -> Iterator[set[str]]:
    """What `ps` shows of this test's processes, looked at all the time."""
    seen: set[str] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit():
                    try:
                        seen.add((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                    except OSError:  # it ended meanwhile
                        continue
            time.sleep(0.05)

    thread = threading.Thread(target=look)
    thread.start()
    yield seen
    ended.set()
    thread.join()


def run(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """A command as an operator runs it: its exit code, and all that it said."""
    done = subprocess.run(
        [sys.executable, "-I", "-m", "dispatch_agent", "publish", *argv],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def check_nothing_of(secret: str, where: Mapping[str, bytes]) -> None:
    basic = base64.b64encode(f"somebody:{secret}".encode()).decode()
    forms = {secret, quote(secret, safe=""), base64.b64encode(secret.encode()).decode(), basic, secret[:12]}
    found = [place for place, data in where.items() for form in forms if form.encode() in data]
    assert not found, f"{secret!r} is in {found}: {[where[place][:2000] for place in found[:1]]}"


def test_secrets_are_nowhere_whatever_fails(shared_bucket: Bucket, tmp_path: Path, command_lines: set[str]) -> None:
    execution = Execution(tmp_path / "root", 7)
    url = f"{shared_bucket.url}/secrets/{os.urandom(6).hex()}"
    for number in range(6):
        execution.save(f"step-{number}", small(number))
    said: dict[str, bytes] = {}
    with front(shared_bucket.endpoint, grumpy := Grumpy()) as here:
        environment = {
            **execution.environment,
            "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": SECRETS["secret key"],
            "AWS_SESSION_TOKEN": SECRETS["session token"],
            "AWS_ENDPOINT_URL": shared_bucket.endpoint,
            "HTTP_PROXY": here.replace("//", f"//somebody:{SECRETS['proxy password']}@"),
            "PUBLISH_DEST": url,
            "PUBLISH_ROOT": str(execution.root),
        }

        def plays(what: str, *argv: str, code: int = 0, **more: str) -> None:
            got, text = run(argv, {**environment, **more})
            said[what] = text.encode()
            assert got == code, f"{what}: {got}\n{text}"

        plays("watch", "watch", "--once", "--log-level", "debug", "--log-format", "json")
        assert not grumpy.left, f"not yet met: {list(grumpy.left)}"
        path = execution.write("step-6", small(6))
        plays("publish", "publish", str(path), "--json", "--log-level", "debug")
        for command in ("latest", "list", "verify", "probe"):
            plays(command, command, "--json")
        plays("restore", "restore", str(tmp_path / "back"), "--json")
        endpoint = f"http://somebody:{SECRETS['endpoint password']}@127.0.0.1:9"
        plays("no proxy there", "list", code=10, HTTP_PROXY=endpoint)
        plays("no server there", "list", code=10, AWS_ENDPOINT_URL=endpoint, NO_PROXY="*")
        plays("no endpoint", "list", code=3, PUBLISH_STORAGE_OPTION=f"endpoint_url=://{endpoint}")
        plays("an unknown option", "list", code=3, PUBLISH_STORAGE_OPTION=f"no_such_token={SECRETS['session token']}")
        plays("in the destination", "list", code=3, PUBLISH_DEST=f"s3://a:{SECRETS['secret key']}@bucket/prefix")
        plays("signed", "list", code=3, PUBLISH_DEST=f"{url}?X-Amz-Security-Token={quote(SECRETS['session token'])}")
    assert SECRETS["session token"] in grumpy.sent, "the token was never used"
    assert any("proxy-authorization" in text.lower() or "Basic" in text for text in grumpy.sent)
    store = open_store(url, shared_bucket.options)
    assert len(commits(store)) == 7
    where = {
        **said,
        "ps": "\n".join(command_lines).encode(),
        **{f"key {item.key}": item.key.encode() + b"".join(store.stream(item.key)) for item in store.list("")},
        **{str(file): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()},
    }
    store.close()
    for secret in SECRETS.values():
        check_nothing_of(secret, where)
