"""Serves complete shards to readers: to a restarted worker's recovery, or an agent that rebuilds a lost replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from gemini_ft.agent.home import Home
from gemini_ft.agent.inbound import Inbound
from gemini_ft.agent.lease import Lease
from gemini_ft.agent.memory import SlotMemory
from gemini_ft.core.layout import Layout
from gemini_ft.core.roots import checksum
from gemini_ft.core.versions import Version
from gemini_ft.errors import GeminiError, PeerError
from gemini_ft.wire.handshake import dial
from gemini_ft.wire.messages import Failed, check_answer, kind_of
from gemini_ft.wire.peer_messages import Data, Describe, Description, Fetch, GetRoots, Heartbeat, PeerMessage, Roots
from gemini_ft.wire.tcp import Connection
from gemini_ft.wire.worker_messages import SessionSpec

_REBUILD_TURNS = 5  # how often each peer is asked
_LEASE = 30.0  # seconds, for readers between two sessions
_REBUILD_PAUSE = 0.3  # seconds between two turns


def describe(memory: SlotMemory, asked: Describe) -> Description:
    """The account of a complete copy, by which its reader can check every byte."""
    shape = memory.shape
    return Description(
        call=asked.call,
        owner=asked.owner,
        version=asked.version,
        layout=shape.layout,
        layout_hash=shape.layout_hash,
        data_bytes=shape.data_bytes,
        extras_bytes=memory.extras_bytes,
        extras_capacity=shape.extras_capacity,
        chunk_bytes=shape.chunk_bytes,
        root=memory.root,
        digests=[memory.chunks[i][2] for i in range(len(memory.chunks))],
    )


class Fetcher:
    """Serves one reader. The slot it reads is pinned until the reader hangs up, or gives no sign of life for its lease."""

    def __init__(self, stream: Home, connection: Connection, host: str, committed_roots: Callable[[Version], Mapping[int, str]]) -> None:
        self._stream, self._connection, self._host, self._committed_roots = stream, connection, host, committed_roots
        self._held: dict[tuple[int, Version], int] = {}
        self._lease = Lease(connection, stream.spec.replica_timeout if stream.spec is not None else _LEASE, self._expired)

    def _expired(self, seconds: float) -> None:
        if self._held:
            read = ", ".join(f"rank {owner}'s {version}" for owner, version in self._held)
            self._stream.log(f"host {self._host} has read nothing of {read} for {seconds:g} s: its slots are taken back")

    @property
    def _name(self) -> str:
        return f"fetch:{self._host}:{self._connection.peer}"

    def on_message(self, message: PeerMessage) -> memoryview | None:
        self._lease.renew()
        if isinstance(message, Heartbeat):
            return None
        if isinstance(message, GetRoots):
            roots = self._committed_roots(message.version)
            self._connection.send(Roots(call=message.call, version=message.version, roots=dict(roots)))
            return None
        if not isinstance(message, Fetch | Describe):
            raise PeerError(f"host {self._host} sent {kind_of(message)!r} on a connection for reading")
        memory = self._pin(message.owner, message.version)
        if memory is None:
            text = f"host {self._stream.host.name} has no complete copy of rank {message.owner}'s shard of {message.version}"
            self._connection.send(Failed(call=message.call, error="PeerError", text=text))
        elif isinstance(message, Describe):
            self._connection.send(describe(memory, message))
        else:
            self._send(memory, message)
        return None

    def on_bytes(self, message: PeerMessage, digest: int | None) -> None:
        raise PeerError("raw bytes on a connection that only reads")

    def on_lost(self, reason: str) -> None:
        self._lease.end()
        for (owner, _), slot in self._held.items():
            self._stream.perform(self._stream.host.release(owner, slot, self._name))

    def _pin(self, owner: int, version: Version) -> SlotMemory | None:
        slot = self._stream.host.hold(owner, version, self._name)
        if slot is None:
            return None
        self._held[owner, version] = slot.index
        return self._stream.vault.memory[owner, slot.index]

    def _send(self, memory: SlotMemory, fetch: Fetch) -> None:
        end = fetch.offset + fetch.nbytes
        if fetch.offset < 0 or end > memory.shape.data_bytes + memory.extras_bytes:
            raise PeerError(f"host {self._host} asked for bytes {fetch.offset}:{end}, outside the shard")
        step = memory.shape.chunk_bytes
        for offset in range(fetch.offset, end, step):
            nbytes = min(step, end - offset)
            data = Data(call=fetch.call, owner=fetch.owner, version=fetch.version, offset=offset, nbytes=nbytes)
            self._connection.send(data, memory.data(offset, nbytes))


class _Copier:
    """Receives one shard from a peer into a slot."""

    def __init__(self) -> None:
        self.memory: SlotMemory | None = None
        self.asked: Fetch | None = None
        self.inbox: asyncio.Queue[PeerMessage | str] = asyncio.Queue()
        self.digest: int | None = None  # of the bytes that came last, if it was formed on the way

    def on_message(self, message: PeerMessage) -> memoryview | None:
        if isinstance(message, Data) and self.memory is not None and self.asked is not None:
            check_answer(self.asked, message)
            if (message.offset, message.nbytes) != (self.asked.offset, self.asked.nbytes):
                raise PeerError(f"bytes {message.offset}+{message.nbytes} came where {self.asked.offset}+{self.asked.nbytes} were due")
            return self.memory.data(message.offset, message.nbytes)
        self.inbox.put_nowait(message)
        return None

    def on_bytes(self, message: PeerMessage, digest: int | None) -> None:
        self.digest = digest
        self.inbox.put_nowait(message)

    def on_lost(self, reason: str) -> None:
        self.inbox.put_nowait(reason)


async def rebuild(stream: Home, inbound: Inbound, spec: SessionSpec) -> None:
    """Copies from peers, after a recovery, every shard of the resumed version that this host should hold and does not.

    Until then a second failure would find one copy less. The next commit makes it moot, so a failure is only logged; but
    a peer that opens the session a moment later than this host cuts off whoever reads from it, so it is asked again.
    """
    assert spec.resumed is not None
    for owner, holders in spec.holders.items():
        if stream.host.name not in holders or stream.host.slots(owner).complete_version(spec.resumed) is not None:
            continue
        peers = [source for source in spec.sources.get(owner, []) if source != stream.host.name]
        for turn, source in enumerate(peers * _REBUILD_TURNS):
            if turn and turn % len(peers) == 0:
                await asyncio.sleep(_REBUILD_PAUSE)
            try:
                await _copy(stream, inbound, spec, owner, source)
                stream.log(f"rebuilt rank {owner}'s replica of {spec.resumed} from host {source}")
                break
            except (GeminiError, OSError) as error:
                stream.log(f"rebuilding rank {owner}'s replica from host {source} failed: {error}")
            if stream.host.slots(owner).committed != spec.resumed:
                break


async def _copy(stream: Home, inbound: Inbound, spec: SessionSpec, owner: int, source: str) -> None:
    assert spec.resumed is not None
    copier = _Copier()
    connection = await dial(spec.addresses[source], stream.claims("fetch", source), stream.run.secret, copier)
    try:
        asked = Describe(owner=owner, version=spec.resumed)
        connection.send(asked)
        about = await asyncio.wait_for(copier.inbox.get(), 30)
        if not isinstance(about, Description):
            raise PeerError(str(getattr(about, "text", about)))
        check_answer(asked, about)
        await _fill(stream, inbound, spec.resumed, owner, about, copier, connection)
    finally:
        connection.abort("done")


async def _fill(
    stream: Home, inbound: Inbound, version: Version, owner: int, about: Description, copier: _Copier, connection: Connection
) -> None:
    Layout.from_bytes(about.layout)  # refuses garbage before it is kept
    # A replica's slots may have another shape by now, or a writer of the past; those of its own worker were, or will be, reserved for it.
    if not stream.host.owns(owner) or not any(o == owner for o, _ in stream.vault.memory):
        await inbound.make_room(owner, about)
    if stream.host.slots(owner).find(version) is not None:
        return
    if (slot := stream.host.rebuild(owner, version)) is None:
        raise PeerError("no slot is free for it; the next commit brings a copy")
    memory = stream.vault.memory[owner, slot.index]
    memory.clear()
    memory.forget()
    copier.memory = memory
    try:
        for index, (offset, nbytes) in enumerate(memory.cuts(about.extras_bytes)):
            if stream.host.slots(owner).committed != version:
                raise PeerError("a newer version is committed")
            copier.asked = Fetch(call=index + 1, owner=owner, version=version, offset=offset, nbytes=nbytes)
            connection.send(copier.asked)
            data = await asyncio.wait_for(copier.inbox.get(), 30)
            digest = about.digests[index]
            found = checksum(memory.data(offset, nbytes)) if copier.digest is None else copier.digest
            if not isinstance(data, Data) or found != digest:
                raise PeerError(f"chunk {index} is damaged or missing: {data}")
            memory.put_chunk(index, offset, nbytes, digest)
        if not memory.finish(version, about.extras_bytes, stream.host.roots.get(owner, about.root)):
            raise PeerError(f"rank {owner}'s shard of {version} arrived with another root than the committed one")
        stream.perform(stream.host.rebuilt(owner, version, memory.root))
    finally:
        if memory.version is None:
            with contextlib.suppress(KeyError):
                stream.perform(stream.host.receive_failed(owner, version))
