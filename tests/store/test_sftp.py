"""A destination over SFTP: whom it trusts, what it does when a connection is lost, what a killed writer leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.servers.processes import children, program
from tests.servers.sftp import SftpFolder
from tests.store.conftest import ChangedError, FileSource

from dispatch_agent.errors import SettingsError, StoreDenied, StoreUnavailable
from dispatch_agent.store.capabilities import Sweeps
from dispatch_agent.store.generic import GenericStore
from dispatch_agent.store.opening import open_store

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("sftp-conformance")]


@contextmanager
def opened(place: SftpFolder, name: str = "", **options: Any) -> Iterator[GenericStore]:
    store = open_store(f"{place.url}/{name or os.urandom(6).hex()}", {**place.options, **options})
    assert isinstance(store, GenericStore)
    try:
        yield store
    finally:
        store.close()


class TestTrust:
    def test_a_server_whose_key_nobody_put_down_is_refused(self, sftp_folder: SftpFolder, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        with pytest.raises(StoreDenied, match="known_hosts"), opened(sftp_folder, known_hosts=str(tmp_path / "empty")):
            pass

    def test_the_users_own_file_is_read_where_none_is_named(
        self, sftp_folder: SftpFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / ".ssh").mkdir()
        shutil.copy(sftp_folder.keys / "known_hosts", tmp_path / ".ssh")
        with opened(sftp_folder, known_hosts=None) as store:
            store.put("a", b"1")
            assert store.read("a").data == b"1"

    def test_a_server_that_has_another_key_is_refused(self, sftp_folder: SftpFolder, tmp_path: Path) -> None:
        other = new_key(tmp_path / "other").read_text()
        (tmp_path / "hosts").write_text(f"[127.0.0.1]:{sftp_folder.port} {other}")
        with (
            pytest.raises(StoreDenied, match="does not match"),
            opened(sftp_folder, known_hosts=str(tmp_path / "hosts")),
        ):
            pass

    def test_a_client_whose_key_the_server_does_not_know_is_denied(
        self, sftp_folder: SftpFolder, tmp_path: Path
    ) -> None:
        new_key(tmp_path / "other")
        stranger = {"key_filename": str(tmp_path / "other"), "look_for_keys": False, "allow_agent": False}
        with pytest.raises(StoreDenied, match="credentials"), opened(sftp_folder, **stranger):
            pass

    def test_a_password_is_not_shown(self, sftp_folder: SftpFolder) -> None:
        password = {"key_filename": None, "password": "geheim", "look_for_keys": False, "allow_agent": False}
        with pytest.raises(StoreDenied) as denied, opened(sftp_folder, **password):
            pass
        assert "geheim" not in str(denied.value)

    def test_an_option_that_nobody_knows_is_a_mistake(self, sftp_folder: SftpFolder) -> None:
        with pytest.raises(SettingsError, match="no_such_option"), opened(sftp_folder, no_such_option="1"):
            pass

    def test_a_missing_known_hosts_file_is_named(self, sftp_folder: SftpFolder) -> None:
        with pytest.raises(StoreUnavailable, match="/no/such/file"), opened(sftp_folder, known_hosts="/no/such/file"):
            pass


def test_nobody_there_is_unavailable(sftp_folder: SftpFolder) -> None:
    with pytest.raises(StoreUnavailable, match="look at the server"), opened(replace(sftp_folder, port=9)):
        pass


def test_a_lost_connection_is_replaced(sftp_folder: SftpFolder) -> None:
    """Once it is found out; the server's process for it is killed, as a firewall drops it."""
    before = set(children(os.getpid()))
    with opened(sftp_folder) as store:
        store.put("a", b"1")
        for process in set(children(os.getpid())) - before:
            os.kill(process, signal.SIGKILL)
        with pytest.raises(StoreUnavailable):
            store.read("a")
        assert store.read("a").data == b"1"


def test_a_folder_is_made_again_when_somebody_removed_it(sftp_folder: SftpFolder) -> None:
    with opened(sftp_folder, "removed") as store:
        store.put("a/b", b"1")
        shutil.rmtree(sftp_folder.path / "removed")
        with pytest.raises(StoreUnavailable):
            store.put("a/b", b"2")
        store.put("a/b", b"3")
        assert store.read("a/b").data == b"3"


def test_what_a_killed_writer_leaves_is_named_and_removed(sftp_folder: SftpFolder, tmp_path: Path) -> None:
    """It is no object, so no listing shows it."""
    (tmp_path / "file").write_bytes(bytes(100))
    with opened(sftp_folder, "killed") as store:
        store.put("data/a/b", b"1")
        (sftp_folder.path / "killed/data/a/.~dispatch.draft.0123").write_bytes(b"half")
        assert isinstance(store, Sweeps)
        assert [found.key for found in store.list("")] == ["data/a/b"]
        (left,) = store.leftovers("data")
        assert left.key == "data/a/.~dispatch.draft.0123"
        store.remove(left)
        store.remove(left)
        assert list(store.leftovers("")) == []
        with FileSource(tmp_path / "file", fails_at=50) as source, pytest.raises(ChangedError):
            store.upload("data/a/c", source)
        assert list(store.leftovers("")) == [], "a writer that lives tidies up by itself"


def new_key(path: Path) -> Path:
    command = [program("ssh-keygen", "openssh-client"), "-q", "-t", "ed25519", "-N", "", "-f", path]
    subprocess.run(command, check=True)
    return path.with_name(path.name + ".pub")
