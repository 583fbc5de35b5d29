"""What a container can say of itself: which capabilities it has, and what would go wrong for the agent in it."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from dispatch_agent import prologue
from dispatch_agent.cluster import container
from dispatch_agent.errors import AgentError
from dispatch_agent.support import Capability, Support

_WORKDIR = "DISPATCH_K8S_WORKDIR"
_PROCS = ("PET_NPROC_PER_NODE", "SLURM_NTASKS_PER_NODE")
# A watch was measured to stay below it (README).
_MEMORY_OF_WATCH = 160 << 20
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_EARLIEST = 1_735_689_600  # 2025
_PROBE = 'printf "%s %s" "$DISPATCH_EPOCH" "$DISPATCH_ATTEMPT"'

_OF_A_JOB = ("DISPATCH_", "SLURM_JOB_ID", "JOB_COMPLETION_INDEX")
_LINKS = ("_SERVICE_HOST", "_SERVICE_PORT")

_NOT_OURS: dict[Capability, str] = {
    "ContainerImage": "a container has its image, and cannot see who named it",
    "NativeRequeue": "Slurm's --requeue, JobSet's maxRestarts: a rule of the scheduler, not seen from here",
    "NativeRestart": "a rule of the scheduler, not seen from here",
    "Hold": "the adapter's own, not seen from here",
    "AccountingHistory": "Slurm's accounting, or what is left of a TrainJob: not seen from here",
    "ReadmissionGate": "only Kubeflow with Kueue needs one, and it stands before a pod is there",
    "OutputRead": "kubectl logs, or a file of the batch script: read from outside",
    "OutputFollow": "kubectl logs -f, or a file of the batch script: read from outside",
    "OutputRetained": "a pod's output goes with the pod, unless something collects it outside",
}


def capabilities(environ: Mapping[str, str], script: str, signal: Support, pid: int) -> dict[Capability, Support]:
    """All that a container can be asked. `signal`: the answer of `process.hears`, or of `process.judge`."""
    found: dict[Capability, Support] = {
        capability: Support("unknown", "catalogue", reason) for capability, reason in _NOT_OURS.items()
    }
    found["PreTerminationSignal"] = signal
    found["AttemptInjection"] = attempt_injection(environ)
    found["WorkingDirectory"] = working_directory(environ, script)
    found["ProcsPerNode"] = procs_per_node(environ)
    found["OutputPath"] = output_path(pid)
    return found


def attempt_injection(environ: Mapping[str, str]) -> Support:
    """Whether this environment gives an identity, by the prologue's rules, and from what."""
    try:
        identity = container.read_identity(environ)
    except AgentError as error:
        if not any(name.startswith(_OF_A_JOB) and not name.endswith(_LINKS) for name in environ):
            return Support("unknown", "probed", "neither counters nor a pair are set here: ask in a job's container")
        return Support("no", "probed", str(error))
    missing = [name for name in ("DISPATCH_JOB_ID", "DISPATCH_SUBMISSION") if not environ.get(name)]
    if missing:
        return Support("no", "probed", f"unset, but every rank is to see all four: {', '.join(missing)}")
    says = f"{identity.source}: epoch {identity.epoch}, attempt {identity.attempt}"
    weakened = container.read_counters(environ).weakened
    return Support("yes", "probed", "; ".join([says, *(f"identity weakened: {reason}" for reason in weakened)]))


def working_directory(environ: Mapping[str, str], script: str) -> Support:
    """Whether the folder that was asked for is there, and /bin/sh can run the prologue that enters it."""
    folder = environ.get(_WORKDIR, "")
    if wrong := shell_is_unfit(script):
        return Support("no", "probed", wrong)
    if not folder:
        return Support("yes", "probed", f"none was asked for ({_WORKDIR}); /bin/sh runs the prologue, which enters one")
    try:
        is_folder = stat.S_ISDIR(os.stat(folder).st_mode)
    except OSError as error:
        return Support("no", "probed", f"{_WORKDIR} is {folder!r}: {error.strerror}; the prologue exits 125")
    if not is_folder or not os.access(folder, os.X_OK):
        why = "this user may not enter it" if is_folder else "it is no folder"
        return Support("no", "probed", f"{_WORKDIR} is {folder!r}: {why}; the prologue exits 125")
    return Support("yes", "probed", f"{folder} can be entered, and /bin/sh runs the prologue")


def shell_is_unfit(script: str, shell: str = "/bin/sh") -> str:
    """Why the prologue does not run under this shell, or nothing. One run of it; `prologue test` makes all of them."""
    counters = {"ADMISSION": "1", "RESTART": "2", "EPOCH_PREFIX": "3", "TOKEN_PREFIX": "t"}
    try:
        answer = subprocess.run(
            [shell, "-c", script, "dispatch-prologue", shell, "-c", _PROBE],
            env={f"DISPATCH_K8S_{name}": value for name, value in counters.items()} | {_WORKDIR: "/"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{shell} cannot run the prologue ({error}): use `dispatch-agent exec`, installed into the container"
    if answer.stdout != b"3000003 t.1.2":
        said = (answer.stderr or answer.stdout).decode(errors="replace").strip() or f"exit code {answer.returncode}"
        return f"{shell} runs the prologue wrongly ({said[:200]}): see `dispatch-agent prologue test`"
    return ""


def procs_per_node(environ: Mapping[str, str]) -> Support:
    for name in _PROCS:
        if value := environ.get(name):
            if value.isascii() and value.isdecimal() and int(value[:9]) > 0:
                return Support("yes", "probed", f"{name} is {value}")
            return Support("unknown", "probed", f"{name} is {value}: whoever starts the ranks decides")
    return Support("unknown", "catalogue", f"neither {' nor '.join(_PROCS)} is set: the job's own command decides")


def output_path(pid: int) -> Support:
    """Whether the output of the command goes where somebody said: into a file, and not to whoever started it."""
    try:
        path = os.readlink(f"/proc/{pid}/fd/1")
        is_file = stat.S_ISREG(os.stat(f"/proc/{pid}/fd/1").st_mode)
    except OSError as error:
        return Support("unknown", "catalogue", f"where process {pid} writes cannot be seen: {error.strerror}")
    if is_file:
        return Support("yes", "probed", f"process {pid} writes to {path}")
    return Support("unknown", "probed", f"process {pid} writes to {path}: whoever started it decides where that goes")


def problems(environ: Mapping[str, str], *, now: float) -> Iterator[str]:
    """What will certainly go wrong for the agent in this container, each with what to do."""
    yield from _root(environ)
    yield from _links(environ)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_CLOEXEC)
    if descriptor < 0:
        reason = os.strerror(ctypes.get_errno())
        yield f"no inotify ({reason}): the watch looks every --rescan seconds; raise fs.inotify.max_user_instances"
    else:
        os.close(descriptor)
    if now < _EARLIEST:
        yield f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now))}: stores refuse signed requests; set it"
    limit = memory_limit()
    if limit is not None and limit < _MEMORY_OF_WATCH:
        yield f"the memory limit is {limit >> 20} MiB: a watch takes up to {_MEMORY_OF_WATCH >> 20} MiB; raise it"


def memory_limit(groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this container may use; None without a limit."""
    for name in _LIMITS:
        try:
            text = (groups / name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < 1 << 60:  # cgroup v1 says none by a huge number
            return int(text)
    return None


def _root(environ: Mapping[str, str]) -> Iterator[str]:
    root = environ.get("PUBLISH_ROOT", "")
    if not root:
        return
    user = os.geteuid()
    folders = [Path(root), Path(root, "exec")]
    if not os.path.isdir(root):  # unlike Path.is_dir, it raises nothing where this user may not look
        yield f"PUBLISH_ROOT is {root!r}, which is no folder that user {user} can see: mount the volume there"
        return
    try:
        launch = prologue.resolve({os.fsencode(name): os.fsencode(value) for name, value in environ.items()})
        folders.append(folders[1] / os.fsdecode(launch.attempt))
    except prologue.Refusal:  # said by the answer on attempt injection
        pass
    for folder in folders:
        if os.path.isdir(folder) and not os.access(folder, os.W_OK | os.X_OK):
            owner = folder.stat()
            yield (
                f"{folder} cannot be written by user {user}: it belongs to {owner.st_uid}:{owner.st_gid}, mode "
                f"{stat.S_IMODE(owner.st_mode):o}; give all containers of the pod one user, or a common fsGroup"
            )


def _links(environ: Mapping[str, str]) -> Iterator[str]:
    """Of a Service that is called like us."""
    found = sorted(
        name for name in environ if name.startswith(("DISPATCH_", "PUBLISH_", "AGENT_")) and name.endswith(_LINKS)
    )
    if found:
        yield f"{', '.join(found)}: links of a Service, no settings of ours; set enableServiceLinks: false"
