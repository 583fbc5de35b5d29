"""The next admission by hand: both counts go up together, and only of what is held and ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from tests.manifests import cluster
from tests.manifests.conftest import JOB_ID, ONE_NODE, changed, pod_template, refusal, render

from dispatch_agent.cluster.container import read_identity

ADMISSION, FLOOR = "dispatch.phpboyscout.uk/admission", "dispatch.phpboyscout.uk/admission-floor"

Object = dict[str, Any]
every_kind = pytest.mark.parametrize("kind", ["trainjob", "jobset"])


def held(kind: str, admission: str | None = "1", floor: str | None = "1") -> Object:
    """An object that was suspended, as kubectl prints it."""
    [thing] = render(ONE_NODE, "--kind", kind)
    thing["spec"]["suspend"] = True
    thing["metadata"] |= {"resourceVersion": "4711", "uid": "7d3f", "managedFields": [{"manager": "kubectl"}]}
    thing["status"] = {"conditions": []}
    for place, key, count in (
        (pod_template(thing)["metadata"]["annotations"], ADMISSION, admission),
        (thing["metadata"]["annotations"], FLOOR, floor),
    ):
        if count is None:
            del place[key]
        else:
            place[key] = count
    return thing


def ended(thing: Object, how: str) -> None:
    thing["status"]["conditions"] = [{"type": "Suspended", "status": "False"}, {"type": how, "status": "True"}]


def counts(thing: Object) -> tuple[str, str]:
    return pod_template(thing)["metadata"]["annotations"][ADMISSION], thing["metadata"]["annotations"][FLOOR]


@every_kind
@pytest.mark.parametrize(
    ("admission", "floor", "expected"),
    [("0", "0", "1"), ("1", "1", "2"), ("1", "7", "8"), ("7", "1", "8"), ("999998", "0", "999999")],
)
def test_both_counts_go_above_both(kind: str, admission: str, floor: str, expected: str) -> None:
    """Whoever put one of them back has not made an identity come again."""
    [raised] = render(held(kind, admission, floor), "--raise")
    assert counts(raised) == (expected, expected)


@every_kind
def test_it_runs_again_and_nothing_else_is_changed(kind: str) -> None:
    before = held(kind)
    [after] = render(before, "--raise")
    assert after["spec"].pop("suspend") is False
    assert after["metadata"]["resourceVersion"] == "4711", "or kubectl replace would take it over another's change"
    expected = copy.deepcopy(before)
    del expected["spec"]["suspend"]
    pod_template(expected)["metadata"]["annotations"][ADMISSION] = "2"
    expected["metadata"]["annotations"][FLOOR] = "2"
    assert after == expected


def test_every_execution_has_an_identity_of_its_own_and_the_epoch_only_grows() -> None:
    """Through suspensions and JobSet's restarts, as the containers see it."""
    runtime, train_job = render(ONE_NODE)
    seen = []
    restarts = 0
    for restarts_more in (0, 2, 0, 1):
        [train_job] = render(train_job, "--raise")
        for _ in range(restarts_more + 1):
            [pod] = cluster.pods_of(cluster.job_of(cluster.job_set_of(runtime, train_job), restarts))
            seen.append(read_identity(cluster.started(pod, "dispatch-publish").environ))
            restarts += 1
        restarts -= 1  # a suspension is no restart
        train_job["spec"]["suspend"] = True
    assert len({identity.attempt for identity in seen}) == len(seen)
    epochs = [identity.epoch for identity in seen]
    assert epochs == sorted(set(epochs))
    assert seen[0].attempt == f"{JOB_ID}.1.1.1.0"


@every_kind
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda thing: thing["spec"].update(suspend=False), "suspend it"),
        (lambda thing: thing["spec"].pop("suspend"), "suspend it"),
        (lambda thing: ended(thing, "Failed"), "has ended (Failed), and does not start again: start a new submission"),
        (lambda thing: ended(thing, "Complete"), "has ended (Complete)"),
        (lambda thing: ended(thing, "Completed"), "has ended (Completed)"),
        (lambda thing: thing["metadata"]["labels"].update({"kueue.x-k8s.io/queue-name": "q"}), "the queue q"),
        (lambda thing: thing.update(kind="Deployment"), "Deployment"),
        (lambda thing: thing["metadata"]["annotations"].pop(FLOOR), "None, not a count"),
        (lambda thing: pod_template(thing)["metadata"].pop("annotations"), "None, not a count"),
        (lambda thing: thing["metadata"]["annotations"].update({FLOOR: "many"}), "'many', not a count"),
        (lambda thing: thing["metadata"]["annotations"].update({FLOOR: "-1"}), "'-1', not a count"),
        (lambda thing: thing["metadata"]["annotations"].update({FLOOR: "1000000"}), "not a count"),
        (lambda thing: thing["metadata"]["annotations"].update({FLOOR: "999999"}), "start a new submission"),
    ],
)
def test_what_cannot_be_raised_is_refused(kind: str, change: Callable[[Object], object], says: str) -> None:
    thing = held(kind)
    thing["metadata"].setdefault("labels", {})
    change(thing)
    assert says in refusal(thing, "--raise")


@pytest.mark.parametrize(
    "patches", [[], [{"manager": "kueue.x-k8s.io/manager", "trainingRuntimeSpec": {}}]], ids=["none", "Kueue's"]
)
def test_a_trainjob_that_lost_our_patch_is_refused(patches: list[Object]) -> None:
    """It holds the init container's identity too, which nothing can put back."""
    thing = held("trainjob")
    thing["spec"]["runtimePatches"] = patches
    assert "has no runtime patch of dispatch.phpboyscout.uk/adapter" in refusal(thing, "--raise")


def test_another_managers_patch_is_left_alone() -> None:
    thing = held("trainjob")
    kueue = {"manager": "kueue.x-k8s.io/manager", "trainingRuntimeSpec": {"template": {}}}
    thing["spec"]["runtimePatches"].insert(0, kueue)
    [raised] = render(thing, "--raise")
    assert raised["spec"]["runtimePatches"][0] == kueue
    assert raised["metadata"]["annotations"][FLOOR] == "2"


class TestTheJobSetOfATrainJob:
    """Trainer makes a deleted one anew, and its restarts are counted from 0 again."""

    UID = "dispatch.phpboyscout.uk/jobset-uid"

    @staticmethod
    def both(train_job: Object, uid: str) -> Object:
        return {"kind": "List", "items": [train_job, {"kind": "JobSet", "metadata": {"name": "train", "uid": uid}}]}

    def test_its_uid_is_recorded_and_taken_again(self) -> None:
        [raised] = render(self.both(held("trainjob"), "a"), "--raise")
        assert raised["kind"] == "TrainJob"
        assert raised["metadata"]["annotations"][self.UID] == "a"
        raised["spec"]["suspend"] = True
        [again] = render(self.both(raised, "a"), "--raise")
        assert counts(again) == ("3", "3")

    def test_another_one_is_refused(self) -> None:
        [raised] = render(self.both(held("trainjob"), "a"), "--raise")
        raised["spec"]["suspend"] = True
        said = refusal(self.both(raised, "b"), "--raise")
        assert "JobSet UID b is not the recorded a: J may have been reset" in said

    def test_none_is_refused_where_one_is_recorded(self) -> None:
        [raised] = render(self.both(held("trainjob"), "a"), "--raise")
        raised["spec"]["suspend"] = True
        assert "no JobSet came with it" in refusal(raised, "--raise")

    def test_another_jobs_is_refused_and_not_recorded(self) -> None:
        pair = self.both(held("trainjob"), "a")
        pair["items"][1]["metadata"]["name"] = "other"
        assert "JobSet other is not that of TrainJob train: give the two of one job" in refusal(pair, "--raise")

    def test_its_restarts_count_towards_the_bound_of_the_epoch(self) -> None:
        pair = self.both(held("trainjob"), "a")
        for restarts, fits in ((999_997, True), (999_998, False)):
            pair["items"][1]["status"] = {"restarts": restarts}
            if fits:
                render(pair, "--raise")
            else:
                assert "start a new submission" in refusal(pair, "--raise")

    def test_the_order_of_a_list_means_nothing(self) -> None:
        pair = self.both(held("trainjob"), "a")
        pair["items"].reverse()
        assert render(pair, "--raise")[0]["metadata"]["annotations"][self.UID] == "a"


def test_a_description_or_another_list_is_no_object_of_the_cluster() -> None:
    assert "holds an object without a kind: give one TrainJob" in refusal(ONE_NODE, "--raise")
    assert "TrainJob, TrainJob" in refusal({"kind": "List", "items": [held("trainjob")] * 2}, "--raise")
    assert "nothing" in refusal({"kind": "List", "items": []}, "--raise")
    assert "2 documents" in refusal("kind: TrainJob\n---\nkind: TrainJob\n", "--raise")


def test_a_held_job_that_is_admitted_by_hand_is_what_admitted_renders() -> None:
    _, waiting = render(changed(ONE_NODE))
    _, admitted = render(ONE_NODE, "--admitted")
    assert render(waiting, "--raise") == [admitted]
