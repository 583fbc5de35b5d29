"""What is rendered works where it runs: with the commands and environments that a kubelet would give, and no others."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import pytest
from tests.cli.conftest import Result, eventually, program
from tests.manifests import cluster
from tests.manifests.cluster import Started
from tests.manifests.conftest import (
    JOB_ID,
    ONE_NODE,
    PLAIN_SIDECAR,
    RANK_RESTART,
    SEVERAL_NODES,
    changed,
    render,
)

from dispatch_agent.cli.environment import known_variables
from dispatch_agent.cli.publish import publish
from dispatch_agent.cluster import container
from dispatch_agent.errors import SettingsError
from dispatch_agent.settings import check_ranks, destination, unknown_variables

BESIDE = ("dispatch-init", "dispatch-publish")
REPORT = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), os.getpid()]))"
TRICKY = ["costs $5", "$$6", "$(POD_NAME)", "$(PUBLISH_ROOT)", "${HOME}", "two\nlines", "é", "", "*", "'\"\\"]


def pods(
    job: Mapping[str, Any], kind: str = "trainjob", *, admissions: int = 1, restarts: int = 0
) -> list[dict[str, Any]]:
    """The pods of an execution."""
    if kind == "pod":
        return render(changed(dict(job), restart=restarts), "--kind", "pod")
    if kind == "jobset":
        [job_set] = render(job, "--kind", "jobset")
    else:
        runtime, train_job = render(job)
        for _ in range(admissions):
            train_job["spec"]["suspend"] = True
            [train_job] = render(train_job, "--raise")
        job_set = cluster.job_set_of(runtime, train_job)
    return cluster.pods_of(cluster.job_of(job_set, restarts))


def run(started: Started, **more: str) -> Result:
    """The container's command, to its end, with its own environment alone."""
    words = [
        program(Path(started.words[0]).name) if "/bin/sh" not in started.words[0] else "/bin/sh",
        *started.words[1:],
    ]
    environ = {**started.environ, "PATH": os.environ["PATH"], **more}
    done = subprocess.run(words, env=environ, capture_output=True, check=False, timeout=60)
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


class TestTheTrainer:
    @pytest.mark.parametrize(
        ("kind", "counts", "epoch", "attempt"),
        [
            ("trainjob", {"admissions": 1, "restarts": 0}, "2000003000001", "3.4.1.0"),
            ("trainjob", {"admissions": 2, "restarts": 5}, "2000003000007", "3.4.2.5"),
            ("jobset", {"restarts": 0}, "2000003000001", "3.4.1.0"),
            ("jobset", {"restarts": 3}, "2000003000004", "3.4.1.3"),
            ("pod", {"restarts": 0}, "2000003000001", "3.4.1.0"),
            ("pod", {"restarts": 3}, "2000003000004", "3.4.1.3"),
        ],
    )
    def test_the_users_command_has_its_identity_words_and_folder(
        self, kind: str, counts: dict[str, int], epoch: str, attempt: str, tmp_path: Path
    ) -> None:
        job = changed(
            SEVERAL_NODES,
            nodes=1 if kind == "pod" else 2,
            command=[sys.executable, "-c", REPORT, *TRICKY],
            workdir=str(tmp_path),
            env={"NOTE": "$(HOME) and $$", "EMPTY": ""},
        )
        pod = pods(job, kind, **counts)[-1]
        words, environ, folder, _ = json.loads(run(cluster.started(pod, "node")).passes().out)
        assert words == TRICKY
        assert folder == str(tmp_path)
        assert environ["NOTE"] == "$(HOME) and $$"
        assert environ["EMPTY"] == ""
        assert environ["PUBLISH_ROOT"] == "/data/checkpoints"
        assert {name: value for name, value in environ.items() if name.startswith("DISPATCH_")} == {
            "DISPATCH_JOB_ID": JOB_ID,
            "DISPATCH_SUBMISSION": "3",
            "DISPATCH_EPOCH": epoch,
            "DISPATCH_ATTEMPT": f"{JOB_ID}.{attempt}",
        }

    def test_behind_the_installed_agent_too_with_a_mark_that_a_plain_sidecar_can_watch(self, tmp_path: Path) -> None:
        job = changed(
            PLAIN_SIDECAR,
            command=[sys.executable, "-c", REPORT, *TRICKY],
            workdir=str(tmp_path),
            checkpoints={"path": str(tmp_path / "root"), "claim": "c"},
        )
        pod = pods(job)[1]
        words, environ, folder, _ = json.loads(run(cluster.started(pod, "node")).passes().out)
        assert (words, folder) == (TRICKY, str(tmp_path))
        attempt = environ["DISPATCH_ATTEMPT"]
        assert attempt == f"{JOB_ID}.3.4.1.0"
        assert (tmp_path / "root" / "exec" / attempt / ".dispatch" / "started.1").exists()

    def test_the_script_is_not_changed_by_what_kubernetes_replaces(self) -> None:
        """Nor does it hold a reference to a variable that another job might set."""
        started = cluster.started(pods(SEVERAL_NODES)[0], "node")
        [train_job] = render(SEVERAL_NODES, "--kind", "trainjob")
        assert started.words[2] == train_job["spec"]["trainer"]["command"][2]
        assert "$(" not in started.words[2].replace("$((", "")

    def test_a_job_that_is_not_admitted_would_be_no_first_execution(self) -> None:
        """R begins with 1, so that A stays 0 only while nothing runs; the pod of a lost patch is refused."""
        pod = pods(changed(ONE_NODE, command=["true"]))[0]
        del pod["metadata"]["annotations"]["dispatch.phpboyscout.uk/admission"]
        refused = run(cluster.started(pod, "node"))
        assert refused.code == 125
        assert "admission or restart count missing" in refused.err


class TestThoseBeside:
    @pytest.mark.parametrize("job", [ONE_NODE, SEVERAL_NODES, PLAIN_SIDECAR], ids=["one", "several", "plain"])
    @pytest.mark.parametrize("kind", ["trainjob", "jobset"])
    def test_every_container_of_every_rank_has_the_identity_of_the_trainer(
        self, job: dict[str, Any], kind: str
    ) -> None:
        found = set()
        for pod in pods(job, kind, restarts=3):
            for name in ("node", *BESIDE):
                environ = cluster.started(pod, name, {"store": {"AWS_ACCESS_KEY_ID": "x"}}).environ
                identity = container.read_identity(environ)
                found.add((identity.job_id, identity.epoch, identity.attempt))
        assert len(found) == 1

    @pytest.mark.parametrize("name", BESIDE)
    def test_the_real_commands_take_what_they_are_given(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every setting is read by its command or the one beside it, and means what the description says."""
        pod = pods(SEVERAL_NODES)[11]
        started = cluster.started(pod, name)
        assert started.words[0] == "publish"
        for variable, value in started.environ.items():
            monkeypatch.setenv(variable, value)
        command = publish.commands[started.words[1]]
        with command.make_context(
            started.words[1], started.words[2:], parent=publish.make_context("publish", ["list"])
        ) as context:
            given = context.params
            assert unknown_variables(os.environ, known_variables()) == []
        expected = {
            "root": Path("/data/checkpoints"),
            "complete": "settle:5",
            "shared_volume": True,
            "drain_timeout": 60.0,
            "grace": 600.0,
            "listen": ":9464",
            "keep_local": 2,
        }
        shown = {key: value for key, value in expected.items() if key in given}
        assert len(shown) >= 3
        assert {key: given[key] for key in shown} == shown
        assert destination(given["dest"], os.environ) == "s3://checkpoints/train"
        assert os.environ["POD_NAME"] == "train-node-0-11-abcde"
        assert os.environ["AGENT_K8S_POD_UID"] == "uid-11"

    def test_of_several_nodes_one_publishes(self) -> None:
        roles = []
        for pod in pods(SEVERAL_NODES):
            environ = cluster.started(pod, "dispatch-publish").environ
            shared = environ.get("PUBLISH_SHARED_VOLUME") == "1"
            roles.append(check_ranks(container.read_rank(environ), container.read_nodes(environ), shared or None))
        assert roles == ["publish", *["stand by"] * 11]

    def test_several_nodes_in_a_runtime_without_a_shared_volume_publish_nothing(self) -> None:
        """Whoever pairs a TrainJob with another runtime than was rendered for it gets no half checkpoint."""
        [runtime] = render(changed(ONE_NODE, runtime={"name": "other"}), "--kind", "runtime")
        several = changed(ONE_NODE, nodes=2, checkpoints={"claim": "c"}, runtime={"name": "other"})
        [train_job] = render(several, "--kind", "trainjob", "--admitted")
        [pod, _] = cluster.pods_of(cluster.job_of(cluster.job_set_of(runtime, train_job), 0))
        environ = cluster.started(pod, "dispatch-publish").environ
        assert "PUBLISH_SHARED_VOLUME" not in environ
        with pytest.raises(SettingsError, match="this job has 2 nodes"):
            check_ranks(container.read_rank(environ), container.read_nodes(environ), None)

    def test_jobsets_later_counters_are_seen(self) -> None:
        [pod] = pods(ONE_NODE)
        pod["metadata"]["labels"]["jobset.sigs.k8s.io/job-restart-attempt"] = "2"
        pod["metadata"]["annotations"]["jobset.sigs.k8s.io/in-place-restart-attempt"] = "1"
        pod["metadata"]["annotations"]["jobset.sigs.k8s.io/execution-attempt"] = "5"
        for name in BESIDE:
            counters = container.read_counters(cluster.started(pod, name).environ)
            assert counters.seen == {"job_restart": 2, "in_place_restart": 1, "execution": 5}


def _start(started: Started, out: IO[bytes]) -> subprocess.Popen[bytes]:
    environ = {**started.environ, "PATH": os.environ["PATH"]}
    return subprocess.Popen([program(started.words[0]), *started.words[1:]], env=environ, stdout=out, stderr=out)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return 200 <= connection.getresponse().status < 400
    except ConnectionError:
        return False
    finally:
        connection.close()


TRAIN = """
import os, pathlib, subprocess
from dispatch_agent import complete, resume_path, save_dir
before = resume_path()
steps = (before / "steps").read_text().split() if before else []
save = save_dir() / f"step-{len(steps)}"
save.mkdir()
(save / "steps").write_text(" ".join([*steps, os.environ["DISPATCH_EPOCH"]]))
complete(save)
print(*steps)
"""


class TestAWholeJob:
    """Executions one after the other: init container, sidecar and trainer as rendered, on one claim, really run."""

    @pytest.fixture
    def job(self, tmp_path: Path) -> dict[str, Any]:
        root = tmp_path / "checkpoints"
        root.mkdir()
        return changed(
            ONE_NODE,
            command=[sys.executable, "-c", TRAIN],
            checkpoints={"path": str(root), "claim": "c"},
            publish={"dest": str(root / "published"), "rescan": 0.2},
        )

    @staticmethod
    def execution(pod: dict[str, Any], uid: str, log: Path) -> tuple[str, str]:
        """What the init container and the trainer of a pod print; in Kubernetes' order, probes and hook included."""
        pod["metadata"]["uid"] = uid
        init = run(cluster.started(pod, "dispatch-init")).passes()
        sidecar = cluster.started(pod, "dispatch-publish")
        [container] = (c for c in cluster.containers(pod) if c["name"] == "dispatch-publish")
        port = _free_port()
        sidecar.environ["PUBLISH_LISTEN"] = f"127.0.0.1:{port}"  # one machine runs many tests
        with log.open("wb") as out:
            watch = _start(sidecar, out)
            try:
                for probe in ("startupProbe", "livenessProbe"):
                    path = container[probe]["httpGet"]["path"]
                    eventually(lambda path=path: _answers(port, path), log.read_text)
                trained = run(cluster.started(pod, "node")).passes()
                eventually(lambda: _answers(port, container["readinessProbe"]["httpGet"]["path"]), log.read_text)
                hook = container["lifecycle"]["preStop"]["exec"]["command"]
                run(cluster.Started(hook, sidecar.environ)).passes()
                watch.send_signal(signal.SIGTERM)
                assert watch.wait(60) == 0, log.read_text()
            finally:
                watch.kill()
                watch.wait()
        return init.out.strip(), trained.out.strip()

    def test_each_execution_resumes_from_what_the_one_before_published(
        self, job: dict[str, Any], tmp_path: Path
    ) -> None:
        root = Path(job["checkpoints"]["path"])
        [first], [second] = pods(job, admissions=1), pods(job, admissions=2)
        assert self.execution(first, "a", tmp_path / "log") == ("", "")
        shutil.rmtree(root / "exec" / f"{JOB_ID}.1.1.1.0")  # from the store, not from what lies about
        resumed, steps = self.execution(second, "b", tmp_path / "log")
        assert resumed == str(root / "resume" / f"{JOB_ID}.1.1.2.0" / "step-0")
        assert steps == "1000001"
        [third] = pods(job, admissions=2, restarts=1)
        assert self.execution(third, "c", tmp_path / "log")[1] == "1000001 1000002"

    @pytest.mark.parametrize("command", [TRAIN, "import sys; sys.exit(7)"], ids=["well", "with 7"])
    def test_a_plain_sidecar_ends_by_itself_when_the_trainer_has(
        self, job: dict[str, Any], command: str, tmp_path: Path
    ) -> None:
        """Or the pod, of which it is a container like the trainer, would never end."""
        plain = changed(job, agent__install=True, agent__sidecar="plain", command=[sys.executable, "-c", command])
        [pod] = pods(plain)
        run(cluster.started(pod, "dispatch-init")).passes()
        sidecar = cluster.started(pod, "dispatch-publish")
        sidecar.environ["PUBLISH_LISTEN"] = f"127.0.0.1:{_free_port()}"
        log = tmp_path / "log"
        with log.open("wb") as out:
            watch = _start(sidecar, out)
            try:
                eventually(lambda: "claimed" in log.read_text(), log.read_text)
                trained = run(cluster.started(pod, "node"))
                assert watch.wait(60) == 0, log.read_text()
            finally:
                watch.kill()
                watch.wait()
        assert trained.code == (0 if command == TRAIN else 7)
        assert ("published save=step-0" in log.read_text()) is (command == TRAIN)

    def test_another_pod_under_the_same_identity_is_refused(self, job: dict[str, Any], tmp_path: Path) -> None:
        """As after a JobSet was rebuilt, or where Kueue started one again."""
        [pod] = pods(job)
        self.execution(pod, "a", tmp_path / "log")
        pod["metadata"]["uid"] = "b"
        refused = run(cluster.started(pod, "dispatch-init"))
        assert refused.code == 125
        assert "identity" in refused.err or "already" in refused.err

    def test_unless_that_is_allowed(self, job: dict[str, Any], tmp_path: Path) -> None:
        weakened = changed(job, allow_rank_restart=RANK_RESTART["allow_rank_restart"])
        [pod] = pods(weakened)
        self.execution(pod, "a", tmp_path / "log")
        pod["metadata"]["uid"] = "b"
        assert "identity weakened" in run(cluster.started(pod, "dispatch-init")).passes().err
