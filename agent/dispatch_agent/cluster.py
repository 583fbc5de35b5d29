"""What the environment of a container says about its place in the cluster: identity, rank, nodes.

Pure functions over a mapping, for use cases that are not the prologue itself (sidecars, init containers, one-shots).
The identity comes from the prologue's own rules, so that every container of an execution gets the same answer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

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
