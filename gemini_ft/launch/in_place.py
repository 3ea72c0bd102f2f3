"""The launcher's side of recovery in place: workers that outlive a failure of the job.

A worker inside `gemini_ft.run` calls the launcher here. When another worker fails, it is told that its attempt is over, in place of being
killed: it unwinds, lets go of all that the attempt has made, and waits for the next one. Torch's launcher does not have to know: every
attempt of a worker is a process to it, which has ended when the worker is told so, and is started when it is sent the next attempt's
environment and standard streams. So failures are judged, restarts counted and hosts brought together as ever.

A worker that does not come back in time, or may not stay, is killed, and another one started.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from gemini_ft.config import load_config
from gemini_ft.launch.grace import Process, Workers
from gemini_ft.wire import channel
from gemini_ft.wire.private import credentials

logger = logging.getLogger(__name__)

IN_PLACE = "GEMINI_IN_PLACE"  # in the environment of workers: process id of their launcher, and the abstract address at which they call it
FAILED, PARKED, LEAVES = "failed", "parked", "leaves"  # a worker's words: its attempt has failed; it waits for the next; it cannot stay
NEVER = "never"  # and while its attempt goes on: it cannot stay after it
_REFUSAL = "worker (pid %d) does not stay, and another one is started: %s"
_POLL = 0.005  # seconds
_KILL_SECONDS = 30.0  # for the kernel to end a process that was killed


class Attempt:
    """One attempt of a worker, in the shape of ``subprocess.Popen`` as far as torch's launcher uses it.

    Attributes:
        process: the worker, which may have further attempts.
        pid: its process id.
    """

    def __init__(self, stays: Stays, process: Process, environ: Mapping[str, str]) -> None:
        self.process, self.pid = process, process.pid
        self._stays, self._environ = stays, environ
        self._status: int | None = None  # with which it has ended, while the process lives
        self._ended_at = 0.0

    def poll(self) -> int | None:
        """The exit status, of the attempt or of the process; None while it runs."""
        if self._status is None and self._stays.last_word(self.pid) is not None:
            self._end(1)
        return self.process.poll() if self._status is None else self._status

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end as Popen's method does."""
        return self.process.wait(timeout) if self._status is None else self._status

    def end_in_place(self) -> bool:
        """Ends the attempt, as another worker has failed; returns False if the worker does not listen, and must be signalled."""
        if self.poll() is None and not self._stays.refuses(self.pid) and self._stays.tell(self.pid, {"over": True}):
            self._end(-signal.SIGTERM)
        return self._status is not None

    def _end(self, status: int) -> None:
        self._status, self._ended_at = status, time.monotonic()

    def next(self, environ: Mapping[str, str], streams: Sequence[int]) -> Attempt | None:
        """The worker's next attempt, once it has come back from this one; None: there is none, and the process is dead.

        Args:
            environ: of the next attempt; the worker takes over what differs from this one's.
            streams: its standard input, output and error.
        """
        until = self._ended_at + self._stays.seconds
        while self.process.poll() is None and self._stays.last_word(self.pid) not in (PARKED, LEAVES) and time.monotonic() < until:
            self._stays.workers.go_on()
            time.sleep(_POLL)
        if self.process.poll() is not None:
            return None
        if self._stays.last_word(self.pid) == PARKED:
            changed = {name: value for name, value in environ.items() if self._environ.get(name) != value}
            if self._stays.tell(self.pid, {"environ": changed}, streams, anew=True):
                return Attempt(self._stays, self.process, environ)
        elif self._stays.last_word(self.pid) != LEAVES:  # else it has said why
            text = "a surviving worker (pid %d) has not come back within %g s (in_place_timeout): killing it, another one is started"
            logger.warning(text, self.pid, self._stays.seconds)
        self._stays.workers.send(self.process, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILL_SECONDS)
        return None


class Stays:
    """The workers of this host that may outlive a failure. For use by the main thread.

    Args:
        workers: all of this host.
        seconds: for a worker to come back from an attempt that is over.
    """

    def __init__(self, workers: Workers, seconds: float) -> None:
        self.workers, self.seconds = workers, seconds
        self.address = f"gemini-in-place-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._channels: dict[int, socket.socket] = {}  # by process id, of those that are inside `gemini_ft.run`
        self._words: dict[int, str] = {}  # the last one of each
        self._refusals: dict[int, str] = {}  # of those that cannot stay, as they have said
        self._attempts: dict[str, Attempt] = {}  # the last one of each local rank

    def begin(self, process: Process, environ: Mapping[str, str]) -> Attempt:
        """The first attempt of a worker that has just been started."""
        self._attempts[environ["LOCAL_RANK"]] = attempt = Attempt(self, process, environ)
        return attempt

    def go_on(self, environ: Mapping[str, str], streams: Sequence[int]) -> Attempt | None:
        """The next attempt of the worker that had this place before; None: there is none that may have one."""
        before = self._attempts.pop(environ["LOCAL_RANK"], None)
        attempt = before.next(environ, streams) if before is not None else None
        if attempt is not None:
            self._attempts[environ["LOCAL_RANK"]] = attempt
        return attempt

    def last_word(self, pid: int) -> str | None:
        """The newest word of a worker on its present attempt; None: it has said nothing, or does not listen."""
        self._hear()
        return self._words.get(pid)

    def refuses(self, pid: int) -> bool:
        """Whether a worker has said during its attempt that it cannot stay; then the log says why."""
        self._hear()
        if why := self._refusals.get(pid):
            logger.warning(_REFUSAL, pid, why)
        return bool(why)

    def tell(self, pid: int, message: Mapping[str, Any], descriptors: Sequence[int] = (), *, anew: bool = False) -> bool:
        """Sends a message to a worker; with ``anew`` its last word is forgotten first. Returns False if it does not listen."""
        self._hear()
        if pid not in self._channels:
            return False
        if anew:
            del self._words[pid]
        try:
            channel.send(self._channels[pid], message, descriptors)
        except OSError:
            return False
        return True

    def _hear(self) -> None:
        with suppress(BlockingIOError):
            while True:
                end, _ = self._listener.accept()
                pid, uid = credentials(end)
                if uid == os.getuid() and pid in {attempt.pid for attempt in self._attempts.values()}:
                    end.setblocking(False)
                    self._channels[pid] = end
                else:  # a process that a worker has started
                    end.close()
        for pid, end in list(self._channels.items()):
            with suppress(BlockingIOError):
                while (received := _received(end)) is not None:
                    if received["word"] == NEVER:
                        self._refusals[pid] = received["why"]
                        continue
                    self._words[pid] = received["word"]
                    if "why" in received:
                        logger.warning(_REFUSAL, pid, received["why"])
                self._channels.pop(pid).close()  # it has left `gemini_ft.run`
                self._words.pop(pid, None)
                self._refusals.pop(pid, None)

    def close(self) -> None:
        for end in (self._listener, *self._channels.values()):
            end.close()


def _received(end: socket.socket) -> dict[str, Any] | None:
    try:
        received = channel.receive(end)
    except ConnectionError:
        return None
    return received[0] if received is not None else None


@contextmanager
def staying(workers: Workers) -> Iterator[Stays | None]:
    """Inside, workers may outlive a failure, if that was asked for."""
    config = load_config()
    if config.restart != "in_place":
        yield None
        return
    stays = Stays(workers, config.in_place_timeout)
    os.environ[IN_PLACE] = f"{os.getpid()}:{stays.address}"
    try:
        yield stays
    finally:
        del os.environ[IN_PLACE]
        stays.close()
