"""`dispatch-agent render`: from a short job description to what is applied to a cluster, or given to sbatch."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from dispatch_agent.checkpoint import completion
from dispatch_agent.cli import conformance, documents
from dispatch_agent.cli.environment import is_secret
from dispatch_agent.cli.publish import publish
from dispatch_agent.cluster import admission, batch, description, jobset, limits, pod, trainer
from dispatch_agent.cluster.description import Check, Job
from dispatch_agent.errors import SettingsError, UsageError
from dispatch_agent.identity import new_job_id
from dispatch_agent.store.opening import refuse_secrets

EXAMPLE = Path(description.__file__).with_name("example.yaml")


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, allow_dash=True))
@click.option(
    "--kind",
    type=click.Choice(["trainjob", "runtime", "jobset", "pod", "sbatch"]),
    help="What to render. [default: the runtime, then the trainjob]",
)
@click.option(
    "--output",
    type=click.Choice(["yaml", "json"]),
    default="yaml",
    show_default=True,
    help="How manifests are written.",
)
@click.option(
    "--admitted",
    is_flag=True,
    help="The TrainJob with its first admission, running: for a cluster without the dispatcher. [default: suspended]",
)
@click.option(
    "--raise",
    "readmit",
    is_flag=True,
    help="FILE is a suspended TrainJob with its JobSet, or a JobSet, as kubectl prints it: raise its admission count, "
    "and let it run.",
)
@click.option("--example", is_flag=True, help="Print a job description with every key, and what each means.")
def render(
    file: str | None, kind: limits.Kind | None, output: str, admitted: bool, readmit: bool, example: bool
) -> None:
    """Render the job description FILE (YAML or JSON, - for standard input) as manifests, checked against the limits of
    Trainer and Kubernetes, or as a batch script for Slurm.

    Give a new TrainJob to `kubectl create`, not `apply`: an older file, applied again, would put its counts back.

    \b
    Example, for a cluster without the dispatcher:
      dispatch-agent render --example > job.yaml
      dispatch-agent render --admitted job.yaml | kubectl create -f -
    Suspended by hand, and its pods gone, it goes on as a new execution:
      kubectl get trainjob,jobset NAME -o json | dispatch-agent render --raise - | kubectl replace -f -
    """
    if example:
        if file or kind or admitted or readmit:
            message = "--example prints a description and takes nothing else: leave the rest out"
            raise UsageError(message)
        click.echo(EXAMPLE.read_text(encoding="utf-8"), nl=False)
        return
    if file is None:
        message = "no job description: name its file, or - for standard input; --example prints one"
        raise UsageError(message)
    _check_together(kind, output, admitted, readmit)
    document = _only_document(file)
    if readmit:
        _write([admission.readmitted(document)], output)
        return
    drawn: list[str] = []
    job = description.parse(document, _settings(), lambda: _draw(drawn))
    _refuse_secrets(job)
    for needed in (kind,) if kind else ("runtime", "trainjob"):
        limits.check(job, needed)
    if admitted:
        limits.admitted(job)
    for job_id in drawn if kind != "runtime" else ():  # which holds none
        click.echo(f"job_id {job_id} was drawn: write it into the description, for the job's next submission", err=True)
    script = conformance.SCRIPT.read_text(encoding="utf-8")
    if kind == "sbatch":
        click.echo(batch.sbatch_script(job), nl=False)
        return
    _write(_manifests(job, kind, script, admitted=admitted), output, _notes(job, kind, admitted=admitted))


def _manifests(job: Job, kind: str | None, script: str, *, admitted: bool) -> list[pod.Object]:
    if kind == "pod":
        return [pod.plain_pod(job, script)]
    if kind == "jobset":
        return [jobset.job_set(job, script)]
    found = []
    if kind in {None, "runtime"}:
        found.append(trainer.training_runtime(job))
    if kind in {None, "trainjob"}:
        found.append(trainer.train_job(job, script, admitted=admitted))
    return found


def _check_together(kind: str | None, output: str, admitted: bool, readmit: bool) -> None:
    if readmit and (kind or admitted):
        message = "--raise takes an object of the cluster: leave --kind and --admitted out"
        raise UsageError(message)
    if admitted and kind not in {None, "trainjob"}:
        message = f"--admitted is about a TrainJob, not --kind {kind}: leave one of them out"
        raise UsageError(message)
    if kind == "sbatch" and output == "json":
        message = "--kind sbatch prints a script: leave --output out"
        raise UsageError(message)


def _only_document(file: str) -> object:
    try:
        with click.open_file(file, encoding="utf-8") as stream:
            found = documents.read(stream)
    except OSError as error:
        message = f"{file} cannot be read: {error.strerror}; name the file of a job description"
        raise UsageError(message) from None
    except SettingsError as error:
        message = f"{file}: {error}"
        raise SettingsError(message) from None
    if len(found) != 1:
        message = f"{file} holds {len(found)} documents: give it one"
        raise SettingsError(message)
    return found[0]


def _refuse_secrets(job: Job) -> None:
    """A manifest is read by more people than a secret is."""
    try:
        refuse_secrets(job.dest)
    except SettingsError as error:
        message = f"publish.dest: {error}"
        raise SettingsError(message) from None
    for pair in job.publish.get("PUBLISH_STORAGE_OPTION", "").split():
        key = pair.partition("=")[0]
        if is_secret(key, job.dest):
            message = (
                f"publish.storage_option {key}=...: a manifest is no place for a secret; give it by credentials.secret"
            )
            raise SettingsError(message)


def _draw(drawn: list[str]) -> str:
    drawn.append(new_job_id(time.time_ns() // 1_000_000, secrets.token_bytes(10)))
    return drawn[-1]


def _settings() -> dict[str, Check]:
    """The options of `publish watch` and `publish init`, each with the check that its command would make."""
    found: dict[str, Check] = {}
    for command in (publish.commands["watch"], publish.commands["init"]):
        for option in command.params:
            if isinstance(option, click.Option) and option.envvar:
                long_name = str(option.envvar).removeprefix("PUBLISH_").lower()
                found[long_name] = _check_of(option, command)
    found["complete"] = completion.parse_rule
    return found


def _check_of(option: click.Option, command: click.Command) -> Callable[[str], object]:
    def check(text: str) -> object:
        with click.Context(command) as context:
            try:
                value = option.type.split_envvar_value(text) if option.multiple else text
                return option.type_cast_value(context, value)
            except click.UsageError as error:
                raise SettingsError(error.message.rstrip(".")) from None

    return check


def _notes(job: Job, kind: str | None, *, admitted: bool) -> list[str]:
    """What the objects do not say by themselves."""
    notes = []
    if kind in {None, "trainjob"} and not admitted:
        notes.append("Suspended, admission 0: the dispatcher admits it, or `dispatch-agent render --raise` by hand.")
    if kind == "jobset":
        notes.append(
            "Its admission count stays 1: JobSet's restarts raise the epoch, a suspension does not. After one, let it "
            "go on by `dispatch-agent render --raise`."
        )
    if job.queue and (admitted or kind == "jobset"):
        notes.append(
            "Identity weakened, as allow_rank_restart allows it: Kueue starts it again after a preemption under the "
            "epoch and attempt that it had before."
        )
    if kind == "pod":
        notes.append("One execution: a further Pod of this job needs a higher `restart`, and has its own name by that.")
    return notes


def _write(objects: Sequence[object], output: str, notes: Sequence[str] = ()) -> None:
    click.echo(documents.write_yaml(objects, notes) if output == "yaml" else documents.write_json(objects), nl=False)
