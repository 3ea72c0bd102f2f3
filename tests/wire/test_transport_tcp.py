"""Connections between agents over real sockets: bytes arrive whole and in order, strangers do not get in, nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import socket
import time
import warnings
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_kit import Job, open_fds

from gemini_ft.core.roots import checksum
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import ConfigError, PeerError, SecretError
from gemini_ft.wire import handshake
from gemini_ft.wire.frames import BlockingWire
from gemini_ft.wire.handshake import dial, listen
from gemini_ft.wire.lane import ID_BYTES, KEY_BYTES, BlockingLane
from gemini_ft.wire.lane_thread import LaneThread
from gemini_ft.wire.messages import MAX_MESSAGE, PROTOCOL_VERSION, Chunk, Notice, kind_of, pack
from gemini_ft.wire.peer_messages import Accepted, Claims, Data, Fetch, Heartbeat, PeerMessage, ReportFinished
from gemini_ft.wire.tcp import Connection
from gemini_ft.wire.trust import tls_context

CLAIMS = Claims(run="r", stream="s", host="h", to="", role="replicate", incarnation=None)
SECRET = b"secret"
LANES = 6
both = pytest.mark.parametrize("encrypt", [False, True], ids=["sealed", "encrypted"])


class Recorder:
    """A handler that keeps what it hears; payloads go to ``room``."""

    def __init__(self, room: bytearray | None = None) -> None:
        self.heard: list[PeerMessage] = []
        self.whole: list[PeerMessage] = []
        self.digests: list[int] = []
        self.lost: str | None = None
        self._room = room
        self._news = asyncio.Event()

    def on_message(self, message: PeerMessage) -> memoryview | None:
        self.heard.append(message)
        self._news.set()
        return memoryview(self._room)[message.offset :][: message.nbytes] if self._room is not None and isinstance(message, Chunk) else None

    def on_bytes(self, message: PeerMessage, digest: int) -> None:
        self.whole.append(message)
        self.digests.append(digest)
        self._news.set()

    def on_lost(self, reason: str) -> None:
        self.lost = reason
        self._news.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self._news.clear()
                await self._news.wait()


class Place:
    """A listening side."""

    def __init__(self, room: bytearray | None = None, secret: bytes = SECRET, encrypt: bool = False) -> None:
        self.handlers: list[Recorder] = []
        self.connections: list[Connection] = []
        self.log: list[str] = []
        self._room, self._secret, self._encrypt = room, secret, encrypt
        self.greeting: PeerMessage | None = None

    async def __aenter__(self) -> Place:
        self._server = await listen("127.0.0.1", None, lambda: self._secret, self.accept, self.log.append, lambda stream: self._encrypt)
        self.address = self._server.address
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in self.connections:
            connection.abort("the end")
        await asyncio.sleep(0)

    def accept(self, connection: Connection, claims: Claims) -> Recorder:
        self.connections.append(connection)
        self.handlers.append(Recorder(self._room))
        if self.greeting is not None:
            asyncio.get_running_loop().call_soon(connection.send, self.greeting)
        return self.handlers[-1]

    @staticmethod
    async def until(condition: Callable[[], Any]) -> None:
        """Of what nobody is told of."""
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.001)

    async def dial(self, handler: Recorder, secret: bytes = SECRET) -> Connection:
        return await dial(self.address, CLAIMS, secret, handler)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def chunk(offset: int, nbytes: int) -> Chunk:
    return Chunk(owner=0, iteration=1, index=0, offset=offset, nbytes=nbytes, digest=0)


class TestBytes:
    @both
    def test_arrive_whole_and_in_order_in_the_place_they_belong(self, encrypt: bool) -> None:
        source = np.random.default_rng(0).bytes(5 * 2**20 + 17)
        room = bytearray(len(source))
        sizes = [1, 65536, 2**20, 4 * 2**20 - 65536]
        sizes.append(len(source) - sum(sizes))

        async def work() -> None:
            async with Place(room, encrypt=encrypt) as place:
                ours = Recorder()
                connection = await place.dial(ours)
                at = 0
                for number, size in enumerate(sizes):
                    connection.send(chunk(at, size), memoryview(source)[at : at + size])
                    connection.send(ReportFinished(rank=number))
                    at += size
                theirs = place.handlers[0]
                await theirs.until(lambda: len(theirs.heard) == 2 * len(sizes))
                assert [kind_of(message) for message in theirs.heard] == ["chunk", "report_finished"] * len(sizes)
                assert len(theirs.whole) == len(sizes)
                pieces = [source[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
                assert theirs.digests == [checksum(piece) for piece in pieces]
                await connection.flushed(1)  # its lanes say that all has left a moment after it was heard
                connection.abort("done")
                await theirs.until(lambda: theirs.lost)
                assert ours.lost == "done"

        run(work())
        assert room == source

    @both
    def test_of_a_connection_that_is_just_being_lost_can_be_counted_and_given_up(self, encrypt: bool) -> None:
        """For one turn of the loop TLS has forgotten its socket, and not said so: a session could neither be closed nor opened then."""

        async def work() -> None:
            async with Place(encrypt=encrypt) as place:
                connection = await place.dial(Recorder())
                before = connection.meter()
                transport: Any = connection.transport
                transport._ssl_protocol._transport.abort()
                await asyncio.sleep(0)
                assert transport.get_extra_info("socket") is None
                assert not connection.closed.is_set()
                assert connection.unacknowledged >= 0
                assert connection.meter().acked >= before.acked
                connection.abort("the session is over")
                await connection.closed.wait()
                assert connection.unacknowledged == 0

        run(work())

    def test_that_nobody_wants_are_thrown_away(self) -> None:
        async def work() -> None:
            async with Place(room=None) as place:
                connection = await place.dial(Recorder())
                connection.send(chunk(0, 2**20), memoryview(bytes(2**20)))
                connection.send(Notice(text="still here"))
                await place.handlers[0].until(lambda: place.handlers[0].heard[-1:] == [Notice(text="still here")])
                connection.abort("done")

        run(work())

    def test_that_do_not_fit_where_they_belong_end_the_connection(self) -> None:
        async def work() -> None:
            async with Place(bytearray(100)) as place:
                connection = await place.dial(Recorder())
                connection.send(chunk(50, 60), memoryview(bytes(60)))
                await place.handlers[0].until(lambda: place.handlers[0].lost)
                assert "announced 60 bytes where 50 are due" in str(place.handlers[0].lost)
                assert not place.handlers[0].whole

        run(work())

    def test_to_a_peer_that_takes_nothing_in_are_let_go_when_the_connection_is_aborted(self) -> None:
        async def work() -> None:
            async with Place(bytearray(2**23)) as place:
                ours = Recorder()
                connection = await place.dial(ours)
                transport = place.connections[0].transport
                assert transport is not None
                transport.pause_reading()
                for _ in range(8):
                    connection.send(chunk(0, 2**23), memoryview(bytes(2**23)))
                await place.until(lambda: connection.unacknowledged > 0)
                assert connection.backlog > 1
                waiting = asyncio.create_task(connection.flushed(1))
                connection.abort("too slow")
                await asyncio.wait_for(waiting, 10)
                assert ours.lost == "too slow"
                transport.resume_reading()

        run(work())


class Valve:
    """Lets out what it is told to."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._allowed: asyncio.Queue[int] = asyncio.Queue()

    async def __call__(self, nbytes: int) -> int:
        self.asked.append(nbytes)
        return min(nbytes, await self._allowed.get())

    def allow(self, *nbytes: int) -> None:
        for each in nbytes:
            self._allowed.put_nowait(each)


class TestMessages:
    def test_to_a_peer_that_takes_none_in_are_not_kept_without_end(self) -> None:
        async def work() -> None:
            async with Place() as place:
                ours = Recorder()
                connection = await place.dial(ours)
                transport = place.connections[0].transport
                assert transport is not None
                transport.pause_reading()
                for _ in range(2 * MAX_MESSAGE // 2**20 + 1):
                    connection.send_frame(bytes(2**20))
                await ours.until(lambda: ours.lost)
                assert "it does not take in what it is told" in str(ours.lost)

        run(work())

    def test_that_are_refused_end_a_connection_when_they_have_been_read(self) -> None:
        """Ended in the midst of it, asyncio's TLS reported an error of its own if it had just heard that the peer has hung up."""

        async def work() -> None:
            async with Place() as place:
                await place.dial(Recorder())
                (connection,), (theirs,) = place.connections, place.handlers
                assert connection.transport is not None
                for _ in range(2):  # the second is not heard any more
                    connection.get_buffer(4)[:] = b"\xff" * 4
                    connection.buffer_updated(4)
                assert not connection.transport.is_closing()
                await theirs.until(lambda: theirs.lost)
                assert connection.refused
                assert "a message of 4,294,967,295 bytes was announced" in str(theirs.lost)

        run(work())

    def test_that_are_signs_of_life_of_a_reader_are_heard_while_it_takes_nothing_in(self) -> None:
        about: dict[str, Any] = {"call": 1, "owner": 0, "version": Version(Incarnation(1, "n"), 1), "offset": 0, "nbytes": 2**20}
        payload = memoryview(bytes(2**20))

        async def work() -> None:
            async with Place() as place:
                claims = CLAIMS.model_copy(update={"role": "fetch", "lanes": 1})
                with contextlib.closing(await asyncio.to_thread(BlockingWire, place.address, claims, SECRET, 30.0)) as wire:
                    theirs = place.handlers[0]
                    for _ in range(100):
                        place.connections[0].send(Data(**about), payload)
                    await place.until(lambda: 64 < place.connections[0].backlog < 100)
                    for message in (Heartbeat(), Heartbeat(), Fetch(**about)):
                        await asyncio.to_thread(wire.send, message)
                    await theirs.until(lambda: len(theirs.heard) == 2)
                    await asyncio.sleep(0.1)
                    assert theirs.heard == [Heartbeat(), Heartbeat()]

        run(work())


class TestValve:
    def test_lets_a_payload_out_in_parts(self) -> None:
        source = np.random.default_rng(0).bytes(2**20)
        room = bytearray(len(source))

        async def work() -> None:
            async with Place(room) as place:
                connection, valve = await place.dial(Recorder()), Valve()
                connection.shape(hold_back=True, max_rate=None, low_priority=False)
                connection.send(chunk(0, len(source)), memoryview(source), valve)
                theirs, parts = place.handlers[0], [1, 100_000, 2**19]
                for count in range(len(parts)):
                    valve.allow(parts[count])
                    gone = sum(parts[: count + 1])
                    await place.until(lambda gone=gone: room[:gone] == source[:gone])
                    assert not any(room[gone:])
                    assert valve.asked[-1] == len(source) - gone
                assert not theirs.whole
                valve.allow(len(source))
                await theirs.until(lambda: theirs.whole)
                connection.abort("done")

        run(work())
        assert room == source

    def test_holds_back_nothing_but_its_payload_and_what_comes_after(self) -> None:
        async def work() -> None:
            async with Place(bytearray(100)) as place:
                connection, valve = await place.dial(Recorder()), Valve()
                connection.send(Notice(text="before"))
                connection.send(chunk(0, 100), memoryview(bytes(100)), valve)
                connection.send(Notice(text="after"))
                theirs = place.handlers[0]
                await theirs.until(lambda: len(theirs.heard) == 2)
                assert [kind_of(message) for message in theirs.heard] == ["notice", "chunk"]
                assert connection.backlog == 1
                valve.allow(100)
                await theirs.until(lambda: theirs.heard[-1] == Notice(text="after"))
                assert len(theirs.whole) == 1
                connection.abort("done")

        run(work())

    def test_that_never_opens_is_let_go_with_the_connection(self) -> None:
        async def work() -> None:
            async with Place(bytearray(100)) as place:
                ours, valve = Recorder(), Valve()
                connection = await place.dial(ours)
                connection.send(chunk(0, 100), memoryview(bytes(100)), valve)
                await place.until(lambda: valve.asked)
                connection.abort("enough")
                await ours.until(lambda: ours.lost == "enough")
                assert connection.unacknowledged == 0

        run(work())


class TestMeter:
    def test_counts_what_was_acknowledged(self) -> None:
        nbytes = 2**26  # long enough for the clock by which the kernel counts

        async def work() -> None:
            async with Place(bytearray(nbytes)) as place:
                connection = await place.dial(Recorder())
                before = connection.meter()
                connection.send(chunk(0, nbytes), memoryview(bytes(nbytes)))
                await place.handlers[0].until(lambda: place.handlers[0].whole)
                await place.until(lambda: connection.unacknowledged == 0)
                after = connection.meter()
                assert nbytes <= after.acked - before.acked <= nbytes + 1000
                assert after.busy > before.busy
                assert 0 < after.rtt < 10
                await asyncio.sleep(0.1)
                assert connection.meter().busy - after.busy < 0.05  # nothing to send is not busy
                connection.abort("done")

        run(work())

    @both
    def test_what_was_let_out_is_under_way_until_the_peer_has_it(self, encrypt: bool) -> None:
        """Also what the kernel has not taken in yet: the gate must not give it away a second time."""
        nbytes = 2**25

        async def work() -> None:
            async with Place(bytearray(nbytes), encrypt=encrypt) as place:
                connection, valve = await place.dial(Recorder()), Valve()
                transport = place.connections[0].transport
                assert transport is not None
                transport.pause_reading()
                await asyncio.sleep(0)
                connection.shape(hold_back=True, max_rate=None, low_priority=False)
                before = connection.meter().acked
                connection.send(chunk(0, nbytes), memoryview(bytes(nbytes)), valve)
                valve.allow(nbytes // 2)
                await place.until(lambda: connection.meter().acked > before + 1000)
                assert nbytes // 4 < connection.unacknowledged <= nbytes // 2 + 1000  # the peer's kernel took some of it
                transport.resume_reading()
                await place.until(lambda: connection.unacknowledged == 0)
                valve.allow(nbytes)
                await place.handlers[0].until(lambda: place.handlers[0].whole)
                connection.abort("done")

        run(work())


class TestShape:
    def test_a_rate_that_is_not_to_be_exceeded_is_not(self) -> None:
        nbytes = 2**21

        async def seconds(rate: int) -> float:
            async with Place(bytearray(nbytes)) as place:
                connection = await place.dial(Recorder())
                connection.shape(hold_back=False, max_rate=rate, low_priority=False)
                before = time.monotonic()
                connection.send(chunk(0, nbytes), memoryview(bytes(nbytes)))
                await place.handlers[0].until(lambda: place.handlers[0].whole)
                connection.abort("done")
                return time.monotonic() - before

        async def work() -> None:
            assert await seconds(2 * nbytes) > 0.25  # half a second's worth, half of which may go at once

        run(work())

    @pytest.mark.parametrize("low", [True, False])
    def test_low_priority_marks_packets(self, low: bool) -> None:
        async def work() -> None:
            async with Place() as place:
                connection = await place.dial(Recorder())
                connection.shape(hold_back=False, max_rate=None, low_priority=low)
                assert connection.payload_sockets[0].getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 4 * low  # DSCP 1 (RFC 8622)
                connection.abort("done")

        run(work())


class TestHandshake:
    def test_what_follows_it_at_once_is_heard(self) -> None:
        async def work() -> None:
            async with Place() as place:
                place.greeting = ReportFinished(rank=7)
                for _ in range(20):
                    ours = Recorder()
                    connection = await place.dial(ours)
                    await ours.until(lambda ours=ours: ours.heard == [place.greeting])
                    connection.abort("done")

        run(work())

    def test_without_the_secret_fails_on_both_sides(self) -> None:
        async def work() -> None:
            async with Place() as place:
                with pytest.raises(SecretError, match="the peer does not know this run's secret; something else listens"):
                    await place.dial(Recorder(), secret=b"guess")
                await place.until(lambda: place.log)
                assert not place.handlers
                assert "it does not know this run's secret" in place.log[0] or "it hung up; perhaps it does not know" in place.log[0]

        run(work())

    def test_with_something_else_says_so(self) -> None:
        async def mailer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail.example ESMTP\r\n")
            await reader.read()
            writer.close()

        async def work() -> None:
            server = await asyncio.start_server(mailer, "127.0.0.1", 0)
            async with server:
                ours = Recorder()
                with pytest.raises(PeerError, match=r"no TLS handshake .*; it is not an agent, or one of another gemini-ft"):
                    await dial(server.sockets[0].getsockname(), CLAIMS, SECRET, ours)
                assert not ours.heard

        run(work())

    def test_with_nobody_fails_in_time_and_leaves_nothing_open(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(handshake, "TIMEOUT", 0.05)

        async def work() -> None:
            with socket.create_server(("127.0.0.1", 0)) as silent:
                before = open_fds(os.getpid())
                for _ in range(10):
                    with pytest.raises(PeerError, match=r"did not answer within 0.05 s \(timeout\); is its host up, and its port open\?"):
                        await dial(silent.getsockname(), CLAIMS, SECRET, Recorder())
                await asyncio.sleep(0)
                assert open_fds(os.getpid()) <= before + 1
            with pytest.raises(PeerError, match=r"does not answer \(.*Connect call failed"):
                await dial(silent_address, CLAIMS, SECRET, Recorder())

        with socket.create_server(("127.0.0.1", 0)) as closed:
            silent_address = closed.getsockname()
        run(work())

    @pytest.mark.parametrize("ended_by", ["this side", "that side"])
    def test_that_ends_at_any_moment_leaves_no_error_behind(self, ended_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The answer may come between a cancellation and the end of the dial, and a connection may break when nobody waits for it."""
        monkeypatch.setattr(handshake, "STRANGERS", 1)
        complaints: list[dict[str, Any]] = []

        async def work() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
            async with Place() as place:
                for turns in itertools.count():
                    dialling = asyncio.create_task(place.dial(Recorder()))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    was_in_time = dialling.done()
                    if ended_by == "that side":
                        _, newcomer = await asyncio.open_connection(*place.address)  # for whom the stranger before has to leave
                        newcomer.close()
                    dialling.cancel()
                    with contextlib.suppress(asyncio.CancelledError, PeerError):
                        (await dialling).abort("the end")
                    if was_in_time:
                        break
                assert turns > 5
            await asyncio.sleep(0.05)

        run(work())
        gc.collect()
        assert not complaints

    @pytest.mark.parametrize("said", [b"", b"\x16\x03", b"gemini-ft lane\n", b"GET / HTTP/1.1\r\n\r\n"])
    def test_that_a_stranger_does_not_finish_ends_in_time(self, said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(handshake, "TIMEOUT", 0.05)

        async def work() -> None:
            async with Place() as place:
                reader, writer = await asyncio.open_connection(*place.address)
                writer.write(said)
                with contextlib.suppress(ConnectionResetError):
                    await reader.read(-1)
                writer.close()
                await place.until(lambda: place.log)
                assert place.log[0].startswith("refused 127.0.0.1:")

        run(work())

    def test_of_a_thousand_strangers_lets_an_honest_peer_in(self) -> None:
        async def work() -> None:
            async with Place(bytearray(100)) as place:
                before = open_fds(os.getpid())
                strangers = [await asyncio.open_connection(*place.address) for _ in range(1000)]
                connection = await place.dial(Recorder())
                connection.send(chunk(0, 100), memoryview(bytes(100)))
                await place.handlers[0].until(lambda: place.handlers[0].whole)
                ours = open_fds(os.getpid()) - before - len(strangers)
                assert ours < 2 * handshake.STRANGERS
                connection.abort("done")
                for _, writer in strangers:
                    writer.close()

        run(work())

    @pytest.mark.parametrize("turns", range(4))
    def test_that_comes_while_the_port_is_closed_is_closed_too(self, turns: int) -> None:
        """Even if its greeting has not begun: nothing else would close it."""

        strangers = []

        async def work() -> None:
            async with Place() as place:
                strangers.append(socket.create_connection(place.address, timeout=30))
                for _ in range(turns):
                    await asyncio.sleep(0)

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", ResourceWarning)
            run(work())
        assert not said
        with strangers[0], contextlib.suppress(ConnectionResetError):
            assert not strangers[0].recv(1)

    def test_of_another_protocol_is_refused_by_number(self) -> None:
        async def work() -> None:
            async with Place() as place:
                with pytest.raises(PeerError, match=rf"this host speaks protocol {PROTOCOL_VERSION}, host 'h' 99; run the same gemini-ft"):
                    await dial(place.address, CLAIMS.model_copy(update={"protocol": 99}), SECRET, Recorder())

        run(work())

    def test_whose_lane_never_comes_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(handshake, "TIMEOUT", 0.2)
        opened = handshake.open_lane

        async def open_another(address: tuple[str, int], opens: bytes, **more: Any) -> LaneThread:
            return await opened(address, bytes(ID_BYTES) + opens[ID_BYTES:], **more)

        monkeypatch.setattr(handshake, "open_lane", open_another)

        async def work() -> None:
            async with Place() as place:
                connection = await place.dial(Recorder())
                await place.until(lambda: any("it brings a lane that no connection waits for" in line for line in place.log))
                await place.handlers[0].until(lambda: place.handlers[0].lost)
                connection.abort("done")

        run(work())

    @pytest.mark.parametrize("error", [PeerError("no such place"), ValueError("odd")], ids=repr)
    def test_whose_last_lane_brings_an_error_ends(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was announced before is heard when the last lane is there: an error must not leave a connection that hears nothing."""
        take_lane = handshake.Listener.take_lane

        async def work() -> None:
            async with Place() as place:

                async def take_late(listener: handshake.Listener, sock: socket.socket, peer: str) -> None:
                    transport: Any = place.connections[0].transport
                    await place.until(lambda: not transport.is_reading())  # as something waits for lanes
                    await take_lane(listener, sock, peer)

                def fail(message: PeerMessage) -> None:
                    raise error

                monkeypatch.setattr(handshake.Listener, "take_lane", take_late)
                connection = await place.dial(Recorder())
                theirs = place.handlers[0]
                monkeypatch.setattr(theirs, "on_message", fail)
                connection.send(chunk(0, 10), memoryview(bytes(10)))
                await place.until(lambda: theirs.lost)
                assert str(error) in str(theirs.lost)
                connection.abort("done")

        run(work())

    def test_whose_lane_cannot_be_made_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*given: Any, dialled: bool, **more: Any) -> BlockingLane:
            if dialled:
                return BlockingLane(*given, dialled=dialled, **more)
            raise MemoryError("no room")

        monkeypatch.setattr(handshake, "BlockingLane", fail)

        async def work() -> None:
            async with Place() as place:
                connection = await place.dial(Recorder())
                await place.handlers[0].until(lambda: place.handlers[0].lost)
                assert place.handlers[0].lost == "a lane could not be attached: no room"
                assert "refused 127.0.0.1:" in place.log[0]
                connection.abort("done")

        run(work())

    def test_of_many_lanes_takes_no_place_of_a_stranger(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(handshake, "STRANGERS", 2)
        take_lane, came = handshake.Listener.take_lane, list[str]()

        async def take_together(listener: handshake.Listener, sock: socket.socket, peer: str) -> None:
            came.append(peer)
            await Place.until(lambda: len(came) == LANES)
            await take_lane(listener, sock, peer)

        monkeypatch.setattr(handshake.Listener, "take_lane", take_together)

        async def work() -> None:
            async with Place(bytearray(10)) as place:
                connection = await dial(place.address, CLAIMS.model_copy(update={"lanes": LANES}), SECRET, Recorder())
                connection.send(chunk(0, 10), memoryview(bytes(10)))
                theirs = place.handlers[0]
                await theirs.until(lambda: theirs.whole or theirs.lost)
                assert theirs.whole
                connection.abort("done")

        run(work())

    @pytest.mark.parametrize(
        ("lanes", "encrypt", "said"),
        [
            ([], True, "opens 0 lanes for payloads in place of 2"),
            ([bytes(ID_BYTES + KEY_BYTES)] * 3, True, "opens 3 lanes for payloads in place of 2"),
            ([bytes(ID_BYTES + KEY_BYTES), bytes(ID_BYTES)], True, "opens a lane with 16 bytes in place of 48"),
            ([bytes(ID_BYTES + KEY_BYTES)] * 2, False, "does not encrypt payloads, which this host asks for"),
        ],
    )
    def test_with_an_answer_to_another_wish_is_refused(self, lanes: list[bytes], encrypt: bool, said: str) -> None:
        claims = CLAIMS.model_copy(update={"lanes": 2, "encrypt": True})
        answer = pack(Accepted(lanes=lanes, encrypt=encrypt))
        context = tls_context(SECRET, server=True)

        async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                if await reader.read(1000):
                    writer.write(answer)
                    await reader.read()
            writer.close()

        async def work() -> None:
            async with await asyncio.start_server(answers, "127.0.0.1", 0, ssl=context) as server:
                address = server.sockets[0].getsockname()
                with pytest.raises(PeerError, match=said):
                    await dial(address, claims, SECRET, Recorder())
                with pytest.raises(PeerError, match=said):
                    await asyncio.to_thread(BlockingWire, address, claims, SECRET, 5.0)

        run(work())

    @pytest.mark.parametrize("wanted_by", ["nobody", "this side", "that side"])
    def test_encrypts_if_either_side_wants_it(self, wanted_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
        lanes: list[bool] = []

        def seen(*given: Any, encrypt: bool, **more: Any) -> BlockingLane:
            lanes.append(encrypt)
            return BlockingLane(*given, encrypt=encrypt, **more)

        monkeypatch.setattr(handshake, "BlockingLane", seen)

        async def work() -> None:
            async with Place(encrypt=wanted_by == "that side") as place:
                connection = await dial(place.address, CLAIMS.model_copy(update={"encrypt": wanted_by == "this side"}), SECRET, Recorder())
                await place.until(lambda: len(lanes) == 2)
                assert lanes == [wanted_by != "nobody"] * 2
                connection.abort("done")

        run(work())


class TestEncrypted:
    def test_between_agents_replicates_and_recovers(self, tmp_path: Path) -> None:
        from gemini_ft.recovery.readers import PeerShard

        with Job(tmp_path) as job:
            ranks = job.start(hello={"encrypt": True})
            job.commit(ranks, 1, 2, 3)
            shard = PeerShard("b", ranks[1].address, job.claims(), ranks[0].hello.secret, 0, job.version(3), timeout=10.0)
            assert sum(len(view) for _, view in shard.chunks()) == 4 * 2**16
            shard.close()


class TestPorts:
    def test_the_one_before_is_taken_again(self) -> None:
        async def work() -> None:
            async with Place() as place:
                port = place.address[1]
            server = await listen("127.0.0.1", None, lambda: SECRET, place.accept, place.log.append, lambda stream: False, preferred=port)
            assert server.address[1] == port
            other = await listen("127.0.0.1", None, lambda: SECRET, place.accept, place.log.append, lambda stream: False, preferred=port)
            assert other.address[1] != port  # taken: any other is better than none
            for each in (server, other):
                each.close()

        run(work())

    def test_an_address_of_another_host_is_refused(self) -> None:
        async def work() -> None:
            await listen("203.0.113.1", None, lambda: SECRET, Place().accept, print, lambda stream: False)

        with pytest.raises(
            ConfigError, match=r"no port can be listened on at 203\.0\.113\.1 .*; free one, widen port_range, or choose another"
        ):
            run(work())
