"""OpenSSH's sshd for SFTP, with keys of its own: a place to write to that knows no conditions."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.servers.processes import Server, free_port, program, shared, spawn, until

_CONFIGURATION = """\
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/client.pub
StrictModes no
PasswordAuthentication no
UsePAM no
PidFile none
MaxStartups 100
Subsystem sftp internal-sftp
"""


@dataclass(frozen=True)
class SftpFolder:
    """A folder behind a running sshd, and the files by which a client and the server know each other."""

    port: int
    path: Path
    keys: Path

    @property
    def url(self) -> str:
        return f"sftp://{getpass.getuser()}@127.0.0.1:{self.port}{self.path}"

    @property
    def environment(self) -> dict[str, str]:
        """What a child process needs in its environment to reach this folder."""
        return {"PUBLISH_STORAGE_OPTION": " ".join(f"{name}={value}" for name, value in self.options.items())}

    @property
    def options(self) -> dict[str, Any]:
        """The same as storage options."""
        return {"key_filename": str(self.keys / "client"), "known_hosts": str(self.keys / "known_hosts")}


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of an sshd."""
    with shared("sftp", lambda: start_sftp(tmp_path_factory.mktemp("sftp"))) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def sftp_folder(sshd: str, tmp_path_factory: pytest.TempPathFactory) -> SftpFolder:
    port, _, keys = sshd.removeprefix("sftp://127.0.0.1:").partition("/")
    return SftpFolder(int(port), tmp_path_factory.mktemp("sftp-root"), Path("/" + keys))


def start_sftp(folder: Path) -> Server:
    """Its keys, its client's and what the client must know of it are in `folder`."""
    port = free_port((0,))
    for name in ("host", "client"):
        keygen = [program("ssh-keygen", "openssh-client"), "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
        subprocess.run(keygen, check=True)
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    (folder / "sshd_config").write_text(_CONFIGURATION.format(port=port, folder=folder))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's own, which only its service would make
    log = folder / "log"
    # By its whole path, or it will not start.
    process = spawn(
        [os.path.realpath(program("sshd", "openssh-server")), "-D", "-e", "-f", str(folder / "sshd_config")], log
    )
    until(lambda: greets(port), process, log)
    return Server(f"sftp://127.0.0.1:{port}{folder}", (process,), folder)


def greets(port: int) -> bool:
    """Whether something speaks SSH on this port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        return connection.recv(4) == b"SSH-"
    return False
