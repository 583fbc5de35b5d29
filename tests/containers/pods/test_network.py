"""The network between sidecar and store breaks in the middle of an upload, and heals; so does the store."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.containers.pods.conftest import Pods, Server
from tests.containers.pods.job import BIG, SIDECAR, Job
from tests.containers.pods.pod import Pod, black_hole, until

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]

HEALTH = ("dispatch-agent", "health")
UPLOADED = """
import urllib.request
page = urllib.request.urlopen("http://127.0.0.1:9464/metrics").read().decode()
print([line for line in page.splitlines() if line.startswith("dispatch_publish_uploaded_bytes_total")])
"""
STEPS = ("save=step-1:2:64", "until=/checkpoints/go", BIG, "until=/checkpoints/end")


def test_all_is_published_once_after_the_network_was_gone(pods: Pods, job: Job) -> None:
    """I8, I9: no address, no names, in the middle of an upload."""
    pod = pods(job.pod(1, *STEPS))
    job.interrupt_upload(pod)
    pod.disconnect()
    stand_still(pod)
    pod.connect()
    finish(pod, job)


@pytest.mark.root
def test_all_is_published_once_after_every_packet_was_lost(pods: Pods, job: Job, server: Server) -> None:
    """I8, I9: nothing refuses, nothing answers, in the middle of an upload."""
    pod = pods(job.pod(1, *STEPS))
    job.interrupt_upload(pod)
    with black_hole(pod.address, server.address):
        stand_still(pod)
    finish(pod, job)


def test_all_is_published_once_after_the_store_stood_still(pods: Pods, job: Job, server: Server) -> None:
    """I8, I9: connections stay open, and nobody answers."""
    pod = pods(job.pod(1, *STEPS))
    job.interrupt_upload(pod)
    server.container.pause()
    try:
        stand_still(pod)
    finally:
        server.container.unpause()
    finish(pod, job)


def test_all_is_published_once_after_the_store_was_restarted(pods: Pods, job: Job, server: Server) -> None:
    """I8, I9: whatever was under way is cut off."""
    pod = pods(job.pod(1, *STEPS))
    job.interrupt_upload(pod)
    pod.throttle(SIDECAR, 0)
    with server.away():
        pass
    finish(pod, job)


def test_a_sidecar_without_its_store_says_that_it_is_not_ready_and_lives(pods: Pods, job: Job, server: Server) -> None:
    """I9: a store that is away is no reason to be restarted, and what was saved meanwhile is published after it."""
    environment = {**job.destination.environment, "AWS_MAX_ATTEMPTS": "1"}
    job = replace(job, more={"agent": {"env": environment}})
    pod = pods(job.pod(1, *STEPS)).says("INFO    published save=step-1", SIDECAR)
    until(lambda: pod.is_ready(SIDECAR), pod.story)
    with server.away():
        pod.look("touch checkpoints/go")
        pod.says("pass failed", SIDECAR)
        until(lambda: not pod.is_ready(SIDECAR), pod.story)
        assert pod.execute(SIDECAR, *HEALTH, "live") == (0, "live\n")
    until(lambda: pod.is_ready(SIDECAR), pod.story)
    finish(pod, job)


def stand_still(pod: Pod) -> None:
    """Wait until an upload that nothing holds back but the network goes on no more."""
    pod.throttle(SIDECAR, 0)
    seen: list[str] = []

    def still() -> bool:
        code, figures = pod.execute(SIDECAR, "/opt/dispatch-agent/bin/python", "-c", UPLOADED)
        assert code == 0, figures
        seen.append(figures)
        return len(seen) > 3 and len(set(seen[-4:])) == 1

    until(still, pod.story)
    assert pod.execute(SIDECAR, *HEALTH, "live") == (0, "live\n")


def finish(pod: Pod, job: Job) -> None:
    pod.says("INFO    published save=big", SIDECAR)
    pod.look("touch checkpoints/end")
    pod.join()
    assert (pod.code(SIDECAR), pod.restarts(SIDECAR)) == (0, 0), pod.story()
    job.destination.check("step-1", "big")
