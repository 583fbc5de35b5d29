"""Volumes that two hosts share, as two FUSE mounts on one."""

from tests.servers import seaweed
from tests.servers.mounts import juicefs_mounts, seaweed_mounts

__all__ = ["juicefs_mounts", "seaweed", "seaweed_mounts"]
