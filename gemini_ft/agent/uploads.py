"""Uploads committed memory to storage, while training goes on."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from gemini_ft import failpoints
from gemini_ft.agent.context import StreamContext
from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.agent.progress import Outage, TransferProgress
from gemini_ft.agent.tasks import Tasks
from gemini_ft.config import StorageConfig
from gemini_ft.core.layout import Layout
from gemini_ft.core.versions import Version
from gemini_ft.errors import CorruptDataError, GeminiError, ObjectGoneError, StorageError, SupersededError
from gemini_ft.storage import checkpoints
from gemini_ft.storage.base import Storage, exists
from gemini_ft.storage.decisions import Descent, Sighting
from gemini_ft.storage.lookout import check_not_superseded, other_by_mark
from gemini_ft.storage.opening import open_storage
from gemini_ft.storage.retention import Retention
from gemini_ft.storage.shard import Committed, ShardRecord, StoredShard, write_shard
from gemini_ft.wire.worker_messages import SessionSpec

if TYPE_CHECKING:
    from gemini_ft.agent.session import AgentSession

_T = TypeVar("_T")
_HOME_SECONDS = 5.0  # for this host's note in its home folder, which may hang
_ATTEMPTS = 4
_DELETING = "deleting old checkpoints"
_UPLOADS = "an upload"
BACKOFF = 0.5  # seconds before the second attempt, doubled for each further one
HOSTS_PER_SECOND = 50.0  # that begin to upload: a store slows down a client that sends thousands of requests at once


def turn(hosts: Sequence[str], owner: int) -> float:
    """Seconds after which the host of rank ``owner`` begins to upload; ``hosts``: rank -> its host."""
    return list(dict.fromkeys(hosts)).index(hosts[owner]) / HOSTS_PER_SECOND


class UnclearUploadError(StorageError):
    """An upload has failed, and its manifest may exist, or come to exist, all the same."""


class Uploader:
    """Uploads the frozen slots of this host's shards; on the leader's host, writes the manifest."""

    def __init__(self, spec: SessionSpec, context: StreamContext, term: AgentSession) -> None:
        self.config = StorageConfig.model_validate(spec.storage)
        self.version: Version | None = None
        self._spec, self._context, self._run, self._term = spec, context, context.run.run_id, term
        deletes = self.config.kept is not None
        self._reopen = partial(open_storage, self.config.url, self.config.endpoint_url, self.config.max_bandwidth, deletes)
        self._storage: Storage = self._reopen()
        keep = (self.config.kept, self.config.keep_every)
        self._closed = asyncio.Event()
        self._retention = Retention(
            self._reopen,
            self._run,
            spec.stream,
            *keep,
            damaged=frozenset(spec.damaged),
            may_delete=lambda: self._term.leads_in is not None,
            present=spec.present,
        )
        self._tasks, self.background = Tasks(), Tasks()
        self._logical_hash = ""
        self._transfers: dict[int, TransferProgress] = {}  # owner -> its shard's upload
        self._written: dict[Version, set[str]] = {}  # keys of this host's shards of uploads that are not over
        self._leftovers: set[str] = set()  # and of those that failed
        self._orphans: set[str] = set()  # and of those whose manifest may be written by a leader that was lost
        self._clearing = threading.Lock()
        self.stored: tuple[Version, float] | None = None  # the newest that is known here to be stored, and when, by the system's clock
        self._tidied = False
        self._failures: dict[str, Outage] = {}  # operation that does not work -> what is known of that

    def status(self) -> dict[str, object]:
        """The figures that ``gemini status`` shows: the upload under way, its progress, any failure and since when it lasts."""
        transfers = list(self._transfers.values()) if self.version is not None else []
        first = min(self._failures.values(), key=lambda outage: outage.since, default=None)
        return {
            "url": self.config.url,
            "uploading": str(self.version) if self.version is not None else None,
            "looked_through": self._tidied,
            "done_bytes": sum(transfer.done for transfer in transfers),
            "total_bytes": sum(transfer.total for transfer in transfers),
            "seconds_left": max((round(transfer.seconds_left, 1) for transfer in transfers if transfer.done), default=None),
            "stored": self.stored[0].iteration if self.stored is not None else None,
            "stored_at": self.stored[1] if self.stored is not None else None,
            "failing_since": first.since if first else None,
            "error": first.error if first else "",
        }

    @property
    def unstored(self) -> str:
        """Why the last upload failed; empty: it did not."""
        return self._failures[_UPLOADS].error if _UPLOADS in self._failures else ""

    def start(self, owner: int, memory: SlotMemory, version: Version) -> asyncio.Task[tuple[str, str]]:
        """Uploads one shard in the background; the task gives its record and the error, one of which is empty."""
        if version != self.version:
            self._transfers.clear()
        self.version = version
        self._logical_hash = memory.shape.layout_hash
        return self._tasks.spawn(self._upload(owner, memory, version))

    @property
    def busy(self) -> bool:
        return self._tasks.busy

    def over(self, version: Version, error: str, unclear: bool = False) -> str:
        """Records that the upload has ended on all hosts.

        ``unclear``: whether its manifest may exist, or come to exist, all the same.

        Returns:
            What to tell the user: of an outage its beginning, every further reason, and its end are worth a word.
        """
        self.version = None
        written = self._written.pop(version, set())
        if error and unclear:  # until the next upload is over it may be the newest
            self._orphans |= written
            return self._failed(version, error)
        orphans, self._orphans = self._orphans, set()
        if orphans:
            self.background.spawn(asyncio.to_thread(self._delete_orphans, orphans))
        if error:
            self._clear_away(written - orphans)
            return self._failed(version, error)
        self.stored = (version, time.time())
        # Not waited for, as the home folder may be on a network file system that hangs.
        self.background.spawn(asyncio.to_thread(checkpoints.note_on_host, self.config.url, self._run, self._spec.stream, version))
        outage = self._failures.pop(_UPLOADS, None)
        if outage is None:
            return ""
        return f"storage is well again after {time.time() - outage.since:.0f} s: {version} is stored"

    def _outage(self, operation: str) -> Outage:
        return self._failures.setdefault(operation, Outage(time.time()))

    def _failed(self, version: Version, error: str) -> str:
        if not self._outage(_UPLOADS).again(error):
            return ""
        return (
            f"storage: the upload of {version} failed: {error}; training goes on, the next upload is tried when it is due; "
            f"until then {self._stake()}. A message will say when storing works again"
        )

    def _recall(self) -> None:
        """Finds out which checkpoints were stored before this session."""
        if self.stored is None and (mark := checkpoints.recall_on_host(self.config.url, self._run, self._spec.stream)) is not None:
            self.stored = self.stored or (mark.version, mark.at)

    def _stake(self) -> str:
        if self.stored is None:
            return "nothing is stored yet"
        stored, at = self.stored
        return f"the newest stored step is {stored.iteration}, {max(0.0, time.time() - at):.0f} s old"

    def _delete_orphans(self, keys: set[str]) -> None:
        """Deletes shards of uploads that a later one has overtaken, where no manifest makes them a checkpoint."""
        for folder in {key.rpartition("/")[0] for key in keys}:
            shards, manifest = {key for key in keys if key.startswith(f"{folder}/")}, f"{folder}/{checkpoints.MANIFEST}"
            with contextlib.suppress(StorageError):  # what stays is deleted when the job starts again
                if exists(self._storage, manifest):
                    continue
                with self._clearing:
                    self._leftovers |= shards
                if not self._delete_leftovers() and exists(self._storage, manifest):  # written meanwhile by the leader that was lost
                    self._storage.delete(manifest)

    def _clear_away(self, keys: set[str]) -> None:
        """Deletes, in the background, the shards that this host has written for an upload that failed."""
        if keys:
            self._leftovers.update(keys)  # without the lock, which a thread has for as long as storage takes: this is the event loop
            self.background.spawn(asyncio.to_thread(self._delete_leftovers))

    def _delete_leftovers(self) -> str:
        """Deletes leftovers; returns the reason if they could not be deleted, else an empty string."""
        with self._clearing:
            for key in sorted(self._leftovers):
                try:
                    self._storage.delete(key)
                except StorageError as error:
                    return str(error)
                self._leftovers.discard(key)
            return ""

    def close(self) -> None:
        """The session is over: nothing is tried again. A thread that reads a slot cannot be stopped; its slot is let go when it ends."""
        self.version = None
        self._closed.set()

    async def _upload(self, owner: int, memory: SlotMemory, version: Version) -> tuple[str, str]:
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), turn(self._spec.hosts, owner))
                raise StorageError("the session was over before this host's turn to upload had come")
            record = await self._insist(f"rank {owner}'s shard", lambda: self._write(owner, memory, version))
        except GeminiError as error:
            return "", str(error)
        except Exception as error:  # a fault of ours must not leave the upload unfinished for ever
            return "", f"{type(error).__name__}: {error}"
        return record.model_dump_json(), ""

    def _write(self, owner: int, memory: SlotMemory, version: Version) -> ShardRecord:
        shape = memory.shape
        key = checkpoints.shard_key(checkpoints.checkpoint_folder(self._run, self._spec.stream, version), owner)
        data, extras = memory.data(0, shape.data_bytes), memory.data(shape.data_bytes, memory.extras_bytes)
        if (trouble := self._delete_leftovers()) and len({key.rpartition("/")[0] for key in list(self._leftovers)}) > 1:
            raise StorageError(f"nothing more is written while the shards of failed uploads cannot be deleted: {trouble}")
        self._recall()
        with self._clearing:
            self._leftovers.discard(key)  # of an earlier attempt at the same version
        self._written.setdefault(version, set()).add(key)
        transfer = self._transfers[owner] = TransferProgress(
            f"upload of rank {owner}'s shard of {version}", shape.data_bytes, self._context
        )
        committed = Committed(owner, version, memory.root, shape.chunk_bytes)
        record = write_shard(self._storage, key, Layout.from_bytes(shape.layout), data, extras, transfer=transfer, committed=committed)
        try:
            StoredShard(self._storage, record).sample()  # a store may say yes and keep half
        except CorruptDataError as error:
            raise StorageError(f"the upload could not be read back: {error}") from None
        transfer.finish()
        failpoints.reached("agent_stored", version.iteration, owner)
        if version not in self._written:  # the upload has failed elsewhere meanwhile
            with self._clearing:
                self._leftovers.add(key)
        return record

    async def write_manifest(self, version: Version, records: dict[int, str]) -> None:
        """Writes the manifest, which makes the checkpoint exist. Those that it supersedes are deleted by `tidy`.

        Raises:
            StorageError: the manifest could not be written, or another job has taken this one's run id over.
            UnclearUploadError: the same, and it is not certain that there is none.
        """
        epoch, time_spent = self._term.leads_in, self._context.measures.kept()
        if time_spent is not None:  # whoever goes on from an earlier attempt's version counts from that attempt on
            time_spent = replace(time_spent, incarnation=min(time_spent.incarnation, version.incarnation.number))
        manifest = checkpoints.Manifest(
            run=self._run,
            stream=self._spec.stream,
            incarnation=version.incarnation,
            iteration=version.iteration,
            world_size=self._spec.world_size,
            logical_hash=self._logical_hash,
            lineage=tuple(self._spec.lineage),
            overtaken=tuple(self._spec.overtaken),
            aside=tuple(self._spec.aside),
            versions=_versions(),
            time=time_spent,
            shards={owner: ShardRecord.model_validate_json(record) for owner, record in records.items()},
        )

        is_begun = False

        def write() -> None:
            nonlocal is_begun
            failpoints.reached("agent_manifest", version.iteration)
            self._check_place()
            if not (is_begun and self._is_written(manifest)):  # as it may be although the store has denied it
                check_not_superseded(self._storage, manifest)
                self._check_leads(epoch)
                is_begun = True
                checkpoints.write_manifest(self._storage, manifest)
            self._withdraw_late(manifest, epoch)
            if not self._is_written(manifest):
                raise StorageError(f"{self.config.url}: the manifest of {version} could not be read back")
            self._check_leads(epoch)
            if other_by_mark(self._storage, manifest) is None:  # else another job's mark stays, so that it is found
                checkpoints.write_mark(self._storage, self._run, self._spec.stream, version)

        try:
            await self._insist("the manifest", write)
        except StorageError as error:
            if not self._term.is_obeyed or not await asyncio.to_thread(self._withdraw, manifest):
                raise UnclearUploadError(str(error)) from None
            raise
        self._retention.stored(manifest)
        self.stored = (version, time.time())

    def _check_leads(self, epoch: int | None) -> None:
        """Makes sure that no other host has led since, as far as this one has heard.

        One that has heard nothing does no harm: until the next upload is over the shards of this one stay
        (`Uploader.over`), and what it deletes is older than both.

        Raises StorageError: another one leads, or has led.
        """
        if epoch is None or self._term.leads_in != epoch:
            raise StorageError("another host leads the commits by now, and decides what is stored")

    def _withdraw_late(self, manifest: checkpoints.Manifest, epoch: int | None) -> None:
        """Deletes a manifest that was written too late: another host leads by now, and the shards may have been deleted meanwhile.

        Where they are there, it is a checkpoint, and may be the one because of which the other host deletes older ones.

        Raises StorageError: another host leads.
        """
        try:
            self._check_leads(epoch)
        except StorageError:
            present = set(self._storage.list(f"{manifest.folder}/"))
            if {record.key for record in manifest.shards.values()} - present:
                self._delete_manifest(manifest)
            raise

    def _check_place(self) -> None:
        """Makes sure that this is where the run has stored before: an unmounted folder takes everything, and shows nothing.

        Raises StorageError: it is not.
        """
        if self.stored is None:
            return
        run, stream = self._run, self._spec.stream
        if not any(exists(self._storage, key) for key in (checkpoints.mark_key(run, stream), self._manifest_key(self.stored[0]))):
            note = checkpoints.note_path(self.config.url, run, stream)
            raise StorageError(
                f"{self.config.url}: this run has stored {self.stored[0]} here, and nothing of it is there any more: is a mount missing? "
                f"If all was deleted on purpose, delete {note} as well, and start the job again"
            )

    def _manifest_key(self, version: Version) -> str:
        return f"{checkpoints.checkpoint_folder(self._run, self._spec.stream, version)}/{checkpoints.MANIFEST}"

    def _is_written(self, manifest: checkpoints.Manifest) -> bool:
        try:
            return checkpoints.read_manifest(self._storage, manifest.folder) == manifest
        except (CorruptDataError, ObjectGoneError):
            return False

    async def holds(self, version: Version) -> bool:
        """Whether a version is known to be stored: its manifest is there."""
        try:
            return await asyncio.to_thread(exists, self._storage, self._manifest_key(version))
        except (StorageError, OSError):
            return False

    async def tidy(self) -> tuple[str, str]:
        """Deletes, on the leader's host, old checkpoints and the leftovers of earlier uploads.

        Returns a text for the user; and the reason why nothing more may be uploaded until a later try: storage would fill up.
        """
        spec = self._spec
        newest = Version(spec.incarnation, sys.maxsize)
        this = Sighting(
            "", newest, "torn", Descent(lineage=tuple(spec.lineage), overtaken=frozenset(spec.overtaken), aside=frozenset(spec.aside))
        )
        try:
            await asyncio.to_thread(self._retention.tidy, this)
        except Exception as error:  # a fault of ours must not leave storage unused for ever without a word
            with contextlib.suppress(TimeoutError):  # a home may be a network file system that hangs
                await asyncio.wait_for(asyncio.to_thread(self._recall), _HOME_SECONDS)
            is_news = self._outage(_DELETING).again(str(error))
            told = f"storage: old checkpoints cannot be found or deleted: {error}; nothing more is stored until that works"
            told += f": {self._stake()}. A message will say when storing works again"
            return told if is_news else "", f"old checkpoints cannot be deleted: {error}"
        finally:
            self._tidied = True
        if (outage := self._failures.pop(_DELETING, None)) is None:
            return "", ""
        return f"storage: old checkpoints can be deleted again after {time.time() - outage.since:.0f} s; uploads go on", ""

    def _withdraw(self, manifest: checkpoints.Manifest) -> bool:
        """Does what `_delete_manifest` does, unless the mark names this checkpoint, though the store has denied it, or may name it."""
        try:
            named = checkpoints.read_mark(self._storage, self._run, self._spec.stream)
        except GeminiError:
            return False
        return named != manifest.version and self._delete_manifest(manifest)

    def _delete_manifest(self, manifest: checkpoints.Manifest) -> bool:
        """Deletes a manifest, which may exist although writing it failed: its shards go next. Returns whether there is none for certain."""
        key = self._manifest_key(manifest.version)
        try:
            self._storage.delete(key)
        except StorageError:
            try:
                return not exists(self._storage, key)
            except StorageError:
                return False
        return True

    async def _insist(self, what: str, work: Callable[[], _T]) -> _T:
        """Tries again after a storage error, a few times, ever slower."""
        for attempt in range(_ATTEMPTS):
            try:
                result = await asyncio.to_thread(work)
            except (StorageError, SupersededError, OSError) as error:
                outage = self._outage(what)
                if attempt == _ATTEMPTS - 1 or isinstance(error, SupersededError) or self._closed.is_set():
                    outage.error = str(error)
                    raise StorageError(f"{error} (failing for {time.time() - outage.since:.0f} s)") from None
                if outage.again(str(error)):
                    self._context.log(f"storage: {error}; it is tried again")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), BACKOFF * 2**attempt)
            else:
                if what in self._failures:
                    self._context.log(f"storage: {what} works again after {time.time() - self._failures.pop(what).since:.0f} s")
                return result
        raise AssertionError("unreachable")


def _versions() -> dict[str, str]:
    """The versions of the software that a manifest names; the agent itself does not import it."""
    found = {"python": platform.python_version()}
    for name in ("gemini-ft", "torch", "lightning", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
