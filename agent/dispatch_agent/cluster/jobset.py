"""A JobSet: the Job of the trainers and what ends or restarts it; also what a TrainingRuntime holds as its template."""

from __future__ import annotations

from dispatch_agent.cluster import pod
from dispatch_agent.cluster.description import Job
from dispatch_agent.cluster.pod import Object


def job_set(job: Job, script: str) -> Object:
    """A plain JobSet, with the admission count 1 for good: only `raise_admission` counts a resumption."""
    node_env = [
        *pod.values({**job.env, **pod.identity_of_job(job)}),
        *pod.counters(),
        *pod.workdir(job),
        *rendezvous(job),
    ]
    ours = [
        *pod.values({**pod.identity_of_job(job), **pod.publishing(job)}),
        *pod.counters(),
        *pod.later_counters(),
        *pod.place_of_pod(job),
    ]
    trainers = replicated_job(job, pod.spec(job, pod.complete_node(job, script, node_env), ours))
    trainers["template"]["spec"] |= {"parallelism": job.nodes, "completions": job.nodes}
    trainers["template"]["spec"]["template"]["metadata"] = {"annotations": {pod.ADMISSION: "1"}}
    metadata = {**pod.named(job, job.name), "annotations": {pod.FLOOR: "1"}}
    if job.queue:
        metadata["labels"] = {pod.QUEUE: job.queue}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": spec(job, trainers),
    }


def spec(job: Job, trainers: Object) -> Object:
    """A JobSet's spec around its one Job."""
    return {
        # The ranks find each other before the sidecars are ready.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": job.max_restarts,
            # No pod of a restart while one of the restart before is still there.
            "restartStrategy": "BlockingRecreate",
            "rules": [
                {
                    # A refused identity is not made better by a restart.
                    "name": "dispatchRefused",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                    "targetReplicatedJobs": [pod.NODE],
                }
            ],
        },
        "replicatedJobs": [trainers],
    }


def replicated_job(job: Job, pod_spec: Object) -> Object:
    """The Job of the trainers. No pod of it is restarted or replaced by itself: that would repeat an identity."""
    ours = [pod.INIT] if job.agent.sidecar == "native" else [pod.INIT, pod.PUBLISH]
    rules: list[Object] = [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": name, "operator": "In", "values": pod.HOPELESS[name]},
        }
        for name in (pod.NODE, *ours)
    ]
    if job.allow_rank_restart:
        rules.append({"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    return {
        "name": pod.NODE,
        "replicas": 1,
        "template": {
            "spec": {
                "completionMode": "Indexed",
                "backoffLimit": 0,
                # Two executions overlap if new pods are made while old ones still end.
                "podReplacementPolicy": "Failed",
                "podFailurePolicy": {"rules": rules},
                "template": {"spec": pod_spec},
            }
        },
    }


def rendezvous(job: Job) -> list[Object]:
    """What torchrun reads, as Trainer would set it."""
    if job.runtime.policy == "plain":
        return []
    address = {"PET_MASTER_ADDR": f"{job.name}-{pod.NODE}-0-0.{job.name}", "PET_MASTER_PORT": "29500"}
    rank = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        *pod.values({"PET_NNODES": str(job.nodes), "PET_NPROC_PER_NODE": "auto"}),
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": rank}}},
        *pod.values(address),
    ]
