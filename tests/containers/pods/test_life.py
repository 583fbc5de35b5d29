"""The life of a pod, from its init containers to the end of its sidecar, and the pod after it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.containers.pods.conftest import Pods, Server
from tests.containers.pods.job import BIG, INIT, SIDECAR, Job, said

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]


@pytest.mark.parametrize("kind", ["trainjob", "jobset", "pod"])
def test_the_next_pod_resumes_from_the_last_save_of_the_one_before(pods: Pods, job: Job, kind: str) -> None:
    """I9, and what all this is for: preempted, the trainer saves once more, and nothing of it is lost."""
    job = replace(job, kind=kind, more={"grace": 60})
    first = pods(job.pod(1, "save=step-1:3:64", "until-term", BIG, "save=step-2:3:64")).says(
        "INFO    published save=step-1", SIDECAR
    )
    first.throttle(SIDECAR, 0.4)  # so that the last save is made while the one before is on its way
    first.delete()
    first.order((SIDECAR, "has started"), ("node", "started"))
    first.order(("node", "SIGTERM"), ("node", "ended"), (SIDECAR, "SIGTERM"), (SIDECAR, "ended"))
    first.order((SIDECAR, "preStop 0"), (SIDECAR, "SIGTERM"))
    assert (first.code("node"), first.code(SIDECAR)) == (0, 0), first.story()
    assert first.ended(SIDECAR).message.startswith("exit 0: done\npublished 3, ")
    second = pods(job.pod(2, "save=step-3:3:64")).join()
    assert said(second.log("node"), "resume") == [["step-2"]], second.story()
    assert (second.phase, second.code(SIDECAR)) == ("Succeeded", 0), second.story()
    job.destination.check("step-1", "big", "step-2", "step-3")


def test_a_drain_that_has_no_time_left_says_what_it_leaves_and_shows_nothing_of_it(
    pods: Pods, job: Job, server: Server
) -> None:
    """I2, and a bound: the sidecar breaks off by itself before it is killed, and its last words name the save."""
    job = replace(job, more={"grace": 5})
    pod = pods(job.pod(1, "save=step-1:2:64", "until=/checkpoints/go", BIG, "hold"))
    job.interrupt_upload(pod)
    pod.throttle(SIDECAR, 0)
    server.container.pause()
    try:
        pod.kill("node")
        pod.join()
    finally:
        server.container.unpause()
    left = pod.ended(SIDECAR)
    assert (left.code, "SIGKILL" in {event.what for event in pod.events}) == (40, False), pod.story()
    assert left.message.startswith("exit 40: ")
    assert "big" in left.message
    job.destination.check("step-1")


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


def test_others_see_what_a_sidecar_is_at(pods: Pods, job: Job, server: Server) -> None:
    """By its probes and metrics over the network; but only what is in the pod may tell it that the pod ends."""
    pod = pods(job.pod(1, "save=step-1:2:64", "until=/checkpoints/end")).says("INFO    published save=step-1", SIDECAR)

    def ask(path: str, *more: str) -> tuple[int, str]:
        url = f"http://{pod.address}:9464/{path}"
        answer = server.container.exec_run(["wget", "-q", "-O-", *more, url])
        return answer.exit_code, answer.output.decode()

    for path in ("startupz", "livez", "readyz"):
        assert ask(path)[0] == 0, path
    assert "dispatch_publish_published_total 1.0" in ask("metrics")[1]
    code, refused = ask("terminating", "--post-data=")
    assert code != 0
    assert "403" in refused
    assert "terminating" not in pod.log(SIDECAR)
    code, listed = pod.execute(SIDECAR, "publish", "list", "--json")
    assert (code, [commit["save"] for commit in json.loads(listed)]) == (0, ["step-1"])
    pod.look("touch checkpoints/end")
    assert pod.join().restarts(SIDECAR) == 0, pod.story()


def test_a_pod_of_any_user_and_without_any_right_does_all_this(pods: Pods, shared: Job) -> None:
    """A user that no file names, in root's group (as OpenShift gives it), a read-only root, not one capability."""
    for admission in (1, 2):
        manifest = shared.pod(admission, f"save=step-{admission}:2:64")
        spec = manifest["spec"]
        spec["securityContext"] = {"runAsNonRoot": True, "runAsUser": 1000680000, "runAsGroup": 0}
        spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] = True
        pod = pods(manifest).join()
        assert (pod.phase, pod.code(INIT), pod.code(SIDECAR)) == ("Succeeded", 0, 0), pod.story()
        for name in (INIT, SIDECAR, "node"):
            given = pod.runs[name][0].attrs
            assert (given["Config"]["User"], given["HostConfig"]["ReadonlyRootfs"]) == ("1000680000:0", True)
            assert given["HostConfig"]["CapDrop"] == ["ALL"]
            assert given["HostConfig"]["SecurityOpt"] == ["no-new-privileges"]
    assert said(pod.log("node"), "resume") == [["step-1"]], pod.story()
    shared.destination.check("step-1", "step-2")


def test_three_ranks_on_one_volume_resume_from_one_save(pods: Pods, shared: Job) -> None:
    """Whatever is published while they start; rank 0 publishes for all, and the sidecars of the others end too."""
    shared = replace(shared, more={"nodes": 3})
    pods(shared.pod(1, "save=step-1:2:64")).join()
    steps = (["save=step-2:2:64"], [], [])
    ranks = [pods(shared.pod(2, *steps[rank], rank=rank)) for rank in range(3)]
    for pod in ranks:
        pod.join()
        assert (pod.phase, pod.code(SIDECAR)) == ("Succeeded", 0), pod.story()
        assert said(pod.log("node"), "resume") == [["step-1"]], pod.story()
    shared.destination.check("step-1", "step-2")
