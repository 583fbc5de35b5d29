"""The next admission of a suspended TrainJob or JobSet, where no dispatcher's controller raises it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from dispatch_agent.cluster import pod, trainer
from dispatch_agent.cluster.pod import Object
from dispatch_agent.errors import SettingsError
from dispatch_agent.identity import MAX_RESTART


def readmitted(document: object) -> Object:
    """The object as it was read, with A raised by one in its two places, and not suspended any more.

    A goes above both the annotation of the pods and the floor, so that neither of them alone can put it back. What was
    read names its resourceVersion, so that `kubectl replace` takes it only if nobody changed it since.

    Raises SettingsError if it is no suspended TrainJob or JobSet of ours, or has no counts that can be read.
    """
    found = copy.deepcopy(document)
    if not isinstance(found, dict) or found.get("kind") not in _TEMPLATES:
        kind = found.get("kind") if isinstance(found, dict) else found
        message = f"the kind is {kind!r}: give the one TrainJob or JobSet, as kubectl get NAME -o json prints it"
        raise SettingsError(message)
    metadata = found["metadata"]
    name = f"{found['kind']} {metadata.get('name')}"
    if queue := metadata.get("labels", {}).get(pod.QUEUE):
        message = f"{name} is in the queue {queue}: Kueue admits it, and the dispatcher's controller raises its count"
        raise SettingsError(message)
    if found["spec"].get("suspend") is not True:
        message = (
            f"{name} is not suspended: suspend it, and wait until its pods are gone; kubectl patch with "
            f'\'{{"spec":{{"suspend":true}}}}\' does the first'
        )
        raise SettingsError(message)
    template = _TEMPLATES[found["kind"]](found["spec"], name)
    annotations = template.setdefault("metadata", {}).setdefault("annotations", {})
    floors = metadata.setdefault("annotations", {})
    count = _next(annotations.get(pod.ADMISSION), floors.get(pod.FLOOR), name)
    annotations[pod.ADMISSION] = floors[pod.FLOOR] = str(count)
    found["spec"]["suspend"] = False
    return found


def _next(admission: str | None, floor: str | None, name: str) -> int:
    counts = []
    for what, text in ((pod.ADMISSION, admission), (pod.FLOOR, floor)):
        if text is None or not (text.isascii() and text.isdecimal()) or int(text) > MAX_RESTART:
            message = (
                f"{name}: the annotation {what} is {text!r}, not a count: somebody changed it, so which identities "
                f"were used cannot be told; start a new submission"
            )
            raise SettingsError(message)
        counts.append(int(text))
    if max(counts) >= MAX_RESTART:
        message = f"{name} was admitted {max(counts)} times, which is the bound: start a new submission"
        raise SettingsError(message)
    return max(counts) + 1


def _of_train_job(spec: Mapping[str, Any], name: str) -> Object:
    """The pods' template in our patch."""
    for patch in spec.get("runtimePatches", []):
        if patch.get("manager") == trainer.MANAGER:
            return _of_job_set(patch.get("trainingRuntimeSpec", {}).get("template", {}).get("spec", {}), name)
    message = f"{name} has no runtime patch of {trainer.MANAGER}: it was not rendered here, or lost it; submit it anew"
    raise SettingsError(message)


def _of_job_set(spec: Mapping[str, Any], name: str) -> Object:
    for job in spec.get("replicatedJobs", []):
        if job.get("name") == pod.NODE:
            template: Object = job["template"]["spec"]["template"]
            return template
    message = f"{name} has no job {pod.NODE}: it was not rendered here"
    raise SettingsError(message)


_TEMPLATES = {"TrainJob": _of_train_job, "JobSet": _of_job_set}
