"""Finds the checkpoint to export, and the places where its shards are read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gemini_ft.config import load_config
from gemini_ft.core.versions import Version
from gemini_ft.errors import ConfigError, CorruptDataError, RecoveryError
from gemini_ft.recovery.agent_memory import RememberedShard, open_newest, remembered
from gemini_ft.recovery.readers import Live, nowhere
from gemini_ft.state import codec
from gemini_ft.storage.base import Storage
from gemini_ft.storage.checkpoints import CheckpointInfo, Manifest, list_checkpoints, read_manifest
from gemini_ft.storage.lookout import newest_whole
from gemini_ft.storage.opening import open_existing
from gemini_ft.storage.retention import reading
from gemini_ft.storage.shard import StoredShard
from gemini_ft.wire.trust import read_secret

_SHOWN = 20  # steps listed in an error
_NONSENSE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, RuntimeError, MemoryError)
_log = logging.getLogger("gemini_ft")


class StorageShard:
    """The shard of one rank in storage, as a `gemini_ft.recovery.readers.ShardReader`."""

    where = "storage"

    def __init__(self, storage: Storage, manifest: Manifest, owner: int) -> None:
        self._stored = StoredShard(storage, manifest.shards[owner])
        self._stored.check_identity(owner, manifest.version)
        self.layout = self._stored.layout

    def extras(self) -> bytes:
        return self._stored.extras

    def chunks(self, live: Live = nowhere, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, memoryview]]:
        step, end = self._stored.record.chunk_bytes, self.layout.nbytes
        buffer = bytearray(min(step, end))
        for offset in range(start // step * step, end if stop is None else min(end, stop), step):
            view = memoryview(buffer)[: self.layout.nbytes - offset]
            self._stored.read(offset, view)
            yield offset, view

    def close(self) -> None:
        """Does nothing: no resources are held open."""


@dataclass(kw_only=True)
class Checkpoint:
    """A checkpoint that can be read. Close it soon: in memory it takes a slot from the job until then."""

    run: str
    stream: str  # which line of snapshots: ``main`` of a plain loop, ``fit-0``, ``fabric-0``
    version: Version  # of the state
    where: str  # in words
    shards: Sequence[RememberedShard | StorageShard]  # by owner, all ranks of the job
    secret: bytes | None  # of the run, to check the signature of pickles
    trust_pickle: bool  # whether pickles without a valid signature may be loaded
    held: ExitStack = field(default_factory=ExitStack)  # keeps the files that are read from being deleted, until ``close``

    @property
    def step(self) -> int:
        """Iterations done in it."""
        return self.version.iteration

    def extras(self, *part: str) -> Any:
        """The state that is no tensor, as rank 0 had it; only the part under these keys is decoded.

        Raises KeyError: there is no such part. StateError: it holds a pickle that is not trusted.
        """
        return codec.decode(self._extras, self.secret, self.trust_pickle, part)

    def extras_of(self, owner: int, *part: str) -> Any:
        """The `extras` as another rank had them."""
        return codec.decode(self.shards[owner].extras(), self.secret, self.trust_pickle, part)

    @cached_property
    def _extras(self) -> bytes:
        return self.shards[0].extras()

    def close(self) -> None:
        """Releases the shards."""
        for shard in self.shards:
            shard.close()
        self.held.close()


@contextmanager
def refusing_nonsense(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns what code meets in a small state that is not of its shape into one error: whoever can write to the storage can forge it.

    Raises CorruptDataError: something was not as it must be.
    """
    try:
        yield
    except _NONSENSE as error:
        text = f"{checkpoint.where}: step {checkpoint.step} is no state that can be exported: {type(error).__name__}: {error}"
        raise CorruptDataError(f"{text}; use another checkpoint") from error


def find(
    step: int | None, run: str | None, stream: str | None, url: str | None, endpoint_url: str | None = None, trust_pickle: bool = False
) -> Checkpoint:
    """Finds the checkpoint: in the storage at ``url`` if that is given, else in memory, else in the configured storage.

    Raises GeminiError: there is none, or not one alone; see `from_memory` and `from_storage`.
    """
    config = load_config()
    secret, settings = read_secret(config) or None, config.storage
    if url is not None:
        return from_storage(open_existing(url, endpoint_url), step, run, stream, secret, trust_pickle)
    try:
        found = from_memory(step, run, stream, trust_pickle, required=settings is None)
    except RecoveryError as error:
        if settings is None:
            raise RecoveryError(f"{error}; give --from URL if the job has storage") from None
        _log.warning("%s; reading %s instead", error, settings.url)
        found = None
    if found is not None:
        return found
    if settings is None:
        raise ConfigError(
            f"no agent on this machine holds anything of {'run ' + repr(run) if run else 'any run'}; "
            "give --from URL for a checkpoint in storage, or export on a host of the job"
        )
    storage = open_existing(settings.url, endpoint_url or settings.endpoint_url)
    return from_storage(storage, step, run, stream, secret, trust_pickle or settings.trust_pickle)


def from_memory(
    step: int | None, run: str | None, stream: str | None, trust_pickle: bool = False, required: bool = True
) -> Checkpoint | None:
    """The checkpoint of ``step`` (None: the newest committed one) in the agents of this machine; None: there are none.

    Args:
        trust_pickle: whether pickles that are not signed with the run's secret may be loaded: they may come from storage.
        required: whether it is an error that the agents do not have this step.

    Raises:
        ConfigError: several runs or streams are there, or not this step; those that are there are listed.
        RecoveryError: a shard cannot be had from any agent.
    """
    found = [memory for memory in remembered(run) if memory.copies and stream in (None, memory.stream)]
    if not found:
        return None
    _only([(memory.run, memory.stream) for memory in found], "the memory of this machine's agents")
    memory = found[0]
    steps = {version.iteration for version in memory.versions}
    if step is not None and step not in steps:
        if not required:
            return None
        raise ConfigError(
            f"no step {step} in the memory of run {memory.run!r}, which keeps only the newest; there are: {_listed(steps)}. "
            "Take `latest`, or --from URL for what lies in storage"
        )
    version, shards = open_newest(memory, step)
    return Checkpoint(
        run=memory.run,
        stream=memory.stream,
        version=version,
        where=f"memory of run {memory.run}",
        shards=shards,
        secret=memory.secret,
        trust_pickle=trust_pickle,
    )


def from_storage(
    storage: Storage, step: int | None, run: str | None, stream: str | None, secret: bytes | None, trust_pickle: bool
) -> Checkpoint:
    """The checkpoint of ``step`` (None: the newest whole one) in storage.

    Raises:
        ConfigError: several runs or streams are there, or not this step; those that are there are listed.
        CorruptDataError: its manifest is damaged.
        StorageError: it is of another format, or the storage failed.
    """
    found = list_checkpoints(storage, run, stream)
    _only([(info.run, info.stream) for info in found], storage.url)
    manifest = newest_whole(storage, found[0].run, found[0].stream) if found and step is None else None
    if manifest is None:
        manifest = read_manifest(storage, _of_step(found, step, storage.url).folder)
    with ExitStack() as stack:
        stack.enter_context(reading(storage, manifest.run, manifest.stream, manifest.version))
        shards = [StorageShard(storage, manifest, owner) for owner in range(manifest.world_size)]
        held = stack.pop_all()
    return Checkpoint(
        run=manifest.run,
        stream=manifest.stream,
        version=manifest.version,
        where=storage.url,
        shards=shards,
        secret=secret,
        trust_pickle=trust_pickle,
        held=held,
    )


def _of_step(found: Sequence[CheckpointInfo], step: int | None, where: str) -> CheckpointInfo:
    """The checkpoint of a step; the newest one if the step was run again."""
    if not found:
        raise ConfigError(f"no checkpoints in {where}; look with `gemini checkpoints {where}`, or leave out --run-id and --stream")
    if step is None:
        raise RecoveryError(f"no checkpoint in {where} is whole; `gemini checkpoints {where}` says what is wrong with each")
    for info in found:
        if info.iteration == step:
            return info
    raise ConfigError(f"no step {step} in {where}; there are: {_listed({info.iteration for info in found})}")


def _only(lines: Collection[tuple[str, str]], where: str) -> None:
    if len(kinds := sorted(set(lines))) > 1:
        named = ", ".join(f"--run-id {run} --stream {stream}" for run, stream in kinds)
        raise ConfigError(f"{where} has checkpoints of {len(kinds)} runs or streams; choose one: {named}")


def _listed(steps: Collection[int]) -> str:
    newest = sorted(steps, reverse=True)
    more = f" and {len(newest) - _SHOWN} older ones" if len(newest) > _SHOWN else ""
    return (", ".join(map(str, newest[:_SHOWN])) or "none that is committed") + more
