"""The script as a text: what it must not contain, what its vectors catch, and what its README claims."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dispatch_agent.cli import conformance
from dispatch_agent.cli.conformance import Runner, Stage

TEXT = conformance.SCRIPT.read_text(encoding="ascii")
README = conformance.PROLOGUE.joinpath("README.md").read_text(encoding="utf-8")
ORIGINAL = Path(__file__).with_name("original.sh").read_text(encoding="ascii")

# One change each, and what it would break.
MUTANTS = {
    "refusals die of a broken pipe": ("trap '' PIPE; ", ""),
    "a full stderr changes the exit code": (">&2 || :; exit 125", ">&2 && exit 125"),
    "the folder is entered logically": ("/*) command cd -P", "/*) command cd"),
    "an imported function replaces cd": ("command cd", "cd"),
    "a folder's name is taken as an option": ('"./$DISPATCH_K8S_WORKDIR"', '"$DISPATCH_K8S_WORKDIR"'),
    "a leading zero of A is read as octal": (" | 0[!/]*", ""),
    "a leading zero of J is read as octal": (" | */0?*)", ")"),
    "counts of seven digits are added up": ("???????*/* | */???????*)", "impossible)"),
    "the sum may reach the bound": ("  1??????) ;;\n", "  [12]??????) ;;\n"),
    "an epoch of submission 0 passes": (" | *000000??????", ""),
    "an epoch of 21 digits passes": (" | ?????????????????????*) return 1", ") return 1"),
    "the greatest generation is refused": ("  18000000*) ;;\n", ""),
    "a generation over the bound passes": ("1[89]??????????????????", "19??????????????????"),
    "a generation of 20000000 passes": (" | [23456789]???????????????????) return 1", ") return 1"),
    "an epoch of submission 0 and few digits passes": ("  ???????*) ;;\n", "  ??????*) ;;\n"),
    "an attempt may begin with a dot": ("*/[._-]*", "*/[_-]*"),
    "an attempt may hold any character": (
        " | */*[!0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz._-]*",
        "",
    ),
    "an attempt may be 200 characters long": (" | [23456789]??/*", ""),
    "an attempt may be 1000 characters long": (" | ????*/*", ""),
    "a contradiction passes": ('"$1/$2") ;;\n  *)', "*) ;;\n  impossible)"),
    "only the epoch is compared": ('"$1/$2") ;;', '"$1"/*) ;;'),
    "half a pair passes": ("*/e | */a)", "impossible)"),
    "an empty input is no input": ("${DISPATCH_K8S_ADMISSION+k}", "${DISPATCH_K8S_ADMISSION:+k}"),
    "a token prefix alone is no input": ("${DISPATCH_K8S_TOKEN_PREFIX+k}", ""),
    "an empty restart count of Slurm is 0": ("case ${SLURM_RESTART_COUNT-0} in", "case ${SLURM_RESTART_COUNT:-0} in"),
    "an empty generation is 0": ("case ${AGENT_GENERATION-0} in\n  ''", "case ${AGENT_GENERATION:-0} in\n  ''"),
    "the submission is not padded": ("N${DISPATCH_K8S_EPOCH_PREFIX#1}", "N$DISPATCH_SUBMISSION"),
    "a job id of Slurm may be anything": ("'' | 0* | *[!0123456789]* | ???????????*)", "impossible)"),
    "the array's job id is used": (".$SLURM_JOB_ID.", ".${SLURM_ARRAY_JOB_ID-$SLURM_JOB_ID}."),
    "no command is success": ("'' | -*) dispatch_refuse", "-*) dispatch_refuse"),
    "a command may be an option of exec": ("'' | -*) dispatch_refuse", "'') dispatch_refuse"),
    "the pair is not exported": ("export DISPATCH_EPOCH DISPATCH_ATTEMPT\n", ""),
    "an input is left": (" DISPATCH_K8S_WORKDIR\nexec", "\nexec"),
    "the shell stays": ('exec "$@"', '"$@"'),
    "arguments are split": ('exec "$@"', "exec $@"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_vectors_catch_one_change(mutant: str, contract: dict[str, Any], stage: Stage) -> None:
    old, new = MUTANTS[mutant]
    assert old in TEXT, "this change no longer applies: change it with the script"
    changed = TEXT.replace(old, new)
    # bash beside dash, since only it imports functions from the environment.
    runners = [conformance.shell_runner(str(shutil.which(shell)), text=changed) for shell in ("dash", "bash")]
    assert any(
        conformance.run(vector, contract["base_env"], runner, stage)
        for runner in runners
        for vector in contract["vectors"]
    )


def test_what_the_original_does_is_marked_as_it_was_measured(
    contract: dict[str, Any], stage: Stage, runner_for: Callable[..., Runner]
) -> None:
    # Every shell at hand, the commonest first: one miss is enough.
    shells = ("dash", "bash", "mksh", "busybox", "ksh93", "lksh", "posh", "zsh", "yash")
    runners = [(runner_for(shell, text=ORIGINAL), runner_for(shell)) for shell in shells]

    def missed(vector: Mapping[str, Any]) -> bool:
        # Where the present script misses it too (yash), it is the shell that differs.
        return any(
            conformance.run(vector, contract["base_env"], original, stage)
            and not conformance.run(vector, contract["base_env"], present, stage)
            for original, present in runners
        )

    # A fork that is refused keeps some shells busy for many seconds.
    measured = [vector for vector in contract["vectors"] if "nproc1_fresh_uid" not in vector.get("setup", {})]
    wrong = [vector["name"] for vector in measured if missed(vector) != (vector["original"] == "differs")]
    # Only bash 4.2 shows these two, and no distribution at hand has it.
    assert wrong == ["absolute command not found", "command not executable"]


def expand(text: str, known: Mapping[str, str]) -> str:
    """What Kubernetes does to `command:` and `args:` (third_party/forked/golang/expansion)."""

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return known.get(match[1], match[0]) if match[1] is not None else match[0]

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


def test_kubernetes_leaves_the_script_as_it_is(contract: dict[str, Any]) -> None:
    known = dict.fromkeys([*contract["base_env"], "1", "$", "@", "AGENT_GENERATION", "SLURM_JOB_ID"], "REPLACED")
    assert expand(TEXT, known) == TEXT
    assert "$$" not in TEXT
    assert not re.search(r"\$\([A-Za-z_.-]", TEXT)
    assert expand("a $$ $(HOME) $(NO) $(", {"HOME": "/h"}) == "a $ /h $(NO) $("


def test_the_script_needs_no_fork_and_no_tool() -> None:
    code = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))
    code = re.sub(r'"[^"]*"', '""', code)
    assert re.findall(r"`|\$\([^(]|\bprintf\b|(?<![\w\[])\[ |\bset\b|\btest\b|\beval\b|<<", code) == []


def test_every_name_that_the_script_sets_is_reserved_and_gone_at_the_end() -> None:
    assigned = set(re.findall(r"^ *([A-Za-z_]+)=", TEXT, re.MULTILINE))
    unset = set(re.findall(r"^unset (.*)$", TEXT, re.MULTILINE)[0].split())
    assert assigned - {"CDPATH"} == {"DISPATCH_EPOCH", "DISPATCH_ATTEMPT"} | assigned & unset
    assert "CDPATH='' command cd" in TEXT, "CDPATH is set for one command alone"


def test_shellcheck_has_nothing_to_say() -> None:
    shellcheck = shutil.which("shellcheck")
    assert shellcheck, "shellcheck is not installed"
    done = subprocess.run([shellcheck, "--shell=sh", conformance.SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_readme_names_only_vectors_that_exist(contract: dict[str, Any]) -> None:
    decisions = README.split("## Decisions")[1].split("\n## ")[0]
    named = set(re.findall(r"\[`([^`]+)`\]", decisions))
    assert named - {vector["name"] for vector in contract["vectors"]} == set()
    lines = [line for line in decisions.splitlines() if line.startswith("- ")]
    assert len(lines) >= 15
    assert [line for line in lines if "[`" not in line] == [], "every decision names a vector"


def test_the_readme_gives_the_reason_of_every_line_of_the_script() -> None:
    quoted = re.findall(
        r"^```sh\n(.*?)^```$", README.split("## Line by line")[1].split("\n## ")[0], re.MULTILINE | re.DOTALL
    )
    assert "".join(quoted) == "".join(f"{line}\n" for line in TEXT.splitlines() if line)


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox", "mksh", "lksh", "ksh93", "zsh", "posh"])
def test_a_shell_changes_of_the_environment_what_the_readme_says(
    shell: str, stage: Stage, runner_for: Callable[..., Runner]
) -> None:
    row = next(line for line in README.splitlines() if line.startswith(f"| {shell} | `") and line.count("|") == 5)
    added, dropped, separators = (cell.strip() for cell in row.split("|")[2:5])
    environ = {b"DISPATCH_EPOCH": b"1000000", b"DISPATCH_ATTEMPT": b"a", b"a.b": b"", b"IFS": b"x"}
    runner = runner_for(shell)
    words = runner.command([bytes(stage.probe.path)])
    subprocess.run(words, executable=runner.executable, env=environ, cwd=stage.folder, check=False)
    report = conformance.read_report(stage.probe.report)
    assert report is not None
    # ksh93 of some versions hands its own attributes on under a name that nobody would use.
    seen = report.environ.keys() - environ.keys() - {b"A__z"}
    assert {name.decode() for name in seen} == set(re.findall(r"[A-Z_]+", added))
    assert dropped.startswith("before") or (b"a.b" in report.environ) == (dropped == "no")
    assert (report.environ[b"IFS"] == b"x") == (separators == "kept")


def test_yash_blanks_arguments_and_misses_variables_that_it_cannot_decode(stage: Stage) -> None:
    shell = shutil.which("yash")
    assert shell, "yash is not installed"
    environ = {b"DISPATCH_EPOCH": b"1000000", b"DISPATCH_ATTEMPT": b"a", b"LC_ALL": b"C"}
    environ[b"DISPATCH_K8S_WORKDIR"] = "/no/such/folder/\u00e9".encode()
    stage.probe.report.write_bytes(b"")
    words = conformance.shell_runner(shell).command([bytes(stage.probe.path), "\u00e9".encode()])
    assert subprocess.run(words, executable=shell, env=environ, capture_output=True, check=False).returncode == 42
    report = conformance.read_report(stage.probe.report)
    assert report is not None, "a missing WorkDir went unseen, and the command ran"
    assert report.arguments[1:] == (b"",)


def test_toybox_of_the_distribution_has_no_shell() -> None:
    toybox = shutil.which("toybox")
    assert toybox, "toybox is not installed"
    done = subprocess.run([toybox, "sh", "-c", TEXT, "dispatch-prologue", "true"], capture_output=True, check=False)
    assert done.returncode != 0
    assert b"Unknown command sh" in done.stderr
