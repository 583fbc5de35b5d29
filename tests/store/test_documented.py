"""docs/stores.md says of each store what the suite proves of it, and of no store that it does not run over."""

from __future__ import annotations

import re

from tests.store.matrix import KINDS, Kind
from tests.test_docs import HERE, tables

POINTER = {"yes": "kept", "unknown": "advisory", "no": "none"}


def row(kind: Kind) -> list[str]:
    damaged = "read back" if kind.checksum == "none" else f"refused by {kind.checksum}"
    race = "only if accepted (else exit 12)" if kind.weak else "refused" if kind.fair else "mostly refused"
    return [kind.title, race, POINTER[kind.replace], damaged]


def test_each_store_of_the_suite_has_its_row_and_no_other_has_one() -> None:
    header, rows = next(tables((HERE / "docs" / "stores.md").read_text()))
    assert header == ["store", "version", "lost race", "`latest.json`", "damaged upload"]
    assert [[title, *rest] for title, _, *rest in rows] == [row(kind) for kind in KINDS if kind.title]


def test_the_versions_are_those_that_the_tests_install() -> None:
    _, rows = next(tables((HERE / "docs" / "stores.md").read_text()))
    versions = {title: version for title, version, *_ in rows}
    installed = (HERE / "tests" / "constraints.txt").read_text() + (HERE / "tests" / "run").read_text()
    for kind in KINDS:
        if kind.pin:
            assert kind.pin in installed, f"{kind.name} is not pinned to {kind.pin}"
            assert versions[kind.title] == re.split("==|@", kind.pin)[1]
