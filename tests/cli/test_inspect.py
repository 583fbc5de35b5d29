"""`inspect` as an operator or a CI job runs it: what it prints, how it ends, and what it makes of bad input."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.conftest import Result, run
from tests.unit.test_inspection import FLOOR, Cluster

Object = dict[str, Any]


def inspect(folder: Path, *texts: str | bytes, options: tuple[str, ...] = ()) -> Result:
    """Over files with these texts."""
    files = []
    for number, text in enumerate(texts):
        files.append(folder / f"{number}.yaml")
        files[-1].write_bytes(text if isinstance(text, bytes) else text.encode())
    return run("dispatch-agent", "inspect", *options, *files)


def everything(one: Cluster) -> list[Object]:
    return json.loads(json.dumps([one.runtime, one.train_job, one.job_set, one.job, *one.pods]))  # type: ignore[no-any-return]


def test_a_job_that_is_well_exits_0(tmp_path: Path) -> None:
    result = inspect(tmp_path, json.dumps({"kind": "List", "items": everything(Cluster(2))}))
    assert result.passes().out.splitlines()[:3] == [
        "team-a/train",
        "  A 1, floor 1, J 2",
        "  train-node-0-0-abcde: rank 0, Running, epoch 1000003, attempt 01JCXE8Q5W3V9T2N7M4K6H1G0P.1.1.1.2",
    ]
    assert result.out.splitlines()[-1] == "nothing is wrong with the identities"


def test_a_reset_exits_125_and_is_said(tmp_path: Path) -> None:
    one = Cluster()
    one.train_job["metadata"]["annotations"][FLOOR] = "5"
    one.trainers["backoffLimit"] = 6
    result = inspect(tmp_path, yaml.safe_dump_all(everything(one)))
    assert result.code == 125
    assert "WRONG: TrainJob train: A is 1, below the admission-floor 5" in result.out
    assert result.err == ""


def test_only_a_rule_that_allows_it_exits_3_and_0_where_it_is_accepted(tmp_path: Path) -> None:
    one = Cluster()
    one.trainers["podFailurePolicy"]["rules"].append({"action": "Ignore"})
    assert inspect(tmp_path, json.dumps(one.job_set)).code == 3
    accepted = inspect(tmp_path, json.dumps(one.job_set), options=("--allow-rank-restart",)).passes()
    assert "weakened: JobSet train, job node: identity weakened: podFailurePolicy rule 2 (Ignore)" in accepted.out


def test_several_files_are_one_picture(tmp_path: Path) -> None:
    one = Cluster()
    again = copy.deepcopy(one.pods[0])
    again["metadata"] |= {"name": "another", "uid": "another"}
    result = inspect(tmp_path, json.dumps(one.pods[0]), yaml.safe_dump(again), options=("--json",))
    assert result.code == 125
    (found,) = result.json["jobs"][0]["findings"]
    assert "2 pods of rank 0 are alive at once" in found["says"]
    assert result.json["jobs"][0]["pods"][0]["epoch"] == "1000001"


def test_the_next_admission_names_the_command_that_writes_it(tmp_path: Path) -> None:
    one = Cluster()
    one.train_job["spec"]["suspend"] = True
    assert "next A 2: `dispatch-agent render --raise`" in inspect(tmp_path, json.dumps(one.train_job)).passes().out


def test_what_is_not_ours_is_counted_and_nothing_of_ours_is_an_error(tmp_path: Path) -> None:
    result = inspect(tmp_path, "kind: Service\n---\nkind: Service\n---\n- kind: Secret\n")
    assert result.out == "not looked at: 1 Secret, 2 Service\n", "and that nothing is wrong is not said"
    result.fails(3, "no object of the dispatcher's")


_BOMB = "a: &a [x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe\x00",
        b"{",
        b"[1, 2, 3]",
        b"a: [",
        b"!!python/object/apply:os.system [id]",
        b"&a [*a]",
        b"&a {kind: JobSet, apiVersion: jobset.x-k8s.io/v1, metadata: *a, spec: *a}",
        _BOMB.encode(),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"- " * 20_000,
        b'{"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "\\ud800\\u001b[2J"}}',
    ],
    ids=lambda text: repr(text[:20]),
)
def test_hostile_input_is_refused_in_one_sentence(tmp_path: Path, text: bytes) -> None:
    inspect(tmp_path, text).fails(3)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    run("dispatch-agent", "inspect", tmp_path / "none").fails(2, "none", "name a file that kubectl wrote")


def test_names_that_move_the_cursor_are_shown_as_text(tmp_path: Path) -> None:
    one = Cluster()
    one.pods[0]["metadata"]["name"] = "a\x1b[2J\nWRONG"
    result = inspect(tmp_path, json.dumps(one.pods[0])).passes()
    assert "a\\x1b[2J\\nWRONG" in result.out
