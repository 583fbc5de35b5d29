"""One event, one line: whatever a value holds, and without what looks like a credential."""

from __future__ import annotations

import io
import json
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch_agent import logs
from dispatch_agent.logs import LEVELS, Format, Level, Log, redact, to_stream


class StillClock:
    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> str:
        return "2030-01-01T00:00:00+00:00"

    def wait(self, event: threading.Event, seconds: float) -> bool:
        raise AssertionError((event, seconds))


def log(style: str, least: Level = "debug") -> tuple[list[str], Log]:
    lines: list[str] = []
    return lines, Log(lines.append, StillClock(), "json" if style == "json" else "text", least)


# Surrogates are how Python carries bytes of names that are no UTF-8.
HOSTILE = st.text(st.characters(codec=None, categories=None), max_size=40)
VALUES = st.one_of(HOSTILE, st.integers(), st.none(), st.booleans(), st.binary(max_size=9), HOSTILE.map(ValueError))
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


class TestLines:
    @settings(deadline=None)
    @given(st.dictionaries(st.from_regex(r"[a-z_]{3,9}", fullmatch=True), VALUES, max_size=5))
    def test_json_is_one_line_and_valid(self, fields: dict[str, object]) -> None:
        lines, json_log = log("json")
        json_log.bind(epoch="18000000999999999999", rank=0).info("event", **fields)
        [line] = lines
        assert line.isascii()
        assert line.isprintable()
        read = json.loads(line)
        assert (read["epoch"], read["rank"], read["event"], read["level"]) == (
            "18000000999999999999",
            0,
            "event",
            "info",
        )
        assert set(fields) <= set(read)

    @settings(deadline=None)
    @given(st.dictionaries(st.from_regex(r"[a-z_]{3,9}", fullmatch=True), VALUES, max_size=5))
    def test_text_is_one_line_that_cannot_move_the_cursor(self, fields: dict[str, object]) -> None:
        lines, text_log = log("text")
        text_log.bind(epoch="7").info("event", **fields)
        [line] = lines
        assert line.isprintable()
        assert line.startswith("2030-01-01T00:00:00+00:00 INFO    event ")
        assert line.endswith(" epoch=7")

    @settings(deadline=None)
    @given(HOSTILE)
    def test_every_line_can_be_written_to_a_terminal(self, value: str) -> None:
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
        for style in ("text", "json"):
            lines, some = log(style)
            some.info("event", value="\udcff" + value)
            to_stream(stream, StillClock())(lines[0].encode("ascii", "backslashreplace").decode())
        assert len(stream.buffer.getvalue().splitlines()) == 2

    def test_what_is_bound_wins_over_a_field_of_the_same_name(self) -> None:
        lines, some = log("json")
        some.bind(epoch="7").info("event", epoch="8")
        assert json.loads(lines[0])["epoch"] == "7"

    def test_numbers_stay_numbers_in_json(self) -> None:
        lines, some = log("json")
        some.info("event", count=3, share=0.5, known=True, nothing=None)
        read = json.loads(lines[0])
        assert (read["count"], read["share"], read["known"], read["nothing"]) == (3, 0.5, True, None)

    @pytest.mark.parametrize("least", LEVELS)
    def test_what_is_less_than_the_least_is_not_written(self, least: Level) -> None:
        lines, some = log("json", least)
        for level in LEVELS:
            getattr(some, level)("event")
        assert [json.loads(line)["level"] for line in lines] == list(LEVELS[LEVELS.index(least) :])


class TestOnce:
    def test_it_is_said_once_about_each(self) -> None:
        lines, some = log("text")
        for about in ("a", "b", "a", "b"):
            some.bind(term=1).once("info", about, "event", save=about)
        assert len(lines) == 2

    def test_it_is_said_again_after_it_was_forgotten(self) -> None:
        lines, some = log("text")
        for _ in range(2):
            some.once("error", "a", "event")
            some.forget("a")
        assert len(lines) == 2

    def test_what_was_too_little_to_be_written_is_said_when_it_gets_graver(self) -> None:
        lines, some = log("json", "info")
        for level in ("debug", "debug", "warning", "warning"):
            some.once(level, "a", "waiting")
        assert [json.loads(line)["level"] for line in lines] == ["warning"]


class TestSecrets:
    HIDDEN = (
        f"https://AKIA:{SECRET}@host/bucket",
        f"proxy http://somebody:x@{SECRET}@host:3128 refused",
        f"GET /key?X-Amz-Signature={SECRET}&X-Amz-Date=2030",
        f"GET /key?x-amz-security-token={SECRET}",
        f"aws_secret_access_key = {SECRET}",
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f"AWS_SESSION_TOKEN={SECRET}",
        f"{{'secret_key': '{SECRET}', 'x': 1}}",
        f'{{"SecretAccessKey": "{SECRET}", "x": 1}}',
        f'{{"secret": "{SECRET}"}}',
        f"secret={SECRET}",
        f"password: {SECRET}",
        f"AccountKey={SECRET};EndpointSuffix=x",
        f"https://host/path?sv=1&sig={SECRET}&se=2",
        f"Authorization: Bearer {SECRET}",
        f"{{'Authorization': 'Basic {SECRET}'}}",
        f"https://host/?token={SECRET}",
    )

    @pytest.mark.parametrize("text", HIDDEN)
    def test_a_credential_is_hidden_in_every_style(self, text: str) -> None:
        assert SECRET not in redact(text)
        assert "***" in redact(text)
        for style in ("text", "json"):
            lines, some = log(style)
            some.error("event", error=f"it said: {text}", after="still here")
            some.error("event", error=ValueError(text))
            assert not [line for line in lines if SECRET in line]
            assert "still here" in lines[0]
            if style == "json":
                assert [json.loads(line)["event"] for line in lines] == ["event", "event"]

    @settings(deadline=None)
    @given(HOSTILE, st.sampled_from(HIDDEN), HOSTILE)
    def test_a_line_with_something_hidden_is_still_one_valid_line(self, before: str, text: str, behind: str) -> None:
        lines, some = log("json")
        some.error("event", error=before + text + behind, after="x")
        assert json.loads(lines[0])["after"] == "x"

    @pytest.mark.parametrize(
        "text",
        [
            "s3://bucket/prefix/a@b",
            "could not list http://127.0.0.1:9000/bucket: 403 AccessDenied",
            "could not read http://minio:9000/bucket/data/epoch:3@best",
            "s3://bucket/data/epoch:3@best",
            "token 'a b': expected at most 128 visible ASCII characters",
            "the manifest has sha256 0f, its commit says 1e",
            "commits/00000000000001000001/0001.000001.0123456789ab.json",
            "mail me at someone@example.org",
            "a signature is missing",
        ],
    )
    def test_what_is_no_credential_stays(self, text: str) -> None:
        assert redact(text) == text


class TestStream:
    class Broken(io.StringIO):
        def __init__(self, error: Exception) -> None:
            super().__init__()
            self.error = error

        def write(self, _text: str, /) -> int:
            raise self.error

    @pytest.mark.parametrize(
        "error", [BrokenPipeError(), OSError(28, "No space left on device"), ValueError("I/O on closed file")], ids=repr
    )
    def test_one_that_takes_nothing_more_stops_nobody(self, error: Exception) -> None:
        to_stream(self.Broken(error), StillClock())("line")

    def test_a_line_is_out_at_once(self) -> None:
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding="utf-8")
        to_stream(stream, StillClock())("line")
        assert raw.getvalue() == b"line\n"

    @pytest.mark.parametrize("style", ["text", "json"])
    def test_a_reader_that_reads_no_more_stops_nobody_and_is_told_what_was_lost(
        self, monkeypatch: pytest.MonkeyPatch, style: Format
    ) -> None:
        monkeypatch.setattr(logs, "STUCK", 0.01)
        reading, writing = os.pipe()
        with open(reading, "rb", buffering=0) as reader, open(writing, "w", encoding="utf-8") as stream:
            write = to_stream(stream, StillClock(), style)
            for _ in range(200):
                write("x" * 1500)
            taken = reader.read(1 << 20)
            write("the next one")
            *_, said, last = (taken + reader.read(1 << 20)).decode().splitlines()
        assert last == "the next one"
        whole = taken.decode().count("x" * 1500 + "\n")
        assert 0 < whole < 200
        told = {"text": f"lines lost lines={200 - whole}", "json": f'"lines": {200 - whole}'}
        assert told[style] in said
