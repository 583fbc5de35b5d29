"""The pods of one training job, as `dispatch-agent render` writes them, and what they leave at the destination."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from tests.containers.pods.pod import Manifest, Pod, until
from tests.manifests import cluster
from tests.protocol.checks import check_invariants, commits

from dispatch_agent.cli.render import render
from dispatch_agent.store.base import Store
from dispatch_agent.store.opening import open_store

PUBLISHER, TRAINING = "dispatch-agent:local", "dispatch-agent-training:local"
JOB_ID = "01JCXE8Q5W3V9T2N7M4K6H1G0P"
TRAINER = Path(__file__).with_name("trainer.py").read_text()
SIDECAR, INIT = "dispatch-publish", "dispatch-init"
ADMISSION = "dispatch.phpboyscout.uk/admission"
BIG = "save=big:60:256"


@dataclass(frozen=True)
class Destination:
    """Where one test publishes.

    `environment` and the secret called `secret` are what containers are told; `options` are for this process.
    """

    url: str
    environment: Mapping[str, str]
    secret: str
    options: Mapping[str, Any]

    @cached_property
    def store(self) -> Store:
        """As this process reaches it."""
        return open_store(self.url, self.options)

    def published(self) -> list[str]:
        """The names of the published saves, the newest last."""
        return [record.save for record in commits(self.store)]

    def parts(self) -> int:
        """How many objects of data there are, committed or not."""
        return sum(1 for _ in self.store.list("data"))

    def objects(self) -> dict[str, str]:
        """Every object that is written once, with its content's digest."""
        keys = [entry.key for entry in self.store.list("") if not entry.key.startswith(("latest.json", "probe/"))]
        return {key: hashlib.sha256(self.store.read(key).data).hexdigest() for key in keys}

    def check(self, *saves: str, pointer_is_current: bool = True) -> None:
        """All invariants hold, and exactly these saves are published, in this order."""
        check_invariants(self.store, pointer_is_current=pointer_is_current)
        assert self.published() == list(saves)


@dataclass(frozen=True)
class Job:
    """A training job: where it publishes, on which claim (None: volumes that go with the pod), as which kind of
    manifest it is rendered, and what else its description says."""

    destination: Destination
    claim: str | None = None
    kind: str = "trainjob"
    more: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def pod(self, number: int, *steps: str, rank: int = 0) -> Manifest:
        """The pod of one rank of the `number`-th execution, whose trainer takes these steps.

        A TrainJob comes to its next execution by another admission, a JobSet by a restart, a Pod by a new one.
        """
        description = self._description(steps)
        if self.kind == "pod":
            return _rendered({**description, "restart": number - 1}, "--kind", "pod")
        if self.kind == "jobset":
            job = cluster.job_of(_rendered(description, "--kind", "jobset"), number - 1)
        else:
            train_job = _rendered(description, "--kind", "trainjob")
            for _ in range(number):
                train_job = _rendered({**train_job, "spec": {**train_job["spec"], "suspend": True}}, "--raise")
            job = cluster.job_of(cluster.job_set_of(_rendered(description, "--kind", "runtime"), train_job), 0)
        manifest: Manifest = cluster.pods_of(job)[rank]
        del manifest["metadata"]["uid"]  # every pod has its own
        return manifest

    def _description(self, steps: tuple[str, ...]) -> dict[str, Any]:
        agent = {"image": PUBLISHER, "env": dict(self.destination.environment), **self.more.get("agent", {})}
        return {
            "name": "train",
            "job_id": JOB_ID,
            "image": TRAINING,
            "command": ["python3", "-c", TRAINER, *steps],
            "user": 10001,
            "grace": 10,
            "checkpoints": {"claim": self.claim} if self.claim else {"size": "1Gi"},
            "publish": {"dest": self.destination.url, "rescan": 0.5, **self.settings},
            "credentials": {"secret": self.destination.secret},
            "resources": {"limits": {"memory": "128Mi"}},
            **self.more,
            "agent": agent,
        }

    def interrupt_upload(self, pod: Pod) -> None:
        """Return in the middle of the upload of `big`, which goes on slowly.

        The trainer's steps are: save=step-1:…, until=/checkpoints/go, BIG.
        """
        pod.says("INFO    published save=step-1", SIDECAR)
        before = self.destination.parts()
        pod.throttle(SIDECAR, 0.15)
        pod.look("touch checkpoints/go")
        until(lambda: self.destination.parts() > before, pod.story)


def said(log: str, key: str) -> list[Any]:
    """What a trainer has said under this key."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [line[key] for line in lines if key in line]


def _rendered(document: Manifest, *arguments: str) -> Manifest:
    """What `dispatch-agent render` makes of a description, or of an object of the cluster."""
    answer = CliRunner().invoke(
        render, [*arguments, "--output", "json", "-"], input=json.dumps(document), catch_exceptions=False
    )
    assert answer.exit_code == 0, answer.output
    manifest: Manifest = json.loads(answer.stdout)
    return manifest
