"""`dispatch-agent prologue` and `dispatch-agent identity`: see, use and test what gives an execution its identity."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import click

from dispatch_agent import prologue
from dispatch_agent.cli import conformance
from dispatch_agent.cluster import container
from dispatch_agent.errors import SettingsError, UsageError
from dispatch_agent.identity import split_epoch


@click.group("prologue")
def prologue_group() -> None:
    """The POSIX script that gives an execution its identity where there is no Python.

    It runs as the container's command, turns the cluster's counters into DISPATCH_EPOCH and DISPATCH_ATTEMPT, and then
    becomes the user's command: the same process, nothing else changed.
    """


@prologue_group.command()
def show() -> None:
    """Print the script.

    \b
    Try it:
      env SLURM_JOB_ID=7 DISPATCH_SUBMISSION=1 sh -c "$(dispatch-agent prologue show)" dispatch-prologue env
    """
    click.echo(conformance.SCRIPT.read_text(encoding="utf-8"), nl=False)


@prologue_group.command()
def path() -> None:
    """Print where the Python entry agent is: one standalone file with the script's rules.

    \b
    Run it by absolute paths, so that no PYTHONPATH or sitecustomize is seen:
      /usr/bin/python3 -I -S "$(dispatch-agent prologue path)" COMMAND ARGUMENT...
    """
    click.echo(Path(prologue.__file__).resolve())


@prologue_group.command(context_settings={"allow_interspersed_args": False})
@click.option("--shell", is_flag=True, help="Print one line for a shell or a batch script instead.")
@click.option("--keep-dollars", is_flag=True, help="Leave every $ of the command to Kubernetes, as in $(POD_NAME).")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def wrap(command: tuple[str, ...], shell: bool, keep_dollars: bool) -> None:
    """Print how to run COMMAND behind the script, as a JSON array for `command:` of a Kubernetes container.

    Kubernetes replaces $(NAME) and turns $$ into $ in that field, so every $ of COMMAND is doubled.

    \b
    Example:
      dispatch-agent prologue wrap -- python train.py --note 'costs $$'
    """
    if command[0] == "" or command[0].startswith("-"):
        message = f"the command starts with {command[0]!r}, which the prologue refuses: name a program after --"
        raise UsageError(message)
    if shell and keep_dollars:
        message = "--keep-dollars is about Kubernetes and --shell prints no Kubernetes field: leave one of them out"
        raise UsageError(message)
    words = list(conformance.shell_runner("/bin/sh").before)
    if shell:
        click.echo(shlex.join([*words, *command]))
    else:
        # The script itself needs no doubling: it holds neither $$ nor the $ and parenthesis of a known name.
        kept = command if keep_dollars else [word.replace("$", "$$") for word in command]
        click.echo(json.dumps([*words, *kept]))


@prologue_group.command("test")
@click.option("--shell", default="/bin/sh", show_default=True, help="The shell to test.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def test_shell(context: click.Context, shell: str, as_json: bool) -> None:
    """Run the prologue's test vectors against this container's shell.

    Exits 0 if the shell gives every execution its right identity, 1 if not. Some vectors need a compiler, locales or
    another user, and are left out here.
    """
    binary = shutil.which(shell)
    if binary is None:
        message = f"{shell} is not a program here: name an installed shell with --shell"
        raise SettingsError(message)
    with tempfile.TemporaryDirectory(prefix="dispatch-prologue-") as name:
        wrong, left_out, met = _try_vectors(binary, Path(name).resolve())
    if as_json:
        click.echo(json.dumps({"shell": binary, "met": met, "left_out": left_out, "wrong": wrong}))
    else:
        for vector, sentences in wrong.items():
            click.echo(f"{vector}: {'; '.join(sentences)}")
        for reason, count in left_out.items():
            click.echo(f"left out: {count} ({reason})")
        verdict = "gives every execution its right identity" if not wrong else "must not run the prologue"
        click.echo(f"{binary} meets {met} of {met + len(wrong)} vectors: it {verdict}")
    if wrong:
        context.exit(1)


def _try_vectors(shell: str, folder: Path) -> tuple[dict[str, list[str]], dict[str, int], int]:
    """What is wrong for each vector that is missed, how many were left out for which reason, how many were met."""
    contract = conformance.load()
    (folder / "fixtures").mkdir()
    conformance.lay_out(contract["fixtures"], folder / "fixtures")
    stage = conformance.Stage(folder / "fixtures", conformance.make_python_probe(folder))
    _check_probe(stage.probe)
    runner = conformance.shell_runner(shell)
    wrong: dict[str, list[str]] = {}
    left_out: Counter[str] = Counter()
    met = 0
    for vector in contract["vectors"]:
        reason = conformance.why_left_out(vector, stage)
        if reason is not None:
            left_out[reason] += 1
        elif sentences := conformance.run(vector, contract["base_env"], runner, stage):
            wrong[vector["name"]] = sentences
        else:
            met += 1
    return wrong, dict(left_out), met


def _check_probe(probe: conformance.Probe) -> None:
    """Tell a place that runs no programs from a shell that is wrong."""
    try:
        answer = f"exit code {subprocess.run([probe.path], check=False).returncode}"
    except OSError as error:
        answer = str(error)
    if answer != "exit code 42":
        message = f"{probe.path} cannot run ({answer}): set TMPDIR to a folder whose programs may be run"
        raise SettingsError(message)


@click.command("identity")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; the epoch is a string in it.")
def identity_command(as_json: bool) -> None:
    """Print the identity that this environment gives, and which inputs it came from.

    Takes either the cluster's counters or a finished pair, as every container of a job has them. Exits 125 where
    the prologue would refuse. JobSet's later counters are shown if they are passed, and change nothing; one that
    says that another run may have had this identity makes it `weakened`.
    """
    identity = container.read_identity(os.environ)
    counters = container.read_counters(os.environ)
    generation, submission, restart = split_epoch(identity.epoch)
    if as_json:
        facts = {
            "job_id": identity.job_id,
            # A string: an epoch does not fit the numbers of most JSON readers.
            "epoch": str(identity.epoch),
            "attempt": identity.attempt,
            "source": identity.source,
            "generation": generation,
            "submission": submission,
            "restart": restart,
            "jobset": counters.seen,
            "weakened": counters.weakened,
        }
        click.echo(json.dumps(facts))
        return
    click.echo(f"job      {identity.job_id or '(DISPATCH_JOB_ID is unset)'}")
    click.echo(f"epoch    {identity.epoch} (generation {generation}, submission {submission}, restart {restart})")
    click.echo(f"attempt  {identity.attempt}")
    click.echo(f"source   {identity.source} ({_INPUTS[identity.source]})")
    for name, count in counters.seen.items():
        click.echo(f"jobset   {name.replace('_', ' ')} {count}")
    for reason in counters.weakened:
        click.echo(f"identity weakened: {reason}")


_INPUTS = {
    "kubeflow": "DISPATCH_K8S_*",
    "slurm": "SLURM_JOB_ID, SLURM_RESTART_COUNT, DISPATCH_SUBMISSION, AGENT_GENERATION",
    "ready-made": "DISPATCH_EPOCH and DISPATCH_ATTEMPT",
}
