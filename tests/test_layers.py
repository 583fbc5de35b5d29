"""The shape of the code: imports point downwards, the main flow is short, and few files print or exit."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "agent" / "dispatch_agent"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "_prologue" not in path.parts)

# What publishing one save goes through, in order: the files a reader opens.
MAIN_FLOW = (
    "cli/publish.py",
    "publish/watcher.py",
    "publish/publisher.py",
    "publish/publication.py",
    "publish/commit.py",
)

MAY_PRINT_OR_EXIT = ("__main__.py", "prologue.py", "cli/")


def test_imports_keep_every_contract() -> None:
    """`lint-imports` passes on the package as it is."""
    answer = _lint_imports(ROOT)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("file", "statement", "contract"),
    [
        ("identity.py", "import dispatch_agent.store.base", "layers point downwards"),
        ("store/base.py", "import dispatch_agent.checkpoint.save", "layers point downwards"),
        ("stray.py", "", "layers point downwards"),
        ("publish/records.py", "import dispatch_agent.publish.commit", "the publisher's own layers"),
        ("prologue.py", "import click", "exec is light"),
        ("identity.py", "import fsspec", "exec is light"),
        ("publish/commit.py", "import watchdog.observers", "one file watches"),
        ("publish/commit.py", "import fsspec", "only store speaks to the destination"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(tmp_path: Path, file: str, statement: str, contract: str) -> None:
    """The contracts are not empty words: the import that each forbids is caught, in a copy."""
    shutil.copytree(PACKAGE, tmp_path / "agent" / "dispatch_agent", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "agent" / "dispatch_agent" / file).open("a") as source:
        source.write(f"\n{statement}\n")
    answer = _lint_imports(tmp_path)
    assert answer.returncode != 0, answer.stdout
    broken = [line for line in answer.stdout.splitlines() if line.endswith("BROKEN")]
    # Of a file that no layer names, it says so without reaching a verdict.
    assert any(contract in line for line in broken) or (file == "stray.py" and "stray" in answer.stdout), answer.stdout


def test_the_main_flow_is_five_files_that_lead_to_each_other() -> None:
    """From the command to the commit record, each file imports the next one."""
    for file, following in pairwise(MAIN_FLOW):
        module = f"dispatch_agent.{following.removesuffix('.py').replace('/', '.')}"
        assert module in _imports(PACKAGE / file), f"{file} does not import {module}"


def test_no_module_has_a_name_that_says_nothing() -> None:
    """A module is named by what it does, with a word of the domain."""
    empty = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers", "core", "base_utils"}
    assert [str(path.relative_to(ROOT)) for path in SOURCES if path.stem in empty] == []


def test_only_the_prologue_and_the_commands_print_or_exit() -> None:
    """Everything else answers by returning or raising, so it can be used as a library."""
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in SOURCES
        if not str(path.relative_to(PACKAGE)).startswith(MAY_PRINT_OR_EXIT)
        for line in _prints_and_exits(path)
    ]
    assert found == []


def test_the_check_for_printing_sees_each_way_to_print_or_exit(tmp_path: Path) -> None:
    """It would catch them; a check that sees nothing passes everywhere."""
    ways = ("print(1)", "sys.exit(1)", "exit()", "os._exit(1)", "raise SystemExit", "raise SystemExit(1)")
    streams = ("sys.stdout.write('')", "sys.__stderr__.flush()")
    source = tmp_path / "source.py"
    source.write_text("\n".join([*ways, *streams, "printer(exiting)"]))
    assert _prints_and_exits(source) == list(range(1, len(ways) + len(streams) + 1))


def _lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(folder / "agent"), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [program, "--no-cache"], cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def _imports(file: Path) -> set[str]:
    """Every module that a file imports, wherever in the file it does."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _prints_and_exits(file: Path) -> list[int]:
    lines = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Call(func=ast.Name(id="print" | "exit" | "quit")):
                lines.add(node.lineno)
            case ast.Attribute(
                value=ast.Name(id="sys"), attr="exit" | "stdout" | "stderr" | "__stdout__" | "__stderr__"
            ):
                lines.add(node.lineno)
            case ast.Attribute(value=ast.Name(id="os"), attr="_exit"):
                lines.add(node.lineno)
            case ast.Raise(exc=ast.Name(id="SystemExit") | ast.Call(func=ast.Name(id="SystemExit"))):
                lines.add(node.lineno)
    return sorted(lines)
