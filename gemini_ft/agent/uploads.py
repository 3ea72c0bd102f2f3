"""From committed memory to storage, while training goes on."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import platform
import time
from collections.abc import Callable
from typing import TypeVar

from gemini_ft.agent.memory import SlotMemory
from gemini_ft.agent.progress import Progress
from gemini_ft.config import StorageConfig
from gemini_ft.errors import GeminiError, StorageError
from gemini_ft.layout import Layout
from gemini_ft.messages import SessionSpec
from gemini_ft.storage.base import Storage, open_storage
from gemini_ft.storage.checkpoints import Manifest, apply_retention, check_not_superseded, checkpoint_folder, shard_key, write_manifest
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
        self._progress: dict[int, Progress] = {}  # owner -> its shard's upload
        self._failing_since: float | None = None  # on the system's clock
        self._error = ""

    def status(self) -> dict[str, object]:
        """What ``gemini status`` shows: what is under way, how far it is, what is wrong and since when."""
        transfers = list(self._progress.values()) if self.version is not None else []
        return {
            "url": self.config.url,
            "uploading": str(self.version) if self.version is not None else None,
            "done_bytes": sum(progress.done for progress in transfers),
            "total_bytes": sum(progress.total for progress in transfers),
            "seconds_left": max((round(p.seconds_left, 1) for p in transfers if p.done), default=None),
            "failing_since": self._failing_since,
            "error": self._error,
        }

    def start(self, owner: int, memory: SlotMemory, version: Version, done: Callable[[str, str], None]) -> None:
        """Upload one shard in the background; ``done`` gets its record, or what went wrong."""
        if version != self.version:
            self._progress.clear()
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
        data, extras = memory.data(0, shape.data_bytes), memory.data(shape.data_bytes, memory.extras_bytes)
        progress = self._progress[owner] = Progress(f"upload of rank {owner}'s shard of {version}", shape.data_bytes, self._log)
        record = write_shard(self._storage, key, Layout.from_bytes(shape.layout), data, extras, progress.add)
        progress.finish()
        return record

    async def write_manifest(self, version: Version, records: dict[int, str]) -> None:
        """Make the checkpoint exist, then delete what retention no longer keeps.

        Raises:
            StorageError: the manifest could not be written, or another job has taken this one's run id over.
        """
        manifest = Manifest(
            run=self._run,
            stream=self._spec.stream,
            incarnation=version.incarnation,
            iteration=version.iteration,
            world_size=self._spec.world_size,
            logical_hash=self._logical_hash,
            versions=_versions(),
            shards={owner: ShardRecord.model_validate_json(record) for owner, record in records.items()},
        )

        def write() -> None:
            check_not_superseded(self._storage, manifest)
            write_manifest(self._storage, manifest)

        await self._insist(write)
        try:
            keep = (self.config.keep_last, self.config.keep_every)
            await asyncio.to_thread(apply_retention, self._storage, self._run, self._spec.stream, *keep)
        except GeminiError as error:
            self._log(f"old checkpoints could not be deleted: {error}")

    async def _insist(self, work: Callable[[], _T]) -> _T:
        """Try again after a storage error, a few times, ever slower."""
        for attempt in range(_ATTEMPTS):
            try:
                result = await asyncio.to_thread(work)
            except (StorageError, OSError) as error:
                self._note_failure(error)
                if attempt == _ATTEMPTS - 1:
                    raise StorageError(f"{error} (failing for {time.time() - (self._failing_since or 0.0):.0f} s)") from None
                self._log(f"storage: {error}; attempt {attempt + 2} of {_ATTEMPTS} follows")
                await asyncio.sleep(_BACKOFF * 2**attempt)
            else:
                self._note_success()
                return result
        raise AssertionError("unreachable")

    def _note_failure(self, error: Exception) -> None:
        self._failing_since = time.time() if self._failing_since is None else self._failing_since
        self._error = str(error)

    def _note_success(self) -> None:
        if self._failing_since is not None:
            self._log(f"storage: works again after {time.time() - self._failing_since:.0f} s")
        self._failing_since, self._error = None, ""


def _versions() -> dict[str, str]:
    """Of the software that a manifest names; the agent itself does not import it."""
    names = ("gemini-ft", "torch", "lightning", "deepspeed")
    found = {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name.replace("-", "_"))}
    return {"python": platform.python_version(), **found}
