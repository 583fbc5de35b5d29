"""`dispatch-agent install DIR`: the agent into a volume, from where it runs in any image."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from dispatch_agent import __version__
from dispatch_agent.errors import AgentError, SettingsError

_LOCK_WAIT = 600.0  # seconds; another install takes one or two, on a node that starts twenty pods at once more
_TREES = "trees"
# What users name in DIR, and what it leads to. `current` is the switch: the others never change.
_LINKS = {"bin": "current/bin", "exec.py": "current/exec.py"}


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def install(folder: Path) -> None:
    """Copy the agent into DIR, with all it needs, so that it runs in any Linux image that DIR is mounted in.

    For the init container of a pod whose trainer has an image that you cannot or do not want to rebuild: with another
    Python or none, another C library or none. It may be mounted at another path there, and read-only.

    \b
    In the init container:  dispatch-agent install /opt/dispatch
    In the trainer's:       /opt/dispatch/bin/python -I -S /opt/dispatch/exec.py python train.py
    As its sidecar:         /opt/dispatch/bin/publish watch

    A second run changes nothing, and any number may run at once. A newer version takes the place of an older one in
    one step, and what was started from the older one goes on. Only the publisher image can do this.
    """
    source = Path(sys.prefix)
    if not (source / "digest").is_file():
        message = (
            f"this dispatch-agent is the package in {source}, which runs only where its Python is: run `install` from "
            "the publisher image, or bake the package into the trainer's image as images/training/Dockerfile does"
        )
        raise SettingsError(message)
    done = install_tree(source, folder)
    click.echo(f"dispatch-agent {__version__} {'installed in' if done else 'is already in'} {folder}")


def install_tree(source: Path, folder: Path) -> bool:
    """Make `folder` hold the tree `source`; whether anything had to be done.

    Whoever starts something from `folder` meanwhile gets one whole tree, the old or the new: a tree is copied beside
    and renamed into place before the link `current` leads to it. A crash of the machine may cut files short, since
    they are not flushed to disk: the next run sees that by their sizes, and replaces the tree.
    Raises SettingsError (`folder` holds other things by our names), AgentError (no room, or nothing there may be
    executed), OSError.
    """
    digest = (source / "digest").read_text(encoding="ascii").strip()[:16]
    for name in (*_LINKS, "current"):
        if (folder / name).exists() and not (folder / name).is_symlink():
            message = f"{folder / name} is there and is not the agent's: install into a folder of its own"
            raise SettingsError(message)

    def is_done() -> bool:
        return _is_installed(source, folder, digest)

    if is_done():
        return False
    try:
        (folder / _TREES).mkdir(mode=0o755, parents=True, exist_ok=True)
    except PermissionError:
        message = (
            f"{folder} cannot be written by uid {os.getuid()}: mount a volume there that this user may write to (an "
            "emptyDir, or fsGroup), or run as its owner"
        )
        raise AgentError(message) from None
    with _locked(folder / _TREES, is_done) as alone:
        if is_done():
            return False
        if alone:  # leftovers of an install that was killed
            _remove_all(path for path in (folder / _TREES).iterdir() if path.name.startswith("."))
        _place(source, folder / _TREES / digest)
        before = _target(folder / "current")
        _point(folder / "current", f"{_TREES}/{digest}")
        for name, target in _LINKS.items():
            _point(folder / name, target)
        if alone:
            # The one before stays for what was started from it.
            kept = {digest, Path(before).name}
            trees = (path for path in (folder / _TREES).iterdir() if path.name[0] != ".")
            _remove_all(path for path in trees if path.name not in kept)
    return True


def _is_installed(source: Path, folder: Path, digest: str) -> bool:
    return (
        _target(folder / "current") == f"{_TREES}/{digest}"
        and all(_target(folder / name) == target for name, target in _LINKS.items())
        and _is_whole(source, folder / _TREES / digest)
    )


def _is_whole(source: Path, tree: Path) -> bool:
    """Whether `tree` has the files of `source`, each in its size."""
    try:
        return _sizes(source) == _sizes(tree)
    except FileNotFoundError:  # it is being put aside
        return False


def _sizes(tree: Path) -> dict[str, int]:
    """The path of every file below a folder, and its bytes; none if there is no folder."""
    sizes = {}
    for folder, _, files in os.walk(tree):
        for name in files:
            path = f"{folder}/{name}"
            sizes[path.removeprefix(str(tree))] = os.lstat(path).st_size
    return sizes


def _place(source: Path, tree: Path) -> None:
    """Copy `source` beside `tree`, see it run, and rename it to `tree`, unless that is there and whole."""
    if _is_whole(source, tree):
        return
    mark = secrets.token_hex(6)
    new = tree.with_name(f".new.{mark}")
    try:
        _copy(source, new)
        _see_it_run(new)
        if _is_whole(source, tree):  # of an install that was faster, where locks do nothing
            return
        with contextlib.suppress(FileNotFoundError):
            tree.rename(tree.with_name(f".old.{mark}"))
        new.rename(tree)
    except OSError as error:
        # What another install placed is what we would have.
        if not (error.errno in {errno.ENOTEMPTY, errno.EEXIST} and _is_whole(source, tree)):
            raise
    finally:
        _remove_all([new, tree.with_name(f".old.{mark}")])


def _copy(source: Path, target: Path) -> None:
    """For everybody to read and run, whatever the umask: the trainer may be another user."""
    size = 0
    try:
        for name, _, files in os.walk(source):
            into = target / Path(name).relative_to(source)
            into.mkdir()
            into.chmod(0o755)
            for file in files:
                path = Path(name, file)
                size += path.stat().st_size
                shutil.copyfile(path, into / file)
                (into / file).chmod(0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        whole = sum(_sizes(source).values())
        message = (
            f"no room in {target.parent.parent}: it was full after {size >> 20} of {(whole >> 20) + 1} MiB; give the "
            "volume more (an upgrade needs room for three versions)"
        )
        raise AgentError(message) from None


def _see_it_run(tree: Path) -> None:
    command = [str(tree / "bin" / "python"), "-I", "-S", "-c", ""]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except PermissionError:
        message = f"nothing in {tree.parent.parent} may be executed: mount the volume without noexec"
        raise AgentError(message) from None
    if answer.returncode != 0:
        message = f"what was copied to {tree.parent.parent} does not run there: {answer.stderr.strip()}"
        raise AgentError(message)


@contextlib.contextmanager
def _locked(folder: Path, is_needless: Callable[[], bool]) -> Iterator[bool]:
    """Spares us what others do just now; whether we are alone. Nothing rests on it but tidying up.

    Waits for a bounded time, and no longer than until it is needless.
    """
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            until = time.monotonic() + _LOCK_WAIT
            alone = _lock(descriptor)
            if not alone:
                click.echo(f"waiting for another install in {folder.parent}", err=True)
            while not alone and not is_needless() and time.monotonic() < until:
                time.sleep(0.1)
                alone = _lock(descriptor)
        except OSError:  # a filesystem without locks
            alone = False
        yield alone


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _target(link: Path) -> str:
    """What a link leads to; empty if it is not there."""
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _point(link: Path, target: str) -> None:
    if _target(link) == target:
        return
    new = link.parent / _TREES / f".link.{secrets.token_hex(6)}"
    new.symlink_to(target)
    new.replace(link)


def _remove_all(paths: Iterator[Path] | list[Path]) -> None:
    """What cannot be removed takes room and does no harm; the next install tries again."""
    for path in list(paths):
        if path.is_symlink():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
