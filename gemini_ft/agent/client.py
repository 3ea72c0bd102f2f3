"""A worker's end of the socket to its host's agent."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from gemini_ft import errors
from gemini_ft.agent import lifecycle
from gemini_ft.errors import AgentError, AgentTimeoutError, GeminiError, PeerError
from gemini_ft.messages import (
    Aborted,
    Collect,
    Committed,
    Custody,
    Dispatch,
    Failed,
    Granted,
    Hello,
    Inventory,
    Mapped,
    Message,
    Notice,
    Opened,
    Paced,
    Reserved,
    Staged,
    Travelled,
    Verified,
    Welcome,
    pack,
    unpack,
)
from gemini_ft.transport.wire import frame_length

M = TypeVar("M", bound=Message)
_log = logging.getLogger("gemini_ft")
_ANSWERS = (Welcome, Inventory, Opened, Reserved, Mapped, Verified, Staged)
_CALLS = ("hello", "get_inventory", "open_session", "reserve", "map", "verify", "stage")  # kinds that get an answer
_OFFERED = 64 * 1024  # bytes; Linux reports a Unix socket as writable while three quarters of its buffer, 156 KiB by default, are free
_EVENTS = (Granted, Committed, Aborted, Notice, Paced, Travelled, Dispatch, Collect)


def as_error(failed: Failed) -> GeminiError:
    """The exception a refusal stands for."""
    kind = getattr(errors, failed.error, AgentError)
    return kind(failed.text) if isinstance(kind, type) and issubclass(kind, GeminiError) else AgentError(failed.text)


class AgentClient:
    """Talks to the agent; a thread of its own listens.

    Args:
        run: run id.
        host: host id.
        hello: who this worker is.
        on_event: called on the listening thread with Granted, Committed, Aborted, Notice and fatal Failed messages.
        timeout: seconds to wait for an answer.

    Raises:
        AgentTimeoutError: the agent cannot be started or does not answer.
        GeminiError: the agent refused; whatever class it named.
    """

    def __init__(self, run: str, host: str, hello: Hello, on_event: Callable[[Message], None], timeout: float) -> None:
        self._run, self._host, self._on_event, self._timeout = run, host, on_event, timeout
        self._socket = lifecycle.connect(run, host)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout), int(timeout % 1 * 1e6)))
        self._answers: queue.SimpleQueue[tuple[Message, list[int]] | None] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        self._call_lock = threading.Lock()
        self.lost = False
        self.custody: dict[str, int] = {}  # replicas kept safe for the agent: key -> descriptor
        self._thread = threading.Thread(target=self._listen, name="gemini-agent-client", daemon=True)
        self._thread.start()
        try:
            self.welcome = self.call(hello, Welcome)[0]
        except GeminiError:
            self.close()
            raise
        _clients.add(self)

    def tell(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send without waiting for an answer.

        Raises:
            AgentError: the agent is gone.
        """
        frame = pack(message)
        if self.lost:
            raise self._gone("its connection is closed")
        try:
            with self._send_lock:
                sent = socket.send_fds(self._socket, [frame], list(fds)) if fds else 0
                self._socket.sendall(memoryview(frame)[sent:])
        except BlockingIOError:
            self._hang_up()  # a part of the message may be on its way: nothing can follow it
            raise self._gone(f"it took nothing in for {self._timeout:g} s") from None
        except OSError as error:
            self.lost = True
            raise self._gone(str(error)) from None

    def offer(self, message: Message) -> bool:
        """Send without ever waiting, what nobody needs: whether it has been sent, or the agent is behind with reading, or gone."""
        frame = pack(message)
        if self.lost or len(frame) > _OFFERED or not self._send_lock.acquire(blocking=False):
            return False
        try:
            writable = select.poll()
            writable.register(self._socket, select.POLLOUT)
            if writable.poll(0) != [(self._socket.fileno(), select.POLLOUT)]:
                return False
            self._socket.sendall(frame)
        except OSError:
            self.lost = True
            return False
        finally:
            self._send_lock.release()
        return True

    def call(self, message: Message, answer: type[M], timeout: float | None = None) -> tuple[M, list[int]]:
        """Send, and wait ``timeout`` seconds (default: the client's) for the answer and the descriptors beside it."""
        seconds = self._timeout if timeout is None else timeout
        with self._call_lock:
            self.tell(message)
            try:
                got = self._answers.get(timeout=seconds)
            except queue.Empty:
                raise AgentTimeoutError(
                    f"the agent of run {self._run!r} on host {self._host!r} did not answer {message.kind!r} "
                    f"within {seconds:g} s; see {self.log}"
                ) from None
        if got is None:
            self._answers.put(None)
            raise AgentError(f"the agent of run {self._run!r} on host {self._host!r} ended; see {self.log}")
        reply, reply_fds = got
        if isinstance(reply, Failed):
            raise as_error(reply)
        if not isinstance(reply, answer):
            raise AgentError(f"the agent answered {message.kind!r} with {reply.kind!r}")
        return reply, reply_fds

    @property
    def log(self) -> str:
        """Where the agent writes."""
        return str(lifecycle.log_path(self._run, self._host))

    def _gone(self, why: str) -> AgentError:
        return AgentError(f"the agent of run {self._run!r} on host {self._host!r} is gone ({why}); see {self.log}")

    def _hang_up(self) -> None:
        self.lost = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Close without a word, in a forked child: the connection, and what is kept for the agent, are the parent's."""
        self._socket.close()
        for fd in self.custody.values():
            os.close(fd)

    def close(self) -> None:
        _clients.discard(self)
        self._hang_up()
        self._socket.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        for fd in self.custody.values():
            os.close(fd)
        self.custody.clear()

    # -- the listening thread

    def _listen(self) -> None:
        lifecycle.yield_to_training()
        inbox, fds = bytearray(), list[int]()
        try:
            while True:
                data, more, _, _ = socket.recv_fds(self._socket, 256 * 1024, 250, socket.MSG_CMSG_CLOEXEC)
                if not data:
                    break
                inbox += data
                fds += more
                while len(inbox) >= 4 and len(inbox) >= 4 + (length := frame_length(inbox[:4])):
                    message = unpack(inbox[4 : 4 + length])
                    del inbox[: 4 + length]
                    fds = self._route(message, fds)
        except (OSError, PeerError) as error:
            if not self.lost:
                _log.warning("%s", self._gone(str(error)))
        self._hang_up()
        self._answers.put(None)

    def _route(self, message: Message, fds: list[int]) -> list[int]:
        """Hand a message on; returns the descriptors that belong to a later one."""
        if isinstance(message, Custody):
            if (old := self.custody.pop(message.key, None)) is not None:
                os.close(old)
            if not message.drop:
                self.custody[message.key] = fds.pop(0)
        elif isinstance(message, Reserved):
            mine, fds = fds[: len(message.slots)], fds[len(message.slots) :]
            self._answers.put((message, mine))
        elif isinstance(message, Mapped):
            mine, fds = fds[:1], fds[1:]
            self._answers.put((message, mine))
        elif isinstance(message, _EVENTS):
            self._on_event(message)
        elif isinstance(message, _ANSWERS) or (isinstance(message, Failed) and message.reply_to in _CALLS):
            self._answers.put((message, []))
        elif isinstance(message, Failed):
            self._on_event(message)
        else:
            raise PeerError(f"the agent sent {message.kind!r}")
        return fds


_clients: weakref.WeakSet[AgentClient] = weakref.WeakSet()


def _forget_all() -> None:
    for client in _clients:
        client.forget()


os.register_at_fork(after_in_child=_forget_all)  # a data loader's worker may outlive us, and must keep nothing open
