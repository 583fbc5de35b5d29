"""An API server takes what is rendered: the schemas of Kubernetes, Trainer and JobSet, their rules, Pod Security.

Each validator is seen to refuse something, for one that finds nothing may also be one that looks at nothing.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.manifests import cluster, rules
from tests.manifests.conftest import (
    DESCRIPTIONS,
    JOB_ID,
    MANIFESTS,
    ONE_NODE,
    SEVERAL_NODES,
    changed,
    pod_template,
    render,
)
from tests.manifests.schemas import RELEASES, Crd, crd, kubernetes_errors

from dispatch_agent.cluster import inspection

Object = dict[str, Any]

pytestmark = MANIFESTS
SUPPORTED = {
    *(f"release-{n}/{kind}.yaml" for n in ("2.2", "2.3") for kind in ("trainjobs", "clustertrainingruntimes")),
    *(f"jobset/release-{n}.yaml" for n in ("0.10", "0.11", "0.12")),
}
every_description = pytest.mark.parametrize("description", DESCRIPTIONS.values(), ids=DESCRIPTIONS.keys())
every_kind = pytest.mark.parametrize("kind", ["trainjob", "jobset", "pod"])


def pods_and_jobs(description: Object, kind: str) -> list[Object]:
    """What reaches the API server in the end; the job first, unless the kind is a Pod."""
    if kind == "pod":
        return render(changed(description, nodes=1, agent__sidecar=None), "--kind", "pod")
    if kind == "jobset":
        [job_set] = render(description, "--kind", "jobset")
    else:
        job_set = cluster.job_set_of(*render(description, "--admitted"))
    job = cluster.job_of(job_set, restarts=2)
    return [job, *cluster.pods_of(job)]


@pytest.mark.crds
def test_ci_has_every_supported_release(crds: Path) -> None:
    """Whoever got the CRDs from a cluster has those of one release; that is enough, but not in CI."""
    found = {str(path.relative_to(crds)) for path in crds.glob("*/*.yaml")}
    assert found >= SUPPORTED or not os.environ.get("CI"), SUPPORTED - found


@every_kind
@every_description
@pytest.mark.parametrize("release", RELEASES)
def test_kubernetes_takes_the_jobs_and_pods(description: Object, kind: str, release: str) -> None:
    """One pod of all: they differ in their index."""
    for thing in pods_and_jobs(description, kind)[:2]:
        assert kubernetes_errors(thing, release) == []


@every_kind
@every_description
def test_no_rule_is_broken_that_the_schemas_do_not_know(description: Object, kind: str) -> None:
    for thing in pods_and_jobs(description, kind):
        if thing["kind"] == "Job":
            assert rules.not_failed_as_a_job(thing) == []
        else:
            assert rules.broken(thing) == []
            assert rules.not_restricted(thing) == []


@every_description
def test_inspect_finds_nothing_in_it_but_what_was_allowed(description: Object) -> None:
    """The requirement on runtimes, the counts and every pod's identity, as they are read from a cluster's objects."""
    runtime, train_job = render(description, "--admitted")
    job_set = cluster.job_set_of(runtime, train_job)
    job = cluster.job_of(job_set, restarts=2)
    allowed = bool(description.get("allow_rank_restart"))
    things = [runtime, train_job, {**job_set, "status": {"restarts": 2}}, job, *cluster.pods_of(job)]
    report = inspection.inspect(things, allow_rank_restart=allowed)
    assert [seen.name for seen in report.jobs] == ["train"]
    assert len(report.jobs[0].pods) == job["spec"]["completions"]
    assert all(finding.says.startswith("identity weakened") for finding in report.all_findings)
    assert bool(report.all_findings) is allowed


@pytest.mark.crds
@every_description
@pytest.mark.parametrize("arguments", [(), ("--admitted",)], ids=["held", "admitted"])
def test_trainer_takes_runtime_and_trainjob(
    description: Object, arguments: tuple[str, ...], trainer_release: str, crds: Path
) -> None:
    """The CRD of a TrainingRuntime has the same spec as that of a ClusterTrainingRuntime."""
    runtime, train_job = render(description, *arguments)
    assert crd(crds, trainer_release, "clustertrainingruntimes").errors(runtime) == []
    assert crd(crds, trainer_release, "trainjobs").errors(train_job) == []


@pytest.mark.crds
@every_description
@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_jobset_takes_what_is_rendered_and_what_trainer_makes(
    description: Object, kind: str, jobset_release: str, crds: Path
) -> None:
    if kind == "jobset":
        [job_set] = render(description, "--kind", "jobset")
    else:
        job_set = cluster.job_set_of(*render(description, "--admitted"))
    assert crd(crds, "jobset", jobset_release).errors(job_set) == []


@pytest.mark.crds
class TestChanges:
    """Of a TrainJob that is there: what Trainer lets pass, and what it does not."""

    @pytest.fixture
    def trainjobs(self, crds: Path, trainer_release: str) -> Crd:
        return crd(crds, trainer_release, "trainjobs")

    def test_raising_the_admission_and_running_is_one_change(self, trainjobs: Crd) -> None:
        [held] = render(SEVERAL_NODES, "--kind", "trainjob")
        [raised] = render(held, "--raise")
        assert trainjobs.errors(raised, before=held) == []

    @pytest.mark.parametrize(
        "change",
        [
            lambda job: job["spec"]["trainer"]["env"][0].update(value="other"),
            lambda job: pod_template(job)["spec"]["initContainers"][0]["env"][0].update(value="other"),
            lambda job: job["spec"]["runtimeRef"].update(name="other"),
        ],
        ids=["trainer.env", "env of the patch", "runtimeRef"],
    )
    def test_what_an_identity_rests_on_cannot_be_changed(
        self, trainjobs: Crd, change: Callable[[Object], None]
    ) -> None:
        [before] = render(SEVERAL_NODES, "--kind", "trainjob")
        after = copy.deepcopy(before)
        change(after)
        [sentence] = trainjobs.errors(after, before=before)
        assert "immutable" in sentence


def broken(thing: Object, change: Callable[[Object], object]) -> Object:
    thing = copy.deepcopy(thing)
    change(thing)
    return thing


class TestTheValidatorsSeeSomething:
    @pytest.mark.crds
    @pytest.mark.parametrize(
        "change",
        {
            "an unknown field": lambda job: job["spec"].update(podTemplateOverrides=[]),
            "an unknown field of a patch": lambda job: pod_template(job)["spec"]["initContainers"][0].update(image="x"),
            "a restartPolicy in a patch": lambda job: pod_template(job)["spec"].update(restartPolicy="Never"),
            "an annotation that is a number": lambda job: pod_template(job)["metadata"].update(annotations={"a": 1}),
            "too many variables": lambda job: job["spec"]["trainer"].update(
                env=[{"name": f"E{number}", "value": "x"} for number in range(129)]
            ),
            "too many words": lambda job: job["spec"]["trainer"].update(command=["x"] * 129),
            "a name with a digit first": lambda job: job["metadata"].update(name=JOB_ID.lower()),
            "a patch without manager": lambda job: job["spec"]["runtimePatches"][0].pop("manager"),
        }.items(),
        ids=lambda named: named[0],
    )
    def test_trainer(self, change: tuple[str, Callable[[Object], object]], trainer_release: str, crds: Path) -> None:
        [train_job] = render(ONE_NODE, "--kind", "trainjob")
        assert crd(crds, trainer_release, "trainjobs").errors(broken(train_job, change[1])) != []

    @pytest.mark.crds
    def test_jobset(self, jobset_release: str, crds: Path) -> None:
        [job_set] = render(ONE_NODE, "--kind", "jobset")
        known = crd(crds, "jobset", jobset_release)
        assert (
            known.errors(broken(job_set, lambda s: s["spec"]["failurePolicy"]["rules"][0].update(action="Stop"))) != []
        )
        assert known.errors(broken(job_set, lambda s: pod_template(s)["spec"].update(restartPolicyy="Never"))) != []

    @pytest.mark.parametrize("release", RELEASES)
    def test_kubernetes(self, release: str) -> None:
        [pod] = render(ONE_NODE, "--kind", "pod")
        sidecar: Callable[[Object], Object] = lambda pod: pod["spec"]["initContainers"][-1]  # noqa: E731
        assert kubernetes_errors(broken(pod, lambda pod: pod["spec"].update(restartPolicyy="Never")), release) != []
        assert kubernetes_errors(broken(pod, lambda pod: sidecar(pod).update(restartPolicy=3)), release) != []
        assert kubernetes_errors(broken(pod, lambda pod: sidecar(pod)["startupProbe"].update(host="x")), release) != []

    @pytest.mark.parametrize(
        "change",
        {
            "two containers of a name": lambda pod: pod["spec"]["containers"].append(pod["spec"]["containers"][0]),
            "two variables of a name": lambda pod: pod["spec"]["containers"][0]["env"].append(
                {"name": "PUBLISH_ROOT", "value": ""}
            ),
            "a mount of no volume": lambda pod: pod["spec"]["containers"][0]["volumeMounts"].append(
                {"name": "nope", "mountPath": "/nope"}
            ),
            "two mounts at a place": lambda pod: pod["spec"]["containers"][0]["volumeMounts"].append(
                {"name": "checkpoints", "mountPath": "/checkpoints"}
            ),
            "a volume for nobody": lambda pod: pod["spec"]["volumes"].append({"name": "nope", "emptyDir": {}}),
            "a volume of two sources": lambda pod: pod["spec"]["volumes"][0].update(secret={"secretName": "x"}),
            "a reference to all labels": lambda pod: pod["spec"]["containers"][0]["env"].append(
                {"name": "X", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels"}}}
            ),
            "a long name": lambda pod: pod["metadata"].update(name="x" * 64),
            "a sidecar that is restarted sometimes": lambda pod: pod["spec"]["initContainers"][-1].update(
                restartPolicy="OnFailure"
            ),
            "a probe of an init container": lambda pod: pod["spec"]["initContainers"][-1].pop("restartPolicy"),
            "a probe of a silent port": lambda pod: pod["spec"]["initContainers"][-1]["ports"][0].update(
                containerPort=1
            ),
        }.items(),
        ids=lambda named: named[0],
    )
    def test_rules_of_pods(self, change: tuple[str, Callable[[Object], object]]) -> None:
        [pod] = render(ONE_NODE, "--kind", "pod")
        assert rules.broken(broken(pod, change[1])) != []

    @pytest.mark.parametrize(
        "change",
        {
            "capabilities": lambda pod: pod["spec"]["containers"][0]["securityContext"].pop("capabilities"),
            "escalation": lambda pod: pod["spec"]["initContainers"][0]["securityContext"].pop(
                "allowPrivilegeEscalation"
            ),
            "root by number": lambda pod: pod["spec"]["securityContext"].update(runAsUser=0),
            "root by silence": lambda pod: pod["spec"]["securityContext"].pop("runAsNonRoot"),
            "seccomp": lambda pod: pod["spec"]["securityContext"].pop("seccompProfile"),
            "the host's files": lambda pod: pod["spec"]["volumes"].append({"name": "h", "hostPath": {"path": "/"}}),
            "the host's network": lambda pod: pod["spec"].update(hostNetwork=True),
            "the host's port": lambda pod: pod["spec"]["initContainers"][-1]["ports"][0].update(hostPort=1),
            "a probe's host": lambda pod: pod["spec"]["initContainers"][-1]["livenessProbe"]["httpGet"].update(
                host="x"
            ),
        }.items(),
        ids=lambda named: named[0],
    )
    def test_pod_security(self, change: tuple[str, Callable[[Object], object]]) -> None:
        [pod] = render(ONE_NODE, "--kind", "pod")
        assert rules.not_restricted(broken(pod, change[1])) != []

    @pytest.mark.parametrize(
        "change",
        [
            lambda job: job["spec"]["template"]["spec"].update(restartPolicy="OnFailure"),
            lambda job: job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"].update(containerName="trainer"),
            lambda job: job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"].update(values=[125, 3]),
        ],
        ids=["restartPolicy", "container", "order"],
    )
    def test_rules_of_jobs(self, change: Callable[[Object], object]) -> None:
        job = cluster.job_of(cluster.job_set_of(*render(ONE_NODE)), 0)
        assert rules.not_failed_as_a_job(broken(job, change)) != []
