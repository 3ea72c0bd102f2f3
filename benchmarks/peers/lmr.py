"""lm-resiliency: capture into memory of the trainer, exchanged with one peer through gloo, one chunk in flight."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from lm_resiliency.checkpointing.config import InMemoryCkptConfig
from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

from load import Load
from peers import Adapter


class LmResiliency(Adapter):
    """Its fast path (``save_tensors``) at every step, 16 MiB chunks (its default), no flush to disk."""

    def setup(self, load: Load, folder: Path) -> None:
        self._tensors = list(load.tensors().values())
        config = InMemoryCkptConfig(interval=1, replication_jump=1, disk_flush_interval=0, disk_folder=str(folder), pin_memory=False)
        self._manager = InMemoryCheckpointManager(config)

    def save(self, step: int) -> None:
        self._manager.save_tensors(self._tensors, step)
        watch(self._manager, step, self.completed)

    def before_update(self) -> None:
        self._manager.maybe_wait()

    def wait_complete(self) -> None:
        self._manager.finalize_replication()

    def close(self) -> None:
        self._manager.close()


def watch(manager: Any, step: int, completed: dict[int, float], theirs: int | None = None) -> None:
    """Note when both directions of a step's exchange have ended; its own threads are joined, nothing is polled.

    Args:
        manager: lm-resiliency's, which has just been told to save.
        step: by our count.
        completed: step -> when it was complete.
        theirs: by its own count, where that differs.
    """
    capture, replicator = manager._completion_thread, manager._replicator

    def wait() -> None:
        if capture is not None:
            capture.join()
        for thread in (replicator._send_thread, replicator._recv_thread):
            if thread is not None:
                thread.join()
        if replicator._recv_step == (step if theirs is None else theirs):
            completed[step] = time.monotonic()

    threading.Thread(target=wait, daemon=True).start()
