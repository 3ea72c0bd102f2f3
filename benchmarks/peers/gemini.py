"""gemini-ft itself: every step into the host's agent and to the peer's, committed when both copies are verified."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist

import gemini_ft
from common import MARK
from load import Load
from peers import Adapter

_PATIENCE = 60.0  # seconds


class Gemini(Adapter):
    """Two emulated hosts, two copies, TCP between the agents.

    Args:
        replicated: whether the ranks hold equal state, of which each then owns one half.
    """

    def __init__(self, replicated: bool = False) -> None:
        super().__init__()
        self._replicated = replicated
        self._returned: dict[int, float] = {}

    def setup(self, load: Load, folder: Path) -> None:
        os.environ |= {"GEMINI_HOST_ID": f"host{dist.get_rank()}", "GEMINI_RUN_ID": os.environ[MARK], "GEMINI_LOG_DIR": str(folder)}
        self._checkpointer = gemini_ft.Checkpointer(load.model, load.optimizer, replicated=self._replicated, replicas=2)
        self._checkpointer.resume()

    def save(self, step: int) -> None:
        self._checkpointer.step()
        self._returned[step] = time.monotonic()

    def before_update(self) -> None:
        self._checkpointer.wait_before_update()

    def wait_complete(self) -> None:
        stats, until = self._checkpointer.stats, time.monotonic() + _PATIENCE
        while len(stats.commit_seconds) + stats.skipped < stats.snapshots:
            if time.monotonic() > until:
                raise TimeoutError(f"{stats.snapshots} snapshots, {len(stats.commit_seconds)} committed, {stats.skipped} skipped")
            time.sleep(0.001)
        for call, step in enumerate(self._returned, start=1):
            if call in stats.commit_seconds:
                self.completed[step] = self._returned[step] + stats.commit_seconds[call]

    def close(self) -> None:
        self._checkpointer.close()
