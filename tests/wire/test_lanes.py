"""Payloads on several lanes: cut, aborted and hung in every slice, they arrive as they were sent or not at all, and nothing lands late."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from gemini_ft.core.roots import checksum
from gemini_ft.errors import PeerError
from gemini_ft.wire import lane as module
from gemini_ft.wire import lane_thread, network, tcp
from gemini_ft.wire.frames import BlockingWire
from gemini_ft.wire.handshake import dial, listen
from gemini_ft.wire.lane import BlockingLane
from gemini_ft.wire.lane_thread import Meter
from gemini_ft.wire.messages import Chunk, Notice
from gemini_ft.wire.peer_messages import Claims, PeerMessage, Unchanged
from gemini_ft.wire.tcp import Connection
from gemini_ft.wire.trust import tls_context

LANES, SLICES, SLICE = 3, 4, 64 * 1024
NBYTES = SLICES * SLICE  # of a payload
PAYLOADS = 9
SOURCE = os.urandom(PAYLOADS * NBYTES)


class End:
    """A handler: payloads go to their place in ``room``."""

    def __init__(self) -> None:
        self.room = bytearray(PAYLOADS * NBYTES)
        self.heard: list[PeerMessage] = []
        self.whole: dict[int, int] = {}  # index -> digest
        self.lost: str | None = None
        self.connection: Connection

    def on_message(self, message: PeerMessage) -> memoryview | None:
        self.heard.append(message)
        return memoryview(self.room)[message.offset :][: message.nbytes] if isinstance(message, Chunk) else None

    def on_bytes(self, message: PeerMessage, digest: int) -> None:
        assert isinstance(message, Chunk)
        self.whole[message.index] = digest

    def on_lost(self, reason: str) -> None:
        self.lost = reason


class Pair:
    """Two connected ends; the first has dialled, and sends."""

    async def __aenter__(self) -> Pair:
        self.mine, self.theirs = End(), End()

        def accept(connection: Connection, claims: Claims) -> End:
            self.theirs.connection = connection
            return self.theirs

        self._listener = await listen("127.0.0.1", None, lambda: b"secret", accept, print, lambda stream: self.encrypt)
        claims = Claims(run="r", stream="s", host="h", to="", role="replicate", incarnation=None, lanes=LANES)
        self.mine.connection = await dial(self._listener.address, claims, b"secret", self.mine)
        return self

    def __init__(self, encrypt: bool = False) -> None:
        self.encrypt = encrypt

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        for end in (self.mine, self.theirs):
            end.connection.abort("the end")
        await until(lambda: self.mine.lost and self.theirs.lost)

    def send(self) -> None:
        for index in range(PAYLOADS):
            chunk = Chunk(owner=0, iteration=1, index=index, offset=index * NBYTES, nbytes=NBYTES, digest=0)
            self.mine.connection.send(chunk, memoryview(SOURCE)[index * NBYTES :][:NBYTES])
        self.mine.connection.send(Notice(text="all"))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE", SLICE)


class Moment:
    """Stands between a slice and what follows: calls ``deed`` at the slice of that number, counted over the payloads of one lane."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, lane: int, number: int, deed: Callable[[Any, memoryview], None]) -> None:
        self._lanes: dict[int, int] = {}  # id of an end -> its number
        self._counts: dict[int, itertools.count[int]] = {}
        self._wanted, self._deed = (lane, number), deed
        self.came = threading.Event()
        before = getattr(BlockingLane, name)

        def after(end: BlockingLane, piece: memoryview, *rest: Any) -> Any:
            found = before(end, piece, *rest)
            if len(piece) > module.TAG_BYTES:
                which = self._lanes.setdefault(id(end), len(self._lanes))
                if (which, next(self._counts.setdefault(which, itertools.count()))) == self._wanted:
                    self.came.set()
                    deed(end, piece)
            return found

        monkeypatch.setattr(BlockingLane, name, after)


@pytest.mark.parametrize("encrypt", [False, True], ids=["sealed", "encrypted"])
def test_payloads_arrive_on_all_lanes_and_other_messages_wait_for_those_before_them(encrypt: bool) -> None:
    async def work() -> None:
        async with Pair(encrypt) as pair:
            assert pair.mine.connection.lanes == pair.theirs.connection.lanes == LANES
            pair.send()
            await until(lambda: pair.theirs.heard[-1:] == [Notice(text="all")])
            assert pair.theirs.room == SOURCE
            assert pair.theirs.whole == {index: checksum(SOURCE[index * NBYTES :][:NBYTES]) for index in range(PAYLOADS)}
            sent = [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192) for sock in pair.mine.connection.payload_sockets]
            assert all(int.from_bytes(info[120:128], "little") > PAYLOADS // LANES * NBYTES for info in sent)  # tcpi_bytes_acked

    run(work())


@pytest.mark.parametrize("number", range(2 * SLICES))
@pytest.mark.parametrize("lane", range(LANES))
def test_after_an_abort_at_any_slice_not_one_byte_lands(lane: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is in the middle of a slice, and slow, is waited for: its memory may be another version's at once."""

    async def work() -> None:
        loop, after = asyncio.get_running_loop(), list[bytes]()
        async with Pair() as pair:

            def abort() -> None:
                pair.theirs.connection.abort("given up")
                after.append(bytes(pair.theirs.room))

            def late(end: BlockingLane, piece: memoryview) -> None:
                loop.call_soon_threadsafe(abort)
                time.sleep(0.01)
                piece[:] = b"late" * (len(piece) // 4)

            moment = Moment(monkeypatch, "_fill", lane, number, late)
            pair.send()
            await until(lambda: pair.mine.lost and pair.theirs.lost)
            assert moment.came.is_set()
            assert after == [pair.theirs.room]
            assert all(digest == checksum(SOURCE[index * NBYTES :][:NBYTES]) for index, digest in pair.theirs.whole.items())
            for index in pair.theirs.whole:
                assert pair.theirs.room[index * NBYTES :][:NBYTES] == SOURCE[index * NBYTES :][:NBYTES]

    run(work())


@pytest.mark.parametrize("number", range(SLICES))
@pytest.mark.parametrize("lane", range(LANES))
def test_a_lane_that_is_cut_at_any_slice_brings_no_wrong_byte(lane: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ends, unless all was in the kernel already. It is dialled anew, and the version starts over."""

    async def work() -> None:
        async with Pair() as pair:
            cut = Moment(monkeypatch, "_fill", lane, number, lambda end, piece: end.socket.shutdown(socket.SHUT_RDWR))
            pair.send()
            await until(lambda: (pair.mine.lost and pair.theirs.lost) or Notice(text="all") in pair.theirs.heard)
            assert cut.came.is_set()
            assert (Notice(text="all") in pair.theirs.heard) == (len(pair.theirs.whole) == PAYLOADS)
            for index, digest in pair.theirs.whole.items():
                assert digest == checksum(SOURCE[index * NBYTES :][:NBYTES])
                assert pair.theirs.room[index * NBYTES :][:NBYTES] == SOURCE[index * NBYTES :][:NBYTES]

    run(work())


def test_a_connection_that_has_just_been_lost_can_be_shaped() -> None:
    """Its lanes were dialled, and it is lost before its sender goes on: an error there would end all replication to that peer."""

    async def work() -> None:
        async with Pair() as pair:
            pair.theirs.connection.abort("lost")
            await until(lambda: pair.mine.lost)
            pair.mine.connection.shape(hold_back=True, max_rate=1000, low_priority=True)

    run(work())


def test_chunks_that_are_unchanged_do_not_wait_for_others() -> None:
    async def work() -> None:
        async with Pair() as pair:
            chunk = Chunk(owner=0, iteration=1, index=0, offset=0, nbytes=NBYTES, digest=0)
            pair.mine.connection.send(chunk, memoryview(SOURCE)[:NBYTES], never)
            pair.mine.connection.send(unchanged := Unchanged(chunk=chunk.model_copy(update={"index": 1})))
            pair.mine.connection.send(Notice(text="all"))
            await until(lambda: pair.theirs.heard == [chunk, unchanged])
            await asyncio.sleep(0.01)
            assert pair.theirs.heard == [chunk, unchanged]

    run(work())


async def never(nbytes: int) -> int:
    """A gate that stays closed."""
    return await asyncio.get_running_loop().create_future()


def test_the_sender_reads_nothing_more_after_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[float] = []

    async def work() -> None:
        async with Pair() as pair:
            await until(lambda: pair.theirs.connection.transport)
            pair.theirs.connection.transport.pause_reading()  # type: ignore[union-attr]
            add = module.Seal.add

            def seen(seal: module.Seal, piece: memoryview) -> memoryview:
                reads.append(time.monotonic())
                return add(seal, piece)

            monkeypatch.setattr(module.Seal, "add", seen)
            for _ in range(40):
                pair.send()
            await until(lambda: len(reads) > SLICES)
            pair.mine.connection.abort("given up")
            ended = time.monotonic()
            await asyncio.sleep(0.05)
            assert max(reads) <= ended

    run(work())


def test_a_thread_that_hangs_is_waited_for_by_the_process_that_alone_has_the_memory(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Memory that the kernel does not bring, for example, on all hosts at once: an agent that ended would take its copies along."""
    monkeypatch.setattr(lane_thread, "PATIENCE", 0.05)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    gone = threading.Event()

    def late(end: BlockingLane, piece: memoryview) -> None:
        gone.wait(20)
        piece[:] = b"late" * (len(piece) // 4)

    async def work() -> None:
        async with Pair() as pair:
            hang = Moment(monkeypatch, "_fill", 1, 2, late)
            pair.send()
            await until(hang.came.is_set)
            threading.Timer(0.2, gone.set).start()
            pair.theirs.connection.abort("given up")
            assert gone.is_set()
            room = bytes(pair.theirs.room)
            await asyncio.sleep(0.02)
            assert pair.theirs.room == room

    run(work())
    assert not ended
    assert "does not let go of its memory" in capfd.readouterr().err


@pytest.mark.parametrize("error", [MemoryError(), ValueError("odd"), SystemError("a fault of a library"), KeyboardInterrupt()], ids=repr)
def test_whatever_ends_a_payload_ends_its_connection(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stayed open would be deaf: the payload never comes, and all that is announced later waits for it."""

    def fail(end: BlockingLane, piece: memoryview) -> None:
        raise error

    async def work() -> None:
        async with Pair() as pair:
            Moment(monkeypatch, "_fill", 1, 2, fail)
            pair.send()
            await until(lambda: pair.theirs.lost is not None)
            assert pair.theirs.lost == (str(error) or type(error).__name__)

    run(work())


def test_the_rate_is_that_of_the_lanes_however_late_the_loop_hears_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "metered", lambda sock: Meter(acked=0, busy=0.0, rtt=0.0))  # which the kernel counts by its own clock
    spans: list[tuple[float, float]] = []
    before = BlockingLane.send

    def slow(end: BlockingLane, part: memoryview, is_last: bool) -> None:
        began = time.monotonic()
        time.sleep(0.002)
        before(end, part, is_last)
        spans.append((began, time.monotonic()))

    async def late(nbytes: int) -> int:
        await asyncio.sleep(0)
        time.sleep(0.015)  # the loop's other work
        return SLICE

    async def work() -> None:
        async with Pair() as pair:
            monkeypatch.setattr(BlockingLane, "send", slow)
            for index in range(PAYLOADS):
                chunk = Chunk(owner=0, iteration=1, index=index, offset=index * NBYTES, nbytes=NBYTES, digest=0)
                pair.mine.connection.send(chunk, memoryview(SOURCE)[index * NBYTES :][:NBYTES], late)
            await until(lambda: len(spans) == PAYLOADS * SLICES and not pair.mine.connection.backlog)
            true, at = 0.0, 0.0
            for began, ended in sorted(spans):
                true, at = true + max(0.0, ended - max(at, began)), max(at, ended)
            assert true <= pair.mine.connection.meter().busy < 2 * true

    run(work())


def test_a_payload_on_a_connection_without_lanes_is_refused() -> None:
    async def work() -> None:
        theirs = End()

        def accept(connection: Connection, claims: Claims) -> End:
            theirs.connection = connection
            return theirs

        listener = await listen("127.0.0.1", None, lambda: b"secret", accept, print, lambda stream: False)
        claims = Claims(run="r", stream="s", host="h", to="", role="report", incarnation=None, lanes=LANES)
        connection = await dial(listener.address, claims, b"secret", End())
        assert connection.lanes == 0
        connection.send(Chunk(owner=0, iteration=1, index=0, offset=0, nbytes=10, digest=0))
        await until(lambda: theirs.lost)
        assert "announced 10 bytes on a connection without lanes" in str(theirs.lost)
        listener.close()
        await asyncio.sleep(0.01)

    run(work())


def test_what_was_changed_in_any_payload_is_not_taken() -> None:
    """Of each lane, each payload has its own tag: the second is not that of the first."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        key = os.urandom(module.KEY_BYTES)
        sender = BlockingLane(mine, key, dialled=True, encrypt=False, peer="b")
        receiver = BlockingLane(theirs, key, dialled=False, encrypt=False, peer="a")
        payload, target = memoryview(b"x" * 100), memoryview(bytearray(100))
        for _ in range(3):
            sender.send(payload, True)
            assert receiver.receive([target[:70], target[70:]], 100) == checksum(payload)
        mine.sendall(bytes(payload) + bytes(module.TAG_BYTES))
        with pytest.raises(PeerError, match="a: a payload was changed on its way"):
            receiver.receive([target], 100)


def trickle(send: Callable[[bytes], object]) -> None:
    """Sends a byte at a time, each before a socket's timeout, until the other end hangs up."""
    with contextlib.suppress(OSError):
        while True:
            send(b"x")
            time.sleep(0.05)


def test_a_trickle_of_a_payload_is_given_up_as_silence_is() -> None:
    """A reader would wait for a chunk of 8 MiB for years."""
    mine, theirs = socket.socketpair()
    theirs.settimeout(0.3)
    sender = threading.Thread(target=trickle, args=(mine.sendall,))
    with mine:
        with theirs:
            receiver = BlockingLane(theirs, os.urandom(module.KEY_BYTES), dialled=False, encrypt=False, peer="a")
            sender.start()
            with pytest.raises(TimeoutError, match="only a trickle of bytes came"):
                receiver.receive([memoryview(bytearray(1000))], 1000)
        sender.join(10)


def test_a_trickle_of_a_message_is_given_up_as_silence_is() -> None:
    claims = Claims(run="r", stream="s", host="h", to="", role="report", incarnation=None)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with (
                contextlib.suppress(OSError),
                tls_context(b"secret", server=True).wrap_socket(listener.accept()[0], server_side=True) as sock,
            ):
                sock.sendall((1000).to_bytes(4, "big"))
                trickle(sock.sendall)

        member = threading.Thread(target=answer)
        member.start()
        with pytest.raises(PeerError, match="only a trickle of bytes came"):
            BlockingWire(listener.getsockname(), claims, b"secret", 0.5)
        member.join(10)


class Networks:
    """An agent with two networks, 127.0.0.1 and 127.0.0.2, and what dials it; either of the two may be closed."""

    def __init__(self) -> None:
        self.ends: list[End] = []
        self.waiting: list[socket.socket] = []

    async def dial(self, closed: str, claims: Claims, further: Sequence[str] = ("127.0.0.2",), *, is_silent: bool = False) -> Connection:
        """A connection whose sockets go by the networks that are not ``closed``, of the first one and ``further`` ones.

        ``is_silent``: the closed one drops what comes, in place of refusing it.
        """

        def accept(connection: Connection, claims: Claims) -> End:
            self.ends.append(End())
            self.ends[-1].connection = connection
            return self.ends[-1]

        listener = self._listener = await listen(
            "127.0.0.1", None, lambda: b"secret", accept, print, lambda stream: False, further=["127.0.0.2"]
        )
        if closed:
            (blocked,) = [sock for sock in listener.sockets if sock.getsockname()[0] == closed]
            asyncio.get_running_loop().remove_reader(blocked)
            if is_silent:
                blocked.listen(0)
                for _ in range(3):  # the kernel takes in one or two more than that, and then none
                    self.waiting.append(socket.socket())
                    self.waiting[-1].setblocking(False)
                    self.waiting[-1].connect_ex(blocked.getsockname())
            else:
                blocked.close()
        self.mine = End()
        self.mine.connection = await dial(listener.address, claims, b"secret", self.mine, further=further)
        return self.mine.connection

    async def close(self) -> None:
        self._listener.close()
        for sock in self.waiting:
            sock.close()
        for end in (self.mine, *self.ends):
            end.connection.abort("the end")
            await until(lambda end=end: end.lost)  # type: ignore[misc]


@pytest.mark.parametrize("closed", ["", "127.0.0.1", "127.0.0.2"])
def test_lanes_are_spread_over_the_networks_that_work(closed: str) -> None:
    async def work() -> None:
        networks = Networks()
        claims = Claims(run="r", stream="s", host="h", to="", role="replicate", incarnation=None, lanes=4)
        connection = await networks.dial(closed, claims)
        taken = [sock.getpeername()[0] for sock in connection.payload_sockets]
        assert taken == (["127.0.0.1", "127.0.0.2"] * 2 if not closed else [{"127.0.0.1": "127.0.0.2"}.get(closed, "127.0.0.1")] * 4)
        for index in range(PAYLOADS):
            chunk = Chunk(owner=0, iteration=1, index=index, offset=index * NBYTES, nbytes=NBYTES, digest=0)
            connection.send(chunk, memoryview(SOURCE)[index * NBYTES :][:NBYTES])
        await until(lambda: len(networks.ends[0].whole) == PAYLOADS)
        assert bytes(networks.ends[0].room) == SOURCE
        await networks.close()

    run(work())


@pytest.mark.parametrize(("further", "seconds"), [([], 60), (["127.0.0.2"], 10)])
def test_a_network_that_is_cut_is_given_up_earlier_where_there_is_another(further: list[str], seconds: int) -> None:
    async def work() -> None:
        networks = Networks()
        claims = Claims(run="r", stream="s", host="h", to="", role="replicate", incarnation=None, lanes=2)
        connection = await networks.dial("", claims, further)
        assert connection.transport is not None
        sockets = [connection.transport.get_extra_info("socket"), *connection.payload_sockets]
        assert [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for sock in sockets] == [seconds * 1000] * 3
        await networks.close()

    run(work())


def test_a_reader_goes_by_the_network_that_works() -> None:
    async def work() -> None:
        networks = Networks()
        claims = Claims(run="r", stream="s", host="h", to="", role="fetch", incarnation=None, lanes=2)
        await networks.dial("127.0.0.1", claims)
        port = networks.mine.connection.payload_sockets[0].getpeername()[1]
        wire = await asyncio.to_thread(BlockingWire, ("127.0.0.1", port), claims, b"secret", 10.0, further=["127.0.0.2"])
        assert wire.socket.getpeername()[0] == "127.0.0.2"
        await asyncio.to_thread(wire.close)
        await networks.close()

    run(work())


@pytest.mark.parametrize("has_processors", [True, False])
def test_a_lane_runs_on_the_processors_of_its_network_cards_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_processors: bool
) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    near = [allowed[-1]] if has_processors else []
    for name, text in {
        "class/net/lo/device/numa_node": "1\n",
        "devices/system/node/node1/cpulist": f"{','.join(map(str, near))}\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(network, "SYSTEM", tmp_path)

    async def work() -> None:
        async with Pair() as pair:
            pair.send()
            await until(lambda: len(pair.theirs.whole) == PAYLOADS)
            lanes = [thread.native_id for thread in threading.enumerate() if thread.name == "gemini-lane"]
            assert len(lanes) == 2 * LANES
            assert all(os.sched_getaffinity(thread) == set(near or allowed) for thread in lanes)  # type: ignore[arg-type]
        assert sorted(os.sched_getaffinity(0)) == allowed

    run(work())


def test_a_network_that_drops_everything_is_passed_over_before_a_host_would_count_as_lost() -> None:
    async def work() -> None:
        networks = Networks()
        claims = Claims(run="r", stream="s", host="h", to="", role="replicate", incarnation=None, lanes=2)
        async with asyncio.timeout(2.4):  # a host is silent after 2.5 s
            connection = await networks.dial("127.0.0.1", claims, is_silent=True)
        assert {sock.getpeername()[0] for sock in connection.payload_sockets} == {"127.0.0.2"}
        await networks.close()

    run(work())
