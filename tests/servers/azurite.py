"""Azurite, Microsoft's own emulator of Azure Blob Storage: conditions are atomic, and wrong MD5s are refused."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.servers.processes import Server, program, shared, start

# The account that every azurite has, as its documentation prints it.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Container:
    """A fresh container of a running azurite."""

    endpoint: str
    name: str
    key: str = KEY

    @property
    def url(self) -> str:
        return f"abfs://{self.name}"

    @property
    def environment(self) -> dict[str, str]:
        """What a child process needs in its environment to reach this container."""
        return {"AZURE_STORAGE_CONNECTION_STRING": self._connection_string}

    @property
    def options(self) -> dict[str, Any]:
        """The same as storage options."""
        return {"connection_string": self._connection_string}

    @property
    def _connection_string(self) -> str:
        names = ("DefaultEndpointsProtocol=http", f"AccountName={ACCOUNT}", f"AccountKey={self.key}")
        return ";".join((*names, f"BlobEndpoint={self.endpoint}/{ACCOUNT}"))

    def create(self) -> Container:
        from azure.storage.blob.aio import ContainerClient

        async def create() -> None:
            async with ContainerClient.from_connection_string(self._connection_string, self.name) as client:
                await client.create_container()

        asyncio.run(create())
        return self


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of an azurite that keeps everything in memory."""
    with shared("azurite", lambda: start_azurite(tmp_path_factory.mktemp("azurite"))) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def azure_container(azurite: str) -> Container:
    """One container for many tests, each below a prefix of its own."""
    return Container(azurite, f"c-{uuid.uuid4().hex[:12]}").create()


def start_azurite(folder: Path, *where: str) -> Server:
    """Keeps in memory what it is given, unless `where` says `--location`, `folder`."""

    def command(port: int) -> list[str]:
        return [
            program("azurite-blob"),
            *("--silent", "--disableTelemetry", "--skipApiVersionCheck"),  # the SDK is newer than azurite
            *("--blobHost", "127.0.0.1", "--blobPort", str(port)),
            *(where or ("--inMemoryPersistence",)),
        ]

    return start(command, folder, {}, offsets=(0,))
