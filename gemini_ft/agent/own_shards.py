"""The shards of this host's own ranks: their memory, their chunks, and the report of each snapshot's end.

Shards that a device has laid down are hashed here, on threads of the agent: a worker's would take its interpreter lock.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from gemini_ft import failpoints
from gemini_ft.agent.lifecycle import yield_to_training
from gemini_ft.agent.memory.slot_memory import SlotMemory, SlotShape
from gemini_ft.agent.replication.pacing import end_of
from gemini_ft.agent.replication.receive import REPLICA_SLOTS, Inbound, may_be_written_by_another, shape_of
from gemini_ft.agent.tasks import Tasks
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.core.roots import checksum
from gemini_ft.core.versions import Version
from gemini_ft.errors import AgentError, GeminiError
from gemini_ft.wire.messages import Chunk, kind_of
from gemini_ft.wire.peer_messages import UploadSoon
from gemini_ft.wire.worker_messages import Copied, GiveUp, Landed, Queued, Request, Reserve, Reserved, StopAfterStep, ToAgent

if TYPE_CHECKING:
    from gemini_ft.agent.stream import Stream

_MOST = 32  # threads; one forms about 6 GB/s, and a copy is as good as lost if its checksums take longer than a step


class Hashing:
    """One shard on its way from a device into its slot; ``shards`` hears of each chunk, on the event loop, in any order."""

    def __init__(self, shards: OwnShards, owner: int, memory: SlotMemory, version: Version) -> None:
        self._shards, self._owner, self.memory, self.version = shards, owner, memory, version
        self._cuts = memory.cuts(extras_bytes=0)
        self._next = 0  # the first chunk that is not known to be there
        self._pending = 0
        self._then: deque[Callable[[], None]] = deque()

    def landed(self, upto: int) -> None:
        """Forms the checksums of all chunks that are whole now."""
        while self._next < len(self._cuts) and sum(self._cuts[self._next]) <= upto:
            self._pending += 1
            self._form(self._next, *self._cuts[self._next])
            self._next += 1

    def then(self, call: Callable[[], None]) -> None:
        """Calls ``call`` when no checksum is being formed, after others that wait for that: now, or later."""
        self._then.append(call)
        self._end()

    def _form(self, index: int, offset: int, nbytes: int) -> None:
        data = self.memory.data(offset, nbytes)
        try:
            forming = asyncio.get_running_loop().run_in_executor(_pool(), checksum, data)
        except RuntimeError:  # no thread can be started
            self._formed(index, offset, nbytes, checksum(data))
        else:
            forming.add_done_callback(lambda done: self._formed(index, offset, nbytes, done.result()))

    def _formed(self, index: int, offset: int, nbytes: int, digest: int) -> None:
        self._pending -= 1
        try:
            self._shards.hashed(self._owner, self, (index, offset, nbytes, digest))
        finally:
            self._end()

    def _end(self) -> None:
        while self._pending == 0 and self._then:
            self._then.popleft()()


_threads: ThreadPoolExecutor | None = None


def _pool() -> ThreadPoolExecutor:
    """The threads, which all shards of this agent share."""
    global _threads
    if _threads is None:
        _threads = ThreadPoolExecutor(max(1, min(_MOST, len(os.sched_getaffinity(0)) - 2)), "gemini-hash", yield_to_training)
    return _threads


class OwnShards:
    """The shards that workers of this host copy into their slots. ``inbound`` has replicas that a worker can keep, as soon as one comes."""

    def __init__(self, stream: Stream, inbound: Inbound) -> None:
        self._stream, self._context, self._inbound = stream, stream.context, inbound
        self._tasks = Tasks()
        self._hashing: dict[int, Hashing] = {}  # owner -> its shard on the way from a device, or the last one

    def on_message(self, worker: WorkerConnection, message: ToAgent) -> None:
        context, owner = self._context, worker.rank
        match message:
            case Reserve():
                self._reserve(worker, message)
            case Request(iteration=iteration):
                context.perform(context.host.request(owner, context.version(iteration)))
                if owner in context.host.waiting:
                    worker.send(Queued(iteration=iteration))
            case Chunk():
                self._chunk(owner, message)
            case Landed():
                self._landed(owner, message)
            case Copied() if owner in self._hashing:
                self._hashing[owner].then(partial(self._copied_at_last, owner, context.version(message.iteration), message))
            case Copied():
                self._copied(owner, context.version(message.iteration), message)
            case GiveUp(iteration=iteration, reason=reason):
                self._hashing.pop(owner, None)
                context.perform(context.host.give_up(owner, context.version(iteration), reason))
            case _:
                raise AgentError(f"{kind_of(message)!r} is not for an agent")

    def _reserve(self, worker: WorkerConnection, message: Reserve) -> None:
        """Gives a worker the memory of its shard: the slots it had, if no other process can still write to them."""
        context, owner = self._context, worker.rank
        assert context.spec is not None
        shape = shape_of(context, owner, message)
        count = REPLICA_SLOTS + (context.spec.storage is not None)
        reuse = not may_be_written_by_another(context, owner, worker)
        context.workers[owner] = worker
        if context.slot_store.is_slow:
            self._tasks.spawn(self._reserve_beside(worker, message, shape, count, reuse))
        else:
            self._hand_out(worker, message, shape, context.slot_store.ensure(owner, shape, count, reuse))

    async def _reserve_beside(self, worker: WorkerConnection, message: Reserve, shape: SlotShape, count: int, reuse: bool) -> None:
        """Gives the memory as soon as it is made; the worker waits for it, and the agent answers everybody else."""
        context, owner = self._context, worker.rank

        def may_be_reused() -> bool:
            return reuse and not may_be_written_by_another(context, owner, worker)

        try:
            indices = await context.slot_store.ensure_beside(owner, shape, count, may_be_reused, lambda: context.is_present(worker))
            self._hand_out(worker, message, shape, indices)
        except GeminiError as error:
            worker.refuse(message, error)
        except Exception as error:  # a fault of ours: the worker must not wait for an answer that will not come
            context.log(traceback.format_exc())
            worker.refuse(message, AgentError(f"the agent failed at {kind_of(message)!r}: {error!r}; see its log"))

    def _hand_out(self, worker: WorkerConnection, message: Reserve, shape: SlotShape, indices: list[int]) -> None:
        context, owner = self._context, worker.rank
        fds = [context.slot_store.memory[owner, index].fd for index in indices]
        reserved = Reserved(
            call=message.call, layout_hash=message.layout_hash, slots=indices, data_offset=shape.data_offset, capacity=shape.capacity
        )
        self._inbound.entrust_all()  # first: with the answer the worker lets go of the slots that it had
        worker.send(reserved, fds)
        context.perform(context.host.send_again(owner))
        if worker.launch is not None and (worker.launch.pid, worker.launch.ticks) in context.run.leaving:
            context.log(f"this host is still drained: rank {owner} is told to leave as well")
            context.report(UploadSoon())
            worker.send(StopAfterStep())

    def _chunk(self, owner: int, chunk: Chunk) -> None:
        """Records a chunk that the worker has copied, so that it may be sent to peers."""
        memory = self._context.slot_store.writing(owner, self._context.version(chunk.iteration))
        if memory is not None:
            if not memory.admits(chunk.index, chunk.offset, chunk.nbytes):
                raise AgentError(f"rank {owner} copied chunk {chunk.index} to {chunk.offset}+{chunk.nbytes}, which is not its place")
            self._put(owner, memory, chunk.index, chunk.offset, chunk.nbytes, chunk.digest)

    def _put(self, owner: int, memory: SlotMemory, index: int, offset: int, nbytes: int, digest: int) -> None:
        memory.put_chunk(index, offset, nbytes, digest)
        for link in self._stream.session.outbound.links_of(owner):
            link.chunk_ready()

    def _landed(self, owner: int, landed: Landed) -> None:
        """Has the checksums formed of what the worker's device has laid down; what is given up meanwhile is not noted any more."""
        version = self._context.version(landed.iteration)
        memory = self._context.slot_store.writing(owner, version)
        if memory is None:
            return
        hashing = self._hashing.get(owner)
        if hashing is None or (hashing.memory, hashing.version) != (memory, version):
            hashing = self._hashing[owner] = Hashing(self, owner, memory, version)
        hashing.landed(landed.upto)

    def hashed(self, owner: int, hashing: Hashing, chunk: tuple[int, int, int, int]) -> None:
        """Takes number, offset, bytes and checksum of a chunk, unless its shard was given up meanwhile."""
        if self._context.slot_store.writing(owner, hashing.version) is hashing.memory:
            self._put(owner, hashing.memory, *chunk)

    def when_formed(self, owner: int, call: Callable[[], None]) -> None:
        """Calls ``call`` when what the owner has said of its copy counts: at once, or when the checksums are there."""
        if owner in self._hashing:
            self._hashing[owner].then(call)
        else:
            call()

    def _copied_at_last(self, owner: int, version: Version, message: Copied) -> None:
        """Does what `_copied` does, where nobody would hear of an error."""
        try:
            self._copied(owner, version, message)
        except Exception:
            self._context.log(traceback.format_exc())
            self._context.perform(self._context.host.give_up(owner, version, "its host's agent failed at it; see the agent's log"))

    def _copied(self, owner: int, version: Version, message: Copied) -> None:
        """Records that a worker has copied everything; gives the copy up if its bytes are not those that left the worker."""
        context = self._context
        memory = context.slot_store.writing(owner, version)
        if memory is None:
            return
        if not memory.is_whole(message.extras_bytes):
            raise AgentError(f"rank {owner} declared iteration {message.iteration} copied, but chunks are missing")
        if not memory.finish(version, message.extras_bytes, message.root or None):
            context.note_damage(owner, version)
            context.perform(context.host.give_up(owner, version, "its checksums did not come here as they left the worker"))
            return
        failpoints.reached("agent_copied", version.iteration, owner)
        self._stream.session.outbound.copied(owner, version, end_of(owner, memory, message.digest))
        context.perform(context.host.completed(owner, version, memory.shape.layout_hash, message.digest, memory.root))
