"""Messages between processes of a host, as launcher and fork server, each whole or not at all: a reader never sees half of one.

A packet on the socket carries nothing but descriptors; the first is a file in memory that holds the message as JSON, whatever
its size. So neither side ever waits for the rest of a message, and a signal in between cannot leave half of one behind.

Standard library only: the fork server imports nothing else before it knows what to import.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

_PACKET = b"."
_MOST_DESCRIPTORS = 5  # the message, three standard streams, and the starting gun of a worker


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends a message, with open descriptors attached; OSError if the other side is gone."""
    body = os.memfd_create("gemini-message")
    try:
        with open(body, "wb", closefd=False) as file:
            file.write(json.dumps(message).encode())
        socket.send_fds(end, [_PACKET], [body, *descriptors])
    finally:
        os.close(body)


def receive(end: socket.socket, flags: int = 0) -> tuple[dict[str, Any], list[int]] | None:
    """Receives a message and the descriptors attached to it; None when the other side has closed the channel.

    ``flags``: of recvmsg, such as MSG_DONTWAIT, with which BlockingIOError says that there is no message.
    """
    packet, descriptors, _, _ = socket.recv_fds(end, len(_PACKET), _MOST_DESCRIPTORS, flags | socket.MSG_CMSG_CLOEXEC)
    if not packet:
        return None
    body, *rest = descriptors
    with open(body, "rb") as file:
        file.seek(0)  # the position is shared with the sender
        message: dict[str, Any] = json.load(file)
    return message, rest
