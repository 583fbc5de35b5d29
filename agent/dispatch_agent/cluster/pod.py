"""The pod that every kind of manifest shares: its containers, their variables, volumes and probes; and the plain Pod.

Plain values in Kubernetes' own shapes, as JSON has them. The pod holds to Pod Security *restricted*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dispatch_agent.cluster.description import Job, Resources
from dispatch_agent.identity import epoch

Object = dict[str, Any]

NODE, INSTALL, INIT, PUBLISH = "node", "dispatch-install", "dispatch-init", "dispatch-publish"
AGENT_FOLDER = "/opt/dispatch"
PORT = 9464
REFUSED = 125
HOPELESS = {NODE: [REFUSED], INIT: [30, 31, 32, REFUSED], PUBLISH: [REFUSED]}
"""Exit codes of a container that no restart mends. A restart raises the epoch: after one that is another job's (31) it
would be nobody's yet, and that job's destination be taken from it."""

ADMISSION = "dispatch.phpboyscout.uk/admission"
FLOOR = "dispatch.phpboyscout.uk/admission-floor"
QUEUE = "kueue.x-k8s.io/queue-name"

_CHECKPOINTS, _AGENT, _CREDENTIALS = "checkpoints", "dispatch-agent", "dispatch-credentials"


def plain_pod(job: Job, script: str) -> Object:
    """A Pod with a finished identity: that of a job admitted once and restarted `restart` times."""
    attempt = f"{job.token_prefix}.1.{job.restart}"
    pair = {
        "DISPATCH_EPOCH": str(epoch(job.generation, job.submission, 1 + job.restart)),
        "DISPATCH_ATTEMPT": attempt,
    }
    of_job = {"DISPATCH_JOB_ID": job.job_id, "DISPATCH_SUBMISSION": str(job.submission), **pair}
    node_env = [*values({**job.env, **of_job}), *workdir(job)]
    ours = [*values({**of_job, **publishing(job)}), *place_of_pod(job)]
    metadata = named(job, f"{job.name}-{job.restart}")
    if job.queue:
        metadata["labels"] = {QUEUE: job.queue}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": spec(job, complete_node(job, script, node_env), ours),
    }


def spec(job: Job, node: Object, ours: Sequence[Object]) -> Object:
    """The pod's spec. `node` is the trainer's container, `ours` are the variables of the containers beside it."""
    pod: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
    }
    if job.service_account:
        pod["serviceAccountName"] = job.service_account
    pod["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": job.user,
        "runAsGroup": job.user,
        "fsGroup": job.user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    pod["volumes"] = _volumes(job)
    sidecar = _publish(job, ours)
    init = [_init(job, ours)]
    if job.agent.install:
        init.insert(0, _install(job))
    if job.agent.sidecar == "native":
        pod["initContainers"] = [*init, {**sidecar, "restartPolicy": "Always"}]
        pod["containers"] = [node]
    else:
        pod["initContainers"] = init
        pod["containers"] = [node, sidecar]
    return pod


def node_of_runtime(job: Job, image: str) -> Object:
    """The trainer's container as a runtime has it: a TrainJob fills in image, command, env and resources."""
    return {
        "name": NODE,
        "image": image,
        "env": values(place_of_node(job)),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        # What a refusal says on stderr is then in the pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [_mount(job), *_agent_mount(job, read_only=True)],
    }


def complete_node(job: Job, script: str, env: Sequence[Object]) -> Object:
    """The trainer's container where nobody fills anything in."""
    node = node_of_runtime(job, job.image or "")
    node = {**node, "command": command(job, script), "env": [*node["env"], *env]}
    return with_resources(node, job.resources)


def command(job: Job, script: str) -> list[str]:
    """The user's command behind the entry agent, each `$` of it doubled: Kubernetes halves them again.

    Behind the script, or where a plain sidecar must see how it ends, behind the installed agent.
    """
    words = [word.replace("$", "$$") for word in job.command]
    if job.agent.sidecar == "plain":
        return [f"{AGENT_FOLDER}/bin/dispatch-agent", "exec", "--", *words]
    # The script itself needs no doubling: it holds neither $$ nor the $ and parenthesis of a known name.
    return ["/bin/sh", "-c", script, "dispatch-prologue", *words]


def identity_of_job(job: Job) -> dict[str, str]:
    """What the raw counters are joined to, and whose they are."""
    return {
        "DISPATCH_JOB_ID": job.job_id,
        "DISPATCH_SUBMISSION": str(job.submission),
        "DISPATCH_K8S_EPOCH_PREFIX": job.epoch_prefix,
        "DISPATCH_K8S_TOKEN_PREFIX": job.token_prefix,
    }


def counters() -> list[Object]:
    """A and J, from the pod's own metadata."""
    return [
        _field("DISPATCH_K8S_ADMISSION", f"metadata.annotations['{ADMISSION}']"),
        _field("DISPATCH_K8S_RESTART", "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"),
    ]


def later_counters() -> list[Object]:
    """Of JobSet, by which a run that repeats an identity can be seen."""
    return [
        _field("AGENT_K8S_JOB_RESTART", "metadata.labels['jobset.sigs.k8s.io/job-restart-attempt']"),
        _field("AGENT_K8S_IN_PLACE_RESTART", "metadata.annotations['jobset.sigs.k8s.io/in-place-restart-attempt']"),
        _field("AGENT_K8S_EXECUTION", "metadata.annotations['jobset.sigs.k8s.io/execution-attempt']"),
    ]


def workdir(job: Job) -> list[Object]:
    return values({"DISPATCH_K8S_WORKDIR": job.workdir}) if job.workdir else []


def publishing(job: Job) -> dict[str, str]:
    """What the containers beside the trainer are told of this job's saves."""
    found = {"DISPATCH_PUBLISH_DEST": job.dest}
    if job.nodes > 1:
        # They are not given it, and must not take several nodes for one: without a shared volume they then refuse.
        found["PET_NNODES"] = str(job.nodes)
    return {**found, **job.publish, **job.agent.env}


def place_of_node(job: Job) -> dict[str, str]:
    """What the trainer's container is told of the pod."""
    found = {"PUBLISH_ROOT": job.checkpoints.path}
    if job.agent.sidecar == "plain":
        found["AGENT_HOLD"] = "1"
    if job.allow_rank_restart:
        found["AGENT_ALLOW_RANK_RESTART"] = "1"
    return found


def place_of_pod(job: Job) -> list[Object]:
    """What the containers beside the trainer are told of the pod: where, how long, and which one it is."""
    found = {
        "PUBLISH_ROOT": job.checkpoints.path,
        "PUBLISH_GRACE": str(job.grace),
        "PUBLISH_LISTEN": f":{PORT}",
    }
    if job.checkpoints.claim:
        found["PUBLISH_SHARED_VOLUME"] = "1"
    if job.agent.sidecar == "plain":
        found["PUBLISH_END_WITH_TRAINER"] = "1"
    if job.allow_rank_restart:
        found["AGENT_ALLOW_RANK_RESTART"] = "1"
    return [*values(found), _field("AGENT_K8S_POD_UID", "metadata.uid"), _field("POD_NAME", "metadata.name")]


def values(variables: Mapping[str, str]) -> list[Object]:
    """Variables in a container's shape; a `$` is doubled, since Kubernetes would take `$(NAME)` for a reference."""
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in variables.items()]


def named(job: Job, name: str) -> Object:
    """Metadata; without a namespace the object goes where kubectl's own setting says."""
    return {"name": name, "namespace": job.namespace} if job.namespace else {"name": name}


def with_resources(container: Object, resources: Resources) -> Object:
    """The container, with resources if there are any."""
    rendered = rendered_resources(resources)
    return {**container, "resources": rendered} if rendered else container


def rendered_resources(resources: Resources) -> Object:
    found = {"requests": dict(resources.requests), "limits": dict(resources.limits)}
    return {name: quantities for name, quantities in found.items() if quantities}


def _install(job: Job) -> Object:
    return {
        **_ours(job, INSTALL, ["dispatch-agent", "install", AGENT_FOLDER]),
        "volumeMounts": _agent_mount(job, read_only=False),
    }


def _init(job: Job, env: Sequence[Object]) -> Object:
    return {**_ours(job, INIT, ["publish", "init"]), **_publishers(job, env)}


def _publish(job: Job, env: Sequence[Object]) -> Object:
    def asks(path: str) -> Object:
        return {"httpGet": {"path": path, "port": PORT}}

    return {
        **_ours(job, PUBLISH, ["publish", "watch"]),
        **_publishers(job, env),
        "ports": [{"name": "health", "containerPort": PORT, "protocol": "TCP"}],
        # The trainer starts once this has answered: soon, and whatever the store does.
        "startupProbe": {**asks("/startupz"), "periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 120},
        "livenessProbe": {**asks("/livez"), "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "readinessProbe": {**asks("/readyz"), "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3},
        # Kubernetes runs it when the pod is told to end, long before a sidecar's own SIGTERM: the grace period counts
        # from here.
        "lifecycle": {"preStop": {"exec": {"command": ["dispatch-agent", "health", "terminating"]}}},
    }


def _ours(job: Job, name: str, words: list[str]) -> Object:
    """What our containers share. Their image has no shell, and its commands are on PATH."""
    return {
        "name": name,
        "image": job.agent.image,
        "command": words,
        "resources": rendered_resources(job.agent.resources),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _publishers(job: Job, env: Sequence[Object]) -> Object:
    found: Object = {"env": list(env), "volumeMounts": [_mount(job)]}
    if job.credentials and job.credentials.mount:
        found["volumeMounts"].append({"name": _CREDENTIALS, "mountPath": job.credentials.mount, "readOnly": True})
    elif job.credentials:
        found["envFrom"] = [{"secretRef": {"name": job.credentials.secret}}]
    return found


def _volumes(job: Job) -> list[Object]:
    if job.checkpoints.claim:
        source: Object = {"persistentVolumeClaim": {"claimName": job.checkpoints.claim}}
    else:
        source = {"emptyDir": {"sizeLimit": job.checkpoints.size} if job.checkpoints.size else {}}
    volumes = [{"name": _CHECKPOINTS, **source}]
    if job.agent.install:
        volumes.append({"name": _AGENT, "emptyDir": {}})
    if job.credentials and job.credentials.mount:
        volumes.append({"name": _CREDENTIALS, "secret": {"secretName": job.credentials.secret, "defaultMode": 0o440}})
    return volumes


def _mount(job: Job) -> Object:
    return {"name": _CHECKPOINTS, "mountPath": job.checkpoints.path}


def _agent_mount(job: Job, *, read_only: bool) -> list[Object]:
    if not job.agent.install:
        return []
    mount: Object = {"name": _AGENT, "mountPath": AGENT_FOLDER}
    return [{**mount, "readOnly": True} if read_only else mount]


def _field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
