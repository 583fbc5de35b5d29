"""What is written down is what is there: exit codes, options and their variables, command lines, the version."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest

import dispatch_agent
from dispatch_agent import errors
from dispatch_agent.cli import main, publish
from dispatch_agent.errors import AgentError
from dispatch_agent.health import metrics
from dispatch_agent.settings import DISPATCH_DEST

HERE = Path(__file__).resolve().parent.parent
README = HERE / "README.md"
SETTINGS = HERE / "docs" / "settings.md"
DOCUMENTS = sorted([*HERE.glob("*.md"), *HERE.glob("docs/*.md"), *HERE.glob("prologue/*.md")])

# Of no class: success, and what the entry agent says of a command that it cannot become.
PLAIN_CODES = {0, 126, 127}
# The bases of other classes, which nobody raises: their codes are those of what is below them.
BASES = {"StoreError", "SaveError", "CommitError"}


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Header and rows of every table."""
    lines = [*text.splitlines(), ""]
    for number, line in enumerate(lines):
        if re.fullmatch(r"\|[-:| ]+\|", line) and number:
            rows = []
            for row in lines[number + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append(_cells(row))
            yield _cells(lines[number - 1]), rows


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def shell_lines(text: str) -> Iterator[list[str]]:
    """The words of every command line of ours in the `sh` blocks."""
    for block in re.findall(r"^```(?:sh|bash|shell)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|\||[|;&]", line):
                try:
                    words = shlex.split(part, comments=True)
                except ValueError:  # a quote that goes on in the next line: a script, not a line to type
                    continue
                while words and re.match(r"[A-Z_]+=|export$|env$", words[0]):
                    words = words[1:]
                if words and Path(words[0]).name in {"publish", "dispatch-agent"}:
                    yield [Path(words[0]).name, *words[1:]]


def commands(group: click.Group, *above: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in sorted(group.commands.items()):
        yield " ".join([*above, name]), command
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)


def classes() -> dict[str, int]:
    """Every exception class that is raised, and its exit code."""
    found: dict[str, int] = {}
    pending = [AgentError]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind.__module__ == errors.__name__ and kind.__name__ not in BASES:
            found[kind.__name__] = kind.exit_code
    return found


def option_variables() -> dict[str, str]:
    """The variable of every option of every `publish` command."""
    return {
        f"{name} {option.opts[0]}": str(option.envvar)
        for name, command in commands(publish.publish)
        for option in command.params
        if isinstance(option, click.Option) and option.name != "help"
    }


ALL = [*commands(main.cli)]


class TestExitCodes:
    def test_the_readme_has_one_table_and_it_equals_the_classes(self) -> None:
        found = [
            (header, rows)
            for header, rows in tables(README.read_text())
            if {"exit", "code"} & set(" ".join(header).lower().split())
        ]
        [(header, rows)] = found
        assert len(header) >= 3
        codes = {int(row[0]): set(re.findall(r"`([A-Z]\w+)`", row[1])) for row in rows}
        expected: dict[int, set[str]] = {code: set() for code in PLAIN_CODES}
        for name, code in classes().items():
            expected.setdefault(code, set()).add(name)
        assert codes == expected
        assert all(row[2] for row in rows), "every code has a meaning"

    def test_the_help_names_every_code(self) -> None:
        found = {int(code) for code in re.findall(r"(?<!\S)(\d+) [a-z]", main.EXIT_STATUS)}
        assert found == set(classes().values()) | PLAIN_CODES

    def test_the_help_of_the_program_shows_them(self) -> None:
        context = click.Context(main.cli, info_name="dispatch-agent")
        for code in classes().values():
            assert re.search(rf"(^| ){code} ", main.cli.get_help(context), re.MULTILINE)


class TestOptions:
    def test_every_option_of_publish_has_one_variable_of_its_own_name(self) -> None:
        for place, variable in option_variables().items():
            long_name = place.rpartition(" ")[2]
            assert variable == "PUBLISH_" + long_name.removeprefix("--").replace("-", "_").upper(), place

    def test_none_reads_a_reserved_variable(self) -> None:
        assert [v for v in option_variables().values() if v.startswith("DISPATCH_")] == []
        assert DISPATCH_DEST == "DISPATCH_PUBLISH_DEST", (
            "the one that the adapter sets; read by hand, set by nobody here"
        )

    def test_one_variable_means_the_same_everywhere(self) -> None:
        kinds: dict[str, set[str]] = {}
        for _, command in commands(publish.publish):
            for option in command.params:
                if isinstance(option, click.Option) and option.envvar:
                    kinds.setdefault(str(option.envvar), set()).add(f"{option.type!r} {option.multiple}")
        assert {variable: kind for variable, kind in kinds.items() if len(kind) > 1} == {}

    @pytest.mark.parametrize("variable", sorted(set(option_variables().values())))
    def test_docs_settings_has_a_row_that_names_the_commands_with_the_option(self, variable: str) -> None:
        rows = [row for _, rows in tables(SETTINGS.read_text()) for row in rows if row[0] == f"`{variable}`"]
        assert rows, f"docs/settings.md lacks a row for {variable}"
        with_it = {place.partition(" ")[0] for place, read in option_variables().items() if read == variable}
        assert set(rows[0][2].split(", ")) == with_it

    def test_docs_settings_has_no_variable_that_nothing_reads(self) -> None:
        documented = set(re.findall(r"`(PUBLISH_[A-Z_]+)`", SETTINGS.read_text()))
        assert documented - set(option_variables().values()) == set()

    @pytest.mark.parametrize("place", [name for name, _ in ALL])
    def test_every_command_says_what_it_does_and_every_option_too(self, place: str) -> None:
        command = dict(ALL)[place]
        assert command.help
        silent = [p.opts[0] for p in command.params if isinstance(p, click.Option) and not p.help]
        assert silent == []


LINES = [
    pytest.param(path, words, id=f"{path.relative_to(HERE)}: {shlex.join(words)}"[:90])
    for path in DOCUMENTS
    for words in shell_lines(path.read_text())
]


class TestCommandLines:
    def test_there_are_some(self) -> None:
        assert len(LINES) > 5

    @pytest.mark.parametrize(("path", "words"), LINES)
    def test_each_names_a_command_and_options_that_exist(self, path: Path, words: list[str]) -> None:
        command: click.Command = publish.publish if words[0] == "publish" else main.cli
        rest = words[1:]
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            assert rest[0] in command.commands, f"{path.name}: {shlex.join(words)}"
            command, rest = command.commands[rest[0]], rest[1:]
        if rest in ([], ["--help"], ["--version"]) and isinstance(command, click.Group):
            return
        if "--" in rest:
            rest = [*rest[: rest.index("--")], "--", "true"]
        with click.Context(command, info_name=words[0]) as context:
            command.parse_args(context, list(rest))  # raises a UsageError that says what is wrong


def test_every_metric_that_is_named_is_exposed() -> None:
    figures = metrics.Figures(**dict.fromkeys((field.name for field in fields(metrics.Figures)), 0))  # type: ignore[arg-type]
    page = metrics.exposition(lambda: figures, {})("")
    exposed = set(re.findall(r"^dispatch_publish_\w+", page.body.decode(), re.MULTILINE))
    named = {name for path in DOCUMENTS for name in re.findall(r"dispatch_publish_\w+", path.read_text())}
    assert named
    assert named - exposed == set()


def test_the_changelog_speaks_of_this_version_first() -> None:
    heads = re.findall(r"^## \[(.+?)\]", (HERE / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == dispatch_agent.__version__


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(HERE)))
def test_every_link_to_a_file_leads_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []
