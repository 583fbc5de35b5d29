"""One event, one line: text for people, JSON for machines, the identity on every line, secrets on none."""

from __future__ import annotations

import io
import json
import re
import select
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TextIO

from dispatch_agent.clock import Clock

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")
STUCK = 1.0
"""Seconds that a log waits for its reader."""
_PIECE = 1024
"""Characters: a pipe that has room at all has room for them, however they are encoded (PIPE_BUF)."""

# What a library or a URL may put into a message: user:password@ of a URL, also a password that should have been encoded
# in it; signed query parameters; an authorization header; a key, secret, token or password that is given by its name,
# quoted or not.
_NAMED = r"secret|session|security|access|account|api|storage|shared|sas|auth|bearer|private"
_SECRETS = (
    (re.compile(r"(?<=://)[^\s/@:\"']+:(?!\d{1,5}[/\s\"'])[^\s\"']+@"), "***@"),
    (re.compile(r"(?<=://)[^/@\s]+@"), "***@"),
    (re.compile(r"(?i)(x-amz-(?:signature|security-token|credential)=)[^&\s\"']+"), r"\1***"),
    (re.compile(r"(?i)(authorization[\"']?\s*[=:]\s*[\"']?(?:(?:bearer|basic)\s+)?)[^\s\"',}]+"), r"\1***"),
    (
        re.compile(
            rf"(?i)((?:(?:{_NAMED})[-_ ]?)+(?:key|token|signature)[\"']?\s*[=:]\s*[\"']?)[^\s\"',}}&]+",
        ),
        r"\1***",
    ),
    (
        re.compile(r"(?i)((?<![a-z0-9])(?:secret|password|passwd|token|sig)[\"']?\s*[=:]\s*[\"']?)[^\s\"',}&]+"),
        r"\1***",
    ),
)


def redact(text: str) -> str:
    """`text` without what looks like a credential."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


@dataclass(frozen=True, slots=True)
class Log:
    """Where events go. `bound` stands on every line; `said` remembers what is said only once."""

    write: Callable[[str], None]
    clock: Clock
    style: Format = "text"
    least: Level = "info"
    bound: Mapping[str, object] = field(default_factory=dict)
    said: set[tuple[Level, str, str]] = field(default_factory=set)

    def bind(self, **fields: object) -> Log:
        """The same log with more fields on every line."""
        return Log(self.write, self.clock, self.style, self.least, {**self.bound, **fields}, self.said)

    def debug(self, event: str, **fields: object) -> None:
        self._emit("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._emit("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._emit("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._emit("error", event, fields)

    def once(self, level: Level, about: str, event: str, **fields: object) -> None:
        """Say `event` about `about` once; at another level it is new, and `forget` makes it new again."""
        if (level, event, about) not in self.said:
            self.said.add((level, event, about))
            self._emit(level, event, fields)

    def forget(self, about: str) -> None:
        """What was said once about `about` may be said again: its cause went away."""
        self.said.difference_update({key for key in self.said if key[2] == about})

    def _emit(self, level: Level, event: str, fields: Mapping[str, object]) -> None:
        if LEVELS.index(level) < LEVELS.index(self.least):
            return
        self.write(_line(self.clock, self.style, level, event, {**fields, **self.bound}))


def to_stream(stream: TextIO | None, clock: Clock, style: Format = "text") -> Callable[[str], None]:
    """A `write` for Log: whole lines, and a reader that went away, or reads no more, is no reason to stop publishing.

    What nobody takes within STUCK seconds is lost, and so is all that follows, until there is room again; then it is
    said how many lines were.
    """
    lost = 0

    def write(line: str) -> None:
        nonlocal lost
        if stream is None:  # closed before we started
            return
        try:
            patience = 0.0 if lost else STUCK
            if lost and _has_room(stream, 0.0):
                fields = {"lines": lost, "reason": "nobody read the log"}
                line = f"{_line(clock, style, 'warning', 'lines lost', fields)}\n{line}"
            for start in range(0, len(line) + 1, _PIECE):
                if not _has_room(stream, patience):
                    lost += 1
                    return
                stream.write((line + "\n")[start : start + _PIECE])
                stream.flush()
            lost = 0
        except (OSError, ValueError):
            # A closed pipe, a full disk: nothing is left to say it on; the exit code and the store still tell.
            return

    return write


def _has_room(stream: TextIO, seconds: float) -> bool:
    """Whether a piece can be written, at once or within so many seconds, without waiting for a reader."""
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:  # in memory
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(seconds * 1000))


def _line(clock: Clock, style: Format, level: Level, event: str, fields: Mapping[str, object]) -> str:
    # Each value by itself: quoting would hide the quotes that a secret stands in, and what is cut out of a finished
    # line could take its quotes along.
    everything = {key: _redacted(value) for key, value in fields.items()}
    if style == "json":
        return json.dumps({"time": clock.wall(), "level": level, "event": event, **everything}, ensure_ascii=True)
    pairs = " ".join(f"{key}={_quoted(value)}" for key, value in everything.items() if value not in ("", None))
    return f"{clock.wall()} {level.upper():7} {event} {pairs}".rstrip()


def _redacted(value: object) -> object:
    return value if value is None or isinstance(value, (bool, int, float)) else redact(str(value))


def _quoted(value: object) -> str:
    text = str(value)
    return json.dumps(text) if re.search(r"[\s\"=]", text) or not text.isprintable() else text
