"""Kubernetes before 1.29: the sidecar is an ordinary container, which nobody tells that the trainer has ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.containers.pods.conftest import Pods
from tests.containers.pods.job import SIDECAR, Job, said
from tests.containers.pods.pod import BUSYBOX

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]

PLAIN = {"agent": {"sidecar": "plain", "install": True}}
# In an image without Python, and without a C library of its own.
SHELL = """
folder=$PUBLISH_ROOT/exec/$DISPATCH_ATTEMPT
echo "{\\"resume\\": \\"$(ls "$PUBLISH_ROOT/resume/$DISPATCH_ATTEMPT")\\"}"
mkdir -p "$folder/$1" && echo weights >"$folder/$1/weights" && /opt/dispatch/bin/publish complete "$folder/$1"
"""


@pytest.mark.parametrize(
    ("last", "code"),
    [("exit=0", 0), ("exit=1", 1), ("eat-memory", 137), ("SIGKILL", 137), ("SIGTERM", 0)],
)
def test_a_plain_sidecar_ends_with_the_trainer_however_that_ends(pods: Pods, job: Job, last: str, code: int) -> None:
    """I9: what is complete is published before, and no pod hangs because of its sidecar."""
    job = replace(job, more=PLAIN)
    step = {"SIGKILL": "hold", "SIGTERM": "until-term"}.get(last, last)
    pod = pods(job.pod(1, "save=step-1:2:64", "begin=step-2:2:64", step)).says('"begin": "step-2"')
    if last.startswith("SIG"):
        pod.kill("node", last)
    pod.join()
    assert (pod.code("node"), pod.code(SIDECAR)) == (code, 0), pod.story()
    job.destination.check("step-1")


def test_a_done_file_ends_a_plain_sidecar(pods: Pods, job: Job) -> None:
    """For a trainer that no agent of ours has started; the file's name is below its own execution's folder."""
    job = replace(job, more=PLAIN)
    manifest = job.pod(1, "save=step-1:2:64", "touch=.dispatch/done", "until=/checkpoints/end")
    sidecar = manifest["spec"]["containers"][1]
    sidecar["env"] = [item for item in sidecar["env"] if item["name"] != "PUBLISH_END_WITH_TRAINER"]
    sidecar["env"].append({"name": "PUBLISH_DONE_FILE", "value": "done"})
    pod = pods(manifest).says("ended seen=1 published=1", SIDECAR)
    pod.running("node").look("touch checkpoints/end")
    pod.join()
    assert (pod.code("node"), pod.code(SIDECAR)) == (0, 0), pod.story()
    job.destination.check("step-1")


def test_a_trainer_in_an_image_without_python_is_started_by_the_installed_agent(pods: Pods, shared: Job) -> None:
    """Its marker is made by the installed `publish complete`; the next execution finds the save restored."""
    for number in (1, 2):
        command = ["sh", "-euc", SHELL, "trainer", f"step-{number}"]
        pod = pods(replace(shared, more={**PLAIN, "image": BUSYBOX, "command": command}).pod(number)).join()
        assert (pod.phase, pod.code("node"), pod.code(SIDECAR)) == ("Succeeded", 0, 0), pod.story()
    assert said(pod.log("node"), "resume") == ["step-1"]
    shared.destination.check("step-1", "step-2")
