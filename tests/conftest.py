"""What holds for every test.

- The environment is clean: nothing that names an identity, a destination, credentials or a rank leaks in from the
  machine, and nothing that a test or a library sets leaks out of it.
- A test that leaves a thread or a child process behind fails.
- Nothing is skipped. A skip is a test that stopped testing and nobody noticed, so a run with one fails and names it.
  Choosing is possible with `-m` and `-k`: what is deselected was asked for.
- `@pytest.mark.root` is for a test that needs root. Under CI (the variable CI is set) it must run, so without root it
  fails; on a developer's machine it is deselected without root, and the first lines of the output say so.
- `@pytest.mark.crds` is for a test that needs the CRDs of Trainer and JobSet, which are too large to be kept here:
  `--crd-folder`, or the variable CRD_FOLDER, says where they are. Under CI it must be said; elsewhere the tests are
  deselected without it, and the first lines of the output say how to get them.
- `@pytest.mark.docker` is for a test that needs a container engine: without one it fails, and
  `-m 'not docker'` leaves it out.
- Tests that use one of the servers of `tests/servers/` carry the marker `server` by themselves.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers import FIXTURES

# What a job's, a cluster's or a developer's environment could tell the code under test.
_PREFIXES = (
    "DISPATCH_",
    "PUBLISH_",
    "AGENT_",
    "SLURM_",
    "PET_",
    "AWS_",
    "AZURE_",
    "GCSFS_",
    "GOOGLE_",
    "KUBERNETES_",
    "OMPI_",
    "PMI_",
    "TORCHELASTIC_",
)
_NAMES = frozenset(
    {
        "JOB_COMPLETION_INDEX",
        "RANK",
        "LOCAL_RANK",
        "NODE_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "STORAGE_EMULATOR_HOST",
    }
)

# Threads that libraries keep for the life of the process, by the start of their name.
_KEPT_THREADS = (
    "fsspecIO",  # fsspec's one event loop
    "asyncio_",  # the executor of that loop, which resolves host names
    "pytest_timeout",
    "tqdm_monitor",  # lightning and transformers draw progress bars
    "pydevd",  # a developer's debugger
)

_PATIENCE = 5.0  # seconds; a thread that was told to stop still needs a moment on a loaded machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounds", type=int, default=None, help="Rounds of every race (500 by hand).")
    parser.addoption("--exhaustive", action="store_true", help="Every schedule, where CI takes a seeded few of them.")
    parser.addoption(
        "--seeds", type=int, default=None, help="How many worlds tests/simulation runs (a million by hand)."
    )
    parser.addoption("--first-seed", type=int, default=0, help="The first of them.")
    parser.addoption(
        "--crd-folder",
        default=os.environ.get("CRD_FOLDER"),
        help="Where tests/manifests finds the CRDs of Trainer and JobSet. [default: CRD_FOLDER]",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name in [name for name in os.environ if name.startswith(_PREFIXES) or name in _NAMES]:
        del os.environ[name]
    # A downloaded model would make a test depend on somebody's server.
    os.environ["HF_HUB_OFFLINE"] = "1"
    config.pluginmanager.register(_NoSkips(), "no-skips")


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = ["not root: tests marked `root` are left out"] if _root_is_left_out() else []
    if _crds_are_left_out(config):
        lines.append(
            "no --crd-folder and no CRD_FOLDER: tests marked `crds` are left out; from a cluster with Trainer:"
        )
        lines += [
            f"  kubectl get crd {name} -o yaml > FOLDER/{path}"
            for name, path in (
                ("trainjobs.trainer.kubeflow.org", "release-2.3/trainjobs.yaml"),
                ("clustertrainingruntimes.trainer.kubeflow.org", "release-2.3/clustertrainingruntimes.yaml"),
                ("jobsets.jobset.x-k8s.io", "jobset/release-0.12.yaml"),
            )
        ]
    return lines


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the markers set here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and _uses_a_server(item):
            item.add_marker("server")
    for marker, is_left_out in (("root", _root_is_left_out()), ("crds", _crds_are_left_out(config))):
        if is_left_out:
            left_out = [item for item in items if item.get_closest_marker(marker)]
            items[:] = [item for item in items if item not in left_out]
            config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.fail("this test needs root, and CI must run it: run CI as root", pytrace=False)
    if item.get_closest_marker("crds") and not item.config.getoption("--crd-folder"):
        pytest.fail("this test needs CRDs, and CI must run it: set CRD_FOLDER", pytrace=False)


def _uses_a_server(item: pytest.Function) -> bool:
    """By a fixture that starts one, or a parameter by which a test asks for one."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return not FIXTURES.isdisjoint(item.fixturenames) or any(
        isinstance(parameter, str) and parameter in FIXTURES for parameter in parameters
    )


def _root_is_left_out() -> bool:
    return os.geteuid() != 0 and not os.environ.get("CI")


def _crds_are_left_out(config: pytest.Config) -> bool:
    return not config.getoption("--crd-folder") and not os.environ.get("CI")


class _NoSkips:
    """Turns skipped tests and skipped files into a failed run; expected failures are another thing and pass."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.skipped and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            terminalreporter.section("skipped, which fails the run (deselect with -m instead)", red=True)
            for nodeid in self.skipped:
                terminalreporter.line(nodeid)


@pytest.fixture
def exhaustive(request: pytest.FixtureRequest) -> bool:
    """Whether to try every schedule instead of a seeded few."""
    return bool(request.config.getoption("--exhaustive"))


@pytest.fixture(autouse=True)
def _environment_is_restored() -> Iterator[None]:
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    """Fixtures of a wider scope, such as a server for a whole module, are set up before this looks."""
    threads, children = set(threading.enumerate()), _children()
    yield
    deadline = time.monotonic() + _PATIENCE
    while True:
        left = [
            f"thread {thread.name}"
            for thread in threading.enumerate()
            if thread not in threads and thread.is_alive() and not thread.name.startswith(_KEPT_THREADS)
        ] + [f"process {name}" for name in sorted(_children() - children)]
        if not left:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"the test left behind: {', '.join(left)}", pytrace=False)
        time.sleep(0.01)


def _children() -> set[str]:
    """This process's own living children, as "pid (name)"; multiprocessing's tracker is kept for its whole life."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # most tests have none, and the look below takes milliseconds
        return set()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(errors="replace")
                command = (entry / "cmdline").read_bytes()
            except OSError:  # it ended meanwhile
                continue
            name, _, rest = stat.rpartition(")")
            state, parent = rest.split()[:2]
            if int(parent) == os.getpid() and state != "Z" and b"multiprocessing.resource_tracker" not in command:
                found.add(f"{name})")
    return found
