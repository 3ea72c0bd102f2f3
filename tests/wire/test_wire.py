"""Who is trusted, the seals of payloads, and the blocking end of a connection."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_kit import open_fds
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import PeerError, SecretError
from gemini_ft.wire.frames import BlockingWire, frame_length
from gemini_ft.wire.lane import ID_BYTES, KEY_BYTES, MARK, Seal, Unseal, keys
from gemini_ft.wire.messages import MAX_MESSAGE, pack
from gemini_ft.wire.peer_messages import Accepted, Claims, Data
from gemini_ft.wire.trust import derive, fingerprint, tls_context

CLAIMS = Claims(run="r", stream="s", host="h", to="", role="fetch", incarnation=Incarnation(1, "a"))


class TestTrust:
    def test_fingerprints_tell_secrets_apart_and_show_nothing(self) -> None:
        assert fingerprint(b"") == ""
        assert fingerprint(b"one") != fingerprint(b"other")
        assert "one" not in fingerprint(b"one")

    def test_keys_of_two_purposes_or_secrets_differ(self) -> None:
        assert len({derive(secret, purpose) for secret in (b"one", b"other") for purpose in (b"authority", b"else")}) == 4
        assert derive(b"one", b"authority") == derive(b"one", b"authority")

    def test_without_a_secret_there_is_no_context(self) -> None:
        with pytest.raises(ValueError, match="an empty secret would let everybody in"):
            tls_context(b"", server=True)

    def test_the_key_of_the_certificate_never_reaches_a_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        before = open_fds(os.getpid())
        tls_context(os.urandom(16), server=True)
        assert open_fds(os.getpid()) == before
        assert not list(tmp_path.iterdir())


def sealed(payloads: list[bytes], key: bytes, encrypt: bool = False) -> list[tuple[bytes, bytes]]:
    """Payloads as they travel, each with its tag."""
    seal = Seal(key, encrypt)
    return [(bytes(seal.add(memoryview(payload))), seal.close()) for payload in payloads]


@pytest.mark.parametrize("encrypt", [False, True], ids=["sealed", "encrypted"])
class TestSeal:
    KEY = bytes(range(16))

    @given(st.lists(st.binary(max_size=50), min_size=1, max_size=5), st.data())
    def test_fits_the_payload_whatever_pieces_it_comes_in(self, encrypt: bool, payloads: list[bytes], data: st.DataObject) -> None:
        unseal = Unseal(self.KEY, encrypt)
        for payload, (travelled, tag) in zip(payloads, sealed(payloads, self.KEY, encrypt), strict=True):
            came = memoryview(bytearray(travelled))
            cut = data.draw(st.integers(0, len(payload)))
            unseal.add(came[:cut])
            unseal.add(came[cut:])
            unseal.check(tag, "host b")
            assert came == payload

    @given(st.binary(min_size=1, max_size=50), st.data())
    def test_breaks_with_any_bit(self, encrypt: bool, payload: bytes, data: st.DataObject) -> None:
        ((travelled, tag),) = sealed([payload], self.KEY, encrypt)
        assert (travelled == payload) != encrypt or len(payload) < 8
        bit = data.draw(st.integers(0, 8 * len(payload) - 1))
        changed = (int.from_bytes(travelled, "big") ^ (1 << bit)).to_bytes(len(payload), "big")
        unseal = Unseal(self.KEY, encrypt)
        unseal.add(memoryview(bytearray(changed)))
        with pytest.raises(PeerError, match="host b: a payload was changed on its way"):
            unseal.check(tag, "host b")

    def test_is_of_one_place_in_one_direction_of_one_lane(self, encrypt: bool) -> None:
        payloads = [b"same", b"same"]
        (_, first), (_, second) = sealed(payloads, self.KEY, encrypt)
        assert first != second  # so none can be repeated or left out
        assert first not in [tag for _, tag in sealed(payloads, os.urandom(16), encrypt)]
        there, back = keys(bytes(32 * [1])[:16] + bytes(16), dialled=True)
        assert there != back
        assert keys(there + back, dialled=False) == (back, there)


class TestFrames:
    @pytest.mark.parametrize("length", [0, MAX_MESSAGE + 1, 2**32 - 1])
    def test_that_cannot_be_are_refused_before_they_are_read(self, length: int) -> None:
        with pytest.raises(PeerError, match=rf"a message of {length:,} bytes was announced, 1 to {MAX_MESSAGE:,} are allowed"):
            frame_length(length.to_bytes(4, "big"))

    def test_that_can_be_are_measured(self) -> None:
        assert frame_length(b"\x00\x00\x01\x02") == 258
        assert frame_length(MAX_MESSAGE.to_bytes(4, "big")) == MAX_MESSAGE


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[..., None]], tuple[str, int]]]:
    """Answer one connection by a function, on a thread; returns the address."""
    threads: list[threading.Thread] = []
    listeners: list[socket.socket] = []

    def serve(answer: Callable[..., None]) -> tuple[str, int]:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def work() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection, listener) if len(inspect.signature(answer).parameters) > 1 else answer(connection)

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        address: tuple[str, int] = listener.getsockname()
        return address

    yield serve
    for thread in threads:
        thread.join(30)
    for listener in listeners:
        listener.close()


Serve = Callable[[Callable[..., None]], tuple[str, int]]


class TestBlockingWire:
    def test_nobody_there(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
        with pytest.raises(PeerError, match=r"does not answer \(.*refused.*; is its host up, and its port open"):
            BlockingWire(address, CLAIMS, b"secret", 5.0)

    def test_somebody_who_says_nothing(self, serve: Serve) -> None:
        done = threading.Event()
        address = serve(lambda connection: done.wait(30) and None)  # type: ignore[func-returns-value]
        with pytest.raises(PeerError, match=r"did not answer within 0.1 s .*timed out"):
            BlockingWire(address, CLAIMS, b"secret", 0.1)
        done.set()

    def test_something_else(self, serve: Serve) -> None:
        address = serve(lambda connection: connection.sendall(b"220 mail.example ESMTP\r\n"))
        with pytest.raises(PeerError, match=r"at 127\.0\.0\.1:.*: no TLS handshake .*; it is not an agent, or one of another gemini-ft"):
            BlockingWire(address, CLAIMS, b"secret", 5.0)

    def test_an_impostor_who_does_not_know_the_secret(self, serve: Serve) -> None:
        def impostor(connection: socket.socket) -> None:
            with contextlib.suppress(OSError):
                tls_context(b"another", server=True).wrap_socket(connection, server_side=True).close()

        with pytest.raises(SecretError, match="does not know this run's secret; something else listens at its address"):
            BlockingWire(serve(impostor), CLAIMS, b"secret", 5.0)

    def test_a_peer_that_hangs_up_in_the_middle_of_the_bytes(self, serve: Serve) -> None:
        head = pack(Data(owner=0, version=Version(Incarnation(1, "a"), 1), offset=0, nbytes=100))

        def quitter(connection: socket.socket, listener: socket.socket) -> None:
            with tls_context(b"secret", server=True).wrap_socket(connection, server_side=True) as tls:
                tls.recv(1000)
                tls.sendall(pack(Accepted(lanes=[b"i" * ID_BYTES + bytes(KEY_BYTES)], encrypt=False)) + head)
                with listener.accept()[0] as second:
                    assert second.recv(1000) == MARK + b"i" * ID_BYTES
                    second.sendall(b"only this")

        wire = BlockingWire(serve(quitter), CLAIMS, b"secret", 5.0)
        assert isinstance(wire.receive(), Data)
        with pytest.raises(PeerError, match=r"closed the connection|stopped answering"):
            wire.payload()([memoryview(bytearray(100))])
        wire.close()
