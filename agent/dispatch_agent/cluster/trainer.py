"""Kubeflow Trainer: the TrainJob of one submission, and the (Cluster)TrainingRuntime that it runs in.

The runtime holds what a pod is: containers, probes, volumes, limits on restarts. The TrainJob holds what a job is. Its
`spec.trainer.env` reaches the container `node` alone, so its patch gives the same identity to the containers beside it.
"""

from __future__ import annotations

from dispatch_agent.cluster import jobset, pod
from dispatch_agent.cluster.description import Job
from dispatch_agent.cluster.pod import Object

API = "trainer.kubeflow.org"
VERSION = f"{API}/v1alpha1"
MANAGER = "dispatch.phpboyscout.uk/adapter"

_KINDS = {"cluster": "ClusterTrainingRuntime", "namespace": "TrainingRuntime"}


def training_runtime(job: Job) -> Object:
    """The runtime. Nothing in it is of one submission, so that jobs of one shape can share it."""
    ours = [*pod.counters(), *pod.later_counters(), *pod.place_of_pod(job)]
    trainers = jobset.replicated_job(job, pod.spec(job, pod.node_of_runtime(job, job.image or ""), ours))
    trainers["template"] = {
        "metadata": {"labels": {f"{API}/trainjob-ancestor-step": "trainer"}},
        **trainers["template"],
    }
    policy: Object = {"numNodes": 1}
    metadata = pod.named(job, job.runtime.name)
    if job.runtime.scope == "cluster":
        metadata = {"name": job.runtime.name}
    if job.runtime.policy == "torch":
        policy["torch"] = {}
        metadata["labels"] = {f"{API}/framework": "torch"}
    return {
        "apiVersion": VERSION,
        "kind": _KINDS[job.runtime.scope],
        "metadata": metadata,
        "spec": {"mlPolicy": policy, "template": {"spec": jobset.spec(job, trainers)}},
    }


def train_job(job: Job, script: str, *, admitted: bool) -> Object:
    """The TrainJob: suspended and not admitted yet, or with its first admission, and running."""
    admission = "1" if admitted else "0"
    metadata: Object = {**pod.named(job, job.name), "annotations": {pod.FLOOR: admission}}
    if job.queue:
        metadata["labels"] = {pod.QUEUE: job.queue}
    trainer: Object = {
        "image": job.image,
        "numNodes": job.nodes,
        "command": pod.command(job, script),
        "env": [*pod.values({**job.env, **pod.identity_of_job(job)}), *pod.counters(), *pod.workdir(job)],
    }
    if resources := pod.rendered_resources(job.resources):
        trainer["resourcesPerNode"] = resources
    return {
        "apiVersion": VERSION,
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "suspend": not admitted,
            "runtimeRef": {"apiGroup": API, "kind": _KINDS[job.runtime.scope], "name": job.runtime.name},
            "trainer": trainer,
            "runtimePatches": [_patch(job, admission)],
        },
    }


def _patch(job: Job, admission: str) -> Object:
    def patched(name: str) -> Object:
        return {"name": name, "env": pod.values({**pod.identity_of_job(job), **pod.publishing(job)})}

    containers: Object = {"initContainers": [patched(pod.INIT), patched(pod.PUBLISH)]}
    if job.agent.sidecar == "plain":
        containers = {"initContainers": [patched(pod.INIT)], "containers": [patched(pod.PUBLISH)]}
    template = {"metadata": {"annotations": {pod.ADMISSION: admission}}, "spec": containers}
    trainers = {"name": pod.NODE, "template": {"spec": {"template": template}}}
    return {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [trainers]}}}}
