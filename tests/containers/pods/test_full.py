"""A volume without room: for the trainer's saves, for what is restored, or for what is published."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.containers.pods.conftest import Pods
from tests.containers.pods.job import INIT, SIDECAR, Job, said
from tests.containers.pods.pod import Node, until

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]


def test_a_full_checkpoint_volume_costs_the_save_that_has_no_room(pods: Pods, node: Node, job: Job) -> None:
    """I2, I9: the save before it is published, half of one never; the next execution says what it lacks, or starts."""
    job = replace(job, claim=node.volume(size="6m"))
    pod = pods(job.pod(1, "save=step-1:2:1024", "until=/checkpoints/go", "begin=step-2:64:1024"))
    pod.says("INFO    published save=step-1", SIDECAR).look("touch checkpoints/go")
    pod.join()
    assert (pod.code("node"), pod.code(SIDECAR)) == (1, 0), pod.story()
    assert "No space left on device" in pod.log("node")
    job.destination.check("step-1")
    second = pods(job.pod(2, "save=step-3:1:64")).join()
    assert second.code(INIT) == 1, second.story()
    assert "No space left on device" in second.ended(INIT).message
    assert "node" not in second.runs
    pod.look("rm -r checkpoints/exec/*/step-2")
    third = pods(job.pod(3, "save=step-4:1:64")).join()
    assert said(third.log("node"), "resume") == [["step-1"]], third.story()
    job.destination.check("step-1", "step-4")


def test_a_save_waits_for_room_at_the_destination(pods: Pods, node: Node, job: Job) -> None:
    """I2, I9: not ready and alive as long as there is none, nothing partial to be seen, and then it is published."""
    volume = node.volume(size="6m")
    manifest = job.pod(1, "save=step-1:1:1024", "until=/checkpoints/go", "save=step-2:3:1024", "until=/checkpoints/end")
    manifest["spec"]["volumes"].append({"name": "published", "persistentVolumeClaim": {"claimName": volume}})
    for container in manifest["spec"]["initContainers"]:
        container["volumeMounts"].append({"name": "published", "mountPath": "/published"})
        for variable in container["env"]:
            if variable["name"] == "DISPATCH_PUBLISH_DEST":
                variable["value"] = "/published"
    pod = pods(manifest).says("INFO    published save=step-1", SIDECAR)

    def published() -> list[str]:
        code, listed = pod.execute(SIDECAR, "publish", "list", "--json")
        assert code == 0, listed
        return [commit["save"] for commit in json.loads(listed)]

    pod.look("head -c 3m /dev/zero >published/other; touch checkpoints/go")
    until(lambda: "No space left on device" in pod.log(SIDECAR), pod.story)
    assert pod.execute(SIDECAR, "dispatch-agent", "health", "live") == (0, "live\n")
    assert published() == ["step-1"]
    pod.look("rm published/other")
    pod.says("INFO    published save=step-2", SIDECAR)
    assert published() == ["step-1", "step-2"], pod.look("find published -type f") + pod.story()
    code, verified = pod.execute(SIDECAR, "publish", "verify", "--all")
    assert code == 0, verified
    pod.look("touch checkpoints/end")
    pod.join()
    assert (pod.code(SIDECAR), pod.restarts(SIDECAR)) == (0, 0), pod.story()
