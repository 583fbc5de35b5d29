"""Which URL becomes which store, and what is refused before anything is sent."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from tests.store.conftest import ChangedError, FileSource

from dispatch_agent.errors import SettingsError, StoreTooWeak
from dispatch_agent.store.azure import AzureStore
from dispatch_agent.store.base import Store
from dispatch_agent.store.gcs import GcsStore
from dispatch_agent.store.generic import GenericStore
from dispatch_agent.store.memory import MemoryStore
from dispatch_agent.store.opening import open_store
from dispatch_agent.store.posix import PosixStore
from dispatch_agent.store.s3 import S3Store


@pytest.mark.parametrize(
    ("url", "expected", "shown"),
    [
        ("/data/job", PosixStore, "/data/job"),
        ("/data/job/", PosixStore, "/data/job"),
        ("file:///data/job", PosixStore, "/data/job"),
        ("file://localhost/data/my%20job", PosixStore, "/data/my job"),
        ("s3://bucket", S3Store, "s3://bucket"),
        ("s3://bucket/some/prefix/", S3Store, "s3://bucket/some/prefix"),
        ("s3a://bucket/prefix", S3Store, "s3://bucket/prefix"),
        ("memory://name", MemoryStore, "memory://name"),
        ("gs://bucket/some/prefix/", GcsStore, "gs://bucket/some/prefix"),
        ("gcs://bucket", GcsStore, "gs://bucket"),
        ("abfs://container/some/prefix/", AzureStore, "abfs://container/some/prefix"),
        ("az://container", AzureStore, "abfs://container"),
        ("abfss://c@account.dfs.core.windows.net/p", AzureStore, "abfs://c@account.dfs.core.windows.net/p"),
        ("local:///data/job", GenericStore, "local:///data/job"),
    ],
)
def test_urls_and_their_stores(url: str, expected: type, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    store = open_store(url, {"token": "anon"} if expected is GcsStore else None)
    assert isinstance(store, expected)
    assert store.url == shown


def test_a_relative_path_is_below_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("some/where")
    monkeypatch.chdir("/")
    store.put("a", b"1")
    assert (tmp_path / "some/where/a").read_bytes() == b"1"


@pytest.mark.parametrize(
    "url",
    [
        *("", "  ", "a\0b", "file://", "file://data/job", "nosuchscheme://x", "dir:///data", "://x"),
        *("s3://", "s3:///key", "s3://bucket/a//b", "s3://bucket/../x", "s3://bucket/x?versionId=1"),
        *("gs://", "gs://bucket/a//b", "abfs://", "abfs://container/x?sig=1", "abfs://no-account-given/x"),
    ],
)
def test_nonsense_is_refused(url: str) -> None:
    with pytest.raises(SettingsError) as refused:
        open_store(url)
    assert refused.value.exit_code == 3


@pytest.mark.parametrize(
    "url",
    ["s3://AKIA:hush@bucket/x", "s3://AKIA:hush/hush@bucket/x", "s3://AKIA@bucket/x", "sftp://me:hush@host/x"],
)
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(SettingsError, match="credentials") as refused:
        open_store(url)
    assert "hush" not in str(refused.value)
    assert "AKIA" not in str(refused.value)


@pytest.mark.parametrize("url", ["abfs://c/x?sv=1&sig=hush", "gs://b/x?hush", "s3://b/x?X-Amz-Signature=hush"])
def test_a_signature_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(SettingsError) as refused:
        open_store(url)
    assert "hush" not in str(refused.value)


def test_options_for_a_folder_are_a_mistake() -> None:
    with pytest.raises(SettingsError, match="profile"):
        open_store("/data", {"profile": "x"})


@pytest.mark.parametrize(
    ("url", "extra"),
    [
        ("s3://bucket/x", "s3"),
        ("gs://bucket/x", "gcs"),
        ("az://c/x", "azure"),
        ("sftp://host/x", "sftp"),
        ("webdav://host/x", "publish"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(url: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=rf"dispatch-agent\[{extra}\]"):
        open_store(url)


def test_folders_need_no_fsspec(tmp_path: Path) -> None:
    program = """
import sys
for name in ("fsspec", "s3fs", "botocore", "aiohttp"):
    sys.modules[name] = None
from dispatch_agent.store.opening import open_store
from dispatch_agent.store.probe import probe, require
require(probe(open_store(sys.argv[1])))
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "store")], check=True)


class TestAnyOtherUrl:
    """Through fsspec: everything but conditions, which are refused rather than guessed."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return GenericStore(f"local://{tmp_path}/store", "local", {})

    def test_writes_reads_lists_and_deletes(self, store: Store) -> None:
        store.put("a/b", b"one")
        store.put("a/b", b"two")
        store.put("c d/e+f", b"")
        assert store.read("a/b").data == b"".join(store.stream("a/b", chunk=2)) == b"two"
        assert sorted(found.key for found in store.list("")) == ["a/b", "c d/e+f"]
        assert list(store.folders("")) == ["a", "c d"]
        store.delete("a/b")
        store.delete("a/b")
        assert list(store.folders("")) == ["c d"]

    def test_drops_what_the_source_ends(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(100))
        with FileSource(tmp_path / "file", fails_at=50) as source, pytest.raises(ChangedError):
            store.upload("a/b", source)
        assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []
        with FileSource(tmp_path / "file") as source:
            assert not store.upload("a/b", source).verified
        assert store.read("a/b").data == bytes(100)

    def test_knows_no_conditions(self, store: Store) -> None:
        with pytest.raises(StoreTooWeak):
            store.create("a", b"1")
        with pytest.raises(StoreTooWeak):
            store.replace("a", b"1", "version")
