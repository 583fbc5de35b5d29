"""`dispatch-agent inspect`: over a cluster's own objects, which identities there are, and whether one came twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import click

from dispatch_agent.cli import documents
from dispatch_agent.cluster import inspection
from dispatch_agent.cluster.inspection import JobSeen, PodSeen, Report
from dispatch_agent.cluster.requirement import Finding
from dispatch_agent.errors import Refused, SettingsError, UsageError

_WORDS = {
    "identity": "WRONG",
    "requirement": "WRONG",
    "weakened": "weakened",
    "stale": "stale",
    "advice": "advice",
}


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False, allow_dash=True), metavar="FILE...")
@click.option(
    "--allow-rank-restart",
    is_flag=True,
    envvar="AGENT_ALLOW_RANK_RESTART",
    show_envvar=True,
    help="A rank may run again under its identity: that is then said as weakened, and is not wrong.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; epochs are strings in it.")
@click.pass_context
def inspect(context: click.Context, files: tuple[str, ...], allow_rank_restart: bool, as_json: bool) -> None:
    """Look for identities that were used twice, or could be, in what `kubectl get -o yaml` or json prints.

    Takes TrainJobs, JobSets, Jobs, Pods and runtimes, of one job or of many, from FILE or standard input (-).

    \b
    Exits 0 if nothing is wrong, else
      125 if counters were reset, a rank ran twice under one identity, or a container is refused one
        3 if only the objects' own rules let that happen

    \b
    Example:
      kubectl get trainjob,jobset,job,pod -o yaml | dispatch-agent inspect -
    """
    found = [document for file in files for document in _read(file)]
    report = inspection.inspect(found, allow_rank_restart=allow_rank_restart)
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
    else:
        for line in _lines(report):
            click.echo("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line))
    if not (report.jobs or report.runtimes):
        message = "no object of the dispatcher's is in it: give its TrainJob, JobSet, Jobs, Pods, or a runtime"
        raise SettingsError(message)
    levels = {finding.level for finding in report.all_findings}
    if "identity" in levels:
        context.exit(Refused.exit_code)
    if "requirement" in levels:
        context.exit(SettingsError.exit_code)


def _read(file: str) -> list[object]:
    try:
        with click.open_file(file, encoding="utf-8") as stream:
            return documents.read(stream)
    except OSError as error:
        message = f"{file} cannot be read: {error.strerror}; name a file that kubectl wrote, or - for standard input"
        raise UsageError(message) from None
    except SettingsError as error:
        message = f"{file}: {error}"
        raise SettingsError(message) from None


def _lines(report: Report) -> Iterator[str]:
    for job in report.jobs:
        yield from _of_job(job)
    yield from report.runtimes
    for finding in report.findings:
        yield _said(finding)
    if report.ignored:
        yield f"not looked at: {', '.join(f'{count} {kind}' for kind, count in report.ignored.items())}"
    if not (report.jobs or report.runtimes):  # neither right nor wrong
        return
    wrong = sum(finding.level in {"identity", "requirement"} for finding in report.all_findings)
    yield f"{wrong} wrong" if wrong else "nothing is wrong with the identities"


def _of_job(job: JobSeen) -> Iterator[str]:
    yield f"{job.namespace}/{job.name}" if job.namespace else job.name
    counts = {"A": job.admission, "floor": job.floor, "J": job.restarts}
    said = ", ".join(f"{name} {count}" for name, count in counts.items() if count is not None)
    yield f"  {said or 'no counts'}{', suspended' if job.suspended else ''}"
    for pod in job.pods:
        yield f"  {_of_pod(pod)}"
    if job.next_admission is not None:
        yield f"  next A {job.next_admission}: `dispatch-agent render --raise` writes it in both places"
    for finding in job.findings:
        yield f"  {_said(finding)}"


def _of_pod(pod: PodSeen) -> str:
    who = f"epoch {pod.epoch}, attempt {pod.attempt}" if pod.attempt else "no identity"
    rank = "" if pod.rank is None else f"rank {pod.rank}, "
    beside = f"; publisher {pod.publisher}" if pod.publisher else ""
    return f"{pod.name}: {rank}{pod.phase}{', ending' if pod.ending else ''}, {who}{beside}"


def _said(finding: Finding) -> str:
    return f"{_WORDS[finding.level]}: {finding.where}: {finding.says}"
