"""The life of a pod, from its init containers to the end of its sidecar, and the pod after it."""

from __future__ import annotations

import pytest
from tests.containers.pods.conftest import Pods
from tests.containers.pods.job import SIDECAR, Job, said

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]


def test_the_next_pod_resumes_from_the_last_save_of_the_one_before(pods: Pods, job: Job) -> None:
    """I9, and what all this is for: preempted, the trainer saves once more, and nothing of it is lost."""
    first = pods(job.pod(1, "save=step-1:3:64", "until-term", "save=step-2:3:64:0.5")).says('"save": "step-1"')
    first.delete()
    first.order(("node", "SIGTERM"), ("node", "ended"), (SIDECAR, "SIGTERM"), (SIDECAR, "ended"))
    assert (first.code("node"), first.code(SIDECAR)) == (0, 0), first.story()
    second = pods(job.pod(2, "save=step-3:3:64")).join()
    assert said(second.log("node"), "resume") == [["step-2"]], second.story()
    assert (second.phase, second.code(SIDECAR)) == ("Succeeded", 0), second.story()
    job.destination.check("step-1", "step-2", "step-3")


@pytest.mark.parametrize(
    ("last", "code"),
    [("exit=0", 0), ("exit=1", 1), ("eat-memory", 137), ("SIGKILL", 137)],
)
def test_the_sidecar_publishes_what_is_complete_and_ends_however_the_trainer_ends(
    pods: Pods, job: Job, last: str, code: int
) -> None:
    """I9 and I2: a trainer that dies in the middle of a save loses that save alone, and leaves no hanging pod."""
    killed = last == "SIGKILL"
    steps = ("save=step-1:2:64", "begin=step-2:2:64", "hold" if killed else last)
    pod = pods(
        job.pod(
            1,
            *steps,
        )
    ).says('"begin": "step-2"')
    if killed:
        pod.kill("node")
    pod.join()
    node = pod.ended("node")
    assert (node.code, node.oom_killed) == (code, last == "eat-memory"), pod.story()
    assert pod.phase == ("Failed" if code else "Succeeded")
    assert pod.code(SIDECAR) == 0, pod.story()
    job.destination.check("step-1")


def test_a_trainer_that_does_not_end_takes_the_grace_period_and_the_sidecar_still_publishes(
    pods: Pods, job: Job
) -> None:
    """I9: the two seconds that a sidecar has at least are enough for what was complete before."""
    pod = pods(job.pod(1, "ignore-term", "save=step-1:2:64", "hold")).says('"save": "step-1"')
    pod.delete(grace=1)
    pod.order(("node", "SIGTERM"), ("node", "SIGKILL"), (SIDECAR, "SIGTERM"), (SIDECAR, "ended"))
    assert (pod.code("node"), pod.code(SIDECAR)) == (137, 0), pod.story()
    job.destination.check("step-1")
