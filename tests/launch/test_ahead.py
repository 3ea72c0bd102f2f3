"""A process that waits to become an agent: real launchers and real agents; what it must never do, however it is asked."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from agent_kit import agent_pid, end_agent, eventually

from gemini_ft.agent import ahead, lifecycle, watchdog
from gemini_ft.wire import channel
from gemini_ft.wire.private import credentials

pytestmark = pytest.mark.started_anew

HOST = "host"
# Sets an option of the agent itself, as scripts do, and says which logs there are.
SCRIPT = """
import os, sys, time
from gemini_ft.agent import watchdog
run, host = os.environ["GEMINI_RUN_ID"], os.environ["GEMINI_HOST_ID"]
os.environ.update(GEMINI_LOG_DIR=sys.argv[1], GEMINI_AGENT_CPUS=sys.argv[2])
while not os.path.exists("go"):
    time.sleep(0.01)
watchdog.connect(run, host).close()
time.sleep(0.1)
print(sorted(os.listdir(sys.argv[1])), flush=True)
sys.stdin.read()
"""
ASKER = """
import os, socket, sys
from gemini_ft.wire import channel
os.setgid(65534), os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.settimeout(10)
sock.connect(bytes.fromhex(sys.argv[1]))
try:
    channel.send(sock, {"program": [sys.executable, sys.argv[2]], "environ": {}, "umask": "0022"}, [1])
    print(channel.receive(sock))
except OSError:
    print(None)
"""

SQUATTER = """
import os, socket, sys
os.setgid(65534), os.setuid(65534)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(bytes.fromhex(sys.argv[1]))
listener.listen()
print("ready", flush=True)
print(listener.accept()[0].recv(100), flush=True)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A run id; an agent of it is ended."""
    monkeypatch.setenv("GEMINI_LOG_DIR", str(tmp_path / "logs"))
    run = f"ahead-{uuid.uuid4().hex[:8]}"
    yield run
    end_agent(run, HOST)


@pytest.fixture
def waiting(run: str) -> Iterator[psutil.Process]:
    """The process that waits; this one is its launcher."""
    with ahead.started_ahead(run, HOST):
        yield eventually(lambda: process_that_waits(run), "the process that waits")


def asking(run: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    try:
        sock.connect(ahead.address(run, HOST))
    except OSError:
        sock.close()
        raise
    return sock


def process_that_waits(run: str) -> psutil.Process | None:
    with contextlib.suppress(OSError), asking(run) as sock:
        return psutil.Process(credentials(sock)[0])
    return None


def start_agent(run: str) -> int | None:
    """Starts an agent as a worker does; returns its process id."""
    watchdog.connect(run, HOST).close()
    return agent_pid(run, HOST)


def is_over(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def arguments(run: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "gemini_ft.cli.main", "run", "--run-id", run, *more]


class TestWorkerThatAsks:
    def test_the_process_becomes_the_agent_and_outlives_its_launcher(self, run: str) -> None:
        with ahead.started_ahead(run, HOST):
            waiting = eventually(lambda: process_that_waits(run), "the process that waits")
            assert not lifecycle.is_listening(run, HOST)
            assert start_agent(run) == waiting.pid
        assert process_that_waits(run) is None
        assert agent_pid(run, HOST) == waiting.pid

    def test_it_takes_the_options_of_the_worker(self, run: str, tmp_path: Path) -> None:
        (tmp_path / "script.py").write_text(SCRIPT)
        environ = {**os.environ, "GEMINI_HOST_ID": HOST}
        processor = max(os.sched_getaffinity(0))
        command = arguments(run, "--max-restarts=0", "script.py", str(tmp_path / "chosen"), str(processor))
        with subprocess.Popen(command, cwd=tmp_path, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
            assert launcher.stdin is not None
            assert launcher.stdout is not None
            waiting = eventually(lambda: process_that_waits(run), "the process that waits")
            (tmp_path / "go").touch()
            assert launcher.stdout.readline() == f"['agent-{run}-{HOST}.log']\n"
            assert agent_pid(run, HOST) == waiting.pid
            assert launcher.pid == waiting.ppid()
            assert os.sched_getaffinity(waiting.pid) == {processor}
            launcher.communicate(timeout=60)

    def test_those_that_are_gone_or_say_nothing_hold_up_nobody(self, run: str, waiting: psutil.Process) -> None:
        asking(run).close()
        with asking(run), asking(run):
            assert start_agent(run) == waiting.pid

    def test_one_that_dies_after_its_question_leaves_no_process_behind(self, run: str) -> None:
        with ahead.started_ahead(run, HOST):
            waiting = eventually(lambda: process_that_waits(run), "the process that waits")
            waiting.suspend()
            with asking(run) as sock, open(os.devnull, "w") as log:
                channel.send(sock, ahead.question(), [log.fileno()])
            waiting.resume()
            with asking(run) as silent:
                assert silent.recv(1) == b""  # it was its turn, after the question
            assert process_that_waits(run) == waiting
        assert is_over(waiting)

    def test_its_files_have_the_mode_that_the_worker_wants(self, run: str, waiting: psutil.Process) -> None:
        before = os.umask(0o027)
        try:
            assert start_agent(run) == waiting.pid
        finally:
            os.umask(before)
        assert "Umask:\t0027\n" in Path(f"/proc/{waiting.pid}/status").read_text()

    def test_one_with_other_file_systems_is_left_alone(self, run: str, waiting: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
        """As of a launcher outside the container in which the workers are."""
        monkeypatch.setattr(ahead, "surroundings", lambda pid="self": (str(pid), "0::/"))
        assert start_agent(run) != waiting.pid
        assert process_that_waits(run) == waiting

    def test_one_that_another_worker_has_made_an_agent_is_not_killed(self, run: str, waiting: psutil.Process) -> None:
        waiting.suspend()
        with asking(run) as first, ThreadPoolExecutor() as pool:
            channel.send(first, ahead.question(), [2])
            second = pool.submit(ahead.use, run, HOST, time.monotonic() + 60)
            time.sleep(0.5)
            waiting.resume()
            assert channel.receive(first) is not None
            assert second.result(60) is False
            eventually(lambda: lifecycle.is_listening(run, HOST), "the agent")
        assert agent_pid(run, HOST) == waiting.pid

    def test_another_version_of_the_package_is_no_agent_of_this_one(
        self, run: str, waiting: psutil.Process, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ahead, "program", lambda: [sys.executable, "/elsewhere/gemini_ft/agent/ahead.py"])
        assert start_agent(run) != waiting.pid
        eventually(lambda: is_over(waiting), "its end")

    def test_one_that_is_stopped_never_becomes_an_agent(self, run: str, waiting: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ahead, "ANSWER_SECONDS", 0.2)
        waiting.suspend()
        assert start_agent(run) != waiting.pid
        assert is_over(waiting)

    def test_memory_of_an_agent_that_hangs_goes_to_one_that_inherits_it(self, run: str, waiting: psutil.Process) -> None:
        first = lifecycle.spawn(run, HOST)
        eventually(lambda: lifecycle.is_listening(run, HOST), "the agent")
        left = os.memfd_create("gemini:test")
        estate = watchdog.LeftMemory(slots=[left], shared=[False])
        first.kill()
        first.wait(30)
        watchdog.start(run, HOST, estate, time.monotonic() + 60)
        assert agent_pid(run, HOST) != waiting.pid
        estate.close()

    @pytest.mark.skipif(os.getuid() != 0, reason="needs another user: run as root, who can become one")
    def test_another_user_is_not_heard(self, run: str, waiting: psutil.Process) -> None:
        command = [sys.executable, "-c", ASKER, ahead.address(run, HOST).hex(), ahead.program()[1]]
        heard = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd="/")
        assert heard.stdout == "None\n"
        assert start_agent(run) == waiting.pid

    @pytest.mark.skipif(os.getuid() != 0, reason="needs another user: run as root, who can become one")
    def test_another_user_at_the_address_is_told_nothing(self, run: str) -> None:
        command = [sys.executable, "-c", SQUATTER, ahead.address(run, HOST).hex()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert start_agent(run) is not None
            assert process.stdout.readline() == "b''\n"


class TestLauncherThatEnds:
    def test_nobody_has_asked(self, run: str) -> None:
        with ahead.started_ahead(run, HOST):
            waiting = eventually(lambda: process_that_waits(run), "the process that waits")
        assert is_over(waiting)
        with ahead.started_ahead(run, HOST):
            importing = psutil.Process(lifecycle.started[-1].pid)
        assert is_over(importing)

    @pytest.mark.parametrize("start", [pytest.param("--cold", marks=pytest.mark.soak), "--local-addr=localhost"])
    def test_it_is_killed(self, run: str, tmp_path: Path, start: str) -> None:
        (tmp_path / "script.py").write_text("import sys\nsys.stdin.read()\n")
        environ = {**os.environ, "GEMINI_HOST_ID": HOST}
        command = arguments(run, start, "script.py")
        with subprocess.Popen(command, cwd=tmp_path, env=environ, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as launcher:
            waiting = eventually(lambda: process_that_waits(run), "the process that waits")
            launcher.kill()
            eventually(lambda: is_over(waiting), "its end")

    def test_a_host_with_an_agent_needs_none(self, run: str) -> None:
        agent = start_agent(run)
        before = list(lifecycle.started)
        with ahead.started_ahead(run, HOST):
            assert lifecycle.started == before
            assert agent_pid(run, HOST) == agent

    def test_a_second_one_leaves_the_first_alone(self, run: str, waiting: psutil.Process) -> None:
        with ahead.started_ahead(run, HOST):
            second = lifecycle.started[-1]
            eventually(lambda: second.poll() is not None, "the end of the second")
        assert start_agent(run) == waiting.pid

    def test_signals_to_all_processes_of_a_job_are_not_meant_for_it(self, run: str, waiting: psutil.Process) -> None:
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            waiting.send_signal(number)
        assert start_agent(run) == waiting.pid
