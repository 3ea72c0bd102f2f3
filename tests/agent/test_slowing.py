"""Processes that get a share of their time, and the time that one has been at work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_kit import eventually

from gemini_ft.agent.lifecycle import AgentProcess
from gemini_ft.faults.slowing import slow_down


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that would take all of a processor."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process
        process.kill()


def test_a_process_gets_its_share_and_is_left_running(busy: subprocess.Popen[bytes]) -> None:
    listener = AgentProcess(busy.pid)
    slow = slow_down(busy.pid, 0.1, 2.5, period=0.2)
    eventually(lambda: state_of(busy.pid) == "T")
    before = listener.work()
    time.sleep(1.0)
    assert listener.work() - before < 0.5
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
    listener, processor = AgentProcess(busy.pid), {min(os.sched_getaffinity(0))}
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        for process in (busy, other):
            os.sched_setaffinity(process.pid, processor)
        os.setpriority(os.PRIO_PROCESS, busy.pid, 10)  # the kernel counts what it waits when its turn comes
        before = listener.work()
        time.sleep(1.5)
        worked = listener.work() - before
        other.kill()
    assert worked > 0.75
    os.kill(busy.pid, signal.SIGSTOP)
    eventually(lambda: state_of(busy.pid) == "T")  # which takes a turn on the processor
    before = listener.work()
    time.sleep(0.5)
    assert listener.work() - before < 0.1
