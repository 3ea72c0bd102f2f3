"""Signals and awaits the launcher's worker processes: each one once, at once, and never a process of another launcher.

Torch's launcher turns a signal into an exception in its main thread. That may be in the middle of a bookkeeping step here, or wait for
minutes in a call that asks an unreachable store. So a thread passes the signal on to all workers the moment it arrives, and the
exception is held back while a worker is started or waited for.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import api as torch_api

from gemini_ft.launch.notes import DRAINED_STATUS

TO_HANDLER = "_terminate_process_handler"  # torch's function that turns a signal into SignalException
# Signal -> the function that hears it, on the thread that passes signals on; it returns whether the workers are to be spared.
watched: dict[int, Callable[[], bool]] = {}
_STOP_SECONDS = 30.0  # for workers to end after a signal, as torch's launcher gives them


class Process:
    """A worker, in the shape of ``subprocess.Popen`` as far as torch's launcher uses it."""

    def __init__(self, workers: Workers, pid: int, reap: Callable[[], int | None]) -> None:
        """Made by `Workers.adopt`.

        Args:
            workers: among which it is.
            pid: of the process, which leads a session.
            reap: tells its exit status, negative for a signal; None while it runs; not asked again once the status is known.
        """
        self.pid = pid
        self.returncode: int | None = None
        self.sent: set[int] = set()  # the signals it has got
        self._workers, self._reap = workers, reap
        self._pidfd = -1
        with contextlib.suppress(OSError):  # no descriptor is left: it is looked at from time to time, and signalled all the same
            self._pidfd = os.pidfd_open(pid)

    @property
    def signs(self) -> list[int]:
        """Descriptors that can be read when there is news of the worker."""
        return [self._pidfd] if self.returncode is None and self._pidfd >= 0 else []

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        with self._workers.undisturbed():
            return self.look()

    def look(self) -> int | None:
        """Does what :meth:`poll` does, for a caller that is undisturbed already."""
        if self.returncode is None:
            self._end_leftovers()
            self.returncode = self._reap()
            if self.returncode is not None and self._pidfd >= 0:
                os.close(self._pidfd)
        return self.returncode

    def _end_leftovers(self) -> None:
        """Ends the rest of a worker's session once the worker has failed by itself.

        Processes of a DataLoader end when their parent does. Where a server of multiprocessing has started them, as from Python 3.14 on,
        that is their parent: they would keep their memory, and the job's output open, for ever. SIGTERM leaves multiprocessing's tracker
        alone, which then removes the shared memory that all of them have left.
        """
        with contextlib.suppress(ChildProcessError, ProcessLookupError, PermissionError):
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_status == 0 or (ended.si_code, ended.si_status) == (os.CLD_EXITED, DRAINED_STATUS):
                return
            if not self.sent:  # after a signal of the launcher they have had it too
                os.killpg(self.pid, signal.SIGTERM)  # the worker is not reaped yet, so that no other process has its number

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end, as Popen's method does; TimeoutExpired after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            time.sleep(0.01)
        return status


def await_news(context: Any, seconds: float) -> None:
    """Returns when there is news of one of the workers of torch's process context, after ``seconds`` at the latest."""
    waiting = select.poll()
    for handler in context.subprocess_handlers.values():
        for sign in getattr(handler.proc, "signs", ()):
            waiting.register(sign, select.POLLIN)
    waiting.poll(seconds * 1000)


class Workers:
    """All workers of this launcher."""

    def __init__(self) -> None:
        self.stopped_by: signal.Signals | None = None  # the first signal that was passed on; no worker begins after it
        self.all: list[Process] = []
        self._lock = threading.RLock()  # a pid that is being signalled must not be reaped in between, and come to mean another process
        self._held = 0  # depth of `undisturbed` in the main thread
        self._pending: int | None = None  # a signal that waits for its end
        self._raise: Callable[[int, FrameType | None], None] = getattr(torch_api, TO_HANDLER)

    def adopt(self, pid: int, reap: Callable[[], int | None]) -> Process:
        """Takes in a process that has been started within :meth:`undisturbed`; it gets the signal that has already been passed on."""
        process = Process(self, pid, reap)
        self.all = [*(other for other in self.all if other.returncode is None), process]
        if self.stopped_by is not None:
            self._send(process, self.stopped_by)
        return process

    def send(self, process: Process, signum: int) -> None:
        """Signals the worker and all of its session, unless it has ended or has had that signal already."""
        with self.undisturbed():
            self._send(process, signum)

    def _send(self, process: Process, signum: int) -> None:
        if process.look() is None and (signum not in process.sent or signum == signal.SIGKILL):
            process.sent.add(signum)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signum)

    def go_on(self) -> None:
        """Raises SignalException again if the job has been told to end: torch's launcher has places that swallow it."""
        if self.stopped_by is not None:
            self._raise(self.stopped_by, None)

    def stop(self) -> None:
        """Ends workers that torch's launcher does not know of, because it was interrupted while it started them."""
        left = [process for process in self.all if process.poll() is None]
        for signum in (self.stopped_by or signal.SIGTERM, signal.SIGKILL):
            for process in left:
                self.send(process, signum)
            end = time.monotonic() + _STOP_SECONDS
            for process in left:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Inside, no signal raises an exception, and no other thread signals or waits for a worker. Only for steps that end soon."""
        main = threading.current_thread() is threading.main_thread()
        self._held += main
        try:
            with self._lock:
                yield
        finally:
            self._held -= main
            if main and not self._held and (signum := self._pending) is not None:
                self._pending = None
                self._raise(signum, None)

    @contextlib.contextmanager
    def signalled(self) -> Iterator[None]:
        """Inside, a signal that torch's launcher handles reaches all workers at once. To be entered by the main thread."""
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)  # as signal.set_wakeup_fd wants it
        thread = threading.Thread(target=self._pass_on, args=(receiver,), name="gemini-signals", daemon=True)
        thread.start()
        setattr(torch_api, TO_HANDLER, self._handle)
        before = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            setattr(torch_api, TO_HANDLER, self._raise)
            os.close(sender)
            thread.join()
            os.close(receiver)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._held:
            self._pending = signum
        else:
            self._raise(signum, frame)

    def _pass_on(self, receiver: int) -> None:
        while signums := os.read(receiver, 64):
            for signum in signums:
                if (heard := watched.get(signum)) is not None:
                    if not heard():
                        self._pass(signal.SIGTERM)
                elif signal.getsignal(signum) == self._handle:
                    self._pass(signum)

    def _pass(self, signum: int) -> None:
        with self._lock:
            self.stopped_by = self.stopped_by or signal.Signals(signum)
            for process in self.all:
                self._send(process, signum)
