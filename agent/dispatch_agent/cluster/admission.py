"""The next admission of a suspended TrainJob or JobSet, where no dispatcher's controller raises it."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from dispatch_agent.cluster import pod, trainer
from dispatch_agent.cluster.pod import Object
from dispatch_agent.errors import SettingsError
from dispatch_agent.identity import MAX_RESTART

JOBSET_UID = "dispatch.phpboyscout.uk/jobset-uid"
_COUNT = r"[0-9]{1,6}"  # up to MAX_RESTART
# Conditions of a TrainJob and of a JobSet.
_ENDED = frozenset({"Complete", "Completed", "Failed"})


def readmitted(document: object) -> Object:
    """The object as it was read, with A raised by one in its two places, and not suspended any more.

    A goes above both the annotation of the pods and the floor, so that neither of them alone can put it back. What was
    read names its resourceVersion, so that `kubectl replace` takes it only if nobody changed it since. A TrainJob that
    comes in a list with its JobSet also records that JobSet's UID, by which a reset of J is seen the next time.

    Raises SettingsError if it is no suspended TrainJob or JobSet of ours, has ended, has no counts that can be read, or
    has another JobSet than before.
    """
    found, job_set = _pick(copy.deepcopy(document))
    metadata = found["metadata"]
    name = f"{found['kind']} {metadata.get('name')}"
    if queue := metadata.get("labels", {}).get(pod.QUEUE):
        message = f"{name} is in the queue {queue}: Kueue admits it, and the dispatcher's controller raises its count"
        raise SettingsError(message)
    for condition in found.get("status", {}).get("conditions", []):
        if condition.get("type") in _ENDED and condition.get("status") == "True":
            message = f"{name} has ended ({condition['type']}), and does not start again: start a new submission"
            raise SettingsError(message)
    if found["spec"].get("suspend") is not True:
        message = (
            f"{name} is not suspended: suspend it, and wait until its pods are gone; kubectl patch with "
            f'\'{{"spec":{{"suspend":true}}}}\' does the first'
        )
        raise SettingsError(message)
    template = _TEMPLATES[found["kind"]](found["spec"], name)
    annotations = template.setdefault("metadata", {}).setdefault("annotations", {})
    recorded = metadata.setdefault("annotations", {})
    restarts = (job_set or found).get("status", {}).get("restarts", 0)
    count = next_admission(annotations.get(pod.ADMISSION), recorded.get(pod.FLOOR), name, restarts)
    annotations[pod.ADMISSION] = recorded[pod.FLOOR] = str(count)
    if uid := _job_set_uid(recorded.get(JOBSET_UID), job_set, name):
        recorded[JOBSET_UID] = uid
    found["spec"]["suspend"] = False
    return found


def _pick(document: Any) -> tuple[Object, Object | None]:
    """The object to raise, and a TrainJob's JobSet if it came along."""
    items = document.get("items", []) if isinstance(document, dict) and document.get("kind") == "List" else [document]
    kinds = [str(item.get("kind", "an object without a kind") if isinstance(item, dict) else item) for item in items]
    if kinds in (["TrainJob"], ["JobSet"]):
        return items[0], None
    if sorted(kinds) == ["JobSet", "TrainJob"]:
        job_set, train_job = sorted(items, key=lambda item: str(item["kind"]))
        name, own = (item["metadata"].get("name") for item in (job_set, train_job))
        if name != own:  # Trainer gives both one name
            message = f"JobSet {name} is not that of TrainJob {own}: give the two of one job"
            raise SettingsError(message)
        return train_job, job_set
    message = (
        f"it holds {', '.join(kinds) or 'nothing'}: give one TrainJob with its JobSet, or one JobSet, as "
        f"kubectl get trainjob,jobset NAME -o json prints them"
    )
    raise SettingsError(message)


def _job_set_uid(recorded: str | None, job_set: Object | None, name: str) -> str | None:
    """What to record. Raises SettingsError if J may have begun anew."""
    uid = job_set["metadata"].get("uid") if job_set else None
    if recorded is None or recorded == uid:
        return uid
    if uid is None:
        message = (
            f"{name} records the JobSet UID {recorded} and no JobSet came with it: give both, as kubectl get "
            f"trainjob,jobset NAME -o json prints them; if the JobSet is gone, J is reset: start a new submission"
        )
    else:
        message = (
            f"{name}: JobSet UID {uid} is not the recorded {recorded}: J may have been reset, and an epoch come again; "
            f"start a new submission"
        )
    raise SettingsError(message)


def next_admission(admission: str | None, floor: str | None, name: str, restarts: int = 0) -> int:
    """`max(A, floor) + 1`, for the object `name`. `restarts` is J, where it is known.

    Raises SettingsError if A or the floor is no count, or if A + J would reach the epoch's bound of 1,000,000.
    """
    counts = []
    for what, text in ((pod.ADMISSION, admission), (pod.FLOOR, floor)):
        if text is None or not re.fullmatch(_COUNT, text):
            message = (
                f"{name}: the annotation {what} is {text!r}, not a count: somebody changed it, so which identities "
                f"were used cannot be told; start a new submission"
            )
            raise SettingsError(message)
        counts.append(int(text))
    if max(counts) + 1 + restarts > MAX_RESTART:
        beside = f" and restarted {restarts} times" if restarts else ""
        message = f"{name} was admitted {max(counts)} times{beside}, which is the bound: start a new submission"
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
