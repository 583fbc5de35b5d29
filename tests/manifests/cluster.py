"""What a cluster makes of the rendered objects: Trainer a JobSet, JobSet its Job, the Job controller Pods, the kubelet
a container's command and environment. Made again here from the sources of Trainer 2.3, JobSet 0.12 and Kubernetes; no
code of theirs runs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]

_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_RANK = "batch.kubernetes.io/job-completion-index"
_FILLED_IN = ("node", "dataset-initializer", "model-initializer")


def job_set_of(runtime: Object, train_job: Object) -> Object:
    """Trainer: the runtime's template, the patches in their order, then spec.trainer into the container `node`."""
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    for patch in train_job["spec"].get("runtimePatches", []):
        _refuse_what_trainer_would(spec, patch)
        spec = _merge(spec, patch["trainingRuntimeSpec"].get("template", {}).get("spec", {}))
    trainer, name = train_job["spec"]["trainer"], train_job["metadata"]["name"]
    for job in spec["replicatedJobs"]:
        if job["template"].get("metadata", {}).get("labels", {}).get(_STEP) != "trainer":
            continue
        assert job["replicas"] == 1, "Trainer wants one replica"
        job["template"]["spec"] |= {"parallelism": trainer["numNodes"], "completions": trainer["numNodes"]}
        [node] = (c for c in job["template"]["spec"]["template"]["spec"]["containers"] if c["name"] == "node")
        node |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
        node["resources"] = trainer.get("resourcesPerNode", node.get("resources", {}))
        env = node.setdefault("env", [])
        _upsert(env, trainer.get("env", []))
        if "torch" in runtime["spec"].get("mlPolicy", {}):
            _upsert(env, _torch(name, trainer["numNodes"]))
            node.setdefault("ports", []).append({"containerPort": 29500})
    spec["suspend"] = train_job["spec"].get("suspend", False)
    metadata = {"name": name, "namespace": train_job["metadata"].get("namespace", "default")}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def job_of(job_set: Object, restarts: int) -> Object:
    """JobSet: the one Job of the trainers, after so many restarts."""
    [replicated] = job_set["spec"]["replicatedJobs"]
    name = job_set["metadata"]["name"]
    marks = {
        f"jobset.sigs.k8s.io/{key}": value
        for key, value in {
            "jobset-name": name,
            "jobset-uid": "7d3f3a0e",
            "replicatedjob-name": replicated["name"],
            "replicatedjob-replicas": "1",
            "global-replicas": "1",
            "restart-attempt": str(restarts),
            "job-index": "0",
            "job-key": "ab",
            "job-global-index": "0",
            "group-name": "default",
        }.items()
    }
    spec = copy.deepcopy(replicated["template"]["spec"])
    spec["suspend"] = job_set["spec"].get("suspend", False)
    _mark(spec["template"].setdefault("metadata", {}), marks)
    metadata: Object = {
        "name": f"{name}-{replicated['name']}-0",
        "namespace": job_set["metadata"].get("namespace", "default"),
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _mark(metadata, marks), "spec": spec}


def pods_of(job: Object) -> list[Object]:
    """The Job controller: one pod for every index."""
    pods = []
    for index in range(job["spec"]["completions"]):
        template = copy.deepcopy(job["spec"]["template"])
        metadata = _mark(template["metadata"], {_RANK: str(index)})
        name = f"{job['metadata']['name']}-{index}"
        metadata |= {"name": f"{name}-abcde", "namespace": job["metadata"]["namespace"], "uid": f"uid-{index}"}
        template["spec"]["hostname"] = name
        for container in containers(template):
            reference = {"fieldRef": {"fieldPath": f"metadata.labels['{_RANK}']"}}
            container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": reference})
        pods.append({"apiVersion": "v1", "kind": "Pod", **template})
    return pods


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


@dataclass(frozen=True)
class Started:
    """What a kubelet starts."""

    words: list[str]
    environ: dict[str, str]


def started(pod: Object, name: str, secrets: dict[str, dict[str, str]] | None = None) -> Started:
    """The kubelet: the environment in order, references resolved, then the command."""
    [container] = (c for c in containers(pod) if c["name"] == name)
    environ: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        environ |= (secrets or {})[source["secretRef"]["name"]]
    for variable in container.get("env", ()):
        if "valueFrom" in variable:
            environ[variable["name"]] = field(pod, variable["valueFrom"]["fieldRef"]["fieldPath"])
        else:
            environ[variable["name"]] = expanded(variable.get("value", ""), environ)
    words = [*container["command"], *container.get("args", [])]
    return Started([expanded(word, environ) for word in words], environ)


def field(pod: Object, path: str) -> str:
    """One reference of the Downward API. What is not there is empty. Raises KeyError for a path that does not exist."""
    if path.endswith("']"):
        where, key = path[:-2].split("['", 1)
        if where not in {"metadata.annotations", "metadata.labels"}:
            raise KeyError(path)
        return str(pod["metadata"].get(where.partition(".")[2], {}).get(key, ""))
    fields = {f"metadata.{key}": str(pod["metadata"].get(key, "")) for key in ("name", "namespace", "uid")}
    return {**fields, "spec.nodeName": "node-1", "status.podIP": "10.0.0.1"}[path]


def expanded(text: str, environ: dict[str, str]) -> str:
    """`$(NAME)` by its value where it has one, `$$` as `$`, everything else as it stands."""
    out, at = "", 0
    while at < len(text):
        after = text[at + 1 : at + 2]
        end = text.find(")", at)
        if text[at] == "$" and after == "$":
            out, at = out + "$", at + 2
        elif text[at] == "$" and after == "(" and end >= 0:
            name = text[at + 2 : end]
            out, at = out + environ.get(name, f"$({name})"), end + 1
        else:
            out, at = out + text[at], at + 1
    return out


def _refuse_what_trainer_would(spec: Object, patch: Object) -> None:
    """Its webhook: patched containers must be in the runtime, and some may get no env from a patch."""
    template = patch["trainingRuntimeSpec"].get("template", {}).get("spec", {})
    for job in template.get("replicatedJobs", []):
        [known] = (j for j in spec["replicatedJobs"] if j["name"] == job["name"])
        there = known["template"]["spec"]["template"]["spec"]
        pod = job["template"]["spec"]["template"].get("spec", {})
        for kind in ("initContainers", "containers"):
            for container in pod.get(kind, ()):
                assert container["name"] in {c["name"] for c in there.get(kind, ())}, f"no {container['name']} to patch"
                assert "env" not in container or container["name"] not in _FILLED_IN


def _torch(name: str, nodes: int) -> list[Object]:
    rank = {"fieldRef": {"fieldPath": f"metadata.annotations['{_RANK}']"}}
    return [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": "auto"},
        {"name": "PET_NODE_RANK", "valueFrom": rank},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": "29500"},
    ]


def _merge(there: Any, patch: Any) -> Any:
    """A strategic merge, for maps and for lists that are keyed by name."""
    if isinstance(there, dict) and isinstance(patch, dict):
        return {**there, **{key: _merge(there[key], value) if key in there else value for key, value in patch.items()}}
    if isinstance(there, list) and isinstance(patch, list) and all("name" in item for item in [*there, *patch]):
        patches = {item["name"]: item for item in patch}
        merged = [_merge(item, patches.pop(item["name"], {})) for item in there]
        return [*merged, *patches.values()]
    return patch


def _upsert(env: list[Object], variables: Sequence[Object]) -> None:
    for variable in variables:
        for number, there in enumerate(env):
            if there["name"] == variable["name"]:
                env[number] = variable
                break
        else:
            env.append(variable)


def _mark(metadata: Object, marks: dict[str, str]) -> Object:
    for kind in ("labels", "annotations"):
        metadata[kind] = {**metadata.get(kind, {}), **marks}
    return metadata
