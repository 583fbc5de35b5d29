"""What one part of a save consists of, as it is stored beside its data. Pure.

`canonical` is the only spelling and `parse` takes no other, so equal manifests are equal bytes. A manifest comes back
from a store that others can write to: `parse` refuses every path that could leave the folder it is restored into.

Modes: only the owner's executable bit is kept (files 644 or 755, folders 755, as git does). A volume that is mounted
again may be given to another group (Kubernetes' fsGroup sets g+rw on files, g+rwx and setgid on folders); that must
not look like other content. And 0600, which safetensors leaves, says nothing about who shall read a restored save:
the restoring process's umask does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from dispatch_agent.checkpoint.names import decode, decode_name, decode_path, encode, encode_path, shown
from dispatch_agent.checkpoint.save import Entry, Snapshot
from dispatch_agent.errors import IntegrityError, NewerFormat

FORMAT = 1
FILE_MODE, EXECUTABLE_MODE, FOLDER_MODE = 0o644, 0o755, 0o755
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TOKEN = re.compile(r"[!-~]{0,128}")
_GREATEST_SIZE = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One file: its encoded path, bytes, sha256 (hex) and mode (0o644 or 0o755)."""

    path: str
    size: int
    sha256: str
    mode: int = FILE_MODE


@dataclass(frozen=True, slots=True)
class ManifestLink:
    """One symbolic link inside the save: its encoded path, and its text, encoded between the slashes."""

    path: str
    target: str


@dataclass(frozen=True, slots=True)
class ManifestFolder:
    """One folder below the save's own, empty or not: its encoded path."""

    path: str
    mode: int = FOLDER_MODE


@dataclass(frozen=True, slots=True)
class Manifest:
    """One part of a save: `save` its encoded name, `rank` of `ranks` parts, joined by `token` (empty if alone).

    Files, folders and links are sorted by path. Of a single-file save (kind "file") the one file's path is `save`.
    """

    save: str
    kind: Literal["file", "folder"]
    files: tuple[ManifestFile, ...]
    folders: tuple[ManifestFolder, ...]
    links: tuple[ManifestLink, ...]
    rank: int = 0
    ranks: int = 1
    token: str = ""


_Item = TypeVar("_Item", ManifestFile, ManifestFolder, ManifestLink)


class Longest(NamedTuple):
    """The most bytes of any key below the part's own, of any component, and the path that has that component."""

    key_bytes: int
    component_bytes: int
    path: str


def of_snapshot(snapshot: Snapshot, digests: Mapping[bytes, str], rank: int, ranks: int, token: str) -> Manifest:
    """The manifest of a save whose files have these sha256 (hex), by raw path (a single-file save: the empty path).

    Raises IntegrityError for what cannot be published: FIFOs, sockets and devices, and links that are absolute or
    leave the save. KeyError if a file has no digest.
    """
    check_entries(snapshot)
    name = encode(snapshot.name)
    files = tuple(
        ManifestFile(
            encode_path(entry.path) if entry.path else name,
            entry.size,
            digests[entry.path],
            EXECUTABLE_MODE if entry.mode & 0o100 else FILE_MODE,
        )
        for entry in snapshot.files
    )
    folders = tuple(ManifestFolder(encode_path(entry.path)) for entry in _of_kind(snapshot, "folder"))
    links = tuple(
        ManifestLink(encode_path(entry.path), _encode_target(entry.target)) for entry in _of_kind(snapshot, "link")
    )
    kind: Literal["file", "folder"] = "file" if snapshot.root.kind == "file" else "folder"
    return Manifest(name, kind, _by_path(files), _by_path(folders), _by_path(links), rank, ranks, token)


def check_entries(snapshot: Snapshot) -> None:
    """Raise IntegrityError, naming the entry, if the save holds what no manifest can: to be asked before any upload."""
    links = {entry.path for entry in _of_kind(snapshot, "link")}
    for entry in (snapshot.root, *snapshot.entries):
        place = shown(snapshot.name + (b"/" + entry.path if entry.path else b""))
        if entry.kind == "other":
            msg = f"{place} is no file, folder or link (a FIFO, socket or device): move it out of the save"
            raise IntegrityError(msg)
        if entry.kind == "link" and (why := _leaves(entry.path, entry.target, links)):
            msg = f"{place} is a link to {shown(entry.target)}, which {why}; only relative links within a save are kept"
            raise IntegrityError(msg)


def canonical(manifest: Manifest) -> bytes:
    """The one spelling: JSON, sorted, compact, ASCII."""
    own = {"save": manifest.save, "rank": manifest.rank, "ranks": manifest.ranks, "token": manifest.token}
    return _json({"format": FORMAT, **own, **_content(manifest)})


def content_digest(manifest: Manifest) -> str:
    """sha256 (hex) over the content alone: kind, files, folders, links; no save name, rank, token or time.

    Equal for two saves that restore to the same tree, whatever they are called.
    """
    content = _content(manifest)
    if manifest.kind == "file":
        content["files"] = [{**file, "path": ""} for file in content["files"]]  # its path is the save's name
    return hashlib.sha256(_json(content)).hexdigest()


def parse(data: bytes) -> Manifest:
    """The manifest that `canonical` made these bytes from. IntegrityError on anything else, with what is wrong."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        _refuse(f"no JSON ({type(error).__name__})", error)
    if not isinstance(value, dict):
        _refuse("no JSON object")
    version = value.pop("format", None)
    if isinstance(version, int) and version > FORMAT:
        msg = f"a manifest has format {version}, this version of dispatch-agent reads {FORMAT}: use a newer one"
        raise NewerFormat(msg)
    if version is not FORMAT and version != FORMAT:
        _refuse(f"format {version!r}, expected {FORMAT}")
    try:
        manifest = Manifest(
            **{
                **value,
                "files": tuple(ManifestFile(**file) for file in value["files"]),
                "folders": tuple(ManifestFolder(**folder) for folder in value["folders"]),
                "links": tuple(ManifestLink(**link) for link in value["links"]),
            }
        )
    except (TypeError, KeyError) as error:
        _refuse("a field that is missing, unknown or of another kind", error)
    _check(manifest)
    if canonical(manifest) != data:
        _refuse("another spelling than the canonical one")
    return manifest


def longest(manifest: Manifest) -> Longest:
    """What a store's limits are compared with before anything is sent."""
    paths = [item.path for item in _items(manifest)]
    if not paths:
        return Longest(0, 0, "")
    component, path = max((max(map(len, path.split("/"))), path) for path in paths)
    return Longest(max(map(len, paths)), component, path)


def decode_target(text: str) -> bytes:
    """A link's raw text from its encoded one. ValueError if it is not encoded."""
    return b"/".join(decode(component) if component else b"" for component in text.split("/"))


def _encode_target(raw: bytes) -> str:
    return "/".join(encode(component) if component else "" for component in raw.split(b"/"))


def _leaves(path: bytes, target: bytes, links: set[bytes]) -> str:
    """Why a link's target is not surely within the save, as a clause; empty if it is."""
    if not target or target.startswith(b"/"):
        return "is absolute" if target else "is empty"
    place = path.split(b"/")[:-1]
    through = False
    for component in target.split(b"/"):
        if component in {b"", b"."}:
            continue
        if component != b"..":
            place.append(component)
            through = through or b"/".join(place) in links
        elif through:
            return "goes up from behind another link"
        elif not place:
            return "leaves the save"
        else:
            place.pop()
    return ""


def _check(manifest: Manifest) -> None:
    try:
        decode_name(manifest.save)
        paths = {decode_path(item.path): item for item in _items(manifest)}
        targets = {decode_path(link.path): decode_target(link.target) for link in manifest.links}
    except (ValueError, TypeError, AttributeError) as error:
        _refuse(str(error), error)
    if len(paths) != len(_items(manifest)):
        _refuse("one path twice")
    folders = {path for path, item in paths.items() if isinstance(item, ManifestFolder)}
    for path in paths:
        parent = path.rpartition(b"/")[0]
        if parent and parent not in folders:
            _refuse(f"{shown(path)}, which is in no listed folder")
    for path, target in targets.items():
        why = "holds a NUL" if b"\0" in target else _leaves(path, target, set(targets))
        if why:
            _refuse(f"{shown(path)}, a link that {why}")
    for file in manifest.files:
        _check_file(file)
    if any(folder.mode != FOLDER_MODE for folder in manifest.folders):
        _refuse("a folder's mode other than 755")
    if manifest.kind not in ("file", "folder"):
        _refuse(f"kind {manifest.kind!r}, expected file or folder")
    if manifest.kind == "file" and [item.path for item in _items(manifest)] != [manifest.save]:
        _refuse("a single-file save with other paths than its own name")
    _check_part(manifest)


def _check_file(file: ManifestFile) -> None:
    if not _whole_number(file.size, _GREATEST_SIZE):
        _refuse(f"{file.path} with size {file.size!r}")
    if not isinstance(file.sha256, str) or not _SHA256.fullmatch(file.sha256):
        _refuse(f"{file.path} with sha256 {file.sha256!r}")
    if not _whole_number(file.mode, 0o777) or file.mode not in (FILE_MODE, EXECUTABLE_MODE):
        _refuse(f"{file.path} with mode {file.mode!r}, expected 644 or 755")


def _check_part(manifest: Manifest) -> None:
    if not _whole_number(manifest.ranks, 99_999) or not _whole_number(manifest.rank, 99_999):
        _refuse(f"rank {manifest.rank!r} of {manifest.ranks!r}")
    if manifest.rank >= manifest.ranks:
        _refuse(f"rank {manifest.rank} of {manifest.ranks}")
    if not isinstance(manifest.token, str) or not _TOKEN.fullmatch(manifest.token):
        _refuse(f"token {manifest.token!r}, expected up to 128 visible ASCII characters")


def _whole_number(value: object, greatest: int) -> bool:
    return type(value) is int and 0 <= value <= greatest


def _items(manifest: Manifest) -> tuple[ManifestFile | ManifestFolder | ManifestLink, ...]:
    return (*manifest.files, *manifest.folders, *manifest.links)


def _content(manifest: Manifest) -> dict[str, Any]:
    files = [
        {"path": file.path, "size": file.size, "sha256": file.sha256, "mode": file.mode}
        for file in _by_path(manifest.files)
    ]
    folders = [{"path": folder.path, "mode": folder.mode} for folder in _by_path(manifest.folders)]
    links = [{"path": link.path, "target": link.target} for link in _by_path(manifest.links)]
    return {"kind": manifest.kind, "files": files, "folders": folders, "links": links}


def _by_path(items: Iterable[_Item]) -> tuple[_Item, ...]:
    return tuple(sorted(items, key=lambda item: item.path))


def _of_kind(snapshot: Snapshot, kind: str) -> list[Entry]:
    return [entry for entry in snapshot.entries if entry.kind == kind]


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def _refuse(what: str, cause: BaseException | None = None) -> NoReturn:
    msg = f"not a manifest of dispatch-agent: it has {what}"
    raise IntegrityError(msg) from cause
