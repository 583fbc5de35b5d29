"""Who may start: the trainer never runs under an identity that is not surely its own."""

from __future__ import annotations

import pytest
from tests.containers.pods.conftest import Pods
from tests.containers.pods.job import ADMISSION, INIT, SIDECAR, Job
from tests.containers.pods.pod import until

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]


@pytest.mark.parametrize("count", [None, "", "07", "1000000", "one"])
def test_a_pod_whose_admission_count_is_none_never_starts_its_trainer(pods: Pods, job: Job, count: str | None) -> None:
    """The exit code is the one by which the JobSet fails for good, and the pod's status says why."""
    manifest = job.pod(1, "save=step-1:2:64")
    if count is None:
        del manifest["metadata"]["annotations"][ADMISSION]
    else:
        manifest["metadata"]["annotations"][ADMISSION] = count
    pod = pods(manifest).join()
    refused = pod.ended(INIT)
    assert (pod.phase, refused.code, sorted(pod.runs)) == ("Failed", 125, [INIT]), pod.story()
    assert "DISPATCH_K8S_ADMISSION" in refused.message or "restart count" in refused.message, refused.message
    job.destination.check()


def test_a_pod_whose_containers_are_all_restarted_in_place_is_refused(pods: Pods, job: Job) -> None:
    """I5 in the small: no counter was raised, so the trainer would write under an identity that was used before."""
    pod = pods(job.pod(1, "save=step-1:2:64", "hold")).says("INFO    published save=step-1", SIDECAR)
    pod.restart_all_containers()
    pod.join()
    refused = pod.ended(INIT)
    assert (refused.code, pod.restarts("node")) == (125, 0), pod.story()
    assert "restarted in place" in refused.message, refused.message
    job.destination.check("step-1")


def test_the_same_execution_made_anew_is_refused(pods: Pods, shared: Job) -> None:
    """Another pod of a rank under the same counters, as when a Job replaces one pod alone."""
    pods(shared.pod(1, "save=step-1:2:64")).join()
    again = pods(shared.pod(1, "save=step-2:2:64")).join()
    assert (again.ended(INIT).code, "node" in again.runs) == (125, False), again.story()
    assert "was replaced alone" in again.ended(INIT).message
    shared.destination.check("step-1")


def test_a_sidecar_that_reads_another_admission_count_after_its_restart_publishes_nothing_of_it(
    pods: Pods, job: Job
) -> None:
    """A restarted container gets its environment anew, the trainer keeps its own: a changed annotation parts them."""
    pod = pods(job.pod(1, "save=step-1:2:64", "until=/checkpoints/end")).says("INFO    published save=step-1", SIDECAR)
    pod.metadata["annotations"][ADMISSION] = "2"
    pod.kill(SIDECAR)
    until(lambda: pod.restarts(SIDECAR) == 1, pod.story)
    pod.running(SIDECAR).says("standing by", SIDECAR)
    assert not pod.is_ready(SIDECAR)
    pod.look("touch checkpoints/end")
    pod.join()
    job.destination.check("step-1")
