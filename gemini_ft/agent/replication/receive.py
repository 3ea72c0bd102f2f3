"""Receives shards from peers: into slots with pages, verified and acknowledged.

A chunk's bytes follow its message on the connection, or come in pieces by way of a local worker, or by RDMA (``traffic.transport``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gemini_ft import failpoints
from gemini_ft.agent.context import StreamContext
from gemini_ft.agent.memory.slot_memory import SlotMemory, SlotShape
from gemini_ft.agent.replication.rdma import rdma_of
from gemini_ft.agent.tasks import Tasks
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.core.roots import checksum
from gemini_ft.core.versions import Version
from gemini_ft.errors import GeminiError, PeerError
from gemini_ft.wire.messages import Chunk, ShardLayout, kind_of
from gemini_ft.wire.peer_messages import (
    Ack,
    Astray,
    Begin,
    ChunkPart,
    Drop,
    End,
    Exposed,
    Offer,
    Parcel,
    PeerMessage,
    Readable,
    Ready,
    Refused,
    Resend,
    Taken,
    Unchanged,
)
from gemini_ft.wire.tcp import Connection
from gemini_ft.wire.worker_messages import Collect, Collected

REPLICA_SLOTS = 2  # one complete, one in progress
Landed = Callable[[int, int, str], None]
"""Hears that a worker has received a piece: source, tag, and the error if it could not."""


def shape_of(context: StreamContext, owner: int, wanted: ShardLayout) -> SlotShape:
    spec = context.spec
    assert spec is not None
    return SlotShape(
        run=context.run.run_id,
        stream=context.name,
        owner=owner,
        world_size=spec.world_size,
        layout_hash=wanted.layout_hash,
        layout=wanted.layout,
        data_bytes=wanted.data_bytes,
        extras_capacity=wanted.extras_capacity,
        chunk_bytes=spec.chunk_bytes,
    )


def may_be_written_by_another(context: StreamContext, owner: int, worker: WorkerConnection | None = None) -> bool:
    """Whether a worker that had the shard's slots before, perhaps in a former incarnation, still lives."""
    before, spec = context.workers.get(owner), context.spec
    if before is not None and before is not worker and before.alive:
        return True
    past = [donor for donor in context.slot_store.donors(owner) if spec is not None and donor.incarnation != spec.incarnation]
    return any(donor.worker is not worker and donor.worker.alive for donor in past)


class Inbound:
    """Makes room for what receivers take in, for all sessions of a stream."""

    def __init__(self, context: StreamContext) -> None:
        self._context = context
        self._collecting: dict[tuple[int, int], tuple[Landed, int]] = {}  # (source, tag) of a piece -> who hears of it, and its rank
        self.pulls = Tasks()  # which read pieces by RDMA
        self._offered: dict[int, SlotShape] = {}  # owner -> shape of the shards that its host sends in this session

    def end_session(self) -> None:
        """Drops the pieces that are awaited: the session is over, and none of them is written any more, but by workers."""
        if self.pulls.busy and self._context.run.rdma is not None:
            self._context.run.rdma.close("the session is over")
        self.pulls.cancel()
        self._collecting.clear()
        self._offered.clear()

    def entrust_all(self) -> None:
        """Lets workers keep the memory that none of them has: replicas, and own shards of a shape that is over."""
        store = self._context.slot_store
        for (held, _), memory in store.memory.items():
            if not self._context.host.owns(held) or store.is_outgrown(memory):
                self._context.custodians.entrust(memory)

    def worker_lost(self, rank: int) -> None:
        """Ends what a lost worker was receiving: it will not arrive, and the worker writes nowhere any more."""
        for source, tag in [piece for piece, (_, target) in self._collecting.items() if target == rank]:
            self.collected(Collected(source=source, tag=tag, error=f"rank {rank} is gone"))

    def collected(self, message: Collected) -> None:
        """Takes a worker's report that it has received a piece, or could not."""
        if (waiting := self._collecting.pop((message.source, message.tag), None)) is not None:
            waiting[0](message.source, message.tag, message.error)

    @property
    def host_name(self) -> str:
        return self._context.host.name

    def log(self, text: str) -> None:
        self._context.log(text)

    async def make_room(self, owner: int, wanted: ShardLayout, *, offered: bool) -> None:
        """Makes slots for a peer's shard, their pages already faulted in; ``offered``: for those that the owner's host sends from now on.

        Raises PeerError: these slots are for a copy of an outdated layout: the owner's host sends shards of another shape by now.
        """
        slot_store, spec = self._context.slot_store, self._context.spec
        before = {memory for (of, _), memory in slot_store.memory.items() if of == owner}
        shape = shape_of(self._context, owner, wanted)
        if offered:
            self._offered[owner] = shape
        elif self._offered.get(owner, shape) != shape:
            raise PeerError("the layout has changed since; the next commit brings a copy")

        def reuse() -> bool:
            spec = self._context.spec  # of a former incarnation, a worker may still receive into a replica's memory
            strange = (spec is not None and keeper.incarnation != spec.incarnation for keeper in self._keepers(owner))
            return not (may_be_written_by_another(self._context, owner) or any(strange))

        indices = await slot_store.ensure_beside(owner, shape, REPLICA_SLOTS, reuse, lambda: self._context.spec is spec)
        fresh = [index for index in indices if slot_store.memory[owner, index] not in before]  # a number may be that of a slot just freed
        await slot_store.prefault(owner, fresh)
        for index in fresh:
            if (memory := slot_store.memory.get((owner, index))) is not None:  # else it was freed meanwhile
                self._context.custodians.entrust(memory)

    def keeper(self, owner: int) -> int | None:
        return next((keeper.rank for keeper in self._keepers(owner)), None)

    def collect(self, parcel: Parcel, memory: SlotMemory | None, landed: Landed) -> None:
        self._collecting[parcel.source, parcel.tag] = landed, parcel.target
        worker = self._context.workers.get(parcel.target)
        if worker is None or not worker.alive:
            self.collected(Collected(source=parcel.source, tag=parcel.tag, error=f"rank {parcel.target} is not there"))
            return
        key, position = "", 0
        if memory is not None:
            key, position = str(id(memory)), memory.shape.data_offset + parcel.chunk.offset + parcel.start
        worker.send(Collect(tag=parcel.tag, source=parcel.source, key=key, position=position, nbytes=parcel.nbytes))

    async def pull(self, exposed: Exposed, piece: Readable, memory: SlotMemory) -> None:
        """Reads a piece by RDMA into the slot. Raises GeminiError: this host cannot, or it is not what the sender announced."""
        await rdma_of(self._context).pull(exposed, piece, memory)

    def check_sender(self, sender: str, owner: int) -> None:
        """Refuses a shard that a host may not bring here.

        Raises PeerError: it is this host's own, it is not held here, or the sender does not own it.
        """
        host = self._context.host
        holders = host.holders.get(owner, ())
        if host.owns(owner) or host.name not in holders:
            raise PeerError(f"host {host.name!r} does not hold rank {owner}'s shard")
        if holders[0] != sender:
            raise PeerError(f"host {sender!r} does not own rank {owner}'s shard")

    def begin_receive(self, owner: int, iteration: int, committed: Version | None) -> SlotMemory | None:
        host = self._context.host
        slot = host.receive(owner, self._context.version(iteration), committed)
        self._context.slot_store.sync_headers()
        if slot is None:
            return None
        memory = self._context.slot_store.memory[owner, slot.index]
        memory.clear()
        return memory

    def end_receive(self, end: End) -> bool:
        version = self._context.version(end.iteration)
        memory = self._context.slot_store.writing(end.owner, version)
        if memory is None or not memory.is_whole(end.extras_bytes):
            return False
        if not memory.finish(version, end.extras_bytes, end.root):
            self._context.counters["damaged"] += 1
            text = f"rank {end.owner}'s shard of {version} arrived with another root than its owner's copy has"
            self.log(f"{text}: asking for all of it again, on another connection")
            raise PeerError(text)
        failpoints.reached("agent_received", version.iteration, end.owner)
        self._context.perform(self._context.host.completed(end.owner, version, end.layout, end.digest, memory.root))
        return True

    def fail_receive(self, owner: int, iteration: int) -> None:
        self._context.perform(self._context.host.receive_failed(owner, self._context.version(iteration)))

    def receives(self, owner: int, iteration: int) -> bool:
        return self._context.slot_store.writing(owner, self._context.version(iteration)) is not None

    def holds(self, owner: int, iteration: int) -> bool:
        return self._context.host.slots(owner).complete_version(self._context.version(iteration)) is not None

    # -- inside

    def _keepers(self, owner: int) -> list[WorkerConnection]:
        kept = [self._context.custodians.keeper(memory) for (of, _), memory in self._context.slot_store.memory.items() if of == owner]
        return [keeper for keeper in kept if keeper is not None]


FULL = 0.05  # seconds after which a sender may try again, when there is no slot


class _Parcels:
    """Pieces that are coming by another way than a lane."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], tuple[ChunkPart, bool]] = {}  # (source, tag) -> it, and whether it is kept
        self._landed: dict[tuple[int, int, int], int] = {}  # (owner, iteration, chunk) -> bytes that have come

    def expect(self, parcel: ChunkPart, kept: bool) -> None:
        self._waiting[parcel.source, parcel.tag] = parcel, kept

    def landed(self, source: int, tag: int) -> tuple[ChunkPart, bool] | None:
        return self._waiting.pop((source, tag), None)

    def completes(self, parcel: ChunkPart) -> bool:
        """Counts a piece that has come; returns whether its chunk is whole now."""
        chunk = parcel.chunk
        key = chunk.owner, chunk.iteration, chunk.index
        self._landed[key] = self._landed.get(key, 0) + parcel.nbytes
        return self._landed[key] >= chunk.nbytes and self._landed.pop(key) > 0

    def restart(self, owner: int) -> None:
        """Forgets a shard's pieces: its chunks come again, from the first byte on."""
        self._landed = {key: nbytes for key, nbytes in self._landed.items() if key[0] != owner}

    def under_way(self, owner: int, iteration: int) -> bool:
        """Whether what belongs to a shard may still be written."""
        return any(kept and (each.chunk.owner, each.chunk.iteration) == (owner, iteration) for each, kept in self._waiting.values())


class Receiver:
    """Receives everything that one peer sends to this host."""

    def __init__(self, inbound: Inbound, connection: Connection, host: str) -> None:
        self._inbound, self._connection, self.host = inbound, connection, host
        self._open: dict[int, tuple[int, SlotMemory | None]] = {}  # owner -> (iteration, its memory; None: bytes are thrown away)
        self._coming: set[tuple[int, int, int]] = set()  # (owner, iteration, index) of chunks on lanes that are kept
        self._parcels = _Parcels()
        self._exposed: Exposed | None = None  # the sender's slots, newest
        self._ends: dict[int, End] = {}  # owner -> the end that was announced before all pieces had come
        self._left: set[tuple[int, int]] = set()  # (owner, iteration) given up, whose memory a worker may still write to
        self._tasks = Tasks()

    # -- Handler

    def on_message(self, message: PeerMessage) -> memoryview | None:
        if isinstance(message, Chunk):
            return self._await(message)
        if isinstance(message, ChunkPart):
            self._collect(message)
        elif isinstance(message, Exposed):
            self._exposed = message
        elif isinstance(message, Unchanged):
            chunk = message.chunk
            memory = self._memory(chunk.owner, chunk.iteration)
            if memory is not None and not memory.keep(chunk.index, chunk.offset, chunk.nbytes, chunk.digest):
                self._connection.send(Resend(owner=chunk.owner, iteration=chunk.iteration, chunks=[chunk.index]))
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

    def on_bytes(self, message: PeerMessage, digest: int) -> None:
        assert isinstance(message, Chunk)
        self._coming.discard((message.owner, message.iteration, message.index))
        self._whole(message, digest)

    def on_lost(self, reason: str) -> None:
        for owner, (iteration, _) in list(self._open.items()):
            self._abandon(owner, iteration)
        self._open.clear()

    def collected(self, source: int, tag: int, error: str) -> None:
        found = self._parcels.landed(source, tag)
        if found is None:
            return
        parcel, kept = found
        chunk = parcel.chunk
        if (chunk.owner, chunk.iteration) in self._left:
            self._let_go(chunk.owner, chunk.iteration)
        elif error:
            if (memory := self._memory(chunk.owner, chunk.iteration)) is not None:
                memory.forget(chunk.index)  # which may have been whole, if this was its second time
            self._connection.send(Astray(text=f"host {self._inbound.host_name}: {error}"))
        elif kept:  # pieces that were thrown away must not make a chunk whole when the shard starts over
            if self._parcels.completes(parcel):
                self._whole(chunk, None)
            if chunk.owner in self._ends:
                try:
                    self._end(self._ends[chunk.owner])
                except PeerError as refusal:  # on a lane, the connection itself would hear it
                    self._connection.abort(str(refusal))

    # -- inside

    async def _answer(self, offer: Offer) -> None:
        try:
            self._inbound.check_sender(self.host, offer.owner)
            await self._inbound.make_room(offer.owner, offer, offered=True)
        except GeminiError as error:
            self._connection.send(Refused(call=offer.call, owner=offer.owner, text=str(error)))
        else:
            self._connection.send(Ready(call=offer.call, owner=offer.owner, rank=self._inbound.keeper(offer.owner)))

    def _memory(self, owner: int, iteration: int) -> SlotMemory | None:
        now, memory = self._open.get(owner, (-1, None))
        return memory if now == iteration else None

    def _await(self, chunk: Chunk) -> memoryview | None:
        key = chunk.owner, chunk.iteration, chunk.index
        if key in self._coming:
            raise PeerError(f"host {self.host} sent chunk {chunk.index} while it was coming already")
        if (target := self._target(chunk)) is not None:
            self._coming.add(key)
        return target

    def _target(self, chunk: Chunk) -> memoryview | None:
        memory = self._memory(chunk.owner, chunk.iteration)
        if memory is None:
            return None
        if not memory.admits(chunk.index, chunk.offset, chunk.nbytes):
            where = f"{chunk.offset}+{chunk.nbytes}, which is not its place in the shard's {memory.shape.capacity} bytes"
            raise PeerError(f"host {self.host} sent chunk {chunk.index} at {where}")
        memory.forget(chunk.index)
        return memory.data(chunk.offset, chunk.nbytes)

    def _collect(self, parcel: ChunkPart) -> None:
        chunk = parcel.chunk
        if parcel.start < 0 or not 0 < parcel.nbytes <= chunk.nbytes - parcel.start:
            raise PeerError(f"host {self.host} sent bytes {parcel.start}+{parcel.nbytes} of a chunk of {chunk.nbytes}")
        self._target(chunk)
        memory = self._memory(chunk.owner, chunk.iteration)
        self._parcels.expect(parcel, kept=memory is not None)
        if isinstance(parcel, Parcel):
            self._inbound.collect(parcel, memory, self.collected)
        elif isinstance(parcel, Readable):
            self._inbound.pulls.spawn(self._pull(parcel, self._exposed, memory))

    async def _pull(self, piece: Readable, exposed: Exposed | None, memory: SlotMemory | None) -> None:
        error = ""
        try:
            if exposed is None:
                raise PeerError(f"host {self.host} has not said where its slots are")
            if memory is not None:
                await self._inbound.pull(exposed, piece, memory)
        except Exception as failure:  # of any kind: the slot would never be free again
            error = str(failure) or type(failure).__name__
        self._connection.send(Taken(tag=piece.tag))
        self.collected(piece.source, piece.tag, error)

    def _whole(self, chunk: Chunk, digest: int | None) -> None:
        """Takes a chunk of which all bytes have come; ``digest`` is their checksum, None if it was not formed on the way."""
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

    def _begin(self, begin: Begin) -> None:
        self._inbound.check_sender(self.host, begin.owner)
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
