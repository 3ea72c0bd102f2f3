"""Rows in which Lightning drives the training: what it can save by itself, and gemini-ft's strategy."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from common import MARK
from gemini_ft.lightning import GeminiStrategy


class Keeper(Protocol):
    """A way of keeping every step of one ``fit``. All dictionaries are by optimizer step."""

    blocked: dict[int, float]
    called: dict[int, float]
    completed: dict[int, float]

    def options(self, folder: Path) -> dict[str, Any]:
        """The arguments that the Trainer needs for it."""


class _Notes:
    """A mixin for callbacks that notes what they do at each step."""

    blocked: dict[int, float]
    called: dict[int, float]
    completed: dict[int, float]

    def start(self) -> None:
        self.blocked, self.called, self.completed = {}, {}, {}

    def note(self, step: int, begin: float) -> None:
        """The training thread was in the callback from ``begin`` until now, and the copy is complete."""
        end = time.monotonic()
        self.called[step], self.completed[step], self.blocked[step] = begin, end, end - begin


class StateDump(_Notes, L.Callback):
    """Only what Lightning does to collect its state: loops, callbacks, references to weights and optimizer. Nothing is copied."""

    def options(self, folder: Path) -> dict[str, Any]:
        self.start()
        return {"callbacks": [self]}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        begin = time.monotonic()
        trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self.note(trainer.global_step, begin)


class FileOfEveryStep(_Notes, ModelCheckpoint):
    """Lightning's own callback after every step, to tmpfs: rank 0 writes, training waits."""

    def __init__(self) -> None:
        super().__init__(filename="{step}", every_n_train_steps=1, save_top_k=1)

    def options(self, folder: Path) -> dict[str, Any]:
        self.start()
        self.dirpath = tempfile.mkdtemp(dir=folder)  # rank 0's counts
        return {"callbacks": [self], "enable_checkpointing": True}

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        begin = time.monotonic()
        super().on_train_batch_end(trainer, *arguments)
        self.note(trainer.global_step, begin)


class GeminiFit(_Notes, L.Callback):
    """gemini-ft's strategy: two emulated hosts, two copies; each rank owns one half of what both hold."""

    def options(self, folder: Path) -> dict[str, Any]:
        self.start()
        self._returned: dict[int, float] = {}
        os.environ |= {"GEMINI_HOST_ID": f"host{dist.get_rank()}", "GEMINI_RUN_ID": os.environ[MARK], "GEMINI_LOG_DIR": str(folder)}
        return {"callbacks": [self], "strategy": GeminiStrategy(replicas=2)}

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Time its two calls per step: collecting what Lightning knows, and the snapshot."""
        strategy: Any = trainer.strategy
        fit = strategy._gemini_fit
        extras, save, self._stats = fit._extras, fit.checkpointer.save, fit.checkpointer.stats
        begin = 0.0

        def timed_extras() -> Any:
            nonlocal begin
            begin = time.monotonic()
            return extras()

        def timed_save(step: int, collected: Any) -> None:
            self.called[step], collecting = begin, time.monotonic() - begin
            save(step, collected)
            self._returned[step] = time.monotonic()
            self.blocked[step] = collecting + self._stats.blocked[-1]  # which includes the wait before the update

        fit._extras, fit.checkpointer.save = timed_extras, timed_save

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for step, seconds in self._stats.commit_seconds.items():
            self.completed[step] = self._returned[step] + seconds
