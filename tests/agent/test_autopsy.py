"""The autopsy of a hang between agents: one that does not answer is named, none speaks for another, and a worker dies whatever comes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from agent_kit import Job, eventually

from gemini_ft.agent import autopsy, lifecycle
from gemini_ft.agent.autopsy import Inquest
from gemini_ft.agent.hangs import HangWatch
from gemini_ft.core.autopsy import Doing, RankFound
from gemini_ft.core.versions import Incarnation
from gemini_ft.wire.messages import pack
from gemini_ft.wire.peer_messages import Autopsied, Examine, Examined, PeerMessage, peers
from gemini_ft.wire.worker_messages import SessionSpec


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def of_host(job: Job, host: str) -> dict[str, object]:
    hang: dict[str, object] | None = job.stream(host)["hang"]
    assert hang is not None
    return hang


def test_a_leader_that_is_silent_costs_its_ranks_in_the_report_and_no_worker_its_end(job: Job) -> None:
    """The leader's agent is stopped. The other host's worker has no handler of the signal for stacks, which would end it."""
    ranks = [job.process("a", 0), job.process("b", 1)]
    job.open(ranks, hang_timeout=2.0)
    job.commit(ranks, 1, 2, 3, 4)
    os.kill(leader := job.pid("a"), signal.SIGSTOP)
    try:
        eventually(lambda: "rank 1 (pid" in job.log("b") and "is gone" in job.log("b"))
        found = of_host(job, "b")
        assert (found["cause"], found["ranks"]) == ("silent", [0])
        assert found["text"] == "rank 0 (host a) is on a host that does not answer"
        report = Path(str(found["report"])).read_text()
        assert f"threads of rank 1 (host b, pid {ranks[1].pid}):\n  could not be had" in report
    finally:
        os.kill(leader, signal.SIGCONT)
    again = [job.process("a", 0), job.process("b", 1)]
    job.open(again)
    assert job.stream("b")["hang"] is None  # a launcher would say it again


def test_a_hang_that_is_over_is_forgotten_by_all_hosts_at_the_next_commit(job: Job) -> None:
    """Else a launcher would say that it was why workers ended later. A host whose own worker was judged forgets it at once."""
    ranks = [job.process("a", 0), job.process("b", 1)]
    job.open(ranks, hang_timeout=1.0)
    job.commit(ranks, 1, 2, 3, 4)
    ranks[0].progress(4, suspended=True)
    eventually(lambda: "made no progress" in job.log("b"))
    ranks[1].progress(4, suspended=True)
    assert eventually(lambda: job.stream("a")["hang"])
    eventually(lambda: "makes progress again" in job.log("b") and job.stream("b")["hang"] is None)
    assert job.stream("a")["hang"] is not None
    job.commit(ranks, 5)
    assert [job.stream(host)["hang"] for host in "ab"] == [None, None]


def test_a_hang_for_which_a_worker_is_killed_stays_where_another_one_goes_on(job: Job) -> None:
    ranks = [job.process("a", 0), job.process("a", 1)]
    job.open(ranks, hang_timeout=1.0)
    job.commit(ranks, 1, 2, 3, 4)
    eventually(lambda: job.log("a").count("made no progress") == 2)
    ranks[1].progress(4, suspended=True)
    eventually(lambda: "makes progress again" in job.log("a") and job.status("a")["hangs"] == 1)
    assert of_host(job, "a")["ranks"]


SPEC = SessionSpec(
    stream="s", incarnation=Incarnation(3, "n"), world_size=3, hosts=["a", "b", "b"], addresses={}, holders={}, leader="a", resumed=None
)


def concluded(*found: Examined) -> list[PeerMessage]:
    """All that the leader tells all hosts."""

    async def work() -> list[PeerMessage]:
        told: list[PeerMessage] = []
        inquest = Inquest(SPEC, "run")
        for each in found:
            inquest.hear(each, Mock(tell=told.append))
        while not isinstance(told[-1], Autopsied):
            await asyncio.sleep(0.01)
        inquest.close()
        return told

    return asyncio.run(work())


def examined(host: str, *ranks: RankFound) -> Examined:
    message = peers.unpack(pack(Examined(host=host, ranks=list(ranks)))[4:])
    assert isinstance(message, Examined)
    return message


def rank(number: int, host: str, doing: Doing = Doing.ASLEEP) -> RankFound:
    return RankFound(rank=number, host=host, pid=7, doing=doing, trails=())


def test_hosts_are_asked_once_and_the_verdict_waits_for_the_last() -> None:
    told = concluded(examined("a", rank(0, "a")), examined("b", rank(1, "b"), rank(2, "b", Doing.STOPPED)))
    assert told[0] == Examine()
    assert isinstance(told[1], Autopsied)
    assert (told[1].cause, told[1].ranks, len(told)) == ("stopped", [2], 2)


def test_a_host_that_does_not_answer_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopsy, "HOSTS_SECONDS", 0.05)
    *_, verdict = concluded(examined("a", rank(0, "a")))
    assert isinstance(verdict, Autopsied)
    assert (verdict.cause, verdict.ranks) == ("silent", [1, 2])
    assert verdict.report.startswith("hang of run run, stream s, incarnation 3, ")


def test_a_later_hang_has_an_inquest_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopsy, "WORD_SECONDS", -1.0)  # what comes after a verdict is of another hang at once
    told = list[PeerMessage]()

    async def work() -> None:
        inquest = Inquest(SPEC, "run")
        for stopped in (1, 2):
            ranks = [rank(number, "b", Doing.STOPPED if number == stopped else Doing.ASLEEP) for number in (1, 2)]
            for found in (examined("b", *ranks), examined("a", rank(0, "a"))):
                inquest.hear(found, Mock(tell=told.append))
            await asyncio.sleep(0.05)
        inquest.close()

    asyncio.run(work())
    assert [message.ranks for message in told if isinstance(message, Autopsied)] == [[1], [2]]


def test_no_host_speaks_for_another_or_twice() -> None:
    lies = [rank(number, host, Doing.STOPPED) for number, host in [(0, "a"), (0, "b"), (1, "a"), (-1, "b"), (9, "b")]]
    told = concluded(
        examined("b", rank(1, "b"), rank(2, "b"), *lies), examined("b", rank(1, "b", Doing.STOPPED)), examined("a", rank(0, "a"))
    )
    assert isinstance(told[-1], Autopsied)
    assert (told[-1].cause, told[-1].ranks) == ("asleep", [0, 1, 2])


def test_a_file_that_is_closed_meanwhile_does_not_hide_that_of_the_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "PROC", tmp_path)
    (tmp_path / "7" / "fd").mkdir(parents=True)
    (tmp_path / "7" / "status").write_text(f"Name:\tx\nSigCgt:\t{1 << (lifecycle.STACKS_SIGNAL - 1):016x}\n")
    for number in range(8):
        (tmp_path / "7" / "fd" / str(number)).symlink_to("gone")

    def read_link(path: Path) -> str:
        if path.name == "4":
            return f"/memfd:{lifecycle.STACKS_FILE} (deleted)"
        raise FileNotFoundError

    monkeypatch.setattr(os, "readlink", read_link)
    (tmp_path / "7" / "fd" / "4").unlink()
    (tmp_path / "7" / "fd" / "4").touch()
    found = autopsy.stacks_file(7)
    assert found is not None
    os.close(found)


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that writes no stacks."""
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


def as_pyspy(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)


def test_pyspy_reads_the_stacks_of_a_worker_that_writes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: int) -> None:
    """It says the command first, with all arguments. The one beside the agent's Python goes before any on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    head = "echo 'Process 7: python --token hunter2'; echo 'Python v3.11.7 (/usr/bin/python)'; echo;"
    threads = 'Thread 7 (idle): "MainThread"'
    (tmp_path / "bin").mkdir()
    worker = Mock(pid=sleeper)
    for name, text, said in (
        ("py-spy", f"{head} echo '{threads}'; echo \"    $*\"", f"{threads}\n    dump --nonblocking --pid {sleeper}"),
        ("py-spy", f"{head} echo '{threads}'; exit 1", ""),
        ("py-spy", head, ""),
        ("bin/py-spy", f"{head} echo '{threads}'", threads),
    ):
        as_pyspy(tmp_path / name, text)
        assert asyncio.run(autopsy.stacks({worker: Doing.ASLEEP})) == {worker: said}
        worker.go_on.assert_called_with(writes_stacks=False)


def test_stacks_in_the_log_move_no_cursor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: int) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    as_pyspy(tmp_path / "py-spy", "printf 'Thread 7 (idle): \"\\033[2J\"\\n    f (x.py:1)\\n'")
    lines = list[str]()
    asyncio.run(autopsy.log_stacks(Mock(pid=sleeper, rank=1), Mock(log=lines.append)))
    assert lines == [f'rank 1 (pid {sleeper}):\nThread 7 (idle): "\\x1b[2J"\n    f (x.py:1)']


@pytest.mark.parametrize("what", ["its search", "its begin", "itself", "its output"])
def test_a_worker_is_killed_though_pyspy_hangs(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: int) -> None:
    """As on a file system that is away; afterwards the agent can end."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    as_pyspy(tmp_path / "py-spy", f"trap '' TERM; exec {'yes' if what == 'its output' else 'sleep 60'}")
    over, killed = threading.Event(), list[int]()

    def hang(*_: object, **__: object) -> None:
        over.wait(8)

    if what == "its search":
        monkeypatch.setattr(shutil, "which", hang)
    elif what == "its begin":
        monkeypatch.setattr(subprocess, "Popen", hang)
    worker = Mock(pid=sleeper, rank=1, alive=True, parting="", kill=lambda: killed.append(sleeper))

    async def work() -> None:
        watch = HangWatch(Mock(examine=partial(autopsy.log_stacks, context=Mock())))
        watch.open(worker, 0.001, readopt=True)
        await asyncio.sleep(0.01)
        watch.kill_hanging()
        async with asyncio.timeout(6):
            while not killed:
                await asyncio.sleep(0.02)

    try:
        asyncio.run(work())
        assert killed == [sleeper]
    finally:
        over.set()


@pytest.mark.parametrize("ends", [True, False])
def test_nccl_in_a_worker_is_asked_for_its_account_of_the_job(ends: bool, monkeypatch: pytest.MonkeyPatch, sleeper: int) -> None:
    heard = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"status\n"))
        writer.write(b"OK\nJob summary\n" + b"x" * 2**20)
        await writer.drain()
        if ends:
            writer.close()

    async def ask() -> list[str]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            monkeypatch.setenv("NCCL_RAS_ADDR", "127.0.0.1:{1}".format(*server.sockets[0].getsockname()))
            return [await autopsy.said_by_nccl([sleeper]), await autopsy.said_by_nccl([sleeper, os.getpid()])]

    stranger, said = asyncio.run(ask())
    assert stranger == "", "the account of another job is none of this one"
    assert said.startswith("OK\nJob summary\nx")
    assert len(said) <= 8192
    assert heard == [b"timeout 1\nverbose status\n"]
    assert asyncio.run(autopsy.said_by_nccl([os.getpid()])) == ""  # nobody listens there any more


@pytest.mark.parametrize(
    ("letter", "doing"),
    [
        ("R", Doing.AT_WORK),
        ("S", Doing.ASLEEP),
        ("I", Doing.ASLEEP),
        ("D", Doing.KERNEL),
        ("T", Doing.STOPPED),
        ("t", Doing.STOPPED),
        ("Z", Doing.ENDED),
        ("X", Doing.ENDED),
    ],
)
def test_states_of_processes(letter: str, doing: Doing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "PROC", tmp_path)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (a name) R) {letter} 1 7 7 0")
    assert autopsy.doing_of(7) is doing
    assert autopsy.doing_of(8) is Doing.ENDED
