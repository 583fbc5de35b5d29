"""Manifests: one spelling, content apart from names and times, and nothing hostile comes back from a store."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch_agent.checkpoint import manifest as manifests
from dispatch_agent.checkpoint.manifest import Manifest, ManifestFile, ManifestFolder, ManifestLink
from dispatch_agent.checkpoint.names import encode
from dispatch_agent.checkpoint.save import Entry, Snapshot
from dispatch_agent.errors import IntegrityError, NewerFormat

SHA = "ab" * 32
COMPONENT = st.binary(min_size=1, max_size=12).filter(
    lambda raw: b"/" not in raw and b"\0" not in raw and raw not in {b".", b".."}
)
GOOD = Manifest(
    "step-1",
    "folder",
    (ManifestFile("a", 1, SHA), ManifestFile("sub/b", 2, SHA, 0o755)),
    (ManifestFolder("sub"),),
    (ManifestLink("sub/l", "%2E%2E/a"),),
    1,
    4,
    "tok",
)


def entry(path: bytes, kind: Any = "file", mode: int = 0o644, target: bytes = b"", size: int = 5) -> Entry:
    return Entry(path, kind, size, 7, 7, 7, mode, target)


def snapshot(*entries: Entry, name: bytes = b"step-1") -> Snapshot:
    return Snapshot(name, entry(b"", "folder"), tuple(sorted(entries, key=lambda e: e.path)))


def of(save: Snapshot) -> Manifest:
    return manifests.of_snapshot(save, {file.path: SHA for file in save.files}, 0, 1, "")


@given(COMPONENT, st.dictionaries(COMPONENT, st.integers(0, 2**60), max_size=5), COMPONENT, st.integers(1, 9))
def test_a_manifest_comes_back_from_its_canonical_bytes(
    name: bytes, files: dict[bytes, int], folder: bytes, ranks: int
) -> None:
    entries = [entry(path, size=size) for path, size in files.items() if path != folder]
    inner = [entry(folder + b"/" + path, size=size) for path, size in files.items()]
    save = snapshot(
        *entries, entry(folder, "folder"), *inner, entry(folder + b"/l\xff", "link", target=b"../x"), name=name
    )
    made = manifests.of_snapshot(save, {file.path: SHA for file in save.files}, ranks - 1, ranks, "t")
    data = manifests.canonical(made)
    assert data.isascii()
    assert manifests.parse(data) == made
    assert manifests.canonical(manifests.parse(data)) == data


def test_order_of_construction_does_not_show() -> None:
    turned = replace(GOOD, files=GOOD.files[::-1])
    assert manifests.canonical(turned) == manifests.canonical(GOOD)
    assert manifests.content_digest(turned) == manifests.content_digest(GOOD)


def test_the_content_digest_knows_no_name_rank_or_token() -> None:
    other = replace(GOOD, save="step-2", rank=0, ranks=1, token="")
    assert manifests.content_digest(other) == manifests.content_digest(GOOD)
    one = of(Snapshot(b"a.ckpt", entry(b""), ()))
    assert manifests.content_digest(one) == manifests.content_digest(of(Snapshot(b"b.ckpt", entry(b""), ())))
    assert one.files == (ManifestFile("a.ckpt", 5, SHA, 0o644),)


@pytest.mark.parametrize(
    "changed",
    [
        replace(GOOD, files=GOOD.files[:1]),
        replace(GOOD, files=(replace(GOOD.files[0], sha256="cd" * 32), GOOD.files[1])),
        replace(GOOD, files=(replace(GOOD.files[0], path="c"), GOOD.files[1])),
        replace(GOOD, files=(replace(GOOD.files[0], mode=0o755), GOOD.files[1])),
        replace(GOOD, folders=(*GOOD.folders, ManifestFolder("empty"))),
        replace(GOOD, links=(ManifestLink("sub/l", "b"),)),
    ],
)
def test_the_content_digest_knows_every_byte_of_content(changed: Manifest) -> None:
    assert manifests.content_digest(changed) != manifests.content_digest(GOOD)


def test_a_mount_that_changes_group_and_modes_does_not_change_the_manifest() -> None:
    before = snapshot(entry(b"w", mode=0o600), entry(b"d", "folder", mode=0o700), entry(b"run.sh", mode=0o755))
    after = snapshot(entry(b"w", mode=0o660), entry(b"d", "folder", mode=0o2770), entry(b"run.sh", mode=0o775))
    assert of(before) == of(after)
    assert [file.mode for file in of(before).files] == [0o755, 0o644]


@pytest.mark.parametrize("kept", [b"x", b"../w", b"./x/../y", b"../sub/w", b"x//y", b".."])
def test_links_within_the_save_are_kept(kept: bytes) -> None:
    save = snapshot(entry(b"sub", "folder"), entry(b"sub/l", "link", target=kept))
    assert manifests.decode_target(of(save).links[0].target) == kept


@pytest.mark.parametrize("refused", [b"/abs", b"../..", b"../../w", b"../x/../../w", b"m/..", b"m/x/../..", b""])
def test_links_that_may_leave_the_save_are_refused_by_name(refused: bytes) -> None:
    links = (entry(b"sub/l", "link", target=refused), entry(b"sub/m", "link", target=b"x"))
    with pytest.raises(IntegrityError, match="step-1/sub/l is a link"):
        manifests.check_entries(snapshot(entry(b"sub", "folder"), *links))


def test_special_files_are_refused_by_name() -> None:
    with pytest.raises(IntegrityError, match="step-1/pipe is no file"):
        of(snapshot(entry(b"pipe", "other")))


def document(**changes: Any) -> bytes:
    value = json.loads(manifests.canonical(GOOD))
    value.update(changes)
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


FILE = {"path": "a", "size": 1, "sha256": SHA, "mode": 0o644}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"[" * 100_000,
        b"1" * 10_000,
        manifests.canonical(GOOD) + b"\n",
        b" " + manifests.canonical(GOOD),
        document(extra=1),
        document(format="1"),
        document(format=True),
        document(format=None),
        document(kind="link"),
        document(kind=[]),
        document(save="a/b"),
        document(save="%2E%2E"),
        document(save=5),
        document(rank=4),
        document(rank=True),
        document(ranks=0, rank=0),
        document(token="two words"),
        document(token=3),
        document(files=None),
        document(files=[1]),
        document(files=[{**FILE, "path": "../a"}]),
        document(files=[{**FILE, "path": "/a"}]),
        document(files=[{**FILE, "path": "%2E%2E/a"}]),
        document(files=[{**FILE, "path": "a%2Fb"}]),
        document(files=[{**FILE, "path": 7}]),
        document(files=[FILE, FILE]),
        document(files=[{**FILE, "path": "nowhere/a"}]),
        document(files=[{**FILE, "path": "sub"}]),
        document(files=[{**FILE, "path": "sub/l/x"}]),
        document(files=[{**FILE, "size": -1}]),
        document(files=[{**FILE, "size": 1.0}]),
        document(files=[{**FILE, "size": True}]),
        document(files=[{**FILE, "size": 2**70}]),
        document(files=[{**FILE, "sha256": SHA.upper()}]),
        document(files=[{**FILE, "sha256": "ab"}]),
        document(files=[{**FILE, "mode": 0o4755}]),
        document(files=[{**FILE, "more": 1}]),
        document(folders=[{"path": "sub", "mode": 0o777}]),
        document(links=[{"path": "sub/l", "target": "/etc/passwd"}]),
        document(links=[{"path": "sub/l", "target": "%2E%2E/%2E%2E/x"}]),
        document(links=[{"path": "sub/l", "target": "../a"}]),
        document(links=[{"path": "sub/l", "target": "a%00"}]),
        document(links=[{"path": "sub/l", "target": 1}]),
        document(kind="file"),
    ],
)
def test_what_is_not_exactly_a_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="not a manifest"):
        manifests.parse(data)


def test_a_newer_format_is_refused_with_what_to_do() -> None:
    with pytest.raises(NewerFormat, match=r"format 2, this version .* reads 1: use a newer one"):
        manifests.parse(document(format=2))


def test_the_longest_path_and_component_are_told() -> None:
    made = replace(GOOD, files=(ManifestFile("sub/" + "x" * 300, 1, SHA),), links=())
    assert manifests.longest(made) == (304, 300, "sub/" + "x" * 300)
    assert manifests.longest(replace(GOOD, files=(), folders=(), links=())) == (0, 0, "")


def test_names_are_encoded_in_a_manifest() -> None:
    made = of(snapshot(entry(b"a\xff"), name=b"st*p"))
    assert (made.save, made.files[0].path) == (encode(b"st*p"), "a%FF")
