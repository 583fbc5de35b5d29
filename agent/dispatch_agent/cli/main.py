"""The command groups, and the one place where an error becomes an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import click

from dispatch_agent import __version__
from dispatch_agent.cli import health
from dispatch_agent.cli.demo import demo
from dispatch_agent.cli.doctor import doctor
from dispatch_agent.cli.environment import CLOCK
from dispatch_agent.cli.inspect import inspect
from dispatch_agent.cli.install import install
from dispatch_agent.cli.prologue import identity_command, prologue_group
from dispatch_agent.cli.publish import publish
from dispatch_agent.cli.render import render
from dispatch_agent.errors import AgentError, UsageError
from dispatch_agent.health import termination
from dispatch_agent.logs import redact, to_stream

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

EXIT_STATUS = """\b
EXIT STATUS
  0 done                20 incomplete          33 outcome unknown
  1 unexpected          21 source changed      40 drain ran out of time
  2 usage               22 integrity           41 saw saves, published none
  3 settings            30 fenced             125 refused: no valid identity
 10 store unavailable   31 epoch collision    126 command not executable
 11 denied              32 conflict           127 command not found
 12 store too weak
"""


@click.group(context_settings=CONTEXT, epilog=EXIT_STATUS)
@click.version_option(__version__, package_name="dispatch-agent", prog_name="dispatch-agent")
def cli() -> None:
    """Gives every execution of a preemptible training job an identity, and publishes its finished checkpoints so that
    a stale execution never overwrites a newer one.

    \b
    In the trainer's container:   dispatch-agent exec -- python train.py
    Beside it, as a sidecar:      publish watch --dest s3://bucket/job
    Before it, to resume:         publish restore --dest s3://bucket/job
    To see it all work:           dispatch-agent demo
    """


@cli.command("exec", context_settings={**CONTEXT, "ignore_unknown_options": True})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- CMD [ARGS]...")
def exec_command(command: tuple[str, ...]) -> None:
    """Turn the cluster's counters into DISPATCH_EPOCH and DISPATCH_ATTEMPT, and become CMD: the same process.

    Does what prologue.sh does. Refuses with 125, and says why, where the counters give no valid identity.

    With PUBLISH_ROOT set, an identity from the cluster's counters is also marked as started, for this rank, and a
    second start under it (a container restarted in place) is refused. `exec --allow-rank-restart -- CMD`, or
    AGENT_ALLOW_RANK_RESTART=1, accepts that and says that the identity is weakened. A pair of DISPATCH_EPOCH and
    DISPATCH_ATTEMPT that is set already makes no mark: whoever set it sees to it that it is new.

    `exec --hold -- CMD`, or AGENT_HOLD=1, locks that mark for as long as CMD runs, by which a `publish watch
    --end-with-trainer` beside it sees the end of CMD, however it ends. CMD gets one more open descriptor for it, and
    must not close it.
    """
    raise AssertionError(command)  # __main__ sends `exec` to the entry agent; only its --help comes here


@cli.command("health")
@click.argument("question", type=click.Choice(["started", "live", "ready", "terminating"]), default="live")
@click.option(
    "--listen", metavar="[HOST]:PORT", envvar="PUBLISH_LISTEN", show_envvar=True, help="As given to the watch."
)
def health_command(question: str, listen: str | None) -> None:
    """Ask the `publish watch` in this pod: exit 0 for yes, 1 for no, with one sentence that says why.

    For exec probes and an image's HEALTHCHECK. `terminating` tells it that the pod has begun to end: as a preStop hook
    it never fails. Where no watch listens by --listen, live is 0, as there is nothing to be ill; started and ready
    are 3.
    """
    health.answer(question, listen)


cli.add_command(publish)
cli.add_command(prologue_group)
cli.add_command(identity_command)
cli.add_command(demo)
cli.add_command(doctor)
cli.add_command(install)
cli.add_command(inspect)
cli.add_command(render)


def run(arguments: list[str], name: str = "dispatch-agent") -> NoReturn:
    """Run one command line and exit with its code."""
    group, rest = (publish, arguments[1:]) if name == "publish" else (cli, arguments)
    try:
        code = group.main(rest, prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        _misused(error, name)
    except click.Abort:
        leave(130)
    except AgentError as error:
        _fail(name, str(error), error.exit_code)
    except BrokenPipeError:
        leave(141)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        _fail(name, f"{error.strerror or error}{where}", AgentError.exit_code)
    except KeyboardInterrupt:
        leave(130)
    except Exception:  # noqa: BLE001 (the last resort: a fault of ours, shown whole)
        click.echo(redact(traceback.format_exc()), err=True)
        _fail(name, f"this is a fault in dispatch-agent {__version__}; please report it with the lines above", 1)
    # click gives a command's ctx.exit(code) back as a value, where the command itself would give None.
    leave(code if isinstance(code, int) else 0)


def _fail(name: str, sentence: str, code: int) -> NoReturn:
    """Say in one sentence why a command failed, to its caller and to a kubelet, and exit."""
    said = _one_line(sentence)
    to_stream(sys.stderr, CLOCK)(f"{name}: {said}")
    termination.write(termination.path_of(os.environ.get("PUBLISH_TERMINATION_MESSAGE")), code, said, over=False)
    leave(code)


def _misused(error: click.ClickException, name: str) -> NoReturn:
    """Say what is wrong with the command line in one sentence, as every other error is said, and exit."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    said = error.format_message()
    if context and said == context.get_help():  # no arguments at all: click answers with the whole help
        error.show()
        leave(UsageError.exit_code)
    said = _one_line(said[:1].lower() + said[1:]).rstrip(".")
    _fail(name, f"{said}; see {context.command_path if context else name} --help", UsageError.exit_code)


def _one_line(text: str) -> str:
    """Without secrets; a value that was seen and is quoted must not look like further lines or move the cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in redact(text))


def leave(code: int) -> NoReturn:
    """Exit at once. Not sys.exit: a thread that hangs in a store call must not keep a sidecar from ending."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # closed before we started
                stream.flush()
        except (OSError, ValueError):
            code = code or 141
    os._exit(code)
