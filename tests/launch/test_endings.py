"""Which failures of workers are final."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import gemini_ft
from gemini_ft.errors import (
    FINAL,
    AveragingError,
    ConcurrentWriteError,
    GeminiError,
    LayoutMismatchError,
    ReplicaDivergedError,
    RunAliveError,
    StorageUnclearError,
    UnsupportedStateError,
    WorldSizeError,
)
from gemini_ft.launch import endings as module
from gemini_ft.launch.endings import LEFT, Endings, HostDrain, final_endings
from gemini_ft.launch.failures import refusal_behind
from gemini_ft.launch.health import HealthOptions, HostHealth
from gemini_ft.launch.launcher import in_short
from gemini_ft.launch.notes import DRAINED, PROTECTED, WAITS, Notes, notes_of_workers, say, say_ended
from gemini_ft.wire.worker_messages import Status

GROUP: Any = SimpleNamespace(workers=[], group_world_size=1)


def well(notes: Notes) -> HostHealth:
    return HostHealth("no such run", HealthOptions(), notes)


def failure(folder: Path, *kinds: str, text: str = "wrong", place: str = "train.py:3", step: int | None = 7, status: int = 1) -> Any:
    """As torch's launcher reads it from what a worker has left."""
    file = folder / "error.json"
    about = {"kinds": [*kinds, "Exception"], "place": place, "step": step, "timestamp": "1", "py_callstack": ""}
    file.write_text(json.dumps({"message": {"message": text, "extraInfo": about}}))
    return ProcessFailure(0, 1, status, str(file) if kinds else "")


@pytest.fixture
def endings() -> Any:
    with notes_of_workers() as notes:
        say(PROTECTED)
        yield Endings(notes, "no such run")


def test_an_agent_that_does_not_answer_is_no_word_that_nothing_was_recorded(
    endings: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endings.judge([failure(tmp_path, "ValueError")])
    assert endings.judge([failure(tmp_path, "ValueError")])
    assert "What memory keeps is not known, as no agent answers on this host" in caplog.text


def test_why_workers_were_killed_by_their_agent_is_said_once(
    endings: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = {"cause": "stopped", "ranks": [1], "text": "rank 1 is stopped", "report": "/logs/hang.txt"}
    streams: dict[str, Any] = {"main": {"hang": hang, "committed": 3}, "of an agent of another release": {"committed": 3}}
    monkeypatch.setattr(module, "account_of", lambda run, seconds=5.0: {"streams": streams, "linger": 60.0})
    endings.judge([failure(tmp_path, "ValueError")])
    assert "the job hung" not in caplog.text
    for _ in range(2):
        assert not endings.judge([failure(tmp_path, status=-signal.SIGKILL)])
    assert caplog.text.count("the job hung: rank 1 is stopped; /logs/hang.txt has the report") == 1


def test_a_restart_waits_no_longer_than_half_a_second_for_why_the_job_hung(
    endings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(module.lifecycle, "ask", lambda run, host, message, seconds: asked.append(seconds))
    assert not endings.judge([failure(tmp_path, status=-signal.SIGKILL)])
    assert asked == [0.5]


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (["ValueError"], "loss 0.25 is not finite"),
        (["ConfigError", "GeminiError"], "replicas=0: must be at least 1"),
        (["LayoutMismatchError", "StateError"], "another model"),
        (["OutOfMemoryError", "RuntimeError"], "Tried to allocate 20 MiB at 0x7f00"),
        (["FileNotFoundError", "OSError"], "no such file: data.bin"),
        (["SystemExit", "BaseException"], "SystemExit: 2"),
    ],
)
def test_the_same_error_at_the_same_place_of_the_same_step_is_final_the_second_time(
    kinds: list[str], text: str, endings: Any, tmp_path: Path
) -> None:
    assert not endings.judge([failure(tmp_path, *kinds, text=text)])
    assert endings.judge([failure(tmp_path, *kinds, text=text.replace("2", "3").replace("7f", "8a"))])
    assert endings.status == FINAL


@pytest.mark.parametrize(
    "other", [{"text": "something else"}, {"place": "train.py:4"}, {"step": 8}, {"step": None}], ids=["text", "place", "step", "no step"]
)
def test_another_error_is_not(other: dict[str, Any], endings: Any, tmp_path: Path) -> None:
    assert not endings.judge([failure(tmp_path, "ValueError")])
    assert not endings.judge([failure(tmp_path, "ValueError", **other)])
    assert not endings.judge([failure(tmp_path, "ValueError")])  # not the one before


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (["PeerError", "GeminiError"], "rank 1 did not answer"),
        (["DistBackendError", "DistError", "RuntimeError"], "no"),
        (["RuntimeError"], "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31415"),
        (["AcceleratorError", "RuntimeError"], "an illegal memory access"),
        (["RuntimeError"], "DataLoader worker (pid 9992) is killed by signal: Terminated. "),
        (["ConnectionResetError", "ConnectionError", "OSError"], "reset"),
        (["SystemExit", "BaseException", "RuntimeError"], "SystemExit: sorry, after RuntimeError: Connection closed by peer"),
        ([], ""),
    ],
)
def test_what_hosts_and_networks_do_never_is(kinds: list[str], text: str, endings: Any, tmp_path: Path) -> None:
    for _ in range(5):
        assert not endings.judge([failure(tmp_path, *kinds, text=text)])


def test_a_script_that_swallows_the_end_of_a_drained_rank_has_not_finished_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a success it would close the rendezvous of all hosts."""
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda agent, group: RunResult(WorkerState.SUCCEEDED))
    agent: Any = SimpleNamespace(_pcontext=SimpleNamespace(subprocess_handlers={}))
    with (
        notes_of_workers() as notes,
        final_endings(notes, "no such run", HostDrain("no such run", 0.0, None), well(notes), interval=0.0) as endings,
    ):
        assert LocalElasticAgent._monitor_workers(agent, GROUP).state == WorkerState.SUCCEEDED
        say(DRAINED)
        with pytest.raises(SignalException, match="this host is drained"):
            LocalElasticAgent._monitor_workers(agent, GROUP)
        assert (endings.status, endings.has_drained) == (LEFT, True)


def test_workers_that_fail_while_their_host_is_drained_are_not_said_to_have_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda agent, group: RunResult(WorkerState.FAILED))
    agent: Any = SimpleNamespace(_pcontext=SimpleNamespace(subprocess_handlers={}))
    drain: Any = SimpleNamespace(begun=True, await_uploads=lambda: None)
    with notes_of_workers() as notes, final_endings(notes, "no such run", drain, well(notes), interval=0.0) as endings:
        with pytest.raises(SignalException, match="this host is drained"):
            LocalElasticAgent._monitor_workers(agent, GROUP)
        assert (endings.status, endings.has_drained) == (LEFT, False)


@pytest.mark.parametrize("other", ["ends well, too", "fails", "says nothing", "had the store"])
def test_a_host_whose_workers_have_ended_takes_part_in_a_restart_until_all_have(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch's barrier at the end it had waited for 300 s, the host that had failed for this one, and then both had given up."""
    store, looks, begin = HashStore(), [], time.monotonic()
    group: Any = SimpleNamespace(workers=[], group_world_size=2, group_rank=0)
    agent: Any = SimpleNamespace(_pcontext=SimpleNamespace(subprocess_handlers={}), _store=store, _exit_barrier_timeout=0.3)

    def look(agent: Any, group: Any) -> RunResult:
        looks.append(agent._pcontext)
        return RunResult(WorkerState.SUCCEEDED)

    def state() -> WorkerState:
        return LocalElasticAgent._monitor_workers(agent, group).state

    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", look)
    drain = HostDrain("no such run", 0.0, None)
    with notes_of_workers() as notes, final_endings(notes, "no such run", drain, well(notes), interval=0.01):
        if other == "had the store":
            agent._store = Mock(add=Mock(side_effect=DistNetworkError))
            assert state() is WorkerState.SUCCEEDED
            return
        assert [state(), state()] == [WorkerState.HEALTHY] * 2
        assert len(looks) == 1
        if other == "fails":  # and torch's launcher has begun another attempt here
            agent._pcontext, agent._store = SimpleNamespace(subprocess_handlers={}), HashStore()
            assert state() is WorkerState.HEALTHY
            assert len(looks) == 2
        elif other == "ends well, too":
            store.add("gemini/well", 1)
            assert state() is WorkerState.SUCCEEDED
            assert agent._exit_barrier_timeout == 0.3
        else:
            while state() is WorkerState.HEALTHY:
                assert time.monotonic() - begin < 30.0
            assert time.monotonic() - begin > 0.3
            assert agent._exit_barrier_timeout == 0.001


def test_ranks_that_have_ended_well_before_others_failed_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that ends with status 0 at the signal by which torch's launcher ends it, as a script may, is none of them."""
    states = iter([WorkerState.HEALTHY, WorkerState.HEALTHY, WorkerState.FAILED])

    def look(agent: Any, group: Any) -> RunResult:
        state = next(states)
        if state is WorkerState.FAILED:
            end("6")
        return RunResult(state)

    def end(rank: str) -> None:
        monkeypatch.setenv("RANK", rank)
        say_ended()

    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", look)
    drain = HostDrain("no such run", 0.0, None)
    with notes_of_workers() as notes, final_endings(notes, "no such run", drain, well(notes), interval=0.0):
        for rank in ("4", "5"):
            agent: Any = SimpleNamespace(_pcontext=SimpleNamespace(subprocess_handlers={}))
            LocalElasticAgent._monitor_workers(agent, GROUP)
            end(rank)
        LocalElasticAgent._monitor_workers(agent, GROUP)
    assert "rank 5 ended with status 0 before others failed" in caplog.text


def test_of_a_failure_that_comes_again_one_traceback_is_shown(endings: Any, tmp_path: Path) -> None:
    for _ in range(2):
        failures = {}
        for rank in range(3):
            (tmp_path / str(rank)).mkdir(exist_ok=True)
            text = "Connection closed by peer" if rank == 0 else f"loss of rank {rank} is not finite"
            failures[rank] = ProcessFailure(rank, 100 + rank, 1, failure(tmp_path / str(rank), "ValueError", text=text).error_file)
        endings.judge(failures.values())
    whole = ChildFailedError("train.py", failures)
    assert [*in_short(whole, endings.shown).failures] in ([1], [2])
    assert in_short(whole, None) is whole


@pytest.mark.parametrize("status", [74, 75])
def test_a_worker_may_say_so_itself(status: int, endings: Any, tmp_path: Path) -> None:
    assert endings.judge([failure(tmp_path), failure(tmp_path, status=status)])
    assert endings.status == status


class Attempts:
    """A job's attempts as torch's launcher on one host sees them, on a clock of the test's own; absent hosts may take a minute."""

    now = 1000.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, restarts: int) -> None:
        self.agent = cast("Any", SimpleNamespace(_pcontext=None, _remaining_restarts=restarts))
        self.failed = RunResult(WorkerState.FAILED, failures={0: failure(folder, "PeerError", text="these hosts may: host1")})
        self.result = self.failed
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda agent, group: self.result)

    @contextmanager
    def judged(self) -> Iterator[Endings]:
        drain = HostDrain("no such run", 0.0, None)
        with notes_of_workers() as notes, final_endings(notes, "r", drain, well(notes), interval=0.0, join_seconds=60.0) as endings:
            yield endings

    def goes_on(self, *words: str, after: float) -> None:
        """The workers of a further attempt are started, and say something; none of this host has failed yet."""
        self.agent._pcontext, self.result = SimpleNamespace(subprocess_handlers={}), RunResult(WorkerState.HEALTHY)
        LocalElasticAgent._monitor_workers(self.agent, GROUP)
        self.now += after
        for word in (PROTECTED, *words):
            say(word)

    def fails(self, *words: str, after: float) -> int | None:
        """The restarts that are left once torch's launcher has started the next attempt; None: the job ends."""
        self.goes_on(*words, after=after)
        self.result = self.failed
        LocalElasticAgent._monitor_workers(self.agent, GROUP)
        if self.agent._remaining_restarts == 0:
            return None
        self.agent._remaining_restarts -= 1
        return int(self.agent._remaining_restarts)


def test_hosts_that_alone_have_what_was_committed_are_waited_for_as_long_as_a_host_may_take_to_join(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each look for them had used up a restart: a job ended after a minute, or, with a thousand restarts, after two hours."""
    job = Attempts(monkeypatch, tmp_path, restarts=2)
    with job.judged() as endings:
        assert [job.fails(WAITS, after=7.0) for _ in range(9)] == [2] * 9, "56 s"
        assert job.fails(after=7.0) == 1, "another failure is one"
        assert [job.fails(WAITS, after=7.0) for _ in range(9)] == [1] * 9, "and the next wait has its own time"
        assert caplog.text.count("the job waits for them, for 60 s at most (join_timeout)") == 2
        assert (job.fails(WAITS, after=7.0), endings.status) == (None, 1)
        assert endings.shown is job.failed.failures[0]
        assert "have not come back within 60 s (join_timeout): the job ends" in caplog.text


def test_such_a_wait_needs_no_restarts_to_be_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The job said that it waits, and ended."""
    job = Attempts(monkeypatch, tmp_path, restarts=0)
    with job.judged() as endings:
        assert [job.fails(WAITS, after=7.0) for _ in range(9)] == [0] * 9
        assert (job.fails(after=7.0), endings.status) == (None, 0)


def test_a_wait_that_the_workers_of_another_host_have_ended_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch's launcher starts the next attempt without a failure here; one of hours later had ended the job as if it had waited since."""
    job = Attempts(monkeypatch, tmp_path, restarts=2)
    with job.judged() as endings:
        assert job.fails(WAITS, after=7.0) == 2
        job.goes_on(WAITS, after=7.0)  # and others are first to fail
        assert (job.fails(after=3 * 3600.0), endings.status) == (1, 0), "an attempt that has trained"
        assert job.fails(WAITS, after=7.0) == 1
        job.goes_on(after=3 * 3600.0)
        assert (job.fails(WAITS, after=7.0), endings.status) == (1, 0), "the next wait has its own time"
        job.goes_on(WAITS, after=50.0)
        assert (job.fails(WAITS, after=50.0), endings.status) == (None, 1), "one that goes on meanwhile is the same"
        assert caplog.text.count("the job waits for them, for 60 s at most (join_timeout)") == 3


class TestUnprotected:
    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "UNPROTECTED_SECONDS", -1.0)

    def said(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [text for record in caplog.records if "nothing in this job is protected" in (text := record.getMessage())]

    def test_a_job_that_no_worker_protects_is_told_so_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with notes_of_workers() as notes:
            endings = Endings(notes, "no such run")
            for _ in range(3):
                endings.look()
            endings.judge([failure(tmp_path, "ValueError")])
        (text,) = self.said(caplog)
        assert "is protected after -1 s: " in text
        for way in ("a gemini_ft.Checkpointer", 'strategy="gemini"', "a gemini_ft.huggingface.GeminiCallback", 'a "gemini" section'):
            assert way in text

    def test_a_worker_that_may_not_join_has_its_own_error(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GEMINI_SECRET_FILE", str(tmp_path / "missing"))
        monkeypatch.setenv("GEMINI_RUN_ID", f"endings-{os.getpid()}")
        model = torch.nn.Linear(1, 1)
        with notes_of_workers() as notes:
            with pytest.raises(GeminiError, match="missing"):
                gemini_ft.Checkpointer(model, torch.optim.SGD(model.parameters(), 0.1)).resume()
            Endings(notes, "no such run").judge([failure(tmp_path, "ConfigError")])
        assert self.said(caplog) == []

    def test_a_job_that_one_worker_protects_is_not(self, endings: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        endings.look()
        endings.judge([failure(tmp_path, "ValueError")])
        assert self.said(caplog) == []


def test_what_another_rank_or_a_moment_is_to_blame_for_is_no_refusal() -> None:
    """A job with a gradient pipeline hears of a killed rank by an error of that pipeline: a restart mends that."""
    for refusal in (UnsupportedStateError("a deque"), LayoutMismatchError("another model")):
        assert refusal_behind(refusal) is refusal
    passing = AveragingError("rank 0 was killed"), WorldSizeError("2"), ReplicaDivergedError("w"), ConcurrentWriteError("w")
    assert not any(map(refusal_behind, (None, *passing)))


def test_a_refusal_is_one_whatever_a_script_makes_of_it() -> None:
    """Launchers of experiments wrap errors in their own, and an end that fails once more hides the first reason."""
    refusal = UnsupportedStateError("a deque")

    def experiment(*, is_told: bool) -> None:
        try:
            try:
                raise refusal
            except UnsupportedStateError as error:
                raise ValueError("the experiment has failed") from (error if is_told else None)
        finally:
            raise RuntimeError("the logger cannot be closed")

    for is_told in (True, False):
        with pytest.raises(RuntimeError) as caught:
            experiment(is_told=is_told)
        assert refusal_behind(caught.value) is refusal
    caught.value.__context__ = None
    caught.value.__cause__ = caught.value  # a circle
    assert refusal_behind(caught.value) is None


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("error", "is_judged_by_itself"),
    [
        (ConnectionError("reset by peer"), True),
        (OSError("no space left on device"), True),
        (torch.distributed.DistNetworkError("the server has gone"), True),
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"), True),
        (StorageUnclearError("the store does not answer"), True),
        (RunAliveError("process 7 is at work"), True),
        (AveragingError("rank 0 was killed"), True),
        (ValueError("the experiment has failed"), False),
        (FileNotFoundError("results.txt"), False),
        (RuntimeError("the experiment has failed: a socket that is open"), False),
        (_Unspeakable(), False),
        (SystemExit(1), False),
    ],
)
def test_what_comes_from_outside_hides_no_refusal_that_was_handled(error: BaseException, is_judged_by_itself: bool) -> None:
    refusal = UnsupportedStateError("a socket that is open")

    def handle(cause: BaseException | None) -> None:
        try:
            raise refusal
        except UnsupportedStateError:
            error.__cause__ = cause
            raise error  # noqa: B904

    with pytest.raises(type(error)):
        handle(None)
    assert refusal_behind(error) is (None if is_judged_by_itself else refusal)
    with pytest.raises(type(error)):
        handle(refusal)
    assert refusal_behind(error) is refusal


def test_a_refusal_among_the_errors_of_a_group_is_one() -> None:
    refusal = UnsupportedStateError("a deque")
    assert refusal_behind(ExceptionGroup("two tasks", [ValueError("x"), ExceptionGroup("inner", [refusal])])) is refusal
    assert refusal_behind(ExceptionGroup("two tasks", [ValueError("x"), ConnectionError("y")])) is None


@pytest.mark.parametrize("streams", [{}, {"main": {"unheard": ["given", "node-1-0a1b2c3d"]}, "of an agent of another release": {}}])
def test_hosts_that_the_agent_has_lost_are_told_by_their_lasting_names(streams: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rendezvous knows hosts by these names: the default one has no boot id in it."""
    answer = Status(document=json.dumps({"streams": streams}))
    monkeypatch.setattr(module.lifecycle, "ask", lambda run, host, message, seconds: answer)
    assert module.unheard("r") == ({"given", "node-1-0a1b2c3d", "node-1"} if streams else set())
    monkeypatch.setattr(module.lifecycle, "ask", lambda run, host, message, seconds: None)
    assert module.unheard("r") == set()
