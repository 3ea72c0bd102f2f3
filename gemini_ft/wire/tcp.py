"""Asynchronous connections between agents: messages through TLS, and raw bytes straight into and out of slot memory.

Receiving reads from the socket into the slot's own pages, sending writes from them; neither copies in Python.
``sendfile`` would spare the kernel's copy and was measured to cost twice the processor time on both sides: it
queues single 4 KiB pages, and the receiver wakes up for as little (docs/decisions/009-plain-writes.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import termios
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol, cast

from gemini_ft.errors import GeminiError, PeerError
from gemini_ft.wire.frames import frame_length
from gemini_ft.wire.lane import Lane, Valve
from gemini_ft.wire.messages import MAX_MESSAGE, Chunk, pack
from gemini_ft.wire.peer_messages import Data, PeerMessage, peers

Address = tuple[str, int]
_SILENCE = 60  # seconds after which the kernel gives a peer up whose host is gone, or that takes nothing in
_UNSENT = 64 * 1024  # bytes that the kernel takes in ahead of the wire, where a valve decides what may go
_LOWER_EFFORT = 1 << 2  # DSCP LE (RFC 8622), in its place in the IP header
_SO_MAX_PACING_RATE = 47
_TCP_INFO = struct.Struct("=68xI48xQ40xQ")  # of linux/tcp.h: tcpi_rtt, tcpi_bytes_acked, tcpi_busy_time
_TLS_PIECE = 256 * 1024  # bytes handed to the TLS layer at a time
_SCRATCH = bytearray(256 * 1024)  # where unwanted bytes go


class Handler(Protocol):
    """The receiver of a connection's messages."""

    def on_message(self, message: PeerMessage) -> memoryview | None:
        """Takes a message. Returns, for one that raw bytes follow, the memory for them (None: they are thrown away)."""

    def on_bytes(self, message: PeerMessage, digest: int | None) -> None:
        """Takes note that the raw bytes that followed ``message`` are all there, and of their checksum, if it was formed on the way."""

    def on_lost(self, reason: str) -> None:
        """Takes note that the connection is closed; nothing refers to payloads any more."""


@dataclass(frozen=True)
class Meter:
    """The kernel's counts for a connection."""

    acked: int  # bytes that the peer's kernel has acknowledged
    busy: float  # seconds in which there was something to send
    rtt: float  # seconds to the peer and back, smoothed


class Connection(asyncio.BufferedProtocol):
    """A framed connection. A single writer task owns the sending side, in order."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.peer = "?"
        self.max_frame = MAX_MESSAGE
        self.closed = asyncio.Event()
        self.transport: asyncio.Transport | None = None
        self._tls_socket: Any = None  # kept: asyncio's TLS forgets it a moment before it says that the connection is lost
        self._metered = Meter(0, 0.0, 0.0)
        self._target = memoryview(bytearray(4))
        self._filled = 0
        self._state = "head"
        self._message: PeerMessage | None = None
        self._payload_left = 0
        self._outbox: deque[tuple[bytes, memoryview | None, Valve | None]] = deque()
        self._handing_over = 0  # bytes that may go and have not yet
        self._lane: Lane | None = None  # None: payloads follow their messages, through TLS
        self._lane_due = False
        self._lane_there = asyncio.Event()
        self._wanted: memoryview | None = None  # where the payload that is due on the lane goes
        self._early: deque[PeerMessage] = deque()  # messages that came before that payload was whole
        self._wake = asyncio.Event()
        self._handed_over = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._writer: asyncio.Task[None] | None = None
        self._aborted = False
        self.refused = False  # whether this side hung up because of what the peer said or sent
        self._reason = "the peer closed the connection"

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.peer = "{}:{}".format(*transport.get_extra_info("peername")[:2])
        self._tls_socket = transport.get_extra_info("socket")
        prepare(self._tls_socket)
        self._writer = asyncio.get_running_loop().create_task(self._write())

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled < len(self._target):
            return
        try:
            getattr(self, f"_end_of_{self._state}")()
        except GeminiError as error:
            self._refuse(error)

    def connection_lost(self, error: Exception | None) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        self._handed_over.set()
        if self._writer is not None:
            self._writer.cancel()
        if self._lane is not None:
            self._lane.close()
        self._message = self._wanted = None
        self._expect("head", memoryview(bytearray(4)))
        self._early.clear()
        self.handler.on_lost(self._reason if error is None else str(error))

    # -- receiving

    def _expect(self, state: str, target: memoryview) -> None:
        self._state, self._target, self._filled = state, target, 0

    def _end_of_head(self) -> None:
        self._expect("body", memoryview(bytearray(frame_length(self._target, self.max_frame))))

    def _end_of_body(self) -> None:
        message = peers.unpack(self._target)
        self._expect("head", memoryview(bytearray(4)))
        if self._message is not None:
            self._early.append(message)  # TLS had it ready when reading was paused
        else:
            self._hear(message)

    def _hear(self, message: PeerMessage) -> None:
        target = self.handler.on_message(message)
        if not isinstance(message, Chunk | Data) or message.nbytes == 0:
            return
        if target is not None and len(target) != message.nbytes:
            raise PeerError(f"{self.peer} announced {message.nbytes} bytes where {len(target)} are due")
        self._message, self._wanted, self._payload_left = message, target, message.nbytes
        if self._lane_due:
            self._pause()
            self._receive()
        else:
            self._expect("payload", target if target is not None else self._scratch())

    def _scratch(self) -> memoryview:
        return memoryview(_SCRATCH)[: min(self._payload_left, len(_SCRATCH))]

    def _end_of_payload(self) -> None:
        self._payload_left -= len(self._target)
        if self._payload_left:
            self._expect("payload", self._scratch())
            return
        self._expect("head", memoryview(bytearray(4)))
        self._payload_is_there(None)

    def _payload_is_there(self, digest: int | None) -> None:
        message, self._message, self._wanted = self._message, None, None
        if message is not None:
            self.handler.on_bytes(message, digest)

    # -- receiving on the lane: messages wait until the payload before them is whole

    def expect_lane(self) -> None:
        """Makes payloads wait for a lane, which may be there a moment later than the first of them is announced."""
        self._lane_due = True

    def attach(self, lane: Lane) -> None:
        """Takes the lane."""
        if self._aborted or self.closed.is_set():
            lane.close()
            return
        self._lane = lane
        self._lane_there.set()
        self._receive()

    def _receive(self) -> None:
        if self._lane is not None and self._message is not None:
            target = self._wanted if self._wanted is not None else memoryview(_SCRATCH)
            self._lane.receive(target, self._payload_left, self._received)

    def _received(self, outcome: Exception | int) -> None:
        if isinstance(outcome, Exception):
            self._refuse(outcome)
            return
        try:
            self._payload_is_there(outcome)
            while self._early and self._message is None:
                self._hear(self._early.popleft())
        except GeminiError as refusal:
            self._refuse(refusal)
        if self._message is None and self.transport is not None and not self._aborted:
            self.transport.resume_reading()

    def _pause(self) -> None:
        if self.transport is not None and self.transport.is_reading():
            self.transport.pause_reading()

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
        """Queues a message that is packed already, as it goes to many."""
        if not self.closed.is_set():
            self._outbox.append((frame, payload, valve))
            self._wake.set()

    def shape(self, hold_back: bool, max_rate: int | None, low_priority: bool) -> None:
        """Sets the kernel's treatment of the bytes that are sent.

        Args:
            hold_back: it takes in little ahead of the wire; for payloads with a valve, which else would have no effect.
            max_rate: bytes per second at which the kernel paces; None: as fast as it can.
            low_priority: mark packets as lower effort, for switches that respect it.
        """
        sock = self.payload_socket
        if hold_back:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        if max_rate is not None:
            sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", max_rate))
        if low_priority and sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _LOWER_EFFORT)
        elif low_priority:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _LOWER_EFFORT)

    @property
    def unacknowledged(self) -> int:
        """Bytes that may go, or have gone, and that the peer's kernel has not acknowledged."""
        if self.closed.is_set() or (fd := self.payload_socket.fileno()) < 0:
            return 0
        assert self.transport is not None
        in_kernel = int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return self._handing_over + self.transport.get_write_buffer_size() + in_kernel

    def meter(self) -> Meter:
        """The kernel's counters; of a closed connection, the last ones."""
        with contextlib.suppress(OSError):
            info = self.payload_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            rtt, acked, busy = _TCP_INFO.unpack(info.ljust(_TCP_INFO.size, b"\0"))
            self._metered = Meter(acked, busy / 1e6, rtt / 1e6)
        return self._metered

    @property
    def payload_socket(self) -> socket.socket:
        """The socket that payloads travel on."""
        return self._lane.socket if self._lane is not None else cast("socket.socket", self._tls_socket)

    @property
    def backlog(self) -> int:
        """Messages not handed to the kernel yet."""
        return len(self._outbox)

    async def _write(self) -> None:
        try:
            while True:
                while not self._outbox:
                    self._wake.clear()
                    await self._wake.wait()
                frame, payload, valve = self._outbox[0]
                await self._write_through_tls(memoryview(frame))
                if payload is not None:
                    await self._write_payload(payload, valve)
                self._outbox.popleft()
                self._handed_over.set()
        except Exception as error:  # whatever it was: without this, the stop would go unnoticed
            self.abort(f"sending failed: {error}")

    async def _write_payload(self, payload: memoryview, valve: Valve | None) -> None:
        if self._lane_due:
            await self._lane_there.wait()
            assert self._lane is not None
            await self._lane.send(payload, valve, self._hand_over)
            return
        while payload:
            allowed = len(payload) if valve is None else await valve(len(payload))
            await self._write_through_tls(payload[:allowed])
            payload = payload[allowed:]

    def _hand_over(self, nbytes: int) -> None:
        self._handing_over = nbytes

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

    def _refuse(self, error: Exception) -> None:
        self.refused = True
        self.abort(str(error))

    def abort(self, reason: str) -> None:
        """Closes now, and lets the kernel forget what it still has to send."""
        transport = self.transport
        if transport is None or self._aborted or self.closed.is_set():
            return
        self._aborted, self._reason = True, reason
        with contextlib.suppress(OSError):
            self._tls_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if self._lane is not None:
            self._lane.stop()
        transport.abort()


def prepare(sock: socket.socket) -> None:
    """Sets the options of every socket between hosts: nothing waits for more to send, and a lost host is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE * 1000)
