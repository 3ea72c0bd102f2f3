"""Asynchronous connections between agents: messages, and raw bytes straight into and out of slot memory.

Receiving reads from the socket into the slot's own pages, sending writes from them; neither copies in Python.
``sendfile`` would spare the kernel's copy and was measured to cost twice the processor time on both sides: it
queues single 4 KiB pages, and the receiver wakes up for as little (benchmarks/README.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import sys
import termios
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, cast

from gemini_ft.errors import ConfigError, GeminiError, PeerError, SecretError
from gemini_ft.messages import MAX_MESSAGE, Accepted, Challenge, Chunk, Data, Failed, Message, Proof, pack, unpack
from gemini_ft.transport.wire import check_accepted, check_proof, frame_length, make_proof, tls_context

Address = tuple[str, int]
Valve = Callable[[int], Awaitable[int]]  # given how many bytes are ready, waits, and says how many of them may go
_HANDSHAKE_TIMEOUT = 10.0  # seconds an unknown peer may take
_HANDSHAKE_FRAME = 2**16  # bytes an unknown peer may make us take in at a time
_SILENCE = 60  # seconds after which the kernel gives a peer up whose host is gone, or that takes nothing in
_UNSENT = 64 * 1024  # bytes that the kernel takes in ahead of the wire, where somebody decides what may go
_LOWER_EFFORT = 1 << 2  # DSCP LE (RFC 8622), in its place in the IP header
_SO_MAX_PACING_RATE = 47
_TCP_INFO = struct.Struct("=68xI48xQ40xQ")  # of linux/tcp.h: tcpi_rtt, tcpi_bytes_acked, tcpi_busy_time
_TLS_PIECE = 256 * 1024  # bytes handed to the TLS layer at a time
_SCRATCH = bytearray(256 * 1024)  # where unwanted bytes go


class Handler(Protocol):
    """Who a connection talks to."""

    def on_message(self, message: Message) -> memoryview | None:
        """A message came. For one that raw bytes follow: where to put them (None: throw them away)."""

    def on_bytes(self, message: Message) -> None:
        """The raw bytes that followed ``message`` are all there."""

    def on_lost(self, reason: str) -> None:
        """The connection is closed; nothing refers to payloads any more."""


@dataclass(frozen=True)
class Meter:
    """What the kernel has counted on a connection."""

    acked: int  # bytes that the peer's kernel has acknowledged
    busy: float  # seconds in which there was something to send
    rtt: float  # seconds to the peer and back, smoothed


class Connection(asyncio.BufferedProtocol):
    """One framed connection. A single writer task owns the sending side, in order."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.peer = "?"
        self.max_frame = MAX_MESSAGE
        self.closed = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._target = memoryview(bytearray(4))
        self._filled = 0
        self._state = "head"
        self._message: Message | None = None
        self._payload_left = 0
        self._outbox: deque[tuple[bytes, memoryview | None, Valve | None]] = deque()
        self._handing_over = 0  # bytes that may go and have not yet
        self._fd = -1  # a second descriptor of the socket, for writing past asyncio's buffers; -1 under TLS
        self._wake = asyncio.Event()
        self._handed_over = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._writer: asyncio.Task[None] | None = None
        self._reason = "the peer closed the connection"

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.peer = "{}:{}".format(*transport.get_extra_info("peername")[:2])
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE // 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE * 1000)
        if transport.get_extra_info("ssl_object") is None:
            self._fd = os.dup(sock.fileno())
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
            self.abort(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        self._handed_over.set()
        if self._writer is not None:
            self._writer.cancel()
        self.handler.on_lost(self._reason if error is None else str(error))

    # -- receiving

    def _expect(self, state: str, target: memoryview) -> None:
        self._state, self._target, self._filled = state, target, 0

    def _end_of_head(self) -> None:
        self._expect("body", memoryview(bytearray(frame_length(self._target, self.max_frame))))

    def _end_of_body(self) -> None:
        message = unpack(self._target)
        target = self.handler.on_message(message)
        if not isinstance(message, Chunk | Data) or message.nbytes == 0:
            self._expect("head", memoryview(bytearray(4)))
            return
        self._message, self._payload_left = message, message.nbytes
        if target is not None and len(target) != message.nbytes:
            raise PeerError(f"{self.peer} announced {message.nbytes} bytes where {len(target)} are due")
        self._expect("payload", target if target is not None else self._scratch())

    def _scratch(self) -> memoryview:
        return memoryview(_SCRATCH)[: min(self._payload_left, len(_SCRATCH))]

    def _end_of_payload(self) -> None:
        self._payload_left -= len(self._target)
        if self._payload_left:
            self._expect("payload", self._scratch())
            return
        message, self._message = self._message, None
        self._expect("head", memoryview(bytearray(4)))
        if message is not None:
            self.handler.on_bytes(message)

    # -- sending

    def send(self, message: Message, payload: memoryview | None = None, valve: Valve | None = None) -> None:
        """Queue a message, and after it the raw bytes of ``payload``, which must not change until they are acknowledged.

        Args:
            message: at once, or after what is queued already.
            payload: of a Chunk or Data message.
            valve: asked before each part of the payload; None: it all goes.
        """
        if not self.closed.is_set():
            self._outbox.append((pack(message), payload, valve))
            self._wake.set()

    def shape(self, hold_back: bool, max_rate: int | None, low_priority: bool) -> None:
        """How the kernel treats what is sent.

        Args:
            hold_back: it takes in little ahead of the wire; for payloads with a valve, which else would have no effect.
            max_rate: bytes per second at which the kernel paces; None: as fast as it can.
            low_priority: mark packets as lower effort, for switches that respect it.
        """
        sock = self._socket
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
        if self.closed.is_set():
            return 0
        assert self._transport is not None
        in_kernel = int.from_bytes(fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return self._handing_over + self._transport.get_write_buffer_size() + in_kernel

    def meter(self) -> Meter:
        """Read the kernel's counters."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        rtt, acked, busy = _TCP_INFO.unpack(info.ljust(_TCP_INFO.size, b"\0"))
        return Meter(acked, busy / 1e6, rtt / 1e6)

    @property
    def _socket(self) -> socket.socket:
        assert self._transport is not None
        return cast("socket.socket", self._transport.get_extra_info("socket"))

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
                await self._write_all(memoryview(frame))
                if payload is not None:
                    await self._write_payload(payload, valve)
                self._outbox.popleft()
                self._handed_over.set()
        except Exception as error:  # whatever it was: nobody else would notice that nothing is sent any more
            self.abort(f"sending failed: {error}")
        finally:
            self._stop_writing()

    async def _write_payload(self, payload: memoryview, valve: Valve | None) -> None:
        while payload:
            allowed = len(payload) if valve is None else await valve(len(payload))
            await self._write_all(payload[:allowed])
            payload = payload[allowed:]

    async def _write_all(self, data: memoryview) -> None:
        self._handing_over = len(data)
        if self._fd < 0:
            await self._write_through_tls(data)
            return
        while data:
            try:
                data = data[os.write(self._fd, data) :]
                self._handing_over = len(data)
            except BlockingIOError:
                await self._writable()

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_writer(self._fd, _set, ready)
        try:
            await ready
        finally:
            loop.remove_writer(self._fd)

    async def _write_through_tls(self, data: memoryview) -> None:
        assert self._transport is not None
        for start in range(0, len(data), _TLS_PIECE):
            self._transport.write(data[start : start + _TLS_PIECE])
            self._handing_over = max(0, len(data) - start - _TLS_PIECE)
            await self._unpaused.wait()

    def pause_writing(self) -> None:
        self._unpaused.clear()

    def resume_writing(self) -> None:
        self._unpaused.set()

    def _stop_writing(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def flushed(self, below: int) -> None:
        """Wait until fewer than ``below`` messages are queued, or the connection is closed."""
        while self.backlog >= below and not self.closed.is_set():
            self._handed_over.clear()
            await self._handed_over.wait()

    def abort(self, reason: str) -> None:
        """Close now, and let the kernel forget what it still has to send."""
        transport = self._transport
        if transport is None or self.closed.is_set():
            return
        self._reason = reason
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class _Dialling:
    """The dialling side's handshake. The real handler takes over at once: what it is to hear may come in the same packet."""

    def __init__(self, claims: Proof, secret: bytes, handler: Handler) -> None:
        self.connection = Connection(self)
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._claims, self._secret, self._handler = claims, secret, handler
        self._sent: tuple[Proof, bytes] | None = None  # our proof, and the nonce of the challenge

    def on_message(self, message: Message) -> memoryview | None:
        try:
            self._advance(message)
        except GeminiError as error:
            self._fail(error)
        return None

    def _advance(self, message: Message) -> None:
        if isinstance(message, Challenge) and self._sent is None:
            self._sent = (make_proof(self._secret, self._claims, message), message.nonce)
            self.connection.send(self._sent[0])
        elif isinstance(message, Accepted) and self._sent is not None:
            check_accepted(self._secret, message, *self._sent)
            self.connection.handler = self._handler
            self.accepted.set_result(None)
        elif isinstance(message, Failed):
            raise PeerError(f"it refused this host: {message.text}")
        else:
            raise PeerError(f"it sent {message.kind!r} in place of a handshake; something else listens there")

    def on_bytes(self, message: Message) -> None:
        raise PeerError("raw bytes during the handshake")

    def on_lost(self, reason: str) -> None:
        self._fail(PeerError(reason))

    def _fail(self, error: GeminiError) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(error)


async def dial(address: Address, claims: Proof, secret: bytes, handler: Handler, tls: dict[str, str] | None) -> Connection:
    """Connect to a peer's agent and prove who we are.

    Raises:
        PeerError: nobody answers at ``address``, or not in time.
        SecretError: the two sides have different secrets.
    """
    where = f"the agent at {address[0]}:{address[1]}"
    context = tls_context(tls, server=False) if tls else None
    opening = _Dialling(claims, secret, handler)
    try:
        async with asyncio.timeout(_HANDSHAKE_TIMEOUT):
            await asyncio.get_running_loop().create_connection(lambda: opening.connection, *address, ssl=context)
            await opening.accepted
    except BaseException as error:
        opening.connection.abort("the handshake failed")
        if isinstance(error, OSError | TimeoutError):
            raise PeerError(f"{where} does not answer ({str(error) or 'timeout'}); is its host up, and its port open?") from None
        if isinstance(error, GeminiError):
            raise type(error)(f"{where}: {error}") from None
        raise
    return opening.connection


class _Greeting:
    """The listening side's handshake."""

    def __init__(self, secret: Callable[[], bytes], accept: Callable[[Connection, Proof], Handler], log: Callable[[str], None]) -> None:
        self.connection = Connection(self)
        self.connection.max_frame = _HANDSHAKE_FRAME
        self._secret, self._accept, self._log = secret, accept, log
        self._nonce = os.urandom(16)
        self._deadline: asyncio.TimerHandle | None = None

    def begin(self) -> Connection:
        loop = asyncio.get_running_loop()
        loop.call_soon(self.connection.send, Challenge(nonce=self._nonce))
        self._deadline = loop.call_later(_HANDSHAKE_TIMEOUT, self.connection.abort, "no handshake in time")
        return self.connection

    def on_message(self, message: Message) -> memoryview | None:
        if not isinstance(message, Proof):
            raise PeerError(f"{self.connection.peer} began with {message.kind!r} instead of a proof")
        try:
            accepted = check_proof(self._secret(), message, self._nonce)
            handler = self._accept(self.connection, message)
        except GeminiError as error:
            self._log(f"refused {self.connection.peer}: {error}")
            text = "this run has another secret" if isinstance(error, SecretError) else str(error)
            self.connection.send(Failed(error=type(error).__name__, text=text, fatal=True))
            asyncio.get_running_loop().call_later(0.2, self.connection.abort, "refused")
            return None
        if self._deadline is not None:
            self._deadline.cancel()
        self.connection.handler, self.connection.max_frame = handler, MAX_MESSAGE
        self.connection.send(accepted)
        return None

    def on_bytes(self, message: Message) -> None:
        raise PeerError("raw bytes during the handshake")

    def on_lost(self, reason: str) -> None:
        if self._deadline is not None:
            self._deadline.cancel()


async def listen(
    bind: str,
    ports: tuple[int, int] | None,
    secret: Callable[[], bytes],
    accept: Callable[[Connection, Proof], Handler],
    log: Callable[[str], None],
    tls: dict[str, str] | None,
    preferred: int = 0,
) -> asyncio.Server:
    """Listen on ``bind``, at ``preferred`` if it is free (an agent that was restarted keeps its address).

    Raises:
        ConfigError: no port can be listened on there, or the TLS files cannot be used.
    """
    loop = asyncio.get_running_loop()
    context = tls_context(tls, server=True) if tls else None
    candidates = [preferred] * bool(preferred) + (list(range(ports[0], ports[1] + 1)) if ports else [0])
    for port in candidates:
        try:
            return await loop.create_server(lambda: _Greeting(secret, accept, log).begin(), bind, port, ssl=context)
        except OSError as error:
            reason = error.strerror or str(error)
    given = f"port_range={ports}: no port of it" if ports else "no port"
    raise ConfigError(f"{given} can be listened on at {bind} ({reason}); free one, widen port_range, or choose another interface")
