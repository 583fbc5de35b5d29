"""What a watch says of itself, from what it is at: pure answers, the arithmetic of a grace period, last words; and a
server that no client can get the better of."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.servers.processes import free_port

from dispatch_agent.errors import SettingsError
from dispatch_agent.health import state, termination
from dispatch_agent.health.listening import parse_listen
from dispatch_agent.health.server import MOST
from dispatch_agent.health.state import FLOOR, MARGIN, Facts, drain_bound


class TestLive:
    @pytest.mark.parametrize(
        "facts",
        [
            Facts(),
            Facts(claimed=True, still=None),
            Facts(claimed=True, still=600.0),
            Facts(fenced="a newer one has published"),
            Facts(failure="the store is away"),
            Facts(standing_by="another publisher has the folder"),
            Facts(rank=3),
        ],
    )
    def test_waiting_of_any_kind_is_alive(self, facts: Facts) -> None:
        assert state.live(facts, 600.0).yes

    def test_a_pass_in_which_nothing_moves_is_not_and_says_for_how_long(self) -> None:
        answer = state.live(Facts(claimed=True, still=601.0), 600.0)
        assert not answer.yes
        assert "nothing moved for 601 s" in answer.sentence


class TestReady:
    @pytest.mark.parametrize(
        ("facts", "word"),
        [
            (Facts(), "not claimed yet"),
            (Facts(claimed=True, fenced="epoch 2 has published"), "fenced: epoch 2 has published"),
            (Facts(claimed=True, failure="s3 is away"), "failed: s3 is away"),
            (Facts(standing_by="another publisher has it"), "standing by: another publisher has it"),
            (
                Facts(claimed=True, unpublished=("step-1", "step-2")),
                "not published, see the log for why: step-1, step-2",
            ),
            (Facts(claimed=True, still=61.0), "nothing moved for 61 s"),
        ],
    )
    def test_no_says_why(self, facts: Facts, word: str) -> None:
        answer = state.ready(facts)
        assert not answer.yes
        assert word in answer.sentence

    def test_claimed_is_ready_and_so_is_a_rank_that_has_nothing_to_publish(self) -> None:
        assert state.ready(Facts(claimed=True, still=59.0)).yes
        assert state.ready(Facts(rank=1)).yes


class TestGrace:
    """A kubelet gives a sidecar max(2 s, grace - what the trainer used); it kills then."""

    @pytest.mark.parametrize(
        ("grace", "ending_for", "cap", "bound"),
        [
            (300.0, None, None, 299.0),  # the trainer ended by itself
            (300.0, 0.0, None, 299.0),
            (300.0, 100.0, None, 199.0),
            (300.0, 299.0, None, 1.0),
            (300.0, 500.0, None, 1.0),  # told so long ago that only the floor is left
            (0.0, None, None, 1.0),
            (300.0, 100.0, 20.0, 20.0),
            (300.0, 290.0, 20.0, 9.0),
        ],
    )
    def test_examples(self, grace: float, ending_for: float | None, cap: float | None, bound: float) -> None:
        assert drain_bound(grace, ending_for, cap) == bound

    seconds = st.floats(0, 1e6)

    @given(seconds, st.none() | seconds, st.none() | st.floats(0.1, 1e6))
    def test_it_is_over_before_the_kill_and_never_nothing(
        self, grace: float, ending_for: float | None, cap: float | None
    ) -> None:
        bound = drain_bound(grace, ending_for, cap)
        killed = max(FLOOR, grace - (ending_for or 0.0))
        assert 0 < bound <= killed - MARGIN
        assert cap is None or bound <= cap


class TestListen:
    @pytest.mark.parametrize(
        ("text", "found"),
        [
            (":9464", ("", 9464)),
            ("127.0.0.1:80", ("127.0.0.1", 80)),
            ("[::1]:9464", ("::1", 9464)),
            ("localhost:65535", ("localhost", 65535)),
        ],
    )
    def test_an_address(self, text: str, found: tuple[str, int]) -> None:
        assert parse_listen(text) == found

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "9464",
            ":",
            ":0",
            ":65536",
            ":http",
            "::1:9464",
            "[::1]",
            ":٣",
            ":1 ",
            ":0655359999",
            "é:9464",
            "\udcff:9464",
        ],
    )
    def test_what_is_none_is_refused_with_an_example(self, text: str) -> None:
        with pytest.raises(SettingsError, match=r"give :9464"):
            parse_listen(text)


class TestLastWords:
    def test_they_are_the_code_the_sentence_and_more(self, tmp_path: Path) -> None:
        termination.write(tmp_path / "log", 40, "left unpublished", "published 3")
        assert (tmp_path / "log").read_text() == "exit 40: left unpublished\npublished 3\n"

    def test_a_file_that_is_mounted_is_written_in_place(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.write_text("a longer text of the run before")
        inode = path.stat().st_ino
        termination.write(path, 0, "done")
        assert (path.read_text(), path.stat().st_ino) == ("exit 0: done\n", inode)

    def test_what_was_said_before_stays_where_it_must(self, tmp_path: Path) -> None:
        for sentence in ("the first", "the second"):
            termination.write(tmp_path / "log", 3, sentence, over=False)
        assert (tmp_path / "log").read_text() == "exit 3: the first\n"

    @pytest.mark.parametrize("character", "aä€😀")
    @pytest.mark.parametrize("before", range(4))
    def test_never_more_than_a_kubelet_takes_and_no_character_cut_in_two(
        self, tmp_path: Path, character: str, before: int
    ) -> None:
        text = "b" * before + character * 4096
        termination.write(tmp_path / "log", 1, text)
        data = (tmp_path / "log").read_bytes()
        assert 4080 < len(data) <= 4096
        assert f"exit 1: {text}".startswith(data.decode().removesuffix("…\n"))

    @pytest.mark.parametrize("over", [True, False])
    def test_a_fifo_is_not_waited_for(self, tmp_path: Path, over: bool) -> None:
        os.mkfifo(tmp_path / "log")
        termination.write(tmp_path / "log", 0, "done", over=over)

    def test_no_secrets(self, tmp_path: Path) -> None:
        termination.write(tmp_path / "log", 11, "denied: https://user:hush@host/", "secret_access_key=hush")
        assert "hush" not in (tmp_path / "log").read_text()

    def test_where_they_cannot_be_left_nothing_happens(self, tmp_path: Path) -> None:
        termination.write(tmp_path / "no" / "folder", 0, "done")
        termination.write(tmp_path, 0, "done")
        termination.write(None, 0, "done")


Asked = tuple[int, str]


CHILD = """
import sys, threading
from dispatch_agent.clock import SystemClock
from dispatch_agent.errors import SettingsError
from dispatch_agent.health.server import Page, Site, serve
from dispatch_agent.health.state import Answer
from dispatch_agent.logs import Log

answers = {"/yes": lambda: Answer(True, "yes; password=hush"), "/no": lambda: Answer(False, "no: \u2603")}
answers["/broken"] = lambda: 1 / 0
site = Site(answers, lambda accept: Page(accept.encode(), "text/plain"), lambda: Answer(True, "noted"))
log = Log(lambda line: print(line, flush=True), SystemClock())
try:
    serve(sys.argv[1], site, log)
except SettingsError as error:
    sys.exit(f"refused: {error}")
threading.Event().wait()
"""


def child(listen: str, **options: Any) -> subprocess.Popen[str]:
    """A process that serves, since a server lasts as long as its process."""
    words = [sys.executable, "-c", CHILD, listen]
    return subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    port = free_port((0,))
    with child(f":{port}") as process:
        assert process.stdout
        assert "listening" in process.stdout.readline()
        yield port, process
        process.kill()


@pytest.fixture
def port(server: tuple[int, subprocess.Popen[str]]) -> int:
    """A server answers here, of IPv4 and IPv6."""
    return server[0]


def refusal(listen: str) -> str:
    with child(listen) as process:
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    return said


def ask(port: int, method: str, path: str, host: str = "127.0.0.1") -> Asked:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class TestServer:
    def test_yes_is_200_and_no_is_503_with_the_sentence(self, port: int) -> None:
        assert ask(port, "GET", "/yes")[0] == 200
        assert ask(port, "GET", "/no?verbose") == (503, "no: ☃\n")

    def test_head_is_answered_without_a_body(self, port: int) -> None:
        assert ask(port, "HEAD", "/no") == (503, "")

    def test_ipv6_too(self, port: int) -> None:
        assert ask(port, "GET", "/yes", "::1")[0] == 200

    def test_only_a_post_ends(self, port: int) -> None:
        assert ask(port, "GET", "/terminating")[0] == 405
        assert ask(port, "POST", "/yes")[0] == 405
        assert ask(port, "POST", "/terminating")[0] == 200

    def test_only_who_is_in_the_pod_says_that_it_ends(self, port: int) -> None:
        """Who is there comes from the address that he asks at. Here another address of this machine is far away."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10, source_address=("127.0.0.2", 0))
        connection.request("POST", "/terminating")
        assert connection.getresponse().status == 403
        connection.close()

    def test_an_unknown_path_is_told_which_there_are(self, port: int) -> None:
        assert ask(port, "GET", "/") == (404, "there are /yes /no /broken /metrics\n")

    def test_no_secret_is_answered(self, port: int) -> None:
        assert "hush" not in ask(port, "GET", "/yes")[1]

    @pytest.mark.parametrize("host", ["", "127.0.0.1", "[::1]"])
    def test_a_port_in_use_is_refused_with_what_to_do(self, port: int, host: str) -> None:
        assert "give --listen another one" in refusal(f"{host}:{port}")

    def test_an_address_that_is_not_ours_is_refused(self) -> None:
        assert "refused: cannot listen on 192.0.2.1:9464" in refusal("192.0.2.1:9464")

    @pytest.mark.parametrize("host", ["a..b", "a" * 70])
    def test_a_name_that_is_none_is_refused(self, host: str) -> None:
        assert f"refused: cannot listen on {host}:9464" in refusal(f"{host}:9464")

    def test_many_clients_that_hang_keep_nobody_out(self, server: tuple[int, subprocess.Popen[str]]) -> None:
        port, process = server
        with ExitStack() as stack:
            for number in range(3 * MOST):
                hanging = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
                hanging.sendall((b"", b"GET", b"GET /yes HTTP/1.1\r\nHost: x\r\n")[number % 3])
            assert ask(port, "GET", "/yes")[0] == 200
            tasks = Path(f"/proc/{process.pid}/task")
            deadline = time.monotonic() + 3  # before those who hang are given up
            while len(list(tasks.iterdir())) >= 2 * MOST:
                assert time.monotonic() < deadline, "each that hangs has a thread"
                time.sleep(0.02)

    @pytest.mark.parametrize(
        "garbage",
        [
            b"\x16\x03\x01\x00\xff\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET / HTTP/9\r\n\r\n",
            b"A" * 100_000,
            b"\0" * 10,
            b"BREW / HTTP/1.1\r\n\r\n",
        ],
        ids=["tls", "short", "version", "long", "zeros", "method"],
    )
    def test_garbage_does_not_matter(self, port: int, garbage: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            connection.sendall(garbage)
        assert ask(port, "GET", "/yes")[0] == 200

    def test_an_answer_that_fails_is_said_and_the_next_one_is_given(
        self, server: tuple[int, subprocess.Popen[str]]
    ) -> None:
        port, process = server
        with pytest.raises(http.client.HTTPException):
            ask(port, "GET", "/broken")
        assert process.stdout
        assert "division by zero" in process.stdout.readline()
        assert ask(port, "GET", "/yes")[0] == 200
