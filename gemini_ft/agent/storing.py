"""A stream and its storage: shards of this host are uploaded, and shards of stored checkpoints are brought into its memory.

A stored shard becomes a copy like any other. It is read once, by its owner's host; other hosts that need it read it from there.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from gemini_ft.agent.context import StreamContext
from gemini_ft.agent.memory.slot_memory import SlotMemory, SlotShape, extras_room
from gemini_ft.agent.progress import TransferProgress
from gemini_ft.agent.uploads import Uploader
from gemini_ft.config import StorageConfig
from gemini_ft.core.roots import checksum
from gemini_ft.core.versions import Version
from gemini_ft.errors import CorruptDataError
from gemini_ft.storage.base import Storage
from gemini_ft.storage.opening import open_storage
from gemini_ft.storage.shard import ONE_REQUEST, ShardRecord, StoredShard
from gemini_ft.wire.messages import Notice
from gemini_ft.wire.peer_messages import ReportUploaded
from gemini_ft.wire.worker_messages import SessionSpec, Stage

if TYPE_CHECKING:
    from gemini_ft.agent.session import AgentSession
    from gemini_ft.agent.stream import Stream

_PARALLEL = 4  # ranged reads at a time
CHUNKS_AT_A_TIME = 8  # read in one request


class Storing:
    """Pins slots while they are uploaded, and tells the leader and the user."""

    def __init__(self, context: StreamContext, spec: SessionSpec, term: AgentSession) -> None:
        self._context = context
        self.uploader = Uploader(spec, context, term)
        self.said: list[ReportUploaded] = []  # until the upload is over, in case the leader has not heard

    def upload(self, owner: int, slot: int, version: Version) -> None:
        host = self._context.host
        if any("upload" in held.readers for held in host.slots(owner).slots.values()):
            # If one more slot were kept from the rotation, nothing could be committed any more.
            self._say(owner, version, "", "an upload of an earlier incarnation still hangs in storage")
            return
        # It may be thawed on all hosts, after a failure elsewhere, while our thread still reads: hold the slot until that ends.
        host.hold(owner, version, "upload")
        uploading = self.uploader.start(owner, self._context.slot_store.memory[owner, slot], version)
        uploading.add_done_callback(partial(self._over_here, owner, slot, version))

    def _over_here(self, owner: int, slot: int, version: Version, uploading: asyncio.Task[tuple[str, str]]) -> None:
        if not uploading.cancelled():
            self._context.perform(self._context.host.release(owner, slot, "upload"))
            self._say(owner, version, *uploading.result())

    def lacks(self, owner: int, version: Version) -> None:
        """Has an upload ended for which this host should have a shard."""
        self._say(owner, version, "", f"host {self._context.host.name} has no copy of rank {owner}'s shard of {version}")

    def _say(self, owner: int, version: Version, record: str, error: str) -> None:
        said = ReportUploaded(owner=owner, version=version, record=record, error=error)
        self.said.append(said)
        self._context.report(said)

    def over(self, version: Version, error: str, unclear: bool = False) -> None:
        """Records that the upload has ended on all hosts; ``unclear``: its manifest may have been written all the same."""
        told = self.uploader.over(version, error, unclear)
        if told or not error:
            self._context.log(f"upload of {version}: {error or 'complete'}")
        self.said.clear()
        self._context.perform(self._context.host.thawed(version))
        self._tell_user(told)

    async def tidy(self) -> str:
        """Deletes old checkpoints on the leader's host; returns the reason why nothing more may be uploaded until a later try."""
        told, trouble = await self.uploader.tidy()
        if told:
            self._context.log(told)
        self._tell_user(told)
        return trouble

    def _tell_user(self, text: str) -> None:
        """Tells the user once in the whole job: through rank 0."""
        if text and 0 in self._context.workers:
            self._context.workers[0].send(Notice(text=text))


class StoredCopy:
    """The shard that one ``Stage`` asks for.

    Raises CorruptDataError: its layout or small state does not match its checksum. StorageError: the storage cannot be read.
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


class Stagings:
    """Gets shards of a stored checkpoint into memory, each once, however often it is asked for."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._context = stream, stream.context
        self._tasks: dict[tuple[int, Version], asyncio.Task[None]] = {}  # (owner, version) -> its reading

    async def stage(self, order: Stage) -> None:
        """Gets a shard into memory, unless it is there. It is worth nothing any more when a session opens without it.

        Raises what `SlotStore.stage` does.
        """
        key = order.owner, order.version
        if key not in self._tasks:
            self._tasks[key] = asyncio.get_running_loop().create_task(self._stage(order))
            self._tasks[key].add_done_callback(lambda _: self._is_over(key))
        await asyncio.shield(self._tasks[key])

    def _is_over(self, key: tuple[int, Version]) -> None:
        self._tasks.pop(key, None)
        if not self._tasks:
            hang_up()

    async def _stage(self, order: Stage) -> None:
        before = self._context.spec
        await self._stream.end_rebuilding()  # which would lay down other copies meanwhile
        if self._context.host.slots(order.owner).complete_version(order.version) is None:
            try:
                await self._read(order, before)
            except CorruptDataError as error:  # on a new connection, before it is believed
                self._context.log(f"{error}; reading it again")
                hang_up()
                await self._read(order, before)

    async def _read(self, order: Stage, before: SessionSpec | None) -> None:
        copy = await asyncio.to_thread(StoredCopy, self._context, order)
        await self._context.slot_store.stage(copy, order.version, wanted=lambda: self._context.spec is before)
