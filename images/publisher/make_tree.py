"""Make the self-contained tree: our package, a Python, the C library and its loader, in one folder that runs anywhere.

    python3 make_tree.py TREE LAUNCHER REQUIREMENT...

For the Python that runs it, and the architecture that it runs on. Runs in a build stage: needs pip, patchelf, strip,
ldd and dpkg.
"""

from __future__ import annotations

import compileall
import hashlib
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

STDLIB = Path(sysconfig.get_path("stdlib"))
VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"
# Nobody asks a publisher to draw windows, to install packages or to test Python.
LEFT_OUT = (
    *("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data", "distutils", "venv", "sqlite3"),
    *("curses", "dbm", "turtle.py", "__pycache__", "site-packages", "dist-packages"),
    *("__phello__", "config-*", "_sysconfigdata*", "sitecustomize.py", "EXTERNALLY-MANAGED", "*.a"),
)
MODULES_LEFT_OUT = (
    "_tkinter*",
    "_curses*",
    "_dbm*",
    "_gdbm*",
    "_sqlite3*",
    "_test*",
    "_crypt*",
    "readline*",
    "_ctypes_test*",
    "_xx*",
    "xx*",
    "nis*",
    "ossaudio*",
)
# botocore describes 400 services; the publisher speaks to the store and to those that give credentials for it.
SERVICES = {"s3", "sts", "sso", "sso-oidc", "signin"}
# What a wheel's modules were compiled from.
BUILT_FROM = ("*.c", "*.h", "*.pyx", "*.pxd", "*.pxi", "*.pyi")
# Loaded by the C library itself when it is asked to: nothing names them as needed.
LOADED_LATE = ("libgcc_s.so.1", "libresolv.so.2", "libnss_dns.so.2", "libnss_files.so.2")


def main(tree: Path, launcher: Path, requirements: list[str]) -> None:
    loader = copy_python(tree)
    (tree / "libexec" / "dispatch-agent").write_bytes(only_ours(loader.read_bytes()))
    (tree / "libexec" / "dispatch-agent").chmod(0o755)
    (tree / "bin").mkdir()
    for name in "dispatch-agent", "publish", "python":
        shutil.copy(launcher, tree / "bin" / name)
    # Debian's own Python looks for packages elsewhere than others do.
    packages = Path(output(tree / "bin" / "python", "-I", "-c", "import site; print(site.getsitepackages()[0])"))
    install(packages, requirements)
    copy_libraries(tree, list(binaries(packages)))
    for package in "ca-certificates", "musl":  # what the launcher is linked with
        keep_licence(tree, package)
    shutil.copy(Path(__file__).with_name("entry.py"), tree)
    (tree / "etc").mkdir()
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", tree / "etc" / "ca-certificates.crt")
    # A volume may give the files new times: what was compiled is used without a look at its source, also what was
    # compiled with one when this Python ran a moment ago.
    compiled = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(tree, quiet=1, force=True, stripdir=str(tree), invalidation_mode=compiled)
    # The entry agent, compiled under a name that does not change with Python's version: a third of its time is saved.
    source = packages / "dispatch_agent" / "prologue.py"
    py_compile.compile(str(source), str(tree / "exec.py"), "exec.py", doraise=True, invalidation_mode=compiled)
    (tree / "digest").write_text(digest(tree) + "\n")


def copy_python(tree: Path) -> Path:
    """The interpreter, its library and what they need of the system; where the loader that it names is."""
    shutil.copytree(STDLIB, tree / "lib" / VERSION, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for pattern in MODULES_LEFT_OUT:
        for path in (tree / "lib" / VERSION / "lib-dynload").glob(pattern):
            path.unlink()
    (tree / "libexec").mkdir()
    python = tree / "libexec" / "python"
    shutil.copy(Path(sys.executable).resolve(), python)
    own = list(binaries(tree))
    folder = Path(re.search(r"libc\.so\.6 => (/\S+)/libc\.so\.6", output("ldd", python))[1])  # type: ignore[index]
    copied = copy_libraries(tree, own, [path for name in LOADED_LATE if (path := folder / name).exists()])
    # A wheel's search path is relative to itself; one of these would lead into the image that the tree is mounted in.
    for path in own + copied:
        output("patchelf", "--remove-rpath", path)
    loader = Path(output("patchelf", "--print-interpreter", python)).resolve()
    keep_licence(tree, owner(loader))
    return loader


def install(packages: Path, requirements: list[str]) -> None:
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check")
    subprocess.run([*pip, "--root-user-action=ignore", "--no-compile", "--target", packages, *requirements], check=True)
    shutil.rmtree(packages / "bin", ignore_errors=True)
    for pattern in BUILT_FROM:
        for path in packages.rglob(pattern):
            path.unlink()
    for described in (packages / "botocore" / "data").glob("*/"):
        if described.is_dir() and described.name not in SERVICES:
            shutil.rmtree(described)


def copy_libraries(tree: Path, programs: list[Path], late: Sequence[Path] = ()) -> list[Path]:
    """Every shared library that programs need, and those in `late`, with their licences; what was copied."""
    needed = set(late)
    for path in programs:
        linked = output("ldd", path)
        missing = re.findall(r"(\S+) => not found", linked)
        if missing:
            sys.exit(f"make_tree: {path} needs {missing}: install it in this build stage")
        needed |= {Path(found) for found in re.findall(r"=> (/\S+)", linked)}
    copied = []
    for library in sorted(needed):
        target = tree / "lib" / library.name
        if not target.exists() and not library.is_relative_to(tree):
            shutil.copy(library, target)
            keep_licence(tree, owner(library))
            copied.append(target)
    for path in programs + copied:
        output("strip", "--strip-unneeded", path)
    return copied


def binaries(tree: Path) -> Iterator[Path]:
    for path in sorted(tree.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path


def keep_licence(tree: Path, package: str) -> None:
    """Of a package of Debian; none is Python itself, whose LICENSE.txt is in its library."""
    if package:
        target = tree / "share" / "doc" / package
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(f"/usr/share/doc/{package}/copyright", target / "copyright")


def owner(library: Path) -> str:
    """Debian's package of a library, by any of its names; empty if it is in none."""
    for name in library, library.resolve(), Path(str(library).removeprefix("/usr")):
        answer = subprocess.run(["dpkg", "-S", name], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            return answer.stdout.split(":")[0]
    return ""


def only_ours(loader: bytes) -> bytes:
    """The loader, blind to the libraries of the image around it, which are of another age than its own.

    Those are what /etc/ld.so.preload names (GPU sharing puts one into a trainer's container) and what stands in the
    system's folders (an nsswitch.conf may ask for a module there). Each gets a name that nobody has, of equal length.
    """
    folders = set(re.findall(rb"/(?:usr/)?lib(?:64)?/(?:[^/\0]+/)?(?=\0)", loader))
    places = {b"/etc/ld.so.preload", *folders}
    if not folders or b"/etc/ld.so.preload" not in loader:
        sys.exit(f"make_tree: this loader names its folders otherwise than {places}")
    for place in places:
        loader = loader.replace(place + b"\0", b"/\1" + place[2:] + b"\0")
    return loader


def digest(tree: Path) -> str:
    """Of all that the tree holds: two builds are the same tree if and only if they have the same."""
    total = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        total.update(os.fsencode(path.relative_to(tree)) + b"\0")
        if path.is_file():
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def output(*command: str | Path) -> str:
    """What a program of the build stage prints; raises CalledProcessError where it fails."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
