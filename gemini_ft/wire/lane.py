"""Lanes for payloads beside the protected connection: bytes on a socket of their own, each payload sealed by a keyed tag.

TLS in Python would copy every byte twice, on the event loop. Payloads therefore go as they lie in memory, a slice at a time while it is in
the core's cache, and behind each of them a tag of AES-GMAC (NIST SP 800-38D) that only the two ends can compute: the key was agreed on
through TLS, and the number of the payload is in the tag, so that nothing can be changed, repeated, left out or moved from one lane to
another. With ``encrypt`` the same cipher encrypts them as well (AES-GCM); they are in the clear in the receiver's memory only, where they
count for nothing before their tag has been checked.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import time
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext, Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from gemini_ft.core.roots import running_checksum
from gemini_ft.errors import PeerError
from gemini_ft.wire.peer_messages import Accepted, Claims

MARK = b"gemini-ft lane\n"  # how a lane's socket begins; a TLS connection begins with the byte 22
KEY_BYTES = 32  # one AES-128 key for each direction
ID_BYTES = 16
TAG_BYTES = 16
SLICE = 512 * 1024  # bytes that are sealed and sent, or received and checked, while they are in the core's cache


def lanes_of(accepted: Accepted, claims: Claims) -> list[bytes]:
    """The id and the key of each lane that the listening side has accepted, for the side that dials them.

    Raises PeerError: the listening side has accepted something else than this side claimed.
    """
    if len(accepted.lanes) != claims.lanes_due:
        raise PeerError(f"it opens {len(accepted.lanes)} lanes for payloads in place of {claims.lanes_due}")
    for opens in accepted.lanes:
        if len(opens) != ID_BYTES + KEY_BYTES:
            raise PeerError(f"it opens a lane with {len(opens)} bytes in place of {ID_BYTES + KEY_BYTES}")
    if claims.encrypt and not accepted.encrypt:
        raise PeerError("it does not encrypt payloads, which this host asks for")
    return accepted.lanes


class _Numbered:
    """A cipher for one payload after the other, each with a nonce of its own."""

    def __init__(self, key: bytes) -> None:
        self._algorithm, self._number = AES(key), 0

    def next(self) -> Cipher[GCM]:
        nonce = self._number.to_bytes(12, "big")  # never twice under one key
        self._number += 1
        return Cipher(self._algorithm, GCM(nonce))


class Seal:
    """Computes the tags of the payloads that are sent in one direction, piece by piece, and encrypts them if that is wished."""

    def __init__(self, key: bytes, encrypt: bool = False) -> None:
        self._ciphers = _Numbered(key)
        self._scratch = memoryview(bytearray(SLICE)) if encrypt else None
        self._open: AEADEncryptionContext = self._ciphers.next().encryptor()

    def add(self, piece: memoryview) -> memoryview:
        """Takes in the next bytes of the payload (at most SLICE, with encryption); returns them as they travel, valid until the next."""
        if self._scratch is None:
            self._open.authenticate_additional_data(piece)
            return piece
        return self._scratch[: self._open.update_into(piece, self._scratch)]

    def close(self) -> bytes:
        """The tag of the payload; the next payload begins."""
        self._open.finalize()
        tag, self._open = self._open.tag, self._ciphers.next().encryptor()
        return tag


class Unseal:
    """Checks the payloads that come from one direction, and decrypts them in place if they are encrypted."""

    def __init__(self, key: bytes, encrypted: bool = False) -> None:
        self._ciphers, self._encrypted = _Numbered(key), encrypted
        self._open: AEADDecryptionContext = self._ciphers.next().decryptor()

    def add(self, piece: memoryview) -> None:
        """Takes in the next bytes as they came."""
        if self._encrypted:
            self._open.update_into(piece, piece)
        else:
            self._open.authenticate_additional_data(piece)

    def check(self, tag: bytes | bytearray, peer: str) -> None:
        """Checks that the payload is the one that the other end sent; the next payload begins. Raises PeerError: it is not."""
        context, self._open = self._open, self._ciphers.next().decryptor()
        try:
            context.finalize_with_tag(bytes(tag))
        except InvalidTag:
            raise PeerError(f"{peer}: a payload was changed on its way; something stands between the two hosts") from None


def keys(key: bytes, dialled: bool) -> tuple[bytes, bytes]:
    """Keys for sending and for receiving, as the end that has ``dialled`` or was dialled has them."""
    there, back = key[: KEY_BYTES // 2], key[KEY_BYTES // 2 :]
    return (there, back) if dialled else (back, there)


def deadline(sock: socket.socket, nbytes: int) -> float:
    """Returns when ``nbytes`` are due, in seconds of the monotonic clock; infinite: never.

    A socket's timeout is taken for each SLICE of them: by itself it ends a silence, and no trickle.
    """
    seconds = sock.gettimeout()
    return math.inf if seconds is None else time.monotonic() + seconds * max(1.0, nbytes / SLICE)


def in_time(end: float) -> None:
    """Raises TimeoutError after a `deadline`."""
    if time.monotonic() > end:
        raise TimeoutError("only a trickle of bytes came")


class BlockingLane:
    """One end of a lane, for one thread that sends or receives one payload after the other.

    ``sock``: connected, blocking or with a timeout.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, dialled: bool, encrypt: bool, peer: str) -> None:
        self.socket, self.peer = sock, peer
        mine, theirs = keys(key, dialled)
        self._seal, self._unseal = Seal(mine, encrypt), Unseal(theirs, encrypt)
        self.stopped = False

    def send(self, part: memoryview, is_last: bool) -> None:
        """Sends the next part of a payload, which must not change meanwhile; behind the last one the tag.

        Raises OSError: the lane is broken. PeerError: it was stopped.
        """
        while part:
            self._go_on()
            piece, part = part[:SLICE], part[SLICE:]
            self.socket.sendall(self._seal.add(piece))
        if is_last:
            self.socket.sendall(self._seal.close())

    def receive(self, targets: Sequence[memoryview] | None, nbytes: int) -> int:
        """Receives a payload, and returns its `gemini_ft.core.roots.checksum`. Not before then do the bytes in ``targets`` count.

        ``targets``: where it goes, one after the other; None: nobody wants it.

        Raises OSError: the lane is broken. PeerError: the payload is not what the other end sent, or the lane was stopped.
        """
        checksum = running_checksum()  # beside the tag, because a piece is in the core's cache only now
        if targets is None:  # the same memory each time
            scratch = memoryview(bytearray(min(nbytes, SLICE)))
            pieces = (scratch[: nbytes - at] for at in range(0, nbytes, SLICE))
        else:
            pieces = (target[at : at + SLICE] for target in targets for at in range(0, target.nbytes, SLICE))
        for piece in pieces:
            self._go_on()
            self._fill(piece)
            self._unseal.add(piece)
            checksum.update(piece)
        tag = bytearray(TAG_BYTES)
        self._fill(memoryview(tag))
        self._unseal.check(tag, self.peer)
        return checksum.intdigest()

    def _fill(self, piece: memoryview) -> None:
        """Receives the next SLICE bytes at most, for which the socket's timeout counts, however few bytes come at a time."""
        end = deadline(self.socket, piece.nbytes)
        while piece:
            count = self.socket.recv_into(piece, 0, socket.MSG_WAITALL)
            if count == 0:
                raise PeerError(f"{self.peer} closed the connection in the middle of a payload")
            if piece := piece[count:]:
                in_time(end)

    def _go_on(self) -> None:
        if self.stopped:
            raise PeerError(f"the lane to {self.peer} was stopped")

    def stop(self) -> None:
        """Wakes a sending or receiving thread, from any thread; what the kernel still has to send is forgotten at the close."""
        self.stopped = True
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.socket.shutdown(socket.SHUT_RDWR)
