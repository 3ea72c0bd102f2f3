"""The launcher's side of recovery in place: workers that outlive a failure of the job.

A worker inside `gemini_ft.run` calls the launcher here. When another worker fails, it is told that its attempt is over, in place of being
killed: it unwinds, lets go of all that the attempt has made, and waits for the next one. Torch's launcher does not have to know: every
attempt of a worker is a process to it, which has ended when the worker is told so, and is started when it is sent the next attempt's
environment and standard streams. So failures are judged, restarts counted and hosts brought together as ever.

A worker that does not come back in time, or may not stay, is killed, and another one started.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
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
BEGUN, ARRIVED = "begun", "arrived"  # it has the order to begin the next attempt; it has made a step in it
_REFUSAL = "worker (pid %d) does not stay, and another one is started: %s"
_LATE = "a surviving worker (pid %d) has not come back within %g s (in_place_timeout): killing it, another one is started"
_STOPPED = "a surviving worker (pid %d) was stopped before it had reported a step, for %g s (in_place_timeout): killing it"
_LATE_RESERVE = "a worker in reserve (pid %d) has not come to gemini_ft.run within %g s: killing it, another one is started"
_ON_ITS_WAY = 300.0  # seconds, at most, for a worker in reserve that has not come to `gemini_ft.run` when it is needed
_KILL_SECONDS = 30.0  # for the kernel to end a process that was killed


class Attempt:
    """One attempt of a worker, in the shape of ``subprocess.Popen`` as far as torch's launcher uses it.

    It exists before its worker has come back from the attempt before, so that other workers can be started meanwhile. Every poll looks
    whether the worker has come back.

    Attributes:
        process: the worker, which may have further attempts.
        pid: its process id; to torch's launcher it stays that of the first, should the worker not come back and be replaced.
        patience: seconds in which the worker must have come back once the attempt is over.
        is_reserve: whether it is none, and the worker is in reserve.
    """

    is_reserve = False

    def __init__(
        self, survivors: Survivors, environ: Mapping[str, str], streams: Sequence[int], start: Callable[[], Process], before: Attempt | None
    ) -> None:
        """Made by `Survivors.begin`; ``before``: the attempt before, whose process may go on."""
        self._survivors, self._environ, self._streams, self._start = survivors, environ, streams, start
        self._before = before  # until the worker has come back from it
        self._status: int | None = None  # with which it has ended, while the process lives
        self._ended_at = 0.0
        self._begins_by: float | None = None  # until when the worker must have taken the order to begin; None once it has made a step
        self._stopped_at: float | None = None  # the last look, if the worker was stopped then
        self._stopped_for = 0.0  # seconds since the first such look, as far as this process has run meanwhile
        self.patience = survivors.seconds
        self.process: Process = before.process if before is not None else survivors.new(start())
        self.pid = self.process.pid
        self._go_on()

    @property
    def signs(self) -> list[int]:
        return [*self.process.signs, *self._survivors.signs(self.process.pid)]

    def poll(self) -> int | None:
        """The exit status, of the attempt or of the process; None while it runs."""
        if self._status is None:
            self._go_on()
            if self._before is not None:
                if self._survivors.workers.stopped_by is None:
                    return None
                self._survivors.dismiss(self.process.pid)
                return self.process.poll()
            if self._survivors.last_word(self.process.pid) in (FAILED, PARKED, LEAVES):
                self.end(1)
            elif self._begins_by is not None and self.process.poll() is None and self._survivors.workers.stopped_by is None:
                self._await_arrival(self._begins_by)
        return self.process.poll() if self._status is None else self._status

    def wait(self, timeout: float | None = None) -> int:
        return self.process.wait(timeout) if self._status is None else self._status

    def end_in_place(self) -> bool:
        """Ends the attempt, as another worker has failed; returns False if the worker does not listen, and must be signalled."""
        if self._before is not None:  # it has been told already that the one before is over
            self._status, self._ended_at = -signal.SIGTERM, self._before._ended_at
            self.patience, self.is_reserve = self._before.patience, self._before.is_reserve
        elif (
            self.poll() is None and not self._survivors.refuses(self.process.pid) and self._survivors.tell(self.process.pid, {"over": True})
        ):
            self.end(-signal.SIGTERM)
        return self._status is not None

    def end(self, status: int) -> None:
        """Takes the attempt for over, with that status, while its process may live."""
        self._status, self._ended_at = status, time.monotonic()

    def _go_on(self) -> None:
        """Lets the worker begin once it has come back from the attempt before; starts another one if it does not come or cannot stay."""
        if (before := self._before) is None or self._survivors.workers.stopped_by is not None:
            return
        word, is_late = self._survivors.last_word(self.process.pid), time.monotonic() >= before._ended_at + before.patience
        if self.process.poll() is None and word not in (PARKED, LEAVES) and not is_late:
            return
        if self.process.poll() is None and word == PARKED:
            changed = {name: value for name, value in self._environ.items() if before._sent.get(name) != value}
            if self._survivors.tell(self.process.pid, {"environ": changed}, self._streams, anew=True):
                self._before, self._begins_by = None, time.monotonic() + self._survivors.seconds
                return
        elif self.process.poll() is None and word != LEAVES:  # else it has said why
            logger.warning(_LATE_RESERVE if before.is_reserve else _LATE, self.process.pid, before.patience)
        self._replace()

    def _await_arrival(self, until: float) -> None:
        """Starts another worker if this one was stopped and does not take the order to begin; kills one that is stopped after that.

        From its first step on the agent alone watches it.
        """
        word, now, seconds = self._survivors.last_word(self.process.pid), time.monotonic(), self._survivors.seconds
        if word == ARRIVED:
            self._begins_by = None
        elif word != BEGUN:
            if now >= until:
                logger.warning(_LATE, self.process.pid, seconds)
                self._replace()
        elif not _is_stopped(self.process.pid):
            self._stopped_at, self._stopped_for = None, 0.0
        else:
            if self._stopped_at is not None:  # at most half between two looks: this process may have been stopped, too
                self._stopped_for += min(now - self._stopped_at, seconds / 2)
            self._stopped_at = now
            if self._stopped_for >= seconds:
                logger.warning(_STOPPED, self.process.pid, seconds)
                self._survivors.kill(self.process)  # others may have met it

    def _replace(self) -> None:
        self._survivors.kill(self.process)
        self.process, self._before, self._begins_by = self._survivors.new(self._start()), None, None

    @property
    def _sent(self) -> Mapping[str, str]:
        """The environment that the worker has."""
        return self._environ if self._before is None else self._before._sent


class Survivors:
    """The workers of this host that may outlive a failure. For use by the main thread.

    Args:
        seconds: for a worker to come back from an attempt that is over.
        start_seconds: for a worker to come to `gemini_ft.run`; one that is longer in reserve and has not is taken for stuck.
    """

    def __init__(self, workers: Workers, seconds: float, start_seconds: float = math.inf) -> None:
        self.workers, self.seconds, self._start_seconds = workers, seconds, start_seconds
        self.address = f"gemini-in-place-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._channels: dict[int, socket.socket] = {}  # by process id, of those that are inside `gemini_ft.run`
        self._words: dict[int, str] = {}  # the last one of each
        self._refusals: dict[int, str] = {}  # of those that cannot stay, as they have said
        self._attempts: dict[str, Attempt] = {}  # the last one of each place: the number of a worker among those of this host
        self._reserve: dict[str, tuple[object, ...]] = {}  # places whose worker has not had an attempt yet -> what it was started as

    def begin(
        self,
        environ: Mapping[str, str],
        streams: Sequence[int],
        start: Callable[[], Process],
        command: Sequence[str] = (),
        place: str | None = None,
    ) -> Attempt:
        """The next attempt at a place: of the worker that had it before, if that may stay, or of one that is started.

        A worker in reserve has it only if ``command`` and what torch gives its workers by their place on this host are as it was started.

        Args:
            environ: of the attempt.
            streams: its standard streams.
            start: starts another worker.
            command: line of a worker that is started.
            place: its number on this host; None: its local rank.
        """
        self._hear()  # why one in reserve has ended, before another one takes its place
        place = environ["LOCAL_RANK"] if place is None else place
        before = self._attempts.get(place)
        if before is not None and before.process.poll() is not None:
            before = None
        kind = self._reserve.pop(place, None)
        if before is not None and kind is not None:
            if kind == _kind(command, environ):
                age = time.monotonic() - before._ended_at
                before.patience = max(self.seconds, min(age, _ON_ITS_WAY) if age < self._start_seconds else 0.0)  # as another one
                before.end(0)  # it has its time from now on
            else:
                self.kill(before.process)
                before = None
        for other in [other for other in self._reserve if int(other) >= int(environ.get("LOCAL_WORLD_SIZE", len(self._attempts)))]:
            del self._reserve[other]  # no attempt is for it
            self.kill(self._attempts.pop(other).process)
        self._attempts[place] = attempt = Attempt(self, environ, streams, start, before)
        return attempt

    def reserve(
        self, environ: Mapping[str, str], streams: Sequence[int], start: Callable[[], Process | None], command: Sequence[str] = ()
    ) -> bool:
        """Starts a worker that waits for its first attempt at a place, if there has been none there; returns False if there is none now."""
        if (place := environ["LOCAL_RANK"]) in self._attempts:
            return True
        if (process := start()) is None:
            return False
        self._attempts[place] = attempt = Attempt(self, environ, streams, lambda: process, None)
        attempt.end(0)
        attempt.is_reserve = True
        self._reserve[place] = _kind(command, environ)
        return True

    def kill(self, process: Process) -> None:
        self.workers.send(process, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_SECONDS)

    def new(self, process: Process) -> Process:
        """Takes in a process that has just been started, whose number another may have had."""
        self._words.pop(process.pid, None)
        return process

    def signs(self, pid: int) -> list[int]:
        """Descriptors that can be read when a worker has called, or said something."""
        return [self._listener.fileno(), *([self._channels[pid].fileno()] if pid in self._channels else [])]

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
                if uid == os.getuid() and pid in {attempt.process.pid for attempt in self._attempts.values()}:
                    end.setblocking(False)
                    self._channels[pid] = end
                else:  # a process that a worker has started
                    end.close()
        for pid, end in list(self._channels.items()):
            with suppress(BlockingIOError):
                while (received := _received(end)) is not None:
                    if received["word"] == NEVER:
                        self._refusals[pid] = received["why"]
                    else:
                        self._words[pid] = received["word"]
                        if "why" in received:
                            logger.warning(_REFUSAL, pid, received["why"])
                self._channels.pop(pid).close()  # it has left `gemini_ft.run`
                if self._words.get(pid) in (FAILED, PARKED):
                    del self._words[pid]
                self._refusals.pop(pid, None)

    def dismiss(self, pid: int) -> None:
        """Ends a worker whose attempt is over, once it would wait for the next one: the attempt may have taken the launcher's signal."""
        self._hear()
        if (end := self._channels.pop(pid, None)) is not None:
            end.close()

    def close(self) -> None:
        """Dismisses all workers, now or when they call."""
        for end in (self._listener, *self._channels.values()):
            end.close()


def _kind(command: Sequence[str], environ: Mapping[str, str]) -> tuple[object, ...]:
    """The parts of a start that torch may make different for each worker (``${local_rank}``, --numa-binding, --virtual-local-rank)."""
    return (*command, *map(environ.get, ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")))


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process that this one has started."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _received(end: socket.socket) -> dict[str, Any] | None:
    try:
        received = channel.receive(end)
    except ConnectionError:
        return None
    return received[0] if received is not None else None


@contextmanager
def surviving(workers: Workers) -> Iterator[Survivors | None]:
    """Inside, workers may outlive a failure, if that was asked for."""
    config = load_config()
    if config.restart != "in_place":
        yield None
        return
    survivors = Survivors(workers, config.in_place_timeout, config.start_timeout or math.inf)
    os.environ[IN_PLACE] = f"{os.getpid()}:{survivors.address}"
    try:
        yield survivors
    finally:
        del os.environ[IN_PLACE]
        survivors.close()
