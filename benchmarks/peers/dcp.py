"""torch.distributed.checkpoint.async_save: a cached stager and a thread that writes files. Not replicated."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from load import Load
from peers import Adapter


class AsyncSave(Adapter):
    """The fastest setting found on CPU: one stager kept for all saves, the thread executor, files on tmpfs without fsync.

    Two folders take turns, so that a complete checkpoint exists at all times. Keys carry the rank: tensors of one name
    count as replicated otherwise, and only one rank's would be written.
    """

    def setup(self, load: Load, folder: Path) -> None:
        self._state = {f"rank{dist.get_rank()}.{name}": tensor for name, tensor in load.tensors().items()}
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._group = dist.new_group(backend="gloo")  # its collectives run in a thread, beside the training's
        self._folder = folder
        self._writing: Future[Any] | None = None

    def save(self, step: int) -> None:
        self.wait_complete()
        writer = FileSystemWriter(self._folder / str(step % 2), sync_files=False, overwrite=True)
        writing = async_save(
            self._state,
            storage_writer=writer,
            async_stager=self._stager,
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
        )
        assert isinstance(writing, Future)
        writing.add_done_callback(lambda _: self.completed.__setitem__(step, time.monotonic()))
        self._writing = writing

    def wait_complete(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def close(self) -> None:
        self._stager.close()
