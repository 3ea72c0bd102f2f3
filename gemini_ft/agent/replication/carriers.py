"""The ways in which a chunk gets to a peer's memory: this agent sends it, the peer's agent reads it by RDMA, or workers carry it.

Both ask the same gate before any byte leaves, and count the bytes under way. The data, and its fate on arrival, are the same
on both (gemini_ft.agent.replication.send).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from gemini_ft.agent.replication.rdma import Rdma
from gemini_ft.agent.tasks import Tasks
from gemini_ft.config import TrafficConfig
from gemini_ft.wire.lane_thread import Meter, Valve
from gemini_ft.wire.messages import Chunk
from gemini_ft.wire.peer_messages import Exposed, Parcel, PeerMessage, Readable
from gemini_ft.wire.tcp import AHEAD, Connection
from gemini_ft.wire.worker_messages import Dispatch

if TYPE_CHECKING:
    from gemini_ft.agent.replication.send import PeerLink

_READABLE = 16  # pieces that a peer may read at a time
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


class InPieces(ABC):
    """A carrier of whose connection only messages make use: chunks go another way in pieces, several at a time."""

    def __init__(self, connection: Connection, link: PeerLink, *, most: int, piece_bytes: int) -> None:
        self._connection, self._link, self._most, self._piece_bytes = connection, link, most, piece_bytes
        self._queue: deque[PeerMessage | tuple[Chunk, int, memoryview, Valve]] = deque()
        self._under_way: dict[int, tuple[int, float]] = {}  # tag -> (bytes, when it was ordered)
        self._seconds: deque[float] = deque(maxlen=_SAMPLES)
        self._acked, self._busy, self._busy_since = 0, 0.0, 0.0
        self._changed = asyncio.Event()
        self._announcing = Tasks()  # of pieces of which the peer is to hear, before the end of their shard
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
        self._put((chunk, slot, payload, valve))

    async def flushed(self, below: int) -> None:
        while len(self._queue) >= below and not self._connection.closed.is_set():
            await self._change()

    def dispatched(self, tag: int, error: str) -> None:
        """Takes the report that a piece of this carrier, or of another one, has gone, or could not."""
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
        self._announcing.cancel()
        self._under_way.clear()
        self._changed.set()

    # -- inside

    @abstractmethod
    def _order(self, chunk: Chunk, slot: int, payload: memoryview, *, start: int, nbytes: int, tag: int) -> None:
        """Has a piece go that begins at ``start`` in its chunk, whose bytes are ``payload``."""

    def _put(self, item: PeerMessage | tuple[Chunk, int, memoryview, Valve]) -> None:
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
                await self._announcing.over()
                self._connection.send(item)
            self._queue.popleft()
            self._changed.set()

    async def _carry(self, chunk: Chunk, slot: int, payload: memoryview, valve: Valve) -> None:
        start = 0
        while start < chunk.nbytes:
            while len(self._under_way) >= self._most:
                await self._change()
            nbytes = await valve(min(self._piece_bytes, chunk.nbytes - start))
            tag = next(self._link.session.tags)
            if not self._under_way:
                self._busy_since = time.monotonic()
            self._under_way[tag] = nbytes, time.monotonic()
            self._order(chunk, slot, payload, start=start, nbytes=nbytes, tag=tag)
            start += nbytes


class ByWorkers(InPieces):
    """The carrier through workers, from one to the other."""

    def __init__(self, connection: Connection, link: PeerLink) -> None:
        traffic = link.session.traffic
        super().__init__(connection, link, most=traffic.sub_buffers, piece_bytes=traffic.piece_bytes)

    def _order(self, chunk: Chunk, slot: int, payload: memoryview, *, start: int, nbytes: int, tag: int) -> None:
        target = self._link.keepers[chunk.owner]
        self._connection.send(Parcel(chunk=chunk, start=start, nbytes=nbytes, tag=tag, source=chunk.owner, target=target))
        self._link.order(chunk.owner, Dispatch(tag=tag, target=target, slot=slot, offset=chunk.offset + start, nbytes=nbytes))


class ByRdma(InPieces):
    """The carrier that lets the peer read: it is told where a piece lies, and its tag."""

    def __init__(self, connection: Connection, link: PeerLink, rdma: Rdma) -> None:
        super().__init__(connection, link, most=_READABLE, piece_bytes=link.session.chunk_bytes)
        self._rdma, self._key, self._told = rdma, secrets.token_bytes(16), b""

    def _order(self, chunk: Chunk, slot: int, payload: memoryview, *, start: int, nbytes: int, tag: int) -> None:
        self._announcing.spawn(self._announce(chunk, slot, payload[start : start + nbytes], start=start, tag=tag))

    async def _announce(self, chunk: Chunk, slot: int, part: memoryview, *, start: int, tag: int) -> None:
        memory = self._link.memory(chunk.owner, slot)
        if memory is None:
            self.dispatched(tag, "")  # the slot has been freed: nobody wants it any more
            return
        try:
            address = await self._rdma.expose(memory)
            seal = await self._rdma.tag(self._key, tag, part)
        except Exception as error:  # of any kind: the piece would be waited for
            self.dispatched(tag, str(error) or type(error).__name__)
            return
        if self._told != self._rdma.metadata:
            self._told = self._rdma.metadata
            self._connection.send(Exposed(name=self._rdma.name, metadata=self._told, key=self._key))
        address += memory.shape.data_offset + chunk.offset + start
        self._connection.send(Readable(chunk=chunk, start=start, nbytes=part.nbytes, tag=tag, address=address, seal=seal))


Carrier = ByAgents | ByWorkers | ByRdma
