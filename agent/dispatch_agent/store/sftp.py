"""fsspec's SFTP filesystem, for a server whose key is known. fsspec itself would trust whoever answers, paramiko's
requests wait for ever for a server that hangs, and neither says what to do about a refusal."""

from __future__ import annotations

import logging
import socket
import stat
from typing import Any, NoReturn

import paramiko
from fsspec.implementations.sftp import SFTPFileSystem

# Where nobody listens to its log, Python would write its errors, which are raised as well, between our lines.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
CONNECT_SECONDS, ANSWER_SECONDS, ALIVE_SECONDS = 10, 60, 15


class KnownHostSFTP(SFTPFileSystem):  # type: ignore[misc]
    """One connection to one server. `known_hosts` is the file with its key, ~/.ssh/known_hosts if not given.

    Raises PermissionError where the server or we are refused.
    """

    def close(self) -> None:
        self.client.close()

    def _connect(self) -> None:
        options = {"timeout": CONNECT_SECONDS, **self.ssh_kwargs}
        known_hosts = options.pop("known_hosts", None)
        self.client = paramiko.SSHClient()
        self.client.load_system_host_keys(known_hosts)
        self.client.set_missing_host_key_policy(_Unknown())
        try:
            self.client.connect(self.host, **options)
            self.ftp = self.client.open_sftp()
        except BaseException as error:
            self.client.close()
            if isinstance(error, (paramiko.AuthenticationException, paramiko.BadHostKeyException)):
                raise PermissionError(str(error)) from error
            raise
        channel = self.ftp.get_channel()
        channel.settimeout(ANSWER_SECONDS)
        transport = channel.get_transport()
        transport.set_keepalive(ALIVE_SECONDS)
        if isinstance(transport.sock, socket.socket):
            # Measured: else each write of 32 KiB waits 40 ms for a delayed acknowledgement.
            transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> paramiko.SFTPFile:
        file = super()._open(path, mode, **options)
        if "r" in mode and stat.S_ISDIR(file.stat().st_mode or 0):  # the server opens one, and only then fails to read
            file.close()
            raise IsADirectoryError(path)
        return file


class _Unknown(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
    def missing_host_key(self, client: object, hostname: str, key: paramiko.PKey) -> NoReturn:
        del client
        msg = (
            f"the key of {hostname} ({key.get_name()}) is in no known_hosts file: put it there after you compared it"
            " (ssh-keyscan), or name the file with the storage option known_hosts"
        )
        raise PermissionError(msg)
