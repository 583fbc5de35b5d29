"""Bad input gives one clear sentence and its exit code, never a traceback; and nothing half done is left behind.

What a command was not given, cannot reach, may not read, or must not believe.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import (
    LARGE,
    NOBODY,
    SEAWEED,
    UNSET,
    Job,
    eventually,
    fill,
    flip,
    on_s3,
    program,
    run,
    small_disk,
    tree_of,
)
from tests.servers import SECRET_KEY, Bucket
from tests.store.front import check_then_act, front

from dispatch_agent.publish import records


class TestIdentity:
    @pytest.mark.parametrize("command", ["watch", "publish", "restore"])
    def test_none_is_refused(self, job: Job, command: str) -> None:
        arguments = [job.write("step-1")] if command == "publish" else []
        result = job.run(command, *arguments, DISPATCH_EPOCH=UNSET, DISPATCH_ATTEMPT=UNSET)
        result.fails(125, "DISPATCH_EPOCH", "DISPATCH_ATTEMPT")

    @pytest.mark.parametrize("missing", ["DISPATCH_EPOCH", "DISPATCH_ATTEMPT"])
    def test_half_a_pair_is_refused(self, job: Job, missing: str) -> None:
        job.run("watch", **{missing: UNSET}).fails(125, missing)

    def test_counters_that_contradict_the_pair_are_refused(self, job: Job) -> None:
        job.run("watch", SLURM_JOB_ID="17", DISPATCH_SUBMISSION="2").fails(125, "DISPATCH_EPOCH", "1000001", "2000000")

    @pytest.mark.parametrize("epoch", ["007", "-1", "1e6", "18000001000000000000", "1" * 5000])
    def test_an_epoch_that_is_no_plain_number_is_refused(self, job: Job, epoch: str) -> None:
        job.run("watch", DISPATCH_EPOCH=epoch).fails(125, "the epoch is", epoch)

    @pytest.mark.parametrize("attempt", ["..", "a/b", "", "a b", "a\nb", "x" * 200])
    def test_an_attempt_that_is_no_folder_name_is_refused(self, job: Job, attempt: str) -> None:
        job.run("watch", DISPATCH_ATTEMPT=attempt).fails(125, "the attempt is", "not a folder name")


class TestSettings:
    @pytest.mark.parametrize("command", ["watch", "publish", "latest", "list", "restore", "verify", "probe"])
    def test_no_destination_is_refused_and_says_how_to_give_one(self, job: Job, command: str) -> None:
        arguments = [job.write("step-1")] if command == "publish" else []
        job.run(command, *arguments, PUBLISH_DEST=UNSET).fails(3, "no destination", "--dest", "PUBLISH_DEST")

    def test_two_destinations_that_differ_are_refused_and_both_named(self, job: Job) -> None:
        job.run("list", DISPATCH_PUBLISH_DEST="/elsewhere").fails(3, job.dest, "/elsewhere", "DISPATCH_PUBLISH_DEST")

    def test_the_adapters_destination_alone_is_enough(self, job: Job) -> None:
        job.run("list", PUBLISH_DEST=UNSET, DISPATCH_PUBLISH_DEST=job.dest).passes()

    @pytest.mark.parametrize("command", ["watch", "publish"])
    def test_an_unknown_rule_is_refused_and_the_known_ones_named(self, job: Job, command: str) -> None:
        arguments = [job.write("step-1")] if command == "publish" else []
        result = job.run(command, *arguments, "--complete", "soon")
        result.fails(3, "'soon'", "auto", "marker", "rename", "settle:", "pointer:", "dcp", "hf", "lightning")

    @pytest.mark.parametrize("rule", ["settle:", "settle:soon", "settle:-1", "settle:nan", "pointer:", "pointer:../x"])
    def test_a_rule_without_a_sound_argument_is_refused(self, job: Job, rule: str) -> None:
        job.run("watch", "--complete", rule).fails(3, f"--complete {rule}", "expected")

    @pytest.mark.parametrize("command", ["watch", "list"])
    def test_a_misspelt_variable_is_reported_with_a_suggestion_and_a_service_link_is_not(
        self, job: Job, command: str
    ) -> None:
        links = {
            "PUBLISH_SERVICE_HOST": "10.0.0.1",
            "PUBLISH_PORT": "tcp://10.0.0.1:80",
            "PUBLISH_PORT_80_TCP": "tcp://10.0.0.1:80",
        }
        arguments = ["--once", "--start-timeout", "0"] if command == "watch" else []
        said = job.run(command, *arguments, PUBLISH_COMPLET="hf", **links).err
        assert said.count("PUBLISH_COMPLET is set and no option reads it; did you mean PUBLISH_COMPLETE?") == 1
        assert not [name for name in links if name in said]

    def test_a_variable_out_of_range_is_named(self, job: Job) -> None:
        job.run("watch", PUBLISH_WORKERS="0").fails(2, "--workers", "PUBLISH_WORKERS", "0")

    def test_a_misspelt_option_is_answered_with_a_suggestion(self, job: Job) -> None:
        job.run("watch", "--complet", "hf").fails(2, "--complet", "'--complete'", "publish watch --help")

    def test_an_unknown_command_is_a_usage_error(self, job: Job) -> None:
        job.run("publsh").fails(2, "publsh")

    def test_a_file_where_a_folder_is_expected_is_refused(self, job: Job) -> None:
        file = job.write("file", b"x")
        job.run("watch", file).fails(2, str(file), "is a file")
        job.run("restore", file).fails(2, str(file), "is a file")

    def test_a_file_where_the_destination_should_be_is_refused(self, job: Job) -> None:
        save = job.write("step-1")
        job.store.write_bytes(b"x")
        job.run("publish", save).fails(11, job.dest, "a file stands where a folder is needed")

    def test_a_path_that_is_not_there_is_incomplete(self, job: Job) -> None:
        job.run("publish", job.folder / "step-9").fails(20, "there is no save at", "step-9")
        job.run("complete", job.folder / "step-9").fails(2, "step-9", "No such file")
        assert not job.store.exists()

    @pytest.mark.parametrize("command", ["publish", "complete"])
    def test_an_empty_path_is_not_the_current_folder(self, job: Job, command: str) -> None:
        job.run(command, "").fails(2, "PATH", "empty")

    def test_a_refused_one_shot_marks_nothing(self, job: Job) -> None:
        job.run("publish", job.write("step-1"), PUBLISH_DEST=UNSET).fails(3, "no destination")
        assert not (job.folder / ".dispatch").exists()

    @pytest.mark.parametrize("inside", [".", "store", "a/b"])
    def test_a_destination_in_the_execution_folder_is_refused(self, job: Job, inside: str) -> None:
        """It would be published into itself, larger each time."""
        dest = str(job.folder / inside)
        job.run("watch", "--once", "--dest", dest).fails(3, "lies in", str(job.folder), "outside")
        job.run("publish", job.write("step-1"), "--dest", dest).fails(3, "lies in", str(job.folder), "outside")

    @pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "s3://bucket/a/../b", "file://host/path", "nosuch://x/y"])
    def test_a_url_that_is_no_destination_is_refused(self, job: Job, url: str) -> None:
        job.run("list", "--dest", url).fails(3, url)

    @pytest.mark.parametrize("command", ["watch", "publish", "latest", "probe"])
    def test_a_destination_that_ends_with_the_process_is_refused(self, job: Job, command: str) -> None:
        arguments = [job.write("step-1")] if command == "publish" else []
        job.run(command, *arguments, "--dest", "memory://job").fails(3, "memory://job", "lives in this process alone")

    def test_storage_options_that_are_no_pairs_are_refused(self, job: Job) -> None:
        assert "geheim" not in job.run("list", "--storage-option", "geheim").fails(3, "= is missing", "KEY=VALUE")

    def test_several_nodes_are_refused_until_the_operator_says_what_they_share(self, job: Job) -> None:
        job.run("watch", PET_NNODES="2").fails(3, "2 nodes", "--shared-volume")

    def test_nothing_published_is_incomplete_unless_that_is_no_matter(self, job: Job) -> None:
        for command in ("latest", "restore", "verify"):
            job.run(command).fails(20, "nothing is published at", job.dest)
        job.run("verify", "--all").fails(20, "nothing is published at", job.dest)
        job.run("latest", "--save", "step-1").fails(20, "nothing is published")
        assert "nothing to restore" in job.run("restore", "--if-any").passes().err
        assert job.run("restore", "--if-any", "--json").passes().json == {"path": None}
        assert job.run("list").passes().out == ""


class TestStores:
    def test_one_that_does_not_answer_is_given_up_within_the_start_timeout(self, job: Job) -> None:
        away = replace(job, dest="s3://bucket/job", environ=Bucket("http://127.0.0.1:9", "bucket").environment)
        job.save("step-1")
        started = time.monotonic()
        away.run("watch", "--start-timeout", "3", AWS_MAX_ATTEMPTS="1").fails(10, "s3://bucket/job", "127.0.0.1:9")
        assert time.monotonic() - started < 15
        away.run("latest", AWS_MAX_ATTEMPTS="1").fails(10, "s3://bucket/job")

    @SEAWEED
    def test_wrong_keys_are_denied_at_once_and_not_shown(self, job: Job, shared_bucket: Bucket) -> None:
        denied = on_s3(job, shared_bucket, AWS_SECRET_ACCESS_KEY="a-wrong-secret")
        save = job.save("step-1")
        for result in (denied.run("watch", "--log-level", "debug"), denied.run("publish", save), denied.run("list")):
            result.fails(11, denied.dest, "credentials")
            assert "a-wrong-secret" not in result.err + result.out

    @SEAWEED
    def test_a_missing_bucket_is_named(self, job: Job, rclone: str) -> None:
        missing = on_s3(job, Bucket(rclone, "no-such-bucket"))
        missing.run("list").fails(10, "no-such-bucket", "create the bucket")
        missing.run("watch", "--start-timeout", "0").fails(10, "no-such-bucket", "create the bucket")
        missing.run("publish", job.write("step-1"), "--timeout", "0").fails(10, "no-such-bucket", "create the bucket")

    @SEAWEED
    def test_one_that_ignores_conditions_is_refused_before_any_data(self, job: Job, rclone_bucket: Bucket) -> None:
        weak = on_s3(job, rclone_bucket)
        save = job.write("step-1")
        weak.run("publish", save).fails(12, "cannot refuse a lost race", "--accept-weak-store")
        weak.run("probe").fails(12, "cannot refuse a lost race")
        assert weak.run("probe", "--json").json["publishing"] is None
        client = rclone_bucket.client()
        keys = [item["Key"] for item in client.list_objects_v2(Bucket=rclone_bucket.name).get("Contents", [])]
        client.close()
        assert keys == [], "the probe tidies up, and nothing else was written"
        weak.run("publish", save, "--accept-weak-store").passes()
        assert weak.run("latest").passes().out == "step-1\n"
        accepted = weak.run("probe", "--json", "--accept-weak-store").passes().json
        assert accepted["publishing"] in weak.run("probe", "--accept-weak-store").passes().out.splitlines()[-1]

    @SEAWEED
    def test_one_that_loses_a_race_is_refused_though_it_passes_in_turn(self, job: Job, rclone_bucket: Bucket) -> None:
        with front(rclone_bucket.endpoint, check_then_act(rclone_bucket)) as endpoint:
            racy = on_s3(job, rclone_bucket.behind(endpoint))
            racy.run("publish", job.write("step-1")).fails(12, "cannot refuse a lost race", "another's bytes stand")

    def test_credentials_in_a_url_are_refused_and_not_repeated(self, job: Job) -> None:
        for url in ("s3://AKIA:geheim@bucket/job", "https://user:geheim@host/job"):
            assert "geheim" not in job.run("list", "--dest", url).fails(3, "credentials")

    @pytest.mark.parametrize("name", ["secret", "token", "password", "connection_string"])
    def test_a_secret_on_the_command_line_is_refused_and_not_repeated(self, job: Job, name: str) -> None:
        s3 = replace(job, dest="s3://bucket/job")
        assert "geheim" not in s3.run("list", "--storage-option", f"{name}=geheim").fails(3, name, "command line")

    @SEAWEED
    def test_secrets_are_in_no_output(self, job: Job, shared_bucket: Bucket) -> None:
        s3 = on_s3(job, shared_bucket, AWS_SESSION_TOKEN="a-session-token")
        results = [
            s3.run("publish", job.write("step-1"), "--log-level", "debug", "--timeout", "0"),
            s3.run("probe"),
            s3.run("latest", "--json"),
            s3.run("list", PUBLISH_STORAGE_OPTION=f"secret={SECRET_KEY}x"),
        ]
        for result in results:
            assert SECRET_KEY not in result.err + result.out
            assert "a-session-token" not in result.err + result.out


@pytest.mark.root
class TestUnreadable:
    """The publisher runs as another user than the trainer, and safetensors leaves files of mode 0600."""

    @pytest.fixture
    def other(self, job: Job) -> Job:
        for folder in (job.root, job.root / "exec", job.folder, job.store):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o777)
        return replace(job, user=NOBODY)

    def test_a_folder_that_may_not_be_listed_is_said_and_is_no_success(self, job: Job, other: Job) -> None:
        other.run("watch", "--once").passes()
        job.write("step-1")
        job.folder.chmod(0o711)
        answer = other.run("watch", "--once")
        assert answer.code == 41, answer.err
        assert "run the publisher with the trainer's UID" in answer.err
        assert "pass failed" not in answer.err

    def test_one_shot_names_the_file(self, job: Job, other: Job) -> None:
        (job.write("step-1") / "weights.bin").chmod(0o600)
        other.run("publish", job.folder / "step-1").fails(22, "weights.bin", "UID")
        job.run("complete", job.folder / "step-1").passes()
        other.run("publish", job.folder / "step-1", "--complete", "marker").fails(22, "weights.bin", "UID")
        assert job.commits() == []

    def test_watch_says_so_once_and_publishes_the_others(self, job: Job, other: Job) -> None:
        (job.save("step-1") / "weights.bin").chmod(0o600)
        job.save("step-2")
        with other.watch("--drain-timeout", "2") as log:
            log.says("claimed")
            time.sleep(1.5)  # it is tried again, and said no more
            result = log.stop()
        result.fails(40, "step-1")
        assert result.err.count("may not be read") == 1
        assert job.published() == ["step-2"]

    def test_watch_says_of_a_folder_that_it_may_not_be_read(self, job: Job, other: Job) -> None:
        job.write("step-1").chmod(0o700)
        with other.watch("--complete", "rename") as log:
            log.says("waiting save=step-1")
            assert log.said.count("Permission denied") == 1
            log.stop()

    def test_a_folder_that_cannot_be_written_is_said(self, job: Job, other: Job) -> None:
        save = job.write("step-1")
        job.folder.chmod(0o755)
        other.run("publish", save).fails(1, "cannot be written", "UID")
        other.run("watch", "--start-timeout", "0").fails(1, "cannot be written", "UID")


@pytest.mark.root
class TestFullDisks:
    def test_a_full_destination_is_said_and_finished_once_there_is_space(self, job: Job, place: Path) -> None:
        with small_disk(place / "small", "2m") as disk:
            full = replace(job, dest=str(disk / "store"))
            save = full.save("step-1", {"weights.bin": b"w" * (1 << 20)})
            (disk / "store").mkdir()
            ballast = fill(disk)
            full.run("publish", save, "--timeout", "1").fails(10, str(disk), "No space left", "free some space")
            with full.watch() as watch:
                watch.says("No space left")
                ballast.unlink()
                watch.says("published save=step-1")
                watch.stop().passes()
            full.run("verify", "--all").passes()

    def test_a_destination_that_stays_full_leaves_the_save_for_a_later_publisher(self, job: Job, place: Path) -> None:
        with small_disk(place / "small", "2m") as disk:
            full = replace(job, dest=str(disk / "store"))
            full.save("small", b"s")
            with full.watch("--drain-timeout", "1.5") as watch:
                watch.says("published save=small")
                full.save("large", {"weights.bin": b"w" * (3 << 20)})
                watch.says("No space left")
                watch.stop().fails(40, "a later publisher")
            assert full.published() == ["small"]

    def test_a_full_checkpoint_volume_is_said_and_gone_on_with(self, job: Job, place: Path) -> None:
        with small_disk(place / "small", "1m") as disk:
            full = replace(job, root=disk)
            save = full.write("step-1")
            ballast = fill(disk)
            full.run("publish", save).fails(1, "cannot be written", "the volume is full")
            full.run("complete", save).fails(1, "cannot be written", "the volume is full")
            ballast.unlink()
            full.run("complete", save).passes()
            ballast = fill(disk)
            log = place / "log"
            with log.open("wb") as out:
                watch = subprocess.Popen(
                    [program("publish"), "watch", "--rescan", "0.3"], env=full.variables(), stdout=out, stderr=out
                )
            try:
                eventually(lambda: "the volume is full" in log.read_text(), log.read_text)
                ballast.unlink()
                eventually(lambda: "published save=step-1" in log.read_text(), log.read_text)
            finally:
                watch.terminate()
            assert watch.wait(30) == 0
            assert "Traceback" not in log.read_text()


class TestSaves:
    STRANGE = (
        b"plain",
        b"-rf",
        b"--dest",
        b"...",
        b"..data",
        b" both ends ",
        b"new\nline",
        b"tab\tand\x1bescape",
        b"bad\xff\xfe.pt",
        "u\u0308 and \u00fc".encode(),
        b"%41",
        b"a?*[b]",
        b"#?%+ &=:@",
        b"trailing.",
        b"n" * 255,
        b"\\",
    )

    def test_strange_names_come_back_byte_for_byte(self, job: Job, place: Path) -> None:
        tree = {name: name for name in self.STRANGE} | {b"deep/" + name + b"/x": b"d" for name in self.STRANGE}
        save = job.save("step-1", tree)
        (save / "empty folder").mkdir()
        (save / "empty file").touch()
        (save / "link").symlink_to("plain")
        (save / "program").write_bytes(b"#!")
        (save / "program").chmod(0o755)
        job.run("publish", save).passes()
        job.run("verify").passes()
        job.run("restore", place / "back").passes()
        assert tree_of(place / "back" / "step-1") == tree_of(save)
        assert os.access(place / "back" / "step-1" / "program", os.X_OK)

    def test_saves_of_strange_names_are_published_listed_and_restored_by_name(self, job: Job, place: Path) -> None:
        for name in self.STRANGE:
            job.save(name, {"file": name})
        assert job.run("watch", "--once").passes().err.count(" published ") == len(self.STRANGE)
        assert len(job.published()) == len(self.STRANGE)
        for line in job.run("list").passes().out.splitlines():
            assert line.isprintable()
        for name in (b"new\nline", b"bad\xff\xfe.pt", b"-rf", b"n" * 255):
            job.run("restore", place / "back", b"--save=" + name).passes()
            assert (place / "back" / os.fsdecode(name) / "file").read_bytes() == name

    def test_a_key_too_long_for_the_store_is_refused_by_name_before_anything_is_sent(self, job: Job) -> None:
        save = job.save("step-1", {b"fits": b"x", b"\xff" * 100: b"y"})
        job.run("publish", save).fails(22, "%FF%FF", "too long", "255", "rename it")
        assert job.data() == []

    @pytest.mark.parametrize(
        ("target", "why"), [("../../outside", "leaves the save"), ("/etc/passwd", "is absolute"), ("..", "leaves")]
    )
    def test_a_link_out_of_the_save_is_refused_by_name(self, job: Job, target: str, why: str) -> None:
        save = job.write("step-1")
        (save / "link").symlink_to(target)
        job.run("publish", save).fails(22, "step-1/link", target, why)
        assert job.data() == []

    def test_a_fifo_or_socket_is_refused_by_name_and_the_other_saves_go_on(self, job: Job) -> None:
        os.mkfifo(job.write("step-1") / "pipe")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(job.write("step-2") / "socket"))
        for name in ("step-1", "step-2"):
            job.run("complete", job.folder / name).passes()
        job.save("step-3")
        with job.watch() as watch:
            watch.says("not published", times=2)
            watch.says("published save=step-3")
            result = watch.stop()
        result.fails(40, "step-1", "step-2")
        assert "step-1/pipe is no file" in result.err
        assert "step-2/socket is no file" in result.err
        job.run("publish", job.folder / "step-1").fails(22, "step-1/pipe", "move it out")

    def test_what_is_no_save_cannot_be_marked_or_published(self, job: Job) -> None:
        job.save("step-1")
        (job.folder / "link").symlink_to("step-1")
        os.mkfifo(job.folder / "pipe")
        for name, why in (("link", "is a link"), ("pipe", "neither a file nor a folder"), (".dispatch", "own")):
            job.run("complete", job.folder / name).fails(2, name, why)
            job.run("publish", job.folder / name).fails(2, name, why)
        job.run("complete", job.folder / "step-1" / "weights.bin").fails(2, "lies inside the save")
        job.run("complete", job.folder).fails(2, "an execution's folder")
        job.run("complete", job.folder / "step-1", "--token", "two words").fails(2, "token", "ASCII")

    def test_a_save_that_vanishes_while_it_is_uploaded_leaves_no_commit(self, job: Job) -> None:
        save = job.save("step-1", LARGE)
        with job.watch("--workers", "1") as watch:
            watch.says("uploading save=step-1")
            eventually(lambda: len(job.data()) > 1, lambda: watch.said)
            save.rename(job.root / "away")
            watch.says("not published save=step-1")
            job.save("step-2")
            watch.says("published save=step-2")
            watch.stop().passes()
        assert job.published() == ["step-2"]

    def test_a_folder_of_another_execution_is_refused(self, job: Job) -> None:
        save = job.save("step-1")
        job.run("publish", save).passes()
        job.run("publish", save, DISPATCH_EPOCH="1000009").fails(32, str(job.folder), "'1.17.1'", "1000009")

    def test_one_epoch_under_two_attempts_is_refused_before_any_data(self, job: Job) -> None:
        job.run("publish", job.save("step-1")).passes()
        other = job.later(epoch=job.epoch, attempt="1.18.1")
        result = other.run("publish", other.write("step-9"))
        result.fails(31, str(job.epoch), "'1.17.1'", "'1.18.1'")
        assert not list(job.store.glob("data/*1.18.1*"))


class TestRestore:
    def test_what_stands_at_the_target_is_never_replaced(self, job: Job, place: Path) -> None:
        job.run("publish", job.save("step-1")).passes()
        mine = place / "back" / "step-1"
        mine.mkdir(parents=True)
        (mine / "weights.bin").write_bytes(b"mine")
        job.run("restore", place / "back").fails(3, str(mine), "differs", "nothing is replaced")
        assert tree_of(mine) == {b"weights.bin": b"mine"}

    def test_the_very_save_at_the_target_is_kept(self, job: Job, place: Path) -> None:
        job.run("publish", job.save("step-1")).passes()
        assert job.run("restore", place / "back", "--json").passes().json["fresh"] is True
        assert job.run("restore", place / "back", "--json").passes().json["fresh"] is False
        (place / "back" / "step-1" / "more").touch()
        job.run("restore", place / "back").fails(3, "more is not part of it")

    def test_killed_half_way_it_goes_on_where_it_was(self, job: Job, place: Path) -> None:
        save = job.save("step-1", LARGE)
        job.run("publish", save).passes()
        back = place / "back"
        process = subprocess.Popen([program("publish"), "restore", back, "--workers", "1"], env=job.variables())
        eventually(lambda: len(list(back.glob("*/*.bin"))) > 3, lambda: "nothing is there yet")
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not (back / "step-1").exists(), "a half restored save has not its final name"
        before = {file.name: file.stat().st_ino for file in back.glob("*/*.bin")}
        job.run("restore", back).passes()
        assert tree_of(back / "step-1") == tree_of(save)
        assert shown(back) == ["step-1"]
        kept = [name for name, inode in before.items() if (back / "step-1" / name).stat().st_ino == inode]
        assert len(kept) >= 3, "what was there already is not fetched again"

    def test_a_damaged_newest_falls_back_loudly_unless_forbidden(self, job: Job, place: Path) -> None:
        job.run("publish", job.save("step-1")).passes()
        job.run("publish", job.save("step-2")).passes()
        flip(next(path for path in job.data() if "step-2" in str(path) and path.name == "weights.bin"))
        job.run("restore", place / "back", "--no-fall-back").fails(22, "step-2", "weights.bin", "damaged after it was")
        assert shown(place / "back") == []
        result = job.run("restore", place / "back").passes()
        assert "damaged: commits/" in result.err
        assert "step-2" in result.err
        assert shown(place / "back") == ["step-1"]
        assert job.run("latest").passes().out == "step-2\n", "falling back does not change what is newest"

    def test_all_damaged_is_an_integrity_error(self, job: Job, place: Path) -> None:
        job.run("publish", job.save("step-1")).passes()
        for path in job.data():
            flip(path)
        job.run("restore", place / "back").fails(22, "everything published at", job.dest)
        job.run("restore", place / "back", "--if-any").fails(22, "everything published at")

    def test_verify_names_the_damaged_file(self, job: Job) -> None:
        for name in ("step-1", "step-2", "step-3"):
            job.run("publish", job.save(name)).passes()
        flip(next(path for path in job.data() if "step-2" in str(path) and path.name == "weights.bin"))
        job.run("verify").passes()
        result = job.run("verify", "--all")
        result.fails(22, "1 of 3", "step-2")
        damaged = [line for line in result.out.splitlines() if line.startswith("DAMAGED")]
        assert len(damaged) == 1
        assert "step-2/" in damaged[0]
        assert "weights.bin" in damaged[0]
        problems = {item["save"]: item["problem"] for item in job.run("verify", "--all", "--json").json}
        assert [name for name, problem in problems.items() if problem] == ["step-2"]

    def test_a_missing_file_is_damage_too(self, job: Job) -> None:
        job.run("publish", job.save("step-1")).passes()
        next(path for path in job.data() if path.name == "weights.bin").unlink()
        result = job.run("verify")
        result.fails(22, "step-1")
        assert "weights.bin is missing" in result.out

    def test_a_target_that_cannot_be_written_is_said(self, job: Job, place: Path) -> None:
        job.run("publish", job.save("step-1")).passes()
        (place / "file").write_bytes(b"x")
        job.run("restore", place / "file" / "below").fails(1, "cannot restore step-1", "Not a directory")


class TestHostileStores:
    """Others can write to the store: what stands there is checked, and nothing leads out of the target."""

    @pytest.fixture
    def published(self, job: Job) -> Job:
        job.run("publish", job.save("step-1")).passes()
        return job

    def rewrite(self, job: Job, **change: object) -> None:
        """Change the manifest, and let the commit name the changed one: only its content is left to be refused."""
        [commit] = job.commits()
        record = json.loads(commit.read_bytes())
        part = record["parts"][0]
        manifest = json.loads((job.store / part["manifest"]).read_bytes()) | change
        data = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
        (job.store / part["manifest"]).write_bytes(data)
        part["manifest_sha256"] = records.sha256(data)
        commit.write_bytes(records.canonical(record))

    @pytest.mark.parametrize("path", ["../outside", "/outside", "a/../../outside", "%2E%2E/outside", "a//b", ".."])
    def test_a_path_that_leaves_the_save_is_refused(self, published: Job, place: Path, path: str) -> None:
        file = {"path": path, "size": 1, "sha256": "0" * 64, "mode": 0o644}
        self.rewrite(published, files=[file])
        published.run("restore", place / "back" / "deep").fails(22, "not a manifest")
        assert not list(place.rglob("outside"))
        assert "not a manifest" in published.run("verify").out

    def test_a_link_that_leaves_the_save_is_refused(self, published: Job, place: Path) -> None:
        self.rewrite(published, links=[{"path": "link", "target": "%2E%2E/%2E%2E/etc"}], files=[])
        published.run("restore", place / "back").fails(22, "link", "leaves the save")
        assert not os.path.lexists(place / "back" / "step-1")

    def test_a_manifest_of_a_newer_format_asks_for_a_newer_version(self, published: Job, place: Path) -> None:
        self.rewrite(published, format=2)
        published.run("restore", place / "back").fails(22, "format 2", "use a newer")

    def test_a_commit_of_a_newer_format_asks_for_a_newer_version(self, published: Job, place: Path) -> None:
        [commit] = published.commits()
        commit.write_bytes(commit.read_bytes().replace(b'"format":1', b'"format":2'))
        published.run("latest").fails(22, "format 2", "use a newer one")
        published.run("restore", place / "back").fails(22, "format 2", "use a newer one")

    @pytest.mark.parametrize("what", ["commit", "manifest"])
    def test_verify_does_not_call_a_newer_format_damaged(self, published: Job, what: str) -> None:
        if what == "manifest":
            self.rewrite(published, format=2)
        else:
            [commit] = published.commits()
            commit.write_bytes(commit.read_bytes().replace(b'"format":1', b'"format":2'))
        published.run("publish", published.save("step-2")).passes()
        result = published.run("verify", "--all")
        assert "damaged" not in result.fails(22, "format 2", "use a newer one")
        assert [line.split()[0] for line in result.out.splitlines()] == ["intact", "newer"]
        assert [item["state"] for item in published.run("verify", "--all", "--json").json] == ["intact", "newer"]
        flip(next(path for path in published.data() if "step-2" in path.parts and path.name == "weights.bin"))
        published.run("verify", "--all").fails(22, "1 of 2", "are damaged: step-2")

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (b'"save":"step-1"', b'"save":".."'),
            (b'"save":"step-1"', b'"save":"%2E%2E"'),
            (b'"save":"step-1"', b'"save":"a/b"'),
            (b'"prefix":"data/', b'"prefix":"../data/'),
            (b'"manifest":"data/', b'"manifest":"/data/'),
            (b'"ordinal":1', b'"ordinal":2'),
            (b'"ordinal":1', b'"ordinal":"1"'),
            (b"{", b"["),
            (b"}", b""),
        ],
        ids=str,
    )
    def test_a_forged_commit_is_refused(self, published: Job, place: Path, old: bytes, new: bytes) -> None:
        [commit] = published.commits()
        commit.write_bytes(commit.read_bytes().replace(old, new))
        published.run("restore", place / "back").fails(22, "commits/")
        published.run("latest").fails(22, "commits/")
        assert "unreadable" in published.run("list").err
        assert not (place / "back").exists() or shown(place / "back") == []

    def test_a_link_in_the_store_is_not_followed(self, published: Job, place: Path) -> None:
        file = next(path for path in published.data() if path.name == "weights.bin")
        file.rename(place / "elsewhere")
        file.symlink_to(place / "elsewhere")
        published.run("restore", place / "back").fails(11, "weights.bin", "symbolic link")

    def test_foreign_keys_are_not_taken_for_commits(self, published: Job) -> None:
        folder = published.commits()[0].parent
        (folder / "README").write_text("hello")
        (folder.parent / "notes").mkdir()
        (folder.parent / "notes" / "0001.000001.aaaaaaaaaaaa.json").write_text("{}")
        assert published.run("latest").passes().out == "step-1\n"
        assert published.published() == ["step-1"]


def shown(folder: Path) -> list[str]:
    """What a user sees in it: `restore` keeps its lock beside, under a hidden name."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".restore.lock")


def test_the_program_says_its_version_and_what_it_does() -> None:
    assert run("dispatch-agent", "--version").passes().out.startswith("dispatch-agent, version ")
    assert "publish watch" in run("dispatch-agent", "--help").passes().out
    assert run("publish").code == 2


def test_a_record_puts_no_control_characters_on_a_terminal(job: Job) -> None:
    """Whoever may write to the store may have written it."""
    job.run("publish", job.write("step-1")).passes()
    (commit,) = job.commits()
    document = json.loads(commit.read_bytes())
    document |= {"attempt": "a\x1b]0;title\x07\nEPOCH", "committed_at": "\x1b[2J2026"}
    commit.write_text(json.dumps(document))
    shown = job.run("list").passes().out
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 2
