"""Opens connections between agents: TLS proves that both sides know the run secret, then the dialling side introduces itself.

    dials    --- TLS 1.3, both with certificates ---  listens
    Claims   -->                                               run, stream, role, and which host is meant
             <--                                      Accepted  or Failed
    another socket for each lane: MARK, id       -->            for the payloads of this connection

Strangers get as far as TLS. They are few at a time, and each has a few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gemini_ft.errors import AgentError, ConfigError, GeminiError, PeerError
from gemini_ft.wire.lane import ID_BYTES, KEY_BYTES, MARK, BlockingLane, lanes_of
from gemini_ft.wire.lane_thread import LaneThread
from gemini_ft.wire.messages import MAX_MESSAGE, PROTOCOL_VERSION, Failed, kind_of
from gemini_ft.wire.network import Addresses, FairShare, as_peer_error, bound, connected
from gemini_ft.wire.peer_messages import Accepted, Claims, PeerMessage
from gemini_ft.wire.tcp import SHORT_FRAME, Address, Connection, Handler, MessagesOnly, prepare
from gemini_ft.wire.trust import tls_context

TIMEOUT = 10.0  # seconds that an unknown peer may take
STRANGERS = 64  # peers under way at a time that have not been accepted, beside lanes that are due
LONG_FRAMES = 256 * 2**20  # bytes of messages of more than SHORT_FRAME that may be coming at a time
_VALUES = 2**18  # in a message of a peer that has dialled
_CUT = 10.0  # seconds without an acknowledgement after which a network counts as cut, where there is another one
_TRIES = 20  # ports that the kernel chooses in the first network, until one is free in all of them
_PAUSE = 0.5  # seconds until the next try when there is no descriptor or memory for another connection

Accept = Callable[[Connection, Claims], Handler]
Encrypt = Callable[[str], bool]  # given a stream, whether this side wants its payloads encrypted; asked for each connection


class _Dialling(MessagesOnly):
    """The dialling side. The real handler takes over at once: its first message may come in the same packet."""

    def __init__(self, claims: Claims, handler: Handler) -> None:
        self.connection = Connection(self)
        self.accepted: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self._claims, self._handler = claims, handler

    def on_message(self, message: PeerMessage) -> memoryview | None:
        if self.accepted.done():
            pass  # the dial was given up, or has failed, a moment ago
        elif isinstance(message, Accepted):
            self.connection.expect_lanes(len(lanes_of(message, self._claims)))
            self.connection.handler = self._handler
            self.accepted.set_result(message)
        elif isinstance(message, Failed):
            _fail(self.accepted, PeerError(f"it refused this host: {message.text}"))
        else:
            text = f"it sent {kind_of(message)!r} in place of a handshake; another gemini-ft listens there"
            _fail(self.accepted, PeerError(text))
        return None

    def on_lost(self, reason: str) -> None:
        _fail(self.accepted, PeerError(reason))


async def dial(address: Address, claims: Claims, secret: bytes, handler: Handler, *, further: Sequence[str] = ()) -> Connection:
    """Connects to a peer's agent.

    ``further``: the agent's addresses in other networks. Lanes are spread over all networks; one that takes no connection in is passed
    over.

    Raises:
        PeerError: there is no answer at ``address``, or not in time, or the peer refuses.
        SecretError: the peer does not know the secret.
    """
    where = f"the agent at {address[0]}:{address[1]}"
    opening = _Dialling(claims, handler)
    try:
        async with asyncio.timeout(TIMEOUT):
            loop, context, addresses = asyncio.get_running_loop(), tls_context(secret, server=False), Addresses(address, further)
            await loop.create_connection(lambda: opening.connection, ssl=context, server_hostname="", **await addresses.target())
            opening.connection.send(claims)
            accepted = await opening.accepted
            for number, opens in enumerate(accepted.lanes):
                open_at = partial(open_lane, opens=opens, encrypt=accepted.encrypt, peer=opening.connection.peer)
                opening.connection.attach(number, await addresses.dialled(number, open_at))
            if further:
                opening.connection.expect_signs(_CUT)
    except BaseException as error:
        opening.connection.abort("the handshake failed")
        opening.accepted.cancel()
        raise as_peer_error(error, where, TIMEOUT) from None
    return opening.connection


async def certificate_at(address: Address, secret: bytes, *, further: Sequence[str] = ()) -> bytes:
    """The certificate of whoever answers at an address, or at a ``further`` one, and knows the secret.

    Raises PeerError: there is no answer, or not in time. SecretError: the peer does not know the secret.
    """
    try:
        async with asyncio.timeout(TIMEOUT):
            context = tls_context(secret, server=False)
            _, writer = await asyncio.open_connection(ssl=context, server_hostname="", **await Addresses(address, further).target())
    except BaseException as error:
        raise as_peer_error(error, f"the agent at {address[0]}:{address[1]}", TIMEOUT) from None
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return shown


async def open_lane(address: Address, opens: bytes, *, encrypt: bool, peer: str) -> LaneThread:
    """Dials a lane of a connection; ``opens`` is its entry in `Accepted`."""
    sock = await connected(address)
    try:
        prepare(sock)
        await asyncio.get_running_loop().sock_sendall(sock, MARK + opens[:ID_BYTES])
    except BaseException:
        sock.close()
        raise
    return _lane(sock, opens[ID_BYTES:], dialled=True, encrypt=encrypt, peer=peer)


def _lane(sock: socket.socket, key: bytes, *, dialled: bool, encrypt: bool, peer: str) -> LaneThread:
    sock.setblocking(True)
    return LaneThread(BlockingLane(sock, key, dialled=dialled, encrypt=encrypt, peer=peer))


@dataclass
class _Expected:
    """A lane that a connection waits for."""

    connection: Connection
    number: int
    key: bytes
    encrypt: bool


class Listener:
    """The port of an agent: unknown connections come in here, and those that have shown that they know the secret go out to ``accept``."""

    def __init__(
        self, sock: socket.socket, secret: Callable[[], bytes], accept: Accept, log: Callable[[str], None], encrypt: Encrypt
    ) -> None:
        self.sockets = list[socket.socket]()
        self._secret, self._accept, self._log, self._encrypt = secret, accept, log, encrypt
        self.address: Address = sock.getsockname()[:2]
        self._loop = asyncio.get_running_loop()
        self._strangers = FairShare[asyncio.Task[None]](STRANGERS, lambda greeting: greeting.cancel())
        self._long_frames = FairShare[Connection](
            LONG_FRAMES, lambda connection: connection.abort("its address has too many long messages")
        )
        self._checkers = set[str]()  # addresses from which this host was called back
        self._lanes: dict[bytes, _Expected] = {}  # by id
        self.listen_at(sock)

    @property
    def further(self) -> list[str]:
        """This host's addresses in other networks, at which the same port is open."""
        return [str(sock.getsockname()[0]) for sock in self.sockets[1:]]

    def listen_at(self, sock: socket.socket) -> None:
        """Accepts connections at one more socket, which is listening already."""
        sock.setblocking(False)
        self.sockets.append(sock)
        self._loop.add_reader(sock, self._on_connection, sock)

    def close(self) -> None:
        """Accepts no more connections; those that were accepted stay."""
        for sock in self.sockets:
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock)
                sock.close()
        self._strangers.end_all()

    def _on_connection(self, listening: socket.socket) -> None:
        try:
            sock, address = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor or memory is left: the connection stays in the backlog
            self._log(f"cannot accept connections at the moment: {error}")
            self._loop.remove_reader(listening)
            self._loop.call_later(_PAUSE, self._accept_again, listening)
            return
        sock.setblocking(False)
        peer = "{}:{}".format(*address[:2])
        greeting = self._loop.create_task(self._greet(sock, peer))
        greeting.add_done_callback(partial(self._greeted, sock))
        self._strangers.most = STRANGERS + len(self._lanes)
        self._strangers.take(greeting, peer)

    def _greeted(self, sock: socket.socket, greeting: asyncio.Task[None]) -> None:
        self._strangers.give_back(greeting)
        if greeting.cancelled():  # perhaps before it began
            sock.close()

    def _accept_again(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening, self._on_connection, listening)

    async def _greet(self, sock: socket.socket, peer: str) -> None:
        try:
            async with asyncio.timeout(TIMEOUT):
                if await self._peek(sock) == MARK[:1]:
                    await self.take_lane(sock, peer)
                else:
                    await self._shake_hands(sock, peer)
        except ssl.SSLError as error:
            self._log(f"refused {peer}: it does not know this run's secret, or is no agent ({error.reason or error})")
            sock.close()
        except TimeoutError:
            self._log(f"refused {peer}: no handshake in time")
            sock.close()
        except Exception as error:  # of any kind: nothing else would close the socket
            self._log(
                f"refused {peer}: {error}" if str(error) else f"refused {peer}: it hung up; perhaps it does not know this run's secret"
            )
            sock.close()

    async def _peek(self, sock: socket.socket) -> bytes:
        while True:
            try:
                return sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                ready: asyncio.Future[None] = self._loop.create_future()
                self._loop.add_reader(sock, lambda ready=ready: ready.done() or ready.set_result(None))  # type: ignore[misc]
                try:
                    await ready
                finally:
                    self._loop.remove_reader(sock)

    async def take_lane(self, sock: socket.socket, peer: str) -> None:
        """Takes a lane to the connection that waits for it, which ends if that fails."""
        said = b""
        while len(said) < len(MARK) + ID_BYTES:
            part = await self._loop.sock_recv(sock, len(MARK) + ID_BYTES - len(said))
            if not part:
                raise PeerError("it hung up in the middle of a lane's first words")
            said += part
        expected = self._lanes.pop(said[len(MARK) :], None)
        if expected is None or not said.startswith(MARK):
            raise PeerError("it brings a lane that no connection waits for")
        try:
            prepare(sock)
            lane = _lane(sock, expected.key, dialled=False, encrypt=expected.encrypt, peer=peer)
            expected.connection.attach(expected.number, lane)
        except Exception as error:
            expected.connection.abort(f"a lane could not be attached: {error}")
            raise

    async def _shake_hands(self, sock: socket.socket, peer: str) -> None:
        greeting = _Greeting(self._admit)
        greeting.connection.long_frames = self._long_frames
        context = tls_context(self._secret(), server=True)
        try:
            await self._loop.connect_accepted_socket(lambda: greeting.connection, sock, ssl=context)
            with contextlib.suppress(_HungUpError):
                await greeting.over
                return
            if (host := peer.rpartition(":")[0]) not in self._checkers:
                self._checkers.add(host)
                self._log(f"{peer}, which knows the run's secret, made sure that this host is at its address, and hung up")
        except BaseException:
            greeting.connection.abort("no handshake in time")
            raise

    def _admit(self, connection: Connection, claims: Claims) -> None:
        """Accepts or refuses a peer that has proved to know the secret."""
        try:
            if claims.protocol != PROTOCOL_VERSION:
                raise AgentError(
                    f"this host speaks protocol {PROTOCOL_VERSION}, host {claims.host!r} {claims.protocol}; run the same gemini-ft on all"
                )
            handler = self._accept(connection, claims)
        except GeminiError as error:
            self._log(f"refused {connection.peer}: {error}")
            connection.send(Failed(error=type(error).__name__, text=str(error), fatal=True))
            self._loop.call_later(0.2, connection.abort, "refused")
            return
        connection.handler = handler
        if claims.role == "fetch":
            connection.only_answers = True
        else:
            connection.max_frame = MAX_MESSAGE
        opens = [os.urandom(ID_BYTES + KEY_BYTES) for _ in range(claims.lanes_due)]
        encrypt = claims.encrypt or self._encrypt(claims.stream)
        for number, each in enumerate(opens):
            self._lanes[each[:ID_BYTES]] = _Expected(connection, number, each[ID_BYTES:], encrypt)
            self._loop.call_later(TIMEOUT, self._miss_lane, each[:ID_BYTES])
        connection.expect_lanes(len(opens))
        connection.send(Accepted(lanes=opens, encrypt=encrypt))

    def _miss_lane(self, lane: bytes) -> None:
        if (waiting := self._lanes.pop(lane, None)) is not None:
            waiting.connection.abort("its lane did not come in time")


class _Greeting(MessagesOnly):
    """The listening side until a connection is admitted."""

    def __init__(self, admit: Callable[[Connection, Claims], None]) -> None:
        self.connection = Connection(self)
        self.connection.max_frame, self.connection.most_values = SHORT_FRAME, _VALUES
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._admit = admit

    def on_message(self, message: PeerMessage) -> memoryview | None:
        if not isinstance(message, Claims) or self.over.done():
            raise PeerError(f"{self.connection.peer} began with {kind_of(message)!r} instead of its claims")
        self.over.set_result(None)
        self._admit(self.connection, message)
        return None

    def on_lost(self, reason: str) -> None:
        _fail(self.over, PeerError(reason) if self.connection.refused else _HungUpError(reason))


class _HungUpError(PeerError):
    """A peer that has shown that it knows the secret says nothing, and hangs up, as `certificate_at` does."""


def _fail(future: asyncio.Future[Any], error: GeminiError) -> None:
    """Lets whoever waits raise ``error``; asyncio must not complain of it where that wait was cancelled a moment ago."""
    if not future.done():
        future.set_exception(error)
        future.exception()


async def listen(
    bind: str,
    ports: tuple[int, int] | None,
    secret: Callable[[], bytes],
    accept: Accept,
    log: Callable[[str], None],
    encrypt: Encrypt,
    *,
    preferred: int = 0,
    further: Sequence[str] = (),
) -> Listener:
    """Listens on ``bind``, at ``preferred`` if it is free (an agent that was restarted keeps its address); on ``further`` at the same port.

    Raises ConfigError: no port can be listened on at all of these addresses.
    """
    candidates = [preferred] * bool(preferred) + (list(range(ports[0], ports[1] + 1)) if ports else [0] * (_TRIES if further else 1))
    for port in candidates:
        with contextlib.ExitStack() as unless_bound:
            try:
                first = unless_bound.enter_context(bound(bind, port, socket.SOCK_STREAM))
                others = [unless_bound.enter_context(bound(each, first.getsockname()[1], socket.SOCK_STREAM)) for each in further]
            except ConfigError as error:
                reason = error.__cause__
                continue
            unless_bound.pop_all()
            listener = Listener(first, secret, accept, log, encrypt)
            for sock in others:
                listener.listen_at(sock)
            return listener
    given, at = f"port_range={ports}: no port of it" if ports else "no port", ", ".join((bind, *further))
    raise ConfigError(f"{given} can be listened on at {at} ({reason}); free one, widen port_range, or choose another interface")
