"""DLRover flash checkpoint: a synchronous copy into shared memory that an agent process holds. Not replicated.

Its ``replica_count`` is left at 0: with it, one host's memory held the other's state when this was tried.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import torch.distributed as dist

from load import Load
from peers import Adapter

_AGENT = "from dlrover.trainer.torch.flash_checkpoint.engine import start_async_save; start_async_save()"


class FlashCheckpoint(Adapter):
    """Every step to memory; two ranks of one host, each with its shard.

    The agent is a process of its own, as under ``dlrover-run``. Otherwise rank 0 forks it, and every update of the training
    would copy pages that the child still shares.
    """

    def setup(self, load: Load, folder: Path) -> None:
        rank = dist.get_rank()
        name = [f"bench-{uuid.uuid4().hex[:8]}"]
        dist.broadcast_object_list(name, src=0)
        os.environ |= {"TORCHELASTIC_RUN_ID": name[0], "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
        os.environ |= {"ROLE_NAME": "dlrover-trainer", "GROUP_WORLD_SIZE": "1", "DLROVER_LOG_LEVEL": "ERROR"}
        self._agent = subprocess.Popen([sys.executable, "-c", _AGENT]) if rank == 0 else None
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._memory = StorageType.MEMORY
        self._load = load
        self._checkpointer = DdpCheckpointer(str(folder), local_shard_num=2, global_shard_num=2)

    def save(self, step: int) -> None:
        self._checkpointer.save_checkpoint(step, dict(self._load.tensors()), storage_type=self._memory)
        if self._checkpointer._engine._cached_step == step:  # it skips a save silently while its agent is busy
            self.completed[step] = time.monotonic()

    def wait_complete(self) -> None:
        return

    def close(self) -> None:
        dist.barrier()
        handler = self._checkpointer._engine._shm_handler
        handler.close()
        if handler.shared_memory is not None:
            handler.shared_memory.unlink()
        dist.barrier()
        if self._agent is not None:
            from dlrover.python.common.multi_process import SOCKET_TMP_DIR

            self._agent.send_signal(signal.SIGKILL)  # it has no other end
            self._agent.wait()
            shutil.rmtree(Path(SOCKET_TMP_DIR, os.environ["TORCHELASTIC_RUN_ID"]), ignore_errors=True)
            with contextlib.suppress(OSError):  # another run's sockets are in it
                Path(SOCKET_TMP_DIR).rmdir()
