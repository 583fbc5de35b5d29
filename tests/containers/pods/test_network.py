"""The network between sidecar and store breaks in the middle of an upload, and heals; so does the store."""

from __future__ import annotations

import pytest
from tests.containers.pods.conftest import Pods, Server
from tests.containers.pods.job import BIG, SIDECAR, Job
from tests.containers.pods.pod import Pod, black_hole

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]

STEPS = ("save=step-1:2:64", "until=/checkpoints/go", BIG, "until=/checkpoints/end")


def test_all_is_published_once_after_the_network_was_gone(pods: Pods, job: Job) -> None:
    """I8, I9: no address, no names."""
    pod = pods(job.pod(1, *STEPS))
    job.interrupt_upload(pod)
    pod.disconnect()
    hold_out(pod)
    pod.connect()
    finish(pod, job)


@pytest.mark.root
def test_all_is_published_once_after_every_packet_was_lost(pods: Pods, job: Job, server: Server) -> None:
    """I8, I9: nothing refuses, nothing answers."""
    pod = pods(job.pod(1, *STEPS))
    job.interrupt_upload(pod)
    with black_hole(pod.address, server.address):
        hold_out(pod)
    finish(pod, job)


def test_all_is_published_once_after_the_store_stood_still(pods: Pods, job: Job, server: Server) -> None:
    """I8, I9: connections stay open, and nobody answers."""
    pod = pods(job.pod(1, *STEPS))
    job.interrupt_upload(pod)
    server.container.pause()
    try:
        hold_out(pod)
    finally:
        server.container.unpause()
    finish(pod, job)


def test_all_is_published_once_after_the_store_was_restarted(pods: Pods, job: Job, server: Server) -> None:
    """I8, I9: whatever was under way is cut off."""
    pod = pods(job.pod(1, *STEPS))
    job.interrupt_upload(pod)
    pod.throttle(SIDECAR, 0)
    server.restart()
    finish(pod, job)


def hold_out(pod: Pod) -> None:
    pod.throttle(SIDECAR, 0)


def finish(pod: Pod, job: Job) -> None:
    pod.says("published save=big", SIDECAR)
    pod.look("touch checkpoints/end")
    pod.join()
    assert pod.code(SIDECAR) == 0, pod.story()
    job.destination.check("step-1", "big")
