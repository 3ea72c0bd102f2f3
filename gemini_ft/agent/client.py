"""A worker's end of the socket to its host's agent."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from gemini_ft import errors
from gemini_ft.agent import lifecycle, watchdog
from gemini_ft.core.diligence import Diligence
from gemini_ft.errors import AgentError, AgentTimeoutError, GeminiError, PeerError
from gemini_ft.hosts import is_readable
from gemini_ft.wire.frames import FrameBuffer, receive_fds
from gemini_ft.wire.messages import Answer, Call, Failed, check_answer, kind_of, pack
from gemini_ft.wire.worker_messages import Custody, Hello, Mapped, Ping, Pong, Reserved, ToAgent, ToWorker, Welcome, to_worker

M = TypeVar("M", bound=Answer)
_log = logging.getLogger("gemini_ft")
_OFFERED = 64 * 1024  # bytes; Linux reports a Unix socket as writable while three quarters of its buffer, 156 KiB by default, are free


def as_error(failed: Failed) -> GeminiError:
    kind = getattr(errors, failed.error, AgentError)
    return kind(failed.text) if isinstance(kind, type) and issubclass(kind, GeminiError) else AgentError(failed.text)


class AgentClient:
    """A connection to the agent; its own thread listens, and replaces an agent that is silent for ``hello.agent_timeout`` seconds.

    Args:
        on_event: called on the listening thread with whatever is no answer.
        timeout: seconds in which a message must be sent, and its answer must come.

    Raises AgentTimeoutError: the agent cannot be started or does not answer. GeminiError: the agent refused; whatever class it named.
    """

    def __init__(self, run: str, host: str, hello: Hello, on_event: Callable[[ToWorker], None], timeout: float) -> None:
        self._run, self._host, self.on_event, self._timeout = run, host, on_event, timeout
        self.sock = watchdog.connect(run, host, hello.agent_timeout)
        self._agent, self._pulse = lifecycle.AgentProcess.of(self.sock), watchdog.Pulse(timeout=hello.agent_timeout)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, lifecycle.timeval(timeout))
        self._calls: dict[int, queue.SimpleQueue[tuple[Answer, list[int]] | None]] = {}  # number -> where its answer is waited for
        self._numbers = itertools.count(1)
        self._calls_lock = threading.Lock()
        self._send_lock = threading.Lock()
        self.late_answers = 0  # answers that came too late, and were dropped
        self._ended = False  # no answer can come any more
        self.lost = False
        self.custody: dict[str, int] = {}  # replicas kept safe for the agent: key -> descriptor
        self._thread = threading.Thread(target=self._listen, name="gemini-agent-client", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self.sock.close()
            self._agent.close()
            raise AgentError(f"no thread can be started that listens to the agent ({error}); see `ulimit -u` and pids.max") from None
        try:
            self.welcome = self.call(hello, Welcome)[0]
        except GeminiError:
            self.close()
            raise
        _clients.add(self)

    def tell(self, message: ToAgent | Call, fds: Sequence[int] = ()) -> None:
        """Sends a message without waiting for an answer. Raises AgentError: the agent is gone."""
        frame = pack(message)
        if self.lost:
            raise self._gone("its connection is closed")
        try:
            with self._send_lock:
                sent = socket.send_fds(self.sock, [frame], list(fds)) if fds else 0
                self.sock.sendall(memoryview(frame)[sent:])
        except BlockingIOError:
            self._hang_up()  # a part of the message may be on its way: nothing can follow it
            raise self._gone(f"it took nothing in for {self._timeout:g} s") from None
        except OSError as error:
            self.lost = True
            raise self._gone(str(error)) from None

    def offer(self, message: ToAgent) -> bool:
        """Sends a message that no one needs, without ever waiting; False if the agent is slow to read, or gone."""
        frame = pack(message)
        if self.lost or len(frame) > _OFFERED or not self._send_lock.acquire(blocking=False):
            return False
        try:
            writable = select.poll()
            writable.register(self.sock, select.POLLOUT)
            if writable.poll(0) != [(self.sock.fileno(), select.POLLOUT)]:
                return False
            self.sock.sendall(frame)
        except OSError:
            self.lost = True
            return False
        finally:
            self._send_lock.release()
        return True

    def call(self, message: Call, answer: type[M], timeout: float | None = None) -> tuple[M, list[int]]:
        """Sends a message, and waits ``timeout`` seconds (default: the client's) for the answer and the descriptors beside it.

        Raises:
            AgentTimeoutError: there is none; should it come later, it is dropped.
            PeerError: it speaks of another shard.
            GeminiError: the agent is gone, or refused; whatever class it named.
        """
        seconds = self._timeout if timeout is None else timeout
        message = message.model_copy(update={"call": next(self._numbers)})
        got = self._await_answer(message, seconds)
        if got is None:
            raise AgentError(f"the agent of run {self._run!r} on host {self._host!r} ended; see {self.log}")
        reply, reply_fds = got
        if isinstance(reply, Failed):
            raise as_error(reply)
        try:
            if not isinstance(reply, answer):
                raise AgentError(f"the agent answered {kind_of(message)!r} with {kind_of(reply)!r}")
            check_answer(message, reply)
        except GeminiError:
            _close_all(reply_fds)
            raise
        return reply, reply_fds

    def _await_answer(self, message: Call, seconds: float) -> tuple[Answer, list[int]] | None:
        answers: queue.SimpleQueue[tuple[Answer, list[int]] | None] = queue.SimpleQueue()
        with self._calls_lock:
            if self._ended:
                return None
            self._calls[message.call] = answers
        try:
            self.tell(message)
            return answers.get(timeout=seconds)
        except queue.Empty:
            text = f"the agent of run {self._run!r} on host {self._host!r} did not answer {kind_of(message)!r} within {seconds:g} s"
            raise AgentTimeoutError(f"{text}; see {self.log}") from None
        finally:
            with self._calls_lock:
                self._calls.pop(message.call, None)
            while not answers.empty():  # it came when the patience ended
                self._drop(answers.get())

    def _answered(self, message: Answer, fds: list[int]) -> None:
        with self._calls_lock:
            waiting = self._calls.pop(message.call, None)
            if waiting is not None:
                waiting.put((message, fds))
                return
        self._drop((message, fds))

    def _drop(self, late: tuple[Answer, list[int]] | None) -> None:
        if late is not None:
            self.late_answers += 1
            _close_all(late[1])
            _log.info("the agent's answer %r came too late and is dropped", kind_of(late[0]))

    @property
    def log(self) -> str:
        """The path of the agent's log."""
        return str(lifecycle.log_path(self._run, self._host))

    def _gone(self, why: str) -> AgentError:
        return AgentError(f"the agent of run {self._run!r} on host {self._host!r} is gone ({why}); see {self.log}")

    def judge(self, diligence: Diligence) -> None:
        """Looks at the agent while an answer is waited for; one that is too slow is replaced, and this connection is lost then."""
        if self.lost or is_readable(self.sock.fileno(), 0.0):
            return  # the answer may be there, and it is this process that is slow
        why = f"nothing was committed for {diligence.patience:g} s, and most of the time it owed answers and did not work on them"
        if diligence.look(time.monotonic(), self._agent.work) and watchdog.replace(self._run, self._host, self._agent, why):
            self._hang_up()

    def _hang_up(self) -> None:
        self.lost = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Closes without a message, in a forked child: the connection, and all that is kept for the agent, are the parent's."""
        self.sock.close()
        for fd in self.custody.values():
            os.close(fd)

    def close(self) -> None:
        _clients.discard(self)
        self._hang_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
            self._agent.close()
        self.sock.close()
        for fd in self.custody.values():
            os.close(fd)
        self.custody.clear()

    # -- the listening thread

    def _listen(self) -> None:
        lifecycle.yield_to_training()
        frames, fds, buffer = FrameBuffer(), list[int](), memoryview(bytearray(256 * 1024))
        try:
            while self._await_data():
                data, more, flags = receive_fds(self.sock, buffer, 250)
                if not data:
                    break
                fds += more
                if flags & socket.MSG_CTRUNC:
                    raise PeerError("descriptors of slots were lost: this process has no free ones left (ulimit -n)")
                for body in frames.bodies(data):
                    fds = self._route(to_worker.unpack(body), fds)
        except (OSError, PeerError) as error:
            if not self.lost:
                _log.warning("%s", self._gone(str(error)))
        finally:  # whatever ends this thread, no call may wait for it, or believe that the agent is heard
            _close_all(fds)
            self._hang_up()
            with self._calls_lock:
                self._ended = True
                for waiting in self._calls.values():
                    waiting.put(None)

    def _await_data(self) -> bool:
        """Waits for something to read; False: nothing will come, because the agent hung and has been replaced."""
        readable = select.poll()
        readable.register(self.sock.fileno(), select.POLLIN)
        while not readable.poll(self._pulse.tick and 1000 * self._pulse.tick):
            if self._pulse.over:
                replaced = watchdog.replace(self._run, self._host, self._agent, f"it did not answer for {self._pulse.timeout:g} s")
                self._pulse.heard()  # if it cannot be killed: after the same time once more
                if replaced:
                    return False
            self._pulse.nothing()
            self.offer(Ping())
        self._pulse.heard()
        return True

    def _route(self, message: ToWorker, fds: list[int]) -> list[int]:
        """Hands a message on; returns the descriptors that belong to a later one."""
        if isinstance(message, Custody):
            if (old := self.custody.pop(message.key, None)) is not None:
                os.close(old)
            if not message.drop:
                self.custody[message.key] = fds.pop(0)
        elif isinstance(message, Failed) and not message.call:
            self.on_event(message)
        elif isinstance(message, Answer):
            count = len(message.slots) if isinstance(message, Reserved) else isinstance(message, Mapped)
            mine, fds = fds[:count], fds[count:]
            self._answered(message, mine)
        elif not isinstance(message, Pong):  # it only shows that the agent lives
            self.on_event(message)
        return fds


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


_clients: weakref.WeakSet[AgentClient] = weakref.WeakSet()


def _forget_all() -> None:
    for client in _clients:
        client.forget()


os.register_at_fork(after_in_child=_forget_all)  # a data loader's worker may outlive us, and must keep nothing open
