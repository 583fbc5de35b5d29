"""What an API server would say of an object: Kubernetes' own schemas, and the CRDs of Trainer and JobSet with their CEL
rules. A field that no schema knows is refused, where a server would drop it without a word."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import cel
import jsonschema
import yaml
from referencing import Registry, Resource

# The last five releases; all of them have a sidecar's fields.
RELEASES = ("1.33", "1.34", "1.35", "1.36", "1.37")

_KINDS = {("batch/v1", "Job"): "job-batch-v1", ("v1", "Pod"): "pod-v1"}
_LIMITS = (
    "type",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "pattern",
    "required",
    "minProperties",
    "maxProperties",
)


def kubernetes_errors(thing: dict[str, Any], release: str) -> list[str]:
    """What the schemas of one release have against a Job or a Pod."""
    validator = _kubernetes(release, _KINDS[thing["apiVersion"], thing["kind"]])
    return [f"{'/'.join(map(str, e.absolute_path))}: {e.message[:200]}" for e in validator.iter_errors(thing)]


@functools.cache
def _kubernetes(release: str, name: str) -> Any:
    """The package's own call reads megabytes for each object; this reads them once."""
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{release}.0-local-strict"
    schema = json.loads((folder / f"{name}.json").read_text())
    registry = Resource.from_contents(schema) @ Registry()
    registry = Resource.from_contents(json.loads((folder / "_definitions.json").read_text())) @ registry
    return jsonschema.Draft202012Validator(schema, registry=registry)


class Crd:
    """One custom resource as its server stores it."""

    def __init__(self, path: Path) -> None:
        document = yaml.load(path.read_text(), yaml.CSafeLoader)
        [stored] = (version for version in document["spec"]["versions"] if version["storage"])
        self.schema: dict[str, Any] = stored["schema"]["openAPIV3Schema"]
        self._validator = jsonschema.Draft7Validator(_strict(self.schema, root=True))

    def errors(self, thing: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
        """What the server has against the object, or against the change from the object `before`."""
        found = [
            f"{'/'.join(map(str, e.absolute_path))}: {e.message[:200]}" for e in self._validator.iter_errors(thing)
        ]
        return [*found, *_broken_rules(self.schema, thing, before, "")]


@functools.cache
def crd(folder: Path, release: str, name: str) -> Crd:
    return Crd(folder / release / f"{name}.yaml")


def _strict(schema: dict[str, Any], *, root: bool = False) -> dict[str, Any]:
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {key: schema[key] for key in _LIMITS if key in schema}
    if schema.get("nullable") and "type" in found:
        found["type"] = [found["type"], "null"]
    if "properties" in schema:
        found["properties"] = {
            name: {} if root and name == "metadata" else _strict(inner) for name, inner in schema["properties"].items()
        }
    if isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = _strict(schema["additionalProperties"])
    elif schema.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found["additionalProperties"] = False
    if "items" in schema:
        found["items"] = _strict(schema["items"])
    return found


def _broken_rules(schema: dict[str, Any], value: Any, before: Any, path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        if before is None and "oldSelf" in rule["rule"]:
            continue
        verdict = cel.evaluate(rule["rule"], {"self": value} if before is None else {"self": value, "oldSelf": before})
        if verdict is not True:
            yield f"{path}: {rule.get('message', rule['rule'])}"
    if isinstance(value, dict):
        for name, inner in value.items():
            known = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if isinstance(known, dict):
                was = before.get(name) if isinstance(before, dict) else None
                yield from _broken_rules(known, inner, was, f"{path}/{name}")
    elif isinstance(value, list) and "items" in schema:
        keys = schema.get("x-kubernetes-list-map-keys")
        for number, inner in enumerate(value):
            # Only of items with a key does a server know which was which.
            same = [
                old
                for old in (before or ())
                if keys and isinstance(old, dict) and all(old.get(k) == inner.get(k) for k in keys)
            ]
            yield from _broken_rules(schema["items"], inner, same[0] if same else None, f"{path}/{number}")
