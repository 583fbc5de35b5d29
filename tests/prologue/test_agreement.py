"""The script and its Python twin, held against each other on inputs that nobody chose."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatch_agent import prologue
from dispatch_agent.cli import conformance
from dispatch_agent.cli.conformance import Report, Runner, Stage

COUNTS = [b"", b"0", b"1", b"5", b"08", b"10", b"007", b"499999", b"500001", b"999998", b"999999", b"1000000"]
COUNTS += [b"4294967296", b"18446744073709551621", b"-1", b"+1", b"1\n", b" 1", b"1/2", b"\xd9\xa1", b"0x1", b"1.0"]
PREFIXES = [b"1", b"999999", b"12000003", b"18000000999999", b"18000001000001", b"12000000", b"185000003", b"0", b"1 "]
EPOCHS = [b"1000000", b"999999", b"12000003000001", b"3000000", b"3000001", b"01000000", b"18000000999999999999"]
EPOCHS += [b"18000001000001000000", b"19000000000001000000", b"18000000000000000001", b"99999999999999999999"]
ATTEMPTS = [b"a", b"job.3.1.1.0", b"3.4711.0", b"3.4711.1", b".", b"..", b"-n", b"a/b", b"a b", b"a" * 199, b"a" * 200]
GENERATIONS = [b"0", b"1", b"12", b"18000000", b"18000001", b"17999999", b"19000000", b"100000000", b"012", b""]
JOB_IDS = [b"4711", b"0", b"04711", b"4711_2", b"4294967295", b"12345678901"]

# A backslash is left out: `echo` expands it in some shells, so only the text of a refusal would differ.
ANY_BYTES = st.binary(max_size=12).map(lambda value: value.translate(None, b"\0\\"))


NUMBERS = st.integers(0, 999_999).map(lambda number: b"%d" % number)
SUBMISSIONS = st.integers(1, 999_999).map(lambda number: b"%d" % number)
# Each row of the identity table as it should be.
ROWS = {
    "kubeflow": st.fixed_dictionaries(
        {
            b"DISPATCH_K8S_ADMISSION": NUMBERS,
            b"DISPATCH_K8S_RESTART": st.sampled_from([b"0", b"1", b"12"]),
            b"DISPATCH_K8S_EPOCH_PREFIX": st.sampled_from(PREFIXES),
            b"DISPATCH_K8S_TOKEN_PREFIX": st.sampled_from(ATTEMPTS),
        }
    ),
    "slurm": st.fixed_dictionaries(
        {b"SLURM_JOB_ID": SUBMISSIONS, b"DISPATCH_SUBMISSION": SUBMISSIONS},
        optional={b"SLURM_RESTART_COUNT": NUMBERS, b"AGENT_GENERATION": st.sampled_from(GENERATIONS)},
    ),
    "ready-made": st.fixed_dictionaries(
        {b"DISPATCH_EPOCH": st.sampled_from(EPOCHS), b"DISPATCH_ATTEMPT": st.sampled_from(ATTEMPTS)}
    ),
}
# And what may be there in its place, or beside it.
CHANGES = {
    b"DISPATCH_K8S_ADMISSION": COUNTS,
    b"DISPATCH_K8S_RESTART": COUNTS,
    b"DISPATCH_K8S_EPOCH_PREFIX": PREFIXES,
    b"DISPATCH_K8S_TOKEN_PREFIX": ATTEMPTS,
    b"DISPATCH_EPOCH": EPOCHS,
    b"DISPATCH_ATTEMPT": ATTEMPTS,
    b"SLURM_JOB_ID": JOB_IDS,
    b"SLURM_RESTART_COUNT": COUNTS,
    b"DISPATCH_SUBMISSION": [b"3", b"999999", b"1000000", b"0", b"03", b""],
    b"AGENT_GENERATION": GENERATIONS,
    b"FOO": [b"bar"],
}


@st.composite
def environments(draw: st.DrawFn) -> dict[bytes, bytes]:
    """A row of the identity table, perhaps with the pair that belongs to it, with up to three changes."""
    environ: dict[bytes, bytes] = draw(ROWS[draw(st.sampled_from(sorted(ROWS)))])
    if draw(st.booleans()):
        try:
            launch = prologue.resolve(environ)
            environ |= {b"DISPATCH_EPOCH": launch.epoch, b"DISPATCH_ATTEMPT": launch.attempt}
        except prologue.Refusal:
            pass
    for name in draw(st.lists(st.sampled_from(sorted(CHANGES)), max_size=3, unique=True)):
        value = draw(st.one_of(st.none(), st.sampled_from(CHANGES[name]), st.sampled_from(CHANGES[name]), ANY_BYTES))
        environ.pop(name, None)
        if value is not None:
            environ[name] = value
    # With none in the environment, some shells export their default.
    return {**environ, b"PATH": b"/usr/bin:/bin"}


# What a shell adds of its own, or changes: prologue/README.md.
OF_THE_SHELL = {b"PWD", b"OLDPWD", b"SHLVL", b"_", b"LOGNAME", b"A__z"}


def observe(runner: Runner, environ: dict[bytes, bytes], stage: Stage) -> tuple[int, bytes, Report | None]:
    stage.probe.report.write_bytes(b"")
    done = subprocess.run(
        runner.command([bytes(stage.probe.path), b"x"]),
        executable=runner.executable,
        env=environ,
        cwd=stage.folder,
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stderr, conformance.read_report(stage.probe.report)


def test_the_script_and_python_agree_on_any_environment(stage: Stage, runner_for: Callable[..., Runner]) -> None:
    python = runner_for("python")
    shells = {name: runner_for(name) for name in ("dash", "bash", "busybox", "mksh", "ksh93", "zsh", "posh", "lksh")}
    ran = 0

    @settings(max_examples=300, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(sorted(shells)), environments())
    def agree(shell: str, environ: dict[bytes, bytes]) -> None:
        nonlocal ran
        script_code, script_says, script_report = observe(shells[shell], environ, stage)
        python_code, python_says, python_report = observe(python, environ, stage)
        assert (script_code, script_says) == (python_code, python_says)
        assert (script_report is None) == (python_report is None)
        if script_report is not None and python_report is not None:
            ran += 1
            assert script_report.arguments == python_report.arguments
            added = {name: value for name, value in script_report.environ.items() if name not in OF_THE_SHELL}
            assert added == python_report.environ

    agree()
    assert ran >= 50, f"only {ran} of the drawn environments had an identity: the drawing tests refusals alone"
