"""Names between disk and store: bytes on one side, plain ASCII on the other. Pure.

A file name on Linux is any bytes but `/` and NUL. Stores and their clients break on many of them, each in its own way,
so only what every one of them keeps is kept, and the rest is percent-encoded. The encoding is reversible and unique:
`decode` takes nothing that `encode` would not have given, so one name never has two keys.
"""

from __future__ import annotations

import re
from fnmatch import translate

_KEPT = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._=+@- ")
_ENCODED = tuple(chr(byte) if byte in _KEPT else f"%{byte:02X}" for byte in range(256))
_PLAIN = re.compile(rb"[A-Za-z0-9._=+@\- ]*[A-Za-z0-9_=+@\- ]")
_ESCAPE = re.compile(r"%([0-9A-F]{2})")

# What the frameworks call what they have not finished (research: one entry per measured or read habit).
_TEMPORARY = (
    "*.tmp*",
    ".tmp*",
    "tmp-*",
    "*_tmp",
    "*.part",
    "*_temp",
    "*.tempstate*",
    "*.orbax-checkpoint-tmp*",
    "*.__lock",
    "*-unfinished",
    "checkpoint-is-incomplete.txt",
    ".nfs*",
    ".fuse_hidden*",
)
_IS_TEMPORARY = re.compile("|".join(map(translate, _TEMPORARY)).encode("ascii"))


def encode(raw: bytes) -> str:
    """One path component as ASCII text: `A-Za-z0-9._=+@-` and space as they are, every other byte as `%XX`.

    `.`, `..` and a trailing `.` are encoded too, since stores and clients drop or resolve them. ValueError if empty.
    """
    if not raw:
        msg = "an empty name cannot be a path component"
        raise ValueError(msg)
    if _PLAIN.fullmatch(raw):
        return raw.decode("ascii")
    if raw == b"..":
        return "%2E%2E"
    text = "".join(_ENCODED[byte] for byte in raw)
    return text[:-1] + "%2E" if text.endswith(".") else text


def decode(text: str) -> bytes:
    """The bytes that `encode` made this text from. ValueError for any text that `encode` does not give."""
    raw = _unescape(text)
    if not raw or encode(raw) != text:
        msg = f"{text[:300]!r} is not an encoded name: expected A-Z a-z 0-9 . _ = + @ - space, and %XX for the rest"
        raise ValueError(msg)
    return raw


def encode_path(raw: bytes) -> str:
    """A relative path, component by component. ValueError if empty, absolute, or with an empty component."""
    return "/".join(encode(component) for component in raw.split(b"/"))


def decode_path(text: str) -> bytes:
    """The relative path that `encode_path` made this text from.

    ValueError for what is not encoded, and for every path that could leave the folder it is joined to: empty
    components, `.`, `..`, absolute paths, and a `/` or NUL hidden in a component.
    """
    components = [decode(component) for component in text.split("/")]
    for component in components:
        if component in {b".", b".."} or b"/" in component or b"\0" in component:
            msg = f"{text[:300]!r} is refused as a path: {component!r} could leave its folder"
            raise ValueError(msg)
    return b"/".join(components)


def decode_name(text: str) -> bytes:
    """The name of one file or folder: like `decode_path`, of one component. ValueError."""
    if "/" in text:
        msg = f"{text[:300]!r} is refused as a name: it has a slash"
        raise ValueError(msg)
    return decode_path(text)


def is_temporary(name: bytes) -> bool:
    """Whether one component is named like something that a framework has not finished, or left behind."""
    return _IS_TEMPORARY.match(name) is not None


def shown(raw: bytes) -> str:
    """A raw name or path for people: text where it is UTF-8 without control characters, else escaped."""
    text = raw.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _unescape(text: str) -> bytes:
    try:
        return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text).encode("latin-1")
    except UnicodeEncodeError:
        return b""
