"""What a runtime, JobSet or Job must state, so that no rank runs twice under one identity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dispatch_agent.cluster.objects import Thing, get, items, shown, text
from dispatch_agent.cluster.pod import NODE

Level = Literal["identity", "requirement", "weakened", "stale", "advice"]

_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_RESTARTS_ALONE = ("RestartJob", "RestartJobAndIgnoreMaxRestarts")
_SAME = "under the epoch and attempt that it had"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that somebody should know, and how grave it is.

    identity: executions may share one, or one is refused. requirement: the objects allow it to happen. weakened: they
    do, and it was accepted. stale: an older execution is still alive, which the publisher withstands. advice.
    """

    level: Level
    where: str
    says: str


def check(thing: Thing, *, allow_rank_restart: bool) -> list[Finding]:
    """Of a TrainingRuntime, ClusterTrainingRuntime, JobSet or Job: what it must state, and does not."""
    if thing.kind == "Job":
        return list(_of_job(thing.where, get(thing.body, "spec"), allow_rank_restart))
    spec = get(thing.body, "spec")
    if thing.kind != "JobSet":
        spec = get(spec, "template", "spec")
    trainers = trainer_of(spec)
    if trainers is None:
        says = f"no replicated job is the trainer: label its template {_STEP}: trainer"
        return [Finding("requirement", thing.where, says)]
    where = f"{thing.where}, job {text(get(trainers, 'name')) or '(no name)'}"
    return [
        *_of_job(where, get(trainers, "template", "spec"), allow_rank_restart),
        *_of_replicas(where, trainers),
        *_of_failure_policy(thing.where, get(spec, "failurePolicy"), allow_rank_restart),
    ]


def trainer_of(job_set_spec: object) -> Any:
    """The replicated job whose pods train: by Trainer's label, by our name, or the only one. None if there is none."""
    jobs = items(get(job_set_spec, "replicatedJobs"))
    for found in (
        [job for job in jobs if get(job, "template", "metadata", "labels", _STEP) == "trainer"],
        [job for job in jobs if get(job, "name") == NODE],
        jobs,
    ):
        if len(found) == 1:
            return found[0]
    return None


def _of_job(where: str, spec: object, allowed: bool) -> Iterator[Finding]:
    """The rules of one Job. Two must be stated whatever is allowed: JobSet and Kubernetes fill in other values."""
    pod = get(spec, "template", "spec")
    policy, limit = get(pod, "restartPolicy"), get(spec, "backoffLimit")
    if policy != "Never":
        seen = "not stated, and JobSet makes it OnFailure" if policy is None else shown(policy)
        says = f"restartPolicy is {seen}: state Never; a container restarted in place runs {_SAME}"
        yield Finding("requirement", where, says)
    is_zero = limit == 0 and not isinstance(limit, bool)
    if not is_zero:
        seen = "not stated, and Kubernetes makes it 6" if limit is None else shown(limit)
        says = f"backoffLimit is {seen}: state 0; a pod that replaces a failed one runs {_SAME}"
        yield Finding("requirement", where, says)
    for says in _replacing(spec, is_zero):
        yield _repeats(where, says, allowed)
    for container in items(get(pod, "containers")):
        if get(container, "restartPolicy") not in (None, "Never") or items(get(container, "restartPolicyRules")):
            name = text(get(container, "name")) or "(no name)"
            yield _repeats(where, f"container {name} has rules by which it is restarted in place, {_SAME}", allowed)
    if get(spec, "podReplacementPolicy") != "Failed" and get(spec, "podFailurePolicy") is None:
        says = "state podReplacementPolicy: Failed, or new pods start while those before them still end"
        yield Finding("advice", where, says)


def _replacing(spec: object, no_backoff: bool) -> Iterator[str]:
    """What lets a failed rank be replaced in a Job that goes on."""
    for position, rule in enumerate(items(get(spec, "podFailurePolicy", "rules"))):
        action = get(rule, "action")
        if action in ("Ignore", "FailIndex") or (action == "Count" and not no_backoff):
            yield f"podFailurePolicy rule {position} ({action}) lets a failed rank be replaced, {_SAME}"
    per_index = get(spec, "backoffLimitPerIndex")
    if per_index not in (None, 0):
        yield f"backoffLimitPerIndex {shown(per_index)} lets a failed rank be replaced, {_SAME}"


def _of_replicas(where: str, trainers: object) -> Iterator[Finding]:
    replicas = get(trainers, "replicas")
    if replicas not in (None, 1):
        says = f"replicas is {shown(replicas)}: write 1; the ranks of each would have the identities of the others"
        yield Finding("requirement", where, says)


def _of_failure_policy(where: str, policy: object, allowed: bool) -> Iterator[Finding]:
    strategy = get(policy, "restartStrategy")
    if strategy == "InPlaceRestart":
        says = f"restartStrategy InPlaceRestart runs every container again in its pod, {_SAME}"
        yield _repeats(where, says, allowed)
    elif policy is not None and strategy != "BlockingRecreate":
        says = "state restartStrategy: BlockingRecreate, or new pods start while those before them still end"
        yield Finding("advice", where, says)
    for rule in items(get(policy, "rules")):
        if (action := get(rule, "action")) in _RESTARTS_ALONE:
            says = f"a rule of the failure policy is {action}, which makes one Job anew, {_SAME}"
            yield _repeats(where, says, allowed)


def _repeats(where: str, says: str, allowed: bool) -> Finding:
    """What gives an identity to a second run: wrong, or accepted and said."""
    if allowed:
        return Finding("weakened", where, f"identity weakened: {says}")
    return Finding("requirement", where, f"{says}; take it out, or accept it with --allow-rank-restart")
