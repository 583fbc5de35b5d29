"""JuiceFS: a filesystem whose files are elsewhere and whose names are in a database."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.servers.processes import program


def juicefs_volume(folder: Path) -> str:
    """A new volume that keeps everything in `folder`; the address of its database."""
    address = f"sqlite3://{folder / 'names.db'}"
    command = [program("juicefs"), "format", "--no-update", address, "volume"]
    command += ["--storage", "file", "--bucket", f"{folder / 'blobs'}/"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60, stdin=subprocess.DEVNULL)
    if done.returncode:
        pytest.fail(f"juicefs format failed: {done.stderr.decode(errors='replace')[-2000:]}", pytrace=False)
    return address
