"""Frames, the blocking end of a connection between hosts, and receiving from a socket of this host.

A frame is a packed message (``gemini_ft.wire.messages.pack``); some announce a payload, whose number of bytes they state.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from gemini_ft.errors import PeerError
from gemini_ft.wire.lane import ID_BYTES, MARK, BlockingLane, deadline, in_time, lanes_of
from gemini_ft.wire.messages import MAX_MESSAGE, kind_of, pack
from gemini_ft.wire.network import Addresses, as_peer_error
from gemini_ft.wire.peer_messages import Accepted, Claims, PeerMessage, peers
from gemini_ft.wire.trust import tls_context


def frame_length(head: bytes | bytearray | memoryview, limit: int = MAX_MESSAGE) -> int:
    """Length of the body that follows the 4 bytes of ``head``. Raises PeerError: it is empty, or of more than ``limit`` bytes."""
    length = int.from_bytes(head, "big")
    if not 0 < length <= limit:
        raise PeerError(f"a message of {length:,} bytes was announced, 1 to {limit:,} are allowed; the other side is not gemini-ft")
    return length


class FrameBuffer:
    """Bytes of a stream as they come, until they are whole frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def bodies(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Bodies of the frames that are complete with these bytes. Raises PeerError: what has come is no frame."""
        self._bytes += data
        while len(self._bytes) >= 4 and len(self._bytes) >= 4 + (length := frame_length(self._bytes[:4])):
            body = bytes(self._bytes[4 : 4 + length])
            del self._bytes[: 4 + length]
            yield body


def receive_fds(sock: socket.socket, into: memoryview, most: int) -> tuple[memoryview, list[int], int]:
    """Receives bytes, descriptors and flags, as ``socket.recv_fds`` does, but into existing memory.

    That function takes memory for the longest message each time and cuts it down to the one that has come. Done with every message, by a
    thread whose small objects lie in between, this makes the heap grow by a hundred bytes a step, without an end.
    """
    fds = array.array("i")
    nbytes, beside, flags, _ = sock.recvmsg_into([into], socket.CMSG_LEN(most * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return into[:nbytes], list(fds), flags


class BlockingWire:
    """A blocking, authenticated connection to a peer's agent, through which workers read replicas.

    Args:
        timeout: seconds to wait for each answer.
        further: the agent's addresses in other networks, over which lanes are spread; one that takes no connection in is passed over.

    Raises PeerError: there is no answer, or the peer refuses. SecretError: the peer does not know the secret.
    """

    def __init__(self, address: tuple[str, int], claims: Claims, secret: bytes, timeout: float, *, further: Sequence[str] = ()) -> None:
        self.peer, addresses = f"{address[0]}:{address[1]}", Addresses(address, further)
        with contextlib.ExitStack() as on_error:
            try:
                plain = on_error.enter_context(_connected(addresses, 0, timeout))
                self.socket: ssl.SSLSocket = on_error.enter_context(tls_context(secret, server=False).wrap_socket(plain))
                accepted = self._be_accepted(claims)
                self._lanes = list[BlockingLane]()
                for number, opens in enumerate(accepted.lanes):
                    sock = on_error.enter_context(_connected(addresses, number, timeout))
                    sock.sendall(MARK + opens[:ID_BYTES])
                    where = f"the agent at {self.peer}"
                    self._lanes.append(BlockingLane(sock, opens[ID_BYTES:], dialled=True, encrypt=accepted.encrypt, peer=where))
                self._payloads = itertools.count()
            except OSError as error:
                raise as_peer_error(error, f"the agent at {self.peer}", timeout) from None
            on_error.pop_all()

    def _be_accepted(self, claims: Claims) -> Accepted:
        self.send(claims)
        answer = self.receive()
        if not isinstance(answer, Accepted):
            raise PeerError(f"the agent at {self.peer} refused this host: {getattr(answer, 'text', kind_of(answer))}")
        try:
            lanes_of(answer, claims)
        except PeerError as error:
            raise PeerError(f"the agent at {self.peer}: {error}") from None
        return answer

    def send(self, message: PeerMessage) -> None:
        try:
            self.socket.sendall(pack(message))
        except OSError as error:
            raise self._silent(error) from None

    def receive(self) -> PeerMessage:
        """The next message. One that announces a payload is followed by `payload`."""
        head = bytearray(4)
        self._fill(memoryview(head))
        body = bytearray(frame_length(head))
        self._fill(memoryview(body))
        return peers.unpack(body)

    def payload(self) -> Callable[[Sequence[memoryview]], int]:
        """The payload that the last message announced: called with memory for it, in parts, fills that, and returns its checksum.

        Payloads travel on the lanes in turn. As many as there are lanes may be received at a time, each by a thread of its own; the call
        raises PeerError if its payload does not come, or is not what the peer sent.
        """
        if not self._lanes:
            raise PeerError(f"the agent at {self.peer} has opened no lane for payloads")
        return partial(self._receive_on, self._lanes[next(self._payloads) % len(self._lanes)])

    def _receive_on(self, lane: BlockingLane, out: Sequence[memoryview]) -> int:
        try:
            return lane.receive(out, sum(part.nbytes for part in out))
        except OSError as error:
            raise self._silent(error) from None

    def _fill(self, out: memoryview) -> None:
        end = deadline(self.socket, out.nbytes)
        while out:
            try:
                count = self.socket.recv_into(out)
                in_time(end)
            except OSError as error:
                raise self._silent(error) from None
            if count == 0:
                raise PeerError(f"the agent at {self.peer} closed the connection")
            out = out[count:]

    def _silent(self, error: OSError) -> PeerError:
        return PeerError(f"the agent at {self.peer} stopped answering ({error})")

    def close(self) -> None:
        self.socket.close()
        for lane in self._lanes:
            lane.socket.close()


def _connected(addresses: Addresses, number: int, timeout: float) -> socket.socket:
    """The socket of that number, in the first network that carries it. Raises OSError: none does."""
    while True:
        with addresses.trying(number) as address:
            sock = connect(address, addresses.patience or timeout)
            sock.settimeout(timeout)
            return sock


def connect(address: tuple[str, int], timeout: float) -> socket.socket:
    sock = socket.create_connection(address, timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
