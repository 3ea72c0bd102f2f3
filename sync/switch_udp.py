"""UDP in batches: the kernel cuts one buffer into datagrams (UDP_SEGMENT), and gives neighbours that came together as one (UDP_GRO).

So a batch is a two-dimensional array on both sides, for one system call and one way through the kernel. With recvmmsg and sendmmsg each
datagram would still be a packet of its own in the kernel, which costs more than the call.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .switch_packets import Array

_SOL_UDP, _UDP_SEGMENT, _UDP_GRO = 17, 103, 104  # linux/udp.h
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # asm-generic/socket.h; above net.core.rmem_max, for root
_MOST_SEGMENTS, _MOST_BYTES = 64, 65_000  # of one call
_MOST_RECEIVED, _ROOM = 2**16, 2**20  # bytes of one call, and of what is received at once
_MOST_CALLS = 1024  # that receive at once: of the smallest datagrams, a flood would never fill the room
_UNABLE = (errno.EINVAL, errno.EIO, errno.ENOPROTOOPT, errno.EMSGSIZE)  # a device, or a path, on which the kernel cannot cut


class Datagrams:
    """A UDP socket.

    Args:
        bound: an unconnected socket, or a connected one, which hears when nobody listens at the other end.
        buffer: bytes that may wait in the kernel in each direction; it may give less (net.core.rmem_max, wmem_max).
    """

    def __init__(self, bound: socket.socket, buffer: int = 2**23) -> None:
        self.socket = bound
        self._segments = True
        self._room = np.empty(_ROOM, np.uint8)
        self._ancillary = socket.CMSG_SPACE(struct.calcsize("i"))
        for force, plain in ((_SO_RCVBUFFORCE, socket.SO_RCVBUF), (_SO_SNDBUFFORCE, socket.SO_SNDBUF)):
            bound.setsockopt(socket.SOL_SOCKET, plain, buffer)
            with contextlib.suppress(OSError):
                bound.setsockopt(socket.SOL_SOCKET, force, buffer)
        with contextlib.suppress(OSError):  # without it datagrams come one by one
            bound.setsockopt(_SOL_UDP, _UDP_GRO, 1)

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def receive(self) -> list[tuple[Array, Any]]:
        """Datagrams that have come, with their senders; nothing if there are none, and no more than fit the buffer or `_MOST_CALLS` bring.

        Returns:
            uint8 [k, length] arrays of datagrams with one sender and length. They are valid until the next call.

        Raises:
            ConnectionRefusedError: nobody listens at the other end of a connected socket.
        """
        found: list[tuple[int, int, int, Any]] = []  # begin, end, length, sender; what continues the one before is added to it
        at = 0
        for _ in range(_MOST_CALLS):
            if at + _MOST_RECEIVED > len(self._room):
                break
            try:
                count, ancillary, _, sender = self.socket.recvmsg_into([self._room[at:].data], self._ancillary, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            length = next((struct.unpack("i", data)[0] for level, kind, data in ancillary if (level, kind) == (_SOL_UDP, _UDP_GRO)), count)
            whole = at + count // length * length if length else at
            for begin, end, each in ((at, whole, length), (whole, at + count, at + count - whole)):
                if begin < end and found and found[-1][1:] == (begin, each, sender):
                    found[-1] = (found[-1][0], end, each, sender)
                elif begin < end:
                    found.append((begin, end, each, sender))
            at += count
        return [(self._room[begin:end].reshape(-1, length), sender) for begin, end, length, sender in found]

    def send(self, datagrams: Array, address: Any = None) -> None:
        """Sends uint8 [k, length]; waits while the kernel's buffer is full.

        Raises:
            ConnectionRefusedError: nobody listens at the other end of a connected socket.
        """
        count, length = datagrams.shape
        step = max(1, min(_MOST_SEGMENTS, _MOST_BYTES // max(1, length))) if self._segments else 1
        where = () if address is None else (address,)
        for at in range(0, count, step):
            part = datagrams[at : at + step]
            cut = [(_SOL_UDP, _UDP_SEGMENT, struct.pack("=H", length))] if len(part) > 1 else []
            try:
                self.socket.sendmsg([part.data], cut, 0, *where)
            except OSError as error:
                if error.errno not in _UNABLE or len(part) == 1:
                    raise
                self._segments = False
                return self.send(datagrams[at:], address)
        return None


class Readable(Protocol):
    def fileno(self) -> int: ...


def await_any(sockets: Sequence[Readable], seconds: float | None = None) -> set[int]:
    """Waits until one of the sockets can be read, or for so long; the descriptors of those that can.

    Not with ``select``, which takes no descriptor from 1024 on: a training process may have that many files open.
    """
    poll = select.poll()
    for each in sockets:
        poll.register(each.fileno(), select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if seconds is None else 1000 * seconds)}
