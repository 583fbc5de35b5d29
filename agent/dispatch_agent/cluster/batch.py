"""The batch script for Slurm: before the trainer what `publish init` does, beside it `publish watch`, one per job."""

from __future__ import annotations

import shlex

from dispatch_agent.cluster.description import Job

_BODY = """\
set -u

{exports}

publish init || exit                         # never train without what is newest
{enter}publish watch &
sidecar=$!
srun --kill-on-bad-exit=1 dispatch-agent exec -- \\
  {command} &
trainer=$!

code='' again=''
# The trainer is told to end, and waited for. USR1: the time limit is near, so the job goes on after a requeue.
trap 'kill -TERM "$trainer" && {{ wait "$trainer"; code=${{code:-$?}}; }}' TERM INT
trap 'kill -TERM "$trainer" && {{ wait "$trainer"; code=${{code:-$?}} again=1; }}' USR1
wait "$trainer"
code=${{code:-$?}}
trap '' TERM INT USR1
kill -TERM "$sidecar" || echo "publish watch ended before the trainer" >&2
wait "$sidecar"                              # it publishes what is complete, then ends
published=$?
if [ -n "$again" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $((code ? code : published))
"""


def sbatch_script(job: Job) -> str:
    """A bash script for sbatch. Slurm's restart count makes each requeue a new execution."""
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        **job.sbatch,
        "requeue": "",
        "open-mode": "append",
        "signal": f"B:USR1@{job.grace}",
    }
    lines = [f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}" for name, value in options.items()]
    variables = {
        "DISPATCH_JOB_ID": job.job_id,
        "DISPATCH_SUBMISSION": str(job.submission),
        "AGENT_GENERATION": str(job.generation),
        "PUBLISH_ROOT": job.checkpoints.path,
        "PUBLISH_DEST": job.dest,
        "PUBLISH_GRACE": str(job.grace),
        **({"PUBLISH_SHARED_VOLUME": "1"} if job.nodes > 1 else {}),
        **({"AGENT_ALLOW_RANK_RESTART": "1"} if job.allow_rank_restart else {}),
        **job.publish,
        **job.agent.env,
        **job.env,
    }
    body = _BODY.format(
        exports="\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        enter=f"cd {shlex.quote(job.workdir)} || exit\n" if job.workdir else "",
        command=shlex.join(job.command),
    )
    return "\n".join(["#!/usr/bin/env bash", *lines, *_notes(job), body])


def _notes(job: Job) -> list[str]:
    return [
        f"# The checkpoint root {job.checkpoints.path} is on a filesystem that every node of the partition shares.",
        "# shellcheck disable=SC1003,SC2016 # what stands in single quotes is meant as it stands",
        "# sbatch runs this script once for all nodes; publish and dispatch-agent are on the PATH of each.",
    ]
