"""The commands against Azure, Google Cloud Storage and SFTP where something is wrong: which exit code, what is said."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import Job
from tests.servers.azurite import KEY, Container, azure_container, azurite
from tests.servers.gcs import GcsBucket, fake_gcs, gcs_bucket
from tests.servers.sftp import SftpFolder, sftp_folder, sshd
from tests.store.front import Reply, front

__all__ = ["azure_container", "azurite", "fake_gcs", "gcs_bucket", "sftp_folder", "sshd"]

pytestmark = pytest.mark.server
AZURE = pytest.mark.xdist_group("azurite-conformance")
GOOGLE = pytest.mark.xdist_group("gcs-conformance")
SFTP = pytest.mark.xdist_group("sftp-conformance")


def at(job: Job, place: Container | GcsBucket | SftpFolder) -> Job:
    return replace(job, dest=f"{place.url}/job", environ=place.environment)


@AZURE
def test_a_wrong_account_key_is_denied_and_not_shown(job: Job, azure_container: Container) -> None:
    wrong = base64.b64encode(b"a wrong key").decode()
    denied = at(job, replace(azure_container, key=wrong))
    save = job.save("step-1")
    for result in (denied.run("watch", "--log-level", "debug"), denied.run("publish", save), denied.run("list")):
        result.fails(11, denied.dest, "credentials")
        assert wrong not in result.err + result.out


def test_no_azure_identity_at_all_is_denied_in_one_sentence(job: Job) -> None:
    """The SDK would fill a page about it."""
    options = "account_name=a account_host=127.0.0.1:9 exclude_managed_identity_credential=1"
    nobody = replace(job, dest="abfs://container/job", environ={"PUBLISH_STORAGE_OPTION": options})
    result = nobody.run("list")
    result.fails(11, nobody.dest, "give an account key")
    assert len(result.err.splitlines()) == 1, result.err


@GOOGLE
def test_a_google_account_that_may_not_is_denied(job: Job, gcs_bucket: GcsBucket) -> None:
    """The emulator lets everybody in: here a front does not."""
    with front(gcs_bucket.endpoint, lambda *_: Reply(403, [("Content-Type", "text/plain")], b"no")) as endpoint:
        denied = at(job, gcs_bucket.behind(endpoint))
        for result in (denied.run("watch", "--once"), denied.run("publish", job.save("step-1")), denied.run("list")):
            result.fails(11, denied.dest, "credentials")


@SFTP
def test_an_sftp_server_that_nobody_knows_is_denied(job: Job, sftp_folder: SftpFolder, tmp_path: Path) -> None:
    (tmp_path / "known_hosts").touch()
    stranger = at(job, sftp_folder)
    options = f"key_filename={sftp_folder.keys}/client known_hosts={tmp_path}/known_hosts"
    result = stranger.run("list", PUBLISH_STORAGE_OPTION=options)
    result.fails(11, "known_hosts", "ssh-keyscan")
    assert len(result.err.splitlines()) == 1, result.err


@AZURE
def test_a_missing_container_is_named(job: Job, azure_container: Container) -> None:
    missing = at(job, replace(azure_container, name="no-such-container"))
    missing.run("list").fails(10, "no-such-container", "create the container")
    missing.run("watch", "--start-timeout", "0").fails(10, "no-such-container", "create the container")


@GOOGLE
def test_a_missing_bucket_is_named(job: Job, gcs_bucket: GcsBucket) -> None:
    missing = at(job, replace(gcs_bucket, name="no-such-bucket"))
    missing.run("list").fails(10, "no-such-bucket", "create it")
    missing.run("watch", "--start-timeout", "0").fails(10, "no-such-bucket", "create it")


@AZURE
def test_secrets_are_in_no_output(job: Job, azure_container: Container) -> None:
    there = at(job, azure_container)
    for result in (
        there.run("publish", job.save("step-1"), "--log-level", "debug"),
        there.run("probe"),
        there.run("latest", "--json"),
        there.run("list"),
    ):
        result.passes()
        assert KEY not in result.err + result.out
