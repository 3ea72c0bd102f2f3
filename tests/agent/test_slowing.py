"""Processes that get a share of their time, and the time that one has been at work."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_kit import eventually

from gemini_ft.agent import lifecycle
from gemini_ft.agent.lifecycle import AgentProcess
from gemini_ft.faults.slowing import slow_down


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def work_of(process: AgentProcess) -> float:
    work = process.work()
    assert work is not None
    return work


@contextlib.contextmanager
def running(script: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", script, *arguments]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that would take all of a processor."""
    with running("while True: pass") as process:
        yield process


def test_a_process_gets_its_share_and_is_left_running(busy: subprocess.Popen[bytes]) -> None:
    listener = AgentProcess(pid=busy.pid)
    slow = slow_down(busy.pid, 0.1, 2.5, period=0.2)
    eventually(lambda: state_of(busy.pid) == "T")
    before = work_of(listener)
    time.sleep(1.0)
    assert work_of(listener) - before < 0.5
    slow.wait()
    assert state_of(busy.pid) == "R"
    slow = slow_down(busy.pid, 0.1, 600.0)
    eventually(lambda: state_of(busy.pid) == "T")
    slow.terminate()
    slow.wait()
    assert state_of(busy.pid) == "R"
    slow = slow_down(busy.pid, 0.1, 600.0)
    busy.kill()
    assert slow.wait(10) == 0


def test_to_wait_for_a_processor_is_work_and_to_be_stopped_is_none(busy: subprocess.Popen[bytes]) -> None:
    """So that an agent on a host whose processors are all taken is not replaced: another one would be no faster."""
    listener, processor = AgentProcess(pid=busy.pid), {min(os.sched_getaffinity(0))}
    with running("while True: pass") as other:
        for process in (busy, other):
            os.sched_setaffinity(process.pid, processor)
        os.setpriority(os.PRIO_PROCESS, busy.pid, 10)  # the kernel counts what it waits when its turn comes
        before = work_of(listener)
        time.sleep(1.5)
        worked = work_of(listener) - before
    assert worked > 0.75
    os.kill(busy.pid, signal.SIGSTOP)
    eventually(lambda: state_of(busy.pid) == "T")  # which takes a turn on the processor
    before = work_of(listener)
    time.sleep(0.5)
    assert work_of(listener) - before < 0.1


POOLS = """
import threading, time
def work():
    end = time.thread_time() + 0.3
    while time.thread_time() < end: pass
while True:
    pool = [threading.Thread(target=work) for _ in range(4)]
    for thread in pool: thread.start()
    for thread in pool: thread.join()
    time.sleep(1.0)
"""


def test_what_threads_have_worked_and_waited_counts_when_they_have_ended() -> None:
    """An agent's uploads are made by threads of their own, which end."""
    with running(POOLS) as process:
        listener, works, threads = AgentProcess(pid=process.pid), list[float](), set[int]()
        while len(works) < 60:
            works.append(work_of(listener))
            threads.add(len(os.listdir(f"/proc/{process.pid}/task")))
            time.sleep(0.05)
    assert threads >= {1, 5}
    assert works == sorted(works)
    assert works[-1] - works[0] > 1.5  # of 3 s, in which it works on one processor or waits for it, and sleeps for at most a third


def test_work_out_of_reach_is_unknown(busy: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another pid namespace, dead, or on a kernel that does not say how long threads wait for a processor."""
    assert AgentProcess(pid=0).work() is None
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert AgentProcess(pid=ended.pid).work() is None
    thread = proc_without_pressure(busy.pid, tmp_path, monkeypatch) / "task" / str(busy.pid)
    (thread / "schedstat").unlink()
    assert AgentProcess(pid=busy.pid).work() is None
    (thread / "schedstat").write_text("0 0 0\n")  # what it is made of is switched off
    assert AgentProcess(pid=busy.pid).work() is None


def proc_without_pressure(pid: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes /proc one that knows the first thread of a process, and nothing of waiting for memory."""
    thread = folder / str(pid) / "task" / str(pid)
    thread.mkdir(parents=True)
    for name in ("stat", f"task/{pid}/schedstat"):
        (folder / str(pid) / name).symlink_to(f"/proc/{pid}/{name}")
    monkeypatch.setattr(lifecycle, "PROC", folder)
    return folder / str(pid)


FAULTS = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.truncate(file, 4096)
os.pwrite(file, b"x", 0)
os.fsync(file)
memory = mmap.mmap(file, 4096)
while True:
    memory.madvise(mmap.MADV_DONTNEED)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    memory[0]
"""


def test_to_wait_for_memory_is_work_where_the_kernel_does_not_count_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts the pages that had to be read then, be it from a disk or from swap."""
    with running(FAULTS, str(tmp_path / "pages")) as process:
        proc_without_pressure(process.pid, tmp_path / "proc", monkeypatch)
        listener = AgentProcess(pid=process.pid)
        eventually(lambda: faults_of(process.pid) > 100)
        before, count = work_of(listener), faults_of(process.pid)
        eventually(lambda: faults_of(process.pid) > count + 200)
        os.kill(process.pid, signal.SIGSTOP)
        assert work_of(listener) - before >= 2.0


def faults_of(pid: int) -> int:
    """Pages that a process has waited for."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[9])
