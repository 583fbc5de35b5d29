"""`dispatch-agent prologue` and `dispatch-agent identity`, as a person or a container calls them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from dispatch_agent import prologue
from dispatch_agent.cli import conformance
from dispatch_agent.cli.prologue import identity_command, prologue_group
from dispatch_agent.errors import Refused, SettingsError, UsageError

SCRIPT = conformance.SCRIPT.read_text(encoding="ascii")
PAIR = {"DISPATCH_EPOCH": "18000000999999999999", "DISPATCH_ATTEMPT": "a", "PATH": "/usr/bin:/bin"}
ALL_NAMES = ("DISPATCH_JOB_ID", "DISPATCH_SUBMISSION", "SLURM_JOB_ID", "DISPATCH_EPOCH", "DISPATCH_ATTEMPT")


@pytest.fixture(autouse=True)
def no_identity_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALL_NAMES:
        monkeypatch.delenv(name, raising=False)


def call(*words: str) -> str:
    result = CliRunner().invoke(prologue_group, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_show_prints_the_canonical_bytes() -> None:
    assert call("show") == SCRIPT


def test_path_names_the_standalone_file() -> None:
    path = Path(call("path").strip())
    assert path.is_absolute()
    assert path.samefile(prologue.__file__)


def test_wrap_prints_a_command_that_kubernetes_and_the_script_hand_on_unchanged() -> None:
    words = json.loads(call("wrap", "--", "python", "-u", "a$$b", "$(HOME)"))
    assert words[:4] == ["/bin/sh", "-c", SCRIPT, "dispatch-prologue"]
    assert words[4:] == ["python", "-u", "a$$$$b", "$$(HOME)"]


def test_wrap_leaves_dollars_to_kubernetes_when_asked() -> None:
    assert json.loads(call("wrap", "--keep-dollars", "echo", "$(POD_NAME)"))[4:] == ["echo", "$(POD_NAME)"]


def test_a_wrapped_shell_line_runs_as_it_is() -> None:
    line = call("wrap", "--shell", "--", "sh", "-c", 'echo "$DISPATCH_EPOCH $1"', "x", "it's $$ \\ here")
    done = subprocess.run(line, shell=True, env=PAIR, capture_output=True, text=True, check=True)
    assert done.stdout == "18000000999999999999 it's $$ \\ here\n"


@pytest.mark.parametrize("words", [("--", "-x"), ("",), ("--shell", "--keep-dollars", "true")])
def test_wrap_refuses_what_could_not_run(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        call("wrap", *words)


def test_a_good_shell_passes_its_test_and_what_was_left_out_is_said() -> None:
    output = call("test", "--shell", "dash")
    assert "left out: 3 (needs locales made for it)" in output
    assert output.endswith("it gives every execution its right identity\n")


def test_a_bad_shell_is_described_in_words() -> None:
    result = CliRunner().invoke(prologue_group, ["test", "--shell", "yash"])
    assert result.exit_code == 1
    assert "bytes in arguments that are not UTF-8: arguments is" in result.output
    assert "it must not run the prologue" in result.output


def test_a_program_that_is_no_shell_fails_every_vector_it_can() -> None:
    result = CliRunner().invoke(prologue_group, ["test", "--json", "--shell", "true"])
    answer = json.loads(result.output)
    assert result.exit_code == 1
    assert answer["shell"] == shutil.which("true")
    assert answer["wrong"]["no command"] == [
        "exit code 0 instead of 125 (stderr b'')",
        "stderr b'' lacks 'no command'",
    ]


def test_a_shell_that_is_not_there_is_a_wrong_setting() -> None:
    with pytest.raises(SettingsError, match="/no/such/shell is not a program here"):
        call("test", "--shell", "/no/such/shell")


def test_identity_is_printed_with_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("DISPATCH_SUBMISSION", "3")
    output = CliRunner().invoke(identity_command, catch_exceptions=False).output
    assert "epoch    3000000 (generation 0, submission 3, restart 0)\n" in output
    assert "attempt  3.4711.0\n" in output
    assert "source   slurm (SLURM_JOB_ID, " in output


def test_identity_as_json_has_the_epoch_as_a_string(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PAIR.items():
        monkeypatch.setenv(name, value)
    answer = json.loads(CliRunner().invoke(identity_command, ["--json"], catch_exceptions=False).output)
    assert answer == {
        "job_id": None,
        "epoch": "18000000999999999999",
        "attempt": "a",
        "source": "ready-made",
        "generation": 18_000_000,
        "submission": 999_999,
        "restart": 999_999,
        "jobset": {},
        "weakened": [],
    }


def test_identity_reports_jobsets_later_counters_beside_what_they_do_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in PAIR.items():
        monkeypatch.setenv(name, value)
    before = json.loads(CliRunner().invoke(identity_command, ["--json"], catch_exceptions=False).output)
    monkeypatch.setenv("AGENT_K8S_IN_PLACE_RESTART", "2")
    monkeypatch.setenv("AGENT_K8S_EXECUTION", "5")
    answer = json.loads(CliRunner().invoke(identity_command, ["--json"], catch_exceptions=False).output)
    assert answer.pop("jobset") == {"in_place_restart": 2, "execution": 5}
    (reason,) = answer.pop("weakened")
    assert "2 time(s) in place" in reason
    assert answer == {name: value for name, value in before.items() if name not in {"jobset", "weakened"}}
    output = CliRunner().invoke(identity_command, catch_exceptions=False).output
    assert "jobset   in place restart 2\njobset   execution 5\nidentity weakened: JobSet restarted" in output


def test_no_identity_is_a_refusal() -> None:
    with pytest.raises(Refused, match="no identity"):
        CliRunner().invoke(identity_command, catch_exceptions=False)
