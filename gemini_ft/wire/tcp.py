"""Asynchronous connections between agents: messages through TLS, and payloads on lanes, straight into and out of slot memory.

The event loop handles messages. The payload that a message announces goes on one of the connection's lanes, in turn, and each lane has a
thread (`gemini_ft.wire.lane_thread`): payloads travel beside each other, and beside the messages that announce more of them. Any other
message but `Unchanged` is heard when all payloads that were announced before it are there, so that it means what it would on one wire.

Lanes receive into the slot's own pages and send from them; neither copies in Python.
``sendfile`` would spare the kernel's copy and was measured to cost twice the processor time on both sides: it
queues single 4 KiB pages, and the receiver wakes up for as little (docs/decisions/009-plain-writes.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeGuard, cast

from gemini_ft.errors import PeerError
from gemini_ft.wire.frames import frame_length
from gemini_ft.wire.lane_thread import BusyTime, LaneThread, Meter, Outcome, Valve, metered
from gemini_ft.wire.messages import MAX_MESSAGE, MOST_VALUES, Chunk, kind_of, pack
from gemini_ft.wire.network import FairShare
from gemini_ft.wire.peer_messages import Data, Heartbeat, PeerMessage, Unchanged, peers

Address = tuple[str, int]
_SILENCE = 60  # seconds after which the kernel gives a peer up whose host is gone, or that takes nothing in
_UNSENT = 64 * 1024  # bytes that the kernel takes in ahead of the wire, where a valve decides what may go
_LOWER_EFFORT = 1 << 2  # DSCP LE (RFC 8622), in its place in the IP header
_SO_MAX_PACING_RATE = 47
_TLS_PIECE = 256 * 1024  # bytes handed to the TLS layer at a time
SHORT_FRAME = 2**16  # bytes of a message for which memory is taken before it has come, and that a peer may send before it is accepted
UNREAD = 2 * MAX_MESSAGE  # bytes of messages to a peer that takes them in too slowly; more, and it is given up
_ANSWERS = 64  # payloads on their way to a reader before its next question is heard; a sign of life always is
AHEAD = 2  # payloads of a lane that are announced at a time: one travels, one is ready


class Handler(Protocol):
    """The receiver of a connection's messages."""

    def on_message(self, message: PeerMessage) -> memoryview | None:
        """Takes a message. Returns, for one that announces a payload, the memory for it (None: it is thrown away)."""

    def on_bytes(self, message: PeerMessage, digest: int) -> None:
        """Records that the payload announced by ``message`` is there, and its checksum. Payloads may end in another order."""

    def on_lost(self, reason: str) -> None:
        """Records that the connection is closed; nothing refers to payloads any more."""


class MessagesOnly:
    """A part of a `Handler` whose connection carries no payloads."""

    def on_bytes(self, message: PeerMessage, digest: int) -> None:
        raise PeerError(f"raw bytes after {kind_of(message)!r}, on a connection for messages alone")


class Connection(asyncio.BufferedProtocol):
    """A framed connection. A single writer task owns the sending side, in order."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.peer = "?"
        self.certificate = b""  # of the peer's process, which has shown it
        self.max_frame, self.most_values = MAX_MESSAGE, MOST_VALUES
        self.long_frames: FairShare[Connection] | None = None  # bytes of long messages from all peers that have dialled
        self.only_answers = False  # whether a question is heard only when the answers to those before it are on their way
        self.closed = asyncio.Event()
        self.transport: asyncio.Transport | None = None
        self._tls_socket: Any = None  # kept: asyncio's TLS forgets it a moment before it says that the connection is lost
        self._metered = Meter(acked=0, busy=0.0, rtt=0.0)
        self._target = memoryview(bytearray(4))
        self._filled = 0
        self._state = "head"
        self._heard_late: deque[PeerMessage] = deque()  # messages that wait for payloads before them, or for room for their own
        self._coming = 0  # payloads that were announced and are not there
        self._payloads_heard = itertools.count()
        self._outbox: deque[tuple[bytes, memoryview | None, Valve | None]] = deque()
        self._queued = 0  # bytes of the messages in it
        self._leaving = 0  # payloads that were given to lanes and have not left
        self._busy = BusyTime()  # of the lanes, with what they send
        self.drained: Callable[[], None] = lambda: None  # called as each part has left
        self._handing_over = 0  # bytes of messages that the TLS layer has not taken
        self._lanes: list[LaneThread | None] = []
        self._lanes_there = asyncio.Event()
        self._wake = asyncio.Event()
        self._handed_over = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._tasks: list[asyncio.Task[None]] = []  # the writer, and one for each lane that has something to send
        self._hears = False  # whether a message is being heard
        self._aborted = False
        self.refused = False  # whether this side hung up because of what the peer said or sent
        self._reason = "the peer closed the connection"

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.peer = "{}:{}".format(*transport.get_extra_info("peername")[:2])
        if (tls := transport.get_extra_info("ssl_object")) is not None:
            self.certificate = tls.getpeercert(binary_form=True) or b""
        self._tls_socket = transport.get_extra_info("socket")
        prepare(self._tls_socket)
        self._spawn(self._write)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._aborted:
            return
        self._filled += nbytes
        if self._filled < len(self._target):
            return
        self._hears = True
        try:
            getattr(self, f"_end_of_{self._state}")()
        except Exception as error:  # of any kind: a connection that stayed open would not be read
            self._expect_head()
            self._refuse(error)
        finally:
            self._hears = False

    def connection_lost(self, error: Exception | None) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        self._handed_over.set()
        self._stop()
        self._expect_head()
        self._heard_late.clear()
        self._outbox.clear()
        self.handler.on_lost(self._reason if error is None else str(error))

    # -- receiving

    def _expect(self, state: str, target: memoryview) -> None:
        self._state, self._target, self._filled = state, target, 0

    def _expect_head(self) -> None:
        if self.long_frames is not None:
            self.long_frames.give_back(self)
        self._expect("head", memoryview(bytearray(4)))

    def _end_of_head(self) -> None:
        length = frame_length(self._target, self.max_frame)
        if length <= SHORT_FRAME:
            self._expect("body", memoryview(bytearray(length)))
            return
        if self.long_frames is not None:
            self.long_frames.take(self, self.peer, length)
        self._expect("body", memoryview(mmap.mmap(-1, length)))  # which takes memory as the bytes come

    def _end_of_body(self) -> None:
        self._heard_late.append(peers.unpack(self._target, self.most_values))
        self._expect_head()
        self._go_on_hearing()

    def _go_on_hearing(self) -> None:
        while self._heard_late and self._may_hear(self._heard_late[0]) and not self._aborted:
            self._hear(self._heard_late.popleft())
        if self.transport is not None and not self._aborted and self.transport.is_reading() == bool(self._heard_late):
            (self.transport.pause_reading if self._heard_late else self.transport.resume_reading)()

    def _may_hear(self, message: PeerMessage) -> bool:
        if self.only_answers and not isinstance(message, Heartbeat) and (self._queued > SHORT_FRAME or self._leaving > _ANSWERS):
            return False
        if not announces_payload(message):
            return not self._coming or isinstance(message, Unchanged)  # which stands among chunks, and is of another one than those
        return not self._lanes or (self._lanes_there.is_set() and self._coming < AHEAD * len(self._lanes))

    def _hear(self, message: PeerMessage) -> None:
        target = self.handler.on_message(message)
        if not announces_payload(message):
            return
        if target is not None and len(target) != message.nbytes:
            raise PeerError(f"{self.peer} announced {message.nbytes} bytes where {len(target)} are due")
        if not self._lanes:
            raise PeerError(f"{self.peer} announced {message.nbytes} bytes on a connection without lanes")
        self._coming += 1
        self._lane(next(self._payloads_heard)).receive(target, message.nbytes, partial(self._received, message))

    def _received(self, message: PeerMessage, outcome: Outcome) -> None:
        if self._aborted or self.closed.is_set():
            return
        if isinstance(outcome, BaseException):
            self._refuse(outcome)
            return
        try:
            self._coming -= 1
            self.handler.on_bytes(message, outcome)
            self._go_on_hearing()
        except Exception as refusal:  # of any kind: a connection that stayed open would not be read
            self._refuse(refusal)

    # -- lanes

    def expect_lanes(self, count: int) -> None:
        """Makes payloads wait until ``count`` lanes are attached, which may be a moment after the first payload is announced."""
        self._lanes = [None] * count

    def attach(self, number: int, lane: LaneThread) -> None:
        if self._aborted or self.closed.is_set():
            lane.stop()
            return
        self._lanes[number] = lane
        self._spawn(partial(lane.feed, self._busy))
        if all(self._lanes):
            self._lanes_there.set()
            try:
                self._go_on_hearing()
            except Exception as refusal:
                self._refuse(refusal)

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    def _lane(self, payload: int) -> LaneThread:
        """The lane that carries the payload of that number in its direction."""
        lane = self._lanes[payload % len(self._lanes)]
        assert lane is not None
        return lane

    def _stop(self) -> None:
        """Ends all that travels; no memory is read or written any more when this returns."""
        for task in self._tasks:
            task.cancel()
        for lane in self._lanes:
            if lane is not None:
                lane.stop()

    # -- sending

    def send(self, message: PeerMessage, payload: memoryview | None = None, valve: Valve | None = None) -> None:
        """Queues a message, and after it the raw bytes of ``payload``, which must not change until they are acknowledged.

        Args:
            message: at once, or after what is queued already.
            payload: of a Chunk or Data message.
            valve: asked before each part of the payload; None: it all goes.
        """
        self.send_frame(pack(message), payload, valve)

    def send_frame(self, frame: bytes, payload: memoryview | None = None, valve: Valve | None = None) -> None:
        """Queues a message that is packed already, as it goes to many; a peer for which too many bytes wait is given up."""
        if self.closed.is_set():
            return
        self._outbox.append((frame, payload, valve))
        self._queued += len(frame)
        self._wake.set()
        if self._queued > UNREAD and not self.only_answers:
            self.abort(f"it does not take in what it is told: {self._queued:,} bytes of messages wait for it")

    def shape(self, hold_back: bool, max_rate: int | None, low_priority: bool) -> None:
        """Sets the kernel's treatment of the bytes that are sent.

        Args:
            hold_back: it takes in little ahead of the wire; for payloads with a valve, which else would have no effect.
            max_rate: bytes per second at which the kernel paces; None: as fast as it can.
            low_priority: mark packets as lower effort, for switches that respect it.
        """
        sockets = self.payload_sockets
        for sock in sockets if not (self._aborted or self.closed.is_set()) else []:
            if hold_back:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
            if max_rate is not None:
                sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", max(1, max_rate // len(sockets))))
            if low_priority and sock.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _LOWER_EFFORT)
            elif low_priority:
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _LOWER_EFFORT)

    def expect_signs(self, seconds: float) -> None:
        """Lets the kernel close a socket of this connection when what was sent on it is not acknowledged for ``seconds``."""
        for sock in {*self.payload_sockets, self._tls_socket} if not (self._aborted or self.closed.is_set()) else ():
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))

    @property
    def unacknowledged(self) -> int:
        """Bytes that may go, or have gone, and that the peer's kernel has not acknowledged."""
        if self.closed.is_set():
            return 0
        assert self.transport is not None
        on_lanes = sum(lane.unacknowledged for lane in self._lanes if lane is not None)
        return self._handing_over + self.transport.get_write_buffer_size() + on_lanes

    def meter(self) -> Meter:
        """The kernel's counters; of a closed connection, the last ones.

        Lanes may be busy at the same time, or one after the other; the kernel knows each by itself, and not what its thread does, which
        therefore counts too.
        """
        with contextlib.suppress(OSError):
            found = [metered(sock) for sock in self.payload_sockets]
            acked, busy, rtt = sum(each.acked for each in found), max(each.busy for each in found), max(each.rtt for each in found)
            self._metered = Meter(acked=acked, busy=max(busy, self._busy.seconds), rtt=rtt)
        return self._metered

    @property
    def payload_sockets(self) -> list[socket.socket]:
        """The sockets that payloads travel on; without lanes, that of the messages."""
        return [lane.socket for lane in self._lanes if lane is not None] or [cast("socket.socket", self._tls_socket)]

    @property
    def backlog(self) -> int:
        """Messages and payloads not handed to the kernel yet."""
        return len(self._outbox) + self._leaving

    def _spawn(self, work: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._sending(work)))

    async def _sending(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # of any kind: else the stop would go unnoticed
            self.abort(f"sending failed: {error}")

    async def _write(self) -> None:
        payloads = itertools.count()
        while True:
            while not self._outbox:
                self._wake.clear()
                await self._wake.wait()
            frame, payload, valve = self._outbox[0]
            await self._write_through_tls(memoryview(frame))
            if payload:
                await self._lanes_there.wait()
                self._lane(next(payloads)).send(payload, valve, self._sent)
                self._leaving += 1
            self._outbox.popleft()
            self._queued -= len(frame)
            self._moved_on()

    def _sent(self, outcome: Outcome) -> None:
        if isinstance(outcome, BaseException):
            self.abort(f"sending failed: {outcome}")
            return
        self._leaving -= outcome
        self._moved_on()
        self.drained()

    def _moved_on(self) -> None:
        self._handed_over.set()
        if self.only_answers:
            try:
                self._go_on_hearing()
            except Exception as refusal:
                self._refuse(refusal)

    async def _write_through_tls(self, data: memoryview) -> None:
        assert self.transport is not None
        self._handing_over = len(data)
        for start in range(0, len(data), _TLS_PIECE):
            self.transport.write(data[start : start + _TLS_PIECE])
            self._handing_over = max(0, len(data) - start - _TLS_PIECE)
            await self._unpaused.wait()

    def pause_writing(self) -> None:
        self._unpaused.clear()

    def resume_writing(self) -> None:
        self._unpaused.set()

    async def flushed(self, below: int) -> None:
        """Waits until fewer than ``below`` messages are queued, or the connection is closed."""
        while self.backlog >= below and not self.closed.is_set():
            self._handed_over.clear()
            await self._handed_over.wait()

    @property
    def has_much_to_say(self) -> bool:
        """Whether long messages are queued; with too many of them the peer is given up."""
        return self._queued > SHORT_FRAME and not self.closed.is_set()

    async def said_most(self) -> None:
        """Waits until no long messages are queued, or the connection is closed."""
        while self.has_much_to_say:
            self._handed_over.clear()
            await self._handed_over.wait()

    def _refuse(self, error: BaseException) -> None:
        self.refused = True
        self.abort(str(error) or type(error).__name__)

    def abort(self, reason: str) -> None:
        """Closes now, and lets the kernel forget what it still has to send."""
        transport = self.transport
        if transport is None or self._aborted or self.closed.is_set():
            return
        self._aborted, self._reason = True, reason
        with contextlib.suppress(OSError):
            self._tls_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._stop()
        if self._hears:  # perhaps the last message of a peer that has hung up, after which asyncio's TLS would go on with closing
            asyncio.get_running_loop().call_soon(transport.abort)
        else:
            transport.abort()


def announces_payload(message: PeerMessage) -> TypeGuard[Chunk | Data]:
    """Whether a payload on a lane belongs to a message."""
    return isinstance(message, Chunk | Data) and message.nbytes > 0


def prepare(sock: socket.socket) -> None:
    """Sets the options of every socket between hosts: nothing waits for more to send, and a lost host is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE * 1000)
