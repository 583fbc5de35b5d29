"""Ceph's S3 gateway: a monitor, one object store in memory and the gateway, all on 127.0.0.1."""

from __future__ import annotations

import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest
from tests.servers.processes import Server, answers, free_port, program, spawn, until

_CONFIGURATION = """\
[global]
fsid = {fsid}
mon initial members = a
mon host = [v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
# Else the monitor waits a second before each of the dozens of changes that the gateway's start needs.
paxos propose interval = 0.02
mon allow pool size one = true
mon warn on pool no redundancy = false
mon max pg per osd = 1000
mon data = {folder}/mon
mon data avail warn = 1
mon data avail crit = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 4294967296
osd data = {folder}/osd
run dir = {folder}/run
admin socket = {folder}/run/$cluster-$name.asok
pid file = {folder}/run/$cluster-$name.pid
log file = {folder}/run/$cluster-$name.log
keyring = {folder}/keyring
[client.rgw.a]
# Without tcp_nodelay every GET takes 40 ms.
rgw frontends = beast endpoint=127.0.0.1:{rgw} tcp_nodelay=1
rgw data = {folder}/rgw
rgw dns name = 127.0.0.1
rgw enable usage log = false
"""
_KEYS = {"mon.": "mon", "client.admin": "mon osd mds mgr", "client.rgw.a": "mon osd", "osd.0": "mon osd mgr"}


def start_ceph(folder: Path, access_key: str, secret_key: str) -> Server:
    """Its gateway answers, and the user with these keys is there."""
    return _Ceph(folder).start(access_key, secret_key)


class _Ceph:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._id = str(uuid.uuid4())
        self._ports = {name: free_port((0,)) for name in ("v2", "v1", "rgw")}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, access_key: str, secret_key: str) -> Server:
        try:
            self._configure()
            self._monitor()
            self._osd()
            self._gateway()
            names = ("--uid", "test", "--display-name", "test", "--access-key", access_key, "--secret", secret_key)
            self._run("radosgw-admin", "user", "create", *names)
        except BaseException:
            for process in self._processes:
                process.kill()
                process.wait()
            raise
        return Server(f"http://127.0.0.1:{self._ports['rgw']}", tuple(self._processes), self._folder)

    def _configure(self) -> None:
        for name in ("mon", "osd", "run", "rgw"):
            (self._folder / name).mkdir()
        text = _CONFIGURATION.format(folder=self._folder, fsid=self._id, **self._ports)
        (self._folder / "ceph.conf").write_text(text)
        keyring = str(self._folder / "keyring")
        for number, (name, allowed) in enumerate(_KEYS.items()):
            caps = [word for service in allowed.split() for word in ("--cap", service, "allow *")]
            create = () if number else ("--create-keyring",)
            self._run("ceph-authtool", *create, keyring, "--gen-key", "-n", name, *caps)

    def _monitor(self) -> None:
        where = f"[v2:127.0.0.1:{self._ports['v2']},v1:127.0.0.1:{self._ports['v1']}]"
        monmap = str(self._folder / "monmap")
        self._run("monmaptool", "--create", "--fsid", self._id, "--addv", "a", where, monmap)
        self._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", str(self._folder / "keyring"))
        self._spawn("ceph-mon", "-i", "a")

    def _osd(self) -> None:
        osd = str(uuid.uuid4())
        self._run("ceph", "--connect-timeout", "20", "osd", "new", osd, "0")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        process = self._spawn("ceph-osd", "-i", "0")
        self._until(lambda: "1 up" in self._run("ceph", "--connect-timeout", "20", "osd", "stat"), process)

    def _gateway(self) -> None:
        process = self._spawn("radosgw", "-n", "client.rgw.a")
        self._until(lambda: answers(self._ports["rgw"]), process)

    def _run(self, name: str, *arguments: str) -> str:
        command = [program(name), *self._settings(name), *arguments]
        done = subprocess.run(command, capture_output=True, check=False, timeout=60, stdin=subprocess.DEVNULL)
        if done.returncode:
            pytest.fail(f"{' '.join(command)}: {done.stderr.decode(errors='replace')[-2000:]}", pytrace=False)
        return done.stdout.decode()

    def _spawn(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        process = spawn([program(name), *self._settings(name), *arguments, "-f"], self._folder / "run" / f"{name}.out")
        self._processes.append(process)
        return process

    def _until(self, ready: Any, process: subprocess.Popen[bytes]) -> None:
        until(ready, process, self._folder / "run" / f"{Path(process.args[0]).name}.out")  # type: ignore[index,arg-type]

    def _settings(self, name: str) -> list[str]:
        return [] if name in {"ceph-authtool", "monmaptool"} else ["-c", str(self._folder / "ceph.conf")]
