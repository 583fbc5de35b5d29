"""The documents and key names at the destination: order stands in the names, and nothing odd is believed."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch_agent.checkpoint import names
from dispatch_agent.errors import IntegrityError
from dispatch_agent.publish import keys, records
from dispatch_agent.publish.keys import Order
from dispatch_agent.publish.records import CommitRecord, Part

GREATEST_EPOCH = 18_000_000 * 10**12 + 999_999 * 10**6 + 999_999
ORDERS = st.builds(
    Order,
    epoch=st.integers(0, GREATEST_EPOCH),
    term=st.integers(1, 9999),
    ordinal=st.integers(1, 999_999),
    nonce=st.text("0123456789abcdef", min_size=12, max_size=12),
)
NAMES = st.binary(min_size=1, max_size=40).filter(
    lambda raw: b"/" not in raw and b"\0" not in raw and raw not in (b".", b"..")
)
TEXTS = st.text(max_size=20)
PARTS = st.builds(
    Part,
    rank=st.integers(0, 99_999),
    prefix=st.just("data/1-a/s/00000.0123456789ab.000001"),
    names=st.sampled_from(["encoded", "raw"]),
    manifest=st.just("data/1-a/s/00000.0123456789ab.000001.json"),
    manifest_sha256=TEXTS,
    files=st.integers(0, records.GREATEST),
    size=st.integers(0, records.GREATEST),
)
COMMITS = st.builds(
    CommitRecord,
    order=ORDERS,
    attempt=TEXTS,
    job=TEXTS,
    folder=TEXTS,
    save=NAMES.map(names.encode),
    kind=st.sampled_from(["file", "folder"]),
    generation=st.integers(1, records.GREATEST),
    content=TEXTS,
    rule=TEXTS,
    mark=TEXTS,
    newest_ns=st.integers(-(10**19), 10**19),
    sequence=st.none() | st.integers(0, records.GREATEST),
    token=TEXTS,
    parts=st.lists(PARTS, min_size=1, max_size=3).map(tuple),
    committed_at=TEXTS,
    publisher=TEXTS,
)
RECORD = CommitRecord(
    order=Order(GREATEST_EPOCH, 1, 2, "0123456789ab"),
    attempt="1.42.0",
    job="",
    folder="f",
    save="step-1",
    kind="folder",
    generation=1,
    content="c",
    rule="marker",
    mark="1",
    newest_ns=5,
    sequence=1,
    token="",
    parts=(Part(0, "data/x", "encoded", "data/x.json", "d", 1, 1),),
    committed_at="",
    publisher="",
)


@given(ORDERS, ORDERS)
def test_the_order_of_commits_is_the_byte_order_of_their_keys(one: Order, other: Order) -> None:
    assert (one < other) == (keys.commit_key(one) < keys.commit_key(other))
    assert (one == other) == (keys.commit_key(one) == keys.commit_key(other))


@given(ORDERS)
def test_a_commit_key_gives_its_order_back_and_a_tombstone_is_no_commit(order: Order) -> None:
    assert keys.parse_commit_key(keys.commit_key(order)) == order
    assert keys.parse_commit_key(keys.tombstone_key(order)) is None
    assert keys.parse_commit_key(keys.tombstone_key(order), keys.PRUNED) == order


@given(COMMITS)
def test_a_commit_record_is_read_back_as_it_was_written(record: CommitRecord) -> None:
    data = records.commit_bytes(record)
    assert records.parse_commit(data, record.key) == record
    assert records.commit_bytes(records.parse_commit(data, record.key)) == data
    assert data.isascii()


def test_an_epoch_is_a_decimal_string_since_the_greatest_fits_no_json_number() -> None:
    assert json.loads(records.commit_bytes(RECORD))["epoch"] == str(GREATEST_EPOCH)


@given(COMMITS)
def test_the_pointer_names_the_commit_and_its_digest(record: CommitRecord) -> None:
    pointer = records.parse_pointer(records.pointer_bytes(record))
    assert pointer.commit == record.key
    assert pointer.commit_sha256 == records.sha256(records.commit_bytes(record))


def test_a_record_under_the_key_of_another_is_not_believed() -> None:
    """A copied record could otherwise pass an old save off as the newest (I7)."""
    moved = dataclasses.replace(RECORD.order, ordinal=3)
    with pytest.raises(IntegrityError, match="copied or renamed"):
        records.parse_commit(records.commit_bytes(RECORD), keys.commit_key(moved))


@pytest.mark.parametrize("field", sorted(json.loads(records.commit_bytes(RECORD))))
@pytest.mark.parametrize("value", [None, [], {}, -1.5, "..", True])
def test_a_commit_record_with_an_odd_field_is_refused_and_the_field_named(field: str, value: object) -> None:
    document = json.loads(records.commit_bytes(RECORD))
    free_text = {"attempt", "job", "folder", "content", "rule", "mark", "token", "committed_at", "publisher", "nonce"}
    if (field in free_text and isinstance(value, str)) or (field == "sequence" and value is None):
        return
    document[field] = value
    with pytest.raises(IntegrityError, match=f"{field}|expected|copied"):
        records.parse_commit(json.dumps(document).encode(), RECORD.key)


@pytest.mark.parametrize("field", ["prefix", "manifest"])
@pytest.mark.parametrize("path", ["../x", "data/../../x", "/etc", "data//x", ".", "", "a\0b", ".~dispatch.x", "\ud800"])
def test_a_part_that_leads_out_of_the_store_is_refused(field: str, path: str) -> None:
    document = json.loads(records.commit_bytes(RECORD))
    document["parts"][0][field] = path
    with pytest.raises(IntegrityError, match="do not trust it"):
        records.parse_commit(json.dumps(document).encode(), RECORD.key)


@pytest.mark.parametrize("size", [-1, 2**63, 10**400])
def test_a_size_that_nothing_has_is_refused(size: int) -> None:
    document = json.loads(records.commit_bytes(RECORD))
    document["parts"][0]["size"] = size
    with pytest.raises(IntegrityError):
        records.parse_commit(json.dumps(document).encode(), RECORD.key)


@pytest.mark.parametrize("name", ["{}\n", "{}.json", "x{}"])
def test_a_key_that_only_resembles_a_commit_is_none(name: str) -> None:
    head, _, last = RECORD.key.rpartition("/")
    assert keys.parse_commit_key(f"{head}/{name.format(last)}") is None


def test_digits_of_other_scripts_are_none() -> None:
    assert keys.parse_commit_key(RECORD.key.replace("1", "\u0661")) is None


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"[" * 200_000, b"\xff\xfe", b"{}", b'{"format": 2}', b'{"format": "1"}']
)
def test_what_is_no_record_of_this_format_is_refused(data: bytes) -> None:
    for parse in (lambda: records.parse_commit(data, RECORD.key), lambda: records.parse_pointer(data)):
        with pytest.raises(IntegrityError):
            parse()


@given(NAMES, NAMES)
def test_a_key_of_a_save_published_in_place_holds_the_raw_names(save: bytes, file: bytes) -> None:
    prefix = keys.in_place_prefix("1.42.0", names.encode(save))
    part = Part(0, prefix, "raw", "m", "d", 1, 1)
    key = records.file_key(part, names.encode(file), "folder")
    assert key.encode("utf-8", "surrogateescape") == b"exec/1.42.0/" + save + b"/" + file
