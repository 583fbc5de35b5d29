"""From a cluster's own objects: which identity each pod has, and whether one could have been used twice.

Pure. Resets are detected, not prevented: whoever may rewrite a job's objects can also rewrite what is compared here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dispatch_agent.cluster import admission, container, objects, requirement
from dispatch_agent.cluster.objects import Group, Thing, get, items, number, shown, text
from dispatch_agent.cluster.pod import ADMISSION, FLOOR, INIT, NODE, PUBLISH, REFUSED
from dispatch_agent.cluster.requirement import Finding
from dispatch_agent.cluster.trainer import MANAGER
from dispatch_agent.errors import SettingsError

_RESTART = "jobset.sigs.k8s.io/restart-attempt"
_JOB_RESTART = "jobset.sigs.k8s.io/job-restart-attempt"
_IN_PLACE_RESTART = "jobset.sigs.k8s.io/in-place-restart-attempt"
_EXECUTION = "jobset.sigs.k8s.io/execution-attempt"
_PLACE = ("jobset.sigs.k8s.io/replicatedjob-name", "jobset.sigs.k8s.io/job-index")
_RANK = "batch.kubernetes.io/job-completion-index"
_OURS = "dispatch.phpboyscout.uk/"
_INPUTS = {"DISPATCH_K8S_ADMISSION", "DISPATCH_K8S_TOKEN_PREFIX", "DISPATCH_EPOCH"}


@dataclass(frozen=True, slots=True)
class PodSeen:
    """One pod of a job. `epoch` and `attempt` are what its containers are given, "" where they are refused."""

    name: str
    uid: str
    rank: int | None
    phase: str
    ending: bool
    epoch: str
    attempt: str
    refused: str
    publisher: str

    @property
    def alive(self) -> bool:
        return self.phase not in {"Succeeded", "Failed"}


@dataclass(frozen=True, slots=True)
class JobSeen:
    """One job. The counts are as they were read, None where they are not there; `next_admission` is None where there is
    nothing to raise."""

    namespace: str
    name: str
    admission: str | None
    floor: str | None
    restarts: int | None
    suspended: bool
    next_admission: int | None
    pods: tuple[PodSeen, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """`ignored`: how many objects of each other kind there were, and of jobs that are not the dispatcher's."""

    jobs: tuple[JobSeen, ...]
    runtimes: tuple[str, ...]
    findings: tuple[Finding, ...]
    ignored: Mapping[str, int]

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        return (*self.findings, *(finding for job in self.jobs for finding in job.findings))


def inspect(documents: Iterable[object], *, allow_rank_restart: bool = False) -> Report:
    """What the objects show. Whatever is in them, this raises nothing."""
    groups, runtimes, ignored = objects.sort(documents)
    ours = [group for group in groups if _is_ours(group)]
    for group in groups:
        if group not in ours:
            kind = f"{group.things[0].kind} that is not the dispatcher's"
            ignored = {**ignored, kind: ignored.get(kind, 0) + len(group.things)}
    used = {
        (text(get(train_job.body, "spec", "runtimeRef", "kind")) or "ClusterTrainingRuntime", name)
        for group in ours
        for train_job in group.of("TrainJob")
        if (name := text(get(train_job.body, "spec", "runtimeRef", "name")))
    }
    checked = [runtime for runtime in runtimes if not used or (runtime.kind, runtime.name) in used]
    if len(checked) < len(runtimes):
        ignored = {**ignored, "runtime of other jobs": len(runtimes) - len(checked)}
    return Report(
        tuple(_job(group, allow_rank_restart) for group in ours),
        tuple(runtime.where for runtime in checked),
        tuple(
            finding
            for runtime in checked
            for finding in requirement.check(runtime, allow_rank_restart=allow_rank_restart)
        ),
        ignored,
    )


def _is_ours(group: Group) -> bool:
    return any(
        objects.marked(thing.body, _OURS)
        or any(get(patch, "manager") == MANAGER for patch in items(get(thing.body, "spec", "runtimePatches")))
        or any(objects.marked(template, _OURS) or _has_identity(template) for template in objects.templates(thing))
        for thing in group.things
    )


def _job(group: Group, allowed: bool) -> JobSeen:
    job_sets = group.of("JobSet")
    own_job_sets = [
        thing for thing in job_sets if thing.owner("TrainJob") is None
    ]  # the others' counts are a TrainJob's
    top = next(iter([*group.of("TrainJob"), *own_job_sets]), None)
    restarts = max(
        (n for thing in job_sets if (n := number(get(thing.body, "status", "restarts"))) is not None), default=None
    )
    suspended = top is not None and get(top.body, "spec", "suspend") is True
    seen = [(pod, _pod(pod)) for pod in group.of("Pod") if _has_identity(pod.body)]
    findings: list[Finding] = []
    count = floor = following = None
    if top is not None:
        count, floor = _admission(top), top.annotation(FLOOR)
        findings += _resets(top, count, floor, job_sets)
        if suspended:
            following, wrong = _next(top, count, floor, restarts or 0)
            findings += wrong
    for thing in [*job_sets, *(job for job in group.of("Job") if _trains(job, job_sets))]:
        findings += requirement.check(thing, allow_rank_restart=allowed)
    for pod, found in seen:
        findings += _of_pod(pod, found, floor, restarts, allowed)
    pods = [found for _, found in seen]
    findings += [*_of_jobs(group.of("Job"), allowed), *_twice(seen, allowed), *_overlaps(pods)]
    return JobSeen(
        group.namespace,
        group.name,
        count,
        floor,
        restarts,
        suspended,
        following,
        tuple(sorted(pods, key=lambda pod: (pod.rank is None, pod.rank or 0, pod.name))),
        tuple(dict.fromkeys(findings)),
    )


def _resets(top: Thing, count: str | None, floor: str | None, job_sets: list[Thing]) -> Iterator[Finding]:
    """What a counter that was put back leaves behind."""
    if top.kind == "TrainJob":
        yield from _of_patches(top)
    if floor is None:
        yield _identity(top, f"the annotation {FLOOR} is missing: which counts were used cannot be told")
    elif number(floor) is None:
        yield _identity(top, f"the annotation {FLOOR} is {floor!r}, not a number")
    if count is not None and number(count) is None:
        yield _identity(top, f"the admission count A is {count!r}, not a number: pods would be refused")
    lowest, found = number(floor), number(count)
    if lowest is not None and found is not None and found < lowest:
        yield _identity(top, f"A is {found}, below the admission-floor {lowest}: the runtime patch was rewritten")
    if recorded := top.annotation(admission.JOBSET_UID):
        for job_set in job_sets:
            if job_set.uid and job_set.uid != recorded:
                says = f"JobSet UID {job_set.uid} is not the recorded {recorded}: J may have been reset"
                yield _identity(top, says)


def _of_patches(top: Thing) -> Iterator[Finding]:
    """Patches merge in their order: the last one that sets A is what pods get."""
    ours = False
    for patch in items(get(top.body, "spec", "runtimePatches")):
        counts = _patched(patch)
        if get(patch, "manager") == MANAGER:
            ours = True
            if not counts:
                yield _identity(top, f"the runtime patch of {MANAGER} has no admission annotation: A was removed")
        elif counts:
            manager = text(get(patch, "manager")) or "(no manager)"
            says = f"the runtime patch of {manager} sets the admission annotation too ({counts[0]!r})"
            effect = ", and wins over the dispatcher's" if ours else ""
            yield _identity(top, f"{says}{effect}: take it out")
    if not ours:
        yield _identity(top, f"the runtime patch of {MANAGER} is missing: its entry was dropped, and A with it")


def _admission(top: Thing) -> str | None:
    """A as the dispatcher wrote it: in its patch of a TrainJob, or in the template of a JobSet's trainers."""
    if top.kind == "JobSet":
        trainers = requirement.trainer_of(get(top.body, "spec"))
        return _written(get(trainers, "template", "spec", "template"))
    counts = [
        count
        for patch in items(get(top.body, "spec", "runtimePatches"))
        if get(patch, "manager") == MANAGER
        for count in _patched(patch)
    ]
    return counts[0] if counts else None


def _patched(patch: object) -> list[str]:
    jobs = items(get(patch, "trainingRuntimeSpec", "template", "spec", "replicatedJobs"))
    found = (_written(get(job, "template", "spec", "template")) for job in jobs)
    return [count for count in found if count is not None]


def _written(template: object) -> str | None:
    """The admission annotation of a pod template, also where it is no text."""
    annotations = get(template, "metadata", "annotations")
    if get(annotations, ADMISSION) is None:
        return None
    return text(annotations[ADMISSION]) if isinstance(annotations[ADMISSION], str) else shown(annotations[ADMISSION])


def _next(top: Thing, count: str | None, floor: str | None, restarts: int) -> tuple[int | None, list[Finding]]:
    try:
        return admission.next_admission(count, floor, top.where, restarts), []
    except SettingsError as error:
        return None, [Finding("identity", top.where, f"it cannot be admitted again: {error}")]


def _trains(job: Thing, job_sets: list[Thing]) -> bool:
    """Whether a Job has the ranks, and not what Trainer puts before them. Those of a JobSet that is here too were made
    by its template, and are judged with it."""
    return not job_sets and (job.label(_PLACE[0]) in {None, NODE})


def _of_jobs(jobs: list[Thing], allowed: bool) -> Iterator[Finding]:
    for job in jobs:
        if again := number(job.label(_JOB_RESTART)):
            says = f"JobSet made it anew {again} time(s) without raising restart-attempt: A and J repeated"
            yield _repeated(job.where, says, allowed)


def _has_identity(pod: object) -> bool:
    """Whether ranks run in it: what Trainer runs before them has no counts, and needs none."""
    return get(pod, "metadata", "annotations", ADMISSION) is not None or any(
        text(get(entry, "name")) in _INPUTS for item in _containers(pod) for entry in items(get(item, "env"))
    )


def _containers(pod: object) -> list[Any]:
    """The trainer's first: its identity is the pod's."""
    all_of_them = [*items(get(pod, "spec", "containers")), *items(get(pod, "spec", "initContainers"))]
    return sorted(all_of_them, key=lambda item: get(item, "name") != NODE)


def _pod(pod: Thing) -> PodSeen:
    found = next(
        (one for item in _containers(pod.body) if (one := objects.identity(pod, item)) is not None), "no variables"
    )
    epoch, attempt = ("", "") if isinstance(found, str) else found
    return PodSeen(
        pod.name,
        pod.uid,
        number(pod.label(_RANK) or pod.annotation(_RANK)),
        text(get(pod.body, "status", "phase")) or "Pending",
        get(pod.body, "metadata", "deletionTimestamp") is not None,
        epoch,
        attempt,
        found if isinstance(found, str) else "",
        _publisher(pod),
    )


def _publisher(pod: Thing) -> str:
    """What the sidecar does, in words; its last words if it has ended. Nothing if the pod has none."""
    for status in _statuses(pod):
        if get(status, "name") == PUBLISH:
            state = get(status, "state")
            again = number(get(status, "restartCount")) or 0
            said = ""
            if get(state, "running") is not None:
                said = "running" if get(status, "ready") is not False else "running, not ready"
            elif (ended := get(state, "terminated")) is not None:
                said = f"ended with {number(get(ended, 'exitCode'))}{_last_words(ended)}"
            elif (waiting := get(state, "waiting")) is not None:
                said = f"waiting ({text(get(waiting, 'reason')) or 'no reason'})"
            return f"{said or 'no state'}{f', restarted {again} time(s)' if again else ''}"
    return ""


def _statuses(pod: Thing) -> list[Any]:
    return [
        *items(get(pod.body, "status", "initContainerStatuses")),
        *items(get(pod.body, "status", "containerStatuses")),
    ]


def _last_words(ended: object) -> str:
    said = " ".join((text(get(ended, "message")) or "").split())
    return f": {said}" if said else ""


def _of_pod(pod: Thing, seen: PodSeen, floor: str | None, restarts: int | None, allowed: bool) -> Iterator[Finding]:
    count = pod.annotation(ADMISSION)
    ready_made = seen.attempt and count is None
    if count is None and not ready_made:
        yield _identity(pod, "it has no admission annotation: its containers see an empty count, and are refused")
    elif count is not None:
        yield from _below(pod, seen, count, floor)
    if seen.refused and count is not None:
        yield _identity(pod, f"its containers are refused: {seen.refused}")
    restart = number(pod.label(_RESTART))
    if restart is not None and restarts is not None and restart > restarts:
        says = f"its restart-attempt is {restart}, the JobSet counts {restarts}: J was reset"
        yield _identity(pod, says)
    yield from _one_identity(pod, seen)
    yield from _ran_again(pod, allowed)


def _below(pod: Thing, seen: PodSeen, count: str, floor: str | None) -> Iterator[Finding]:
    found, lowest = number(count), number(floor)
    if found is not None and lowest is not None and found < lowest:
        if not seen.alive or seen.ending:
            return  # it is of an earlier admission, and ends
        yield _identity(pod, f"its A is {found}, below the admission-floor {lowest}")


def _one_identity(pod: Thing, seen: PodSeen) -> Iterator[Finding]:
    """All containers of a pod have the trainer's identity, and none was refused."""
    for item in _containers(pod.body):
        found = objects.identity(pod, item)
        if isinstance(found, tuple) and seen.attempt and found != (seen.epoch, seen.attempt):
            name = text(get(item, "name"))
            says = (
                f"container {name} has epoch {found[0]}, attempt {found[1]}, the trainer {seen.epoch}, {seen.attempt}"
            )
            yield _identity(pod, says)
    for status in _statuses(pod):
        for state in (get(status, "state"), get(status, "lastState")):
            ended = get(state, "terminated")
            if number(get(ended, "exitCode")) == REFUSED:
                says = f"container {text(get(status, 'name'))} was refused (exit code {REFUSED}){_last_words(ended)}"
                yield _identity(pod, says)


def _ran_again(pod: Thing, allowed: bool) -> Iterator[Finding]:
    """What says that this pod's identity was used by another run."""
    counters = container.read_counters(
        {
            "AGENT_K8S_JOB_RESTART": pod.label(_JOB_RESTART) or "",
            "AGENT_K8S_IN_PLACE_RESTART": pod.annotation(_IN_PLACE_RESTART) or "",
            "AGENT_K8S_EXECUTION": pod.annotation(_EXECUTION) or "",
        }
    )
    for says in counters.weakened:
        yield _repeated(pod.where, says, allowed)
    for status in _statuses(pod):
        again = number(get(status, "restartCount"))
        if again and get(status, "name") not in (PUBLISH, INIT):
            name = text(get(status, "name"))
            yield _repeated(pod.where, f"container {name} was restarted {again} time(s) in place, as it was", allowed)


def _twice(seen: list[tuple[Thing, PodSeen]], allowed: bool) -> Iterator[Finding]:
    """One rank under one identity in several pods."""
    ranks: dict[tuple[object, ...], list[PodSeen]] = defaultdict(list)
    for pod, found in seen:
        if found.attempt:
            place = tuple(pod.label(key) for key in _PLACE)
            key = (*place, found.rank, found.epoch, found.attempt)
            ranks[key].append(found)
    for pods in ranks.values():
        if len(pods) > 1:
            rank, attempt = pods[0].rank or 0, pods[0].attempt
            names = ", ".join(sorted(pod.name for pod in pods))
            now = "are alive at once" if sum(pod.alive for pod in pods) > 1 else "ran one after the other"
            yield _repeated(names, f"{len(pods)} pods of rank {rank} {now} under attempt {attempt}", allowed)


def _overlaps(pods: list[PodSeen]) -> Iterator[Finding]:
    alive = [pod for pod in pods if pod.alive and pod.epoch]
    newest = max((int(pod.epoch) for pod in alive), default=0)
    for pod in alive:
        if int(pod.epoch) < newest:
            says = f"epoch {pod.epoch} is still alive beside epoch {newest}: it is stale, and what it saves is fenced"
            yield Finding("stale", f"Pod {pod.name}", f"{says} once the newer one has committed")


def _identity(thing: Thing, says: str) -> Finding:
    return Finding("identity", thing.where, says)


def _repeated(where: str, says: str, allowed: bool) -> Finding:
    return Finding("weakened", where, f"identity weakened: {says}") if allowed else Finding("identity", where, says)
