"""What is rendered says what the description says, in the shapes that the dispatcher and Trainer agreed on."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from tests.cli.conftest import program
from tests.manifests import cluster
from tests.manifests.conftest import (
    JOB_ID,
    ONE_NODE,
    PLAIN_SIDECAR,
    RANK_RESTART,
    SEVERAL_NODES,
    changed,
    invoke,
    pod_template,
    render,
)

from dispatch_agent.cli import main
from dispatch_agent.identity import parse_job_id

SCRIPT = Path(__file__).parents[2] / "prologue" / "prologue.sh"


def variables(container: dict[str, Any]) -> dict[str, str]:
    """By name, in their order: the value, or the path of the reference."""
    return {
        variable["name"]: variable["value"] if "value" in variable else variable["valueFrom"]["fieldRef"]["fieldPath"]
        for variable in container["env"]
    }


def named(template: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = (container for container in cluster.containers(template) if container["name"] == name)
    return found


class TestTrainJob:
    def test_env_holds_the_jobs_own_sorted_and_then_the_seven(self) -> None:
        [train_job] = render(SEVERAL_NODES, "--kind", "trainjob")
        assert [*variables(train_job["spec"]["trainer"]).items()] == [
            ("DATA_ROOT", "/data"),
            ("NOTE", "$$(HOME) and $$$$"),
            ("OMP_NUM_THREADS", "8"),
            ("DISPATCH_JOB_ID", JOB_ID),
            ("DISPATCH_SUBMISSION", "3"),
            ("DISPATCH_K8S_EPOCH_PREFIX", "2000003"),
            ("DISPATCH_K8S_TOKEN_PREFIX", f"{JOB_ID}.3.4"),
            ("DISPATCH_K8S_ADMISSION", "metadata.annotations['dispatch.phpboyscout.uk/admission']"),
            ("DISPATCH_K8S_RESTART", "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"),
            ("DISPATCH_K8S_WORKDIR", "/workspace"),
        ]

    def test_a_job_without_a_workdir_is_not_told_one(self) -> None:
        [train_job] = render(ONE_NODE, "--kind", "trainjob")
        assert [*variables(train_job["spec"]["trainer"])][-1] == "DISPATCH_K8S_RESTART"

    def test_the_command_is_the_prologue_and_then_the_users(self) -> None:
        [train_job] = render(ONE_NODE, "--kind", "trainjob")
        assert train_job["spec"]["trainer"]["command"] == [
            *("/bin/sh", "-c", SCRIPT.read_text(), "dispatch-prologue"),
            *("python", "train.py"),
        ]

    @pytest.mark.parametrize(("arguments", "count", "held"), [((), "0", True), (("--admitted",), "1", False)])
    def test_it_waits_for_its_first_admission_unless_it_has_it(
        self, arguments: tuple[str, ...], count: str, held: bool
    ) -> None:
        [train_job] = render(ONE_NODE, "--kind", "trainjob", *arguments)
        assert train_job["spec"]["suspend"] is held
        assert train_job["metadata"]["annotations"] == {"dispatch.phpboyscout.uk/admission-floor": count}
        assert pod_template(train_job)["metadata"]["annotations"] == {"dispatch.phpboyscout.uk/admission": count}
        [patch] = train_job["spec"]["runtimePatches"]
        assert patch["manager"] == "dispatch.phpboyscout.uk/adapter"

    def test_the_patch_tells_those_beside_the_trainer_whose_saves_they_publish(self) -> None:
        [train_job] = render(SEVERAL_NODES, "--kind", "trainjob")
        expected = {
            "DISPATCH_JOB_ID": JOB_ID,
            "DISPATCH_SUBMISSION": "3",
            "DISPATCH_K8S_EPOCH_PREFIX": "2000003",
            "DISPATCH_K8S_TOKEN_PREFIX": f"{JOB_ID}.3.4",
            "DISPATCH_PUBLISH_DEST": "s3://checkpoints/train",
            "PET_NNODES": "12",
            "PUBLISH_COMPLETE": "settle:5",
            "PUBLISH_DRAIN_TIMEOUT": "60",
            "PUBLISH_KEEP_LOCAL": "2",
            "AWS_REGION": "eu-central-1",
        }
        patched = pod_template(train_job)["spec"]["initContainers"]
        assert [container["name"] for container in patched] == ["dispatch-init", "dispatch-publish"]
        assert [variables(container) for container in patched] == [expected, expected]

    def test_a_queue_is_kueues_label(self) -> None:
        [train_job] = render(changed(ONE_NODE, queue="training"), "--kind", "trainjob")
        assert train_job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "training"}
        assert train_job["spec"]["suspend"] is True

    def test_a_job_id_is_drawn_where_none_is_given_and_said(self) -> None:
        result = invoke(changed(ONE_NODE, job_id=None), "--kind", "trainjob")
        drawn = variables(yaml.safe_load(result.stdout)["spec"]["trainer"])["DISPATCH_JOB_ID"]
        assert parse_job_id(drawn) != JOB_ID
        assert drawn in result.stderr
        assert invoke(changed(ONE_NODE, job_id=None), "--kind", "runtime").stderr == "", "a runtime holds none"


class TestRuntime:
    def test_it_is_the_jobs_own_unless_one_is_named(self) -> None:
        for description, kind, metadata in (
            (ONE_NODE, "TrainingRuntime", {"name": "train", "namespace": "team-a"}),
            (
                changed(ONE_NODE, runtime={"name": "shared", "scope": "cluster"}),
                "ClusterTrainingRuntime",
                {"name": "shared"},
            ),
        ):
            runtime, train_job = render(description)
            assert runtime["kind"] == kind
            assert metadata.items() <= runtime["metadata"].items()
            assert ("namespace" in runtime["metadata"]) == ("namespace" in metadata)
            reference = {"apiGroup": "trainer.kubeflow.org", "kind": kind, "name": metadata["name"]}
            assert train_job["spec"]["runtimeRef"] == reference

    def test_a_runtime_holds_nothing_of_a_submission(self) -> None:
        """Jobs of one shape share it, so that one job's runtime must not differ from the next one's."""
        shared = changed(SEVERAL_NODES, runtime={"name": "shared"})
        other = changed(
            shared,
            name="other",
            submission=9,
            generation=5,
            job_id="01JCXE8Q5W3V9T2N7M4K6H1G0Q",
            nodes=3,
            env={"A": "b"},
            workdir=None,
            command=["python"],
            publish={"dest": "s3://elsewhere"},
            resources=None,
        )
        assert render(shared, "--kind", "runtime") == render(other, "--kind", "runtime")

    @pytest.mark.parametrize("kind", ["runtime", "jobset"])
    def test_no_pod_is_restarted_or_replaced_under_its_identity(self, kind: str) -> None:
        [thing] = render(SEVERAL_NODES, "--kind", kind)
        spec = thing["spec"]["template"]["spec"] if kind == "runtime" else thing["spec"]
        [job] = spec["replicatedJobs"]
        assert spec["failurePolicy"] == {
            "maxRestarts": 9,
            "restartStrategy": "BlockingRecreate",
            "rules": [
                {
                    "name": "dispatchRefused",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                    "targetReplicatedJobs": ["node"],
                }
            ],
        }
        assert (job["name"], job["replicas"]) == ("node", 1)
        job_spec = job["template"]["spec"]
        assert (job_spec["backoffLimit"], job_spec["podReplacementPolicy"]) == (0, "Failed")
        assert job_spec["completionMode"] == "Indexed"
        assert job_spec["template"]["spec"]["restartPolicy"] == "Never"
        assert [rule["onExitCodes"] for rule in job_spec["podFailurePolicy"]["rules"]] == [
            {"containerName": "node", "operator": "In", "values": [125]},
            {"containerName": "dispatch-init", "operator": "In", "values": [30, 31, 32, 125]},
        ]

    @pytest.mark.parametrize("kind", ["runtime", "jobset", "pod"])
    def test_a_pod_ends_within_its_grace_and_asks_for_no_more_than_it_needs(self, kind: str) -> None:
        description = changed(SEVERAL_NODES, nodes=1)
        [thing] = render(description, "--kind", kind)
        spec = (thing if kind == "pod" else pod_template(thing))["spec"]
        assert spec["terminationGracePeriodSeconds"] == 600
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["serviceAccountName"] == "trainer"
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 1000

    def test_the_containers_are_these_in_this_order(self) -> None:
        [runtime] = render(SEVERAL_NODES, "--kind", "runtime")
        spec = pod_template(runtime)["spec"]
        assert [container["name"] for container in spec["initContainers"]] == [
            "dispatch-install",
            "dispatch-init",
            "dispatch-publish",
        ]
        assert [container["command"] for container in spec["initContainers"]] == [
            ["dispatch-agent", "install", "/opt/dispatch"],
            ["publish", "init"],
            ["publish", "watch"],
        ]
        assert [container["name"] for container in spec["containers"]] == ["node"]
        [install, init, _] = spec["initContainers"]
        assert "restartPolicy" not in {**install, **init}

    def test_a_native_sidecar_starts_before_the_trainer_and_hears_of_the_end(self) -> None:
        [runtime] = render(SEVERAL_NODES, "--kind", "runtime")
        sidecar = named(pod_template(runtime), "dispatch-publish")
        assert sidecar["restartPolicy"] == "Always"
        asked = {name: sidecar[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert asked == {
            "startupProbe": {"path": "/startupz", "port": 9464},
            "livenessProbe": {"path": "/livez", "port": 9464},
            "readinessProbe": {"path": "/readyz", "port": 9464},
        }
        assert sidecar["lifecycle"] == {"preStop": {"exec": {"command": ["dispatch-agent", "health", "terminating"]}}}
        found = variables(sidecar)
        assert (found["PUBLISH_LISTEN"], found["PUBLISH_GRACE"]) == (":9464", "600")

    @pytest.mark.parametrize("name", ["dispatch-init", "dispatch-publish"])
    def test_the_pods_metadata_reaches_those_beside_the_trainer(self, name: str) -> None:
        [runtime] = render(SEVERAL_NODES, "--kind", "runtime")
        found = variables(named(pod_template(runtime), name))
        references = {key: value for key, value in found.items() if value.startswith("metadata.")}
        assert references == {
            "DISPATCH_K8S_ADMISSION": "metadata.annotations['dispatch.phpboyscout.uk/admission']",
            "DISPATCH_K8S_RESTART": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']",
            "AGENT_K8S_JOB_RESTART": "metadata.labels['jobset.sigs.k8s.io/job-restart-attempt']",
            "AGENT_K8S_IN_PLACE_RESTART": "metadata.annotations['jobset.sigs.k8s.io/in-place-restart-attempt']",
            "AGENT_K8S_EXECUTION": "metadata.annotations['jobset.sigs.k8s.io/execution-attempt']",
            "AGENT_K8S_POD_UID": "metadata.uid",
            "POD_NAME": "metadata.name",
        }

    def test_all_that_use_the_checkpoints_have_them_at_one_place(self) -> None:
        [runtime] = render(SEVERAL_NODES, "--kind", "runtime")
        template = pod_template(runtime)
        for name in ("dispatch-init", "dispatch-publish", "node"):
            container = named(template, name)
            assert {"name": "checkpoints", "mountPath": "/data/checkpoints"} in container["volumeMounts"]
            assert variables(container)["PUBLISH_ROOT"] == "/data/checkpoints"

    @pytest.mark.parametrize(
        ("checkpoints", "volume", "shared"),
        [
            ({"claim": "shared"}, {"persistentVolumeClaim": {"claimName": "shared"}}, True),
            ({"size": "200Gi"}, {"emptyDir": {"sizeLimit": "200Gi"}}, False),
        ],
        ids=["claim", "size"],
    )
    def test_the_volume_says_whether_nodes_share_it(
        self, checkpoints: dict[str, str], volume: dict[str, Any], shared: bool
    ) -> None:
        [runtime] = render(changed(ONE_NODE, checkpoints=checkpoints), "--kind", "runtime")
        template = pod_template(runtime)
        assert {"name": "checkpoints", **volume} in template["spec"]["volumes"]
        assert ("PUBLISH_SHARED_VOLUME" in variables(named(template, "dispatch-publish"))) is shared

    def test_credentials_reach_only_those_that_publish(self) -> None:
        for credentials in ({"secret": "store"}, {"secret": "store", "mount": "/run/secrets/store"}):
            [runtime] = render(changed(SEVERAL_NODES, credentials=credentials), "--kind", "runtime")
            template = pod_template(runtime)
            having = [
                container["name"]
                for container in cluster.containers(template)
                if "envFrom" in container or "dispatch-credentials" in str(container.get("volumeMounts"))
            ]
            assert having == ["dispatch-init", "dispatch-publish"]

    def test_the_agents_programs_are_written_once_and_then_only_read_by_the_trainer(self) -> None:
        [runtime] = render(SEVERAL_NODES, "--kind", "runtime")
        mounts = {
            container["name"]: mount
            for container in cluster.containers(pod_template(runtime))
            for mount in container["volumeMounts"]
            if mount["name"] == "dispatch-agent"
        }
        mount = {"name": "dispatch-agent", "mountPath": "/opt/dispatch"}
        assert mounts == {"dispatch-install": mount, "node": {**mount, "readOnly": True}}

    def test_a_plain_sidecar_stands_beside_a_trainer_that_holds_a_lock_for_it(self) -> None:
        runtime, train_job = render(PLAIN_SIDECAR)
        spec = pod_template(runtime)["spec"]
        assert [container["name"] for container in spec["containers"]] == ["node", "dispatch-publish"]
        assert [container["name"] for container in spec["initContainers"]] == ["dispatch-install", "dispatch-init"]
        node, sidecar = spec["containers"]
        assert "restartPolicy" not in sidecar
        assert variables(sidecar)["PUBLISH_END_WITH_TRAINER"] == "1"
        assert variables(node)["AGENT_HOLD"] == "1"
        assert train_job["spec"]["trainer"]["command"][:3] == ["/opt/dispatch/bin/dispatch-agent", "exec", "--"]
        patched = pod_template(train_job)["spec"]
        assert [container["name"] for container in patched["containers"]] == ["dispatch-publish"]

    def test_allowing_a_rank_to_run_again_is_said_to_all(self) -> None:
        [runtime] = render(RANK_RESTART, "--kind", "runtime")
        [job] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        assert job["template"]["spec"]["backoffLimit"] == 0
        assert job["template"]["spec"]["podFailurePolicy"]["rules"][-1] == {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        }
        for name in ("node", "dispatch-init", "dispatch-publish"):
            assert variables(named(pod_template(runtime), name))["AGENT_ALLOW_RANK_RESTART"] == "1"

    def test_without_torch_trainer_is_asked_for_nothing_of_it(self) -> None:
        [runtime] = render(changed(ONE_NODE, runtime={"policy": "plain"}), "--kind", "runtime")
        assert runtime["spec"]["mlPolicy"] == {"numNodes": 1}
        assert "labels" not in runtime["metadata"]


class TestOtherKinds:
    def test_a_jobset_is_what_trainer_would_make_but_for_names(self) -> None:
        [plain] = render(SEVERAL_NODES, "--kind", "jobset")
        made = cluster.job_set_of(*render(SEVERAL_NODES, "--admitted"))
        for name in ("node", "dispatch-init", "dispatch-publish"):
            ours, theirs = named(pod_template(plain), name), named(pod_template(made), name)
            assert variables(ours) == variables(theirs)
            assert {**ours, "env": 0, "ports": 0} == {**theirs, "env": 0, "ports": 0}

    def test_a_jobset_says_that_its_admission_stands_still(self) -> None:
        assert invoke(ONE_NODE, "--kind", "jobset").stdout.startswith("# Its admission count stays 1")

    def test_an_identity_that_a_queue_weakens_is_said_to_be(self) -> None:
        for arguments in (("--kind", "jobset"), ("--admitted",)):
            assert "# Identity weakened" in invoke(RANK_RESTART, *arguments).stdout
            assert "Identity weakened" not in invoke(ONE_NODE, *arguments).stdout
        assert "Identity weakened" not in invoke(RANK_RESTART).stdout, "the dispatcher raises the count"

    def test_each_pod_of_a_job_has_its_own_name_and_a_finished_identity(self) -> None:
        first, second = (render(changed(ONE_NODE, restart=count), "--kind", "pod")[0] for count in (0, 1))
        assert (first["metadata"]["name"], second["metadata"]["name"]) == ("train-0", "train-1")
        for pod, epoch, attempt in ((first, "1000001", f"{JOB_ID}.1.1.1.0"), (second, "1000002", f"{JOB_ID}.1.1.1.1")):
            for name in ("node", "dispatch-init", "dispatch-publish"):
                found = variables(named(pod, name))
                assert (found["DISPATCH_EPOCH"], found["DISPATCH_ATTEMPT"]) == (epoch, attempt)
                assert not [name for name in found if name.startswith("DISPATCH_K8S_")]


class TestTheCommand:
    def test_runtime_and_trainjob_are_one_stream(self) -> None:
        assert render(SEVERAL_NODES) == [
            *render(SEVERAL_NODES, "--kind", "runtime"),
            *render(SEVERAL_NODES, "--kind", "trainjob"),
        ]

    def test_json_holds_the_same(self) -> None:
        [several] = render(SEVERAL_NODES, "--output", "json")
        assert (several["apiVersion"], several["kind"]) == ("v1", "List")
        assert several["items"] == render(SEVERAL_NODES)
        assert render(ONE_NODE, "--kind", "pod", "--output", "json") == render(ONE_NODE, "--kind", "pod")

    def test_the_same_description_gives_the_same_bytes(self) -> None:
        assert invoke(SEVERAL_NODES).stdout == invoke(SEVERAL_NODES).stdout

    def test_the_process_refuses_a_description_with_3_and_a_call_with_2(self, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_text("name: train\nimages: x\npublish: {dest: s3://a/b}\ncommand: [x]\n")
        for arguments, code in ((["job.yaml"], 3), ([], 2), (["--raise", "--kind", "pod", "job.yaml"], 2), (["no"], 2)):
            words = [program("dispatch-agent"), "render", *arguments]
            done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout) == (code, ""), done.stderr
            assert len(done.stderr.splitlines()) == 1

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--example", "--kind", "pod"],
            ["--admitted", "--kind", "jobset", "-"],
            ["--raise", "--admitted", "-"],
            ["--kind", "sbatch", "--output", "json", "-"],
            ["--kind", "deployment", "-"],
        ],
    )
    def test_options_that_contradict_each_other_are_refused(self, arguments: list[str]) -> None:
        result = CliRunner().invoke(main.cli, ["render", *arguments], input="{}")
        assert result.stdout == ""
        assert getattr(result.exception, "exit_code", result.exit_code) == 2


class TestTheExample:
    text = CliRunner().invoke(main.cli, ["render", "--example"]).stdout

    @pytest.mark.parametrize("kind", ["runtime", "trainjob", "jobset"])
    def test_it_renders(self, kind: str) -> None:
        assert len(render(self.text, "--kind", kind)) == 1

    def test_it_leaves_the_last_uploads_all_that_is_left_of_the_grace_period(self) -> None:
        """Who edits nothing but the names has no smaller bound for them than the pod's own."""
        [runtime, train_job] = render(self.text)
        assert "PUBLISH_GRACE" in json.dumps(runtime)
        assert "PUBLISH_DRAIN_TIMEOUT" not in json.dumps([runtime, train_job])

    @pytest.mark.parametrize(
        "line",
        [line for line in text.splitlines() if re.match(r" *# +[a-z_]+:", line)],
        ids=lambda line: line.split()[1],
    )
    def test_every_key_that_it_leaves_out_is_one(self, line: str) -> None:
        """Alone each renders, or is refused for what it means: none is unknown."""
        document = yaml.safe_load(self.text)
        written = "\n".join(
            re.sub("# ?", "", each, count=1) if each == line else each for each in self.text.splitlines()
        )
        if line.startswith("#   "):  # of a section that is left out as a whole
            heads = [each for each in self.text.partition(line)[0].splitlines() if re.match("# [a-z]+:", each)]
            written = f"{self.text}\n{heads[-1][1:].strip()}\n{line[1:]}"
        changed_document = yaml.safe_load(written)
        assert changed_document != document
        said = str(invoke(written).exception)
        assert "is no key" not in said
        assert "missing" not in said


class TestTheReference:
    """docs/kubernetes.md and the example have every key, and no other."""

    document = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
    table = document.partition("## The description")[2].partition("\n## ")[0]

    @pytest.mark.parametrize("place", ["", "runtime", "checkpoints", "credentials", "agent"])
    def test_it_lists_the_keys_that_are_read(self, place: str) -> None:
        key = f"{place}__zzzzzz" if place else "zzzzzz"
        said = str(invoke(changed(ONE_NODE, **{key: 1})).exception)
        known = set(said.partition("the keys there are ")[2].split(", "))
        listed = {tuple(row.split(".")) for row in re.findall(r"^\| `([a-z_.*]+)`", self.table, re.MULTILINE)}
        here = (
            {row[0] for row in listed} if not place else {row[1] for row in listed if row[0] == place and len(row) > 1}
        )
        assert here == known
        example = CliRunner().invoke(main.cli, ["render", "--example"]).stdout
        assert [name for name in known if f"{name}:" not in example] == []

    def test_its_patches_fit_the_runtime_that_is_rendered(self) -> None:
        """Each adds to a list that is there, or a key that is not: none replaces what render wrote."""
        [text] = [
            block
            for block in re.findall(r"^```yaml\n(.*?)^```", self.document, re.DOTALL | re.M)
            if "patches:" in block
        ]
        operations = yaml.safe_load(yaml.safe_load(text)["patches"][0]["patch"])
        assert len(operations) >= 5
        for document in (ONE_NODE, SEVERAL_NODES):
            for operation in operations:
                [place] = render(document, "--kind", "runtime")
                *folders, last = operation["path"].split("/")[1:]
                for folder in folders:
                    place = place[int(folder)] if isinstance(place, list) else place[folder]
                assert operation["op"] == "add"
                assert last == "-" if isinstance(place, list) else last not in place
