"""What a cluster's objects say of identities: a reset, a repeat or a rule that allows one is never overlooked, and
nothing is said of a job that is well."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.manifests import cluster
from tests.manifests.conftest import JOB_ID, ONE_NODE

from dispatch_agent.cli import main
from dispatch_agent.cluster.inspection import JobSeen, Report, inspect

Object = dict[str, Any]
ADMISSION = "dispatch.phpboyscout.uk/admission"
FLOOR = "dispatch.phpboyscout.uk/admission-floor"
UID = "dispatch.phpboyscout.uk/jobset-uid"
ADAPTER = "dispatch.phpboyscout.uk/adapter"
JOBSET = "jobset.sigs.k8s.io"


@functools.cache
def _rendered(*options: str) -> str:
    answer = CliRunner().invoke(main.cli, ["render", "--output", "json", *options, "-"], json.dumps(DESCRIPTION))
    assert answer.exit_code == 0, answer.output
    return answer.stdout


DESCRIPTION = {**ONE_NODE, "nodes": 2, "checkpoints": {"claim": "shared"}}


class Cluster:
    """A job as rendered, admitted once and restarted `restarts` times: its objects, to be changed by a test."""

    def __init__(self, restarts: int = 0) -> None:
        self.runtime = json.loads(_rendered("--kind", "runtime"))
        self.train_job: Object = json.loads(_rendered("--kind", "trainjob", "--admitted"))
        self.job_set = cluster.job_set_of(self.runtime, self.train_job)
        owner = {"apiVersion": self.train_job["apiVersion"], "kind": "TrainJob", "name": "train"}
        self.job_set["metadata"] |= {"uid": "uid-of-jobset", "ownerReferences": [owner]}
        self.job_set["status"] = {"restarts": restarts}
        self.train_job["metadata"]["annotations"][UID] = "uid-of-jobset"
        self.job = cluster.job_of(self.job_set, restarts)
        self.pods = cluster.pods_of(self.job)
        for pod in self.pods:
            pod["status"] = {"phase": "Running"}

    @property
    def patch(self) -> Object:
        found: Object = self.train_job["spec"]["runtimePatches"][0]
        return found

    @property
    def trainers(self) -> Object:
        found: Object = self.job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
        return found

    def admit(self, count: object) -> None:
        """Into the runtime patch."""
        jobs = self.patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        jobs[0]["template"]["spec"]["template"]["metadata"]["annotations"][ADMISSION] = count

    def report(self, *, allow: bool = False) -> Report:
        every = [self.runtime, self.train_job, self.job_set, self.job, *self.pods]
        return inspect(json.loads(json.dumps(every)), allow_rank_restart=allow)

    def seen(self) -> JobSeen:
        (job,) = self.report().jobs
        return job

    def said(self, *, allow: bool = False) -> list[str]:
        """What is found, each with its level before it."""
        return [f"{found.level}: {found.where}: {found.says}" for found in self.report(allow=allow).all_findings]

    def says(self, *words: str, allow: bool = False) -> str:
        """The one finding that has these words; and there must be one."""
        fitting = [line for line in self.said(allow=allow) if all(word in line for word in words)]
        assert len(fitting) == 1, self.said(allow=allow)
        return fitting[0]


class TestAJobThatIsWell:
    @pytest.mark.parametrize("restarts", [0, 3])
    def test_has_nothing_said_of_it(self, restarts: int) -> None:
        assert Cluster(restarts).said() == []

    def test_shows_the_identity_of_every_pod(self) -> None:
        seen = Cluster(3).seen()
        attempt = f"{JOB_ID}.1.1.1.3"
        assert [(pod.rank, pod.epoch, pod.attempt) for pod in seen.pods] == [
            (0, "1000004", attempt),
            (1, "1000004", attempt),
        ]
        assert (seen.admission, seen.floor, seen.restarts) == ("1", "1", 3)

    @pytest.mark.parametrize(
        ("prefix", "attempt"),
        [
            ("$(DISPATCH_SUBMISSION).x", "1.x.1.0"),
            ("$(NOBODY)", ""),  # stays as it is, and is no folder name
            ("$$(DISPATCH_SUBMISSION)", ""),
        ],
    )
    def test_has_the_variables_that_refer_to_others_replaced(self, prefix: str, attempt: str) -> None:
        one = Cluster()
        for entry in one.pods[0]["spec"]["containers"][0]["env"]:
            if entry["name"] == "DISPATCH_K8S_TOKEN_PREFIX":
                entry["value"] = prefix
        seen = one.seen().pods[0]
        assert seen.attempt == attempt
        assert attempt or f"the attempt is {prefix.replace('$$', '$')}.1.0" in seen.refused

    @pytest.mark.parametrize("kind", ["pod", "jobset"])
    def test_is_also_one_without_trainer(self, kind: str) -> None:
        description = json.dumps(ONE_NODE)
        answer = CliRunner().invoke(main.cli, ["render", "--output", "json", "--kind", kind, "-"], description)
        assert inspect([json.loads(answer.stdout)]).all_findings == ()

    def test_says_nothing_of_the_pods_of_an_earlier_admission_that_have_ended_or_end(self) -> None:
        one = Cluster()
        older = copy.deepcopy(one.pods)
        one.admit("2")
        one.train_job["metadata"]["annotations"][FLOOR] = "2"
        for pod in one.pods:
            pod["metadata"]["annotations"][ADMISSION] = "2"
        older[0]["status"]["phase"] = "Failed"
        older[1]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        for pod in older:
            pod["metadata"] |= {"name": f"old-{pod['metadata']['name']}", "uid": f"old-{pod['metadata']['uid']}"}
        one.pods += older
        (line,) = one.said()
        assert line.startswith("stale: Pod old-train-node-0-1-abcde: epoch 1000001 is still alive beside epoch 1000002")

    def test_is_found_among_those_of_others(self) -> None:
        foreign = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "db"}, "spec": {"containers": []}}
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}}
        one = Cluster()
        report = inspect([{"kind": "List", "items": [foreign, service, one.train_job, *one.pods]}, service])
        assert [job.name for job in report.jobs] == ["train"]
        assert report.ignored == {"Service": 2, "Pod that is not the dispatcher's": 1}

    def test_of_two_namespaces_are_two(self) -> None:
        one, other = Cluster(), Cluster()
        for thing in (other.train_job, other.job_set, other.job, *other.pods):
            thing["metadata"]["namespace"] = "team-b"
        both = [one.train_job, *one.pods, other.train_job, *other.pods]
        report = inspect(both)
        assert [(job.namespace, len(job.pods)) for job in report.jobs] == [("team-a", 2), ("team-b", 2)]
        assert report.all_findings == ()

    def test_whose_trainjob_is_not_there_is_not_missing_its_counts(self) -> None:
        assert inspect([Cluster().job_set]).all_findings == ()

    def test_that_is_given_twice_is_one(self) -> None:
        one = Cluster()
        assert inspect([*one.pods, *copy.deepcopy(one.pods)]).all_findings == ()


class TestResets:
    def test_a_below_the_floor(self) -> None:
        one = Cluster()
        one.train_job["metadata"]["annotations"][FLOOR] = "3"
        assert one.says("TrainJob train", "A is 1, below the admission-floor 3").startswith("identity")

    def test_another_jobset(self) -> None:
        one = Cluster()
        one.job_set["metadata"]["uid"] = "new"
        says = "JobSet UID new is not the recorded uid-of-jobset: J may have been reset"
        assert one.said() == [f"identity: TrainJob train: {says}"]

    def test_a_pod_without_the_annotation(self) -> None:
        one = Cluster()
        del one.pods[1]["metadata"]["annotations"][ADMISSION]
        assert one.says("no admission annotation").startswith("identity: Pod train-node-0-1-abcde")

    def test_a_pod_below_the_floor(self) -> None:
        one = Cluster()
        one.pods[0]["metadata"]["annotations"][ADMISSION] = "0"
        assert one.says("its A is 0, below the admission-floor 1").startswith("identity: Pod train-node-0-0-abcde")

    @pytest.mark.parametrize("count", ["many", "", "-1", "1.5", "٣", 1.5, True, {}])
    def test_a_count_that_is_none(self, count: object) -> None:
        one = Cluster()
        one.admit(count)
        assert one.says("the admission count A is", "not a number").startswith("identity")

    @pytest.mark.parametrize("floor", [None, "x"])
    def test_a_floor_that_is_gone_or_is_none(self, floor: str | None) -> None:
        one = Cluster()
        annotations = one.train_job["metadata"]["annotations"]
        annotations.pop(FLOOR)
        if floor:
            annotations[FLOOR] = floor
        assert one.says("admission-floor is").startswith("identity")

    def test_a_patch_that_was_dropped(self) -> None:
        one = Cluster()
        one.train_job["spec"]["runtimePatches"] = [{"manager": "kueue.x-k8s.io/manager"}]
        assert one.says("is missing: its entry was dropped, and A with it").startswith("identity")

    def test_a_patch_that_lost_its_annotation(self) -> None:
        one = Cluster()
        jobs = one.patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        del jobs[0]["template"]["spec"]["template"]["metadata"]
        assert one.says("A was removed").startswith("identity")

    @pytest.mark.parametrize("after", [True, False])
    def test_another_patch_that_sets_a(self, after: bool) -> None:
        one = Cluster()
        theirs = {**copy.deepcopy(one.patch), "manager": "kueue.x-k8s.io/manager"}
        one.train_job["spec"]["runtimePatches"].insert(1 if after else 0, theirs)
        line = one.says("runtime patch of kueue.x-k8s.io/manager sets the admission annotation too ('1')")
        assert ("wins over" in line) is after

    def test_restarts_below_those_of_a_pod(self) -> None:
        one = Cluster(2)
        one.job_set["status"]["restarts"] = 0
        assert (
            len([line for line in one.said() if "restart-attempt is 2, the JobSet counts 0: J was reset" in line]) == 2
        )


class TestRepeats:
    """What raises neither A nor J. Accepted by --allow-rank-restart, it is still said."""

    def _job_restart(one: Cluster) -> None:  # noqa: N805 (a case of the table below)
        one.pods[0]["metadata"]["labels"][f"{JOBSET}/job-restart-attempt"] = "2"

    def _in_place(one: Cluster) -> None:  # noqa: N805
        one.pods[0]["metadata"]["annotations"][f"{JOBSET}/in-place-restart-attempt"] = "1"

    def _unreadable(one: Cluster) -> None:  # noqa: N805
        one.pods[0]["metadata"]["annotations"][f"{JOBSET}/in-place-restart-attempt"] = "some"

    def _kubelet(one: Cluster) -> None:  # noqa: N805
        one.pods[0]["status"]["containerStatuses"] = [{"name": "node", "restartCount": 1}]

    def _of_the_job(one: Cluster) -> None:  # noqa: N805
        one.job["metadata"]["labels"][f"{JOBSET}/job-restart-attempt"] = "1"

    def _second_pod(one: Cluster) -> None:  # noqa: N805
        again = copy.deepcopy(one.pods[0])
        again["metadata"] |= {"name": "train-node-0-0-fghij", "uid": "another"}
        one.pods.append(again)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (_job_restart, "made this Job anew 2 time(s)"),
            (_in_place, "1 time(s) in place"),
            (_unreadable, "'some', not a count"),
            (_kubelet, "container node was restarted 1 time(s) in place"),
            (_of_the_job, "made it anew 1 time(s)"),
            (_second_pod, "2 pods of rank 0 are alive at once"),
        ],
    )
    def test_is_wrong_unless_it_is_accepted(self, change: Callable[[Cluster], None], words: str) -> None:
        one = Cluster()
        change(one)
        assert one.says(words).startswith("identity: ")
        assert one.says(words, allow=True).startswith("weakened: ")
        assert "identity weakened: " in one.says(words, allow=True)

    def test_a_rank_that_was_replaced_after_it_failed_is_one_too(self) -> None:
        one = Cluster()
        TestRepeats._second_pod(one)
        one.pods[0]["status"]["phase"] = "Failed"
        assert one.says("2 pods of rank 0 ran one after the other").startswith("identity")

    def test_a_sidecar_that_was_restarted_is_none(self) -> None:
        one = Cluster()
        status = {"name": "dispatch-publish", "restartCount": 3, "ready": True, "state": {"running": {}}}
        one.pods[0]["status"]["initContainerStatuses"] = [status]
        assert one.said() == []
        assert one.seen().pods[0].publisher == "running, restarted 3 time(s)"


class TestRefusals:
    def test_a_container_that_was_refused_is_quoted(self) -> None:
        one = Cluster()
        ended = {"exitCode": 125, "message": "dispatch: restart count reached the epoch bound\n"}
        one.pods[0]["status"] = {
            "phase": "Failed",
            "containerStatuses": [{"name": "node", "state": {"terminated": ended}}],
        }
        assert one.says("container node was refused (exit code 125): dispatch: restart count reached").startswith(
            "identity"
        )

    def test_a_pod_that_would_be_refused_has_the_prologues_sentence(self) -> None:
        one = Cluster()
        one.pods[0]["metadata"]["annotations"][ADMISSION] = "08"
        assert "DISPATCH_K8S_ADMISSION is 08" in one.says("refused")
        assert one.seen().pods[0].attempt == ""

    def test_containers_of_one_pod_with_two_identities(self) -> None:
        one = Cluster()
        for entry in one.pods[0]["spec"]["initContainers"][0]["env"]:
            if entry["name"] == "DISPATCH_K8S_TOKEN_PREFIX":
                entry["value"] = "another.1.1"
        assert one.says("container dispatch-init has", "another.1.1.1.0").startswith("identity: Pod train-node-0-0")

    def test_the_last_words_of_a_sidecar_are_shown(self) -> None:
        one = Cluster()
        state = {"terminated": {"exitCode": 40, "message": '{"left": 1}'}}
        one.pods[0]["status"]["initContainerStatuses"] = [{"name": "dispatch-publish", "state": state}]
        assert one.seen().pods[0].publisher == 'ended with 40: {"left": 1}'


class TestRequirement:
    """Of the three kinds that hold a Job's rules."""

    @pytest.mark.parametrize("kind", ["runtime", "clusterruntime", "jobset", "job"])
    @pytest.mark.parametrize(
        ("field", "value", "words"),
        [
            (("template", "spec", "restartPolicy"), None, "restartPolicy is not stated, and JobSet makes it OnFailure"),
            (("template", "spec", "restartPolicy"), "OnFailure", "restartPolicy is 'OnFailure'"),
            (("backoffLimit",), None, "backoffLimit is not stated, and Kubernetes makes it 6"),
            (("backoffLimit",), 1, "backoffLimit is 1"),
            (("backoffLimit",), False, "backoffLimit is False"),
        ],
    )
    def test_two_must_be_stated_whatever_is_allowed(
        self, kind: str, field: tuple[str, ...], value: object, words: str
    ) -> None:
        thing, spec = _holder(kind)
        for key in field[:-1]:
            spec = spec[key]
        spec.pop(field[-1])
        if value is not None:
            spec[field[-1]] = value
        for allow in (False, True):
            levels = [
                found.level for found in inspect([thing], allow_rank_restart=allow).all_findings if words in found.says
            ]
            assert levels == ["requirement"]

    @pytest.mark.parametrize("kind", ["runtime", "clusterruntime", "jobset", "job"])
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"podFailurePolicy": {"rules": [{"action": "Ignore"}]}}, "podFailurePolicy rule 0 (Ignore)"),
            ({"podFailurePolicy": {"rules": [{}, {"action": "Count"}]}, "backoffLimit": 2}, "rule 1 (Count)"),
            ({"backoffLimitPerIndex": 1}, "backoffLimitPerIndex 1"),
        ],
    )
    def test_a_rank_that_may_be_replaced_weakens_the_identity_if_it_is_accepted(
        self, kind: str, change: Object, words: str
    ) -> None:
        thing, spec = _holder(kind)
        spec |= change
        for allow, level in ((False, "requirement"), (True, "weakened")):
            found = [one for one in inspect([thing], allow_rank_restart=allow).all_findings if words in one.says]
            assert [one.level for one in found] == [level]
            assert "under the epoch and attempt that it had" in found[0].says

    def test_a_counted_failure_replaces_nothing_where_the_limit_is_0(self) -> None:
        thing, spec = _holder("runtime")
        spec["podFailurePolicy"] = {"rules": [{"action": "Count"}]}
        assert inspect([thing]).all_findings == ()

    @pytest.mark.parametrize("action", ["RestartJob", "RestartJobAndIgnoreMaxRestarts"])
    def test_a_failure_policy_that_makes_one_job_anew(self, action: str) -> None:
        one = Cluster()
        one.job_set["spec"]["failurePolicy"]["rules"] = [{"action": action}]
        assert one.says(f"a rule of the failure policy is {action},").startswith("requirement")
        assert one.says(action, allow=True).startswith("weakened")

    def test_a_strategy_that_restarts_in_place(self) -> None:
        one = Cluster()
        one.job_set["spec"]["failurePolicy"]["restartStrategy"] = "InPlaceRestart"
        assert one.says("InPlaceRestart").startswith("requirement")

    def test_what_lets_two_executions_overlap_is_advice(self) -> None:
        one = Cluster()
        one.job_set["spec"]["failurePolicy"]["restartStrategy"] = "Recreate"
        del one.trainers["podFailurePolicy"], one.trainers["podReplacementPolicy"]
        assert [line.partition(":")[0] for line in one.said()] == ["advice", "advice"]

    def test_the_trainer_is_the_labelled_job_and_others_may_do_as_they_like(self) -> None:
        one = Cluster()
        one.runtime["spec"]["template"]["spec"]["replicatedJobs"].insert(0, {"name": "dataset-initializer"})
        assert one.said() == []

    def test_no_job_that_is_the_trainer(self) -> None:
        one = Cluster()
        one.runtime["spec"]["template"]["spec"]["replicatedJobs"] = [{"name": "a"}, {"name": "b"}]
        assert one.says("no replicated job is the trainer").startswith("requirement: TrainingRuntime train")

    def test_several_replicas_would_share_their_identities(self) -> None:
        one = Cluster()
        one.job_set["spec"]["replicatedJobs"][0]["replicas"] = 2
        assert one.says("replicas is 2").startswith("requirement")

    def test_runtimes_of_other_jobs_are_not_judged(self) -> None:
        one = Cluster()
        stock = {
            "apiVersion": one.runtime["apiVersion"],
            "kind": "ClusterTrainingRuntime",
            "metadata": {"name": "stock"},
        }
        report = inspect([one.runtime, one.train_job, stock])
        assert (report.all_findings, report.ignored) == ((), {"runtime of other jobs": 1})
        assert inspect([stock]).all_findings != ()


class TestTheNextAdmission:
    def _suspended(self, floor: str = "1", restarts: int = 0) -> Cluster:
        one = Cluster(restarts)
        one.train_job["spec"]["suspend"] = True
        one.train_job["metadata"]["annotations"][FLOOR] = floor
        one.pods = []
        return one

    def test_is_above_both_the_patch_and_the_floor(self) -> None:
        assert self._suspended().seen().next_admission == 2
        assert self._suspended("7").seen().next_admission == 8

    def test_is_nothing_while_the_job_runs(self) -> None:
        assert Cluster().seen().next_admission is None

    def test_is_refused_where_the_epoch_would_reach_its_bound(self) -> None:
        one = self._suspended("999990", restarts=9)
        assert one.seen().next_admission is None
        assert one.says("999990 times and restarted 9 times, which is the bound").startswith("identity")
        assert self._suspended("999990", restarts=8).seen().next_admission == 999_991


def _holder(kind: str) -> tuple[Object, Object]:
    """An object, and its Job's spec in it."""
    one = Cluster()
    if kind == "job":
        return one.job, one.job["spec"]
    if kind == "jobset":
        return one.job_set, one.trainers
    if kind == "clusterruntime":
        one.runtime["kind"] = "ClusterTrainingRuntime"
    return one.runtime, one.runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


class TestHostileObjects:
    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_any_value_anywhere_is_survived(self, data: st.DataObject) -> None:
        one = Cluster()
        every = [one.runtime, one.train_job, one.job_set, one.job, *one.pods]
        for _ in range(data.draw(st.integers(1, 3))):
            at: Any = every
            while True:
                keys = list(at) if isinstance(at, dict) else list(range(len(at)))
                key = data.draw(st.sampled_from(keys))
                inner = at[key]
                if not isinstance(inner, (dict, list)) or not inner or data.draw(st.integers(0, 5)) == 0:
                    at[key] = data.draw(_ANYTHING)
                    break
                at = inner
        json.dumps([found.says for found in inspect(every).all_findings]).encode("ascii")

    def test_a_structure_that_holds_itself_and_one_that_grows_when_it_is_written_out(self) -> None:
        circle: list[Any] = []
        circle.append(circle)
        bomb: Any = "x"
        for _ in range(60):
            bomb = [bomb, bomb]
        for hostile in (circle, bomb, {"items": bomb, "kind": "List"}, [bomb]):
            one = Cluster()
            one.trainers["backoffLimit"] = hostile
            one.admit(hostile)
            one.train_job["metadata"]["annotations"][FLOOR] = hostile
            found = inspect([hostile, one.train_job, one.job_set, *one.pods]).all_findings
            assert {"identity", "requirement"} <= {one.level for one in found}
            assert max(len(one.says) for one in found) < 1000
