"""How chunks get from worker to worker: in order, in pieces, and only so many at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from agent_kit import WAIT

from gemini_ft.agent.replication import carriers
from gemini_ft.agent.replication.carriers import ByWorkers
from gemini_ft.config import TrafficConfig
from gemini_ft.wire.messages import Chunk, kind_of
from gemini_ft.wire.peer_messages import Begin, End, Parcel, PeerMessage
from gemini_ft.wire.worker_messages import Dispatch

PIECE = 4096
PARTS = 3


class Wire:
    """The connection to the peer's agent."""

    def __init__(self) -> None:
        self.sent: list[PeerMessage] = []
        self.closed = asyncio.Event()

    def send(self, message: PeerMessage) -> None:
        self.sent.append(message)


class Road:
    """A way, and what it was told to do."""

    def __init__(self, allowed: int = 10**9) -> None:
        self.wire = Wire()
        self.orders: list[tuple[int, Dispatch]] = []
        self.astray: list[str] = []
        self.open = asyncio.Event()
        self.open.set()
        self._allowed = allowed
        traffic = TrafficConfig.model_validate({"buffer_bytes": PARTS * PIECE, "sub_buffers": PARTS})
        self.way = ByWorkers(
            self.wire,  # type: ignore[arg-type]
            SimpleNamespace(  # type: ignore[arg-type]
                session=SimpleNamespace(traffic=traffic, tags=itertools.count(100)),
                order=lambda owner, dispatch: self.orders.append((owner, dispatch)),
                keepers={0: 7, 1: 8},
                astray=self.astray.append,
            ),
        )

    async def valve(self, nbytes: int) -> int:
        await self.open.wait()
        return min(nbytes, self._allowed)

    def put(self, index: int, nbytes: int, owner: int = 0) -> Chunk:
        chunk = Chunk(owner=owner, iteration=1, index=index, offset=index * 10**6, nbytes=nbytes, digest=0)
        self.way.send_chunk(chunk, 5, memoryview(b""), self.valve)
        return chunk

    async def settled(self) -> None:
        """Nothing happens any more by itself."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def deliver(self) -> None:
        """Let the workers send everything."""
        done = 0
        while done < len(self.orders):
            self.way.dispatched(self.orders[done][1].tag, "")
            done += 1
            await self.settled()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, WAIT))


END = End(owner=0, iteration=1, extras_bytes=0, chunks=2, layout="", digest="", root="")


def test_messages_and_chunks_keep_their_order() -> None:
    async def work() -> None:
        road = Road()
        begin = Begin(owner=0, iteration=1, committed=None)
        road.way.send(begin)
        chunks = [road.put(0, 2 * PIECE), road.put(1, PIECE)]
        road.way.send(END)
        await road.settled()
        await road.deliver()
        first, *parcels, last = road.wire.sent
        assert (first, last) == (begin, END)
        assert [each.chunk for each in parcels if isinstance(each, Parcel)] == [chunks[0], chunks[0], chunks[1]]
        road.way.close()

    run(work())


@pytest.mark.parametrize("nbytes", [1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 17])
@pytest.mark.parametrize("allowed", [10**9, 1000])
def test_a_chunk_travels_in_pieces_that_fit_a_sub_buffer_each_byte_once(nbytes: int, allowed: int) -> None:
    async def work() -> None:
        road = Road(allowed)
        chunk = road.put(2, nbytes, owner=1)
        await road.settled()
        await road.deliver()
        at = 0
        for message, (owner, order) in zip(road.wire.sent, road.orders, strict=True):
            assert isinstance(message, Parcel)
            assert (message.chunk, message.start, message.source, message.target) == (chunk, at, 1, 8)
            assert 0 < message.nbytes <= min(PIECE, allowed)
            assert order == Dispatch(tag=message.tag, target=8, slot=5, offset=chunk.offset + at, nbytes=message.nbytes)
            assert owner == 1
            at += message.nbytes
        assert at == nbytes
        assert len({order.tag for _, order in road.orders}) == len(road.orders)
        assert road.way.meter().acked == nbytes
        road.way.close()

    run(work())


def test_as_many_pieces_are_under_way_as_there_are_sub_buffers() -> None:
    async def work() -> None:
        road = Road()
        road.put(0, 10 * PIECE)
        for done in range(7):
            await road.settled()
            assert len(road.orders) == PARTS + done
            assert road.way.unacknowledged == PARTS * PIECE
            road.way.dispatched(road.orders[done][1].tag, "")
        await road.deliver()
        assert road.way.unacknowledged == 0
        road.way.dispatched(road.orders[0][1].tag, "")  # said twice: counts once
        road.way.dispatched(99, "of another way")
        assert road.way.meter().acked == 10 * PIECE
        assert road.astray == []
        road.way.close()

    run(work())


def test_nothing_leaves_before_the_valve_opens() -> None:
    async def work() -> None:
        road = Road()
        road.open.clear()
        road.put(0, PIECE)
        road.way.send(END)
        await road.settled()
        assert (road.orders, road.wire.sent) == ([], [])
        road.open.set()
        await road.settled()
        assert [kind_of(message) for message in road.wire.sent] == ["parcel", "end"]
        road.way.close()

    run(work())


def test_flushed_waits_until_little_is_queued_or_the_connection_is_closed() -> None:
    async def work() -> None:
        road = Road()
        road.open.clear()
        for index in range(3):
            road.put(index, PIECE)
        task = asyncio.create_task(road.way.flushed(2))
        await road.settled()
        assert not task.done()
        road.open.set()
        await task
        await road.settled()
        road.open.clear()
        for index in range(3):
            road.put(index, PIECE)
        task = asyncio.create_task(road.way.flushed(2))
        await road.settled()
        assert not task.done()
        road.wire.closed.set()
        road.way.close()
        await task

    run(work())


def test_a_piece_that_cannot_be_sent_is_told() -> None:
    async def work() -> None:
        road = Road()
        road.put(0, PIECE)
        await road.settled()
        road.way.dispatched(road.orders[0][1].tag, "no route")
        assert road.astray == ["no route"]
        assert road.way.unacknowledged == 0
        road.way.close()

    run(work())


def test_closed_in_the_middle_nothing_is_under_way_and_nothing_more_is_ordered() -> None:
    async def work() -> None:
        before = asyncio.all_tasks()
        road = Road()
        road.put(0, 10 * PIECE)
        await road.settled()
        road.way.close()
        tags = [order.tag for _, order in road.orders]
        for tag in tags:
            road.way.dispatched(tag, "too late")
        await road.settled()
        assert [order.tag for _, order in road.orders] == tags
        assert road.way.unacknowledged == 0
        assert road.astray == []
        assert asyncio.all_tasks() == before

    run(work())


def test_the_time_in_which_pieces_are_under_way_counts_while_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is always one under way, the rate was that of the first, for which everything had gone."""
    now = 100.0
    monkeypatch.setattr(carriers, "time", SimpleNamespace(monotonic=lambda: now))

    async def work() -> None:
        nonlocal now
        road = Road()
        road.put(0, 2 * PIECE)
        await road.settled()
        for _, dispatch in road.orders[:2]:
            now += 0.5
            assert road.way.meter().busy == pytest.approx(now - 100.0)
            road.way.dispatched(dispatch.tag, "")
        now += 5.0
        assert road.way.meter().busy == pytest.approx(1.0)
        road.way.close()
        assert road.way.meter().busy == pytest.approx(1.0)

    run(work())


def test_the_time_in_which_nothing_is_under_way_does_not_count_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(carriers, "time", SimpleNamespace(monotonic=lambda: now))

    async def work() -> None:
        nonlocal now
        road = Road()
        for index in range(2):
            road.put(index, PIECE)
            await road.settled()
            now += 0.02
            road.way.dispatched(road.orders[index][1].tag, "")
            before = road.way.meter()
            now += 5.0
            assert road.way.meter() == before
        assert (before.rtt, before.busy) == pytest.approx((0.02, 0.04))
        road.way.close()

    run(work())
