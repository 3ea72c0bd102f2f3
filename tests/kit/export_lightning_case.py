"""What the ranks of test_export.py run under Lightning: with gemini-ft until a crash, and without it from a file."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from session_case import settle
from torch import nn
from torch.utils.data import DataLoader

from gemini_ft.testing import digest

SAMPLES, BATCH, EPOCHS = 24, 2, 3  # six batches per rank and epoch


class Loader(DataLoader[torch.Tensor]):
    """A user's own resumable loader: only such a one lets Lightning go on in the middle of an epoch."""

    _taken = _resumed = 0

    def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        self._taken, self._resumed = self._resumed, 0
        return self._batches(super().__iter__(), self._taken)

    def _batches(self, batches: Iterator[torch.Tensor], skip: int) -> Iterator[torch.Tensor]:
        for batch in itertools.islice(batches, skip, None):
            self._taken += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._resumed = state["taken"]


class Crash(Exception):
    """The job dies."""


class Module(pl.LightningModule):
    """Momentum, a schedule per step, a plateau schedule's worth of validation, a buffer."""

    def __init__(self, crash_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 4))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.crash_at = crash_at
        self.validated: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == self.crash_at:
            settle(self.trainer.strategy.checkpointer)  # type: ignore[attr-defined]
            raise Crash
        self.seen += len(batch)
        loss: torch.Tensor = (self.net(batch) - batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)
        self.log("val_loss", (self.net(batch) - batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [{"params": self.net[3].parameters(), "lr": 3e-2}, {"params": self.net[:2].parameters()}]
        optimizer = torch.optim.AdamW(groups, 1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20), "interval": "step"},
        }


def fit(out: str, name: str, crash_at: int | None = None, ckpt_path: str | None = None) -> dict[str, Any]:
    """One fit, under gemini-ft if it is to crash; what came of it."""
    samples: Any = torch.linspace(-1, 1, SAMPLES * 4).view(SAMPLES, 4).sin()
    module = Module(crash_at)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp" if crash_at is None else "gemini",
        max_epochs=EPOCHS,
        val_check_interval=0.5,
        logger=False,
        callbacks=[ModelCheckpoint(Path(out) / name, monitor="val_loss", save_top_k=1)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=Path(out) / name,
    )
    loader = Loader(samples, BATCH, shuffle=True)
    with contextlib.suppress(Crash):
        trainer.fit(module, loader, DataLoader(samples[:4], 2), ckpt_path=ckpt_path)
    optimizer = trainer.optimizers[0].state_dict() if trainer.optimizers else {}
    return {
        "state": digest({"model": module.state_dict(), "optimizer": optimizer}),
        "steps": [trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop._batches_that_stepped],
        "validated": module.validated,
    }


def until_crash(out: str, crashes: dict[str, int]) -> dict[str, Any]:
    """An undisturbed fit of plain Lightning, and one fit under gemini-ft for each crash."""
    undisturbed = fit(out, "undisturbed")
    import gemini_ft

    assert gemini_ft.__version__
    for name, step in crashes.items():
        fit(out, name, crash_at=step)
    time.sleep(0.1)
    return undisturbed


def from_files(out: str, files: dict[str, str]) -> dict[str, Any]:
    """Plain Lightning goes on from each file."""
    return {name: fit(out, f"again-{name}", ckpt_path=path) for name, path in files.items()}
