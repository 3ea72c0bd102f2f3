"""The Unix socket that workers of this host talk to: messages, descriptors, and proof of life.

The socket is abstract (nothing to clean up; the first agent to bind it wins). A peer of another uid is turned away.
A worker's death is known by its pidfd: an orphaned data loader may keep its socket open.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import traceback
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from gemini_ft import errors
from gemini_ft.agent import lifecycle
from gemini_ft.agent.tasks import RateLimitedLog
from gemini_ft.core.versions import Incarnation
from gemini_ft.errors import AgentError, GeminiError, PeerError
from gemini_ft.wire.frames import FrameBuffer, receive_fds
from gemini_ft.wire.messages import Failed, kind_of, pack
from gemini_ft.wire.private import credentials
from gemini_ft.wire.worker_messages import Adopt, Launch, ToAgent, ToWorker, Watch, to_agent

if TYPE_CHECKING:
    from gemini_ft.agent.requests import Requests

_BUFFER = memoryview(bytearray(256 * 1024))  # of the event loop, which reads from one worker at a time
_MAX_FDS = 250
_PAUSE = 1.0  # seconds
_LONG = 64 * 1024  # bytes of a message


@lru_cache(maxsize=1)
def unpack_long(body: bytes) -> ToAgent:
    """Checks a long message. That which opens a session says it of every rank, and comes from each rank of this host alike."""
    return to_agent.unpack(body)


class WorkerConnection:
    """The agent's end of one worker's socket."""

    def __init__(self, handler: Requests, sock: socket.socket, pid: int) -> None:
        self.rank = -1
        self.stream = ""
        self.incarnation: Incarnation | None = None
        self.launch: Launch | None = None
        self.pid = pid
        self.stood = 0.0  # seconds without progress, if this agent kills it for that
        self.parting = ""  # how it has ended other than by its death: "goodbye", "failed" in place, or "hang" (this agent kills it)
        self._handler, self._socket = handler, sock
        self._loop = asyncio.get_running_loop()
        self._frames = FrameBuffer()
        self._fds: list[int] = []
        self._outbox: deque[tuple[bytearray, list[int]]] = deque()
        self._pidfd = os.pidfd_open(pid)
        self._alive = True
        self._connected = True
        self._loop.add_reader(sock, self._readable)
        self._loop.add_reader(self._pidfd, self._died)

    @property
    def alive(self) -> bool:
        return self._alive

    def send(self, message: ToWorker, fds: Sequence[int] = ()) -> None:
        """Queues a message; descriptors are duplicated now, so that the caller may close its own.

        Raises AgentError: this process has no free descriptors left.
        """
        if self._connected:
            try:
                copies = _duplicates(fds)
            except AgentError as error:
                self._handler.log(f"worker {self.pid}: {error}")
                raise
            self._outbox.append((bytearray(pack(message)), copies))
            self._writable()

    def refuse(self, message: ToAgent, error: GeminiError) -> None:
        """Answers ``message`` with an error: with its class, or the nearest base that the worker knows."""
        kind = next(kind.__name__ for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind)
        self.send(Failed(call=getattr(message, "call", 0), error=kind, text=str(error), fatal=True))

    def go_on(self, *, writes_stacks: bool) -> None:
        """Lets a stopped worker go on; ``writes_stacks``: a worker, stopped or not, also writes its threads' stacks."""
        with contextlib.suppress(OSError):  # it is dead already
            for number in (*([lifecycle.STACKS_SIGNAL] if writes_stacks else []), signal.SIGCONT):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Sends SIGKILL, without the risk of hitting another process that got the same pid."""
        with contextlib.suppress(OSError):  # it is dead already, and its pidfd closed
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end(self, how: str) -> None:
        """Takes the worker for gone, though its process lives: its attempt is over, and has let go of all slots."""
        self._alive, self.parting = False, how

    def close(self) -> None:
        self._disconnect()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _died(self) -> None:
        self._alive = False
        self._readable()  # messages that it sent before it died still count
        self.close()
        self._handler.on_worker_dead(self)

    def _broken(self) -> None:
        self._readable()  # what the worker said before it hung up still counts: its goodbye, perhaps
        self._hang_up()

    def _hang_up(self) -> None:
        """Ends the connection and tells the office, whichever side ends it: the silence would look like a hang."""
        if self._connected:
            self._disconnect()
            self._handler.on_worker_hung_up(self)

    def _disconnect(self) -> None:
        if self._connected:
            self._connected = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            for fd in [*self._fds, *(fd for _, fds in self._outbox for fd in fds)]:
                os.close(fd)
            self._fds, self._outbox = [], deque()

    def _readable(self) -> None:
        while self._connected:
            try:
                data, fds, flags = receive_fds(self._socket, _BUFFER, _MAX_FDS)
            except BlockingIOError:
                return
            except OSError:
                data, fds, flags = _BUFFER[:0], [], 0
            self._fds += fds
            if flags & socket.MSG_CTRUNC:  # the kernel drops descriptors that do not fit: later messages would not find theirs
                self._handler.log(f"worker {self.pid}: descriptors of slots were lost, because this agent has no free ones (ulimit -Hn)")
                data = _BUFFER[:0]
            if not data:
                self._hang_up()
                return
            self._parse(data)

    def _parse(self, data: memoryview) -> None:
        try:
            for body in self._frames.bodies(data):
                self._dispatch(unpack_long(body) if len(body) > _LONG else to_agent.unpack(body))
        except PeerError as error:
            self._handler.log(f"worker {self.pid}: {error}")
            self._hang_up()

    def _dispatch(self, message: ToAgent) -> None:
        count = message.count if isinstance(message, Adopt | Watch) else 0  # no other message has descriptors beside it
        fds, self._fds = self._fds[:count], self._fds[count:]
        try:
            self._handler.on_worker_message(self, message, fds)
        except GeminiError as error:
            self.refuse(message, error)
        except Exception as error:  # a fault of ours: the worker must not wait for an answer that will not come
            self._handler.log("".join(traceback.format_exception(error)))
            self.refuse(message, AgentError(f"the agent failed at {kind_of(message)!r}: {error!r}; see its log"))

    def _writable(self) -> None:
        self._loop.remove_writer(self._socket)
        while self._outbox:
            frame, fds = self._outbox[0]
            try:
                sent = socket.send_fds(self._socket, [frame], fds) if fds else self._socket.send(frame)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._writable)
                return
            except OSError:
                self._loop.call_soon(self._broken)  # not in the middle of the office's work
                return
            for fd in fds:
                os.close(fd)
            fds.clear()
            del frame[:sent]
            if not frame:
                self._outbox.popleft()


def _duplicates(fds: Sequence[int]) -> list[int]:
    """Duplicates all descriptors, or none."""
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError as error:
        for copy in copies:
            os.close(copy)
        raise AgentError(f"the agent cannot hand out {len(fds)} descriptors ({error.strerror}); raise its limit (ulimit -Hn)") from None
    return copies


class WorkerListener:
    """The listening socket."""

    def __init__(self, handler: Requests, listener: socket.socket) -> None:
        self._handler, self._listener = handler, listener
        self._log_stranger = RateLimitedLog(handler.log)
        listener.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # EMFILE, ENFILE, ENOBUFS, ENOMEM: the caller stays in the queue, and the loop would spin
            self._pause(error)
            return
        sock.setblocking(False)
        pid, uid = credentials(sock)
        if uid != os.getuid():
            self._log_stranger(f"turned away pid {pid} of uid {uid}: this agent serves uid {os.getuid()} only")
            sock.close()
            return
        try:
            WorkerConnection(self._handler, sock, pid)
        except OSError as error:  # it has died, or there is no descriptor for its pidfd
            sock.close()
            if not isinstance(error, ProcessLookupError):
                self._pause(error)

    def _pause(self, error: OSError) -> None:
        """Accepts no worker for a second: nothing can be done before descriptors or memory are given back."""
        self._handler.log(f"no worker can be accepted for {_PAUSE:g} s: {error.strerror} (ulimit -Hn)")
        self._loop.remove_reader(self._listener)
        self._loop.call_later(_PAUSE, self._resume)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)
