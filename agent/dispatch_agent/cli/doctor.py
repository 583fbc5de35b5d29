"""`dispatch-agent doctor`: what the container it runs in can do for a job, and what would go wrong in it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict

import click

from dispatch_agent.cli import conformance
from dispatch_agent.cli.publish import publish
from dispatch_agent.cluster import examination, process
from dispatch_agent.errors import Refused, SettingsError, UsageError
from dispatch_agent.settings import unknown_variables
from dispatch_agent.support import CAPABILITIES, Support

_STEP = 0.05


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--pid", type=click.IntRange(min=1), default=1, show_default=True, help="The job's process.")
@click.option(
    "--try",
    "seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Really run CMD, look for its handler for that long, and kill it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD [ARGS]...]")
@click.pass_context
def doctor(context: click.Context, pid: int, seconds: float | None, as_json: bool, command: tuple[str, ...]) -> None:
    """Say which of the dispatcher's capabilities this container has, how that is known, and why not.

    Looks at the process with --pid, which is the first of the container, for a handler of SIGTERM: behind a shell or
    a pipeline a training command gets none, and dies without a last save. With CMD, which is not run unless --try says
    so, its words are judged instead.

    \b
    Exits 125 if the environment gives no valid identity, 3 if something else here is wrong, else 0.

    \b
    Examples:
      kubectl exec POD -c node -- /opt/dispatch/bin/dispatch-agent doctor
      dispatch-agent doctor -- sh -c 'python train.py | tee log'
      dispatch-agent doctor --try 20 -- python train.py
    """
    if seconds is not None and not command:
        message = "--try runs a command: give it after --"
        raise UsageError(message)
    script = conformance.SCRIPT.read_text(encoding="utf-8")
    found = examination.capabilities(os.environ, script, _hears(pid, command, seconds), pid)
    known = {str(option.envvar) for one in publish.commands.values() for option in one.params if option.envvar}
    wrong = [*examination.problems(os.environ, now=time.time()), *unknown_variables(os.environ, known)]
    if as_json:
        answers = {name: asdict(found[name]) for name in CAPABILITIES}
        click.echo(json.dumps({"capabilities": answers, "problems": wrong}, indent=2))
    else:
        for name in CAPABILITIES:
            support = found[name]
            click.echo(_printable(f"{name:21} {support.value:8} {support.source:10} {support.reason}"))
        for sentence in wrong:
            click.echo(_printable(f"WRONG: {sentence}"))
    if found["AttemptInjection"].value == "no":
        context.exit(Refused.exit_code)
    if wrong or "no" in {support.value for support in found.values()}:
        context.exit(SettingsError.exit_code)


def _hears(pid: int, command: tuple[str, ...], seconds: float | None) -> Support:
    if command:
        if seconds is not None:
            return _tried(command, seconds)
        return process.judge(command, os.path.realpath(shutil.which(command[0]) or command[0]))
    if pid == os.getpid():
        reason = f"process {pid} is this command itself: run it beside the job's, or judge that with -- CMD"
        return Support("unknown", "probed", reason)
    found = process.read(pid)
    if found is None:
        message = f"there is no process {pid} here: name the job's with --pid"
        raise SettingsError(message)
    if found.name == "pause":
        reason = "process 1 is the pod's own, as shareProcessNamespace has it: name the job's with --pid"
        return Support("unknown", "probed", reason)
    return process.hears(found)


def _tried(command: tuple[str, ...], seconds: float) -> Support:
    """Run it as its container would, but not as the first process; what it prints goes to stderr."""
    try:
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
    except OSError as error:
        message = f"{command[0]} cannot be run: {error.strerror}; give a program and its arguments"
        raise SettingsError(message) from None
    try:
        deadline = time.monotonic() + seconds
        answer = Support("unknown", "probed", f"{command[0]} ended at once")
        while (found := process.read(running.pid)) is not None:
            answer = process.hears(found, first=True)
            if answer or time.monotonic() > deadline:
                return answer
            time.sleep(_STEP)
        code = running.wait()
        return Support("unknown", "probed", f"{command[0]} ended by itself with {code}; before that: {answer.reason}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
