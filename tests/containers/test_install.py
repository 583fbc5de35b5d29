"""`dispatch-agent install`: from a volume, the agent runs in any image, beside any libraries, and leaves no trace."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.containers.engine import LOCKED, PUBLISHER, Run, docker, volume

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]

IDENTITY = {"DISPATCH_EPOCH": "1000001", "DISPATCH_ATTEMPT": "1.17.1"}
EMPTY = "dispatch-agent-test-empty:local"
# A path that the init container did not know, and that nobody would choose.
PLACE = "/some where/else"
PYTHON = f"{PLACE}/bin/python"
EXEC = (PYTHON, "-I", "-S", f"{PLACE}/exec.py")
TMP = "--tmpfs=/tmp:noexec,mode=1777"


@pytest.fixture(scope="module")
def empty() -> Iterator[None]:
    """An image that holds nothing at all."""
    subprocess.run(["docker", "import", "-", EMPTY], input=bytes(10240), check=True, capture_output=True)
    yield
    docker("rmi", "--force", EMPTY, check=False)


@pytest.fixture
def mounted(agent: str) -> tuple[str, ...]:
    """The trainer's side: the volume read-only at a path of its own, and nothing else to write to that may run."""
    return (*LOCKED, TMP, f"--volume={agent}:{PLACE}:ro")


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(
    "image",
    ["debian:bookworm-slim", "python:3.11-slim-bookworm", "busybox:latest", "musl-busybox:test", EMPTY],
    ids=["no-python", "python", "static", "musl", "scratch"],
)
def test_it_runs_in_any_image_and_the_command_is_the_first_process(
    image: str, run: Run, mounted: tuple[str, ...]
) -> None:
    """Without a C library or a Python of the image, or beside other ones; read-only, as any user, at any path."""
    shown = "import json, os; print(json.dumps([os.getpid(), os.getuid(), dict(os.environ)]))"
    ended = run(image, *EXEC, PYTHON, "-I", "-S", "-c", shown, environ=IDENTITY, options=mounted)
    assert ended.code == 0, ended.err
    process, user, environ = json.loads(ended.out)
    assert (process, user) == (1, 12345)
    for name in (
        "PATH",
        "HOSTNAME",
        "HOME",
        "LANG",
        "PYTHON_VERSION",
        "LC_CTYPE",
    ):  # the engine's, the image's, Python's
        environ.pop(name, None)
    assert environ == IDENTITY

    said = run(image, f"{PLACE}/bin/publish", "--help", options=mounted)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("Usage: publish ")


def test_an_installed_agent_publishes(run: Run, mounted: tuple[str, ...]) -> None:
    """The whole package is there, also what it loads late: from a save to its proof, in an image without glibc."""
    program = (
        "import os, subprocess; bin = os.environ['BIN']; os.makedirs('/data/exec/1.17.1/step-1');"
        "open('/data/exec/1.17.1/step-1/weights', 'wb').write(bytes(300_000));"
        "[subprocess.run([bin + '/publish', *words], check=True) for words in ("
        "['complete', '/data/exec/1.17.1/step-1'], ['publish', '/data/exec/1.17.1/step-1'], ['verify', '--all'])]"
    )
    settings = {**IDENTITY, "PUBLISH_ROOT": "/data", "PUBLISH_DEST": "/data/store", "BIN": f"{PLACE}/bin"}
    options = (*mounted, "--tmpfs=/data:mode=1777")
    ended = run("musl-busybox:test", *EXEC, PYTHON, "-I", "-c", program, environ=settings, options=options)
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("command", "environ", "code"),
    [
        (["true"], {}, 125),
        (["/etc/passwd"], IDENTITY, 126),
        (["no-such-program"], IDENTITY, 127),
        (["sh", "-c", "exit 42"], IDENTITY, 42),
    ],
)
@pytest.mark.parametrize("form", [EXEC, (f"{PLACE}/bin/dispatch-agent", "exec", "--")], ids=["exec.py", "exec"])
def test_exit_codes_pass(
    form: tuple[str, ...], command: list[str], environ: dict[str, str], code: int, run: Run, mounted: tuple[str, ...]
) -> None:
    ended = run("busybox:latest", *form, *command, environ=environ, options=mounted)
    assert ended.code == code
    assert ended.err.count("\n") == (0 if code == 42 else 1)


def test_a_hostile_python_environment_reaches_the_trainer_and_not_the_agent(
    run: Run, mounted: tuple[str, ...], tmp_path: Path
) -> None:
    for name in ("sitecustomize", "usercustomize", "posix", "os", "prologue", "click", "dispatch_agent"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the agent imported a module of the user')")
    tmp_path.chmod(0o755)
    hostile = {
        "PYTHONPATH": "/hostile",
        "PYTHONHOME": "/nowhere",
        "PYTHONSTARTUP": "/hostile/os.py",
        "PYTHONWARNINGS": "error",
        "PYTHONINSPECT": "1",
        "LC_ALL": "xx_XX.nonsense",
    }
    options = (*mounted, f"--volume={tmp_path}:/hostile:ro", "--workdir=/hostile")
    ended = run("python:3.11-slim-bookworm", *EXEC, "env", environ={**IDENTITY, **hostile}, options=options)
    assert (ended.code, ended.err) == (0, "")
    assert {f"{name}={value}" for name, value in hostile.items()} <= set(ended.out.splitlines())
    said = run("python:3.11-slim-bookworm", f"{PLACE}/bin/publish", "--help", environ=hostile, options=options)
    assert said.out.startswith("Usage: publish ")


@pytest.fixture(scope="module")
def hostile_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a library under many names, that ends every process which loads it with 66."""
    folder = tmp_path_factory.mktemp("hostile")
    source = '__attribute__((constructor)) void here(void) { __asm__("" ::: "memory"); _exit(66); }'
    built = folder / "libc.so.6"
    command = ["gcc", "-shared", "-fPIC", "-include", "unistd.h", "-x", "c", "-", "-o", built]
    subprocess.run(command, input=source, text=True, check=True)
    for name in ("libnss_hostile.so.2", "libssl.so.3", "libcrypto.so.3", "libz.so.1", "libpython3.11.so.1.0"):
        (folder / name).write_bytes(built.read_bytes())
    (folder / "preload").write_text("/hostile/libc.so.6\n")
    (folder / "nsswitch.conf").write_text("hosts: hostile files dns\n")
    (folder / "libraries.cache").write_bytes(b"nothing that a loader knows")
    folder.chmod(0o755)
    return folder


def test_libraries_of_the_image_do_not_reach_the_agent(
    run: Run, mounted: tuple[str, ...], hostile_library: Path
) -> None:
    """What a user preloads is of another C library's age: loaded into the agent, no trainer would start."""
    hostile = {
        "LD_PRELOAD": "/hostile/libc.so.6",
        "LD_AUDIT": "/hostile/libc.so.6",
        "LD_LIBRARY_PATH": "/hostile",
        "GLIBC_TUNABLES": "glibc.rtld.nonsense=1",
    }
    system = (
        f"--volume={hostile_library}:/hostile:ro",
        f"--volume={hostile_library}/preload:/etc/ld.so.preload:ro",
        f"--volume={hostile_library}/libraries.cache:/etc/ld.so.cache:ro",
        f"--volume={hostile_library}/nsswitch.conf:/etc/nsswitch.conf:ro",
        f"--volume={hostile_library}/libnss_hostile.so.2:/lib/libnss_hostile.so.2:ro",
        f"--volume={hostile_library}/libnss_hostile.so.2:/usr/lib/libnss_hostile.so.2:ro",
    )
    # busybox is static, so that the user's command itself bears it; a command of Debian's does not.
    assert run("debian:bookworm-slim", "true", options=system).code == 66
    options = (*mounted, *system)
    ended = run("busybox:latest", *EXEC, "env", environ={**IDENTITY, **hostile}, options=options)
    assert (ended.code, ended.err) == (0, "")
    seen = ended.out.splitlines()
    assert {f"{name}={value}" for name, value in hostile.items()} <= set(seen)
    assert not [line for line in seen if "KEPT" in line]

    shown = run(
        "busybox:latest",
        f"{PLACE}/bin/dispatch-agent",
        *("exec", "--", "env"),
        environ={**IDENTITY, **hostile},
        options=options,
    )
    assert sorted(line for line in shown.out.splitlines() if not line.startswith("HOSTNAME")) == sorted(
        line for line in seen if not line.startswith("HOSTNAME")
    )
    resolved = run(
        "busybox:latest",
        *(PYTHON, "-I", "-c", "import socket, ssl; print(socket.gethostbyname('localhost'))"),
        environ=hostile,
        options=options,
    )
    assert (resolved.code, resolved.out) == (0, "127.0.0.1\n"), resolved.err


def test_the_installed_entry_agent_keeps_the_whole_contract(run: Run, agent: str) -> None:
    """Every vector of the prologue, through the launcher and the loader of the tree."""
    program = """
import sys, tempfile
from pathlib import Path
from dispatch_agent.cli import conformance as c
contract = c.load()
folder = Path(tempfile.mkdtemp(dir="/run-here"))
(folder / "fixtures").mkdir()
c.lay_out(contract["fixtures"], folder / "fixtures")
stage = c.Stage(folder / "fixtures", c.make_python_probe(folder))
python = sys.prefix + "/bin/python"
runner = c.Runner(python, (python, "-I", "-S", sys.prefix + "/exec.py"))
vectors = [vector for vector in contract["vectors"] if c.why_left_out(vector, stage) is None]
for vector in vectors:
    for sentence in c.run(vector, contract["base_env"], runner, stage):
        print(vector["name"], sentence)
print(len(vectors) > 200)
"""
    # Not at PLACE: the vectors' probe is a script, whose first line cannot name a path with a space.
    options = (*LOCKED, TMP, "--tmpfs=/run-here:exec,mode=1777", f"--volume={agent}:/opt/dispatch:ro")
    ended = run("debian:bookworm-slim", "/opt/dispatch/bin/python", "-I", "-c", program, options=options)
    assert (ended.out, ended.err) == ("True\n", "")


def test_installs_at_once_leave_one_tree_and_all_succeed() -> None:
    """The pods of a job start together, on one volume. Whoever comes later finds all done."""
    with volume() as name:
        command = ("run", "--rm", "--network=none", *LOCKED, f"--volume={name}:/v", PUBLISHER, "install", "/v")
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda _: docker(*command, check=False), range(12)))
        assert [answer.returncode for answer in answers] == [0] * 12, [answer.stderr for answer in answers]
        listed = docker("run", "--rm", f"--volume={name}:/v:ro", "busybox:latest", "ls", "-A", "/v/trees").stdout
        assert len(listed.split()) == 1
        assert "is already in /v" in docker(*command).stdout


def test_a_full_volume_is_said_and_left_empty(run: Run) -> None:
    full = "--tmpfs=/v:exec,size=20m,mode=1777"
    ended = run(PUBLISHER, "install", "/v", options=(*LOCKED, full))
    assert ended.code == 1
    assert "no room in /v" in ended.err
    assert ended.err.count("\n") == 1


def test_a_volume_from_which_nothing_may_run_is_said_before_the_trainer_fails(run: Run) -> None:
    ended = run(PUBLISHER, "install", "/v", options=(*LOCKED, "--tmpfs=/v:noexec,size=200m,mode=1777"))
    assert ended.code == 1
    assert "mount the volume without noexec" in ended.err


def test_a_folder_that_the_loader_cannot_take_is_refused_in_a_sentence(run: Run) -> None:
    ended = run(PUBLISHER, "install", "/v/a:b", options=(*LOCKED, "--tmpfs=/v:exec,size=200m,mode=1777"))
    assert ended.code == 1
    assert "the loader takes no folder with one of : ; $ in its name" in ended.err
