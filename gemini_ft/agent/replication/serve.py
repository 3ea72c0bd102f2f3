"""Serves complete shards to readers: a restarted worker, or an agent that rebuilds a replica (`gemini_ft.agent.replication.rebuild`).

A silent reader keeps a slot for a limited time only: a process that is stopped keeps its connection, and would keep the slot.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gemini_ft.agent.context import StreamContext
from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.core.versions import Version
from gemini_ft.errors import PeerError
from gemini_ft.storage.retention import READER_SECONDS
from gemini_ft.wire.messages import Failed, kind_of
from gemini_ft.wire.peer_messages import Data, Describe, Description, Fetch, GetRoots, Heartbeat, PeerMessage, Roots
from gemini_ft.wire.tcp import Connection, MessagesOnly

if TYPE_CHECKING:
    from gemini_ft.agent.session import Incoming

_LEAST = 5.0  # seconds
_LONG = 60.0  # seconds after which the log names a reader whose slot the job could use
_LOOKS = 4  # in a lease
_LEASE = 30.0  # seconds, for readers between two sessions


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


class Fetcher(MessagesOnly):
    """Serves one reader. The slot it reads is pinned until the reader hangs up, or its lease ends.

    The lease ends when no request and no progress is seen for ``replica_timeout`` seconds, but never less than five, and in any case after
    ``READER_SECONDS``. Time in which this agent is stopped does not count.
    """

    def __init__(self, stream: StreamContext, connection: Connection, host: str, doors: Incoming) -> None:
        self._stream, self._connection, self._host, self._doors = stream, connection, host, doors
        self._held: dict[tuple[int, Version], int] = {}
        self._is_named = False
        self._seconds = max(stream.spec.replica_timeout if stream.spec is not None else _LEASE, _LEAST)
        self._idle = self._looks = 0
        self._progress = (0, 0)
        self._timer = self._schedule()

    def _schedule(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._seconds / _LOOKS, self._look)

    def _look(self) -> None:
        progress = self._connection.backlog, self._connection.unacknowledged
        self._idle = self._idle + 1 if progress == self._progress else 0
        self._progress = progress
        self._looks += 1  # not seconds: this agent may have been stopped itself
        age = self._looks * self._seconds / _LOOKS
        self._name_if_long(age)
        if self._idle < _LOOKS and age < READER_SECONDS:
            self._timer = self._schedule()
            return
        silent, long = f"gave no sign of life for {self._seconds:g} s", f"has read for {age:g} s, which is the limit"
        reason = silent if self._idle >= _LOOKS else long
        if self._held:
            self._stream.log(f"{self._reads}, {reason}: its slots are taken back")
        self._connection.abort(f"the reader {reason}")

    @property
    def _reads(self) -> str:
        return f"host {self._host} at {self._connection.peer}, a reader of " + ", ".join(f"rank {owner}'s {v}" for owner, v in self._held)

    def _name_if_long(self, seconds: float) -> None:
        """Logs once that a reader has long kept a slot whose version is older than the committed one, so that the job could use it."""
        committed = self._stream.host.committed
        if seconds >= _LONG and not self._is_named and any(committed is not None and version < committed for _, version in self._held):
            self._is_named = True
            self._stream.log(
                f"{self._reads}, keeps them for {seconds:g} s: until it hangs up, or at the latest after {READER_SECONDS:g} s, "
                "there may be fewer snapshots, or none"
            )

    @property
    def _name(self) -> str:
        return f"fetch:{self._host}:{self._connection.peer}"

    def on_message(self, message: PeerMessage) -> memoryview | None:
        self._idle = 0
        if isinstance(message, Heartbeat):
            return None
        if isinstance(message, GetRoots):
            roots = self._doors.committed_roots(message.version)
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

    def on_lost(self, reason: str) -> None:
        self._timer.cancel()
        for (owner, _), slot in self._held.items():
            self._stream.perform(self._stream.host.release(owner, slot, self._name))

    def _pin(self, owner: int, version: Version) -> SlotMemory | None:
        slot = self._stream.host.hold(owner, version, self._name)
        if slot is None:
            return None
        self._held[owner, version] = slot.index
        return self._stream.slot_store.memory[owner, slot.index]

    def _send(self, memory: SlotMemory, fetch: Fetch) -> None:
        end = fetch.offset + fetch.nbytes
        if fetch.offset < 0 or end > memory.shape.data_bytes + memory.extras_bytes:
            raise PeerError(f"host {self._host} asked for bytes {fetch.offset}:{end}, outside the shard")
        step = memory.shape.chunk_bytes
        for offset in range(fetch.offset, end, step):
            nbytes = min(step, end - offset)
            data = Data(call=fetch.call, owner=fetch.owner, version=fetch.version, offset=offset, nbytes=nbytes)
            self._connection.send(data, memory.data(offset, nbytes))
