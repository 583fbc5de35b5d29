"""What cannot be rendered is refused before anything is printed: the key, the value, what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.manifests.conftest import (
    JOB_ID,
    ONE_NODE,
    RANK_RESTART,
    SEVERAL_NODES,
    changed,
    invoke,
    refusal,
    render,
)

from dispatch_agent.cli import main


def words(count: int) -> list[str]:
    return ["python", *(str(number) for number in range(count - 1))]


def many(count: int) -> dict[str, str]:
    return {f"V{number}": "x" for number in range(count)}


class TestKeys:
    @pytest.mark.parametrize(
        ("key", "near"),
        [("comand", "command"), ("node", "nodes"), ("runtime__scop", "scope"), ("agent__side_car", "sidecar")],
    )
    def test_an_unknown_one_is_refused_with_the_nearest(self, key: str, near: str) -> None:
        said = refusal(changed(ONE_NODE, **{key: "x"}))
        assert key.replace("__", ".") in said
        assert f"did you mean {near}?" in said

    def test_an_unknown_setting_of_the_publisher_is_refused_with_the_nearest(self) -> None:
        assert "did you mean drain_timeout?" in refusal(changed(ONE_NODE, publish__drain_timeuot=3))

    @pytest.mark.parametrize(
        "key",
        [
            *("root", "grace", "shared_volume", "rank", "listen", "once", "done_file", "end_with_trainer"),
            *("termination_message", "json", "allow_rank_restart"),
        ],
    )
    def test_what_render_sets_itself_is_no_setting(self, key: str) -> None:
        assert f"publish.{key}" in refusal(changed(ONE_NODE, **{f"publish__{key}": "1"}))

    @pytest.mark.parametrize("key", ["name", "command", "image", "publish__dest", "agent__image"])
    def test_one_that_must_be_there_is_named(self, key: str) -> None:
        assert f"{key.replace('__', '.')} is missing: " in refusal(changed(ONE_NODE, **{key: None}))

    def test_a_description_is_one_mapping(self) -> None:
        for text in ("[1]", "just words", "3", "a: 1\n---\nb: 2", ""):
            assert invoke(text).exit_code != 0
            refusal(text)

    def test_what_cannot_be_read_names_the_file_and_the_place(self, tmp_path: Path) -> None:
        file = tmp_path / "job.yaml"
        file.write_text("name: train\n\tnodes: 2\n")
        said = str(CliRunner().invoke(main.cli, ["render", str(file)]).exception)
        assert said.startswith(f"{file}: it is no YAML that can be read: ")
        assert said.endswith(" in line 2, column 1")

    def test_root_is_refused_and_why(self) -> None:
        assert "user is 0: write a whole number from 1 to 2147483647: pods are within" in refusal(
            changed(ONE_NODE, user=0)
        )

    def test_a_key_that_stands_twice_is_refused(self) -> None:
        assert "'nodes' stands twice" in refusal("name: a\nnodes: 1\nnodes: 2\n")
        assert "'nodes' stands twice" in refusal('{"nodes": 1, "nodes": 2}')


# Each is one change of a description that renders, and what the refusal must name beside the key.
VALUES: list[tuple[dict[str, Any], str]] = [
    ({"name": "Train"}, "'Train'"),
    ({"name": "1train"}, "begin with a letter"),
    ({"name": JOB_ID.lower()}, "begin with a letter"),
    ({"name": "train_7b"}, "dashes"),
    ({"name": True}, "quote"),
    ({"namespace": "Team"}, "'Team'"),
    ({"job_id": JOB_ID.lower()}, JOB_ID),
    ({"job_id": "7"}, "ULID"),
    ({"submission": 0}, "from 1 to 999999"),
    ({"submission": 1_000_000}, "from 1 to 999999"),
    ({"submission": "1"}, "whole number"),
    ({"submission": True}, "whole number"),
    ({"generation": 18_000_001}, "from 0 to 18000000"),
    ({"attempt": 0}, "from 1"),
    ({"restart": 1}, "counts plain Pods"),
    ({"image": "two words"}, "spaces"),
    ({"command": []}, "list"),
    ({"command": "python train.py"}, "list"),
    ({"command": ["python", 3]}, "command[1] is 3"),
    ({"command": ["--epochs", "3"]}, "command[0]"),
    ({"command": ["", "3"]}, "command[0]"),
    ({"command": ["python", "a\0b"]}, "command[1]"),
    ({"command": ["python", "a\ud800"]}, "command[1]"),
    ({"env": {"A": "\udcff"}}, "env.A"),
    ({"publish__dest": "s3://b/\ud800"}, "publish.dest"),
    ({"command": ["tune", "run", "recipe"]}, "torchrun"),
    ({"command": words(125)}, "124 at most"),
    ({"command": ["python", "x" * 65_537]}, "65536 at most"),
    ({"command": ["python", "$" * 32_769]}, "65536 at most"),
    ({"command": ["python", "é" * 65_536]}, "131071 at most"),
    ({"env": {"A": "x" * 131_070}}, "131071 at most"),
    ({"workdir": "workspace"}, "absolute"),
    ({"workdir": "/checkpoints/src"}, "hides"),
    ({"nodes": 0}, "from 1"),
    ({"nodes": 2}, "checkpoints.claim"),
    ({"nodes": 1.5}, "whole number"),
    ({"env": many(123)}, "122 at most"),
    ({"env": many(122), "workdir": "/w"}, "121 at most"),
    ({"env": {"A-B": "x"}}, "'A-B'"),
    ({"env": {"1A": "x"}}, "'1A'"),
    ({"env": {"A": True}}, "quote"),
    ({"env": {"A": 1.10}}, "quote"),
    ({"env": {"A": None}}, "quote"),
    ({"env": ["A=b"]}, "mapping"),
    *(
        ({"env": {name: "x"}}, f"env.{name}")
        for name in (
            *("DISPATCH_EPOCH", "DISPATCH_ANYTHING", "PET_NNODES", "JOB_COMPLETION_INDEX", "POD_NAME"),
            *("PUBLISH_ROOT", "AGENT_HOLD", "AGENT_ALLOW_RANK_RESTART", "AGENT_K8S_POD_UID"),
        )
    ),
    ({"agent__env": {"PUBLISH_DEST": "s3://b"}}, "under publish"),
    ({"agent__env": {"AGENT_HOLD": "1"}}, "reserved"),
    ({"agent__env": many(122)}, "at most"),
    ({"resources": {"limits": {"gpu": 1}}}, "nvidia.com/gpu"),
    ({"resources": {"limits": {"memory": "64 GB"}}}, "'64 GB'"),
    ({"resources": {"limits": {"memory": "-1"}}}, "'-1'"),
    ({"resources": {"limits": {"memory": 0}}}, "above 0"),
    ({"resources": {"requests": {"memory": "65Gi"}, "limits": {"memory": "64Gi"}}}, "no more than the limit, 64Gi"),
    ({"resources": {"requests": {"nvidia.com/gpu": 1}}}, "under limits"),
    ({"resources": {"limits": {"nvidia.com/gpu": "500m"}}}, "whole number of devices"),
    ({"resources": {"limit": {}}}, "did you mean limits?"),
    ({"agent__resources": {"limits": {"memory": "64Mi"}}}, "160Mi or more"),
    ({"user": 0}, "from 1"),
    ({"queue": "Training Queue"}, "LocalQueue"),
    ({"runtime": {"name": "My_Runtime"}}, "'My_Runtime'"),
    ({"runtime": {"scope": "global"}}, "namespace, cluster"),
    ({"runtime": {"policy": "jax"}}, "torch, plain"),
    ({"runtime": {"policy": "mpi"}}, "past the prologue"),
    ({"runtime": {"policy": "flux"}}, "past the prologue"),
    ({"runtime": {"policy": "torchtune"}}, "past the prologue"),
    ({"checkpoints": {}}, "claim nor size"),
    ({"checkpoints": {"claim": "a", "size": "1Gi"}}, "leave it out"),
    ({"checkpoints": {"claim": "My Claim"}}, "'My Claim'"),
    ({"checkpoints": {"size": "200 Gb"}}, "'200 Gb'"),
    ({"checkpoints__path": "checkpoints"}, "absolute"),
    ({"checkpoints__path": "/"}, "absolute"),
    ({"checkpoints__path": "/a/../b"}, "absolute"),
    ({"checkpoints__path": "/a:b"}, "colon"),
    ({"checkpoints__path": "/a\nb"}, "absolute"),
    *(({"checkpoints__path": path}, "hides") for path in ("/usr", "/etc", "/dev", "/opt", "/opt/dispatch-agent")),
    ({"checkpoints__path": "/opt/dispatch", "agent__install": True}, "/opt/dispatch"),
    ({"checkpoints__path": "/opt/dispatch/saves", "agent__install": True}, "/opt/dispatch"),
    ({"credentials": {"secret": "store", "mount": "/checkpoints/key"}}, "outside /checkpoints"),
    ({"credentials": {"secret": "Store_1"}}, "'Store_1'"),
    ({"credentials": {"mount": "/run/key"}}, "credentials.secret"),
    ({"credentials": {"name": "store"}}, "credentials.name"),
    ({"publish__dest": ""}, "publish.dest"),
    ({"publish__dest": "bucket/prefix"}, "absolute folder"),
    ({"publish__dest": "/elsewhere"}, "goes with the pod"),
    ({"publish__dest": "/checkpoints/published"}, "goes with the pod"),
    ({"publish__dest": "/checkpoints/exec/x", "checkpoints": {"claim": "c"}}, "outside /checkpoints/exec"),
    ({"publish__dest": "memory://x"}, "s3://"),
    ({"publish__dest": "file:///x"}, "without file://"),
    ({"publish__dest": "s3://key:word@bucket/x"}, "credentials"),
    ({"publish__storage_option": ["secret=sesame"]}, "credentials.secret"),
    ({"publish__storage_option": ["endpoint_url=http://a b"]}, "without spaces"),
    ({"publish__complete": "sometimes"}, "'sometimes'"),
    ({"publish__drain_timeout": "soon"}, "'soon'"),
    ({"publish__workers": 0}, "publish.workers"),
    ({"publish__on_fenced": "panic"}, "publish.on_fenced"),
    ({"publish__drain_timeout": 300}, "drain_timeout, 300"),
    ({"publish__drain_timeout": 20, "grace": 20}, "drain_timeout, 20"),
    ({"grace": 0}, "from 1"),
    ({"max_restarts": -1}, "from 0"),
    ({"allow_rank_restart": "yes"}, "true or false"),
    ({"agent__sidecar": "none"}, "native, plain"),
    ({"agent__sidecar": "plain"}, "agent.install"),
    ({"agent__install": "yes"}, "true or false"),
    ({"sbatch": {"--time": "1"}}, "without the dashes"),
    ({"sbatch": {"signal": "TERM"}}, "sbatch.signal"),
    ({"sbatch": {"comment": "a b"}}, "without spaces"),
]


@pytest.mark.parametrize(
    ("change", "says"), VALUES, ids=[f"{number}-{'-'.join(change)}" for number, (change, _) in enumerate(VALUES)]
)
def test_a_wrong_value_is_refused_by_its_key(change: dict[str, Any], says: str) -> None:
    said = refusal(changed(ONE_NODE, **change))
    assert says in said
    assert any(part in said for key in change for part in (key.replace("__", "."), key.partition("__")[0]))
    assert "\n" not in said


# The greatest that each limit lets through; one more is among the values above.
AT_THE_LIMIT: list[dict[str, Any]] = [
    {"command": words(124)},
    {"command": ["python", "x" * 65_536]},
    {"command": ["python", "é" * 65_535]},
    {"env": {"A": "x" * 131_069}},
    {"env": many(122)},
    {"env": many(121), "workdir": "/w"},
    {"submission": 999_999, "generation": 18_000_000},
    {"publish__drain_timeout": 299.5},
    {"agent__resources": {"limits": {"memory": "160Mi"}}},
    {"runtime": {"policy": "plain"}, "command": ["mpirun", "-n", "2", "train"]},
    {"publish__dest": "/checkpoints/published", "checkpoints": {"claim": "c"}},
    {"checkpoints__path": "/opt/dispatch"},
    {"workdir": "/checkpoints"},
    {"publish__storage_option": ["endpoint_url=http://10.0.0.1:9000", "anon=false"]},
]


@pytest.mark.parametrize(
    "change", AT_THE_LIMIT, ids=[f"{number}-{'-'.join(c)}" for number, c in enumerate(AT_THE_LIMIT)]
)
def test_what_is_just_within_the_limits_is_rendered(change: dict[str, Any]) -> None:
    assert len(render(changed(ONE_NODE, **change))) == 2


@pytest.mark.parametrize(("nodes", "length"), [(1, 48), (10, 48), (11, 47), (100, 47), (101, 46), (100_000, 44)])
def test_a_name_is_short_enough_for_the_pod_of_the_last_rank(nodes: int, length: int) -> None:
    shared = changed(ONE_NODE, nodes=nodes, checkpoints={"claim": "shared"})
    for kind in ("trainjob", "jobset"):
        render(changed(shared, name="a" * length), "--kind", kind)
        assert f"{length} characters at most" in refusal(changed(shared, name="a" * (length + 1)), "--kind", kind)


def test_a_pods_name_counts_its_restarts() -> None:
    pod = changed(ONE_NODE, restart=10)
    render(changed(pod, name="a" * 60), "--kind", "pod")
    assert "60 characters at most" in refusal(changed(pod, name="a" * 61), "--kind", "pod")


@pytest.mark.parametrize("program", ["mpirun", "/usr/bin/mpiexec", "flux"])
def test_ranks_that_start_past_the_prologue_are_refused(program: str) -> None:
    several = changed(SEVERAL_NODES, command=[program, "train"])
    assert "without an identity" in refusal(several)


def test_a_pod_is_one_node() -> None:
    assert "a Pod is one node" in refusal(SEVERAL_NODES, "--kind", "pod")


def test_a_pod_has_no_plain_sidecar() -> None:
    plain = changed(ONE_NODE, agent__sidecar="plain", agent__install=True)
    assert "agent.sidecar" in refusal(plain, "--kind", "pod")


class TestQueues:
    """Kueue starts a preempted job again. Nobody but the dispatcher raises its count, and a count that stands still is
    one identity for two executions."""

    queued = changed(ONE_NODE, queue="training")
    unattended = (("--admitted",), ("--admitted", "--kind", "trainjob"), ("--kind", "jobset"))

    @pytest.mark.parametrize("arguments", unattended)
    def test_a_queue_without_the_dispatcher_is_refused(self, arguments: tuple[str, ...]) -> None:
        assert "nobody raises its admission count" in refusal(self.queued, *arguments)

    @pytest.mark.parametrize("arguments", unattended)
    def test_unless_a_weakened_identity_is_accepted(self, arguments: tuple[str, ...]) -> None:
        assert render(RANK_RESTART, *arguments)

    @pytest.mark.parametrize("kind", ["trainjob", "pod"])
    def test_it_is_rendered_where_each_start_has_an_identity_of_its_own(self, kind: str) -> None:
        [thing] = render(self.queued, "--kind", kind)
        assert thing["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"checkpoints": {"claim": "c"}}, "checkpoints.claim"),
        ({"checkpoints": {"size": "1Gi"}}, "checkpoints.size"),
        ({"image": "i"}, "image"),
        ({"agent": {"image": "i"}}, "agent.image"),
        ({"queue": "q"}, "queue"),
        ({"namespace": "n"}, "namespace"),
        ({"credentials": {"secret": "s"}}, "credentials.secret"),
        ({"service_account": "s"}, "service_account"),
        ({"resources": {"limits": {"cpu": 1}}}, "under sbatch"),
        ({"publish": {"dest": "relative"}}, "absolute"),
        ({"publish": {"dest": "/checkpoints/exec"}}, "outside"),
        ({"env": {"DISPATCH_EPOCH": "1"}}, "reserved"),
        ({"publish": {"dest": "s3://b/p", "drain_timeout": 300}}, "drain_timeout"),
    ],
)
def test_a_batch_script_has_nothing_of_kubernetes(change: dict[str, Any], says: str) -> None:
    script = {"name": "train", "command": ["python", "train.py"], "publish": {"dest": "s3://b/p"}}
    assert invoke(script, "--kind", "sbatch").exit_code == 0
    assert says in refusal({**script, **change}, "--kind", "sbatch")


def test_all_that_a_batch_script_has_not_is_named_at_once() -> None:
    """A description for a cluster is made one for Slurm in one edit."""
    said = refusal(SEVERAL_NODES, "--kind", "sbatch")
    for key in ("image is ", "agent.image is ", "checkpoints.claim is ", "credentials.secret is ", "resources is "):
        assert key in said
