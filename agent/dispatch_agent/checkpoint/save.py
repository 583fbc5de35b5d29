"""The values that describe a save on disk. Pure: what was seen at one look, nothing that looks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["file", "folder", "link", "other"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing inside a save (or the save itself, with an empty path), as lstat(2) gave it.

    `path` is relative to the save, raw bytes, `/`-separated. Times in nanoseconds. `target` is a link's text.
    """

    path: bytes
    kind: Kind
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    mode: int
    target: bytes = b""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of one save at one look: `root` is the file or folder itself, `entries` what is below it, sorted by path."""

    name: bytes
    root: Entry
    entries: tuple[Entry, ...]

    @property
    def files(self) -> tuple[Entry, ...]:
        """The regular files: of a single-file save, the save itself (with an empty path)."""
        if self.root.kind == "file":
            return (self.root,)
        return tuple(e for e in self.entries if e.kind == "file")

    @property
    def newest_ns(self) -> int:
        """The greatest mtime_ns of anything in the save, its folders included."""
        return max([self.root.mtime_ns, *(e.mtime_ns for e in self.entries)])


@dataclass(frozen=True, slots=True)
class Marker:
    """Our own word that a save is complete, as `publish complete` wrote it in `.dispatch/complete/`.

    `sequence` grows by one with every marker of a folder; `token` joins the parts of one save on many ranks. `content`
    says what the save held then (a digest of its fingerprint): times alone do not show what was deleted since.
    """

    name: bytes
    sequence: int
    mtime_ns: int
    token: str = ""
    content: str = ""


@dataclass(frozen=True, slots=True)
class Survey:
    """One look at `exec/<attempt>/`: every save, and what stands beside them that a rule may need.

    `texts` holds the first bytes of small top-level files (tracker files), with their mtime_ns; `links` the text of
    top-level symlinks and `link_times` their own mtime_ns; `unreadable` what could not be looked at, with the reason,
    by raw name (the folder itself under the empty name).
    """

    saves: tuple[Snapshot, ...]
    markers: dict[bytes, Marker] = field(default_factory=dict)
    texts: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    links: dict[bytes, bytes] = field(default_factory=dict)
    unreadable: dict[bytes, str] = field(default_factory=dict)
    link_times: dict[bytes, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Signal:
    """What said that a save is complete. Two generations of one save never share a signal.

    `mark` names the signal itself and is durable (no inode, no ctime: a volume may be mounted again and chowned).
    `sequence` is the marker's, or None; `newest_ns` the greatest mtime_ns in the save: the two keys that order saves
    first seen in one look.
    """

    rule: str
    mark: str
    newest_ns: int
    sequence: int | None = None
    token: str = ""


@dataclass(frozen=True, slots=True)
class Complete:
    """Finished by the rule, and why, in words."""

    signal: Signal
    why: str


@dataclass(frozen=True, slots=True)
class Settling:
    """Not finished, and why, in words. `again_in` is when a further look may say otherwise without any change, in
    seconds; None if only a change can. `stuck` marks what no passing of time or writing by the trainer's usual course
    is expected to mend (a rule has to be chosen, a signal is older than the data): said loudly, once.
    """

    reason: str
    again_in: float | None = None
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class Ignored:
    """Not a save by this rule (a temporary name, a tracker file, a link), and why."""

    reason: str


Verdict = Complete | Settling | Ignored
