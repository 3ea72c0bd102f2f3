"""nvidia-resiliency-ext: local checkpoints replicated in a clique, on CPU tensors.

Its CUDA calls are replaced, not its work: the check that tensors are on a GPU, ``torch.cuda.synchronize`` and
``torch.cuda.current_device`` are the only ones on the way of a save.
"""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

from load import Load
from peers import Adapter


class _OnCpu(BasicTensorAwareStateDict):  # type: ignore[misc]
    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state_dict: dict[str, Any] = state
        self._is_hollow = False


class Clique(Adapter):
    """Asynchronous saves with a clique of two: the exchange blocks training, a forked process per save writes the files."""

    def setup(self, load: Load, folder: Path) -> None:
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        self._load = load
        strategy = CliqueReplicationStrategy.from_replication_params(replication_jump=1, replication_factor=2)
        # a folder per rank: on one machine the two ranks are two hosts
        self._manager = LocalCheckpointManager(folder / f"host{dist.get_rank()}", repl_strategy=strategy)
        self._queue = AsyncCallsQueue(persistent=False)

    def save(self, step: int) -> None:
        self.wait_complete()
        request = self._manager.save(_OnCpu(self._load.tensors()), step, is_async=True)
        self._queue.schedule_async_request(request)
        writer = self._queue.async_calls[-1].async_caller.process
        threading.Thread(target=self._watch, args=(step, writer.sentinel), daemon=True).start()

    def _watch(self, step: int, sentinel: int) -> None:
        wait([sentinel])
        self.completed[step] = time.monotonic()

    def wait_complete(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)

    def close(self) -> None:
        self._queue.close()
