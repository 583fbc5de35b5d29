"""The sidecar dies, and is started again in its place."""

from __future__ import annotations

import threading

import pytest
from tests.containers.pods.conftest import Pods
from tests.containers.pods.job import BIG, SIDECAR, Job
from tests.containers.pods.pod import until

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]

# Of all processes in the container, the kernel takes the first one then.
HOG = """
import os, time
while not os.path.exists("/checkpoints/eat"):
    time.sleep(0.01)
open("/proc/1/oom_score_adj", "w").write("1000")
eaten = b"x" * (1 << 30)
"""


def test_a_sidecar_that_is_killed_in_the_middle_of_an_upload_publishes_it_when_it_is_back(pods: Pods, job: Job) -> None:
    """I1, I3, I9: as often as it dies, the save is published once, and the trainer sees nothing of it."""
    pod = pods(job.pod(1, "save=step-1:2:64", "until=/checkpoints/go", BIG, "until=/checkpoints/end"))
    job.interrupt_upload(pod)
    for times in (1, 2, 3):
        pod.kill(SIDECAR)
        until(lambda times=times: pod.restarts(SIDECAR) == times, pod.story)
        assert pod.ended(SIDECAR, -2).code == 137, pod.story()
        assert job.destination.published() == ["step-1"], pod.story()
        before = job.destination.parts()
        until(lambda before=before: job.destination.parts() > before, pod.story)
    pod.says("INFO    published save=big", SIDECAR)
    pod.look("touch checkpoints/end")
    pod.join()
    assert (pod.code("node"), pod.code(SIDECAR)) == (0, 0), pod.story()
    job.destination.check("step-1", "big")


def test_a_sidecar_that_runs_out_of_memory_publishes_the_save_when_it_is_back(pods: Pods, job: Job) -> None:
    """I1, I3, I9: killed alone, by the kernel, within its own limit."""
    pod = pods(job.pod(1, "save=step-1:2:64", "until=/checkpoints/go", BIG, "until=/checkpoints/end"))
    hog = ("/opt/dispatch-agent/bin/python", "-c", HOG)
    eater = threading.Thread(target=lambda: pod.running().execute(SIDECAR, *hog))
    eater.start()
    job.interrupt_upload(pod)
    pod.look("touch checkpoints/eat")
    until(lambda: pod.restarts(SIDECAR) == 1, pod.story)
    eater.join()
    died = pod.ended(SIDECAR, -2)
    assert (died.code, died.oom_killed) == (137, True), pod.story()
    pod.says("INFO    published save=big", SIDECAR)
    pod.look("touch checkpoints/end")
    pod.join()
    assert (pod.code("node"), pod.code(SIDECAR)) == (0, 0), pod.story()
    job.destination.check("step-1", "big")
