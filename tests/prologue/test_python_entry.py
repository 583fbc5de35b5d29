"""The Python entry: what it must keep of the process, and the two things it does beyond the script."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dispatch_agent import prologue
from dispatch_agent.cli import conformance
from dispatch_agent.cli.conformance import Report, Stage

FILE = prologue.__file__
PAIR = {b"DISPATCH_EPOCH": b"3000001", b"DISPATCH_ATTEMPT": b"a"}
SLURM = {b"SLURM_JOB_ID": b"4711", b"DISPATCH_SUBMISSION": b"3", b"PATH": b"/usr/bin:/bin"}

# Not of our making: the two that glibc keeps for its threads, and from 2.43 on leaves ignored in a forked child, and
# what a shell ignores for a test run that it starts in the background.
NOT_OURS = {32, 33, *(s for s in (signal.SIGINT, signal.SIGQUIT) if signal.getsignal(s) == signal.SIG_IGN)}


def enter(
    stage: Stage,
    environ: Mapping[bytes, bytes],
    *words: str | bytes,
    before: Sequence[str] = ("-I", "-S", FILE),
    **options: object,
) -> tuple[int, bytes, Report | None]:
    """Run the entry; its exit code, its stderr, and the probe's report if it ran."""
    stage.probe.report.write_bytes(b"")
    done = subprocess.run(  # type: ignore[call-overload]  # options are passed through
        [sys.executable, *before, *words], env=environ, cwd=stage.folder, capture_output=True, check=False, **options
    )
    return done.returncode, done.stderr, conformance.read_report(stage.probe.report)


def test_nothing_of_the_process_changes(stage: Stage) -> None:
    def prepare() -> None:
        os.umask(0o027)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])

    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", FILE, stage.probe.path],
        env=PAIR,
        pass_fds=[writer],
        preexec_fn=prepare,  # noqa: PLW1509  these tests run no threads
    )
    assert process.wait() == 42
    os.close(reader)
    os.close(writer)
    report = conformance.read_report(stage.probe.report)
    assert report is not None
    assert report.pid == process.pid
    assert report.umask == 0o027
    assert report.files == {0, 1, 2, writer}
    assert report.blocked == {signal.SIGUSR1}
    assert report.ignored - NOT_OURS == {signal.SIGTERM}


def test_sigpipe_and_sigxfsz_kill_the_command_as_they_do_elsewhere(stage: Stage) -> None:
    _, _, report = enter(stage, PAIR, stage.probe.path)
    assert report is not None
    assert report.ignored - NOT_OURS == set()


def test_the_environment_is_handed_on_byte_for_byte(stage: Stage) -> None:
    odd = {b"spark.executor.memory": b"1g", b"a-b": b"\xff\x80", b"BASH_FUNC_x%%": b"() { :\n}", b"1": b"", b" ": b"="}
    _, _, report = enter(stage, {**PAIR, **odd}, stage.probe.path)
    assert report is not None
    assert report.environ == {**PAIR, **odd}


@pytest.mark.parametrize("locale", [{}, {b"LANG": b"C"}, {b"LC_ALL": b"POSIX"}, {b"LC_CTYPE": b"C.UTF-8"}])
def test_no_locale_is_added(stage: Stage, locale: dict[bytes, bytes]) -> None:
    _, _, report = enter(stage, {**PAIR, **locale}, stage.probe.path)
    assert report is not None
    assert report.environ == {**PAIR, **locale}


def test_of_a_name_given_twice_the_last_counts_as_in_a_shell(stage: Stage) -> None:
    entries = [b"DISPATCH_ATTEMPT=first", b"DISPATCH_EPOCH=3000001", b"no equals sign", b"DISPATCH_ATTEMPT=last"]

    def execute() -> None:
        words = [os.fsencode(word) for word in (sys.executable, "-I", "-S", FILE, stage.probe.path)]
        argv = (ctypes.c_char_p * (len(words) + 1))(*words, None)
        envp = (ctypes.c_char_p * (len(entries) + 1))(*entries, None)
        ctypes.CDLL(None).execve(words[0], argv, envp)

    stage.probe.report.write_bytes(b"")
    assert subprocess.run(["/nonexistent"], executable="/bin/false", preexec_fn=execute, check=False).returncode == 42
    report = conformance.read_report(stage.probe.report)
    assert report is not None
    assert sorted(report.entries) == [b"DISPATCH_ATTEMPT=last", b"DISPATCH_EPOCH=3000001"]


def test_the_users_python_settings_are_not_seen(stage: Stage, tmp_path: Path) -> None:
    for name in ("sitecustomize.py", "usercustomize.py", "posix.py", "sys.py", "encodings.py"):
        (tmp_path / name).write_text("raise SystemExit('hijacked')\n")
    hostile = {b"PYTHONPATH": os.fsencode(tmp_path), b"PYTHONSTARTUP": b"x", b"PYTHONHOME": b"/nonexistent"}
    code, stderr, report = enter(stage, {**PAIR, **hostile}, stage.probe.path)
    assert (code, stderr) == (42, b"")
    assert report is not None
    assert report.environ == {**PAIR, **hostile}


def test_only_what_is_built_into_the_interpreter_is_imported() -> None:
    code = (
        f"import sys; text = open({FILE!r}).read(); before = set(sys.modules); exec(text, dict(__name__='x'))\n"
        "print(set(sys.modules) - before - set(sys.builtin_module_names))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, check=True)
    assert done.stdout == b"set()\n"


def test_what_the_caller_has_printed_is_not_lost() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(FILE).parent.parent)!r}); from dispatch_agent import prologue\n"
        "print('before', end=''); prologue.main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--", "/bin/echo", " after"],
        env={**PAIR},
        capture_output=True,
        check=False,
    )
    assert done.stdout == b"before after\n"


_CALL = "from dispatch_agent import prologue; prologue.main(sys.argv[1:])"
CONSOLE = ("-c", f"import sys; sys.path.insert(0, {str(Path(FILE).parent.parent)!r}); {_CALL}")


def test_the_console_command_takes_a_leading_double_dash(stage: Stage) -> None:
    for words in (["--", stage.probe.path, "-x", "\udcff"], [stage.probe.path, "-x", "\udcff"]):
        code, _, report = enter(stage, PAIR, *map(str, words), before=CONSOLE)
        assert code == 42
        assert report is not None
        assert report.arguments[1:] == (b"-x", b"\xff")


def test_the_console_command_refuses_an_unknown_option(stage: Stage) -> None:
    code, stderr, _ = enter(stage, PAIR, "--what", str(stage.probe.path), before=CONSOLE)
    assert code == 125
    assert b"no command" in stderr


def test_what_cannot_be_run_is_named_with_the_reason(stage: Stage) -> None:
    code, stderr, _ = enter(stage, PAIR, "no-such-command")
    assert (code, stderr) == (127, b"dispatch: cannot run no-such-command: not found\n")
    code, stderr, _ = enter(stage, PAIR, str(stage.folder / "notexec"))
    assert (code, stderr) == (
        126,
        b"dispatch: cannot run %b: Permission denied\n" % os.fsencode(stage.folder / "notexec"),
    )


def test_without_proc_the_environment_is_the_interpreters_less_its_own_addition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prologue.posix, "environ", {b"A": b"\xff", b"LC_CTYPE": b"C.UTF-8"})
    assert prologue.read_environ("/nonexistent") == {b"A": b"\xff"}
    monkeypatch.setattr(prologue.posix, "environ", {b"LC_ALL": b"C.UTF-8", b"LC_CTYPE": b"C.UTF-8"})
    assert prologue.read_environ("/nonexistent") == {b"LC_ALL": b"C.UTF-8", b"LC_CTYPE": b"C.UTF-8"}


def test_resolving_is_pure_and_frozen() -> None:
    environ = {b"DISPATCH_K8S_WORKDIR": b"/x", b"FOO": b"1", **PAIR}
    before = dict(environ)
    launch = prologue.resolve(environ)
    assert environ == before
    assert launch.environ == {b"FOO": b"1", **PAIR}
    assert (launch.epoch, launch.attempt, launch.source) == (b"3000001", b"a", "ready-made")
    with pytest.raises(AttributeError):
        launch.epoch = b"1"  # type: ignore[misc]


def test_a_second_run_of_a_rank_under_one_identity_is_refused(stage: Stage, tmp_path: Path) -> None:
    environ = {**SLURM, b"PUBLISH_ROOT": os.fsencode(tmp_path / "root"), b"SLURM_PROCID": b"2"}
    (tmp_path / "root").mkdir()
    assert enter(stage, environ, stage.probe.path)[0] == 42
    assert [path.name for path in (tmp_path / "root/exec/3.4711.0/.dispatch").iterdir()] == ["started.2"]
    code, stderr, report = enter(stage, environ, stage.probe.path)
    assert code == 125
    assert b"rank 2 already ran under attempt 3.4711.0" in stderr
    assert report is None
    assert enter(stage, {**environ, b"SLURM_PROCID": b"3"}, stage.probe.path)[0] == 42
    assert enter(stage, {**environ, b"SLURM_RESTART_COUNT": b"1"}, stage.probe.path)[0] == 42


def test_a_rank_restart_that_is_allowed_runs_and_says_that_identity_is_weakened(stage: Stage, tmp_path: Path) -> None:
    environ = {**SLURM, b"PUBLISH_ROOT": os.fsencode(tmp_path)}
    assert enter(stage, environ, stage.probe.path)[0] == 42
    code, stderr, _ = enter(stage, environ, "--allow-rank-restart", "--", str(stage.probe.path), before=CONSOLE)
    assert code == 42
    assert b"dispatch: identity weakened: rank 0 runs again under attempt 3.4711.0" in stderr
    assert enter(stage, {**environ, b"AGENT_ALLOW_RANK_RESTART": b"1"}, stage.probe.path)[0] == 42
    assert enter(stage, {**environ, b"AGENT_ALLOW_RANK_RESTART": b"0"}, stage.probe.path)[0] == 125


def test_nested_commands_and_local_ranks_of_one_execution_are_free(stage: Stage, tmp_path: Path) -> None:
    nested = [sys.executable, "-I", "-S", FILE, str(stage.probe.path)]
    assert enter(stage, {**SLURM, b"PUBLISH_ROOT": os.fsencode(tmp_path)}, *nested)[0] == 42
    for _ in range(2):
        assert enter(stage, {**PAIR, b"PUBLISH_ROOT": os.fsencode(tmp_path)}, stage.probe.path)[0] == 42


def is_locked(path: Path) -> bool:
    """Whether another process holds a lock on it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.lockf(descriptor, os.F_TEST, 0)
    except PermissionError:
        return True
    finally:
        os.close(descriptor)
    return False


@pytest.mark.parametrize("by", ["option", "variable"])
def test_a_held_mark_is_locked_for_the_life_of_the_command_and_by_it_alone(tmp_path: Path, by: str) -> None:
    environ = {**SLURM, b"PUBLISH_ROOT": os.fsencode(tmp_path), **({b"AGENT_HOLD": b"yes"} if by == "variable" else {})}
    script = "sleep 60 & echo $! $(ls /proc/$$/fd); read line"
    before = ("-I", "-S", FILE) if by == "variable" else (*CONSOLE, "--hold", "--")
    process = subprocess.Popen(
        [sys.executable, *before, "/bin/sh", "-c", script], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin
    assert process.stdout
    child, *files = process.stdout.readline().split()
    marker = tmp_path / "exec/3.4711.0/.dispatch/started.0"
    try:
        assert b"243" in files
        assert marker.read_bytes() == b"held\n"
        assert is_locked(marker)
        process.kill()
        process.wait()
        os.kill(int(child), 0)  # it has the descriptor too
        assert not is_locked(marker)
    finally:
        os.kill(int(child), signal.SIGKILL)
        process.stdin.close()
        process.stdout.close()


def test_without_hold_nothing_more_is_open(stage: Stage, tmp_path: Path) -> None:
    environ = {**SLURM, b"PUBLISH_ROOT": os.fsencode(tmp_path), b"AGENT_HOLD": b"0"}
    _, _, report = enter(stage, environ, stage.probe.path)
    assert report is not None
    assert report.files == {0, 1, 2}
    _, _, report = enter(stage, {**environ, b"SLURM_PROCID": b"1", b"AGENT_HOLD": b"1"}, stage.probe.path)
    assert report is not None
    assert report.files == {0, 1, 2, 243}


def test_a_descriptor_that_the_command_was_given_is_left_alone(stage: Stage, tmp_path: Path) -> None:
    environ = {**SLURM, b"PUBLISH_ROOT": os.fsencode(tmp_path), b"AGENT_HOLD": b"1"}
    reader, writer = os.pipe()
    os.dup2(writer, 243)
    try:
        _, _, report = enter(stage, environ, stage.probe.path, pass_fds=[243])
    finally:
        for descriptor in (reader, writer, 243):
            os.close(descriptor)
    assert report is not None
    assert report.files == {0, 1, 2, 243, 242}
    assert (tmp_path / "exec/3.4711.0/.dispatch/started.0").read_bytes() == b"held\n"


def test_a_rank_restart_that_is_allowed_holds_the_mark_again(stage: Stage, tmp_path: Path) -> None:
    allowed = {b"AGENT_HOLD": b"1", b"AGENT_ALLOW_RANK_RESTART": b"1"}
    for _ in range(2):
        code, _, report = enter(stage, {**SLURM, b"PUBLISH_ROOT": os.fsencode(tmp_path), **allowed}, stage.probe.path)
        assert code == 42
        assert report is not None
        assert report.files == {0, 1, 2, 243}


def test_what_cannot_be_held_is_refused(stage: Stage, tmp_path: Path) -> None:
    root = {b"PUBLISH_ROOT": os.fsencode(tmp_path)}
    words = ("--hold", "--", str(stage.probe.path))
    for environ in (SLURM, {**PAIR, **root}):
        code, stderr, report = enter(stage, environ, *words, before=CONSOLE)
        assert (code, report) == (125, None)
        assert b"--hold needs PUBLISH_ROOT, and counters" in stderr
    assert enter(stage, {**SLURM, b"AGENT_HOLD": b"1"}, stage.probe.path)[0] == 125
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))  # noqa: E731
    code, stderr, report = enter(stage, {**SLURM, **root}, *words, before=CONSOLE, preexec_fn=few)
    assert (code, report) == (125, None)
    assert b"leave --hold out" in stderr


def test_the_variable_is_for_who_has_the_counters_and_not_for_nested_commands(stage: Stage, tmp_path: Path) -> None:
    environ = {**PAIR, b"PUBLISH_ROOT": os.fsencode(tmp_path), b"AGENT_HOLD": b"1"}
    assert enter(stage, environ, stage.probe.path)[0] == 42


def test_a_command_that_never_ran_leaves_a_held_mark_so_that_its_end_is_seen(stage: Stage, tmp_path: Path) -> None:
    environ = {**SLURM, b"PUBLISH_ROOT": os.fsencode(tmp_path), b"AGENT_HOLD": b"1"}
    assert enter(stage, environ, "/no/such/command")[0] == 127
    marker = tmp_path / "exec/3.4711.0/.dispatch/started.0"
    assert marker.read_bytes() == b"held\n"
    assert not is_locked(marker)


def test_a_command_that_never_ran_leaves_no_mark(stage: Stage, tmp_path: Path) -> None:
    environ = {**SLURM, b"PUBLISH_ROOT": os.fsencode(tmp_path)}
    assert enter(stage, environ, "/no/such/command")[0] == 127
    assert enter(stage, environ, stage.probe.path)[0] == 42


def test_a_root_that_cannot_be_marked_is_refused(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, stderr, _ = enter(stage, {**SLURM, b"PUBLISH_ROOT": os.fsencode(tmp_path / "file")}, stage.probe.path)
    assert code == 125
    assert b"cannot record the start below PUBLISH_ROOT" in stderr
    code, stderr, _ = enter(
        stage, {**SLURM, b"PUBLISH_ROOT": os.fsencode(tmp_path), b"SLURM_PROCID": b"../x"}, stage.probe.path
    )
    assert code == 125
    assert b"rank not a number: SLURM_PROCID is ../x" in stderr
