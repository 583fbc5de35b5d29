"""docs/protocol.md says enough for someone else to write a publisher, and says nothing that is not so."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.protocol import by_the_book
from tests.protocol.checks import check_invariants, commits
from tests.protocol.jobs import Bench, Execution, small
from tests.protocol.test_prune import prune, restored

from dispatch_agent.checkpoint import manifest as manifests
from dispatch_agent.publish import keys, records
from dispatch_agent.publish.keys import Order
from dispatch_agent.store.posix import PosixStore

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
EXAMPLES = re.findall(r"^```json\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
FOLDER_CLAIM, MANIFEST, COMMIT, POINTER, GONE, RESUME = (example.encode() for example in EXAMPLES)
TOMBSTONE, SEAL = (line + b"\n" for line in GONE.splitlines())
NEWEST = Order(1_000_003, 1, 3, "a38a3e2353c1")


def fields_in_table(after: str) -> set[str]:
    """The fields that the first table after these words explains."""
    table = TEXT.split(after, 1)[1].split("| field |", 1)[1].split("\n\n", 1)[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}


class TestExamples:
    def test_the_folder_claim_is_ours(self) -> None:
        folder = records.folder_of_claim(FOLDER_CLAIM, "claims/x")
        assert folder == records.parse_commit(COMMIT, keys.commit_key(NEWEST)).folder
        assert records.folder_claim_bytes(**_fields(FOLDER_CLAIM)) == FOLDER_CLAIM

    def test_the_manifest_is_ours_and_the_commit_names_it(self) -> None:
        manifest = manifests.parse(MANIFEST.rstrip(b"\n"))
        (part,) = records.parse_commit(COMMIT, keys.commit_key(NEWEST)).parts
        assert part.manifest_sha256 == hashlib.sha256(manifests.canonical(manifest)).hexdigest()
        assert (part.files, part.size) == (len(manifest.files), sum(file.size for file in manifest.files))

    def test_the_commit_is_ours_and_its_content_is_the_manifests(self) -> None:
        record = records.parse_commit(COMMIT, keys.commit_key(NEWEST))
        assert records.commit_bytes(record) == COMMIT
        assert record.content == manifests.content_digest(manifests.parse(MANIFEST.rstrip(b"\n")))

    def test_the_pointer_is_the_commits(self) -> None:
        assert records.pointer_bytes(records.parse_commit(COMMIT, keys.commit_key(NEWEST))) == POINTER

    def test_tombstone_seal_and_agreement_are_ours(self) -> None:
        old = Order(1_000_001, 1, 2, "c5fe94a75202")
        made = _fields(TOMBSTONE)
        assert records.tombstone_bytes(old, made["pruned_by"], made["pruned_at"]) == TOMBSTONE
        made = _fields(SEAL)
        assert records.seal_bytes(old.epoch, made["sealed_by"], made["sealed_at"]) == SEAL
        assert records.resume_choice(RESUME, "claims/x") == NEWEST

    @pytest.mark.parametrize(
        ("after", "example"), [("A manifest, ", MANIFEST), ("A commit record, ", COMMIT)], ids=["manifest", "commit"]
    )
    def test_every_field_is_explained(self, after: str, example: bytes) -> None:
        document = json.loads(example)
        inner = {field for part in document.get("parts", ()) for field in part}
        assert (set(document) | inner) - fields_in_table(after) == {"format", "committed_at", "publisher"} & set(
            document
        )

    def test_every_key_is_one_that_we_write(self) -> None:
        order = Order(7, 1, 2, "0123456789ab")
        prefix = keys.part_prefix(7, "<attempt>", "<save>", 3, order.nonce, 4)
        made = [
            keys.attempt_claim_key(7),
            keys.folder_claim_key(7, 3, 1),
            f"{keys.claims_prefix(7)}/resume.<k>.json",
            f"{prefix}/…",
            keys.manifest_key(prefix),
            keys.commit_key(order),
            keys.tombstone_key(order),
            keys.seal_key(7),
            keys.POINTER,
        ]
        block = TEXT.split("## Keys", 1)[1].split("```")[1]
        said = [line.split("  ")[0] for line in block.strip().splitlines()]
        numbers = {"<epoch>": f"{7:020d}", "<rank>": f"{3:05d}", "<term>": f"{1:04d}", "<try>": f"{4:06d}"}
        numbers |= {"<ordinal>": f"{2:06d}", "<nonce>": order.nonce}
        for name, number in numbers.items():
            said = [key.replace(name, number) for key in said]
        assert said == made
        assert keys.is_resume_claim("resume.1.json")


def _fields(document: bytes) -> dict[str, Any]:
    return {name: value for name, value in json.loads(document).items() if name != "format"}


@pytest.fixture
def book(place: Path) -> Callable[..., str]:
    """Publishes by the book into `store`."""

    def publish(epoch: int, ordinal: int, tag: str, nonce: str = "b" * 12) -> str:
        return by_the_book.publish(place / "store", epoch, f"a{epoch % 10}", "f" * 12, ordinal, tag, small(tag), nonce)

    return publish


class TestAnotherPublisher:
    """Written from the document, on one store with ours."""

    def test_what_it_publishes_ours_reads(self, book: Callable[..., str], place: Path) -> None:
        store = PosixStore(place / "store")
        book(1_000_001, 1, "step-1")
        book(1_000_001, 2, "step-2")
        check_invariants(store, pointer_is_current=False)
        assert restored(store, place / "back") == "step-2"

    def test_what_ours_publishes_it_reads(self, place: Path) -> None:
        execution = Execution(place, 1)
        execution.save("step-1", small("ours"))
        assert Bench(PosixStore(place / "store")).run(execution) is None
        assert by_the_book.newest(place / "store") == small("ours")

    def test_its_newer_epoch_fences_ours(self, book: Callable[..., str], place: Path) -> None:
        old = Execution(place, 1)
        old.save("step-9", small("stale"))
        book(1_000_002, 1, "step-1")
        ended = Bench(PosixStore(place / "store")).run(old)
        assert ended is not None
        assert ended.exit_code == 30
        assert by_the_book.newest(place / "store") == small("step-1")

    def test_our_newer_epoch_fences_it(self, book: Callable[..., str], place: Path) -> None:
        book(1_000_001, 1, "step-1")
        new = Execution(place, 2)
        new.save("step-1", small("new"))
        assert Bench(PosixStore(place / "store")).run(new) is None
        with pytest.raises(by_the_book.Fenced):
            book(1_000_001, 2, "step-2")
        assert by_the_book.newest(place / "store") == small("new")

    def test_an_epoch_of_ours_it_cannot_take(self, place: Path) -> None:
        execution = Execution(place, 1, attempt="ours")
        execution.save("step-1", small(1))
        assert Bench(PosixStore(place / "store")).run(execution) is None
        with pytest.raises(FileExistsError):
            by_the_book.publish(place / "store", execution.epoch, "theirs", "f" * 12, 1, "step-1", small(2), "b" * 12)

    def test_our_prune_takes_its_old_saves_and_it_passes_them_over(self, book: Callable[..., str], place: Path) -> None:
        for number in range(1, 5):
            book(1_000_001, number, f"step-{number}")
        prune(PosixStore(place / "store"))
        assert len(commits(PosixStore(place / "store"))) == 4
        assert by_the_book.newest(place / "store") == small("step-4")
        check_invariants(PosixStore(place / "store"))
