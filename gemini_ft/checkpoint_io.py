"""Lightning's checkpoint files, written from the hosts' memory: ``Trainer(strategy="gemini", plugins=[GeminiCheckpointIO()])``.

Of what ``trainer.save_checkpoint`` gives, all is kept but parameters and optimizer state. These are read from the snapshot of the same
step, once the hosts have committed it, and another thread writes the file. Where there is no such snapshot before the next update, the file
is written at once, as without this, from the same tensors.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from gemini_ft.errors import ConfigError, GeminiError, RecoveryError, StateError
from gemini_ft.export.whole_tensors import WholeTensors
from gemini_ft.lightning.compat import wrapping_io
from gemini_ft.recovery.agent_memory import RememberedShard, open_newest, remembered
from gemini_ft.state import codec
from gemini_ft.state.tensors import Live, Role, version_of

if TYPE_CHECKING:
    from gemini_ft.checkpointer import Checkpointer

_PACKAGES = {"GeminiCheckpointIO": "lightning.pytorch", "PytorchLightningCheckpointIO": "pytorch_lightning"}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FILL = "what gives a tensor for a part"  # in the memo of a deepcopy
_log = logging.getLogger("gemini_ft")


@dataclass(frozen=True, eq=False)
class _StandIn:
    """Stands for a tensor in what is kept of a checkpoint; a copy of that, made under a memo with `_FILL`, has the tensor in its place."""

    name: str  # as snapshots call it
    tensor: torch.Tensor | None = None  # where it lives; None: in a process that is gone
    mark: tuple[int, int, int] = (0, 0, 0)  # as of `_mark`

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        tensor: torch.Tensor = memo[_FILL](self)
        return tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _StandIn, (self.name,)


@dataclass(frozen=True, kw_only=True, eq=False)
class _LateFile:
    path: str
    content: Any  # with stand-ins
    parts: list[_StandIn]


class FromMemory:
    """A mixin over Lightning's wrapper of another ``CheckpointIO``, which writes the files, wherever they are (``s3://`` too)."""

    def __init__(self, checkpoint_io: Any = None) -> None:
        super().__init__(checkpoint_io)  # type: ignore[call-arg]
        while checkpoint_io is not None:
            if any(kind.__name__ == "AsyncCheckpointIO" for kind in type(checkpoint_io).__mro__):
                raise ConfigError(
                    f"{type(self).__name__}({type(checkpoint_io).__name__}(...)): nobody could say when its files are there, and after a "
                    f"failure they would be missing; leave it out, as {type(self).__name__} writes beside the training itself"
                )
            checkpoint_io = getattr(checkpoint_io, "checkpoint_io", None)
        self._checkpointer: Checkpointer | None = None
        self._step = 0  # of the files
        self._files: list[_LateFile] = []  # that are not there yet
        self._removed: list[str] = []  # paths of files that are to go when those are there
        self._writing: Future[None] | None = None

    def begin(self, checkpointer: Checkpointer | None) -> None:
        """Takes the Checkpointer of a fit; None: the fit is over."""
        self._checkpointer = checkpointer

    def state(self) -> dict[str, Any] | None:
        """Returns what is not written yet, for the snapshot that is made now. It can be read without the pickles of the files."""
        paths = self.unwritten()
        if not paths or self._checkpointer is None:
            return None
        files = codec.encode(list(self._files), self._checkpointer.secret)
        return {"step": self._step, "paths": paths, "files": files, "removed": list(self._removed)}

    def resume(self, checkpointer: Checkpointer, late: dict[str, Any] | None) -> None:
        """Writes the files that a failure has prevented, if their step is still in memory; else names them."""
        if late is None:
            return
        try:
            self._files, self._removed = codec.decode(late["files"], checkpointer.secret), late["removed"]
            self._write(shards_of(checkpointer.run, checkpointer.name, late["step"], self._names))
        except GeminiError as error:
            _log.warning("%s: not known to be written before the failure, and it cannot be now: %s", ", ".join(late["paths"]), error)
        self._files, self._removed = [], []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Keeps the content of a file; outside of a fit, or with options for the storage, it is written at once."""
        self.wait()
        live = self._checkpointer.survey() if self._checkpointer is not None and storage_options is None else []
        parts, content = _parts(checkpoint, live), None
        if parts and "global_step" in checkpoint:
            try:
                content = copy.deepcopy(checkpoint, dict(parts))
            except Exception as error:  # of the script's own objects
                _log.info("%s: written as without GeminiCheckpointIO: it holds what cannot be copied: %s", path, error)
        self._forget(str(path))
        if content is None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)  # type: ignore[misc]
            return
        if "://" not in str(path):  # else a link to it could not be made yet
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self._step = checkpoint["global_step"]
        self._files.append(_LateFile(path=str(path), content=content, parts=list(parts.values())))

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a file; one that others are to take the place of goes when these are there."""
        self.wait()
        self._forget(str(path))
        if self._files:
            self._removed.append(str(path))
        else:
            super().remove_checkpoint(path)  # type: ignore[misc]

    def before_update(self) -> None:
        """Begins to write, as the next update is about to change the tensors."""
        if self._writing is not None and self._writing.done():
            self.wait()
        if not self._files or self._writing is not None or self._checkpointer is None:
            return
        self._refuse_changes()
        self._checkpointer.flush()
        shards: Sequence[RememberedShard] = []
        why = self._checkpointer.stats.aborted.get(self._step, f"step {self._step} has no snapshot")
        try:
            if self._checkpointer.is_committed(self._step):
                shards = shards_of(self._checkpointer.run, self._checkpointer.name, self._step, self._names)
        except GeminiError as error:
            why = str(error)
        if not shards:
            self.write_now(why)
            return
        self._writing = Future()
        threading.Thread(target=self._write_beside, args=(self._writing, shards), name="gemini-files").start()

    def write_now(self, why: str) -> None:
        """Writes what has been saved from the live tensors, before they change. Raises StateError: they have."""
        if not self._files:
            return
        with self._checkpointer.paused(validates=False) if self._checkpointer is not None else nullcontext():
            self.wait()
            if self._files:
                self._refuse_changes()
                _log.info("%s: written as without GeminiCheckpointIO: %s", ", ".join(self.unwritten()), why)
                self._put(lambda part: part.tensor)
                self._files, self._removed = [], []

    def wait(self) -> None:
        """Returns when what is being written is there; raises what has kept it from that."""
        if (writing := self._writing) is not None:
            writing.exception()  # this wait may end with an exception of a signal's: then writing goes on
            self._writing, self._files, self._removed = None, [], []
            writing.result()

    def unwritten(self) -> list[str]:
        """Paths of the files that are not there yet, also where writing them has failed."""
        is_there = self._writing is not None and self._writing.done() and self._writing.exception() is None
        return [] if is_there else [file.path for file in self._files]

    def is_there(self, path: str, found: bool) -> bool:
        """Whether a file would be there, had all been written and removed at once. ``found``: whether it is."""
        return path in self.unwritten() or (found and path not in self._removed)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the fit under way: a copy of the Trainer has no part in it."""
        return vars(self) | {"_checkpointer": None, "_files": [], "_removed": [], "_writing": None}

    def teardown(self) -> None:
        has_failed = sys.exc_info()[1] is not None  # by the exception that is being handled
        try:
            self.write_now("the training is over")
        except Exception as error:
            if not has_failed:
                raise
            _log.error("%s", error)
        if (inner := self.checkpoint_io) is not None:  # type: ignore[attr-defined]
            inner.teardown()

    @property
    def _names(self) -> set[str]:
        return {part.name for file in self._files for part in file.parts}

    def _forget(self, path: str) -> None:
        self._files = [file for file in self._files if file.path != path]
        self._removed = [other for other in self._removed if other != path]

    def _refuse_changes(self) -> None:
        changed = sorted(
            {part.name for file in self._files for part in file.parts if part.tensor is not None and _mark(part.tensor) != part.mark}
        )
        if changed:
            paths, self._files = self.unwritten(), []
            raise StateError(
                f"{', '.join(paths)}: {changed[0]} ({len(changed)} in all) was written between save_checkpoint and the next update, so "
                "that the file cannot be had; write it before the file is saved, or leave GeminiCheckpointIO out"
            )

    def _write_beside(self, writing: Future[None], shards: Sequence[RememberedShard]) -> None:
        try:
            self._write(shards)
            writing.set_result(None)
        except BaseException as error:  # for the thread that trains
            writing.set_exception(error)

    def _write(self, shards: Sequence[RememberedShard]) -> None:
        try:
            tensors = WholeTensors(shards, self._names.__contains__).read()
        finally:
            for shard in shards:
                shard.close()
        self._put(lambda part: tensors[part.name])

    def _put(self, tensor_of: Callable[[_StandIn], torch.Tensor | None]) -> None:
        for file in self._files:
            memo: dict[Any, Any] = {_FILL: tensor_of}
            super().save_checkpoint(copy.deepcopy(file.content, memo), file.path)  # type: ignore[misc]
        for path in self._removed:
            super().remove_checkpoint(path)  # type: ignore[misc]


def _mark(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Changes when a tensor is moved, or written, also through ``.data``: version, address, and the sum of its bytes as integers."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return version_of(tensor), tensor.data_ptr(), int(real.view(_INTEGERS[real.itemsize]).sum(dtype=torch.int64))


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _parts(checkpoint: dict[str, Any], live: Iterable[Live]) -> dict[int, _StandIn]:
    """Id of a tensor of the checkpoint -> what stands for it: for those whose memory is that of a parameter or of optimizer state."""
    names = {_place(each.tensor): each.same_as or each.name for each in live if each.role is not Role.BUFFER and each.tensor.numel()}
    given = _tensors([checkpoint.get("state_dict"), checkpoint.get("optimizer_states")])
    return {id(each): _StandIn(names[place], each, _mark(each)) for each in given if (place := _place(each)) in names}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def shards_of(run: str, stream: str, step: int, names: set[str]) -> Sequence[RememberedShard]:
    """The shards of a step, which stay in memory until they are closed. Raises RecoveryError: not all these tensors can be had."""
    for memory in remembered(run):
        if memory.stream == stream:
            _, shards = open_newest(memory, step)
            if not (missing := names - {piece.name for shard in shards for piece in shard.layout.pieces}):
                return shards
            for shard in shards:
                shard.close()
            raise RecoveryError(f"its snapshot leaves out {min(missing)} ({len(missing)} in all)")
    raise RecoveryError(f"no agent of this host has run {run!r}")


@cache
def _by_name(name: str) -> Any:
    return type(name, (FromMemory, wrapping_io(_PACKAGES[name])), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _by_name(name)
