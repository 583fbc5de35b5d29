"""What a container's environment says of identity, rank and nodes, for the parts that are not the prologue."""

from __future__ import annotations

import pytest

from dispatch_agent.cluster.container import JobSetCounters, read_counters, read_identity, read_nodes, read_rank
from dispatch_agent.errors import Refused, SettingsError
from dispatch_agent.identity import Identity

JOB = "01J8ZQ4T7M9W2K5X3R6Y8N0PVB"


def test_a_sidecar_reads_the_identity_from_raw_counters_or_the_finished_pair_alike() -> None:
    raw = {
        "DISPATCH_JOB_ID": JOB,
        "DISPATCH_K8S_ADMISSION": "7",
        "DISPATCH_K8S_RESTART": "5",
        "DISPATCH_K8S_EPOCH_PREFIX": "12000003",
        "DISPATCH_K8S_TOKEN_PREFIX": f"{JOB}.3.1",
    }
    pair = {"DISPATCH_JOB_ID": JOB, "DISPATCH_EPOCH": "12000003000012", "DISPATCH_ATTEMPT": f"{JOB}.3.1.7.5"}
    assert read_identity(raw) == Identity(JOB, 12_000_003_000_012, f"{JOB}.3.1.7.5", "kubeflow")
    assert read_identity(pair) == Identity(JOB, 12_000_003_000_012, f"{JOB}.3.1.7.5", "ready-made")


def test_slurm_needs_no_job_id() -> None:
    environ = {"SLURM_JOB_ID": "4711", "DISPATCH_SUBMISSION": "3", "SLURM_RESTART_COUNT": "2"}
    assert read_identity(environ) == Identity(None, 3_000_002, "3.4711.2", "slurm")


def test_no_identity_is_refused_in_the_words_of_the_prologue() -> None:
    with pytest.raises(Refused, match="no identity: neither the counters of a cluster nor a finished pair is set"):
        read_identity({"PATH": "/bin"})


def test_a_job_id_that_is_none_is_refused() -> None:
    with pytest.raises(Refused, match="job id 'mine' is not a ULID"):
        read_identity({"DISPATCH_JOB_ID": "mine", "DISPATCH_EPOCH": "1000000", "DISPATCH_ATTEMPT": "a"})


def test_values_that_are_not_utf8_are_refused_and_not_crashed_on() -> None:
    with pytest.raises(Refused, match=r"the attempt is a\\xff"):
        read_identity({"DISPATCH_EPOCH": "1000000", "DISPATCH_ATTEMPT": "a\udcff"})


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, None),
        ({"JOB_COMPLETION_INDEX": "0"}, 0),
        ({"SLURM_PROCID": "17"}, 17),
        ({"JOB_COMPLETION_INDEX": "3", "SLURM_PROCID": "3"}, 3),
        ({"JOB_COMPLETION_INDEX": "99999"}, 99_999),
    ],
)
def test_the_rank_is_the_completion_index_or_the_slurm_process(environ: dict[str, str], rank: int | None) -> None:
    assert read_rank(environ) == rank


@pytest.mark.parametrize("text", ["", "-1", "01", "1 ", "x", "100000", "\u0661", "9" * 5000])
def test_a_rank_that_is_no_number_is_a_wrong_setting(text: str) -> None:
    with pytest.raises(SettingsError, match="not a rank from 0 to 99999: give the rank with --rank"):
        read_rank({"SLURM_PROCID": text})


def test_two_ranks_that_differ_are_a_wrong_setting() -> None:
    with pytest.raises(SettingsError, match="JOB_COMPLETION_INDEX is 1 and SLURM_PROCID is 0"):
        read_rank({"JOB_COMPLETION_INDEX": "1", "SLURM_PROCID": "0"})


@pytest.mark.parametrize(
    ("environ", "nodes"),
    [
        ({}, None),
        ({"SLURM_NNODES": "1"}, 1),
        ({"SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "1"}, 4),
        ({"PET_NNODES": "2"}, 2),
        ({"PET_NNODES": "1:4"}, 4),
        ({"SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2"}, 3),
    ],
)
def test_as_many_nodes_are_seen_as_any_count_shows(environ: dict[str, str], nodes: int | None) -> None:
    assert read_nodes(environ) == nodes


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1:", ":2", "2x"])
def test_a_node_count_that_is_no_number_is_a_wrong_setting(text: str) -> None:
    with pytest.raises(SettingsError, match="not a number of nodes"):
        read_nodes({"PET_NNODES": text})


NEVER_RESTARTED = {"AGENT_K8S_JOB_RESTART": "0", "AGENT_K8S_IN_PLACE_RESTART": "0", "AGENT_K8S_EXECUTION": "7"}


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({}, {}),
        (dict.fromkeys(NEVER_RESTARTED, ""), {}),
        (NEVER_RESTARTED, {"job_restart": 0, "in_place_restart": 0, "execution": 7}),
    ],
)
def test_counters_that_are_absent_or_zero_weaken_nothing(environ: dict[str, str], seen: dict[str, int]) -> None:
    assert read_counters(environ).seen == seen
    assert read_counters(environ).weakened == ()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("AGENT_K8S_IN_PLACE_RESTART", "JobSet restarted this pod's containers 2 time(s) in place"),
        ("AGENT_K8S_JOB_RESTART", "JobSet made this Job anew 2 time(s) without raising restart-attempt"),
    ],
)
def test_a_restart_that_raised_no_counter_of_the_identity_weakens_it(name: str, said: str) -> None:
    (reason,) = read_counters({**NEVER_RESTARTED, name: "2"}).weakened
    assert reason.startswith(f"{said} ({name})")


@pytest.mark.parametrize("name", NEVER_RESTARTED)
@pytest.mark.parametrize("text", ["x", "-1", "01", " 1", "1e3", "\u0661", "\udcff", "9" * 5000])
def test_a_counter_that_is_no_count_is_said_and_stops_nobody(name: str, text: str) -> None:
    counters = read_counters({name: text})
    assert counters == JobSetCounters(None, None, None, counters.weakened)
    assert len(counters.weakened) == 1
    assert f"{name} is {text!r}, not a count" in counters.weakened[0]


def test_no_such_counter_changes_the_identity() -> None:
    environ = {"SLURM_JOB_ID": "4711", "DISPATCH_SUBMISSION": "3"}
    assert read_identity({**environ, **dict.fromkeys(NEVER_RESTARTED, "9")}) == read_identity(environ)
