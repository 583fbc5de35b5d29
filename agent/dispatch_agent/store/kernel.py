"""What Linux knows that Python does not ask: what a folder is stored on, rename without replacing, and clone."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispatch_agent.support import Support

_libc = ctypes.CDLL(None, use_errno=True)

FUSE = 0x65735546
# linux/magic.h and the filesystems' own sources. What keeps flock and link between hosts is a matter of the server and
# the mount there, and no probe that runs on one host can see it.
NETWORK = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    FUSE: "FUSE or virtiofs",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x01021997: "9p",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0x19830326: "BeeGFS",
    0xAAD7AAEA: "PanFS",
    0x786F4256: "VirtualBox shared folder",
    0xF15F: "eCryptfs",
}
LOCAL = {
    0xEF53: "ext",
    0x58465342: "XFS",
    0x9123683E: "Btrfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlayfs",
    0x2FC12FC1: "ZFS",
    0xF2F52010: "F2FS",
    0xCA451A4E: "bcachefs",
    0x3153464A: "JFS",
}
FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)
RENAME_NOREPLACE = 1
# For libcs that lack the wrapper: the number is one for x86-64 and one for every newer architecture.
RENAMEAT2 = {"x86_64": 316, "aarch64": 276, "riscv64": 276, "ppc64le": 357, "s390x": 347}


def filesystem_magic(folder: int) -> int:
    """`f_type` of statfs(2) for an open folder. Raises OSError."""
    # struct statfs begins with f_type, one machine word on every 64-bit Linux; 256 bytes hold the rest.
    answer = (ctypes.c_long * 32)()
    if _libc.fstatfs(folder, ctypes.byref(answer)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(answer[0]) & 0xFFFFFFFF


def lock_trust(magic: int) -> Support:
    """Whether flock(2) on this filesystem holds off every other writer, by the list above."""
    if magic in LOCAL:
        return Support("yes", "catalogue", f"{LOCAL[magic]}: one host, one kernel, one lock")
    if magic in NETWORK:
        return Support(
            "unknown",
            "catalogue",
            f"{NETWORK[magic]}: whether a lock taken here holds on other hosts depends on server and mount;"
            " the latest pointer is advisory, the commit records are the truth",
        )
    return Support(
        "unknown", "catalogue", f"filesystem type {magic:#x} is not on the list of those whose locks are known"
    )


@dataclass(frozen=True, slots=True)
class Sharing:
    """What is known of hosts that share a filesystem. `names`: one that was made here is refused to all others.
    `listings`: one that was made here is in every other's next listing."""

    names: Support
    listings: Support


# Any program may be behind FUSE, so what is known of one is known of its name in mountinfo.
SHARING_ON_FUSE = {
    "fuse.juicefs": Sharing(
        Support("yes", "catalogue", "JuiceFS: one database makes each name, for all mounts"),
        Support("yes", "catalogue", "JuiceFS: one database is listed, by all mounts"),
    ),
    "fuse.seaweedfs": Sharing(
        Support("no", "catalogue", "SeaweedFS: two mounts can both make one name, and both are told that they did"),
        Support(
            "no", "catalogue", "SeaweedFS: a mount lists from its own copy, which follows the others' writes later"
        ),
    ),
    "virtiofs": Sharing(
        Support("yes", "catalogue", "virtiofs: the host's filesystem makes each name, for all guests"),
        Support("yes", "catalogue", "virtiofs: the host's filesystem is listed, by all guests"),
    ),
}


def sharing(folder: int) -> Sharing:
    """What is known of the filesystem of an open folder. Raises OSError."""
    if filesystem_magic(folder) != FUSE:
        one = Support("yes", "catalogue", "this kernel, or the server behind it, keeps the names for all hosts")
        return Sharing(one, one)
    kind = mounted_as(os.fstat(folder).st_dev)
    behind = (
        f"{kind}: whether a name that was made here is refused to other hosts, and listed by them at once, is up to"
    )
    unknown = Support("unknown", "catalogue", f"{behind} the program behind the mount")
    return SHARING_ON_FUSE.get(kind, Sharing(unknown, unknown))


def mounted_as(device: int) -> str:
    """The type of the filesystem with this device number, as mountinfo(5) names it; "fuse" if it names none."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines():
        mount, _, filesystem = line.partition(" - ")
        if mount.split(" ")[2] == number:
            return filesystem.split(" ")[0]
    return "fuse"


def rename_exclusive(folder: int, old: str, new: str) -> bool:
    """Rename within an open folder unless `new` is there; whether it was. Raises OSError (EINVAL, ENOSYS: cannot)."""
    arguments = (folder, os.fsencode(old), folder, os.fsencode(new), RENAME_NOREPLACE)
    if (wrapper := _wrapper()) is not None:
        result = wrapper(*arguments)
    elif (number := RENAMEAT2.get(platform.machine())) is not None:
        result = _libc.syscall(number, *arguments)
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    raise OSError(code, os.strerror(code), new)


def _wrapper() -> Any:
    return getattr(_libc, "renameat2", None)


def clone(source: int, target: int) -> bool:
    """Let `target` share the blocks of `source` copy-on-write; false where the filesystem cannot. Raises OSError."""
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError as error:
        # EINVAL and ENOTTY: no reflinks here; EXDEV: two filesystems; EPERM, ETXTBSY, EISDIR: this file not.
        if error.errno in {
            errno.EOPNOTSUPP,
            errno.EINVAL,
            errno.ENOTTY,
            errno.EXDEV,
            errno.EPERM,
            errno.ETXTBSY,
            errno.ENOSYS,
            errno.EACCES,
            errno.EBADF,
        }:
            return False
        raise
    return True
