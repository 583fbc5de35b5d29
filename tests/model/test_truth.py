"""What the model replaces of the product is replaced truly: on a real folder the same requests are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.model.actors import Folder, Save, shipped
from tests.model.replay import Machine
from tests.model.world import apply
from tests.model.writers import Writer, publishers
from tests.protocol.jobs import Bench, Execution

from dispatch_agent.store.memory import MemoryStore

SAVES = (("s1", "first"), ("s2", "the second"))


class Noting:
    """A store that notes every request before it passes it on."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.noted: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._store, name)
        if name not in {"create", "replace", "put", "upload", "read", "list", "folders", "delete"}:
            return inner

        def noting(key: str, *args: Any) -> Any:
            self.noted.append(("put" if name == "upload" else name, key))
            return inner(key, *args)

        return noting


@pytest.fixture
def sent(tmp_path: Path) -> list[tuple[str, str]]:
    """What a publisher on a real folder asks of its store, from its start to its end."""
    store = Noting(MemoryStore())
    bench, execution = Bench(store), Execution(tmp_path, 1)
    for name, content in SAVES:
        execution.save(name, content.encode())
    assert bench.run(execution) is None
    return [(op, key.replace(bench.nonces[0], "<nonce>")) for op, key in store.noted]


def test_the_model_sends_what_a_real_publisher_sends(sent: list[tuple[str, str]], tmp_path: Path) -> None:
    folder = Folder(Execution(tmp_path, 1).epoch, "a1")
    saves = [Save(name, content, number) for number, (name, content) in enumerate(SAVES, 1)]
    (actor,), objects = publishers([Writer(folder, 1)], {folder: saves})
    modelled = []
    with shipped():
        machine = Machine()
        node = machine.start(actor.program(0))
        while (request := machine.nodes[node].request) is not None:
            if not request.local:
                modelled.append((request.op, request.key.replace("000100000000", "<nonce>")))
            answer, objects = apply(objects, request)
            node, _ = machine.after(node, answer)
    assert machine.nodes[node].end == "done"
    assert modelled == sent
