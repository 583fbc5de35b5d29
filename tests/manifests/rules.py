"""What the schemas do not know and a cluster refuses: names, mounts, references; and Pod Security restricted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tests.manifests import cluster

Object = dict[str, Any]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_QUALIFIED = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_REFERENCES = {"metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName"}
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def broken(pod: Object) -> list[str]:
    """What the API server has against a pod."""
    return [sentence for rule in (_names, _volumes, _mounts, _references, _sidecars, _probes) for sentence in rule(pod)]


def not_restricted(pod: Object) -> list[str]:
    """What Pod Security restricted has against a pod."""
    return [sentence for rule in (_host, *_OF_CONTAINERS) for sentence in rule(pod)]


def not_failed_as_a_job(job: Object) -> list[str]:
    """What the API server has against a Job's podFailurePolicy."""
    found, spec = [], job["spec"]
    names = {c["name"] for c in cluster.containers(spec["template"])}
    if spec["template"]["spec"].get("restartPolicy") != "Never":
        found.append("podFailurePolicy needs restartPolicy Never")
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes and codes["containerName"] not in names:
            found.append(f"no container {codes['containerName']}")
        if codes and (codes["values"] != sorted(set(codes["values"])) or 0 in codes["values"]):
            found.append(f"exit codes {codes['values']}")
        if bool(codes) == bool(rule.get("onPodConditions")):
            found.append("a rule needs one of exit codes and conditions")
    return found


def _names(pod: Object) -> Iterator[str]:
    every = cluster.containers(pod)
    if len(pod["metadata"]["name"]) > 63 or not _LABEL.fullmatch(pod["metadata"]["name"]):
        yield f"pod name {pod['metadata']['name']}"
    for kind, names in (
        ("container", [c["name"] for c in every]),
        ("volume", [v["name"] for v in pod["spec"].get("volumes", ())]),
        *((f"variable of {c['name']}", [e["name"] for e in c.get("env", ())]) for c in every),
        *((f"mount path of {c['name']}", [m["mountPath"] for m in c.get("volumeMounts", ())]) for c in every),
        ("port", [(p.get("protocol", "TCP"), p["containerPort"]) for c in every for p in c.get("ports", ())]),
        ("port name", [p["name"] for c in every for p in c.get("ports", ()) if "name" in p]),
    ):
        yield from (f"{kind} {name} twice" for name, count in Counter(names).items() if count > 1)
    yield from (f"container name {c['name']}" for c in every if not _LABEL.fullmatch(c["name"]))
    for c in every:
        yield from (
            f"port name {p['name']}"
            for p in c.get("ports", ())
            if not re.fullmatch(r"[a-z0-9-]{1,15}", p.get("name", "a"))
        )
    for kind in ("labels", "annotations"):
        for key, value in pod["metadata"].get(kind, {}).items():
            if not isinstance(value, str) or not _QUALIFIED.fullmatch(key):
                yield f"{kind} {key}: {value!r}"


def _volumes(pod: Object) -> Iterator[str]:
    for volume in pod["spec"].get("volumes", ()):
        if len(set(volume) - {"name"}) != 1:
            yield f"volume {volume['name']} has {sorted(set(volume) - {'name'})}, not one source"


def _mounts(pod: Object) -> Iterator[str]:
    there = {v["name"] for v in pod["spec"].get("volumes", ())}
    for c in cluster.containers(pod):
        for mount in c.get("volumeMounts", ()):
            if mount["name"] not in there:
                yield f"{c['name']} mounts {mount['name']}, which is no volume"
            if not mount["mountPath"].startswith("/") or ":" in mount["mountPath"]:
                yield f"{c['name']} mounts at {mount['mountPath']}"
    used = {m["name"] for c in cluster.containers(pod) for m in c.get("volumeMounts", ())}
    yield from (f"volume {name} is mounted nowhere" for name in there - used)


def _references(pod: Object) -> Iterator[str]:
    for c in cluster.containers(pod):
        for variable in c.get("env", ()):
            if ("value" in variable) == ("valueFrom" in variable):
                yield f"{c['name']} {variable['name']} needs one of value and valueFrom"
            if "valueFrom" not in variable:
                continue
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            match = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
            if not (path in _REFERENCES or (match and _QUALIFIED.fullmatch(match[2]))):
                yield f"{c['name']} {variable['name']} refers to {path}"


def _sidecars(pod: Object) -> Iterator[str]:
    for c in pod["spec"].get("initContainers", ()):
        if c.get("restartPolicy", "Always") != "Always":
            yield f"{c['name']} has restartPolicy {c['restartPolicy']}"
        if "restartPolicy" not in c:
            yield from (f"{c['name']} is no sidecar and has {key}" for key in (*_PROBES, "lifecycle") if key in c)
    yield from (f"{c['name']} has a restartPolicy" for c in pod["spec"]["containers"] if "restartPolicy" in c)


def _probes(pod: Object) -> Iterator[str]:
    for c in cluster.containers(pod):
        for probe in (c[name] for name in _PROBES if name in c):
            if len({"exec", "httpGet", "tcpSocket", "grpc"} & set(probe)) != 1:
                yield f"{c['name']} has a probe with no action, or two"
            asked = probe.get("httpGet", {}).get("port")
            if asked is not None and asked not in {p["containerPort"] for p in c.get("ports", ())}:
                yield f"{c['name']} is asked at {asked}, where it does not listen"


def _host(pod: Object) -> Iterator[str]:
    yield from (key for key in ("hostNetwork", "hostPID", "hostIPC") if pod["spec"].get(key))
    yield from (f"volume {v['name']}" for v in pod["spec"].get("volumes", ()) if not set(v) - {"name"} <= _VOLUMES)


def _of_each(says: Callable[[Object, Object], bool], what: str) -> Callable[[Object], Iterator[str]]:
    def rule(pod: Object) -> Iterator[str]:
        of_pod = pod["spec"].get("securityContext", {})
        for c in cluster.containers(pod):
            if not says(c, {**of_pod, **c.get("securityContext", {})}):
                yield f"{c['name']}: {what}"

    return rule


_OF_CONTAINERS = (
    _of_each(lambda _, own: own.get("allowPrivilegeEscalation") is False, "allowPrivilegeEscalation"),
    _of_each(lambda _, own: "ALL" in own.get("capabilities", {}).get("drop", ()), "capabilities.drop"),
    _of_each(
        lambda _, own: set(own.get("capabilities", {}).get("add", ())) <= {"NET_BIND_SERVICE"}, "capabilities.add"
    ),
    _of_each(lambda _, own: own.get("runAsNonRoot") is True and own.get("runAsUser") != 0, "root"),
    _of_each(
        lambda _, own: own.get("seccompProfile", {}).get("type") in {"RuntimeDefault", "Localhost"}, "seccompProfile"
    ),
    _of_each(lambda _, own: not own.get("privileged") and own.get("procMount", "Default") == "Default", "privileged"),
    _of_each(lambda c, _: not any(p.get("hostPort") for p in c.get("ports", ())), "hostPort"),
    _of_each(
        lambda c, _: not any("host" in c.get(probe, {}).get("httpGet", {}) for probe in _PROBES), "a host in a probe"
    ),
)
