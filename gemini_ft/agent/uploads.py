"""From committed memory to storage, while training goes on."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import platform
import time
from collections.abc import Callable
from typing import TypeVar

from gemini_ft.agent.memory import SlotMemory
from gemini_ft.agent.transfer import Transfer
from gemini_ft.config import StorageConfig
from gemini_ft.errors import GeminiError, StorageError, SupersededError
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
        self._transfers: dict[int, Transfer] = {}  # owner -> its shard's upload
        self._failures: dict[str, tuple[float, str]] = {}  # what -> since when (on the system's clock) it fails, and why

    def status(self) -> dict[str, object]:
        """What ``gemini status`` shows: what is under way, how far it is, what is wrong and since when."""
        transfers = list(self._transfers.values()) if self.version is not None else []
        since, error = min(self._failures.values(), default=(None, ""))
        return {
            "url": self.config.url,
            "uploading": str(self.version) if self.version is not None else None,
            "done_bytes": sum(transfer.done for transfer in transfers),
            "total_bytes": sum(transfer.total for transfer in transfers),
            "seconds_left": max((round(transfer.seconds_left, 1) for transfer in transfers if transfer.done), default=None),
            "failing_since": since,
            "error": error,
        }

    def start(self, owner: int, memory: SlotMemory, version: Version, done: Callable[[str, str], None]) -> None:
        """Upload one shard in the background; ``done`` gets its record, or what went wrong."""
        if version != self.version:
            self._transfers.clear()
        self.version = version
        self._logical_hash = memory.shape.layout_hash
        task = asyncio.get_running_loop().create_task(self._upload(owner, memory, version, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def over(self, error: str) -> None:
        """The upload has ended on all hosts; ``error``: what went wrong on one of them."""
        self.version = None
        if not error:
            self._failures.pop("an upload", None)
        else:
            self._failures["an upload"] = (self._failures.get("an upload", (time.time(), ""))[0], error)

    def close(self) -> None:
        """The session is over. A thread that reads a slot cannot be stopped; its slot is let go when it ends."""
        self.version = None

    async def _upload(self, owner: int, memory: SlotMemory, version: Version, done: Callable[[str, str], None]) -> None:
        try:
            record = await self._insist(f"rank {owner}'s shard", lambda: self._write(owner, memory, version))
        except GeminiError as error:
            done("", str(error))
        except Exception as error:  # a fault of ours must not leave the upload unfinished for ever
            done("", f"{type(error).__name__}: {error}")
        else:
            done(record.model_dump_json(), "")

    def _write(self, owner: int, memory: SlotMemory, version: Version) -> ShardRecord:
        shape = memory.shape
        key = shard_key(checkpoint_folder(self._run, self._spec.stream, version), owner)
        data, extras = memory.data(0, shape.data_bytes), memory.data(shape.data_bytes, memory.extras_bytes)
        transfer = self._transfers[owner] = Transfer(f"upload of rank {owner}'s shard of {version}", shape.data_bytes, self._log)
        record = write_shard(self._storage, key, Layout.from_bytes(shape.layout), data, extras, transfer.add)
        transfer.finish()
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

        await self._insist("the manifest", write)
        try:
            keep = (self.config.keep_last, self.config.keep_every)
            await asyncio.to_thread(apply_retention, self._storage, self._run, self._spec.stream, *keep)
        except GeminiError as error:
            self._log(f"old checkpoints could not be deleted: {error}")

    async def _insist(self, what: str, work: Callable[[], _T]) -> _T:
        """Try again after a storage error, a few times, ever slower."""
        for attempt in range(_ATTEMPTS):
            try:
                result = await asyncio.to_thread(work)
            except (StorageError, SupersededError, OSError) as error:
                since, _ = self._failures[what] = (self._failures.get(what, (time.time(), ""))[0], str(error))
                if attempt == _ATTEMPTS - 1 or isinstance(error, SupersededError):
                    raise StorageError(f"{error} (failing for {time.time() - since:.0f} s)") from None
                self._log(f"storage: {error}; attempt {attempt + 2} of {_ATTEMPTS} follows")
                await asyncio.sleep(_BACKOFF * 2**attempt)
            else:
                if what in self._failures:
                    self._log(f"storage: {what} goes through again after {time.time() - self._failures.pop(what)[0]:.0f} s")
                return result
        raise AssertionError("unreachable")


def _versions() -> dict[str, str]:
    """Of the software that a manifest names; the agent itself does not import it."""
    found = {"python": platform.python_version()}
    for name in ("gemini-ft", "torch", "lightning", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
