"""Descriptions of jobs, and what `dispatch-agent render` makes of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from tests.cli.conftest import place

from dispatch_agent.cli import main

__all__ = ["place"]

JOB_ID = "01JCXE8Q5W3V9T2N7M4K6H1G0P"

# Parsed CRDs and schemas are kept for the life of a process, so that one process should have them.
MANIFESTS = pytest.mark.xdist_group("manifests")

ONE_NODE: dict[str, Any] = {
    "name": "train",
    "namespace": "team-a",
    "job_id": JOB_ID,
    "image": "registry.example/train:7",
    "command": ["python", "train.py"],
    "checkpoints": {"size": "200Gi"},
    "publish": {"dest": "s3://checkpoints/train"},
    "agent": {"image": "registry.example/dispatch-agent:1"},
}
# Everything that a description can say and a Trainer can have.
SEVERAL_NODES: dict[str, Any] = {
    **ONE_NODE,
    "submission": 3,
    "generation": 2,
    "attempt": 4,
    "command": ["torchrun", "train.py", "--note", "costs $5, $$6 and $(POD_NAME)", "two\nlines", "é"],
    "workdir": "/workspace",
    "nodes": 12,
    "env": {"OMP_NUM_THREADS": 8, "DATA_ROOT": "/data", "NOTE": "$(HOME) and $$"},
    "resources": {
        "requests": {"cpu": 8, "memory": "64Gi", "nvidia.com/gpu": 1},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": 1},
    },
    "user": 1000,
    "service_account": "trainer",
    "checkpoints": {"path": "/data/checkpoints", "claim": "shared"},
    "publish": {"dest": "s3://checkpoints/train", "complete": "settle:5", "drain_timeout": 60, "keep_local": 2},
    "credentials": {"secret": "store", "mount": "/run/secrets/store"},
    "grace": 600,
    "max_restarts": 9,
    "agent": {
        "image": "registry.example/dispatch-agent:1",
        "install": True,
        "env": {"AWS_REGION": "eu-central-1"},
        "resources": {"requests": {"cpu": "200m"}, "limits": {"memory": "1Gi"}},
    },
}
PLAIN_SIDECAR = {
    **SEVERAL_NODES,
    "credentials": {"secret": "store"},
    "agent": {**SEVERAL_NODES["agent"], "sidecar": "plain"},
}
RANK_RESTART = {**ONE_NODE, "allow_rank_restart": True, "queue": "training"}
DESCRIPTIONS = {
    "one node": ONE_NODE,
    "several nodes": SEVERAL_NODES,
    "plain sidecar": PLAIN_SIDECAR,
    "rank restart": RANK_RESTART,
}


def changed(job: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """The description with other values; a key with two underscores is one inside another; None takes it out."""
    job = copy.deepcopy(job)
    for key, value in keys.items():
        place, *inner = key.split("__")
        target = job
        while inner:
            target = target.setdefault(place, {})
            place, *inner = inner
        if value is None:
            target.pop(place, None)
        else:
            target[place] = value
    return job


def invoke(job: Any, *arguments: str) -> Result:
    """`dispatch-agent render` in this process; the description on standard input."""
    text = job if isinstance(job, str) else json.dumps(job)
    return CliRunner().invoke(main.cli, ["render", "-", *arguments], input=text)


def render(job: Any, *arguments: str) -> list[dict[str, Any]]:
    """The objects that it prints."""
    result = invoke(job, *arguments)
    if result.exception:
        raise result.exception
    return [*yaml.safe_load_all(result.stdout)]


def refusal(job: Any, *arguments: str) -> str:
    """The sentence with which it refuses, before it has printed anything."""
    result = invoke(job, *arguments)
    assert result.exception, f"it is rendered: {result.stdout[:300]}"
    assert result.stdout == ""
    if getattr(result.exception, "exit_code", None) != 3:
        raise result.exception
    return str(result.exception)


def pod_template(thing: dict[str, Any]) -> dict[str, Any]:
    """The pods' template in a TrainJob's first patch, in a runtime or in a JobSet."""
    spec = thing["spec"]
    if "runtimePatches" in spec:
        spec = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    elif "template" in spec:
        spec = spec["template"]["spec"]
    [job] = spec["replicatedJobs"]
    template: dict[str, Any] = job["template"]["spec"]["template"]
    return template


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The releases of Trainer and JobSet whose CRDs are there; where none is, pytest's own skip fails the run."""
    folder = metafunc.config.getoption("--crd-folder")
    for fixture, files, name in (
        ("trainer_release", "*/trainjobs.yaml", lambda path: path.parent.name),
        ("jobset_release", "jobset/*.yaml", lambda path: path.stem),
    ):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, sorted(map(name, Path(folder).glob(files))) if folder else [])


@pytest.fixture(scope="session")
def crds(request: pytest.FixtureRequest) -> Path:
    """The folder of CRDs, for tests marked `crds`."""
    return Path(request.config.getoption("--crd-folder")).absolute()
