"""Two pods of one job at once: the old one is frozen, still in its grace period, or killed with its node."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.containers.pods.conftest import Pods
from tests.containers.pods.job import BIG, SIDECAR, Job, said

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]


def test_a_pod_that_was_frozen_overwrites_nothing_when_it_wakes_up(pods: Pods, job: Job) -> None:
    """I1, I4, I7: it stood still in the middle of an upload while the next one took over."""
    old = pods(job.pod(1, "save=step-1:2:64", "until=/checkpoints/go", BIG, "until-term", "save=step-9:2:64"))
    job.interrupt_upload(old)
    old.freeze()
    new = pods(job.pod(2, "save=step-2:2:64", "hold")).says("INFO    published save=step-2", SIDECAR)
    assert said(new.log("node"), "resume") == [["step-1"]]
    stood = job.destination.objects()
    old.throttle(SIDECAR, 0)
    old.thaw()
    old.says("fenced", SIDECAR).delete()
    assert old.code(SIDECAR) == 30, old.story()
    new.delete(grace=1)
    now = job.destination.objects()
    assert {key: now.get(key) for key in stood} == stood, "something was overwritten or deleted"
    job.destination.check("step-1", "step-2")


def test_a_pod_in_its_grace_period_publishes_until_the_next_one_has(pods: Pods, shared: Job) -> None:
    """I7, I9: until then its saves are the newest; not one after that, and what is newest never goes back."""
    shared = replace(shared, settings={"wait_owner": 1})
    old = pods(shared.pod(1, "save=step-1:2:64", "until-term", "save=step-2:2:64", "until=/checkpoints/go", BIG))
    old.says('"save": "step-1"').delete(grace=60, wait=False)
    old.says("INFO    published save=step-2", SIDECAR)
    new = pods(shared.pod(2, "save=step-3:2:64", "until-term"))
    new.says("INFO    published save=step-3", SIDECAR)
    assert said(new.log("node"), "resume") == [["step-2"]]
    old.look("touch checkpoints/go")
    old.join()
    assert old.code(SIDECAR) == 30, old.story()
    assert shared.destination.published() == ["step-1", "step-2", "step-3"]
    new.delete()
    shared.destination.check("step-1", "step-2", "step-3")


def test_what_a_killed_pod_left_on_a_shared_volume_the_next_one_publishes(pods: Pods, shared: Job) -> None:
    """I9: its upload was cut off by a node that died; I3: the new pod publishes it for it, in its place."""
    old = pods(shared.pod(1, "save=step-1:2:64", "until=/checkpoints/go", BIG, "hold"))
    shared.interrupt_upload(old)
    old.force_delete()
    assert shared.destination.published() == ["step-1"], old.story()
    new = pods(shared.pod(2, "save=step-2:2:64")).join()
    assert said(new.log("node"), "resume") == [["big"]], new.story()
    shared.destination.check("step-1", "big", "step-2")


def test_what_a_killed_pod_left_unfinished_is_not_to_be_seen(pods: Pods, job: Job) -> None:
    """I2: its volume went with it; the next pod resumes from the last whole save."""
    old = pods(job.pod(1, "save=step-1:2:64", "until=/checkpoints/go", BIG, "hold"))
    job.interrupt_upload(old)
    old.force_delete()
    new = pods(job.pod(2, "save=step-2:2:64")).join()
    assert said(new.log("node"), "resume") == [["step-1"]], new.story()
    job.destination.check("step-1", "step-2")
