"""A kubelet of one file: runs a pod's manifest with real containers, in the order that a real kubelet does it in.

What it keeps of Kubernetes: one network namespace a pod; init containers in order, the restartable ones (sidecars)
waited for by their startup probe; the containers of the pod; probes; sidecars restarted in place with environment made
anew; at the end preStop hooks of all at once, SIGTERM to the containers, then to the sidecars with what is left of the
grace period and two seconds at least, and SIGKILL after it. What it leaves out fails loudly: a field of `env`, a probe
or a volume that it does not know is an error.
"""

from __future__ import annotations

import http.client
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import docker
from docker.errors import APIError
from docker.models.containers import Container
from docker.types import Mount
from tests.manifests.cluster import started

Manifest = dict[str, Any]

BUSYBOX = "busybox:latest"
MINIMUM_GRACE = 2.0  # seconds that a container gets after SIGTERM, also when the grace period is used up
BACK_OFF = 0.5  # seconds before a sidecar is restarted; a real kubelet takes ten
PAUSE = 0.05  # seconds between two looks
LONGEST = 60.0  # seconds that anything here is waited for
MESSAGE_BYTES, FALLBACK_BYTES = 4096, 2048


@dataclass(frozen=True)
class Ended:
    """How one start of a container ended."""

    code: int
    oom_killed: bool
    message: str
    log: str


@dataclass(frozen=True)
class Event:
    """What a kubelet did or saw, in the order of time (`at`: monotonic seconds)."""

    at: float
    container: str
    what: str


def until(ready: Callable[[], object], what: Callable[[], str]) -> None:
    """Wait for `ready` to say something true."""
    deadline = time.monotonic() + LONGEST
    while not ready():
        assert time.monotonic() < deadline, f"not within {LONGEST:g} s: {what()}"
        time.sleep(PAUSE)


@dataclass(frozen=True)
class Node:
    """Where pods run: an engine, a network, what is in the cluster beside pods. `label` marks all that is made."""

    engine: docker.DockerClient
    network: str
    label: str
    scratch: Path
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        return {self.label: ""}

    def volume(self, *, size: str = "") -> str:
        """A new volume, which all pods may write to; with `size` (as 8m) one of memory that is full at that size."""
        options = {"type": "tmpfs", "device": "tmpfs", "o": f"size={size},mode=1777"} if size else {}
        volume = self.engine.volumes.create(f"{self.label}-{uuid4().hex[:8]}", driver_opts=options, labels=self.labels)
        return str(volume.name)

    def remove_all(self) -> None:
        """Every container, volume and network with the label."""
        chosen = {"label": self.label}
        for container in self.engine.containers.list(all=True, filters=chosen):
            with suppress(APIError):  # one that is being removed already
                container.remove(force=True, v=True)
        for volume in self.engine.volumes.list(filters=chosen):
            volume.remove(force=True)
        for network in self.engine.networks.list(filters=chosen):
            network.remove()


class Pod:
    """One pod on a node. `start` begins it in a thread of its own, the kubelet; `join` waits for its end.

    A persistentVolumeClaim's name is that of the node's volume.
    """

    def __init__(self, node: Node, manifest: Manifest) -> None:
        self.node = node
        self.metadata: Manifest = {"name": "pod", "namespace": "team-a", "uid": str(uuid4()), **manifest["metadata"]}
        self.spec: Manifest = manifest["spec"]
        self.events: list[Event] = []
        self.runs: dict[str, list[Container]] = {}
        self._volumes: dict[str, str] = {}
        self._own: list[str] = []
        self._unique = f"{node.label}-{uuid4().hex[:8]}"
        self._deleted = threading.Event()
        self._forced = threading.Event()
        self._frozen = threading.Event()
        self._grace = float(self.spec.get("terminationGracePeriodSeconds", 30))
        self._sandbox: Container | None = None
        self._error: BaseException | None = None
        self._health = {spec["name"]: _Health() for spec in self._all}
        self._kubelet = threading.Thread(target=self._run, name=self._unique)
        self.phase = "Pending"

    # What a test asks for.

    def start(self) -> Pod:
        """Begin; returns at once."""
        self._kubelet.start()
        return self

    def running(self, name: str = "node") -> Pod:
        """Wait until a container runs. Fails if the pod ends first."""
        until(lambda: self._is_running(name) or not self._kubelet.is_alive(), lambda: f"{name} runs: {self.story()}")
        assert self._is_running(name), self.story()
        return self

    def says(self, text: str, name: str = "node") -> Pod:
        """Wait until a container has said this. Fails if the pod ends without it."""
        until(
            lambda: text in self.log(name) or not self._kubelet.is_alive(),
            lambda: f"{name} says {text}: {self.story()}",
        )
        assert text in self.log(name), f"{name} never says {text!r}: {self.story()}"
        return self

    def join(self) -> Pod:
        """Wait for the pod's end, by itself or as it was told to."""
        self._kubelet.join(LONGEST)
        assert not self._kubelet.is_alive(), f"the pod does not end: {self.story()}"
        if self._error is not None:
            raise self._error
        return self

    def delete(self, *, grace: float | None = None, wait: bool = True) -> Pod:
        """`kubectl delete pod`: tell it to end within the grace period."""
        if grace is not None:
            self._grace = grace
        self._deleted.set()
        return self.join() if wait else self

    def force_delete(self) -> None:
        """The node is gone, or `--grace-period=0 --force`: everything is killed at once, nothing is told."""
        self._forced.set()
        self.delete()

    def restart_all_containers(self) -> None:
        """Kill all containers at once, and run the pod again from its first init container: same UID, same volumes."""
        self.force_delete()
        self._deleted.clear()
        self._forced.clear()
        self._health = {spec["name"]: _Health() for spec in self._all}
        self._grace = float(self.spec.get("terminationGracePeriodSeconds", 30))
        self._kubelet = threading.Thread(target=self._run, name=self._unique)
        self.start()

    def kill(self, name: str, signal: str = "SIGKILL") -> None:
        """A signal to the first process of a container, as from outside of it."""
        self.runs[name][-1].kill(signal)

    def freeze(self) -> None:
        """The node stands still: no process of the pod runs, and no kubelet looks."""
        self._frozen.set()
        for runs in self.runs.values():
            if _is_running(runs[-1]):
                runs[-1].pause()

    def thaw(self) -> None:
        for runs in self.runs.values():
            if _state(runs[-1])["Paused"]:
                runs[-1].unpause()
        self._frozen.clear()

    def throttle(self, name: str, share: float) -> None:
        """Let a container have this share of one core only; 0 for no limit."""
        self.runs[name][-1].update(cpu_period=100_000, cpu_quota=int(share * 100_000) or -1)

    def disconnect(self) -> None:
        """Out of the network: no address, no names."""
        self.node.engine.networks.get(self.node.network).disconnect(self._sandbox)

    def connect(self) -> None:
        self.node.engine.networks.get(self.node.network).connect(self._sandbox)

    @property
    def address(self) -> str:
        """The pod's IP address; empty while it is disconnected."""
        assert self._sandbox is not None
        return address(self._sandbox, self.node.network)

    def execute(self, name: str, *command: str) -> tuple[int, str]:
        """A command in a running container: exit code and output."""
        answer = self.runs[name][-1].exec_run(list(command))
        return answer.exit_code, answer.output.decode()

    def look(self, command: str) -> str:
        """A shell command's output where the pod's volumes are, each at /volumes/NAME."""
        assert self._sandbox is not None
        answer = self._sandbox.exec_run(["sh", "-c", f"cd /volumes && {command}"])
        assert answer.exit_code == 0, answer.output.decode()
        return str(answer.output.decode())

    def log(self, name: str) -> str:
        """What all starts of a container have said."""
        return "".join(_log(run) for run in self.runs.get(name, []))

    def ended(self, name: str, which: int = -1) -> Ended:
        """How a container ended; `which`: of its starts, the last if not said."""
        run = self.runs[name][which]
        state = _state(run)
        assert state["Status"] == "exited", f"{name} is {state['Status']}: {self.story()}"
        number = self.runs[name].index(run)
        message = self._message_file(name, number).read_bytes()[:MESSAGE_BYTES].decode()
        if not message and state["ExitCode"] and self._spec(name).get("terminationMessagePolicy"):
            message = _log(run)[-FALLBACK_BYTES:]
        return Ended(state["ExitCode"], state["OOMKilled"], message, _log(run))

    def code(self, name: str) -> int:
        """The exit code of a container's last start."""
        return self.ended(name).code

    def restarts(self, name: str) -> int:
        return len(self.runs.get(name, [])) - 1

    def is_ready(self, name: str) -> bool:
        """By the container's readiness probe, as seen last."""
        return self._health[name].ready

    def order(self, *events: tuple[str, str]) -> None:
        """Fails unless these (container, what) happened, in this order."""
        seen = [(event.container, event.what) for event in self.events]
        for event in events:
            assert event in seen, f"no {event}: {self.story()}"
        first = [seen.index(event) for event in events]
        assert first == sorted(first), f"another order: {self.story()}"

    def story(self) -> str:
        """All that is known of the pod, for a failed test."""
        began = self.events[0].at if self.events else 0.0
        told = [f"{event.at - began:7.2f} {event.container}: {event.what}" for event in self.events]
        logs = [f"--- {name}\n{self.log(name)}" for name in self.runs]
        return "\n".join(["", f"pod {self.metadata['name']}, {self.phase}, error {self._error!r}", *told, *logs])

    def remove(self) -> None:
        """End of a test: whatever the pod does, it is over, and nothing of it stays but its claims."""
        self.thaw()
        self._forced.set()
        self._deleted.set()
        self._kubelet.join(LONGEST)
        for run in [run for runs in self.runs.values() for run in runs]:
            run.remove(force=True, v=True)
        if self._sandbox is not None:
            self._sandbox.remove(force=True, v=True)
        for name in self._own:
            self.node.engine.volumes.get(name).remove(force=True)

    # The kubelet.

    @property
    def _init(self) -> list[Manifest]:
        return list(self.spec.get("initContainers", []))

    @property
    def _mains(self) -> list[Manifest]:
        return list(self.spec["containers"])

    @property
    def _all(self) -> list[Manifest]:
        return [*self._init, *self._mains]

    def _spec(self, name: str) -> Manifest:
        return next(spec for spec in self._all if spec["name"] == name)

    def _run(self) -> None:
        try:
            if self._sandbox is None:
                self._make_sandbox()
            self.phase = "Failed"
            if self._initialise():
                self.phase = "Running"
                for spec in self._mains:
                    self._start(spec)
                self._keep()
            self._terminate()
            if self.phase == "Running":
                codes = [_state(self.runs[spec["name"]][-1])["ExitCode"] for spec in self._mains]
                self.phase = "Failed" if any(codes) else "Succeeded"
        except BaseException as error:  # noqa: BLE001 (`join` raises it in the test)
            self._error = error

    def _initialise(self) -> bool:
        """Whether the pod's containers may start."""
        for spec in self._init:
            name = spec["name"]
            self._start(spec)
            if spec.get("restartPolicy") == "Always":
                while not self._health[name].started and not self._deleted.is_set():
                    self._look_after(spec)
                    time.sleep(PAUSE)
            else:
                until(lambda name=name: not self._is_running(name) or self._deleted.is_set(), self.story)
                if self._is_running(name) or _state(self.runs[name][-1])["ExitCode"]:
                    return False
            if self._deleted.is_set():
                return False
        return True

    def _keep(self) -> None:
        """Look after the pod until its containers have ended or it is deleted."""
        sidecars = [spec for spec in self._init if spec.get("restartPolicy") == "Always"]
        while not self._deleted.is_set():
            if not self._frozen.is_set():
                for spec in self._mains:
                    self._probe(spec)
                if not any(self._is_running(spec["name"]) for spec in self._mains):
                    return
                for spec in sidecars:
                    self._look_after(spec)
            self._deleted.wait(PAUSE)

    def _look_after(self, spec: Manifest) -> None:
        """Probe a sidecar; start it again where it has ended or is not alive."""
        name = spec["name"]
        if not self._is_running(name):
            self._deleted.wait(BACK_OFF)
            self._say(name, "restarted")
            self._start(spec)
        elif self._probe(spec) == "kill":
            self._say(name, "unhealthy")
            self._stop(spec, time.monotonic() + self._grace, [])

    def _start(self, spec: Manifest) -> None:
        name = spec["name"]
        runs = self.runs.setdefault(name, [])
        words = started({"metadata": self.metadata, "spec": self.spec}, name, self.node.secrets)
        message = self._message_file(name, len(runs))
        message.touch()
        message.chmod(0o666)
        mounts = [self._mount(mount) for mount in spec.get("volumeMounts", [])]
        where = spec.get("terminationMessagePath", "/dev/termination-log")
        mounts.append(Mount(where, str(message), type="bind"))
        limits = spec.get("resources", {}).get("limits", {})
        memory = _bytes(limits["memory"]) if "memory" in limits else None
        self._health[name] = _Health()
        container = self.node.engine.containers.create(
            spec["image"],
            entrypoint=words.words,
            name=f"{self._unique}-{name}-{len(runs)}",
            environment=[f"{key}={value}" for key, value in words.environ.items()],
            labels=self.node.labels,
            healthcheck={"test": ["NONE"]},  # Kubernetes does not look at the image's
            mem_limit=memory,
            memswap_limit=memory,
            mounts=mounts,
            network_mode=f"container:{self._sandbox.id}" if self._sandbox else None,
            working_dir=spec.get("workingDir"),
            **self._security(spec),
        )
        runs.append(container)
        container.start()
        self._say(name, "started")

    def _security(self, spec: Manifest) -> dict[str, Any]:
        """What is asked for in `securityContext`, the container's before the pod's."""
        asked = {**self.spec.get("securityContext", {}), **spec.get("securityContext", {})}
        capabilities = asked.get("capabilities", {})
        user, group = asked.get("runAsUser"), asked.get("runAsGroup")
        if asked.get("runAsNonRoot"):
            image = self.node.engine.images.get(spec["image"]).attrs["Config"]["User"]
            who = str(user) if user is not None else image.partition(":")[0]
            assert who.isdigit(), f"runAsNonRoot, and the image's user {who!r} is no number: {spec['image']}"
            assert int(who), f"runAsNonRoot, and {spec['image']} would run as root"
        return {
            "user": None if user is None else f"{user}:{group or 0}",
            "group_add": [str(asked["fsGroup"])] if "fsGroup" in asked else None,
            "read_only": asked.get("readOnlyRootFilesystem", False),
            "cap_drop": capabilities.get("drop"),
            "cap_add": capabilities.get("add"),
            "security_opt": ["no-new-privileges"] if asked.get("allowPrivilegeEscalation") is False else None,
        }

    def _mount(self, mount: Manifest) -> Mount:
        assert "subPath" not in mount, "this kubelet knows no subPath"
        return Mount(mount["mountPath"], self._volumes[mount["name"]], read_only=mount.get("readOnly", False))

    def _make_sandbox(self) -> None:
        """The container that holds the pod's network and its volumes for as long as the pod is there."""
        for volume in self.spec.get("volumes", []):
            self._volumes[volume["name"]] = self._volume(volume)
        mounts = [Mount(f"/volumes/{name}", volume) for name, volume in self._volumes.items()]
        self._sandbox = self.node.engine.containers.run(
            BUSYBOX,
            ["sleep", "3600"],
            name=f"{self._unique}-sandbox",
            hostname=self.spec.get("hostname", self.metadata["name"])[:63],
            detach=True,
            labels=self.node.labels,
            mounts=mounts,
            network=self.node.network,
        )
        self._sandbox.reload()
        group = self.spec.get("securityContext", {}).get("fsGroup", 0)
        for name in self._volumes:
            self.look(f"chgrp {group} {name}; chmod 2777 {name}")

    def _volume(self, volume: Manifest) -> str:
        if "persistentVolumeClaim" in volume:
            return str(volume["persistentVolumeClaim"]["claimName"])
        assert "emptyDir" in volume, f"this kubelet knows no volume such as {volume}"
        made = self.node.volume()
        self._own.append(made)
        return made

    def _message_file(self, name: str, number: int) -> Path:
        return self.node.scratch / f"{self._unique}-{name}-{number}"

    # Probes.

    def _probe(self, spec: Manifest) -> str:
        """One look at a container's probes, each no more often than it asks for: "kill" where it must be."""
        name = spec["name"]
        health = self._health[name]
        if not self._is_running(name):
            return ""
        if not health.started:
            probe = spec.get("startupProbe")
            verdict = health.judge("startup", probe, lambda probe: self._ask(spec, probe)) if probe else True
            if verdict is None:
                return ""
            if not verdict:
                return "kill"
            health.started = True
            health.ready = "readinessProbe" not in spec
            self._say(name, "has started")
        if health.judge("liveness", spec.get("livenessProbe"), lambda probe: self._ask(spec, probe)) is False:
            return "kill"
        ready = health.judge("readiness", spec.get("readinessProbe"), lambda probe: self._ask(spec, probe))
        if ready is not None and ready != health.ready:
            health.ready = ready
            self._say(name, "ready" if ready else "not ready")
        return ""

    def _ask(self, spec: Manifest, probe: Manifest) -> bool:
        patience = float(probe.get("timeoutSeconds", 1))
        if "exec" in probe:
            with suppress(APIError):  # of a container that has just ended
                return self.execute(spec["name"], *probe["exec"]["command"])[0] == 0
            return False
        wanted = probe["httpGet"]
        port = wanted["port"]
        if not isinstance(port, int):
            port = next(known["containerPort"] for known in spec["ports"] if known["name"] == port)
        return get(self.address, port, wanted.get("path", "/"), patience=patience)[0] in range(200, 400)

    # The end.

    def _terminate(self) -> None:
        """Hooks of all at once; SIGTERM to all but sidecars; a sidecar waits for those, and for the later sidecars."""
        while self._frozen.is_set():
            time.sleep(PAUSE)
        if self._forced.is_set():
            for runs in self.runs.values():
                _kill(runs[-1])
        deadline = time.monotonic() + self._grace
        running = [spec for spec in self._all if self._is_running(spec["name"])]
        first = [spec for spec in running if spec.get("restartPolicy") != "Always"]
        sidecars = [spec for spec in reversed(running) if spec not in first]
        threads = [threading.Thread(target=self._stop, args=(spec, deadline, [])) for spec in first]
        for spec in sidecars:
            threads.append(threading.Thread(target=self._stop, args=(spec, deadline, list(threads))))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _stop(self, spec: Manifest, deadline: float, others: list[threading.Thread]) -> None:
        name, run = spec["name"], self.runs[spec["name"]][-1]
        hook = spec.get("lifecycle", {}).get("preStop")
        if hook:
            with suppress(APIError):
                code, _ = self.execute(name, *hook["exec"]["command"])
                self._say(name, f"preStop {code}")
        for other in others:
            other.join()
        self._say(name, "SIGTERM")
        with suppress(APIError):  # it has ended meanwhile
            run.kill(self.node.engine.images.get(spec["image"]).attrs["Config"].get("StopSignal") or "SIGTERM")
        last = max(deadline, time.monotonic() + MINIMUM_GRACE)
        while _is_running(run):
            if time.monotonic() >= last and not self._forced.is_set():
                self._say(name, "SIGKILL")
                _kill(run)
            elif self._forced.is_set():
                _kill(run)
            time.sleep(PAUSE)
        self._say(name, "ended")

    def _is_running(self, name: str) -> bool:
        return bool(self.runs.get(name)) and _is_running(self.runs[name][-1])

    def _say(self, name: str, what: str) -> None:
        self.events.append(Event(time.monotonic(), name, what))


@dataclass
class _Health:
    """What a container's probes have said.

    They are asked more often than their period, since tests wait for them. A startup or a liveness probe fails after as
    long as its threshold and its period say; readiness follows every answer.
    """

    started: bool = False
    ready: bool = False
    looked: dict[str, float] = field(default_factory=dict)
    failing_since: dict[str, float] = field(default_factory=dict)

    def judge(self, kind: str, probe: Manifest | None, ask: Callable[[Manifest], bool]) -> bool | None:
        """True: good. False: bad. None: nothing to say yet."""
        now = time.monotonic()
        pace = 1.0 if probe and "exec" in probe else 0.1  # a process for every answer
        if probe is None or now - self.looked.get(kind, 0.0) < pace:
            return None
        self.looked[kind] = now
        if ask(probe):
            self.failing_since.pop(kind, None)
            return True
        since = self.failing_since.setdefault(kind, now)
        allowed = probe.get("failureThreshold", 3) * probe.get("periodSeconds", 10)
        return False if kind == "readiness" or now - since > allowed else None


def get(host: str, port: int, path: str, *, patience: float = 2.0) -> tuple[int, str]:
    """An HTTP answer's status and body; 0 where there is none."""
    connection = http.client.HTTPConnection(host, port, timeout=patience)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


def address(container: Container, network: str) -> str:
    """A container's IP address in a network; empty where it is not in it."""
    container.reload()
    return str(container.attrs["NetworkSettings"]["Networks"].get(network, {}).get("IPAddress", ""))


def _state(run: Container) -> dict[str, Any]:
    run.reload()
    state: dict[str, Any] = run.attrs["State"]
    return state


def _is_running(run: Container) -> bool:
    return bool(_state(run)["Running"])


def _kill(run: Container) -> None:
    with suppress(APIError):  # it does not run
        run.kill()


def _log(run: Container) -> str:
    return bytes(run.logs()).decode(errors="replace")


def _bytes(quantity: str) -> int:
    """A Kubernetes quantity of bytes."""
    units = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
    number = quantity.rstrip("KMGTi")
    return int(number) * units[quantity[len(number) :]]


@contextmanager
def black_hole(one: str, other: str) -> Iterator[None]:
    """Every packet between two addresses is lost, as in a broken network: no answer, no refusal. Needs root."""
    rules = [["-s", source, "-d", destination, "-j", "DROP"] for source, destination in ((one, other), (other, one))]
    made = []
    try:
        for rule in rules:
            subprocess.run(["iptables", "-w", "-I", "DOCKER-USER", *rule], check=True)
            made.append(rule)
        yield
    finally:
        for rule in made:
            subprocess.run(["iptables", "-w", "-D", "DOCKER-USER", *rule], check=True)
