"""Starts the launcher's workers: forked from a server that has imported what they need, or cold."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from torch.distributed.elastic.multiprocessing import api as torch_api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from gemini_ft import failpoints
from gemini_ft.config import load_config
from gemini_ft.errors import GeminiError
from gemini_ft.hosts import is_readable
from gemini_ft.launch import forkserver
from gemini_ft.launch import reserve as in_reserve
from gemini_ft.launch.grace import Process, Workers
from gemini_ft.launch.in_place import Attempt, Survivors, surviving
from gemini_ft.launch.replaced import replaced
from gemini_ft.launch.script import cold_command, starter
from gemini_ft.wire import channel as messages

logger = logging.getLogger(__name__)

ColdStart = Callable[[tuple[str, ...]], tuple[str, ...]]  # makes of Python's command line for a program that of a cold worker

_READY_SECONDS = 600.0  # for the imports, which a shared file system can make slow
ANSWER_SECONDS = 30.0  # for a fork, which takes milliseconds, unless the host swaps
_PR_SET_CHILD_SUBREAPER = 36
_STREAMS = (0, 1, 2)  # of this process
_END_SECONDS = 15.0  # for a server to end when its launcher is done with it


class ForkServerError(GeminiError):
    """The fork server cannot start this worker; those it has started live on."""


class ForkServer:
    """A :mod:`gemini_ft.launch.forkserver` process that belongs to this one. For use by the main thread."""

    def __init__(
        self,
        program: Sequence[str],  # script and arguments, or ``-m``, module name and arguments
        modules: Sequence[str],  # what it imports
        workers: Workers,  # take in those that it starts
        early: Mapping[str, str | None] | None = None,
        copy: Path | None = None,  # of the script, which has come through a pipe
    ) -> None:
        """Starts the server, which imports in the background until :meth:`wait_ready`.

        ``early``: variables that are set during these imports, as the script sets them before its own; None removes one.
        """
        self.workers, self._copy = workers, copy
        environ = {name: value for name, value in {**os.environ, **(early or {})}.items() if value is not None}
        self.channel, theirs = messages.pair()
        with theirs:
            # Script and arguments are there for ps, which shows this command line for the workers too.
            command = [sys.executable, "-u", *starter("gemini_ft.launch.forkserver"), str(theirs.fileno()), ",".join(modules), *program]
            self._process = subprocess.Popen(command, env=environ, pass_fds=[theirs.fileno()], start_new_session=True)
        self._refusal: str | None = None
        self._asked = 0  # number of the last question; the server answers 0 by itself, when it is ready
        self._answered = -1
        self._slow = False  # an answer has not come in time
        self.lost = False  # never serves again after that

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> str | None:
        """Waits for the imports; returns why no worker must be forked after them, or None if all is well.

        Raises ForkServerError: the server has died or takes longer than 10 minutes.
        """
        if self._answered < 0:
            self._refusal = self._answer(0.0 if self._slow else _READY_SECONDS)["refused"]
        return self._refusal

    @property
    def is_ready(self) -> bool:
        """Whether the imports are over, well or not, or no longer waited for."""
        return self.lost or self._slow or self._answered >= 0 or is_readable(self.channel.fileno())

    def fork(self, program: Sequence[str], environ: Mapping[str, str], streams: Sequence[int]) -> Process:
        """Starts a worker that runs ``program`` with ``streams`` as its standard input, output and error.

        Raises ForkServerError: the server has died, has not answered in time, or could not fork. The worker will not run then, however late
        the answer comes.
        """
        if self._answered < self._asked:
            self._answer(0.0)  # to an earlier question, which is not waited for any longer
        gun, trigger = (os.fdopen(end, mode, 0) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
        with trigger:
            with _handed_over():
                with gun:
                    copy = str(self._copy) if self._copy else None
                    question = {"fork": list(program), "copy": copy, "environ": dict(environ), "parent": os.getpid()}
                    self._ask(question, [*streams, gun.fileno()])
                answer = self._answer(ANSWER_SECONDS)
            if answer["failed"] is not None:
                raise ForkServerError(f"the fork server (pid {self.pid}) cannot fork: {answer['failed']}")
            return self._begin(answer["pid"], trigger)

    def _begin(self, pid: int, trigger: IO[bytes]) -> Process:
        """Lets the worker run, unless the job has been told to end in the meantime."""
        with self.workers.undisturbed():
            try:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                raise ForkServerError("the kernel has not handed its worker over to this process") from None
            process = self.workers.adopt(pid, partial(_reap, pid))
            if self.workers.stopped_by is None:
                with contextlib.suppress(BrokenPipeError):  # it has been killed already
                    trigger.write(forkserver.GO)
        return process

    def close(self) -> None:
        """Ends the server, which kills the leftovers of its workers."""
        self.channel.close()
        if self._answered < 0:
            self._process.kill()  # in the midst of its imports
        self._end(_END_SECONDS)

    def _ask(self, question: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        with self.workers.undisturbed():
            try:
                messages.send(self.channel, {**question, "number": self._asked + 1}, descriptors)
            except ConnectionError:
                raise self._lost() from None
            except OSError as error:
                raise ForkServerError(f"the fork server (pid {self.pid}) cannot be asked: {error}") from error
            self._asked += 1

    def _answer(self, seconds: float) -> dict[str, Any]:
        """The answer to the last question. Answers to earlier ones, which came too late, are dropped."""
        end = time.monotonic() + seconds
        waiting = select.poll()
        waiting.register(self.channel, select.POLLIN)
        while waiting.poll(max(0.0, end - time.monotonic()) * 1000):
            with self.workers.undisturbed():
                answer = self._received()
                self._answered = answer["number"]
            if self._answered == self._asked:
                return answer
        self._slow = True
        raise ForkServerError(
            f"the fork server (pid {self.pid}) is slow: it has not answered {f'within {seconds:g} s' if seconds else 'yet'}"
        )

    def _received(self) -> dict[str, Any]:
        try:
            received = messages.receive(self.channel, socket.MSG_DONTWAIT)
        except ConnectionError:
            raise self._lost() from None
        if received is None:
            raise self._lost()
        return received[0]

    def _lost(self) -> ForkServerError:
        self.lost = True
        self.channel.close()
        return ForkServerError(f"the fork server (pid {self.pid}) no longer serves: it has died with status {self._end(1.0)}")

    def _end(self, seconds: float) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _reap(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


@contextlib.contextmanager
def _handed_over() -> Iterator[None]:
    """Inside, this process becomes the parent of what its descendants leave behind: of a worker, whose forking process ends."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)  # orphans of the user's processes are not for this process to wait for


class WarmStart:
    """The source of forked workers: a fork server, a new one if that has died, or none once it has refused."""

    def __init__(self, start_server: Callable[[], ForkServer]) -> None:
        self._start_server = start_server
        self._server: ForkServer | None = self._start_server()

    def is_ready(self) -> bool:
        """Whether a worker can be started without waiting for imports."""
        return self._server is None or self._server.is_ready

    def start_worker(self, program: Sequence[str], environ: Mapping[str, str], streams: Sequence[int]) -> Process | None:
        """A forked worker, or None if it must be started cold; then the log says why."""
        if self._server is not None and self._server.lost:
            logger.warning("the fork server has died; starting a new one")
            self._server = self._start_server()
        if self._server is None:
            return None
        try:
            if refusal := self._server.wait_ready():
                logger.warning("starting workers cold: %s", refusal)
                self.close()
                return None
            return self._server.fork(program, environ, streams)
        except ForkServerError as error:
            logger.warning("starting a worker cold: %s", error)
            return None

    def start_at_once(self, program: Sequence[str], environ: Mapping[str, str], streams: Sequence[int]) -> Process | None:
        """A forked worker, or None if there is no server that could fork it now: none is started, and no import waited for."""
        if self._server is None or self._server.lost or not self._server.is_ready:
            return None
        return self.start_worker(program, environ, streams)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class StandBy:
    """Readiness of this host's workers while it waits as a spare.

    Args:
        warm: their source; None: they are started cold.
        survivors: take in workers in reserve.
        program: script and arguments, or ``-m``, module name and arguments.
        reserve: how many of them there are to be.
    """

    def __init__(self, warm: WarmStart | None, survivors: Survivors | None, program: Sequence[str], reserve: int) -> None:
        self._warm, self._survivors, self._program, self._reserve = warm, survivors, program, reserve

    def is_ready(self) -> bool:
        """Whether a worker can be started without waiting for imports."""
        return self._warm is None or self._warm.is_ready()

    def prepare(self) -> None:
        """Starts the workers in reserve, as many as can be forked now. They write to this launcher's output until they have a rank."""
        if self._warm is None or self._survivors is None:
            return
        for place in range(self._reserve):
            environ = {**os.environ, **in_reserve.variables(place, self._reserve)}
            start = partial(_watched, partial(self._warm.start_at_once, self._program, environ, _STREAMS))
            if not self._survivors.reserve(environ, _STREAMS, start, (sys.executable, "-u", *self._program)):
                return


def _watched(start: Callable[[], Process | None]) -> Process | None:
    """Starts a worker in reserve, and has a thread look at its end, which nothing else does: then what it has started ends, too."""
    if (process := start()) is not None and (signs := process.signs):
        threading.Thread(target=_look_at_end, args=(process, signs), name="gemini-reserve", daemon=True).start()
    return process


def _look_at_end(process: Process, signs: Sequence[int]) -> None:
    waiting = select.poll()
    for sign in signs:
        waiting.register(sign, select.POLLIN)
    waiting.poll()
    process.poll()


class WorkerHandler(SubprocessHandler):
    """Torch's handler of a worker process, with a forked one inside where that is possible."""

    def __init__(
        self, workers: Workers, warm: WarmStart | None, cold_start: ColdStart, survivors: Survivors | None, **arguments: Any
    ) -> None:
        self.workers, self._warm, self._cold, self._survivors = workers, warm, cold_start, survivors
        super().__init__(**arguments)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        failpoints.reached("launcher_starts")
        streams = [0, _descriptor(self._stdout, 1), _descriptor(self._stderr, 2)]
        start = partial(self._started, args, env, streams)
        self.workers.go_on()
        return start() if self._survivors is None else self._survivors.begin(env, streams, start, args, str(self.local_rank_id))

    def _started(self, args: tuple[str, ...], env: dict[str, str], streams: Sequence[int]) -> Process:
        if args[:2] == (sys.executable, "-u"):  # else it is wrapped in something, such as numactl
            worker = self._warm.start_worker(args[2:], env, streams) if self._warm is not None else None
            if worker is not None:
                return worker
            args = self._cold(args)
        with self.workers.undisturbed():
            process = super()._popen(args, env)
            return self.workers.adopt(process.pid, process.poll)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Closes as torch's own does, but does not signal a worker again that has had the signal."""
        process: Any = self.proc  # see _popen
        signum = death_sig or signal.SIGTERM
        if not isinstance(process, Attempt):
            self.workers.send(process, signum)
        elif signum != signal.SIGTERM or self.workers.stopped_by is not None or not process.end_in_place():
            self.workers.send(process.process, signum)
        for file in (self._stdout, self._stderr):
            if file:
                file.close()


def _descriptor(redirect: IO[str] | None, default: int) -> int:
    return redirect.fileno() if redirect else default


@contextlib.contextmanager
def forked_workers(
    program: Sequence[str],
    modules: Sequence[str],
    early: Mapping[str, str | None] | None = None,
    copy: Path | None = None,
    reserve: int = 0,
) -> Iterator[StandBy]:
    """Inside, torch's launcher forks the workers of ``program`` from a server that has imported ``modules``; see `ForkServer`.

    ``reserve``: workers that this host has in reserve while it waits as a spare.
    """
    workers = Workers()
    warm = WarmStart(partial(ForkServer, program, modules, workers, early, copy))
    try:
        with _started_by(workers, warm, partial(cold_command, copy=copy)) as survivors:
            yield StandBy(warm, survivors, program, reserve if survivors is not None else 0)
    finally:
        warm.close()


@contextlib.contextmanager
def cold_workers(copy: Path | None = None, by_python: bool = False) -> Iterator[StandBy]:
    """Inside, torch's launcher starts workers from nothing.

    Args:
        copy: of the script, which has come through a pipe.
        by_python: whether Python itself runs the program, and not `gemini_ft.launch.script`, which knows scripts and modules only.
    """
    if load_config().spare == "warm":
        logger.warning("spare='warm' changes nothing here: workers in reserve are forked, and those of this command are started cold")
    with _started_by(Workers(), None, tuple if by_python else partial(cold_command, copy=copy)):
        yield StandBy(None, None, (), 0)


@contextlib.contextmanager
def _started_by(workers: Workers, warm: WarmStart | None, cold_start: ColdStart) -> Iterator[Survivors | None]:
    """Replaces torch's function that starts a worker process; gives those that may outlive a failure, if they may."""
    with workers.signalled(), surviving(workers) as survivors:
        handler = partial(WorkerHandler, workers, warm, cold_start, survivors)
        with replaced(torch_api, get_subprocess_handler=handler):
            try:
                yield survivors
                workers.go_on()
            finally:
                if survivors is not None:
                    survivors.close()  # a worker that waits for its next attempt ends, though the one before has taken a signal
                workers.stop()
