"""Completion rules over saves out of thin air: what counts, what does not, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dispatch_agent.checkpoint.completion import parse_rule
from dispatch_agent.checkpoint.explain import rows
from dispatch_agent.checkpoint.save import Complete, Ignored, Marker, Settling, Snapshot, Survey, Verdict
from dispatch_agent.errors import SettingsError

S = 1_000_000_000
LONG = 10_000.0
Built = Callable[..., Snapshot]


def judge(
    rule: str, save: Snapshot, *beside: Snapshot, quiet: float = LONG, ranks: int | None = None, **survey: object
) -> Verdict:
    look = Survey((save, *beside), **survey)  # type: ignore[arg-type]
    return parse_rule(rule, expect_ranks=ranks).judge(save, look, quiet)


def stuck(verdict: Verdict, *words: str) -> bool:
    assert isinstance(verdict, Settling), verdict
    for word in words:
        assert word in verdict.reason
    return verdict.stuck


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected one of auto, marker"),
        ("Auto", "expected one of"),
        ("settle", "expected one of"),
        ("settle:", "expected seconds"),
        ("settle:-1", "expected seconds"),
        ("settle:0", "expected seconds"),
        ("settle:nan", "expected seconds"),
        ("settle:inf", "expected seconds"),
        ("settle:5s", "expected seconds"),
        ("marker:", "a name is expected"),
        ("marker:/etc/x", "a name is expected"),
        ("marker:../x", "a name is expected"),
        ("pointer:", "a name is expected"),
        ("pointer:a/b", "slash"),
        ("symlink:checkpoints/last", "slash"),
        ("dcp:x", "expected one of"),
        ("deepspeed", "not there yet"),
        ("orbax", "not there yet"),
    ],
)
def test_a_rule_that_is_none_is_refused_with_what_is_allowed(text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        parse_rule(text)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(SettingsError, match="--expect-ranks is 0"):
        parse_rule("hf", expect_ranks=0)
    for settle in (-1.0, float("nan"), 1e9):
        with pytest.raises(SettingsError, match="settle time"):
            parse_rule("hf", settle=settle)


def test_every_explained_rule_can_be_chosen() -> None:
    for row in rows():
        parse_rule(
            row.name.replace("<seconds>", "5").replace("<name>", "x").replace("<file>", "x").replace("<glob>", "x")
        )


@pytest.mark.parametrize("rule", ["auto", "marker", "dcp", "hf", "lightning", "rename", "settle:1", "pointer:latest"])
def test_our_own_marker_counts_under_every_rule_if_it_is_fresh(built: Built, rule: str) -> None:
    save = built("tmp-x", {"a": 5, ".tmp1": 7})
    verdict = judge(rule, save, quiet=0.0, markers={b"tmp-x": Marker(b"tmp-x", 3, 7 * S, "tok")})
    assert isinstance(verdict, Complete)
    assert (verdict.signal.rule, verdict.signal.mark) == ("marker", f"3.{7 * S}")
    assert (verdict.signal.sequence, verdict.signal.token, verdict.signal.newest_ns) == (3, "tok", 7 * S)


@pytest.mark.parametrize("rule", ["auto", "marker"])
def test_a_marker_older_than_a_file_does_not_count_and_names_the_file(built: Built, rule: str) -> None:
    markers = {b"s": Marker(b"s", 3, 7 * S)}
    verdict = judge(rule, built("s", {"a": 5, "b": 8}), markers=markers)
    assert stuck(verdict, "b is newer than its completion marker", "call `publish complete` again")
    assert "choose another rule" not in verdict.reason


@pytest.mark.parametrize("rule", ["auto", "marker"])
def test_a_save_that_lost_a_file_since_it_was_marked_does_not_count(built: Built, rule: str) -> None:
    markers = {b"s": Marker(b"s", 3, 7 * S, content="of both files")}
    assert stuck(judge(rule, built("s", {"a": 5}), markers=markers), "not what it was", "`publish complete` again")


def test_a_new_marker_of_a_save_is_another_signal(built: Built) -> None:
    save = built("s", {"a": 5})
    verdicts = [judge("marker", save, markers={b"s": Marker(b"s", n, n * 9 * S)}) for n in (1, 2)]
    assert len({v.signal.mark for v in verdicts if isinstance(v, Complete)}) == 2


def test_special_files_and_temporary_names_are_no_saves(built: Built) -> None:
    fifo = built("pipe")
    fifo = replace(fifo, root=replace(fifo.root, kind="other"))
    for rule in ("auto", "settle:1"):
        assert isinstance(judge(rule, fifo), Ignored)
        assert isinstance(judge(rule, built("step-1.tmp", {"a": 1})), Ignored)


# auto


def test_auto_waits_for_a_rule_and_says_so_only_once_it_is_quiet(built: Built) -> None:
    save = built("weights-1", {"part.npy": 1})
    assert not stuck(judge("auto", save, quiet=5.0), "publish complete PATH", "--complete")
    assert stuck(judge("auto", save, quiet=LONG), "publish complete PATH", "settle:<seconds>")


def test_auto_knows_tracker_files(built: Built) -> None:
    for name in ("latest", "latest_checkpointed_iteration.txt", "checkpoint"):
        assert isinstance(judge("auto", built(name)), Ignored)


def test_auto_follows_dcp_and_says_why_but_only_after_quiet(built: Built) -> None:
    save = built("step-1", {".metadata": 5, "__0_0.distcp": 4})
    assert isinstance(judge("auto", save, quiet=1.0), Settling)
    verdict = judge("auto", save, quiet=2.0)
    assert isinstance(verdict, Complete)
    assert verdict.why.startswith("recognised as dcp")


@pytest.mark.parametrize("name", ["epoch=1.ckpt", "iter_0000100"])
def test_auto_does_not_take_what_saves_through_dcp_and_writes_on_for_dcp(built: Built, name: str) -> None:
    assert stuck(judge("auto", built(name, {".metadata": 5, "__0_0.distcp": 4})), "--complete")


@pytest.mark.parametrize("extra", ["meta.pt", "metadata.json"])
def test_auto_does_not_take_a_save_with_a_later_signal_for_plain_dcp(built: Built, extra: str) -> None:
    assert stuck(judge("auto", built("s", {".metadata": 5, "__0_0.distcp": 4, extra: 6})))


# marker:<name>


def test_a_named_marker_counts_inside_or_beside_if_it_is_newest(built: Built) -> None:
    assert isinstance(judge("marker:DONE", built("s", {"a": 5, "DONE": (5, 0)}), quiet=0.0), Complete)
    assert isinstance(judge("marker:meta/DONE", built("s", {"a": 5, "meta/DONE": 5})), Complete)
    beside = built("s.done", at=6)
    assert isinstance(judge("marker:.done", built("s", {"a": 5}), beside), Complete)
    assert isinstance(judge("marker:.done", beside, built("s", {"a": 5})), Ignored)
    assert stuck(judge("marker:DONE", built("s", {"a": 6, "DONE": 5})), "a is newer than DONE")
    assert stuck(judge("marker:DONE", built("s", {"a": 6})), "no DONE")


# rename, settle, absent


@pytest.mark.parametrize("rule", ["rename", "settle:3", "absent:*-unfinished"])
def test_quiet_rules_need_time_and_nothing_temporary_and_a_file(built: Built, rule: str) -> None:
    save = built("s", {"a": 5})
    verdict = judge(rule, save, quiet=0.2)
    assert isinstance(verdict, Settling)
    assert verdict.again_in is not None
    assert 0 < verdict.again_in <= 3
    done = judge(rule, save, quiet=3.0)
    assert isinstance(done, Complete)
    assert done.signal.mark == ""
    assert stuck(judge(rule, built("s", {"a": 5, "sub/.tmpX": 5})), "sub/.tmpX")
    assert stuck(judge(rule, built("s", {})), "no file")


def test_nothing_is_settled_at_its_first_sight(built: Built) -> None:
    rule = parse_rule("rename", settle=0.0)
    save = built("s", {"a": 5})
    first = rule.judge(save, Survey((save,)), 0.0)
    assert isinstance(first, Settling)
    assert first.again_in
    assert isinstance(rule.judge(save, Survey((save,)), 0.01), Complete)


def test_a_save_caught_being_deleted_is_not_complete_while_a_newer_one_stands(built: Built) -> None:
    old = built("s-1", {"a": 5}, folder_at=9)
    new = built("s-2", {"a": 9})
    assert isinstance(judge("settle:1", old), Complete)
    verdict = judge("settle:1", old, new)
    assert not stuck(verdict, "files were removed from it")
    inner = built("s-1", {"sub/a": 5, "b": 5})
    inner = replace(
        inner, entries=tuple(replace(e, mtime_ns=9 * S) if e.kind == "folder" else e for e in inner.entries)
    )
    stuck(judge("settle:1", inner, new), "files were removed from sub")
    assert isinstance(judge("settle:1", built("s-1", {"sub/a": 5}), new), Complete)


def test_the_sign_of_an_unfinished_save_holds_back_that_save_alone(built: Built) -> None:
    save, sign = built("step=10.ckpt", {"a": 5}), built("step=10-unfinished")
    assert stuck(judge("absent:*-unfinished", save, sign), "step=10-unfinished")
    ema = built("step=10-EMA.ckpt", {"a": 5})
    assert stuck(judge("absent:*-unfinished", ema, sign), "step=10-unfinished")
    assert isinstance(judge("absent:*-unfinished", save, built("step=100-unfinished")), Complete)
    assert isinstance(judge("absent:*-unfinished", sign, save), Ignored)
    inside = built("s", {"a": 5, "checkpoint-is-incomplete.txt": 5})
    assert stuck(judge("absent:checkpoint-is-incomplete.txt", inside), "says that it is unfinished")


# pointer, symlink


@pytest.mark.parametrize(
    ("text", "save"),
    [
        (b"global_step5\n", "global_step5"),
        (b"/ckpts/global_step5/", "global_step5"),
        (b"100", "iter_0000100"),
        (b"release", "release"),
        (b'model_checkpoint_path: "/x/ckpt-1"\nall_model_checkpoint_paths: "ckpt-0"\n', "ckpt-1"),
    ],
)
def test_a_tracker_names_a_save_in_its_framework_s_way(built: Built, text: bytes, save: str) -> None:
    verdict = judge("pointer:t", built(save, {"a": 5}), texts={b"t": (text, 6 * S)})
    assert isinstance(verdict, Complete)
    again = judge("pointer:t", built(save, {"a": 5}), texts={b"t": (text, 7 * S)})
    assert isinstance(again, Complete)
    assert again.signal.mark != verdict.signal.mark


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ({}, "no tracker file"),
        ({b"t": (b"", 6 * S)}, "is empty"),
        ({b"t": (b"\n", 6 * S)}, "is empty"),
        ({b"t": (b"iter_0000001", 4 * S)}, "a is newer than t"),
    ],
)
def test_a_tracker_that_does_not_name_a_save_now_does_not_count(
    built: Built, texts: dict[bytes, tuple[bytes, int]], says: str
) -> None:
    assert stuck(judge("pointer:t", built("iter_0000001", {"a": 5}), texts=texts), says)


@pytest.mark.parametrize("text", [b"other", b"10", b"iter_00000010", b"2"])
def test_a_save_that_the_tracker_has_left_behind_is_not_complete_and_nothing_to_worry_about(
    built: Built, text: bytes
) -> None:
    assert not stuck(judge("pointer:t", built("iter_0000001", {"a": 5}), texts={b"t": (text, 6 * S)}), "names ")


def test_a_tracker_counts_after_quiet_and_with_all_expected_ranks(built: Built) -> None:
    texts = {b"latest": (b"s", 9 * S)}
    one = built("s", {"zero_pp_rank_0_mp_rank_00_optim_states.pt": 5})
    assert isinstance(judge("pointer:latest", one, texts=texts, quiet=1.0), Settling)
    assert stuck(judge("pointer:latest", one, texts=texts, ranks=2), "1 of 2 ranks")
    assert isinstance(judge("pointer:latest", built("latest"), texts=texts), Ignored)


def test_a_link_names_a_save_if_it_is_newer_than_all_of_it(built: Built) -> None:
    save = built("000500", {"a": 5})
    links: dict[str, object] = {"links": {b"last": b"000500"}, "link_times": {b"last": 6 * S}}
    assert isinstance(judge("symlink:last", save, quiet=0.0, **links), Complete)
    assert not stuck(judge("symlink:last", built("000400", {"a": 5}), **links), "points to 000500, not to this")
    assert stuck(judge("symlink:last", save), "no link last")
    assert stuck(judge("symlink:last", built("000500", {"a": 7}), **links), "a is newer than the link last")
