"""What the environment of a container says about its place in the cluster: identity, rank, nodes.

Pure functions over a mapping, for use cases that are not the prologue itself (sidecars, init containers, one-shots).
The identity comes from the prologue's own rules, so that every container of an execution gets the same answer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dispatch_agent import prologue
from dispatch_agent.errors import Refused, SettingsError
from dispatch_agent.identity import Identity, parse_attempt, parse_epoch, parse_job_id

# Ranks are five digits in store names.
MAX_RANK = 99_999

_RANKS = ("JOB_COMPLETION_INDEX", "SLURM_PROCID")
_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "PET_NNODES")
# Of a heterogeneous job, SLURM_NNODES counts the nodes of one component only.
_HET_NODES = re.compile(r"SLURM_JOB_NUM_NODES_HET_GROUP_[0-9]+")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
# torchrun takes `4`, or `2:4` for an elastic job.
_NODE_COUNT = re.compile(r"(?:[1-9][0-9]{0,8}:)?([1-9][0-9]{0,8})", re.ASCII)

# Ours, since only the dispatcher defines names that begin with DISPATCH_. Each is a reference to the pod's metadata.
_JOB_RESTART = "AGENT_K8S_JOB_RESTART"
_IN_PLACE_RESTART = "AGENT_K8S_IN_PLACE_RESTART"
_EXECUTION = "AGENT_K8S_EXECUTION"


@dataclass(frozen=True, slots=True)
class JobSetCounters:
    """JobSet's own later counters, None where they are not passed: reported only, they change no epoch and no attempt.

    `job_restart`: how often JobSet made this Job anew alone. `in_place_restart`: how often it restarted this pod's
    containers in place. Neither raises what the identity is made of. `execution`: JobSet's own count of executions.
    `weakened`: a sentence for each that says that another run may have had the same identity, or that cannot be read.
    """

    job_restart: int | None
    in_place_restart: int | None
    execution: int | None
    weakened: tuple[str, ...]

    @property
    def seen(self) -> dict[str, int]:
        """The counters that were passed, by name."""
        counts = {
            "job_restart": self.job_restart,
            "in_place_restart": self.in_place_restart,
            "execution": self.execution,
        }
        return {name: count for name, count in counts.items() if count is not None}


def read_identity(environ: Mapping[str, str]) -> Identity:
    """The identity of the execution this container belongs to, from raw counters or a finished pair.

    Raises Refused, with the prologue's own sentence, or for a DISPATCH_JOB_ID that is no job id.
    """
    try:
        launch = prologue.resolve({os.fsencode(name): os.fsencode(value) for name, value in environ.items()})
    except prologue.Refusal as refusal:
        raise Refused(str(refusal)) from None
    job_id = environ.get("DISPATCH_JOB_ID")
    return Identity(
        job_id=None if job_id is None else parse_job_id(job_id),
        epoch=parse_epoch(launch.epoch.decode("ascii")),
        attempt=parse_attempt(launch.attempt.decode("ascii")),
        source=launch.source,
    )


def read_rank(environ: Mapping[str, str]) -> int | None:
    """This container's rank, from JOB_COMPLETION_INDEX or SLURM_PROCID; None if neither is set.

    Raises SettingsError if one is not a number from 0 to 99,999, or if the two differ.
    """
    found: dict[str, int] = {}
    for name in _RANKS:
        if name not in environ:
            continue
        text = environ[name]
        if not _NUMBER.fullmatch(text) or int(text) > MAX_RANK:
            message = f"{name} is {text!r}, not a rank from 0 to {MAX_RANK}: give the rank with --rank"
            raise SettingsError(message)
        found[name] = int(text)
    if len(set(found.values())) > 1:
        seen = " and ".join(f"{name} is {rank}" for name, rank in found.items())
        message = f"{seen}: give the rank with --rank"
        raise SettingsError(message)
    return next(iter(found.values()), None)


def read_counters(environ: Mapping[str, str]) -> JobSetCounters:
    """JobSet's later counters from AGENT_K8S_JOB_RESTART, AGENT_K8S_IN_PLACE_RESTART and AGENT_K8S_EXECUTION.

    Empty is what the Downward API gives for a label or annotation that is not there. A value that is no count is said
    in `weakened` and raises nothing: what is only reported must not stop a publisher.
    """
    counts: dict[str, int | None] = {}
    weakened = []
    for name in (_JOB_RESTART, _IN_PLACE_RESTART, _EXECUTION):
        text = environ.get(name, "")
        counts[name] = int(text) if _NUMBER.fullmatch(text) else None
        if text and counts[name] is None:
            weakened.append(f"{name} is {text!r}, not a count, so whether this identity ran before cannot be told")
    if count := counts[_JOB_RESTART]:
        weakened.append(
            f"JobSet made this Job anew {count} time(s) without raising restart-attempt ({_JOB_RESTART}): another run "
            f"of this rank may have had the same epoch and attempt; let failures restart the whole JobSet"
        )
    if count := counts[_IN_PLACE_RESTART]:
        weakened.append(
            f"JobSet restarted this pod's containers {count} time(s) in place ({_IN_PLACE_RESTART}): each run had the "
            f"same epoch and attempt; use the restart strategy Recreate or BlockingRecreate"
        )
    return JobSetCounters(counts[_JOB_RESTART], counts[_IN_PLACE_RESTART], counts[_EXECUTION], tuple(weakened))


def read_nodes(environ: Mapping[str, str]) -> int | None:
    """How many nodes the environment shows, the greatest if it shows several counts; None if it shows none.

    The greatest, because it decides whether one rank may speak for all: taking a job of several nodes for a job of one
    would publish half a checkpoint. Raises SettingsError if a count is not a positive number.
    """
    counts = [_node_count(name, environ[name]) for name in _NODES if name in environ]
    components = [_node_count(name, value) for name, value in environ.items() if _HET_NODES.fullmatch(name)]
    if components:
        counts.append(sum(components))
    return max(counts, default=None)


def _node_count(name: str, text: str) -> int:
    match = _NODE_COUNT.fullmatch(text)
    if not match:
        message = f"{name} is {text!r}, not a number of nodes: correct or unset it"
        raise SettingsError(message)
    return int(match[1])
