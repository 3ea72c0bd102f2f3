"""A Trainer whose ModelCheckpoints write files, by `GeminiCheckpointIO` under gemini. Run by test_checkpoint_io.py; see `three_ways`."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from three_ways import Record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gemini_ft.checkpoint_io import GeminiCheckpointIO

STEPS = 14


class Tied(pl.LightningModule):
    """Two layers that share their weights, statistics of batches, and a schedule of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 6})
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.last(self.norm(self.first(batch[0]))) - batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.last(self.norm(self.first(batch[0]))).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Moments(Callback):
    def __init__(self, record: Record) -> None:
        self.record = record

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.record.reached("step", trainer.global_step)


def train(folder: Path, strategy: str, kills: list[str], keep: int, hosts: int = 1) -> None:
    record = Record(folder, kills)
    pl.seed_everything(1, verbose=False)
    files = [
        ModelCheckpoint(folder / "steps", "{step}", every_n_train_steps=2, save_top_k=keep, monitor="step", mode="max", save_last=True),
        ModelCheckpoint(folder / "best", "best", monitor="val_loss", save_top_k=2),
    ]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2 // hosts,
        num_nodes=hosts,
        max_steps=STEPS,
        strategy=strategy,
        callbacks=[Moments(record), *files],
        plugins=[GeminiCheckpointIO()] if strategy == "gemini" else [],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(40, 6, generator=torch.Generator().manual_seed(1)))
    module = Tied()
    trainer.fit(module, DataLoader(data, 4, shuffle=True), DataLoader(data, 8))
    record.state("end", module.state_dict())
    if trainer.is_global_zero:
        for path in sorted(folder.glob("*/*.ckpt")):
            content = torch.load(path, weights_only=False)
            assert content["state_dict"]["first.weight"].data_ptr() == content["state_dict"]["last.weight"].data_ptr()
            text = json.loads(json.dumps(content["callbacks"], default=lambda value: value.item()).replace(str(folder), ""))
            record.state(f"end {path.parent.name}/{path.name}", content | {"callbacks": text})


def main() -> None:
    warnings.simplefilter("ignore")
    folder, strategy, jobs = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    for name, (options, kills) in jobs.items():
        train(folder / name, strategy, kills, **options)


if __name__ == "__main__":
    main()
