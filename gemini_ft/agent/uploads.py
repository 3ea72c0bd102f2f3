"""From committed memory to storage, while training goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from gemini_ft.agent.memory import SlotMemory
from gemini_ft.config import StorageConfig
from gemini_ft.errors import GeminiError, StorageError
from gemini_ft.layout import Layout
from gemini_ft.messages import SessionSpec
from gemini_ft.storage.base import Storage, open_storage
from gemini_ft.storage.checkpoints import Manifest, apply_retention, checkpoint_folder, shard_key, write_manifest
from gemini_ft.storage.shard import ShardRecord, write_shard
from gemini_ft.versions import Version

_T = TypeVar("_T")
_ATTEMPTS = 4
_BACKOFF = 0.5  # seconds before the second attempt, doubled for each further one


class Uploader:
    """Uploads the frozen slots of this host's shards; on the leader's host, writes the manifest."""

    def __init__(self, spec: SessionSpec, run: str, log: Callable[[str], None]) -> None:
        self.config = StorageConfig.model_validate(spec.storage)
        self.version: Version | None = None
        self._spec, self._run, self._log = spec, run, log
        self._storage: Storage = open_storage(self.config.url, self.config.endpoint_url, self.config.max_bandwidth)
        self._tasks: set[asyncio.Task[None]] = set()
        self._logical_hash = ""

    def start(self, owner: int, memory: SlotMemory, version: Version, done: Callable[[str, str], None]) -> None:
        """Upload one shard in the background; ``done`` gets its record, or what went wrong."""
        self.version = version
        self._logical_hash = memory.shape.layout_hash
        task = asyncio.get_running_loop().create_task(self._upload(owner, memory, version, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def over(self) -> None:
        """The upload has ended on all hosts."""
        self.version = None

    def close(self) -> None:
        """The session is over. A thread that reads a slot cannot be stopped; its slot is let go when it ends."""
        self.version = None

    async def _upload(self, owner: int, memory: SlotMemory, version: Version, done: Callable[[str, str], None]) -> None:
        try:
            record = await self._insist(lambda: self._write(owner, memory, version))
        except GeminiError as error:
            done("", str(error))
        else:
            done(record.model_dump_json(), "")

    def _write(self, owner: int, memory: SlotMemory, version: Version) -> ShardRecord:
        shape = memory.shape
        key = shard_key(checkpoint_folder(self._run, self._spec.stream, version), owner)
        extras = memory.data(shape.data_bytes, memory.extras_bytes)
        return write_shard(self._storage, key, Layout.from_bytes(shape.layout), memory.data(0, shape.data_bytes), extras)

    async def write_manifest(self, version: Version, records: dict[int, str]) -> None:
        """Make the checkpoint exist, then delete what retention no longer keeps.

        Raises:
            StorageError: the manifest could not be written.
        """
        manifest = Manifest(
            run=self._run,
            stream=self._spec.stream,
            incarnation=version.incarnation,
            iteration=version.iteration,
            world_size=self._spec.world_size,
            logical_hash=self._logical_hash,
            shards={owner: ShardRecord.model_validate_json(record) for owner, record in records.items()},
        )
        await self._insist(lambda: write_manifest(self._storage, manifest))
        try:
            keep = (self.config.keep_last, self.config.keep_every)
            await asyncio.to_thread(apply_retention, self._storage, self._run, self._spec.stream, *keep)
        except GeminiError as error:
            self._log(f"old checkpoints could not be deleted: {error}")

    async def _insist(self, work: Callable[[], _T]) -> _T:
        """Try again after a storage error, a few times, ever slower."""
        for attempt in range(_ATTEMPTS):
            try:
                return await asyncio.to_thread(work)
            except (StorageError, OSError) as error:
                if attempt == _ATTEMPTS - 1:
                    raise StorageError(str(error)) from None
                self._log(f"storage: {error}; attempt {attempt + 2} of {_ATTEMPTS} follows")
                await asyncio.sleep(_BACKOFF * 2**attempt)
        raise AssertionError("unreachable")
