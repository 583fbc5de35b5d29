"""A file on its way to its name in a folder: written beside it, synced, and named only when it is whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dispatch_agent.errors import StoreTooWeak
from dispatch_agent.store import folders, kernel

NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
NO_RENAME = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


@contextmanager
def drafted(root: Path, parents: list[str], name: str) -> Iterator[Draft]:
    """An open draft of `name`, removed at the end unless it got its name. Raises OSError."""
    draft = Draft(root, parents, name)
    draft.open()
    try:
        yield draft
    finally:
        draft.close()


class Draft:
    """A file under a private name beside the key that it is to become. Every method raises OSError."""

    def __init__(self, root: Path, parents: list[str], name: str) -> None:
        self._root, self._parents, self._name = root, parents, name
        self._private = folders.private_name()
        self._folder = self.descriptor = -1

    def open(self) -> None:
        def act(folder: int) -> tuple[int, int]:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(self._private, flags, 0o666, dir_fd=folder)
            return os.dup(folder), file

        self._folder, self.descriptor = folders.made(self._root, self._parents, act)

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.descriptor, rest) :]

    def take_name(self) -> bool:
        """Give the content its name unless the name is taken; whether it was given. Raises StoreTooWeak."""
        os.fsync(self.descriptor)
        try:
            taken = self._link()
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            taken = self._rename_exclusive()
        if taken:
            folders.sync_folder(self._folder)
        return taken

    def replace_name(self) -> None:
        os.fsync(self.descriptor)
        os.replace(self._private, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        folders.sync_folder(self._folder)

    def close(self) -> None:
        """Remove what did not get its name."""
        # A draft that cannot be removed is never listed; what ended the write is what the caller must hear.
        with suppress(OSError):
            os.unlink(self._private, dir_fd=self._folder)
        os.close(self.descriptor)
        os.close(self._folder)

    def _link(self) -> bool:
        try:
            os.link(self._private, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder, follow_symlinks=False)
        except FileExistsError:
            # NFS sends a request again whose answer was lost; the second is refused because of the first.
            mine = os.fstat(self.descriptor)
            there = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
            return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
        return True

    def _rename_exclusive(self) -> bool:
        try:
            return kernel.rename_exclusive(self._folder, self._private, self._name)
        except OSError as error:
            if error.errno not in NO_RENAME:
                raise
            msg = (
                f"{self._root} has neither hard links nor an exclusive rename ({error.strerror}), so it cannot refuse a"
                " second writer: publish to another filesystem"
            )
            raise StoreTooWeak(msg) from error
