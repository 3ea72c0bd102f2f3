"""The two ways in which a chunk gets to a peer's memory: this agent sends it itself, or has workers carry it.

Both ask the same gate before any byte leaves, and count the bytes under way. The data, and its fate on arrival, are the same
on both (gemini_ft.agent.replication.send).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

from gemini_ft.config import TrafficConfig
from gemini_ft.wire.lane_thread import Meter, Valve
from gemini_ft.wire.messages import Chunk
from gemini_ft.wire.peer_messages import Parcel, PeerMessage
from gemini_ft.wire.tcp import AHEAD, Connection
from gemini_ft.wire.worker_messages import Dispatch

if TYPE_CHECKING:
    from gemini_ft.agent.replication.send import PeerLink

_SAMPLES = 32  # newest pieces that say how long the shortest of them takes


class ByAgents:
    """The carrier from agent to agent: on the lanes of their connection."""

    def __init__(self, connection: Connection, traffic: TrafficConfig) -> None:
        self._connection = connection
        self.meter, self.send = connection.meter, connection.send
        connection.shape(traffic.when == "idle", traffic.max_rate, traffic.low_priority)

    @property
    def unacknowledged(self) -> int:
        """Bytes that have left, and may not have arrived."""
        return self._connection.unacknowledged

    @property
    def lanes(self) -> int:
        """The number of chunks that travel at a time."""
        return self._connection.lanes

    def send_chunk(self, chunk: Chunk, slot: int, payload: memoryview, valve: Valve) -> None:
        """Queues a chunk of a slot; ``payload`` are its bytes."""
        self._connection.send(chunk, payload, valve)

    async def flushed(self, below: int) -> None:
        """Waits until fewer than ``below`` pieces are queued (a few more where several lanes carry them), or the connection is closed."""
        await self._connection.flushed(below + AHEAD * (self._connection.lanes - 1))

    def close(self) -> None:
        """Does nothing: only the connection is open."""


class ByWorkers:
    """The carrier through workers: the connection carries messages only, chunks go from worker to worker in pieces, several at a time."""

    def __init__(self, connection: Connection, link: PeerLink) -> None:
        self._connection, self._link, self._traffic = connection, link, link.session.traffic
        self._queue: deque[PeerMessage | tuple[Chunk, int, Valve]] = deque()
        self._under_way: dict[int, tuple[int, float]] = {}  # tag -> (bytes, when it was ordered)
        self._seconds: deque[float] = deque(maxlen=_SAMPLES)
        self._acked, self._busy, self._busy_since = 0, 0.0, 0.0
        self._changed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def unacknowledged(self) -> int:
        return sum(nbytes for nbytes, _ in self._under_way.values())

    @property
    def lanes(self) -> int:
        return 1  # a chunk at a time, in parts that go to several sub-buffers

    def meter(self) -> Meter:
        busy = self._busy + (time.monotonic() - self._busy_since if self._under_way else 0.0)
        return Meter(acked=self._acked, busy=busy, rtt=min(self._seconds, default=0.0))

    def send(self, message: PeerMessage) -> None:
        self._put(message)

    def send_chunk(self, chunk: Chunk, slot: int, payload: memoryview, valve: Valve) -> None:
        self._put((chunk, slot, valve))

    async def flushed(self, below: int) -> None:
        while len(self._queue) >= below and not self._connection.closed.is_set():
            await self._change()

    def dispatched(self, tag: int, error: str) -> None:
        if tag not in self._under_way:
            return
        nbytes, ordered = self._under_way.pop(tag)
        now = time.monotonic()
        self._acked += nbytes
        self._seconds.append(now - ordered)
        if not self._under_way:
            self._busy += now - self._busy_since
        self._changed.set()
        if error:
            self._link.astray(error)

    def close(self) -> None:
        self._task.cancel()
        self._under_way.clear()
        self._changed.set()

    # -- inside

    def _put(self, item: PeerMessage | tuple[Chunk, int, Valve]) -> None:
        self._queue.append(item)
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _run(self) -> None:
        try:
            await self._send_all()
        except Exception as error:  # a fault of ours: without this, the stop would go unnoticed
            self._link.astray(f"{type(error).__name__}: {error}")

    async def _send_all(self) -> None:
        while True:
            while not self._queue:
                await self._change()
            item = self._queue[0]
            if isinstance(item, tuple):
                await self._carry(*item)
            else:
                self._connection.send(item)
            self._queue.popleft()
            self._changed.set()

    async def _carry(self, chunk: Chunk, slot: int, valve: Valve) -> None:
        start, target = 0, self._link.keepers[chunk.owner]
        while start < chunk.nbytes:
            while len(self._under_way) >= self._traffic.sub_buffers:
                await self._change()
            nbytes = await valve(min(self._traffic.piece_bytes, chunk.nbytes - start))
            tag = next(self._link.session.tags)
            if not self._under_way:
                self._busy_since = time.monotonic()
            self._under_way[tag] = nbytes, time.monotonic()
            self._connection.send(Parcel(chunk=chunk, start=start, nbytes=nbytes, tag=tag, source=chunk.owner, target=target))
            self._link.order(chunk.owner, Dispatch(tag=tag, target=target, slot=slot, offset=chunk.offset + start, nbytes=nbytes))
            start += nbytes


Carrier = ByAgents | ByWorkers
