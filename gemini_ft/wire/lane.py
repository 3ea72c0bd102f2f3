"""Lanes for payloads beside the protected connection: raw bytes on their own socket, each payload sealed by a keyed tag.

TLS in Python would copy every byte twice. Payloads therefore go as they lie in memory, in the clear, and behind each of them a
tag of AES-GMAC (NIST SP 800-38D) that only the two ends can compute: the key was agreed on through TLS, and the number of
the payload is in the tag, so that nothing can be changed, repeated, left out or moved from one connection to another.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable

from cryptography.hazmat.primitives import constant_time
from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext, Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from gemini_ft.core.roots import running_checksum
from gemini_ft.errors import PeerError

Valve = Callable[[int], Awaitable[int]]  # given how many bytes are ready, waits, and says how many of them may go
MARK = b"gemini-ft lane\n"  # how a lane's socket begins; a TLS connection begins with the byte 22
KEY_BYTES = 32  # one AES-128 key for each direction
ID_BYTES = 16
TAG_BYTES = 16
SLICE = 512 * 1024  # bytes that are sealed and sent, or received and checked, while they are in the core's cache


class Seal:
    """Computes the tags of one direction, payload by payload, piece by piece."""

    def __init__(self, key: bytes) -> None:
        self._algorithm = AES(key)
        self._number = 0
        self._open = self._next()

    def _next(self) -> AEADEncryptionContext:
        nonce = self._number.to_bytes(12, "big")  # never twice under one key
        self._number += 1
        return Cipher(self._algorithm, GCM(nonce)).encryptor()

    def add(self, piece: memoryview) -> None:
        """Takes in the next bytes of the payload."""
        self._open.authenticate_additional_data(piece)

    def close(self) -> bytes:
        """The tag of the payload; the next payload begins."""
        self._open.finalize()
        tag, self._open = self._open.tag, self._next()
        return tag

    def check(self, tag: bytes | bytearray, peer: str) -> None:
        """Checks that the payload is the one that the other end sent.

        Raises:
            PeerError: it is not.
        """
        if not constant_time.bytes_eq(self.close(), bytes(tag)):
            raise PeerError(f"{peer}: a payload was changed on its way; something stands between the two hosts")


def keys(key: bytes, dialled: bool) -> tuple[bytes, bytes]:
    """Keys for sending and for receiving, as the end that has ``dialled`` or was dialled has them."""
    there, back = key[: KEY_BYTES // 2], key[KEY_BYTES // 2 :]
    return (there, back) if dialled else (back, there)


class Lane:
    """An end of a lane, on the event loop. At most one payload is sent, and one received, at a time."""

    def __init__(self, sock: socket.socket, key: bytes, dialled: bool, peer: str) -> None:
        self.socket, self.peer = sock, peer
        mine, theirs = keys(key, dialled)
        self._sending, self.receiving = Seal(mine), Seal(theirs)
        self._loop = asyncio.get_running_loop()

    async def send(self, payload: memoryview, valve: Valve | None, waiting: Callable[[int], None]) -> None:
        """Sends a payload and its tag.

        Args:
            payload: must not change meanwhile.
            valve: asked before each part of the payload; None: it all goes.
            waiting: told how many bytes may go and have not yet.
        """
        while payload:
            allowed = len(payload) if valve is None else await valve(len(payload))
            part, payload = payload[:allowed], payload[allowed:]
            while part:
                piece, part = part[:SLICE], part[SLICE:]
                self._sending.add(piece)
                await self._write(piece, len(part), waiting)
        await self._write(memoryview(self._sending.close()), 0, waiting)

    async def _write(self, data: memoryview, behind: int, waiting: Callable[[int], None]) -> None:
        waiting(len(data) + behind)
        while data:
            try:
                data = data[self.socket.send(data) :]
                waiting(len(data) + behind)
            except BlockingIOError:
                await self._writable()

    async def _writable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self.socket, _set, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(self.socket)

    def receive(self, target: memoryview, nbytes: int, done: Callable[[Exception | int], None]) -> None:
        """Receives a payload of ``nbytes``.

        Args:
            target: where it goes; if it is shorter than the payload, it is filled again and again.
            nbytes: length of the payload.
            done: called once; with the payload's `gemini_ft.core.roots.checksum` when it is whole and is what the other end sent.
        """
        self._loop.add_reader(self.socket, _Receiving(self, target, nbytes, done).on_readable)

    def stop_receiving(self) -> None:
        """Stops reading until the next payload is due."""
        self._loop.remove_reader(self.socket)

    def stop(self) -> None:
        """Sends and receives nothing any more; what the kernel still has to send is forgotten when the lane is closed."""
        self._loop.remove_reader(self.socket)
        self._loop.remove_writer(self.socket)
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def close(self) -> None:
        """Closes at once."""
        if self.socket.fileno() >= 0:
            self.stop()
            self.socket.close()


class _Receiving:
    """A payload on its way in."""

    def __init__(self, lane: Lane, target: memoryview, nbytes: int, done: Callable[[Exception | int], None]) -> None:
        self._lane, self._target, self._left, self._done = lane, target, nbytes, done
        self._room = target
        self._checksum = running_checksum()  # beside the tag, because a piece is in the core's cache only now
        self._tag = bytearray()

    def on_readable(self) -> None:
        try:
            finished = self._read()
        except BlockingIOError:
            return
        except (OSError, PeerError) as error:
            self._lane.stop_receiving()
            self._done(error)
            return
        if finished:
            self._lane.stop_receiving()
            self._done(self._checksum.intdigest())

    def _read(self) -> bool:
        """Whether the payload and its tag are there."""
        if self._left:
            piece = self._room[: min(self._left, SLICE)]
            count = self._some(self._lane.socket.recv_into(piece))
            self._lane.receiving.add(piece[:count])
            self._checksum.update(piece[:count])
            self._room = self._room[count:] or self._target
            self._left -= count
            return False
        part = self._lane.socket.recv(TAG_BYTES - len(self._tag))
        self._some(len(part))
        self._tag += part
        if len(self._tag) < TAG_BYTES:
            return False
        self._lane.receiving.check(self._tag, self._lane.peer)
        return True

    def _some(self, count: int) -> int:
        if count == 0:
            raise PeerError(f"{self._lane.peer} closed the connection in the middle of a payload")
        return count


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
