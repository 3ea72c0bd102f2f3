"""A signal to the launcher reaches every worker that has begun, once and at once, wherever it interrupts the launcher."""

# ruff: noqa: PT012 - the exception comes somewhere in a block

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import api as torch_api
from torch.distributed.elastic.multiprocessing.api import SignalException

from gemini_ft.launch import grace
from gemini_ft.launch import worker_start as warm
from gemini_ft.launch.grace import Process, Workers
from gemini_ft.launch.worker_start import ForkServer, ForkServerError, cold_workers
from gemini_ft.wire import channel

# Notes that it has begun, and for every SIGTERM that it has saved.
SAVES = """
import os, signal, sys, time
def save(*_):
    open(f"{sys.argv[1]}.begun", "w")  # not noted yet, if the signal comes right after `signal.signal`
    open(f"{sys.argv[1]}.saved", "a").write("x")
    time.sleep(0.05)  # time for a second signal, which must not come
    os._exit(0)
signal.signal(signal.SIGTERM, save)
open(f"{sys.argv[1]}.begun", "w")
while True:
    time.sleep(0.005)  # a signal that comes right before a sleep waits for its end
"""
SLOW = "import os, time\nfork = os.fork\ndef slow():\n    time.sleep(0.01)\n    return fork()\nos.fork = slow\n"


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


class Scene:
    """A launcher's side: a fork server and jobs of workers that save on SIGTERM."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs = folder, 0
        self.script = folder / "saves.py"
        self.script.write_text(SAVES)
        self.workers = Workers()
        self.server = ForkServer([str(self.script)], ["slow"], self.workers)
        assert self.server.wait_ready() is None

    @contextlib.contextmanager
    def job(self) -> Iterator[None]:
        """Inside, signals are handled as in torch's launcher, and two workers have begun; afterwards none is left."""
        self.jobs += 1
        self.workers = self.server.workers = Workers()
        with self.workers.signalled():
            before = signal.signal(signal.SIGTERM, getattr(torch_api, grace.TO_HANDLER))
            try:
                for name in ("one", "two"):
                    wait_for(lambda name=name: self.starts(name))  # type: ignore[misc]
                wait_for(lambda: len(list(self.folder.glob(f"{self.jobs}.*.begun"))) >= 2)
                yield
            finally:
                self.workers.stop()
                signal.signal(signal.SIGTERM, before)

    def start(self, name: str) -> Process:
        return self.server.fork([str(self.script), str(self.folder / f"{self.jobs}.{name}")], os.environ, [0, 1, 2])

    def starts(self, name: str) -> bool:
        """Whether a worker has been started: the server may still be busy with the question of a job that was interrupted."""
        try:
            self.start(name)
        except ForkServerError as error:
            if "has not answered yet" not in str(error):
                raise
            return False
        return True

    def begun_and_saved(self) -> tuple[set[str], dict[str, str]]:
        """Names of the job's workers that have begun, and what those have noted that were told to save."""
        begun = {path.stem for path in self.folder.glob(f"{self.jobs}.*.begun")}
        return begun, {path.stem: path.read_text() for path in self.folder.glob(f"{self.jobs}.*.saved")}


@contextlib.contextmanager
def told_after(seconds: float) -> Iterator[None]:
    """Inside, SIGTERM comes to this process; it has come when this ends, whatever happens: afterwards it would be the end of the tests."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    scene = Scene(tmp_path)
    yield scene
    scene.server.close()


class Interrupter:
    """Sends this process SIGTERM at one of the lines that it runs in the exchange with the fork server."""

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in (warm.__file__, grace.__file__, channel.__file__):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at + 1:
                signal.raise_signal(signal.SIGTERM)
        return self

    def run(self, function: Callable[[], object]) -> None:
        sys.settrace(self)
        try:
            function()
        finally:
            sys.settrace(None)


@pytest.mark.filterwarnings("ignore:.*FileIO:pytest.PytestUnraisableExceptionWarning")  # it may interrupt the line before a `with`
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.soak) for first in range(1, 5))])
def test_wherever_a_signal_interrupts_the_exchange_every_worker_saves_once(scene: Scene, first: int) -> None:
    """At each fifth line of it, in a server that is slow and serves all these jobs, of which it is left in the middle again and again."""
    with scene.job():
        counter = Interrupter(-1)
        counter.run(lambda: (scene.start("three"), scene.workers.go_on()))
        assert counter.lines > 50
    third_begun = 0
    for line in range(first, counter.lines, 5):
        with pytest.raises(SignalException), scene.job():
            Interrupter(line).run(lambda: (scene.start("three"), scene.workers.go_on()))
            pytest.fail(f"nothing was raised at line {line}")
        begun, saved = scene.begun_and_saved()
        assert saved == dict.fromkeys(begun, "x"), f"interrupted at line {line}"
        assert begun >= {f"{scene.jobs}.one", f"{scene.jobs}.two"}
        third_begun += len(begun) == 3
    assert third_begun < len(range(first, counter.lines, 5))


@pytest.mark.soak  # the same at random moments of time
def test_two_hundred_signals_at_random_moments(scene: Scene) -> None:
    for _ in range(200):
        with contextlib.suppress(SignalException), scene.job():
            with told_after(random.uniform(0, 0.08)):
                scene.start("three")
                scene.start("four")
            scene.workers.go_on()
            pytest.fail("nothing was raised")
        begun, saved = scene.begun_and_saved()
        assert saved == dict.fromkeys(begun, "x")
        assert len(begun) >= 2


def test_workers_are_told_while_the_server_hangs(scene: Scene) -> None:
    with pytest.raises(SignalException), scene.job(), told_after(0.1):
        os.kill(scene.server.pid, signal.SIGSTOP)
        scene.start("three")
    os.kill(scene.server.pid, signal.SIGCONT)
    assert scene.begun_and_saved()[1] == {f"{scene.jobs}.one": "x", f"{scene.jobs}.two": "x"}


def test_workers_are_told_while_the_launcher_is_in_a_call_that_no_signal_interrupts(scene: Scene) -> None:
    """Such as the look-up of a host's name when the name server is gone too."""
    libc, mutex, locked = ctypes.CDLL(None), ctypes.create_string_buffer(64), threading.Event()
    told: list[bool] = []

    def preempt() -> None:
        libc.pthread_mutex_lock(mutex)
        locked.set()
        wait_for(lambda: mutex.raw[:4] == (2).to_bytes(4, sys.byteorder))  # glibc's word for a mutex that a thread waits for
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 30
        while not told and time.monotonic() < end:
            told.extend([True] * (len(scene.begun_and_saved()[1]) == 2))
        libc.pthread_mutex_unlock(mutex)  # only now the main thread goes on

    with pytest.raises(SignalException), scene.job():
        helper = threading.Thread(target=preempt)
        helper.start()
        locked.wait()
        libc.pthread_mutex_lock(mutex)
    helper.join()
    assert told


def test_a_worker_that_is_told_twice_by_torch_hears_it_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with scene.job():
        one, killpg, sent = scene.workers.all[0], os.killpg, list[tuple[int, int]]()
        monkeypatch.setattr(os, "killpg", lambda *call: (sent.append(call), killpg(*call)))
        scene.workers.send(one, signal.SIGTERM)
        scene.workers.send(one, signal.SIGTERM)
        one.wait(30)
        assert sent == [(one.pid, signal.SIGTERM)]
    assert scene.begun_and_saved()[1][f"{scene.jobs}.one"] == "x"


def test_a_signal_that_torch_swallows_still_ends_the_job(scene: Scene) -> None:
    """Its exception is an ordinary one, which many a handler in torch catches: preempted workers must not be started again."""
    with pytest.raises(SignalException), scene.job():
        with contextlib.suppress(Exception):
            signal.raise_signal(signal.SIGTERM)
        wait_for(lambda: scene.workers.stopped_by is not None)
        scene.workers.go_on()


def test_cold_workers_that_torch_does_not_know_yet_are_told_too(tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SignalException), cold_workers():
            signal.signal(signal.SIGTERM, getattr(torch_api, grace.TO_HANDLER))
            torch_api.get_subprocess_handler(
                entrypoint=sys.executable,
                args=("-u", str(script), str(tmp_path / "0")),
                env={},
                stdout="",
                stderr="",
                local_rank_id=0,
                numa_options=None,
            )
            wait_for((tmp_path / "0.begun").exists)
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "0.saved").read_text() == "x"


# As SAVES, for ranks of a whole job; the first attempt ends at once, so that signals also meet restarts.
JOB = """
import os, signal, sys, time
import torch
name = os.path.join(sys.argv[1], f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}")
def save(*_):
    open(f"{name}.begun", "w")
    open(f"{name}.saved", "a").write("x")
    time.sleep(0.3)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
open(f"{name}.begun", "w")
while os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    time.sleep(0.005)
os._exit(1)
"""


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [(), ("--cold",)], ids=["forked", "cold"])
def test_whole_jobs_are_told_at_random_moments(tmp_path: Path, options: tuple[str, ...]) -> None:
    """From when workers have begun to after their restart. None of the second attempt is killed before it has saved, nor told twice."""
    (tmp_path / "job.py").write_text(JOB)
    second_begun = 0
    for number in range(30):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = [sys.executable, "-m", "gemini_ft.cli.main", "run", *options, "--nproc-per-node", "4", "--max-restarts", "1"]
        command += ["--monitor-interval", "0.01", str(tmp_path / "job.py"), str(folder)]
        with open(folder / "output", "w") as output:
            began = time.monotonic()
            job = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
            try:
                wait_for(lambda folder=folder: any(folder.glob("0.*.begun")))  # type: ignore[misc]
                time.sleep(random.uniform(0, time.monotonic() - began if options else 0.5))  # cold ones start again in as long as at first
                job.terminate()
                assert job.wait(60) != 0
            finally:
                job.kill()
                job.wait()
        begun = {path.stem for path in folder.glob("1.*.begun")}
        saved = {path.stem: path.read_text() for path in folder.glob("1.*.saved")}
        assert saved == dict.fromkeys(begun, "x"), (number, (folder / "output").read_text()[-2000:])
        second_begun += len(begun)
    assert second_begun > 0


FORGETFUL = """
import os, time
from multiprocessing import shared_memory
shared_memory.SharedMemory(name=os.environ["LEFT"], create=True, size=64)
if os.fork() == 0:
    time.sleep(600)
os._exit(1)
"""


def test_shared_memory_of_a_worker_that_fails_goes_with_it() -> None:
    """The process that removes it is in the worker's session, and waits for all others of it."""
    name = f"gemini-left-{os.getpid()}"
    worker = subprocess.Popen([sys.executable, "-c", FORGETFUL], env={**os.environ, "LEFT": name}, start_new_session=True)
    process = Workers().adopt(worker.pid, worker.poll)
    wait_for(lambda: process.poll() == 1)
    wait_for(lambda: not Path("/dev/shm", name).exists())


def test_a_worker_is_signalled_also_where_no_descriptor_is_left_to_watch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    workers = Workers()
    child = subprocess.Popen(["sleep", "100"], start_new_session=True)
    try:
        process = workers.adopt(child.pid, child.poll)
        assert process.signs == []
        workers.send(process, signal.SIGTERM)
        assert process.wait(30.0) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()
