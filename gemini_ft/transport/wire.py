"""Frames and the handshake, the same for blocking and asynchronous ends.

A frame is a packed message (``gemini_ft.messages.pack``); some are followed by raw bytes whose number they state.
Handshake: the listening side sends a challenge, the dialling side proves with HMAC-SHA256 that it knows the
run secret, the listening side proves the same. The secret itself never travels.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import ssl

from gemini_ft.errors import ConfigError, PeerError, SecretError
from gemini_ft.messages import MAX_MESSAGE, PROTOCOL_VERSION, Accepted, Challenge, Message, Proof, pack, unpack

CHUNK_KINDS = ("chunk", "data")  # kinds that raw bytes follow


def fingerprint(secret: bytes) -> str:
    """What may be shown of a secret: enough to see that two differ, no help in guessing it."""
    return hashlib.sha256(b"gemini-ft fingerprint" + secret).hexdigest()[:16] if secret else ""


def mac(secret: bytes, side: str, proof: Proof, challenge: bytes) -> bytes:
    """What a side computes over both nonces and all that was claimed, so that no claim can be changed."""
    said = proof.model_copy(update={"mac": b""})
    key = hashlib.sha256(secret).digest()  # HMAC pads keys with zeros: two that differ only there would be one
    return hmac.new(key, side.encode() + challenge + pack(said), hashlib.sha256).digest()


def make_proof(secret: bytes, claims: Proof, challenge: Challenge) -> Proof:
    """Complete ``claims`` with this side's nonce and MAC."""
    if challenge.protocol != PROTOCOL_VERSION:
        raise PeerError(f"the peer speaks protocol {challenge.protocol}, this side {PROTOCOL_VERSION}; run the same gemini-ft on all hosts")
    proof = claims.model_copy(update={"nonce": os.urandom(16)})
    return proof.model_copy(update={"mac": mac(secret, "dial", proof, challenge.nonce)})


def check_proof(secret: bytes, proof: Proof, challenge: bytes) -> Accepted:
    """Judge the dialling side.

    Raises:
        SecretError: it does not know the run secret.
    """
    if not secret or not hmac.compare_digest(proof.mac, mac(secret, "dial", proof, challenge)):
        raise SecretError(
            f"host {proof.host!r} does not know this run's secret; give all hosts the same GEMINI_SECRET_FILE "
            "(or none, then rank 0 makes one for all)"
        )
    return Accepted(mac=mac(secret, "listen", proof, challenge))


def check_accepted(secret: bytes, accepted: Accepted, proof: Proof, challenge: bytes) -> None:
    """Judge the listening side."""
    if not hmac.compare_digest(accepted.mac, mac(secret, "listen", proof, challenge)):
        raise SecretError("the peer does not know this run's secret; something else listens at its address")


def frame_length(head: bytes | bytearray | memoryview, limit: int = MAX_MESSAGE) -> int:
    """Length of the body that follows the 4 bytes of ``head``.

    Raises:
        PeerError: it is empty, or of more than ``limit`` bytes.
    """
    length = int.from_bytes(head, "big")
    if not 0 < length <= limit:
        raise PeerError(f"a message of {length:,} bytes was announced, 1 to {limit:,} are allowed; the other side is not gemini-ft")
    return length


def tls_context(tls: dict[str, str], server: bool) -> ssl.SSLContext:
    """Mutual TLS from ``certificate``, ``key``, ``authority`` (PEM paths). Hosts are known by the authority, not by name.

    Raises:
        ConfigError: a file is missing, or not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(tls["certificate"], tls["key"])
        context.load_verify_locations(tls["authority"])
    except OSError as error:  # SSLError among them
        files = ", ".join(f"tls.{name}={path}" for name, path in tls.items())
        raise ConfigError(f"{files}: {error}; give PEM files that the agent can read, the key being that of the certificate") from None
    return context


class BlockingWire:
    """A blocking, authenticated connection to a peer's agent; what workers read replicas through."""

    def __init__(self, address: tuple[str, int], claims: Proof, secret: bytes, timeout: float, tls: dict[str, str] | None = None) -> None:
        self.peer = f"{address[0]}:{address[1]}"
        with contextlib.ExitStack() as on_error:
            try:
                self._socket: socket.socket = on_error.enter_context(socket.create_connection(address, timeout))
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if tls:
                    self._socket = on_error.enter_context(tls_context(tls, server=False).wrap_socket(self._socket))
                self._shake_hands(claims, secret)
            except OSError as error:
                raise PeerError(
                    f"the agent at {self.peer} did not answer within {timeout:g} s ({error}); is its host up, and its port open?"
                ) from None
            on_error.pop_all()

    def _shake_hands(self, claims: Proof, secret: bytes) -> None:
        challenge = self.receive()
        if not isinstance(challenge, Challenge):
            raise PeerError(f"the agent at {self.peer} began with {challenge.kind!r} instead of a challenge")
        proof = make_proof(secret, claims, challenge)
        self.send(proof)
        accepted = self.receive()
        if not isinstance(accepted, Accepted):
            raise PeerError(f"the agent at {self.peer} refused this host: {getattr(accepted, 'text', accepted.kind)}")
        check_accepted(secret, accepted, proof, challenge.nonce)

    def send(self, message: Message) -> None:
        try:
            self._socket.sendall(pack(message))
        except OSError as error:
            raise self._silent(error) from None

    def receive(self) -> Message:
        head = bytearray(4)
        self.receive_into(memoryview(head))
        body = bytearray(frame_length(head))
        self.receive_into(memoryview(body))
        return unpack(body)

    def receive_into(self, out: memoryview) -> None:
        """Fill ``out`` with the raw bytes that come next."""
        got = 0
        while got < len(out):
            try:
                count = self._socket.recv_into(out[got:])
            except OSError as error:
                raise self._silent(error) from None
            if count == 0:
                raise PeerError(f"the agent at {self.peer} closed the connection")
            got += count

    def _silent(self, error: OSError) -> PeerError:
        return PeerError(f"the agent at {self.peer} stopped answering ({error})")

    def close(self) -> None:
        self._socket.close()
