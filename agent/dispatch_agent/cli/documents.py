"""YAML and JSON documents in and out. YAML is an extra: without it JSON still goes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import IO, Any

from dispatch_agent.errors import SettingsError

_WITHOUT_YAML = "YAML needs the package PyYAML, which is not installed: pip install 'dispatch-agent[kubernetes]', or"
# What no reader of YAML, of whatever version, takes for something else than a text.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./@-]*", re.ASCII)
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf"})


def read(stream: IO[str]) -> list[Any]:
    """The documents of a stream, JSON or YAML. Raises SettingsError.

    Only true, false, null and numbers in decimal digits are no texts: neither `no`, nor `12:30:00`, nor a date is a
    surprise. A key that stands twice in one mapping is refused.
    """
    try:
        text = stream.read()
    except UnicodeDecodeError as error:
        message = f"it is no text in UTF-8: {error.reason} at byte {error.start}"
        raise SettingsError(message) from None
    if text.lstrip().startswith(("{", "[")):
        try:
            return [json.loads(text, object_pairs_hook=_once)]
        except json.JSONDecodeError as error:
            if not _yaml_is_there():  # `{a: b}` is YAML
                message = f"line {error.lineno}, column {error.colno} is no JSON: {error.msg}; correct it"
                raise SettingsError(message) from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, or as many brackets
            message = f"it is no JSON that can be read: {error}"
            raise SettingsError(message) from None
    return _read_yaml(text)


def write_json(documents: Sequence[object]) -> str:
    """One object, or several as the list that kubectl takes."""
    whole = documents[0] if len(documents) == 1 else {"apiVersion": "v1", "kind": "List", "items": list(documents)}
    return json.dumps(whole, indent=2) + "\n"


def write_yaml(documents: Sequence[object], comments: Sequence[str] = ()) -> str:
    """A stream of documents, `comments` before them. Raises SettingsError without PyYAML."""
    try:
        import yaml  # noqa: PLC0415 (an extra)
    except ModuleNotFoundError:
        message = f"{_WITHOUT_YAML} give --output json"
        raise SettingsError(message) from None

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # it ships no types
        def ignore_aliases(self, _: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = None if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else style)

    Dumper.add_representer(str, text)
    lines = [f"# {comment}\n" for comment in comments]
    whole: str = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=4096, allow_unicode=True)
    return "".join(lines) + whole


def _read_yaml(text: str) -> list[Any]:
    try:
        import yaml  # noqa: PLC0415 (an extra)
    except ModuleNotFoundError:
        message = f"{_WITHOUT_YAML} give JSON"
        raise SettingsError(message) from None

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # it ships no types
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (as PyYAML has it)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            _once([(self.construct_object(key, deep=True), None) for key in own])
            self.flatten_mapping(node)  # what is merged in stands first, and gives way
            return {self.construct_object(k, deep=True): self.construct_object(v, deep) for k, v in node.value}

    for tag, form, first in (
        ("bool", r"true|false|True|False|TRUE|FALSE", "tTfF"),
        ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
        ("int", r"0|-?[1-9][0-9]*", "-0123456789"),
        ("float", r"-?[0-9]+\.[0-9]+", "-0123456789"),
        ("merge", r"<<", "<"),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{form})$"), list(first))
    try:
        return [document for document in yaml.load_all(text, Loader) if document is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = " ".join(str(error).split()).replace('in "<unicode string>", ', "in ")  # as PyYAML calls a text
        message = f"it is no YAML that can be read: {said}"
        raise SettingsError(message) from None


def _yaml_is_there() -> bool:
    try:
        import yaml  # noqa: F401, PLC0415 (an extra)
    except ModuleNotFoundError:
        return False
    return True


def _once(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if isinstance(key, (dict, list)):
            message = f"the key {key!r} is no text: quote it"
            raise SettingsError(message)
        if key in found:
            message = f"the key {key!r} stands twice in one mapping: leave one of them out"
            raise SettingsError(message)
        found[key] = value
    return found
