"""`publish watch` as a sidecar: what probes and scrapes are told in every state, how long it drains, what ends it
beside SIGTERM, and its last words. Real processes, real HTTP, real locks."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.cli.conftest import (
    ATTEMPT,
    EPOCH,
    LARGE,
    SEAWEED,
    UNSET,
    Job,
    Result,
    Running,
    eventually,
    on_s3,
    program,
    run,
)
from tests.servers import Bucket
from tests.servers.processes import free_port
from tests.store.front import Forward, Reply, Request, front

from dispatch_agent.checkpoint import scan
from dispatch_agent.cli.sidecar import Sidecar
from dispatch_agent.clock import SystemClock
from dispatch_agent.logs import Log
from dispatch_agent.publish import upload
from dispatch_agent.publish.parallel import Tick
from dispatch_agent.publish.watcher import Stop, Tally
from dispatch_agent.store.base import Source, Uploaded
from dispatch_agent.store.memory import MemoryStore


class SteppingClock(SystemClock):
    """Stands still but for the test."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Doubtful(MemoryStore):
    """Says nothing of whether what it stored is what it was sent."""

    def upload(self, key: str, source: Source) -> Uploaded:
        return replace(super().upload(key, source), verified=False)


@dataclass(frozen=True)
class Asked:
    """A watch that listens."""

    port: int
    running: Running

    def ask(self, path: str, method: str = "GET") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode().strip()
        finally:
            connection.close()

    def comes(self, path: str, status: int, *words: str) -> None:
        """Wait for this answer."""

        def there() -> bool:
            found, sentence = self.ask(path)
            return found == status and all(word in sentence for word in words)

        eventually(there, lambda: f"{path} says {self.ask(path)}, not {status} {words}:\n{self.running.said[-2000:]}")

    def metrics(self) -> dict[str, float]:
        """Every figure by its name without the common prefix, as Prometheus would read it."""
        status, text = self.ask("/metrics")
        assert status == 200
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        assert all(sample.name.startswith("dispatch_publish_") for sample in samples)
        return {sample.name.removeprefix("dispatch_publish_"): sample.value for sample in samples}

    def health(self, *words: str) -> Result:
        """`dispatch-agent health`, as a probe runs it."""
        return run("dispatch-agent", "health", *words, environ={**os.environ, "PUBLISH_LISTEN": f":{self.port}"})


@contextmanager
def listening(job: Job, *arguments: str | Path, **environ: str) -> Iterator[Asked]:
    port = free_port((0,))
    with job.watch("--listen", f"127.0.0.1:{port}", *arguments, **environ) as running:
        asked = Asked(port, running)
        running.says("listening")
        yield asked


class Faulty:
    """Stands before a server and passes everything on, until it is told to be away, or to hold up what is sent."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.away = threading.Event()
        self.moves = threading.Event()
        self.moves.set()
        self.hung = threading.Event()

    def __call__(self, request: Request, forward: Forward) -> Reply | None:
        if self.away.is_set():
            return None
        if request.method == "PUT" and "/data/" in request.target:
            time.sleep(self.delay)
            if not self.moves.is_set():
                self.hung.set()
                self.moves.wait(15)
        return forward(request)


class TestProbes:
    def test_it_has_started_and_lives_though_the_store_never_answers(self, job: Job) -> None:
        """A sidecar whose start-up probe fails keeps the whole pod from starting."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            away = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "c"}
            endpoint = f"endpoint_url=http://127.0.0.1:{silent.getsockname()[1]}"
            job = replace(job, dest="s3://bucket/job", environ={**away, "PUBLISH_STORAGE_OPTION": endpoint})
            with listening(job) as watch:
                assert watch.ask("/startupz") == (200, "started")
                assert watch.ask("/livez") == (200, "live")
                status, sentence = watch.ask("/readyz")
                assert status == 503
                assert sentence.startswith("not claimed yet")

    def test_it_is_ready_once_it_has_claimed(self, job: Job) -> None:
        with listening(job) as watch:
            watch.comes("/readyz", 200, "ready")
            assert watch.ask("/readyz", "HEAD") == (200, "")

    def test_waiting_longer_than_the_stall_timeout_is_no_stall(self, job: Job) -> None:
        with listening(job, "--stall-timeout", "1", "--rescan", "60") as watch:
            watch.comes("/readyz", 200)
            time.sleep(1.5)
            assert watch.ask("/livez") == (200, "live")

    def test_a_folder_that_is_not_there_yet_is_waited_for_alive_and_not_ready(self, job: Job) -> None:
        shutil.rmtree(job.root / "exec")
        with listening(job) as watch:
            watch.comes("/readyz", 503, "standing by", "is not there yet")
            assert watch.ask("/livez")[0] == 200
            job.folder.mkdir(parents=True)
            watch.comes("/readyz", 200)

    def test_of_two_watches_of_a_folder_one_is_ready(self, job: Job) -> None:
        with listening(job) as first:
            first.comes("/readyz", 200)
            with listening(job) as second:
                second.comes("/readyz", 503, "another publisher has")
                assert second.ask("/livez")[0] == 200
                first.running.stop().passes()
                second.comes("/readyz", 200)

    def test_a_rank_that_stands_by_is_ready(self, job: Job) -> None:
        with listening(job, "--rank", "1", "--shared-volume") as watch:
            watch.comes("/readyz", 200, "rank 1 stands by")
            assert watch.ask("/livez")[0] == 200
            assert watch.metrics()["published_total"] == 0
            watch.running.stop().passes()

    def test_fenced_is_alive_and_not_ready(self, job: Job) -> None:
        with listening(job) as watch:
            watch.comes("/readyz", 200)
            later = job.later()
            later.run("publish", later.save("step-2")).passes()
            job.save("step-1")
            watch.comes("/readyz", 503, "fenced", str(later.epoch))
            assert watch.ask("/livez")[0] == 200
            figures = watch.metrics()
            assert (figures["fenced"], figures["ready"], figures["live"]) == (1, 0, 1)
            watch.running.stop().fails(30, str(later.epoch))


@SEAWEED
class TestStores:
    def test_a_store_that_is_away_is_alive_and_not_ready_until_it_is_back(
        self, job: Job, shared_bucket: Bucket
    ) -> None:
        faulty = Faulty()
        with front(shared_bucket.endpoint, faulty) as endpoint:
            job = on_s3(job, shared_bucket.behind(endpoint), AWS_MAX_ATTEMPTS="1")
            with listening(job, "--stall-timeout", "30") as watch:
                watch.comes("/readyz", 200)
                faulty.away.set()
                job.save("step-1")
                watch.comes("/readyz", 503, "the last pass failed")
                assert watch.ask("/livez")[0] == 200
                figures = watch.metrics()
                assert figures["failed_passes_total"] >= 1
                faulty.away.clear()
                watch.running.says("published save=step-1")
                watch.comes("/readyz", 200)
                watch.running.stop().passes()

    def test_an_upload_that_stands_still_is_not_alive_until_it_moves(self, job: Job, shared_bucket: Bucket) -> None:
        faulty = Faulty()
        with front(shared_bucket.endpoint, faulty) as endpoint:
            job = on_s3(job, shared_bucket.behind(endpoint))
            with listening(job, "--stall-timeout", "1") as watch:
                watch.comes("/readyz", 200)
                faulty.moves.clear()
                job.save("step-1", {"a.bin": b"a" * 200})
                assert faulty.hung.wait(30)
                watch.comes("/livez", 503, "nothing moved for", "--stall-timeout")
                figures = watch.metrics()
                assert (figures["live"], figures["unpublished"], figures["upload_size_bytes"]) == (0, 1, 200)
                assert watch.health().code == 1
                faulty.moves.set()
                watch.running.says("published save=step-1")
                watch.comes("/livez", 200)
                assert watch.metrics()["unpublished"] == 0
                watch.running.stop().passes()


class TestMoving:
    """What is taken for a sign of life: bytes that went by, sent or read back, and nothing else."""

    def sidecar(self, clock: SteppingClock) -> tuple[Sidecar, Tick]:
        tally = Tally(pass_began=clock.monotonic())
        sidecar = Sidecar(tally, Stop(), clock, Log(lambda _: None, clock), {})
        return sidecar, sidecar.progress(lambda *_: lambda _: None)("step-1", 100)

    @pytest.mark.parametrize(("count", "still"), [(50, 5.0), (-50, 5.0), (0, 15.0)])
    def test_a_heartbeat_of_who_waits_is_none(self, count: int, still: float) -> None:
        clock = SteppingClock()
        sidecar, tick = self.sidecar(clock)
        clock.now += 10
        tick(count)
        clock.now += 5
        assert sidecar.facts().still == still

    def test_another_pass_is_one(self) -> None:
        clock = SteppingClock()
        sidecar, _ = self.sidecar(clock)
        clock.now += 10
        sidecar.tally.pass_began = clock.monotonic()
        clock.now += 5
        assert sidecar.facts().still == 5.0

    def test_what_is_read_back_moves_and_is_not_sent_once_more(self, job: Job) -> None:
        """Where a store proves nothing of what it took, a large save is read back for longer than any patience."""
        job.write("step-1", {"a.bin": b"a" * 1000})
        ticks: list[int] = []
        snapshot = scan.snapshot(job.folder, b"step-1")
        upload.upload(Doubtful(), job.folder, snapshot, "data", tick=ticks.append, workers=1)
        assert sum(tick for tick in ticks if tick > 0) == 1000
        assert sum(tick for tick in ticks if tick < 0) == -1000


class TestMetrics:
    def test_they_are_what_happened(self, job: Job) -> None:
        with listening(job) as watch:
            watch.comes("/readyz", 200)
            assert "last_commit_timestamp_seconds" not in watch.metrics(), "an age of no commit would be an alarm"
            before = time.time()
            job.save("step-1", {"a.bin": b"a" * 1000})
            watch.running.says("published save=step-1")
            job.save("step-1", {"a.bin": b"a" * 1000})
            watch.running.says("already save=step-1")
            job.write("step-2")
            eventually(lambda: watch.metrics()["incomplete"] == 1, lambda: watch.ask("/metrics")[1])
            figures = watch.metrics()
            assert figures["published_total"] == 1
            assert figures["already_total"] == 1
            assert figures["uploaded_bytes_total"] == 2000
            assert figures["failed_passes_total"] == 0
            assert figures["passes_total"] >= 3
            assert figures["unpublished"] == figures["oldest_unpublished_seconds"] == 0
            assert before - 1 < figures["last_commit_timestamp_seconds"] < time.time() + 1

    def test_the_identity_is_one_series(self, job: Job) -> None:
        with listening(job) as watch:
            families = {f.name: f for f in text_string_to_metric_families(watch.ask("/metrics")[1])}
            [sample] = families["dispatch_publish_info"].samples
            assert (sample.labels["epoch"], sample.labels["attempt"]) == (str(EPOCH), ATTEMPT)
            assert all(not s.labels for f in families.values() for s in f.samples if f.name != "dispatch_publish_info")

    def test_a_scrape_while_a_save_is_on_its_way_shows_how_far_it_is(self, job: Job) -> None:
        job.save("step-1", LARGE)
        size = sum(len(data) for data in LARGE.values())
        with listening(job, "--workers", "1") as watch:
            seen: list[dict[str, float]] = []
            while not watch.running.said.count("published save=step-1"):
                seen += [figures for figures in [watch.metrics()] if figures["upload_size_bytes"]]
            assert {figures["upload_size_bytes"] for figures in seen} == {size}
            assert all(0 <= figures["upload_done_bytes"] <= size for figures in seen)
            unpublished = [figures["unpublished"] for figures in seen]
            assert unpublished[0] == 1
            assert unpublished == sorted(
                unpublished, reverse=True
            )  # 0 once it is committed, a moment before it is said
            watch.running.says("published save=step-1")
            eventually(lambda: watch.metrics()["upload_size_bytes"] == 0, lambda: watch.ask("/metrics")[1])
            assert watch.metrics()["uploaded_bytes_total"] == size


class TestListening:
    def test_a_port_in_use_is_a_setting_to_change(self, job: Job) -> None:
        with listening(job) as watch:
            said = job.run("watch", "--once", "--listen", f":{watch.port}").fails(3, "cannot listen", "--listen")
            assert "Address already in use" in said

    def test_an_address_that_is_none_is_refused(self, job: Job) -> None:
        job.run("watch", "--once", "--listen", "9464").fails(3, "9464", "127.0.0.1:9464")

    def test_a_client_that_hangs_holds_up_neither_the_others_nor_the_end(self, job: Job) -> None:
        with listening(job) as watch, socket.create_connection(("127.0.0.1", watch.port)) as hanging:
            hanging.sendall(b"GET /livez HTTP/1.1\r\n")
            watch.comes("/readyz", 200)
            job.save("step-1")
            watch.running.says("published save=step-1")
            watch.running.stop().passes()


class TestHealth:
    def test_it_asks_the_watch_and_says_its_sentence(self, job: Job) -> None:
        with listening(job) as watch:
            watch.comes("/readyz", 200)
            for words, sentence in (
                (("started",), "started"),
                ((), "live"),
                (("live",), "live"),
                (("ready",), "ready"),
            ):
                result = watch.health(*words)
                assert (result.code, result.out, result.err) == (0, f"{sentence}\n", "")
            asked = run("dispatch-agent", "health", "ready", "--listen", f"127.0.0.1:{watch.port}")
            assert (asked.code, asked.out) == (0, "ready\n")

    def test_no_is_1_with_the_reason(self, job: Job) -> None:
        shutil.rmtree(job.root / "exec")
        with listening(job) as watch:
            watch.comes("/readyz", 503, "standing by")
            result = watch.health("ready")
            assert result.code == 1
            assert "is not there yet" in result.out

    @pytest.mark.parametrize(("question", "code"), [("started", 1), ("live", 1), ("ready", 1), ("terminating", 0)])
    def test_where_nothing_answers_a_probe_fails_and_a_hook_does_not(self, question: str, code: int) -> None:
        environ = {**os.environ, "PUBLISH_LISTEN": f":{free_port((0,))}"}
        result = run("dispatch-agent", "health", question, environ=environ)
        assert (result.code, result.err) == (code, "")
        assert "no watch answers" in result.out

    @pytest.mark.parametrize(("question", "code"), [("started", 3), ("live", 0), ("ready", 3), ("terminating", 0)])
    def test_where_nothing_listens_by_setting_only_what_is_needed_fails(self, question: str, code: int) -> None:
        """The image's HEALTHCHECK runs for one-shot commands too, which are not ill."""
        environ = {name: value for name, value in os.environ.items() if name != "PUBLISH_LISTEN"}
        assert run("dispatch-agent", "health", question, environ=environ).code == code

    def test_it_hangs_with_no_server_that_hangs(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            environ = {**os.environ, "PUBLISH_LISTEN": f":{silent.getsockname()[1]}"}
            result = run("dispatch-agent", "health", environ=environ)
        assert result.code == 1
        assert "timed out" in result.out

    def test_nor_with_one_whose_answer_never_ends(self) -> None:
        def drip() -> None:
            connection, _ = server.accept()
            with contextlib.suppress(OSError), connection:
                while True:
                    connection.sendall(b"x")
                    time.sleep(0.1)

        with socket.create_server(("127.0.0.1", 0)) as server:
            threading.Thread(target=drip, daemon=True).start()
            environ = {**os.environ, "PUBLISH_LISTEN": f":{server.getsockname()[1]}"}
            result = run("dispatch-agent", "health", environ=environ)
        assert result.code == 1
        assert "timed out" in result.out

    @pytest.mark.parametrize("listen", ["a..b:9464", "a" * 70 + ":9464"])
    def test_a_host_that_is_no_name_is_one_where_nothing_answers(self, listen: str) -> None:
        result = run("dispatch-agent", "health", environ={**os.environ, "PUBLISH_LISTEN": listen})
        assert result.code == 1
        assert result.out.startswith("no watch answers")

    @pytest.mark.parametrize(("listen", "code"), [(":1", 0), ("\N{SNOWMAN}:1", 3)])
    def test_a_hook_that_can_say_nothing_ends_as_it_would(self, listen: str, code: int) -> None:
        environ = {**os.environ, "PUBLISH_LISTEN": listen, "PYTHONIOENCODING": "ascii"}
        with open("/dev/full", "wb") as full:
            words = [program("dispatch-agent"), "health", "terminating"]
            done = subprocess.run(words, env=environ, stdout=full, stderr=full, check=False)
        assert done.returncode == code

    def test_an_address_that_is_none_is_a_setting_to_change(self) -> None:
        result = run("dispatch-agent", "health", environ={**os.environ, "PUBLISH_LISTEN": "9464"})
        result.fails(3, "9464", "127.0.0.1:9464")

    def test_another_question_is_a_misuse(self) -> None:
        run("dispatch-agent", "health", "happy").fails(2, "happy")

    def test_a_probe_imports_nothing_heavy(self) -> None:
        code = (
            "import sys; sys.argv = ['dispatch-agent', 'health']\n"
            "heavy = {'click', 'fsspec', 'socket', 'http'}\n"
            "import os; os._exit = lambda code: print(sorted(set(sys.modules) & heavy))\n"
            "from dispatch_agent.__main__ import main\n"
            "try:\n    main()\nexcept BaseException: pass"
        )
        environ = {**os.environ, "PUBLISH_LISTEN": ":1"}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[1] == "[]", done.stdout + done.stderr


@SEAWEED
class TestGrace:
    """What is sent stands still, so that only the bound can end the drain; the test lets it go on before or after."""

    def drained(self, job: Job, bucket: Bucket, *, hook: bool, cap: str = "") -> Result:
        faulty = Faulty()
        with front(bucket.endpoint, faulty) as endpoint:
            job = on_s3(job, bucket.behind(endpoint))
            # With the hook: of four seconds the floor is left, which is over before the test lets the upload go on.
            grace = "4" if hook else "30"
            with listening(job, "--grace", grace, *(("--drain-timeout", cap) if cap else ())) as watch:
                watch.comes("/readyz", 200)
                faulty.moves.clear()
                job.save("step-1")
                assert faulty.hung.wait(30)
                if hook:
                    watch.health("terminating").passes()
                    watch.running.says("terminating")
                    time.sleep(2.5)
                    watch.health("terminating").passes()  # a second hook changes nothing
                watch.running.signal()
                time.sleep(2)
                faulty.moves.set()
                return watch.running.end()

    def test_without_a_hook_all_of_it_is_left(self, job: Job, shared_bucket: Bucket) -> None:
        self.drained(job, shared_bucket, hook=False).passes()

    def test_what_the_trainer_used_since_the_hook_is_gone(self, job: Job, shared_bucket: Bucket) -> None:
        self.drained(job, shared_bucket, hook=True).fails(40, "left unpublished", "step-1")

    def test_a_drain_timeout_that_was_given_stays_a_cap(self, job: Job, shared_bucket: Bucket) -> None:
        self.drained(job, shared_bucket, hook=False, cap="1").fails(40, "left unpublished", "step-1")


class TestLastWords:
    def words(self, job: Job) -> list[str]:
        return (job.root / "words").read_text().splitlines()

    def test_a_watch_that_did_its_work_says_so(self, job: Job) -> None:
        with job.watch("--termination-message", job.root / "words") as watch:
            job.save("step-1")
            watch.says("published save=step-1")
            job.write("step-2")
            watch.stop().passes()
        first, counts, newest = self.words(job)
        assert first == "exit 0: done"
        assert counts.startswith("published 1, already published 0, incomplete 1, left unpublished 0, ")
        assert newest == f"newest commit: {job.commits()[0].relative_to(job.store)}"

    def test_the_verdict_is_there_too(self, job: Job) -> None:
        job.write("step-1")
        said = job.run("watch", "--once", PUBLISH_TERMINATION_MESSAGE=str(job.root / "words")).fails(41)
        assert self.words(job)[0] == f"exit 41: {said}"

    def test_a_setting_that_is_wrong_too(self, job: Job) -> None:
        message = {"PUBLISH_TERMINATION_MESSAGE": str(job.root / "words")}
        said = job.run("watch", PUBLISH_DEST=UNSET, **message).fails(3, "no destination")
        assert self.words(job)[0] == f"exit 3: {said}"

    @pytest.mark.parametrize(("arguments", "code"), [(("restore",), 20), (("restore", "--what"), 2)])
    def test_and_what_ends_any_other_command(self, job: Job, arguments: tuple[str, ...], code: int) -> None:
        said = job.run(*arguments, PUBLISH_TERMINATION_MESSAGE=str(job.root / "words")).fails(code)
        assert self.words(job) == [f"exit {code}: {said}"]

    def test_no_secret_is_among_them(self, job: Job) -> None:
        dest = "https://user:hush@example.invalid/x"
        result = job.run("watch", "--once", PUBLISH_DEST=dest, PUBLISH_TERMINATION_MESSAGE=str(job.root / "words"))
        assert result.code != 0
        assert "hush" not in "\n".join(self.words(job))

    def test_a_fifo_that_nobody_reads_does_not_keep_it_from_ending(self, job: Job, place: Path) -> None:
        os.mkfifo(place / "fifo")
        job.run("watch", "--once", PUBLISH_TERMINATION_MESSAGE=str(place / "fifo")).passes()
        job.run("watch", "--listen", "9464", PUBLISH_TERMINATION_MESSAGE=str(place / "fifo")).fails(3)

    def test_where_they_cannot_be_left_the_verdict_is_the_same(self, job: Job) -> None:
        job.save("step-1")
        job.run("watch", "--once", PUBLISH_TERMINATION_MESSAGE="/proc/no/such").passes()


class TestDoneFile:
    @pytest.mark.parametrize("events", ["auto", "polling"])
    def test_it_drains_and_ends_once_the_file_is_there(self, job: Job, events: str) -> None:
        with job.watch("--done-file", "done", "--rescan", "600", "--events", events) as watch:
            watch.says("claimed")
            time.sleep(0.3)
            job.save("step-1")
            (job.folder / ".dispatch" / "done").touch()
            watch.end().passes()
            assert "trainer ended" in watch.said
        assert job.published() == ["step-1"]

    def test_one_that_came_while_the_sidecar_was_restarted_counts(self, job: Job) -> None:
        job.save("step-1")
        (job.folder / ".dispatch" / "done").write_text(f"{job.attempt}\n")
        with job.watch("--done-file", "done") as watch:
            watch.end().passes()
        assert job.published() == ["step-1"]

    def test_being_told_to_end_an_incomplete_save_is_no_error(self, job: Job) -> None:
        job.write("step-1")
        (job.folder / ".dispatch").mkdir()
        (job.folder / ".dispatch" / "done").touch()
        with job.watch("--done-file", "done") as watch:
            watch.end().passes()

    def test_another_executions_file_ends_nothing(self, job: Job, place: Path) -> None:
        done = place / "done"
        done.write_text("1.16.9\n")
        with job.watch("--done-file", done) as watch:
            watch.says("done file")
            job.save("step-1")
            watch.says("published save=step-1")
            assert "1.16.9" in watch.said
            done.write_text(job.attempt)
            watch.end().passes()

    def test_an_empty_one_in_the_root_may_be_anybodys(self, job: Job) -> None:
        done = job.root / "done"
        done.touch()
        with job.watch("--done-file", done) as watch:
            watch.says("another execution may have left it")
            job.save("step-1")
            watch.says("published save=step-1")
            done.write_text(job.attempt)
            watch.end().passes()

    @pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
    def test_what_is_no_file_is_said_and_ends_nothing(self, job: Job, make: Callable[[Path], None]) -> None:
        done = job.folder / ".dispatch" / "done"
        with job.watch("--done-file", "done") as watch:
            watch.says("claimed")
            make(done)
            watch.says("is no plain file")
            done.rmdir() if done.is_dir() else done.unlink()
            done.touch()
            watch.end().passes()

    def test_an_empty_one_on_a_volume_of_the_pod_counts(self, job: Job, place: Path) -> None:
        with job.watch("--done-file", place / "done") as watch:
            watch.says("claimed")
            (place / "done").touch()
            watch.end().passes()

    def test_a_fenced_watch_ends_with_its_verdict(self, job: Job) -> None:
        later = job.later()
        later.run("publish", later.save("step-2")).passes()
        job.save("step-1")
        with job.watch("--done-file", "done") as watch:
            watch.says("fenced")
            (job.folder / ".dispatch" / "done").touch()
            watch.end().fails(30)

    def test_a_rank_that_stands_by_ends_too(self, job: Job) -> None:
        with job.watch("--done-file", "done", "--rank", "1", "--shared-volume") as watch:
            watch.says("standing by")
            (job.folder / ".dispatch").mkdir(exist_ok=True)
            (job.folder / ".dispatch" / "done").touch()
            watch.end().passes()


@SEAWEED
class TestPressing:
    """No kill follows the end of the trainer, so nothing but standing still ends the drain."""

    def drained(self, job: Job, bucket: Bucket, faulty: Faulty, *bounds: str) -> Result:
        with front(bucket.endpoint, faulty) as endpoint:
            job = on_s3(job, bucket.behind(endpoint))
            with job.watch("--done-file", "done", "--workers", "1", *bounds) as watch:
                try:
                    watch.says("claimed")
                    job.save("step-1", {f"{number}.bin": b"x" * 100 for number in range(9)})
                    watch.says("uploading save=step-1")
                    (job.folder / ".dispatch" / "done").touch()
                    return watch.end()
                finally:
                    faulty.moves.set()

    def test_an_upload_that_moves_is_waited_for(self, job: Job, shared_bucket: Bucket) -> None:
        self.drained(job, shared_bucket, Faulty(delay=0.5), "--stall-timeout", "3").passes()

    def test_one_that_stands_still_is_not(self, job: Job, shared_bucket: Bucket) -> None:
        faulty = Faulty()
        faulty.moves.clear()
        self.drained(job, shared_bucket, faulty, "--stall-timeout", "3").fails(40, "left unpublished", "step-1")

    def test_a_drain_timeout_that_was_given_bounds_it(self, job: Job, shared_bucket: Bucket) -> None:
        faulty = Faulty()
        faulty.moves.clear()
        self.drained(job, shared_bucket, faulty, "--drain-timeout", "0.5").fails(40, "left unpublished", "step-1")


TRAINER = """
import os, subprocess, sys, time
import dispatch_agent
save = dispatch_agent.save_dir() / f"step-{sys.argv[1]}"
save.write_bytes(b"weights")
dispatch_agent.complete(save)
worker = subprocess.Popen(["sleep", "60"], close_fds=False)
print(worker.pid, flush=True)
sys.stdin.readline()
sys.exit(int(sys.argv[2]))
"""


@contextmanager
def trainer(job: Job, rank: int = 0, code: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A trainer that `dispatch-agent exec --hold` started, with a worker that has inherited all that it has open. It
    ends with `code` once its stdin does."""
    process = subprocess.Popen(
        [program("dispatch-agent"), "exec", "--hold", "--", sys.executable, "-c", TRAINER, str(rank), str(code)],
        env=job.variables({"SLURM_PROCID": str(rank)}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout
    assert process.stdin
    process.stdout.readline()
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the worker is still there
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def counted(job: Job) -> Job:
    """The execution as a container gets it: counters, and no finished pair."""
    counters = {"SLURM_JOB_ID": "17", "DISPATCH_SUBMISSION": "1", "SLURM_NTASKS": "1"}
    return replace(
        job,
        epoch=1_000_000,
        attempt="1.17.0",
        environ={**counters, "DISPATCH_EPOCH": UNSET, "DISPATCH_ATTEMPT": UNSET},
    )


def _finish(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin
    process.stdin.write(b"\n")
    process.stdin.flush()


ENDS: dict[str, Callable[[subprocess.Popen[bytes]], None]] = {
    "by itself": _finish,
    "SIGTERM": subprocess.Popen.terminate,
    "SIGKILL, its workers live on": subprocess.Popen.kill,
    "SIGKILL to its group": lambda process: os.killpg(process.pid, signal.SIGKILL),
}


class TestEndWithTrainer:
    @pytest.mark.parametrize("code", [0, 3])
    @pytest.mark.parametrize("end", ENDS)
    def test_it_publishes_what_is_complete_and_ends(self, counted: Job, end: str, code: int) -> None:
        with counted.watch("--end-with-trainer") as watch:
            watch.says("following the trainer")
            with trainer(counted, code=code) as process:
                watch.says("is held: its trainer runs")
                watch.says("published save=step-0")
                counted.save("step-1")
                ENDS[end](process)
                watch.end().passes()
        assert counted.published() == ["step-0", "step-1"]

    def test_a_trainer_that_ended_before_the_watch_began_has_ended(self, counted: Job) -> None:
        with trainer(counted) as process:
            process.kill()
        with counted.watch("--end-with-trainer") as watch:
            watch.end().passes()
        assert counted.published() == ["step-0"]

    def test_one_that_could_not_be_run_has_ended(self, counted: Job) -> None:
        done = run("dispatch-agent", "exec", "--hold", "--", "/no/such/command", environ=counted.variables())
        assert done.code == 127
        with counted.watch("--end-with-trainer") as watch:
            watch.end().passes()

    def test_all_ranks_must_have_ended(self, counted: Job) -> None:
        watching = counted.watch("--end-with-trainer", "--shared-volume", "--rank", "0")
        with watching as watch, trainer(counted) as first, trainer(counted, rank=1) as second:
            watch.says("published save=step-1")
            first.kill()
            first.wait()
            watch.says("started.1 is held")
            counted.save("step-2")
            watch.says("published save=step-2")
            second.kill()
            watch.end().passes()

    def test_a_rank_that_stands_by_ends_with_its_own(self, counted: Job) -> None:
        watching = counted.watch("--end-with-trainer", "--shared-volume", "--rank", "1")
        with watching as watch, trainer(counted, rank=1) as process:
            watch.says("started.1 is held")
            process.kill()
            watch.end().passes()

    def test_a_trainer_that_nobody_holds_is_said_and_ends_nothing(self, counted: Job) -> None:
        done = run("dispatch-agent", "exec", "--", "true", environ=counted.variables())
        assert done.code == 0
        with counted.watch("--end-with-trainer") as watch:
            watch.says("start the trainer with `dispatch-agent exec --hold`")
            counted.save("step-1")
            watch.says("published save=step-1")
            assert watch.process.poll() is None
            watch.stop().passes()

    def test_a_restarted_rank_is_waited_for_though_the_one_before_has_ended(self, counted: Job) -> None:
        again = replace(
            counted, environ={**counted.environ, "AGENT_ALLOW_RANK_RESTART": "1", "AGENT_K8S_POD_UID": "uid-1"}
        )
        again.run("init").passes()
        with trainer(again) as process:
            process.kill()
        again.run("init").passes()
        with again.watch("--end-with-trainer") as watch:
            watch.says("start the trainer with `dispatch-agent exec --hold`")
            with trainer(again) as process:
                watch.says("is held: its trainer runs")
                again.run("init").passes()
                watch.says("published save=step-0")
                assert watch.process.poll() is None, "an init beside a trainer takes no mark away"
                process.kill()
                watch.end().passes()

    def test_a_fifo_in_the_place_of_its_mark_is_not_waited_for(self, counted: Job) -> None:
        (counted.folder / ".dispatch").mkdir(parents=True)
        os.mkfifo(counted.folder / ".dispatch" / "started.0")
        with counted.watch("--end-with-trainer", "--done-file", "done") as watch:
            watch.says("start the trainer with `dispatch-agent exec --hold`")
            (counted.folder / ".dispatch" / "done").touch()
            watch.end().passes()

    def test_a_trainer_that_closes_what_it_has_open_is_said_to_have_ended(self, counted: Job) -> None:
        """Nobody outside can tell: but it is said, and what was seen."""
        script = "import os, time; os.closerange(3, 1000); time.sleep(60)"
        process = subprocess.Popen(
            [program("dispatch-agent"), "exec", "--hold", "--", sys.executable, "-c", script], env=counted.variables()
        )
        try:
            with counted.watch("--end-with-trainer") as watch:
                watch.end().passes()
                assert "it ended, or closed the descriptor" in watch.said
        finally:
            process.kill()
            process.wait()


def test_a_log_that_nobody_reads_keeps_it_neither_from_publishing_nor_from_ending(job: Job) -> None:
    job.save("step-1")
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    words = [program("publish"), "watch", "--done-file", "done", "--rescan", "0.3"]
    process = subprocess.Popen(words, env=job.variables(), stdout=writing, stderr=writing)
    try:
        eventually(lambda: len(job.commits()) == 1, lambda: "nothing is published")
        (job.folder / ".dispatch" / "done").touch()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reading)
        os.close(writing)
