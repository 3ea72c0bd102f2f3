"""Forms the checksums of shards that a device has laid down, on threads of this agent: a worker's would take its interpreter lock."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gemini_ft.agent.lifecycle import yield_to_training
from gemini_ft.agent.memory import SlotMemory
from gemini_ft.core.roots import checksum
from gemini_ft.core.versions import Version

_MOST = 32  # threads; one forms about 6 GB/s, and a copy is as good as lost if its checksums take longer than a step


class Hashing:
    """One shard on its way from a device into its slot.

    Args:
        memory: the slot.
        version: what is laid down there.
        on_chunk: called with number, offset, bytes and checksum of each chunk, on the event loop, in any order.
    """

    def __init__(self, memory: SlotMemory, version: Version, on_chunk: Callable[[int, int, int, int], None]) -> None:
        self.memory, self.version, self._on_chunk = memory, version, on_chunk
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
            self._on_chunk(index, offset, nbytes, digest)
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
