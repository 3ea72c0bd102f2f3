"""Sends shards to a peer.

A chunk is queued as soon as the worker has copied it, goes when the gate lets it (gemini_ft.agent.gate), and is verified on
arrival; a damaged one is asked for again. A connection that breaks is dialled again and the newest version starts over.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from gemini_ft.agent.carriers import ByAgents, ByWorkers, Way
from gemini_ft.agent.gate import Gate, Pass
from gemini_ft.agent.memory import SlotMemory, SlotShape
from gemini_ft.agent.sparing import Sparing
from gemini_ft.config import TrafficConfig
from gemini_ft.core.versions import Version
from gemini_ft.errors import GeminiError, PeerError
from gemini_ft.wire.handshake import dial
from gemini_ft.wire.messages import (
    Ack,
    Astray,
    Begin,
    Chunk,
    Claims,
    Dispatch,
    Drop,
    End,
    Message,
    Offer,
    Ready,
    Refused,
    Resend,
    SpanUse,
    Unchanged,
)
from gemini_ft.wire.tcp import Address, Connection, Meter

_IN_FLIGHT = 4  # chunks handed to the kernel's queue ahead of the wire
_MEASURABLE = 4 * 2**20  # bytes below which a shard says nothing about the network's speed
_MAX_RESENDS = 8  # damaged chunks of one shard before its sender gives up
_PATIENCE = 2.0  # seconds a peer may take to let go of a shard that was given up; then its connection is closed


@dataclass
class Outgoing:
    """A shard on its way to one peer."""

    owner: int
    version: Version
    slot: int
    memory: SlotMemory
    end: End | None = None  # known once the worker has copied everything
    cursor: int = 0
    begun: bool = False
    end_sent: bool = False
    cancelled: bool = False
    drop_sent: bool = False
    resend: deque[int] = field(default_factory=deque)
    resends: int = 0
    presumed: set[int] = field(default_factory=set)  # chunks that were only said to be unchanged
    sent_bytes: int = 0
    sent_before: int = 0  # of these, in attempts that were broken off
    begun_at: float = 0.0
    busy_before: Meter | None = None  # the connection's counters when it began
    outside: int = 0  # bytes that could not wait for idle network any more
    spans: dict[tuple[int, int], SpanUse] = field(default_factory=dict)  # of idle network that were used

    @property
    def sent(self) -> int:
        """Bytes, in the attempt that succeeded."""
        return self.sent_bytes - self.sent_before

    def went(self, leave: Pass) -> None:
        """Counts bytes that the gate has just let go."""
        self.outside += leave.nbytes * leave.outside
        if leave.span is not None:
            now = time.monotonic()
            use = self.spans.get(leave.span) or SpanUse(step=leave.span[0], begun=leave.span[1], nbytes=0, first=now, last=now)
            self.spans[leave.span] = use.model_copy(update={"nbytes": use.nbytes + leave.nbytes, "last": now})

    def restart(self) -> None:
        self.cursor, self.begun, self.end_sent = 0, False, False
        self.outside, self.spans = 0, {}
        self.resend.clear()
        self.presumed.clear()


class LinkOwner(Protocol):
    """The services that a link asks of its stream."""

    def committed_of(self, owner: int) -> Version | None: ...

    def send_over(self, out: Outgoing, peer: str) -> None:
        """Takes note that nothing refers to ``out``'s slot any more."""

    def peer_refused(self, peer: str, text: str) -> None: ...

    def measured(self, peer: str, address: str, rate: float) -> None:
        """Takes note that the first sizeable shard has travelled, at ``rate`` bytes per second while it was under way."""

    def notify(self, text: str) -> None:
        """Tells the workers something for the user."""

    tags: Iterator[int]  # for pieces that workers carry

    def order(self, owner: int, dispatch: Dispatch) -> None:
        """Lets the worker that owns a shard send a piece of it."""

    def arrived(self, out: Outgoing, peer: str, meter: Meter) -> None:
        """Takes note that the peer has acknowledged a shard; ``meter`` has the connection's counters now."""

    def late_answer(self, text: str) -> None:
        """Takes note of an answer that came too late and is dropped."""

    def log(self, text: str) -> None: ...


class Link:
    """Sends everything for one peer, over one connection that is dialled for as long as there is something to send."""

    def __init__(
        self,
        owner: LinkOwner,
        peer: str,
        address: Address,
        claims: Claims,
        secret: Callable[[], bytes],
        traffic: TrafficConfig,
        gate: Gate,
    ) -> None:
        self._owner, self.peer, self._address, self._claims, self._secret = owner, peer, address, claims, secret
        self._log = Sparing(owner.log)  # an attacker in between can break every connection
        self._traffic, self._gate = traffic, gate
        self._by_workers = traffic.transport == "collective"
        self._keepers: dict[int, int] = {}  # owner -> rank of the peer's worker that keeps its replica
        self._way: Way | None = None
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

    def on_message(self, message: Message) -> memoryview | None:
        if isinstance(message, Ready | Refused) and self._rooms.get(message.owner, (None, 0))[1] != message.call:
            self._owner.late_answer(f"host {self.peer} answered an offer of rank {message.owner}'s shard that has been replaced")
        elif isinstance(message, Ready):
            self._ready.add(message.owner)
            if message.rank is not None:
                self._keepers[message.owner] = message.rank
            elif self._by_workers:
                self.astray("it has no worker that could receive")
        elif isinstance(message, Astray):
            self.astray(message.text)
        elif isinstance(message, Refused):
            self._owner.peer_refused(self.peer, message.text)
            for out in [o for o in self._active if o.owner == message.owner]:
                self._over(out)
        elif isinstance(message, Ack | Resend):
            for out in [o for o in self._active if (o.owner, o.version.iteration) == (message.owner, message.iteration)]:
                self._answered(out, message)
        else:
            raise PeerError(f"host {self.peer} sent {message.kind!r} on a replication connection")
        self._wake.set()
        return None

    def on_bytes(self, message: Message) -> None:
        raise PeerError(f"host {self.peer} sent raw bytes on a connection that only sends")

    def astray(self, text: str) -> None:
        """Takes note that workers cannot carry replicas to this peer: in this session its agent gets them from us."""
        if self._by_workers:
            self._by_workers = False
            self._owner.notify(f"replicas to host {self.peer} travel from agent to agent from now on: {text}")
            if self._connection is not None:
                self._connection.abort("its workers cannot receive")

    def dispatched(self, tag: int, error: str) -> None:
        """Takes a local worker's report that it has sent a piece, or could not; it may be one of another link."""
        if isinstance(self._way, ByWorkers):
            self._way.dispatched(tag, error)

    def on_lost(self, reason: str) -> None:
        self._connection = None
        if self._way is not None:
            self._way.close()
            self._way = None
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
        if self._way is None or out.busy_before is None:
            return
        now = self._way.meter()
        if not self._measured and out.sent >= _MEASURABLE:
            self._measured = True
            self._owner.measured(self.peer, self._address[0], out.sent / max(1e-9, now.busy - out.busy_before.busy))
        self._owner.arrived(out, self.peer, now)

    def _over(self, out: Outgoing) -> None:
        if out in self._active:
            self._active.remove(out)
            self._owner.send_over(out, self.peer)

    async def _run(self) -> None:
        delay = 0.05
        while True:
            await self._something_to_send()
            try:
                connection = await dial(self._address, self._claims, self._secret(), self)
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
            self._way = self._choose_way(connection)
            self._gate.register(self, self._way)
            self._rooms.clear()
            self._ready.clear()
            for out in self._active:
                out.restart()
            await self._pump(connection, self._way)

    def _choose_way(self, connection: Connection) -> Way:
        if not self._by_workers:
            return ByAgents(connection, self._traffic)
        return ByWorkers(connection, self._traffic, self._owner.tags, self._owner.order, self._keepers.__getitem__, self.astray)

    async def _something_to_send(self) -> None:
        while not self._active:
            self._wake.clear()
            await self._wake.wait()

    async def _pump(self, connection: Connection, way: Way) -> None:
        while not connection.closed.is_set():
            advanced = [self._advance(out, connection, way) for out in list(self._active)]  # all of them, not up to the first
            if any(advanced):
                await way.flushed(_IN_FLIGHT)
            else:
                self._wake.clear()
                await self._wake.wait()

    def _advance(self, out: Outgoing, connection: Connection, way: Way) -> bool:
        """Queues the next frame of one shard; False when it has to wait."""
        shape = out.memory.shape
        if out.cancelled:
            return self._withdraw(out, connection)
        if self._rooms.get(out.owner, (None, 0))[0] != shape:
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
            out.busy_before = way.meter()
            connection.send(Begin(owner=out.owner, iteration=out.version.iteration, committed=self._owner.committed_of(out.owner)))
        return self._send_chunk(out, connection, way)

    def _send_chunk(self, out: Outgoing, connection: Connection, way: Way) -> bool:
        again = bool(out.resend)
        if again:
            index = out.resend.popleft()
        elif out.cursor in out.memory.chunks:
            index = out.cursor
            out.cursor += 1
        elif out.end is not None and not out.end_sent and out.cursor >= out.end.chunks:
            out.end_sent = True
            way.send(out.end)
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
            way.send_chunk(chunk, out.slot, out.memory.data(offset, nbytes), partial(self._allowed, out))
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
