"""Receives shards from a peer: lays them down where they belong, verifies and acknowledges them.

A chunk's bytes follow its message on the connection, or come in pieces by way of a local worker (transport.collective).
"""

from __future__ import annotations

import asyncio

from gemini_ft.agent.inbound import Inbound
from gemini_ft.agent.memory import SlotMemory
from gemini_ft.agent.tasks import Tasks
from gemini_ft.core.roots import checksum
from gemini_ft.errors import GeminiError, PeerError
from gemini_ft.wire.messages import Chunk, kind_of
from gemini_ft.wire.peer_messages import Ack, Astray, Begin, Drop, End, Offer, Parcel, PeerMessage, Ready, Refused, Resend, Unchanged
from gemini_ft.wire.tcp import Connection

FULL = 0.05  # seconds after which a sender may try again, when there is no slot


class _Parcels:
    """Pieces that local workers are receiving."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], tuple[Parcel, bool]] = {}  # (source, tag) -> it, and whether it is kept
        self._landed: dict[tuple[int, int, int], int] = {}  # (owner, iteration, chunk) -> bytes that have come

    def expect(self, parcel: Parcel, kept: bool) -> None:
        self._waiting[parcel.source, parcel.tag] = parcel, kept

    def landed(self, source: int, tag: int) -> tuple[Parcel, bool] | None:
        return self._waiting.pop((source, tag), None)

    def completes(self, parcel: Parcel) -> bool:
        """Counts a piece that has come; returns whether its chunk is whole now."""
        chunk = parcel.chunk
        key = chunk.owner, chunk.iteration, chunk.index
        self._landed[key] = self._landed.get(key, 0) + parcel.nbytes
        return self._landed[key] >= chunk.nbytes and self._landed.pop(key) > 0

    def restart(self, owner: int) -> None:
        """Forgets a shard's pieces: its chunks come again, from the first byte on."""
        self._landed = {key: nbytes for key, nbytes in self._landed.items() if key[0] != owner}

    def under_way(self, owner: int, iteration: int) -> bool:
        """Whether a worker may still write what belongs to a shard."""
        return any(kept and (each.chunk.owner, each.chunk.iteration) == (owner, iteration) for each, kept in self._waiting.values())


class Receiver:
    """Receives everything that one peer sends to this host."""

    def __init__(self, inbound: Inbound, connection: Connection, host: str) -> None:
        self._inbound, self._connection, self.host = inbound, connection, host
        self._open: dict[int, tuple[int, SlotMemory | None]] = {}  # owner -> (iteration, its memory; None: bytes are thrown away)
        self._parcels = _Parcels()
        self._ends: dict[int, End] = {}  # owner -> the end that was announced before all pieces had come
        self._left: set[tuple[int, int]] = set()  # (owner, iteration) given up, whose memory a worker may still write to
        self._tasks = Tasks()

    # -- Handler

    def on_message(self, message: PeerMessage) -> memoryview | None:
        if isinstance(message, Chunk):
            return self._target(message)
        if isinstance(message, Parcel):
            self._collect(message)
        elif isinstance(message, Unchanged):
            self._keep(message.chunk)
        elif isinstance(message, Offer):
            self._tasks.spawn(self._answer(message))
        elif isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, End):
            self._end(message)
        elif isinstance(message, Drop):
            self._abandon(message.owner, message.iteration)
            self._connection.send(Ack(owner=message.owner, iteration=message.iteration, ok=False))
        else:
            raise PeerError(f"host {self.host} sent {kind_of(message)!r} on a replication connection")
        return None

    def on_bytes(self, message: PeerMessage, digest: int | None) -> None:
        assert isinstance(message, Chunk)
        self._whole(message, digest)

    def on_lost(self, reason: str) -> None:
        for owner, (iteration, _) in list(self._open.items()):
            self._abandon(owner, iteration)
        self._open.clear()

    def collected(self, source: int, tag: int, error: str) -> None:
        """Takes a local worker's report that it has received a piece, or could not."""
        found = self._parcels.landed(source, tag)
        if found is None:
            return
        parcel, kept = found
        chunk = parcel.chunk
        if (chunk.owner, chunk.iteration) in self._left:
            self._let_go(chunk.owner, chunk.iteration)
        elif error:
            self._connection.send(Astray(text=f"host {self._inbound.host_name}: {error}"))
        elif kept:  # pieces that were thrown away must not make a chunk whole when the shard starts over
            if self._parcels.completes(parcel):
                self._whole(chunk, None)
            if chunk.owner in self._ends:
                self._end(self._ends[chunk.owner])

    # -- inside

    async def _answer(self, offer: Offer) -> None:
        try:
            await self._inbound.make_room(offer.owner, offer)
        except GeminiError as error:
            self._connection.send(Refused(call=offer.call, owner=offer.owner, text=str(error)))
        else:
            self._connection.send(Ready(call=offer.call, owner=offer.owner, rank=self._inbound.keeper(offer.owner)))

    def _memory(self, owner: int, iteration: int) -> SlotMemory | None:
        now, memory = self._open.get(owner, (-1, None))
        return memory if now == iteration else None

    def _target(self, chunk: Chunk) -> memoryview | None:
        memory = self._memory(chunk.owner, chunk.iteration)
        if memory is None:
            return None
        if not memory.admits(chunk.index, chunk.offset, chunk.nbytes):
            where = f"{chunk.offset}+{chunk.nbytes}, outside the shard's {memory.shape.capacity} bytes"
            raise PeerError(f"host {self.host} sent chunk {chunk.index} at {where}")
        memory.forget(chunk.index)
        return memory.data(chunk.offset, chunk.nbytes)

    def _collect(self, parcel: Parcel) -> None:
        chunk = parcel.chunk
        if parcel.start < 0 or not 0 < parcel.nbytes <= chunk.nbytes - parcel.start:
            raise PeerError(f"host {self.host} sent bytes {parcel.start}+{parcel.nbytes} of a chunk of {chunk.nbytes}")
        self._target(chunk)
        memory = self._memory(chunk.owner, chunk.iteration)
        self._parcels.expect(parcel, kept=memory is not None)
        self._inbound.collect(parcel, memory, self.collected)

    def _whole(self, chunk: Chunk, digest: int | None) -> None:
        """Takes a chunk of which all bytes have come; ``digest`` is of them, None where nobody has formed it on the way."""
        memory = self._memory(chunk.owner, chunk.iteration)
        if memory is None:
            return
        if digest is None:
            digest = checksum(memory.data(chunk.offset, chunk.nbytes))
        if digest == chunk.digest:
            memory.put_chunk(chunk.index, chunk.offset, chunk.nbytes, chunk.digest)
            return
        self._inbound.log(f"chunk {chunk.index} of rank {chunk.owner} from host {self.host} arrived damaged; asking again")
        self._connection.send(Resend(owner=chunk.owner, iteration=chunk.iteration, chunks=[chunk.index]))

    def _keep(self, chunk: Chunk) -> None:
        """Keeps the bytes of an unchanged chunk that are here already (frozen parameters); asks for them if they are not."""
        memory = self._memory(chunk.owner, chunk.iteration)
        if memory is not None and not memory.keep(chunk.index, chunk.offset, chunk.nbytes, chunk.digest):
            self._connection.send(Resend(owner=chunk.owner, iteration=chunk.iteration, chunks=[chunk.index]))

    def _begin(self, begin: Begin) -> None:
        if begin.owner in self._open and begin.iteration < self._open[begin.owner][0]:
            return  # an older one that starts over; pushed out by it, the newer one would never be acknowledged
        if begin.owner in self._open:  # its sender goes on to the next iteration without having ended the last one
            self._abandon(begin.owner, self._open[begin.owner][0])
        self._ends.pop(begin.owner, None)
        self._parcels.restart(begin.owner)
        memory = self._inbound.begin_receive(begin.owner, begin.iteration, begin.committed)
        self._open[begin.owner] = (begin.iteration, memory)
        if memory is None and not self._inbound.holds(begin.owner, begin.iteration):
            self._ask_anew(begin.owner, begin.iteration)

    def _end(self, end: End) -> None:
        if self._inbound.holds(end.owner, end.iteration):
            self._connection.send(Ack(owner=end.owner, iteration=end.iteration, ok=True))
            return
        memory = self._memory(end.owner, end.iteration)
        self._ends.pop(end.owner, None)
        if memory is None:
            return
        if self._parcels.under_way(end.owner, end.iteration):
            self._ends[end.owner] = end
        elif self._inbound.end_receive(end):
            del self._open[end.owner]
            self._connection.send(Ack(owner=end.owner, iteration=end.iteration, ok=True))
        elif not self._inbound.receives(end.owner, end.iteration):  # a late message of an earlier connection has taken the slot away
            self._abandon(end.owner, end.iteration)
            self._ask_anew(end.owner, end.iteration)

    def _ask_anew(self, owner: int, iteration: int) -> None:
        restart = Resend(owner=owner, iteration=iteration, chunks=[], restart=True)
        asyncio.get_running_loop().call_later(FULL, self._connection.send, restart)

    def _abandon(self, owner: int, iteration: int) -> None:
        """Gives a shard up; its memory is free as soon as no worker writes to it any more."""
        if self._memory(owner, iteration) is not None:
            del self._open[owner]
            self._ends.pop(owner, None)
            self._left.add((owner, iteration))
            self._let_go(owner, iteration)

    def _let_go(self, owner: int, iteration: int) -> None:
        if not self._parcels.under_way(owner, iteration):
            self._left.discard((owner, iteration))
            self._inbound.fail_receive(owner, iteration)
