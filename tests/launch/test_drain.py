"""The signal that drains a host: who may have it, when a rank may leave, and what becomes of it where nothing can be finished."""

# ruff: noqa: PT012 - the exception comes somewhere in a block

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from agent_kit import agent_pid, eventually
from rank_kit import World
from torch.distributed.elastic.multiprocessing.api import SignalException

import gemini_ft
from gemini_ft.agent import lifecycle
from gemini_ft.cli.main import main
from gemini_ft.config import load_config
from gemini_ft.errors import AgentTimeoutError
from gemini_ft.launch.endings import HostDrain
from gemini_ft.launch.grace import Workers
from gemini_ft.wire.worker_messages import Draining
from gemini_ft.worker.drain import Drain


@pytest.fixture(autouse=True)
def _signals_are_left_as_they_were() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


def drain(**options: object) -> Drain:
    return Drain(load_config(options))


def test_a_worker_takes_note_of_the_signal_and_goes_on() -> None:
    streams = [drain(), drain()]  # a script with two of them
    for stream in streams:
        stream.heed()
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL  # else the next line would end this process
    os.kill(os.getpid(), signal.SIGUSR1)
    assert [stream.begun for stream in streams] == [True, True]
    for stream in streams:
        stream.forget()


def test_an_agent_that_does_not_answer_has_not_finished_its_upload(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def status(run: str) -> str | None:
        asked.append(run)
        if len(asked) < 3:
            raise AgentTimeoutError("it did not answer")
        return None

    monkeypatch.setattr(lifecycle, "status", status)
    HostDrain("run", 60.0, None).await_uploads()
    assert len(asked) == 3
    asked.clear()
    HostDrain("run", 0.0, None).await_uploads()
    assert "left before the upload of a version that is not known, as the agent does not answer, was over" in caplog.text


def test_what_another_thread_has_forgotten_can_be_heeded_again() -> None:
    first, second = drain(), drain()
    first.heed()
    thread = threading.Thread(target=first.forget)  # which may not change what the process does at a signal
    thread.start()
    thread.join()
    second.heed()
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGUSR1)
    assert second.begun
    second.forget()


def test_a_stream_that_nobody_has_closed_is_not_asked_for_ever() -> None:
    lost, heeding = drain(drain_seconds=1e-9), drain()
    lost.heed()
    lost.begin()  # its time is over: a signal would end the process
    heeding.heed()
    del lost
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heeding.begun
    heeding.forget()


def test_a_signal_that_the_script_or_faulthandler_uses_is_theirs() -> None:
    def own(*_: object) -> None: ...

    one, other = drain(drain_signal="SIGUSR1"), drain(drain_signal="SIGUSR2")
    before = signal.signal(signal.SIGUSR1, own)
    faulthandler.register(signal.SIGUSR2)
    try:
        one.heed()
        other.heed()
        assert signal.getsignal(signal.SIGUSR1) is own
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL  # Python does not know of it
    finally:
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR1, before)


def test_a_rank_leaves_after_a_step_that_is_committed() -> None:
    wish = drain()
    assert not wish.may_leave(7, committed=7)  # nobody has asked
    wish.begin()
    assert not wish.may_leave(7, committed=6)
    assert wish.may_leave(7, committed=7)


def test_with_storage_it_leaves_after_one_that_is_stored_unless_half_of_the_time_has_passed() -> None:
    storage = {"url": "file:///there", "every_steps": 100}
    wish = drain(storage=storage)
    wish.begin()
    assert not wish.may_leave(7, committed=7)
    wish.committed(8, stored=True)
    assert wish.may_leave(8, committed=8)
    hurried = drain(storage=storage, drain_seconds=1e-9)
    hurried.begin()
    assert hurried.may_leave(7, committed=7)


def test_a_host_without_workers_in_a_run_ends_as_at_sigterm() -> None:
    workers = Workers()
    host = HostDrain(f"no-run-{os.getpid()}", 60.0, signal.SIGUSR1)
    with pytest.raises(SignalException) as caught, host.heeded(), workers.signalled():
        os.kill(os.getpid(), signal.SIGUSR1)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            time.sleep(0.01)
    assert caught.value.sigval == signal.SIGTERM
    assert workers.stopped_by == signal.SIGTERM
    assert not host.begun


def test_an_agent_that_hangs_has_a_successor_that_is_asked_in_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Exception | Draining] = [AgentTimeoutError("it hangs"), Draining(workers=1, relayed=False)]

    def ask(*_: object) -> Draining:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(lifecycle, "ask", ask)
    host = HostDrain("run", 60.0, signal.SIGUSR1)
    with host.heeded():
        assert host.heard()
        eventually(lambda: not answers, "the second question")
        assert host.begun


def test_a_drain_that_is_given_up_after_the_end_of_the_launch_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, may_answer, ended = threading.Event(), threading.Event(), threading.Event()

    def ask(*_: object) -> None:
        asked.set()
        may_answer.wait(60)
        raise OSError("the agent is gone")

    monkeypatch.setattr(lifecycle, "ask", ask)
    monkeypatch.setattr(os, "kill", lambda *_: ended.set())
    before = threading.enumerate()
    with (host := HostDrain("run", 60.0, signal.SIGUSR1)).heeded():
        assert host.heard()
        assert asked.wait(60)
        [thread] = [each for each in threading.enumerate() if each.name == "gemini-drain" and each not in before]  # another test's may end
    may_answer.set()
    thread.join(60)
    assert not thread.is_alive()
    assert not ended.is_set()


def until_drained() -> int:
    """A rank's loop; its last iteration."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gemini_ft.Checkpointer(model, optimizer) as checkpointer:
        done = checkpointer.resume()
        with pytest.raises(SystemExit, match="85"):
            while True:
                done += 1
                optimizer.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                checkpointer.step()
                time.sleep(0.005)
    return done


def test_an_agent_that_gets_the_signal_too_stays_until_its_workers_have_left(one: World) -> None:
    """A scheduler that drains by SIGTERM sends it to all processes of a host."""

    def committed() -> int:
        document = json.loads(lifecycle.status(one.run, "host0") or '{"streams": {}}')
        return max((stream["committed"] or 0 for stream in document["streams"].values()), default=0)

    attempt = one.start(until_drained, GEMINI_DRAIN_SIGNAL="SIGTERM")
    eventually(lambda: committed() >= 3, "the third commit")
    os.kill(agent_pid(one.run, "host0") or 0, signal.SIGTERM)
    (last,) = attempt.results()
    assert last >= 3
    eventually(lambda: one.log("host0").rstrip().endswith("leaving"), "the leaving of the agent, which is not killed")
    assert "this host is drained" in one.log("host0")


def test_a_host_that_is_not_there_cannot_be_drained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "--run-id", f"none-{os.getpid()}", "--host", "here"]) == 1
    assert "on host 'here'; `gemini ps` lists the runs of a host" in capsys.readouterr().err
    assert main(["drain", "somewhere"]) == 2  # which run?
