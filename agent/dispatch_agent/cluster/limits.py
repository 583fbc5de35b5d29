"""What Trainer, JobSet, Kubernetes or our publisher would refuse, or silently do otherwise, said before rendering."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

from dispatch_agent.cluster.description import Job, quantity, refuse
from dispatch_agent.cluster.pod import AGENT_FOLDER
from dispatch_agent.errors import SettingsError

Kind = Literal["runtime", "trainjob", "jobset", "pod", "sbatch"]

# Of Trainer's CRDs; of the length of an item the smallest of the supported releases.
MAX_ITEMS = 128
PROLOGUE_ITEMS = 4  # /bin/sh -c SCRIPT dispatch-prologue
MAX_ITEM_LENGTH = 65_536
MAX_STRING = 131_071  # bytes that Linux takes as one argument or variable
_OUR_ENV = 7
_LABEL_LENGTH = 63
_POD_SUFFIX = "-abcde"

# Containers have these from render, the Job controller or Trainer.
_RESERVED = re.compile(
    r"DISPATCH_.*|PET_.*|AGENT_K8S_.*|JOB_COMPLETION_INDEX|POD_NAME|PUBLISH_ROOT|AGENT_HOLD|AGENT_ALLOW_RANK_RESTART"
)
_STARTERS = frozenset({"mpirun", "mpiexec", "orterun", "prterun", "flux"})
# Mounting there hides what the container itself needs.
_SYSTEM = frozenset(
    {"/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/root", "/run", "/sbin", "/sys", "/usr"}
)


def check(job: Job, kind: Kind) -> None:
    """Raises SettingsError for the first thing that this kind of manifest cannot have."""
    for rule in _RULES[kind]:
        rule(job)


def _trainer_command(job: Job) -> None:
    room = MAX_ITEMS - PROLOGUE_ITEMS
    if len(job.command) > room:
        refuse(
            "command",
            f"{len(job.command)} items long",
            f"write {room} at most, which leaves room for the prologue in Trainer's {MAX_ITEMS}: move arguments into "
            f"a file or a script",
        )
    for number, word in enumerate(job.command):
        length = len(word.replace("$", "$$"))
        if length > MAX_ITEM_LENGTH:
            refuse(
                f"command[{number}]",
                f"{length} characters long, each $ counted twice",
                f"write {MAX_ITEM_LENGTH} at most, which is Trainer's limit: move it into a file",
            )
    if job.command[:2] == ("tune", "run"):
        refuse(
            "command",
            "tune run ...",
            "start the recipe with torchrun: Trainer fills in torchtune's own command only where nothing stands "
            "before it, and here the prologue does",
        )


def _strings(job: Job) -> None:
    strings = {f"command[{number}]": word for number, word in enumerate(job.command)}
    strings |= {f"env.{name}": f"{name}={value}" for name, value in job.env.items()}
    for key, string in strings.items():
        length = len(string.encode("utf-8", "surrogateescape"))
        if length > MAX_STRING:
            refuse(
                key, f"{length} bytes long", f"write {MAX_STRING} at most, which is Linux's limit: move it into a file"
            )


def _starter(job: Job) -> None:
    program = job.command[0].rpartition("/")[2]
    if job.nodes > 1 and program in _STARTERS:
        refuse(
            "command[0]",
            job.command[0],
            "start the ranks with torchrun, or use one node: ranks that it starts on other nodes run without the "
            "prologue, and so without an identity",
        )


def _trainer_env(job: Job) -> None:
    ours = _OUR_ENV if job.workdir else _OUR_ENV - 1
    if len(job.env) > MAX_ITEMS - ours:
        refuse("env", f"{len(job.env)} variables", f"write {MAX_ITEMS - ours} at most: {ours} of {MAX_ITEMS} are ours")
    beside = len(job.publish) + len(job.agent.env)
    if beside > MAX_ITEMS - _OUR_ENV:
        refuse("publish and agent.env", f"{beside} variables", f"write {MAX_ITEMS - _OUR_ENV} at most")


def _env(job: Job) -> None:
    for key, variables in (("env", job.env), ("agent.env", job.agent.env)):
        for name, value in variables.items():
            if _RESERVED.fullmatch(name):
                refuse(f"{key}.{name}", value, "leave it out: the name is reserved for what render or the cluster sets")
    for name, value in job.agent.env.items():
        if name.startswith(("PUBLISH_", "AGENT_")):
            refuse(f"agent.env.{name}", value, "give settings of the publisher under publish, by their options' names")


def _job_name(job: Job) -> None:
    """The longest name made from it is that of the last rank's pod."""
    if not job.name[0].isalpha():
        refuse("name", job.name, "begin with a letter: Services are named after it")
    made = f"-node-0-{job.nodes - 1}{_POD_SUFFIX}"
    if len(job.name) + len(made) > _LABEL_LENGTH:
        refuse(
            "name",
            job.name,
            f"write {_LABEL_LENGTH - len(made)} characters at most for {job.nodes} node(s): pods are named "
            f"NAME{made}, of {_LABEL_LENGTH} characters at most",
        )


def _pod_name(job: Job) -> None:
    made = f"-{job.restart}"
    if len(job.name) + len(made) > _LABEL_LENGTH:
        refuse("name", job.name, f"write {_LABEL_LENGTH - len(made)} characters at most: the pod is NAME{made}")
    if job.nodes > 1:
        refuse("nodes", job.nodes, "write 1: a Pod is one node; a TrainJob or a JobSet has several")


def _pod_sidecar(job: Job) -> None:
    if job.agent.sidecar == "plain":
        refuse(
            "agent.sidecar",
            "plain",
            "write native, or render a JobSet: the lock by which a plain sidecar sees the trainer's end comes with "
            "counters, and a Pod has a finished identity",
        )


def _images(job: Job) -> None:
    for key, image in (("image", job.image), ("agent.image", job.agent.image)):
        if image is None:
            message = f"{key} is missing: name the image that the nodes of the cluster can pull"
            raise SettingsError(message)


def _volume(job: Job) -> None:
    if job.nodes > 1 and not job.checkpoints.claim:
        refuse(
            "nodes",
            job.nodes,
            "name a claim that all of them can write (ReadWriteMany) under checkpoints.claim: without one each node "
            "has a volume of its own, and publishing parts from several volumes is not in this version",
        )
    if not job.checkpoints.claim and not job.checkpoints.size:
        message = (
            "checkpoints has neither claim nor size: name an existing PersistentVolumeClaim, or give the size of a "
            "volume that goes with the pod, such as 200Gi"
        )
        raise SettingsError(message)


def _destination(job: Job) -> None:
    if job.dest.startswith(("memory:", "file:")):
        refuse("publish.dest", job.dest, "write a URL such as s3://bucket/prefix, or a folder without file://")
    if "://" in job.dest:
        return
    if not job.dest.startswith("/"):
        refuse("publish.dest", job.dest, "write a URL such as s3://bucket/prefix, or an absolute folder")
    if not job.checkpoints.claim or not _is_below(job.dest, job.checkpoints.path):
        refuse(
            "publish.dest",
            job.dest,
            "write a URL such as s3://bucket/prefix, or a folder below checkpoints.path on a claim: every other folder "
            "goes with the pod",
        )
    _outside_executions(job)


def _outside_executions(job: Job) -> None:
    for part in ("exec", "resume"):
        if _is_below(job.dest, f"{job.checkpoints.path}/{part}"):
            refuse(
                "publish.dest", job.dest, f"choose a folder outside {job.checkpoints.path}/{part}: saves are read there"
            )


def _mounts(job: Job) -> None:
    mounts = {"checkpoints.path": job.checkpoints.path}
    if job.agent.install:
        mounts["the agent's programs"] = AGENT_FOLDER
    if job.credentials and job.credentials.mount:
        mounts["credentials.mount"] = job.credentials.mount
    for key, path in mounts.items():
        if path in _SYSTEM or path in {"/opt/dispatch-agent", "/opt"}:
            refuse(key, path, "choose a folder of its own, such as /checkpoints: this one hides what a container needs")
        for other, there in mounts.items():
            if key != other and _is_below(path, there):
                refuse(key, path, f"choose a folder outside {there}, where {other} is mounted")
    if job.workdir and job.workdir != job.checkpoints.path and _is_below(job.workdir, job.checkpoints.path):
        refuse("workdir", job.workdir, f"choose a folder outside {job.checkpoints.path}: the volume hides the image's")


def _grace(job: Job) -> None:
    drain = float(job.publish.get("PUBLISH_DRAIN_TIMEOUT", 0))
    if drain >= job.grace:
        refuse(
            "grace",
            job.grace,
            f"give more seconds than publish.drain_timeout, {drain:g}: the trainer ends first, in the same period",
        )


def _sidecar(job: Job) -> None:
    if job.agent.sidecar == "plain" and not job.agent.install:
        refuse(
            "agent.install",
            False,
            "write true: a plain sidecar sees the trainer's end by a lock that the installed agent holds for it",
        )


def _memory(job: Job) -> None:
    memory = job.agent.resources.limits.get("memory")
    if memory and quantity(memory) < 160 * 2**20:
        refuse("agent.resources.limits.memory", memory, "give 160Mi or more: the publisher's own peak")


def _no_restart(job: Job) -> None:
    if job.restart:
        refuse("restart", job.restart, "leave it out: it counts plain Pods; here the cluster counts")


def _queue_needs_a_raise(job: Job) -> None:
    if job.queue and not job.allow_rank_restart:
        refuse(
            "queue",
            job.queue,
            "leave it out: Kueue starts a preempted job again by itself and nobody raises its admission count, so two "
            "executions would have one identity; have the dispatcher admit a TrainJob (without --admitted), or accept "
            "a weakened identity with allow_rank_restart: true",
        )


def admitted(job: Job) -> None:
    """Whether a TrainJob may be rendered with its first admission. Raises SettingsError."""
    _queue_needs_a_raise(job)


def _batch(job: Job) -> None:
    of_kubernetes = (
        ("queue", job.queue),
        ("image", job.image),
        ("agent.image", job.agent.image),
        ("checkpoints.claim", job.checkpoints.claim),
        ("checkpoints.size", job.checkpoints.size),
        ("credentials.secret", job.credentials.secret if job.credentials else None),
        ("service_account", job.service_account),
        ("namespace", job.namespace),
        ("resources", dict(job.resources.limits or job.resources.requests) or None),
    )
    if seen := [f"{key} is {value!r}" for key, value in of_kubernetes if value is not None]:
        message = f"{', '.join(seen)}: leave out what is Kubernetes', and ask for nodes and their devices under sbatch"
        raise SettingsError(message)
    if "://" not in job.dest and not job.dest.startswith("/"):
        refuse("publish.dest", job.dest, "write a URL such as s3://bucket/prefix, or an absolute folder")
    _outside_executions(job)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


_POD_RULES: tuple[Callable[[Job], None], ...] = (
    _images,
    _env,
    _strings,
    _starter,
    _volume,
    _destination,
    _mounts,
    _grace,
    _sidecar,
    _memory,
)
_RULES: Mapping[Kind, tuple[Callable[[Job], None], ...]] = {
    "runtime": (*_POD_RULES, _no_restart),
    "trainjob": (*_POD_RULES, _trainer_command, _trainer_env, _job_name, _no_restart),
    "jobset": (*_POD_RULES, _job_name, _no_restart, _queue_needs_a_raise),
    "pod": (*_POD_RULES, _pod_name, _pod_sidecar),
    "sbatch": (_env, _strings, _batch, _grace, _no_restart),
}
