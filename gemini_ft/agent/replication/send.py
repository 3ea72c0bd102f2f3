"""Sends shards to peers: a link per peer, which one session has for as long as it lasts.

A chunk is queued as soon as the worker has copied it, goes when the gate lets it (`gemini_ft.agent.replication.gate`), and is verified on
arrival; a damaged one is asked for again. A connection that breaks is dialled again and the newest version starts over.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from functools import partial

from gemini_ft.agent.context import StreamContext
from gemini_ft.agent.memory.slot_memory import SlotMemory, SlotShape
from gemini_ft.agent.replication.carriers import ByAgents, ByRdma, ByWorkers, Carrier, InPieces
from gemini_ft.agent.replication.gate import Gate
from gemini_ft.agent.replication.pacing import Outgoing, Pacing, end_of
from gemini_ft.agent.replication.rdma import rdma_of
from gemini_ft.agent.tasks import RateLimitedLog
from gemini_ft.core.versions import Version
from gemini_ft.errors import GeminiError, PeerError
from gemini_ft.wire.handshake import dial
from gemini_ft.wire.messages import Chunk, Failed, Notice, kind_of
from gemini_ft.wire.peer_messages import Ack, Astray, Begin, Claims, Drop, End, Offer, PeerMessage, Ready, Refused, Resend, Taken, Unchanged
from gemini_ft.wire.tcp import Address, Connection, MessagesOnly
from gemini_ft.wire.worker_messages import Dispatch, Dispatched, SessionSpec

_SLOW = 100e6  # bytes per second; a gigabit network is faster
_LANES = 8  # at most, where nobody says how many
_IN_FLIGHT = 4  # chunks handed to the kernel's queue ahead of the wire
_MEASURABLE = 4 * 2**20  # bytes below which a shard says nothing about the network's speed
_MAX_RESENDS = 8  # damaged chunks of one shard before its sender gives up
_PATIENCE = 2.0  # seconds a peer may take to let go of a shard that was given up; then its connection is closed


class PeerLink(MessagesOnly):
    """Sends everything for one peer, over one connection that is dialled for as long as there is something to send."""

    def __init__(self, session: Outbound, peer: str, address: Address, claims: Claims, *, further: Sequence[str] = ()) -> None:
        self.session, self._context, self._gate = session, session.context, session.gate
        self.peer, self._address, self._further, self._claims = peer, address, further, claims
        self._log = RateLimitedLog(session.context.log)  # an attacker in between can break every connection
        self._way = session.traffic.transport
        self.keepers: dict[int, int] = {}  # owner -> rank of the peer's worker that keeps its replica
        self._carrier: Carrier | None = None
        self._active: list[Outgoing] = []
        self._rooms: dict[int, tuple[SlotShape, int]] = {}  # owner -> the last offer to the peer, and that call's number
        self._calls = itertools.count(1)
        self._ready: set[int] = set()
        self._measured = False
        self._connection: Connection | None = None
        self._wake = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, out: Outgoing) -> None:
        self._active.append(out)
        self._wake.set()

    def chunk_ready(self) -> None:
        self._wake.set()

    def copied(self, owner: int, version: Version, end: End) -> None:
        for out in self._active:
            if out.owner == owner and out.version == version:
                out.end = end
        self._wake.set()

    def cancel(self, owner: int, version: Version) -> None:
        """Lets go of a shard soon, whether the peer answers or not: its slot is needed."""
        for out in [o for o in self._active if o.owner == owner and o.version == version]:
            out.cancelled = True
            self._gate.poke()
            if self._connection is None or not out.begun:
                self._over(out)
            else:
                asyncio.get_running_loop().call_later(_PATIENCE, self._insist, out, self._connection)
        self._wake.set()

    def _insist(self, out: Outgoing, connection: Connection) -> None:
        if out in self._active and connection is self._connection:
            connection.abort("it does not answer")

    def close(self) -> None:
        """Stops for good; every slot is released."""
        self._task.cancel()
        if self._connection is not None:
            self._connection.abort("the session is over")
        for out in list(self._active):
            self._over(out)

    # -- Handler

    def on_message(self, message: PeerMessage) -> memoryview | None:
        if isinstance(message, Ready | Refused) and self._rooms.get(message.owner, (None, 0))[1] != message.call:
            self._context.counters["late_answers"] += 1
            self._context.log(f"host {self.peer} answered an offer of rank {message.owner}'s shard that has been replaced")
        elif isinstance(message, Ready):
            self._ready.add(message.owner)
            if message.rank is not None:
                self.keepers[message.owner] = message.rank
            elif self._way == "collective":
                self.astray("it has no worker that could receive")
        elif isinstance(message, Taken):
            self.dispatched(message.tag, "")
        elif isinstance(message, Astray):
            self.astray(message.text)
        elif isinstance(message, Refused):
            self._context.log(f"host {self.peer} refused a replica: {message.text}")
            self._context.tell_workers(Failed(error="MemoryBudgetError", text=f"host {self.peer}: {message.text}", fatal=True))
            for out in [o for o in self._active if o.owner == message.owner]:
                self._over(out)
        elif isinstance(message, Ack | Resend):
            for out in [o for o in self._active if (o.owner, o.version.iteration) == (message.owner, message.iteration)]:
                self._answered(out, message)
        else:
            raise PeerError(f"host {self.peer} sent {kind_of(message)!r} on a replication connection")
        self._wake.set()
        return None

    def astray(self, text: str) -> None:
        """Falls back to sending by this agent for the rest of the session, as replicas do not get to this peer by workers, or by RDMA."""
        if self._way != "tcp":
            self._way = "tcp"
            self._context.notify(f"replicas to host {self.peer} travel from agent to agent from now on: {text}")
            if self._connection is not None:
                self._connection.abort("it cannot receive otherwise")

    def dispatched(self, tag: int, error: str) -> None:
        """Takes the report that a piece has gone, or could not; it may be one of another link."""
        if isinstance(self._carrier, InPieces):
            self._carrier.dispatched(tag, error)

    def on_lost(self, reason: str) -> None:
        self._connection = None
        if self._carrier is not None:
            self._carrier.close()
            self._carrier = None
        self._gate.release(self)
        for out in [o for o in self._active if o.cancelled]:
            self._over(out)
        if self._active:
            self._log(f"replication to host {self.peer} broke off: {reason}; dialling again")
        self._wake.set()

    # -- inside

    def _answered(self, out: Outgoing, message: Ack | Resend) -> None:
        if isinstance(message, Ack):
            if message.ok:
                self._measure(out)
            if message.ok or out.drop_sent:
                self._over(out)
            return
        absent = not message.restart and out.presumed.issuperset(message.chunks)
        out.presumed.difference_update(message.chunks)
        out.resends += not (absent or message.restart)
        if out.resends > _MAX_RESENDS and not message.restart:
            text = f"host {self.peer} received damaged chunks of rank {out.owner} {_MAX_RESENDS} times"
            self._log(f"{text}; the replica is given up. Check the network of that host")
            out.cancelled = True
        elif message.restart:
            out.restart()
        else:
            out.resend.extend(message.chunks)
            out.end_sent = False

    def _measure(self, out: Outgoing) -> None:
        """Logs, once per link, how fast a replica travelled, was verified and acknowledged."""
        if self._carrier is None or out.busy_before is None:
            return
        now = self._carrier.meter()
        if not self._measured and out.sent >= _MEASURABLE:
            self._measured = True
            self._tell_speed(out.sent / max(1e-9, now.busy - out.busy_before.busy))
        self.session.pacing.arrived(out, self.peer, now, time.monotonic() - out.begun_at)

    def _tell_speed(self, rate: float) -> None:
        text = f"replicas travel to host {self.peer} ({', '.join((self._address[0], *self._further))}) at {rate / 1e6:,.0f} MB/s"
        self._context.log(text)
        if rate < _SLOW:
            self._context.tell_workers(Notice(text=f"{text}: is that the right network? Choose with interface (GEMINI_INTERFACE)"))

    def _over(self, out: Outgoing) -> None:
        if out in self._active:
            self._active.remove(out)
            self._context.counters["replica_bytes"] += out.sent_bytes
            self._context.perform(self._context.host.sent(out.owner, out.slot, self.peer))

    async def _run(self) -> None:
        delay = 0.05
        while True:
            while not self._active:
                self._wake.clear()
                await self._wake.wait()
            try:
                connection = await dial(self._address, self._claims, self._context.run.secret, self, further=self._further)
            except GeminiError as error:
                if delay == 0.05:
                    self._log(f"host {self.peer}: {error}")
                await asyncio.sleep(delay)
                delay = min(2 * delay, 2.0)
                for out in [o for o in self._active if o.cancelled]:
                    self._over(out)
                continue
            delay = 0.05
            self._connection = connection
            connection.drained = self._gate.poke
            self._carrier = self._new_carrier(connection)
            self._gate.register(self, self._carrier)
            self._rooms.clear()
            self._ready.clear()
            for out in self._active:
                out.restart()
            await self._pump(connection, self._carrier)

    def _new_carrier(self, connection: Connection) -> Carrier:
        if self._way == "collective":
            return ByWorkers(connection, self)
        if self._way == "rdma":
            try:
                return ByRdma(connection, self, rdma_of(self._context))
            except GeminiError as error:
                self.astray(str(error))
        return ByAgents(connection, self.session.traffic)

    def memory(self, owner: int, slot: int) -> SlotMemory | None:
        """The memory of a slot, unless it has been freed."""
        return self._context.slot_store.memory.get((owner, slot))

    def order(self, owner: int, dispatch: Dispatch) -> None:
        """Has the worker that owns a shard send a piece of it."""
        self._context.workers[owner].send(dispatch)

    async def _pump(self, connection: Connection, carrier: Carrier) -> None:
        while not connection.closed.is_set():
            advanced = False
            for out in list(self._active):  # all of them, not up to the first, unless it is a large layout that goes
                advanced = self._advance(out, connection, carrier) or advanced
                if connection.has_much_to_say:
                    break
            if connection.has_much_to_say:
                await connection.said_most()
            elif advanced:
                await carrier.flushed(_IN_FLIGHT)
            else:
                self._wake.clear()
                await self._wake.wait()

    def _advance(self, out: Outgoing, connection: Connection, carrier: Carrier) -> bool:
        """Queues the next frame of one shard; False when it has to wait."""
        shape = out.memory.shape
        if out.cancelled:
            return self._withdraw(out, connection)
        if self._rooms.get(out.owner, (None, 0))[0] != shape:
            if any(other.owner == out.owner and other.version > out.version for other in self._active):
                return False  # the peer makes room for the newer one, which has another layout
            self._rooms[out.owner] = shape, next(self._calls)
            self._ready.discard(out.owner)
            connection.send(
                Offer(
                    call=self._rooms[out.owner][1],
                    owner=out.owner,
                    layout=shape.layout,
                    layout_hash=shape.layout_hash,
                    data_bytes=shape.data_bytes,
                    extras_capacity=shape.extras_capacity,
                )
            )
            return True
        if out.owner not in self._ready:
            return False
        if not out.begun:
            out.begun, out.begun_at, out.sent_before = True, time.monotonic(), out.sent_bytes
            out.busy_before = carrier.meter()
            committed = self._context.host.slots(out.owner).committed
            connection.send(Begin(owner=out.owner, iteration=out.version.iteration, committed=committed))
        return self._send_chunk(out, connection, carrier)

    def _send_chunk(self, out: Outgoing, connection: Connection, carrier: Carrier) -> bool:
        again = bool(out.resend)
        if again:
            index = out.resend.popleft()
        elif out.cursor in out.memory.chunks:
            index = out.cursor
            out.cursor += 1
        elif out.end is not None and not out.end_sent and out.cursor >= out.end.chunks:
            out.end_sent = True
            carrier.send(out.end)
            return True
        else:
            return False
        offset, nbytes, digest = out.memory.chunks[index]
        chunk = Chunk(owner=out.owner, iteration=out.version.iteration, index=index, offset=offset, nbytes=nbytes, digest=digest)
        if index in out.memory.unchanged and not again:
            out.presumed.add(index)
            connection.send(Unchanged(chunk=chunk))
        else:
            out.sent_bytes += nbytes
            carrier.send_chunk(chunk, out.slot, out.memory.data(offset, nbytes), partial(self._allowed, out))
            self.session.pacing.under_way(out, carrier.meter())
        return True

    async def _allowed(self, out: Outgoing, nbytes: int) -> int:
        """Waits until some of a chunk's bytes may go. A shard that was given up goes at once: others wait longer for its slot."""
        leave = await self._gate.leave(nbytes, lambda: 0.0 if out.cancelled else out.begun_at + self._gate.patience)
        out.went(leave)
        return leave.nbytes

    def _withdraw(self, out: Outgoing, connection: Connection) -> bool:
        if out.drop_sent:
            return False
        if not out.begun:
            self._over(out)
            return True
        out.drop_sent = True
        connection.send(Drop(owner=out.owner, iteration=out.version.iteration))
        return True


class Outbound:
    """The links of one session."""

    def __init__(self, context: StreamContext, spec: SessionSpec) -> None:
        self.context, self._spec, self.traffic, self.chunk_bytes = context, spec, spec.traffic, spec.chunk_bytes
        self.gate = Gate(spec.traffic)
        self.pacing = Pacing(context, spec, self.gate)
        self.tags = itertools.count()  # for pieces that workers carry
        self._links: dict[str, PeerLink] = {}

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close()
        self.gate.close()

    def send(self, owner: int, version: Version, slot: int, memory: SlotMemory, peer: str) -> None:
        if peer not in self._links:
            # The lanes' threads, at both ends, must leave processors to the training.
            lanes = self._spec.traffic.lanes or max(1, min(_LANES, len(os.sched_getaffinity(0)) // 4))
            claims = self.context.claims("replicate", peer).model_copy(update={"lanes": lanes})
            further = self._spec.further.get(peer, ())
            self._links[peer] = PeerLink(self, peer, self._spec.addresses[peer], claims, further=further)
        end = end_of(owner, memory) if memory.version == version else None  # copied already, with an agent before this one
        self._links[peer].send(Outgoing(owner=owner, version=version, slot=slot, memory=memory, end=end))

    def cancel(self, owner: int, version: Version, peer: str) -> None:
        if peer in self._links:
            self._links[peer].cancel(owner, version)

    def links_of(self, owner: int) -> list[PeerLink]:
        return [self._links[peer] for peer in self.context.host.holders.get(owner, ())[1:] if peer in self._links]

    def copied(self, owner: int, version: Version, end: End) -> None:
        for link in self._links.values():
            link.copied(owner, version, end)

    def dispatched(self, message: Dispatched) -> None:
        for link in self._links.values():
            link.dispatched(message.tag, message.error)
