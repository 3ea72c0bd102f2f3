"""Rebuilds, after a recovery, the copies that this host should hold and does not: after the first steps, and with part of the network only.

Until a copy is there, a second failure would find one less; but the next commit brings one anyway, and the job is back sooner if
nothing else is on the network. So rebuilding begins when a worker of this host has made two steps, after which that commit is
usually there, or ``replica_timeout`` after the session has begun, however far its workers are. Then it waits for idle network as
replicas do, and leaves most of the link to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from gemini_ft.agent.context import StreamContext
from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.agent.replication.gate import Gate
from gemini_ft.agent.replication.receive import Inbound
from gemini_ft.core.layout import Layout
from gemini_ft.errors import GeminiError, PeerError
from gemini_ft.wire.handshake import dial
from gemini_ft.wire.messages import check_answer
from gemini_ft.wire.peer_messages import Data, Describe, Description, Fetch, Heartbeat, PeerMessage
from gemini_ft.wire.tcp import Connection
from gemini_ft.wire.worker_messages import SessionSpec

_TURNS = 5  # how often each peer is asked
_PAUSE = 0.3  # seconds between two turns
_STEPS = 2  # of a worker, before the network is used for this
_SIGN = 1.0  # seconds between signs of life while nothing is read
_ANSWER_SECONDS = 30.0
_SHARE = 0.25  # of the time; the rest is for others on the same link


class Throttle:
    """Makes work take no more than a share of the time, by a rest after each piece of it."""

    def __init__(
        self, share: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> None:
        self._rest, self._clock, self._wait = 1 / share - 1, clock, sleep

    @contextlib.asynccontextmanager
    async def piece(self) -> AsyncIterator[None]:
        """A piece of the work; it rests when that is done."""
        begin = self._clock()
        yield
        await self._wait(self._rest * (self._clock() - begin))


class Rebuilding:
    """The rebuilding of one session. ``gate``: through which this host's replicas go out."""

    def __init__(self, stream: StreamContext, inbound: Inbound, spec: SessionSpec, gate: Gate) -> None:
        assert spec.resumed is not None
        self._stream, self._inbound, self._spec, self._gate, self._resumed = stream, inbound, spec, gate, spec.resumed
        self._stepped = asyncio.Event()
        self._connection: Connection | None = None  # to the host from which is read
        self._task = asyncio.get_running_loop().create_task(self._rebuild())

    def reached(self, iteration: int) -> None:
        if iteration >= self._resumed.iteration + _STEPS:
            self._stepped.set()

    def cancel(self) -> None:
        """Ends it: from now on it writes nowhere."""
        self._task.cancel()
        if self._connection is not None:
            self._connection.abort("the session is over")

    async def end(self) -> None:
        """Ends it, and waits until it has given its slot back."""
        self.cancel()
        await asyncio.wait([self._task])

    async def _rebuild(self) -> None:
        """Copies from peers every shard of the resumed version that this host should hold and does not.

        The next commit makes that moot, so a failure is only logged; but a peer that opens the session a moment later than this
        host closes the connections of its readers, so it is asked again.
        """
        stream, host = self._stream, self._stream.host
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._spec.replica_timeout):
                await self._stepped.wait()
        for owner, holders in self._spec.holders.items():
            if host.name not in holders or host.slots(owner).complete_version(self._resumed) is not None or self._is_moot(owner):
                continue
            peers = [source for source in self._spec.sources.get(owner, []) if source != host.name]
            for turn in range(_TURNS * len(peers)):
                if turn and turn % len(peers) == 0:
                    await asyncio.sleep(_PAUSE)
                source = peers[(owner + turn) % len(peers)]  # or the same one would serve all that miss something
                try:
                    await self._copy(owner, source)
                    stream.log(f"rebuilt rank {owner}'s replica of {self._resumed} from host {source}")
                    break
                except (GeminiError, OSError) as error:
                    stream.log(f"rebuilding rank {owner}'s replica from host {source} failed: {error}")
                if self._is_moot(owner):
                    break

    def _is_moot(self, owner: int) -> bool:
        return self._stream.host.slots(owner).committed != self._resumed

    def _check_wanted(self, owner: int, connection: Connection) -> None:
        """Keeps the slot of the source, which takes a silent reader for a dead one; lets go of both slots once they are not needed."""
        if self._is_moot(owner):
            raise PeerError("a newer version is committed")
        connection.send(Heartbeat())

    async def _idle_network(self, nbytes: int, owner: int, connection: Connection) -> None:
        late = time.monotonic() + self._gate.patience
        while True:
            try:
                async with asyncio.timeout(_SIGN):
                    await self._gate.leave(nbytes, lambda: late)
                    return
            except TimeoutError:
                self._check_wanted(owner, connection)

    async def _rest(self, owner: int, connection: Connection, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _SIGN))
            self._check_wanted(owner, connection)

    async def _copy(self, owner: int, source: str) -> None:
        copier = _Copier()
        stream = self._stream
        claims = stream.claims("fetch", source)
        further = self._spec.further.get(source, ())
        connection = self._connection = await dial(self._spec.addresses[source], claims, stream.run.secret, copier, further=further)
        try:
            asked = Describe(owner=owner, version=self._resumed)
            connection.send(asked)
            about = await copier.next()
            if not isinstance(about, Description):
                raise PeerError(str(getattr(about, "text", about)))
            check_answer(asked, about)
            await self._fill(owner, about, copier, connection)
        finally:
            connection.abort("done")

    async def _fill(self, owner: int, about: Description, copier: _Copier, connection: Connection) -> None:
        stream, version = self._stream, self._resumed
        Layout.from_bytes(about.layout)  # refuses garbage before it is kept
        # A replica's slots may have another shape by now, or a writer of the past; those of its worker are reserved for it.
        if not stream.host.owns(owner) or not any(o == owner for o, _ in stream.slot_store.memory):
            await self._inbound.make_room(owner, about, offered=False)
        if stream.host.slots(owner).find(version) is not None:
            return
        if (slot := stream.host.rebuild(owner, version)) is None:
            raise PeerError("no slot is free for it; the next commit brings a copy")
        memory = stream.slot_store.memory[owner, slot.index]
        memory.clear()
        memory.forget()
        copier.memory = memory
        throttle = Throttle(_SHARE, sleep=partial(self._rest, owner, connection))
        try:
            for index, (offset, nbytes) in enumerate(memory.cuts(about.extras_bytes)):
                self._check_wanted(owner, connection)
                await self._idle_network(nbytes, owner, connection)
                async with throttle.piece():
                    copier.asked = Fetch(call=index + 1, owner=owner, version=version, offset=offset, nbytes=nbytes)
                    connection.send(copier.asked)
                    data = await copier.next()
                digest = about.digests[index]
                if not isinstance(data, Data) or copier.digest != digest:
                    raise PeerError(f"chunk {index} is damaged or missing: {data}")
                memory.put_chunk(index, offset, nbytes, digest)
            if not memory.finish(version, about.extras_bytes, stream.host.roots.get(owner, about.root)):
                raise PeerError(f"rank {owner}'s shard of {version} arrived with another root than the committed one")
            stream.perform(stream.host.rebuilt(owner, version, memory.root))
        finally:
            connection.abort("done")  # first: the slot may be given to another at once
            if memory.version is None:
                with contextlib.suppress(KeyError):
                    stream.perform(stream.host.receive_failed(owner, version))


class _Copier:
    """Receives one shard from a peer into a slot."""

    def __init__(self) -> None:
        self.memory: SlotMemory | None = None
        self.asked: Fetch | None = None
        self.inbox: asyncio.Queue[PeerMessage | str] = asyncio.Queue()
        self.digest = 0  # of the bytes that came last

    async def next(self) -> PeerMessage | str:
        """The next message, or why there is none; `asyncio.wait_for` could take a cancellation for its own."""
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await self.inbox.get()

    def on_message(self, message: PeerMessage) -> memoryview | None:
        if isinstance(message, Data) and self.memory is not None:
            asked, self.asked = self.asked, None
            if asked is None:
                raise PeerError("bytes came that were not asked for")
            check_answer(asked, message)
            if (message.offset, message.nbytes) != (asked.offset, asked.nbytes):
                raise PeerError(f"bytes {message.offset}+{message.nbytes} came where {asked.offset}+{asked.nbytes} were due")
            return self.memory.data(message.offset, message.nbytes)
        self.inbox.put_nowait(message)
        return None

    def on_bytes(self, message: PeerMessage, digest: int) -> None:
        self.digest = digest
        self.inbox.put_nowait(message)

    def on_lost(self, reason: str) -> None:
        self.inbox.put_nowait(reason)
