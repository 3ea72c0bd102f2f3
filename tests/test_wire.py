"""The handshake: both sides prove that they know the secret, and none of what was claimed can be changed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.errors import ConfigError, PeerError, SecretError
from gemini_ft.messages import MAX_MESSAGE, PROTOCOL_VERSION, Accepted, Challenge, Data, Proof, pack
from gemini_ft.transport.wire import BlockingWire, check_accepted, check_proof, fingerprint, frame_length, make_proof, tls_context
from gemini_ft.versions import Incarnation

CLAIMS = Proof(run="r", stream="s", host="h", role="fetch", incarnation=Incarnation(1, "a"), nonce=b"", mac=b"")
CHALLENGE = Challenge(nonce=b"n" * 16)


class TestProof:
    def test_of_the_right_secret_is_accepted_by_both_sides(self) -> None:
        proof = make_proof(b"secret", CLAIMS, CHALLENGE)
        check_accepted(b"secret", check_proof(b"secret", proof, CHALLENGE.nonce), proof, CHALLENGE.nonce)

    @given(st.binary(), st.binary())
    def test_of_another_secret_is_refused(self, ours: bytes, theirs: bytes) -> None:
        proof = make_proof(theirs, CLAIMS, CHALLENGE)
        if ours == theirs != b"":
            check_proof(ours, proof, CHALLENGE.nonce)
            return
        with pytest.raises(SecretError, match="host 'h' does not know this run's secret; give all hosts the same GEMINI_SECRET_FILE"):
            check_proof(ours, proof, CHALLENGE.nonce)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("run", "other"),
            ("stream", "other"),
            ("host", "other"),
            ("role", "report"),
            ("incarnation", Incarnation(2, "a")),
            ("nonce", b"other"),
        ],
    )
    def test_holds_for_these_very_claims(self, field: str, value: Any) -> None:
        proof = make_proof(b"secret", CLAIMS, CHALLENGE).model_copy(update={field: value})
        with pytest.raises(SecretError):
            check_proof(b"secret", proof, CHALLENGE.nonce)

    def test_holds_for_this_challenge_only(self) -> None:
        with pytest.raises(SecretError):
            check_proof(b"secret", make_proof(b"secret", CLAIMS, CHALLENGE), b"m" * 16)

    def test_of_one_side_cannot_be_sent_back_by_the_other(self) -> None:
        proof = make_proof(b"secret", CLAIMS, CHALLENGE)
        with pytest.raises(SecretError, match="something else listens at its address"):
            check_accepted(b"secret", Accepted(mac=proof.mac), proof, CHALLENGE.nonce)

    def test_is_not_made_for_another_protocol(self) -> None:
        with pytest.raises(
            PeerError, match=f"the peer speaks protocol 99, this side {PROTOCOL_VERSION}; run the same gemini-ft on all hosts"
        ):
            make_proof(b"secret", CLAIMS, Challenge(protocol=99, nonce=b"n"))

    def test_fingerprints_tell_secrets_apart_and_show_nothing(self) -> None:
        assert fingerprint(b"") == ""
        assert fingerprint(b"one") != fingerprint(b"other")
        assert "one" not in fingerprint(b"one")


class TestFrames:
    @pytest.mark.parametrize("length", [0, MAX_MESSAGE + 1, 2**32 - 1])
    def test_that_cannot_be_are_refused_before_they_are_read(self, length: int) -> None:
        with pytest.raises(PeerError, match=rf"a message of {length:,} bytes was announced, 1 to {MAX_MESSAGE:,} are allowed"):
            frame_length(length.to_bytes(4, "big"))

    def test_that_can_be_are_measured(self) -> None:
        assert frame_length(b"\x00\x00\x01\x02") == 258
        assert frame_length(MAX_MESSAGE.to_bytes(4, "big")) == MAX_MESSAGE


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[socket.socket], None]], tuple[str, int]]]:
    """Answer one connection by a function, on a thread; returns the address."""
    threads: list[threading.Thread] = []
    listeners: list[socket.socket] = []

    def serve(answer: Callable[[socket.socket], None]) -> tuple[str, int]:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def work() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        address: tuple[str, int] = listener.getsockname()
        return address

    yield serve
    for thread in threads:
        thread.join(30)
    for listener in listeners:
        listener.close()


Serve = Callable[[Callable[[socket.socket], None]], tuple[str, int]]


class TestBlockingWire:
    def test_nobody_there(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
        with pytest.raises(PeerError, match=r"did not answer within 5 s .*refused.*; is its host up, and its port open"):
            BlockingWire(address, CLAIMS, b"secret", 5.0)

    def test_somebody_who_says_nothing(self, serve: Serve) -> None:
        done = threading.Event()
        address = serve(lambda connection: done.wait(30) and None)  # type: ignore[func-returns-value]
        with pytest.raises(PeerError, match=r"stopped answering .timed out"):
            BlockingWire(address, CLAIMS, b"secret", 0.1)
        done.set()

    def test_something_else(self, serve: Serve) -> None:
        address = serve(lambda connection: connection.sendall(b"220 mail.example ESMTP\r\n"))
        with pytest.raises(PeerError, match="a message of 842,149,920 bytes was announced"):
            BlockingWire(address, CLAIMS, b"secret", 5.0)

    def test_a_gemini_that_begins_wrongly(self, serve: Serve) -> None:
        address = serve(lambda connection: connection.sendall(pack(Accepted(mac=b""))))
        with pytest.raises(PeerError, match="began with 'accepted' instead of a challenge"):
            BlockingWire(address, CLAIMS, b"secret", 5.0)

    def test_an_impostor_who_does_not_know_the_secret(self, serve: Serve) -> None:
        def impostor(connection: socket.socket) -> None:
            connection.sendall(pack(CHALLENGE))
            connection.recv(1000)
            connection.sendall(pack(Accepted(mac=b"\0" * 32)))

        with pytest.raises(SecretError, match="the peer does not know this run's secret"):
            BlockingWire(serve(impostor), CLAIMS, b"secret", 5.0)

    def test_a_peer_that_hangs_up_in_the_middle_of_the_bytes(self, serve: Serve) -> None:
        def quitter(connection: socket.socket) -> None:
            connection.sendall(pack(CHALLENGE))
            head = connection.recv(4)
            proof = _unpack(connection.recv(int.from_bytes(head, "big")))
            connection.sendall(pack(check_proof(b"secret", proof, CHALLENGE.nonce)))
            connection.sendall(pack(Data(offset=0, nbytes=100, digest=0)) + b"only this")

        wire = BlockingWire(serve(quitter), CLAIMS, b"secret", 5.0)
        assert isinstance(wire.receive(), Data)
        with pytest.raises(PeerError, match="closed the connection"):
            wire.receive_into(memoryview(bytearray(100)))
        wire.close()


def _unpack(body: bytes) -> Proof:
    from gemini_ft.messages import unpack

    message = unpack(body)
    assert isinstance(message, Proof)
    return message


class TestTls:
    def test_files_that_are_not_there_are_named(self, tmp_path: Path) -> None:
        files = {name: str(tmp_path / name) for name in ("certificate", "key", "authority")}
        with pytest.raises(ConfigError, match=r"tls\.certificate=.*No such file.*; give PEM files that the agent can read"):
            tls_context(files, server=True)

    def test_files_that_are_something_else_are_named(self, tmp_path: Path) -> None:
        files = {name: str(tmp_path / name) for name in ("certificate", "key", "authority")}
        for path in files.values():
            Path(path).write_text("not PEM\n")
        with pytest.raises(ConfigError, match=r"tls\.certificate=.*; give PEM files"):
            tls_context(files, server=False)
