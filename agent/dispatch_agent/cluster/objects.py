"""What `kubectl get -o yaml` prints, read without trust: of any shape, of any version, of several jobs at once."""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dispatch_agent import prologue

_GROUPS = {
    "TrainJob": "trainer.kubeflow.org",
    "TrainingRuntime": "trainer.kubeflow.org",
    "ClusterTrainingRuntime": "trainer.kubeflow.org",
    "JobSet": "jobset.x-k8s.io",
    "Job": "batch",
    "Pod": "",
}
_JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
_FIELD_OF_MAP = re.compile(r"metadata\.(labels|annotations)\['([^']*)'\]")
_REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")
_LONGEST_NUMBER = 18


@dataclass(frozen=True, slots=True)
class Thing:
    """One object: its kind, and where it is. `body` is as it was read; nothing in it need have the shape that it should
    have, so it is only read through `get`, `items`, `text` and `number`."""

    kind: str
    body: Mapping[str, Any]

    @property
    def name(self) -> str:
        return text(get(self.body, "metadata", "name")) or "(no name)"

    @property
    def namespace(self) -> str:
        return text(get(self.body, "metadata", "namespace")) or ""

    @property
    def uid(self) -> str:
        return text(get(self.body, "metadata", "uid")) or ""

    @property
    def where(self) -> str:
        return f"{self.kind} {self.name}"

    def label(self, key: str) -> str | None:
        return text(get(self.body, "metadata", "labels", key))

    def annotation(self, key: str) -> str | None:
        return text(get(self.body, "metadata", "annotations", key))

    def owner(self, kind: str) -> str | None:
        """The name of the object of this kind that it belongs to."""
        for reference in items(get(self.body, "metadata", "ownerReferences")):
            if get(reference, "kind") == kind:
                return text(get(reference, "name"))
        return None


@dataclass(frozen=True, slots=True)
class Group:
    """The objects of one job."""

    namespace: str
    name: str
    things: list[Thing] = field(default_factory=list)

    def of(self, kind: str) -> list[Thing]:
        return [thing for thing in self.things if thing.kind == kind]


def sort(documents: Iterable[object]) -> tuple[list[Group], list[Thing], dict[str, int]]:
    """The jobs, the runtimes, and how many objects there were of each other kind."""
    ignored: Counter[str] = Counter()
    seen: dict[tuple[str, str, str, str], Thing] = {}
    for document in _flat(documents):
        kind = get(document, "kind")
        group, _, _ = (text(get(document, "apiVersion")) or "").rpartition("/")
        if isinstance(document, dict) and isinstance(kind, str) and _GROUPS.get(kind) == group:
            thing = Thing(kind, document)
            seen[kind, thing.namespace, thing.name, thing.uid] = thing
        else:
            ignored[kind if isinstance(kind, str) else "(no kind)"] += 1
    groups: dict[tuple[str, str], Group] = {}
    runtimes = []
    for thing in seen.values():
        if thing.kind in {"TrainingRuntime", "ClusterTrainingRuntime"}:
            runtimes.append(thing)
        else:
            key = thing.namespace, _job_of(thing)
            groups.setdefault(key, Group(*key)).things.append(thing)
    return [groups[key] for key in sorted(groups)], runtimes, dict(sorted(ignored.items()))


def _flat(documents: Iterable[object]) -> Iterator[object]:
    """Without the lists around them. A list in a list is none that kubectl prints."""
    for document in documents:
        for one in document if isinstance(document, list) else [document]:
            if isinstance(one, dict) and str(one.get("kind", "")).endswith("List") and "items" in one:
                yield from items(one["items"])
            else:
                yield one


def _job_of(thing: Thing) -> str:
    """The name that a TrainJob gives its JobSet, and a JobSet its Jobs and Pods as a label."""
    owners = {"JobSet": ["TrainJob"], "Job": ["JobSet"], "Pod": ["Job"]}
    for kind in owners.get(thing.kind, []):
        if found := thing.label(_JOBSET_NAME) or thing.owner(kind):
            return found
    return thing.name


def templates(thing: Thing) -> list[Any]:
    """The pods that an object is or makes, as far as it says itself."""
    if thing.kind == "Pod":
        return [thing.body]
    if thing.kind == "JobSet":
        jobs = items(get(thing.body, "spec", "replicatedJobs"))
        return [get(job, "template", "spec", "template") for job in jobs]
    return [get(thing.body, "spec", "template")]


def marked(body: object, prefix: str) -> bool:
    """Whether a label or an annotation begins with it."""
    maps = (get(body, "metadata", "annotations"), get(body, "metadata", "labels"))
    return any(str(key).startswith(prefix) for found in maps if isinstance(found, dict) for key in found)


def environment(pod: Thing, container: object) -> dict[str, str]:
    """The variables that the kubelet would give a container now, but for those that come from Secrets and ConfigMaps:
    references to other variables replaced, fields of the pod filled in, and what is missing empty."""
    found: dict[str, str] = {}
    for entry in items(get(container, "env")):
        name, value = text(get(entry, "name")), text(get(entry, "value"))
        if not name:
            continue
        path = text(get(entry, "valueFrom", "fieldRef", "fieldPath"))
        if path is not None:
            found[name] = _field(pod, path)
        elif get(entry, "valueFrom") is None:
            found[name] = _expanded(value or "", found)
    return found


def identity(pod: Thing, container: object) -> tuple[str, str] | str | None:
    """Epoch and attempt of a container by the prologue's rules, or its sentence of refusal, or None if the container
    has no input of an identity at all."""
    environ = environment(pod, container)
    if not any(name.startswith("DISPATCH_") for name in environ):
        return None
    try:
        launch = prologue.resolve({name.encode(): value.encode() for name, value in environ.items()})
    except prologue.Refusal as refusal:
        return str(refusal)
    return launch.epoch.decode(), launch.attempt.decode()


def _field(pod: Thing, path: str) -> str:
    if match := _FIELD_OF_MAP.fullmatch(path):
        return text(get(pod.body, "metadata", match[1], match[2])) or ""
    return text(get(pod.body, *path.split("."))) or ""


def _expanded(value: str, known: Mapping[str, str]) -> str:
    """As Kubernetes does it: $$ is $, $(NAME) the value of a variable above, and unknown names stay as they are."""

    def replaced(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else known.get(match[1], match[0])

    return _REFERENCE.sub(replaced, value)


def get(value: object, *path: str) -> Any:
    """What stands at a path of keys, None if any step is no mapping or has no such key."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def text(value: object) -> str | None:
    """A text, None if it is none: what is no Unicode in it is replaced, so that it can be printed and encoded."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


def shown(value: object) -> str:
    """A value for people, cut short: it may be as large as it likes, or hold itself."""
    return reprlib.repr(value)


def number(value: object) -> int | None:
    """A count as a JSON number or as the decimal digits that labels and annotations have. None if it is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value < 10**_LONGEST_NUMBER else None
    if isinstance(value, str) and len(value) <= _LONGEST_NUMBER and value.isascii() and value.isdecimal():
        return int(value)
    return None
