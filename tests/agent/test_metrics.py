"""`/metrics` of agents, read as Prometheus does, and of a real job that is killed once."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from agent_kit import Job, eventually, stopped
from rank_kit import World
from session_case import loop

import gemini_ft
from gemini_ft.agent import lifecycle, metrics_page
from gemini_ft.agent.figures import DISTRIBUTIONS, OF_HOST, OF_STREAM, Distribution, MeanInterval, Measures
from gemini_ft.agent.metrics_page import MetricsPage, check_metrics
from gemini_ft.config import load_config
from gemini_ft.core.goodput import PastTime, Phase, RunTime
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import ConfigError
from gemini_ft.wire.worker_messages import ENDING, LATE, WRITTEN, Request

parser = pytest.importorskip("prometheus_client.openmetrics.parser", reason="needs prometheus-client: pip install 'gemini-ft[metrics]'")
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
Samples = dict[tuple[str, ...], float]  # (name, stream, values of other labels) -> value


def address_of(run: str, host: str) -> str:
    """Where a host's agent serves its figures, once it does."""
    return str(eventually(lambda: json.loads(lifecycle.status(run, host) or '{"metrics": ""}')["metrics"], "an address of metrics"))


def fetch(address: str, accept: str = OPEN_METRICS, path: str = "/metrics", method: str = "GET") -> tuple[str, str]:
    """The content type, and the text."""
    request = urllib.request.Request(f"http://{address}{path}", headers={"Accept": accept}, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def scrape(address: str) -> Samples:
    """All samples; an error where the text is no OpenMetrics."""
    kind, text = fetch(address)
    assert kind.startswith("application/openmetrics-text")
    families = list(parser.text_string_to_metric_families(text))
    assert {family.name for family in families} >= {figure.name.removesuffix("_total") for figure in (*OF_HOST, *OF_STREAM)}
    return {(sample.name, *values_of(sample.labels)): sample.value for family in families for sample in family.samples}


def values_of(labels: dict[str, str]) -> list[str]:
    return [labels[name] for name in sorted(labels, key=lambda name: (name != "stream", name))]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two agents of one job on one machine, with metrics at ports of their own; three steps are committed, and one is given up."""
    with Job(tmp_path_factory.mktemp("served")) as job:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GEMINI_METRICS", "0")
            ranks = job.start("a", "b")
        job.commit(ranks, 1, 2)
        ranks[0].client.tell(Request(iteration=3, held=[(0.004, 0.002), (7.0, 0.0)]))
        ranks[1].give_up(3)
        ranks[0].wait_for("abort", iteration=3)
        job.commit(ranks, 4)
        ranks[1].progress(6)
        yield job


def test_one_scrape_answers_for_the_host_and_the_leaders_for_the_job(served: Job) -> None:
    leader, member = (scrape(address_of(served.run, host)) for host in "ab")
    for figures, host in ((leader, "a"), (member, "b")):
        assert figures["gemini_agent_info", host, served.run, gemini_ft.__version__] == 1
        assert figures["gemini_commits_total", "main"] == 3
        assert figures["gemini_committed_step", "main"] == 4
        assert figures["gemini_aborted_snapshots_total", "main"] == 1
        assert figures["gemini_slots", "main", "complete"] == 4
        assert 0 < figures["gemini_memory_used_bytes",] <= figures["gemini_memory_limit_bytes",]
        assert figures["gemini_commit_seconds_count", "main"] == 3
        assert abs(time.time() - figures["gemini_committed_timestamp_seconds", "main"]) < 600
        assert figures["gemini_workers", served.run] == 1
        assert figures["gemini_leader_reached", "main"] == 1
        assert sum(figures["gemini_restarts_total", "main", cause] for cause in ("died", "failed", "hang", "drain", "elsewhere")) == 0
    assert (leader["gemini_lag_steps", "main"], member["gemini_lag_steps", "main"]) == (0, 2)
    assert leader["gemini_replica_bytes_total", "main"] > 0
    assert member["gemini_replica_bytes_total", "main"] > 0
    assert [leader["gemini_job_hosts", "main"], leader["gemini_job_ranks", "main"], leader["gemini_job_absent_hosts", "main"]] == [2, 2, 0]
    assert ("gemini_job_hosts", "main") not in member
    assert (leader["gemini_blocked_seconds_count", "main"], leader["gemini_blocked_seconds_sum", "main"]) == (2, 7.004)
    assert leader["gemini_waited_seconds_bucket", "main", "0.0025"] == 2
    assert member["gemini_skipped_snapshots_total", "main", "other"] == 1


def test_figures_of_the_job_are_on_one_page_but_for_an_election_and_no_counter_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMINI_METRICS", "0")
    with Job(tmp_path) as job:
        ranks = job.start(*"abc", hello={"agent_timeout": 0.0})
        job.commit(ranks, 1, 2)
        addresses = {host: address_of(job.run, host) for host in "abc"}
        seen: dict[str, Samples] = {}

        def leaders(*hosts: str) -> list[str]:
            """The pages that have the job's figures now; of each the counters are those of the last look, or more."""
            now = {host: scrape(addresses[host]) for host in hosts}
            for host, figures in now.items():
                counters = {name: value for name, value in seen.get(host, {}).items() if name[0].endswith(("_total", "_count", "_sum"))}
                assert all(figures[name] >= value for name, value in counters.items())
            seen.update(now)
            found = [host for host, figures in now.items() if ("gemini_job_hosts", "main") in figures]
            assert len(found) <= 1
            return found

        assert leaders(*"abc") == ["a"]
        os.kill(job.pid("a"), signal.SIGKILL)
        eventually(lambda: leaders(*"bc") == ["b"], "the next leader")
        assert seen["b"]["gemini_job_absent_hosts", "main"] in (0, 1)
        assert seen["b"]["gemini_commits_total", "main"] == 2
        ranks[0].reconnect(job.version(2))
        seen.pop("a")  # its agent is another one, and counts from 0
        addresses["a"] = address_of(job.run, "a")
        eventually(lambda: leaders(*"abc") == ["b"] and job.stream("a")["reaches_leader"], "the return of a host")
        job.commit(ranks, 3)
        with stopped(job.pid("b")):
            eventually(lambda: leaders(*"ac") == ["c"], "the leader after it")
        eventually(lambda: not job.stream("b")["job"], "the end of the leader of the past")
        assert leaders(*"abc") == ["c"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_prometheus_own_tool_has_nothing_to_say_of_the_figures(served: Job) -> None:
    _, text = fetch(address_of(served.run, "a"), accept="text/plain;version=0.0.4")
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_host_that_the_others_go_on_without_hears_of_it_and_says_so(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        ranks = job.start("a", "b", "c")
        job.commit(ranks, 1)
        assert not job.stream("a")["left_out"]
        address = ranks[0].spec.addresses["b"][1]
        ranks[0].close()
        newcomers = job.join(("b", "c"), preferred_port=address)
        job.open(newcomers, resumed=None, sources={})
        eventually(lambda: job.stream("a")["left_out"], "the word that the others have gone on")
        assert not any(job.stream(host)["left_out"] for host in "bc")


def test_a_host_whose_ranks_have_finished_says_so_until_the_others_have(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        ranks = job.start("a", "b")
        job.commit(ranks, 1)
        ranks[1].goodbye()
        eventually(lambda: job.stream("b")["finishing"], "the end of a host's work")
        assert not job.stream("a")["finishing"]
        ranks[0].goodbye()
        eventually(lambda: job.stream("b")["finished"], "the end of the job")
        assert not job.stream("b")["finishing"]


def test_a_reader_that_knows_only_the_older_format_gets_that_and_others_are_told(served: Job) -> None:
    address = address_of(served.run, "a")
    kind, text = fetch(address, accept="text/plain;version=0.0.4")
    assert kind.startswith("text/plain; version=0.0.4")
    assert "# EOF" not in text
    assert 'gemini_commits_total{stream="main"} 3.0' in text
    assert fetch(address, method="HEAD")[1] == ""
    for path, method, status in (("/", "GET", 404), ("/metrics", "POST", 405)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetch(address, path=path, method=method)
        with refused.value:
            assert refused.value.code == status


def test_no_secret_is_in_it_and_it_is_on_loopback_alone(served: Job) -> None:
    address = address_of(served.run, "a")
    assert address.startswith("127.0.0.1:")
    text = fetch(address)[1]
    assert "ssss" not in text
    assert str(os.getuid()) not in {word for line in text.splitlines() if not line.startswith("#") for word in line.split('"')}
    assert os.getcwd() not in text


def test_readers_that_hang_hold_up_neither_commits_nor_other_readers(served: Job) -> None:
    address = address_of(served.run, "a")
    before = scrape(address)["gemini_commits_total", "main"]
    host, port = address.split(":")
    first = socket.create_connection((host, int(port)), timeout=30)
    readers = [socket.create_connection((host, int(port)), 30, ("127.0.0.2", 0)) for _ in range(40)]
    try:
        first.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert first.recv(15) == b"HTTP/1.1 200 OK", "those of another address make way for each other"
        first.close()
        for reader in readers[:10]:
            reader.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")  # and never reads
        readers[10].sendall(b"\0" * 4096)
        with pytest.raises(ConnectionError):
            send_without_end(readers[11])
        served.commit(served.ranks, 7, 8)
        eventually(lambda: scrape(address)["gemini_commits_total", "main"] == before + 2, "a scrape after the commits")
        silent = readers[12:]
        assert eventually(lambda: any(is_cut_off(reader) for reader in silent), "the end of a silent reader")
        readers += (crowd := [socket.create_connection((host, int(port)), 30) for _ in range(200)])
        for reader in crowd:
            reader.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert {reader.recv(15) for reader in crowd} == {b"HTTP/1.1 200 OK"}
    finally:
        for reader in readers:
            reader.close()


def send_without_end(reader: socket.socket) -> None:
    for _ in range(1000):
        reader.sendall(b"x" * 65536)


def is_cut_off(reader: socket.socket) -> bool:
    reader.settimeout(0.1)
    try:
        return not reader.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_port_that_is_taken_is_said_once_the_job_goes_on_and_the_page_comes_when_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("GEMINI_METRICS", f"localhost:{port}")
        with Job(tmp_path) as job:
            ranks = job.start("a")
            job.commit(ranks, 1, 2)
            eventually(lambda: f"cannot listen on localhost:{port}" in job.log("a"), "a word on the port")
            assert json.loads(lifecycle.status(job.run, "a") or "{}")["metrics"] == ""
            other.close()
            address = address_of(job.run, "a")
            assert address == f"localhost:{port}"
            assert scrape(address)["gemini_commits_total", "main"] == 2
            assert job.log("a").count("cannot listen") == 1


def test_a_job_that_is_killed_once(tmp_path: Path) -> None:
    with World(tmp_path, 2, GEMINI_METRICS="0") as world:
        attempt = world.start(partial(loop, pause=0.01), 10**6)

        def committed(at_least: int) -> list[Samples]:
            addresses = [address_of(world.run, host) for host in world.hosts]
            found = []
            for address in addresses:
                eventually(lambda at=address: scrape(at).get(("gemini_committed_step", "main"), 0) >= at_least, "commits")
                found.append(scrape(address))
            return found

        before = committed(5)
        os.kill(attempt.pid(1), signal.SIGKILL)
        attempt.wait()
        attempt.kill()
        world.start(partial(loop, pause=0.01), 10**6)
        reached = max(int(figures["gemini_committed_step", "main"]) for figures in before)
        after = committed(reached + 5)
    # On the other host the worker may have ended by itself: then nothing was detected there, and the cause is another one.
    assert after[1]["gemini_restarts_total", "main", "died"] == 1
    assert after[1]["gemini_time_seconds_total", "main", "detection"] > 0
    for first, second in zip(before, after, strict=True):
        assert sum(value for name, value in first.items() if name[0] == "gemini_restarts_total") == 0
        assert sum(value for name, value in second.items() if name[0] == "gemini_restarts_total") == 1
        assert first["gemini_agent_start_timestamp_seconds",] == second["gemini_agent_start_timestamp_seconds",]
        for phase in ("training", "checkpoint_stall", "rendezvous"):
            assert first["gemini_time_seconds_total", "main", phase] > 0
        for phase in ("detection", "restore"):
            assert first["gemini_time_seconds_total", "main", phase] == 0
        assert second["gemini_time_seconds_total", "main", "restore"] > 0
        for name, value in first.items():
            if name[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert value <= second[name], name
        for name, _ in DISTRIBUTIONS:
            assert second[f"gemini_{name}_count", "main"] > 5, name
            assert second[f"gemini_{name}_bucket", "main", "+Inf"] == second[f"gemini_{name}_count", "main"]
        assert second["gemini_waited_seconds_sum", "main"] <= second["gemini_blocked_seconds_sum", "main"]


# -- without an agent


async def served_at(run: SimpleNamespace) -> None:
    async with asyncio.timeout(30):
        while not run.metrics:
            await asyncio.sleep(0.01)


async def answer_of(address: str) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


def test_an_address_is_looked_up_beside_the_agents_loop_and_again_whatever_was_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that is down takes seconds; meanwhile a leader would lose its place."""
    monkeypatch.setenv("GEMINI_METRICS", "head:0")
    monkeypatch.setattr(metrics_page, "RETRY_SECONDS", 0.01)
    errors: list[Exception] = [UnicodeError("label too long"), ConfigError("name server is down")]

    def bound(host: str, port: int, kind: socket.SocketKind) -> socket.socket:
        time.sleep(0.5)
        if errors:
            raise errors.pop()
        return socket.create_server(("127.0.0.1", port))

    monkeypatch.setattr(metrics_page, "bound", bound)

    async def work() -> float:
        lines, longest = list[str](), 0.0
        run = SimpleNamespace(metrics="", log=lines.append)
        page = MetricsPage(cast("Any", run), dict)
        while not run.metrics:
            begun = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - begun)
        page.close()
        assert len(lines) == 2
        assert lines[0].endswith("name server is down")
        return longest

    assert asyncio.run(asyncio.wait_for(work(), 30)) < 0.4


def test_a_crowd_at_one_address_that_fetches_a_large_page_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_METRICS", "0")
    large = importlib.import_module("prometheus_client.core").Metric("gemini_large", "x" * 2**20, "gauge")
    monkeypatch.setattr(metrics_page, "families", lambda _: [large])
    monkeypatch.setattr(metrics_page, "FETCH_SECONDS", 2.0, raising=False)  # this machine may be busy
    bound = metrics_page.bound

    def of_a_network(*arguments: Any) -> socket.socket:
        """On loopback a socket takes megabytes at once."""
        listener = bound(*arguments)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        return listener

    monkeypatch.setattr(metrics_page, "bound", of_a_network)

    async def work() -> set[int]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        run = SimpleNamespace(metrics="", log=list[str]().append)
        page = MetricsPage(cast("Any", run), dict)
        await served_at(run)
        answers = await asyncio.gather(*(answer_of(run.metrics) for _ in range(100)), return_exceptions=True)
        page.close()
        return {len(answer) if isinstance(answer, bytes) else 0 for answer in answers}

    errors = list[dict[str, Any]]()
    (size,) = asyncio.run(asyncio.wait_for(work(), 30))
    assert size > 2**20
    assert errors == []


def test_a_figure_that_cannot_be_read_is_an_error_of_the_server_and_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_METRICS", "0")
    texts = ["one", "one", "other"]

    def account() -> dict[str, Any]:
        raise ValueError(texts.pop(0))

    async def work() -> None:
        lines: list[str] = []
        run = SimpleNamespace(metrics="", log=lines.append)
        page = MetricsPage(cast("Any", run), account)
        await served_at(run)
        for _ in range(3):
            assert (await answer_of(run.metrics)).startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
        page.close()
        assert lines[1:] == [f"the figures cannot be read: ValueError: {text}" for text in ("one", "other")]

    asyncio.run(work())


def test_the_library_is_imported_before_anybody_reads() -> None:
    code = """
import asyncio, sys, threading
from types import SimpleNamespace
from gemini_ft.agent.metrics_page import MetricsPage
class Finder:
    def find_spec(self, name, path, target=None):
        assert not name.startswith("prometheus_client.") or threading.current_thread() is not threading.main_thread(), name
sys.meta_path.insert(0, Finder())
async def work():
    run = SimpleNamespace(metrics="", log=print)
    page = MetricsPage(run, dict)
    while not run.metrics:
        await asyncio.sleep(0.01)
    for part in ("exposition", "core", "openmetrics.exposition"):
        assert f"prometheus_client.{part}" in sys.modules
    page.close()
asyncio.run(asyncio.wait_for(work(), 30))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "GEMINI_METRICS": "0"})


def test_the_library_that_is_missing_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    check_metrics(load_config({"metrics": 9464}))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_metrics(load_config({}))
    with pytest.raises(ConfigError, match=r"metrics='127.0.0.1:9464' needs prometheus-client.*pip install 'gemini-ft\[metrics\]'"):
        check_metrics(load_config({"metrics": 9464}))


def test_an_agent_imports_the_library_only_for_metrics_and_torch_never() -> None:
    code = """
import sys
import gemini_ft.agent.main
from gemini_ft.agent.figures import families
assert "prometheus_client" not in sys.modules
account = {"run": "r", "host": "h", "began": 1.0, "workers": {}, "launches": [], "hangs": 0, "streams": {}}
assert len(list(families({**account, "memory": {"used": 1, "limit": 2}}))) > 10
assert "prometheus_client" in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("given", "address"),
    [
        (9464, "127.0.0.1:9464"),
        ("0", "127.0.0.1:0"),
        ("0.0.0.0:80", "0.0.0.0:80"),
        (" head:09 ", "head:9"),
        ("[::1]:9464", "[::1]:9464"),
        (None, None),
    ],
)
def test_an_address_or_a_port_of_loopback(given: object, address: str | None) -> None:
    assert load_config({"metrics": given}).metrics == address


@pytest.mark.parametrize("given", ["", ":9464", "head", "head:", "head:65536", "-1", "::1:9464", True, "head:\u0663"])
def test_what_is_no_address_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"metrics=.*must be host:port, \[address\]:port for IPv6, or a port of 127.0.0.1"):
        load_config({"metrics": given})


def test_a_distribution_counts_what_is_at_most_as_large_as_its_bounds() -> None:
    counted = Distribution((0.5, 1.0))
    for value in (0.0, 0.5, 0.6, 1.0, math.inf):
        counted.add(value)
    assert counted.account()["buckets"] == [("0.5", 2), ("1.0", 4), ("+Inf", 5)]


def test_reasons_and_causes_are_few() -> None:
    measures = Measures("a")
    for reason in (LATE, ENDING, f"a, b {WRITTEN}", "the agent granted slot 3"):
        measures.skipped(reason)
    assert measures.skips == {"late": 1, "ending": 1, "written": 1, "other": 1}
    measures.opened(1, None, is_restart=False, past=PastTime())
    measures.lost("hang")
    measures.lost("died")  # as the launcher ends the others
    measures.opened(2, None, is_restart=True, past=PastTime())
    measures.opened(3, None, is_restart=True, past=PastTime())
    assert measures.restarts == {"hang": 1, "elsewhere": 1, "died": 0, "failed": 0, "drain": 0}
    assert measures.failed_at.keys() == {"hang"}
    kept = measures.kept()
    assert kept is not None
    assert [(failure.cause, failure.host) for failure in kept.failures] == [("hang", "a"), ("", "")]


@pytest.mark.parametrize("is_first", [False, True])
def test_an_agent_that_is_replaced_in_an_attempt_counts_from_its_own_beginning(is_first: bool) -> None:
    """The worker tells it how much time the one before had booked for the restore and the replay."""
    booked = None if is_first else RunTime(seconds={Phase.TRAINING: 1e5}, incarnation=1, furthest=5)
    measures = Measures("a")
    past = PastTime(time=booked, waited=50.0, under_way=1000.0, restored=990.0, replayed=None if is_first else (940.0, 5))
    measures.opened(2, Version(Incarnation(1, "n"), 3), is_restart=False, past=past)
    measures.reserved()
    measures.reached(7, [])
    kept, account = measures.kept(), measures.account()
    assert kept is not None
    assert kept.seconds[Phase.STORAGE] == pytest.approx(50)
    assert kept.seconds[Phase.RESTORE] == pytest.approx(10)
    assert kept.seconds[Phase.REPLAY] == pytest.approx(0 if is_first else 50)
    assert kept.seconds[Phase.TRAINING] == pytest.approx(990 if is_first else 1e5 + 940, abs=5)
    lost = [(failure.cause, failure.step, failure.resumed, failure.seconds.get(Phase.REPLAY)) for failure in kept.failures]
    assert lost == ([] if is_first else [("", 5, 3, pytest.approx(50))])
    assert 0 <= sum(account["seconds"].values()) < 50


def test_an_agent_that_is_replaced_in_a_restore_books_it() -> None:
    measures = Measures("a")
    measures.opened(2, Version(Incarnation(1, "n"), 3), is_restart=False, past=PastTime(under_way=1000.0))
    measures.reserved()
    kept = measures.kept()
    assert kept is not None
    assert kept.seconds[Phase.RESTORE] == pytest.approx(1000, abs=5)


def test_a_pace_is_the_mean_of_the_last_intervals_and_outlives_a_pause() -> None:
    pace = MeanInterval()
    pace.add(10.0, 3)
    assert pace.seconds is None
    pace.add(14.0, 5)
    assert pace.seconds == 2
    pace.pause()
    pace.add(1000.0, 5)  # after a restart the same step once more
    assert pace.seconds == 2
    pace.add(1001.0, 6)
    assert pace.seconds == 1
    for number in range(100):
        pace.add(1001.5 + number / 2, 7 + number)
    assert pace.seconds == 0.5


def test_iterations_that_are_never_decided_do_not_stay() -> None:
    measures = Measures()
    for iteration in range(1000):
        measures.reached(iteration, ())
    measures.committed(0)
    assert measures.commit_seconds.account()["buckets"][-1] == ("+Inf", 0)
    measures.committed(999)
    assert measures.commit_seconds.account()["buckets"][-1] == ("+Inf", 1)


def test_the_page_on_metrics_lists_all_of_them() -> None:
    """``python tests/agent/test_metrics.py`` prints the table."""
    assert listed() in (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def listed() -> str:
    lines = ["| figure | labels | |", "|---|---|---|"]
    for figure in OF_HOST:
        lines.append(f"| `{figure.name}` | {f'`{figure.label}` ' if figure.label else ''}| {figure.meaning} |")
    for figure in OF_STREAM:
        lines.append(f"| `{figure.name}` | `stream`{f', `{figure.label}`' if figure.label else ''} | {figure.meaning} |")
    for name, meaning in DISTRIBUTIONS:
        lines.append(f"| `gemini_{name}`, a histogram | `stream` | {meaning} |")
    return "\n".join([*lines, "| `gemini_agent_info` | `version`, `run`, `host` | The agent that is asked; 1. |"])


if __name__ == "__main__":
    print(listed())
