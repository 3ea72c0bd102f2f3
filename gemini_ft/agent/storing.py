"""A stream and its storage: shards of this host are uploaded, and shards of stored checkpoints are brought into its memory."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from gemini_ft.agent.context import StreamContext
from gemini_ft.agent.memory.staging import StoredCopy, hang_up
from gemini_ft.agent.uploads import Uploader
from gemini_ft.core.versions import Version
from gemini_ft.errors import CorruptDataError
from gemini_ft.wire.messages import Notice
from gemini_ft.wire.peer_messages import ReportUploaded
from gemini_ft.wire.worker_messages import SessionSpec, Stage

if TYPE_CHECKING:
    from gemini_ft.agent.session import AgentSession
    from gemini_ft.agent.stream import Stream


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
