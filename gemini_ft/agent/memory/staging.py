"""Brings a shard of a stored checkpoint into this host's memory, where it becomes a copy like any other.

Each shard is read from storage once, by its owner's host; other hosts that need it read it from there.
"""

from __future__ import annotations

from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import TYPE_CHECKING

from gemini_ft.agent.memory.slot_memory import SlotMemory, SlotShape, extras_room
from gemini_ft.agent.progress import TransferProgress
from gemini_ft.config import StorageConfig
from gemini_ft.core.roots import checksum
from gemini_ft.errors import CorruptDataError
from gemini_ft.storage.base import Storage
from gemini_ft.storage.opening import open_storage
from gemini_ft.storage.shard import ONE_REQUEST, ShardRecord, StoredShard
from gemini_ft.wire.worker_messages import Stage

if TYPE_CHECKING:
    from gemini_ft.agent.context import StreamContext

_PARALLEL = 4  # ranged reads at a time
CHUNKS_AT_A_TIME = 8  # read in one request


class StoredCopy:
    """The shard that one ``Stage`` asks for.

    Raises:
        CorruptDataError: its layout or small state does not match its checksum.
        StorageError: the storage cannot be read.
    """

    def __init__(self, context: StreamContext, order: Stage) -> None:
        settings = StorageConfig.model_validate(order.storage)
        self._stored = StoredShard(_storage(settings.url, settings.endpoint_url), ShardRecord.model_validate_json(order.record), whole=True)
        self._order, self._context = order, context
        layout, self.extras = self._stored.layout, self._stored.extras
        self.shape = SlotShape(
            run=context.run.run_id,
            stream=context.name,
            owner=order.owner,
            world_size=layout.world_size,
            layout_hash=layout.logical_hash,
            layout=layout.to_bytes(),
            data_bytes=layout.nbytes,
            extras_capacity=extras_room(len(self.extras)),
            chunk_bytes=self._stored.record.chunk_bytes,  # the committed root is one over chunks of this size
        )

    def fill(self, memory: SlotMemory) -> None:
        """Lays the shard down by parallel ranged reads, each checked against its checksum, and gives the slot its identity.

        Raises:
            CorruptDataError: a part does not match its checksum (the rest is not read any more), or the whole not the committed root.
            StorageError: the storage cannot be read.
        """
        size, step = memory.shape.data_bytes, CHUNKS_AT_A_TIME * self._stored.record.chunk_bytes
        if size <= ONE_REQUEST:  # it comes whole
            step = max(step, size)
        transfer = TransferProgress(f"rank {self._order.owner}'s shard of {self._order.version} from storage", size, self._context)

        def read(offset: int) -> None:
            nbytes = min(step, size - offset)
            try:
                self._stored.read(offset, memory.data(offset, nbytes))
            except Exception as error:
                raise _without_frames(error) from None
            transfer.add(nbytes)

        memory.data(size, len(self.extras))[:] = self.extras
        if size <= step:  # one request: threads would only wait for their turn
            if size:
                read(0)
        else:
            with ThreadPoolExecutor(_PARALLEL) as pool:
                done, _ = wait([pool.submit(read, offset) for offset in range(0, size, step)], return_when=FIRST_EXCEPTION)
                failures = [error for future in done if (error := future.exception()) is not None]
                if failures:
                    pool.shutdown(cancel_futures=True)
                    raise failures[0]
        for index, cut in enumerate(memory.cuts(len(self.extras))):
            is_read = index < len(self._stored.digests)  # and has been compared with its checksum on the way
            memory.put_chunk(index, *cut, self._stored.digests[index] if is_read else checksum(memory.data(*cut)))
        if not memory.finish(self._order.version, len(self.extras), self._stored.record.root or None):
            key = self._stored.record.key
            raise CorruptDataError(f"{key}: every part is sound, and together they are not what was committed; use an older checkpoint")
        transfer.finish()


def _without_frames(error: BaseException) -> BaseException:
    """The error without the frames that it and its causes have passed: they would keep views of the memory, and so all of it."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__, each = None, each.__context__
    return error


@lru_cache(maxsize=4)
def _storage(url: str, endpoint_url: str | None) -> Storage:
    """The storage, opened once for shards that come together: two clients of boto3 take longer to make than a small shard to come."""
    return open_storage(url, endpoint_url)


def hang_up() -> None:
    """Forgets open storages: the next shard is read on new connections, and with the credentials of then."""
    _storage.cache_clear()
