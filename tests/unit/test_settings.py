"""Where each setting comes from, and what contradicts what."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dispatch_agent.errors import SettingsError
from dispatch_agent.settings import (
    check_ranks,
    checkpoint_root,
    destination,
    execution_folder,
    resume_folder,
    unknown_variables,
)

KNOWN = ("PUBLISH_DEST", "PUBLISH_COMPLETE", "PUBLISH_FALL_BACK", "PUBLISH_ROOT")
TEXT = st.text(min_size=1)


class TestDestination:
    @settings(deadline=None)
    @given(TEXT)
    def test_one_source_is_enough(self, url: str) -> None:
        assert destination(url, {}) == url
        assert destination(None, {"DISPATCH_PUBLISH_DEST": url}) == url

    @settings(deadline=None)
    @given(TEXT)
    def test_two_that_agree_are_one(self, url: str) -> None:
        assert destination(url, {"DISPATCH_PUBLISH_DEST": url}) == url

    @settings(deadline=None)
    @given(TEXT, TEXT)
    def test_two_that_differ_are_refused_and_both_shown(self, one: str, other: str) -> None:
        assume(one.rstrip("/") != other.rstrip("/"))
        with pytest.raises(SettingsError) as refused:
            destination(one, {"DISPATCH_PUBLISH_DEST": other})
        assert repr(one) in str(refused.value)
        assert repr(other) in str(refused.value)

    def test_a_slash_at_the_end_makes_no_difference(self) -> None:
        assert destination("s3://bucket/job/", {"DISPATCH_PUBLISH_DEST": "s3://bucket/job"}) == "s3://bucket/job/"

    @pytest.mark.parametrize("option", [None, ""])
    @pytest.mark.parametrize("environ", [{}, {"DISPATCH_PUBLISH_DEST": ""}])
    def test_none_and_empty_are_refused(self, option: str | None, environ: dict[str, str]) -> None:
        with pytest.raises(SettingsError, match=r"--dest.*PUBLISH_DEST"):
            destination(option, environ)

    def test_an_empty_variable_of_the_adapter_contradicts_nothing(self) -> None:
        assert destination("/store", {"DISPATCH_PUBLISH_DEST": ""}) == "/store"


class TestFolders:
    def test_the_one_given_wins(self) -> None:
        assert execution_folder(Path("/here"), Path("/root"), "1.17.1") == Path("/here")
        assert execution_folder(Path("/here"), None, "1.17.1") == Path("/here")

    def test_else_it_is_the_attempts_below_the_root(self) -> None:
        assert execution_folder(None, Path("/root"), "1.17.1") == Path("/root/exec/1.17.1")
        assert resume_folder(Path("/root"), "1.17.1") == Path("/root/resume/1.17.1")

    def test_no_root_is_refused_and_says_how_to_give_one(self) -> None:
        with pytest.raises(SettingsError, match=r"--root.*PUBLISH_ROOT"):
            checkpoint_root(None)
        with pytest.raises(SettingsError, match=r"--root.*PUBLISH_ROOT"):
            execution_folder(None, None, "1.17.1")
        with pytest.raises(SettingsError, match=r"--root.*PUBLISH_ROOT"):
            resume_folder(None, "1.17.1")


class TestRanks:
    @pytest.mark.parametrize("nodes", [None, 1])
    @pytest.mark.parametrize("shared", [None, True])
    @pytest.mark.parametrize("rank", [None, 0])
    def test_rank_0_publishes(self, rank: int | None, nodes: int | None, shared: bool | None) -> None:
        assert check_ranks(rank, nodes, shared) == "publish"

    @pytest.mark.parametrize("nodes", [None, 1, 2, 512])
    def test_the_others_of_a_shared_volume_stand_by(self, nodes: int | None) -> None:
        assert check_ranks(1, nodes, True) == "stand by"
        assert check_ranks(0, nodes, True) == "publish"

    @pytest.mark.parametrize("rank", [None, 0, 1])
    def test_several_nodes_of_which_nobody_said_what_they_share_are_refused(self, rank: int | None) -> None:
        with pytest.raises(SettingsError, match=r"2 nodes.*--shared-volume"):
            check_ranks(rank, 2, None)

    @pytest.mark.parametrize("nodes", [None, 1, 2])
    def test_node_local_volumes_are_refused_for_now(self, nodes: int | None) -> None:
        with pytest.raises(SettingsError, match="not in this version"):
            check_ranks(0, nodes, False)


class TestUnknownVariables:
    def test_a_misspelt_one_is_said_with_what_may_be_meant(self) -> None:
        [sentence] = unknown_variables({"PUBLISH_COMPLET": "hf", "PUBLISH_DEST": "/x", "PATH": "/bin"}, KNOWN)
        assert "PUBLISH_COMPLET " in sentence
        assert sentence.endswith("did you mean PUBLISH_COMPLETE?")

    def test_one_that_is_like_none_is_said_without_a_guess(self) -> None:
        [sentence] = unknown_variables({"PUBLISH_XYZZY_QUUX": ""}, KNOWN)
        assert "did you mean" not in sentence

    def test_a_value_is_never_shown(self) -> None:
        assert "geheim" not in "".join(unknown_variables({"PUBLISH_SECRET": "geheim"}, KNOWN))

    @pytest.mark.parametrize("service", ["PUBLISH", "PUBLISH_GATEWAY"])
    def test_the_links_of_a_service_are_none(self, service: str) -> None:
        links = ["_SERVICE_HOST", "_SERVICE_PORT", "_SERVICE_PORT_HTTP", "_PORT", "_PORT_80_TCP", "_PORT_80_TCP_ADDR"]
        assert unknown_variables({service + link: "x" for link in links}, KNOWN) == []

    def test_a_known_one_that_looks_like_a_link_is_known(self) -> None:
        assert unknown_variables({"PUBLISH_PORT": "1"}, ["PUBLISH_PORT"]) == []

    @settings(deadline=None, max_examples=50)  # similar names are looked for in every known one
    @given(st.dictionaries(st.text(max_size=20).map(lambda rest: "PUBLISH_" + rest), st.just(""), max_size=5))
    def test_there_is_one_sentence_at_most_for_each(self, environ: dict[str, str]) -> None:
        sentences = unknown_variables(environ, KNOWN)
        assert len(sentences) <= len(environ)
        assert len(set(sentences)) == len(sentences)
