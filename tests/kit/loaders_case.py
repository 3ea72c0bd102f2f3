"""Trainings on every kind of loader, with hooks that wake it early. Run by test_lightning_data.py, never imported.

Usage: loaders_case.py FOLDER STRATEGY '{CELL: [OPTIONS, KILLS]}', see three_ways.py. OPTIONS are those of `train`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from three_ways import Record
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

import gemini_ft

try:
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
except ImportError:
    StatefulDataLoader = None

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SAMPLES, BATCH = 40, 4


class Table(Dataset[torch.Tensor]):
    """Random augmentation, and samples that depend on the shard, which is another one each time that it is loaded."""

    def __init__(self, shard: float) -> None:
        self._shard = shard

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / SAMPLES, self._shard, random.random(), torch.rand(()).item()])


class Stream(IterableDataset[torch.Tensor]):
    """Nobody knows how long it is. The order is the epoch's, which all of its worker processes see in shared memory."""

    def __init__(self, shard: float) -> None:
        self._shard, self.epoch = shard, torch.zeros((), dtype=torch.long).share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        self.epoch.fill_(epoch)

    def order(self) -> list[int]:
        info = get_worker_info()
        count, mine = (info.num_workers, info.id) if info else (1, 0)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(int(self.epoch))).tolist()
        return order[RANK * count + mine :: RANKS * count]

    def sample(self, index: int) -> torch.Tensor:
        return torch.tensor([index / SAMPLES, self._shard, float(self.epoch), 1.0])

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from map(self.sample, self.order())


class Cursor(Stream):
    """Keeps its own place, as streaming datasets for torchdata do."""

    def __init__(self, shard: float) -> None:
        super().__init__(shard)
        self._at = self._from = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        order, self._at, self._from = self.order(), self._from, 0
        while self._at < len(order):
            self._at += 1
            yield self.sample(order[self._at - 1])

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._from = state["at"]


class Endless:
    """An iterator in place of a loader: each epoch takes the batches that follow."""

    def __init__(self, data: Stream, batch: int, **_: Any) -> None:
        self._samples = itertools.chain.from_iterable(itertools.repeat(list(data)))
        self._batch = batch

    def __iter__(self) -> Endless:
        return self

    def __next__(self) -> torch.Tensor:
        return torch.stack(list(itertools.islice(self._samples, self._batch)))


class Noise(Stream):
    def sample(self, index: int) -> torch.Tensor:
        return super().sample(index) * random.random()


class Drawing(Stream):
    """Draws from a generator of its own, for training and validation alike."""

    def __init__(self, shard: float) -> None:
        super().__init__(shard)
        self._generator = random.Random(RANK)

    def sample(self, index: int) -> torch.Tensor:
        return super().sample(index) * self._generator.random()


class Private(Table):
    """Augments from a generator of its own, and less with every sample that it has given out."""

    def __init__(self, shard: float) -> None:
        super().__init__(shard)
        self._generator, self._given = random.Random(RANK), 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self._given += 1
        return super().__getitem__(index) * self._generator.random() / self._given


class Caching(Table):
    """Fills places of large lists and arrays, which held what stands for nothing, and computes in an array of its own."""

    def __init__(self, shard: float) -> None:
        super().__init__(shard)
        self._places: list[Any] = [[empty] * 200 for empty in (None, False, 0, -1, "", math.nan)]
        self._places += [np.full(40_000, empty) for empty in (0, -1, math.nan)]
        self._buffer = np.zeros(40_000)

    def __getitem__(self, index: int) -> torch.Tensor:
        for places in self._places:
            if (kept := places[index]) in (None, 0, -1, "") or kept != kept:
                places[index] = type(kept)(index + 1) if kept is not None else index + 1
        np.multiply(sum(float(places[index]) for places in self._places), random.random(), out=self._buffer)
        return super().__getitem__(index) * float(self._buffer[9]) / 1000


def remembering(workers: dict[str, Any]) -> dict[str, Any]:
    """Loaders of validations that remember something from one to the next."""
    return {
        "table": DataLoader(Table(0.5), BATCH, **workers),
        "shuffled": DataLoader(Table(0.5), BATCH, shuffle=True, **workers),
        "noise": DataLoader(Noise(0.5), BATCH, **workers),
        "private": DataLoader(Private(0.5), BATCH, shuffle=True, generator=torch.Generator().manual_seed(3)),
        "iterator": Endless(Stream(0.5), BATCH),
        "private-there": DataLoader(Private(0.5), BATCH, **workers),
    }


KINDS: dict[str, tuple[Any, Any]] = {
    "table": (DataLoader, Table),
    "caching": (DataLoader, Caching),
    "stream": (DataLoader, Stream),
    "drawing": (DataLoader, Drawing),
    "iterator": (Endless, Stream),
    "stateful-table": (StatefulDataLoader, Table),
    "stateful-stream": (StatefulDataLoader, Stream),
    "stateful-cursor": (StatefulDataLoader, Cursor),
}
WORKERS: dict[str, dict[str, Any]] = {"0": {}, "2": {"num_workers": 2}, "persistent": {"num_workers": 2, "persistent_workers": True}}


def make_loader(options: dict[str, Any], shard: float) -> Any:
    loader, dataset = KINDS[options.get("kind", "table")]
    data = dataset(shard)
    how = WORKERS[options.get("workers", "0")]
    if loader is StatefulDataLoader and dataset is Table:  # Lightning cannot make one anew with a sampler
        return loader(data, BATCH, sampler=DistributedSampler(data, RANKS, RANK), **how)
    return loader(data, BATCH, shuffle=issubclass(dataset, Table), **how)


class Data(L.LightningDataModule):
    """Makes loaders that depend on the epoch and on the step at which they are made."""

    def __init__(self, options: dict[str, Any], record: Record) -> None:
        super().__init__()
        self._options, self._record = options, record
        self.made = 0
        self._one = make_loader(options, 0.0) if options.get("one_loader") or options.get("one_dataset") else None

    def train_dataloader(self) -> Any:
        if self._one is not None:
            return self._one
        assert self.trainer is not None
        self.made += 1
        return make_loader(self._options, self.trainer.current_epoch + self.trainer.global_step / 100 + self.made / 1000)

    def val_dataloader(self) -> Any:
        if self._one is not None:
            return self._one if self._options.get("one_loader") else DataLoader(self._one.dataset, BATCH)
        assert self.trainer is not None
        workers = WORKERS[self._options.get("workers", "0")]
        if kinds := self._options.get("validation"):
            return [loader for kind, loader in remembering(workers).items() if kind in kinds]
        return DataLoader(Stream(self.trainer.current_epoch), BATCH, **workers)


class Module(L.LightningModule):
    def __init__(self, options: dict[str, Any], record: Record) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self._options, self._record = options, record

    def wake(self, moment: str) -> None:
        """Does early, at one of Lightning's hooks, what wakes the loaders."""
        what = self._options.get("early", "").partition("@")
        if what[2] != moment:
            return
        if what[0] == "steps":
            self._record.note(f"steps at {moment}", self.trainer.estimated_stepping_batches)
            return
        self.trainer.fit_loop.setup_data()
        loader: Any = self.trainer.train_dataloader
        if what[0] == "validation":
            self.trainer.fit_loop.epoch_loop.val_loop.setup_data()
        elif what[0] == "batch":
            self._record.note(f"batch at {moment} {self.trainer.global_step}", next(iter(loader)))

    def setup(self, stage: str) -> None:
        self.wake("setup")

    def configure_optimizers(self) -> Any:
        self.wake("configure_optimizers")
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    def on_fit_start(self) -> None:
        self.wake("on_fit_start")

    def on_sanity_check_start(self) -> None:
        self.wake("on_sanity_check_start")

    def on_train_epoch_start(self) -> None:
        for part in (self.trainer.train_dataloader, getattr(self.trainer.train_dataloader, "dataset", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(self.current_epoch)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self._record.reached(self.current_epoch, batch_idx)
        loss: torch.Tensor = (self.net(batch) - batch[:, :1]).square().mean()
        self.log("loss", loss)
        self._record.note(f"epoch {self.current_epoch} batch {batch_idx}", batch, loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._record.reached(self.current_epoch, batch_idx, "end")  # all callbacks have seen the batch, and no snapshot has it
        if self.trainer.global_step % 5 == 0:
            self.wake("on_train_batch_end")

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.net(batch).square().mean()
        self.log("val", loss, sync_dist=True)
        when = "sanity check" if self.trainer.sanity_checking else f"validation {self.current_epoch} {self.global_step}"
        self._record.note(f"{when} loader {dataloader_idx} batch {batch_idx}", batch, loss)


class Best(ModelCheckpoint):
    """Has attributes of its own, and inherits a state_dict that knows nothing of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.best_of_all = float("inf")
        self.found_at: list[int] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        super().on_validation_end(trainer, module)
        if not trainer.sanity_checking and (value := float(trainer.callback_metrics["loss"])) < self.best_of_all:
            self.best_of_all = value
            self.found_at.append(trainer.global_step)


class Patient(EarlyStopping):
    def __init__(self) -> None:
        super().__init__("val", patience=9)
        self.looks = 0

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        super().on_validation_end(trainer, module)
        self.looks += 1


class Saving(Callback):
    """A state of its own, and a base for callbacks that inherit its state_dict."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


class Inheriting(Saving):
    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def on_train_epoch_end(self, *_: Any) -> None:
        self.epochs += 1


def make_callbacks(names: list[str], folder: Path) -> list[Any]:
    makers = {
        "best": lambda: Best(dirpath=folder / "best", monitor="val", save_top_k=2, save_last=True, filename="{epoch}-{step}"),
        "often": lambda: ModelCheckpoint(folder / "often", save_top_k=3, monitor="loss", every_n_train_steps=2, save_last="link"),
        "all": lambda: ModelCheckpoint(folder / "all", save_top_k=-1, every_n_train_steps=3, filename="newest"),
        "patient": Patient,
        "inheriting": Inheriting,
    }
    return [makers[name]() for name in names]


def train(folder: Path, strategy: str, options: dict[str, Any], record: Record) -> None:
    """Trains one cell.

    Args:
        folder: the cell's.
        strategy: the Trainer's.
        options: kind, workers: of the loaders; one_loader, one_dataset: the same for training and validation; validation: kinds of its
            own, see `remembering`; early: "WHAT@HOOK", see `Module.wake`; trainer: its arguments; callbacks: names.
        record: what happens is written down there.
    """
    L.seed_everything(7, workers=True, verbose=False)
    callbacks = make_callbacks(options.get("callbacks", []), folder)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        default_root_dir=folder,
        logger=CSVLogger(folder, "logs") if callbacks else False,
        callbacks=callbacks,
        enable_checkpointing="callbacks" in options,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, "limit_val_batches": 2, "num_sanity_val_steps": 1} | options.get("trainer", {}),
    )
    module = Module(options, record)
    trainer.fit(module, datamodule=Data(options, record))
    record.state("final", [module.state_dict(), trainer.optimizers[0].state_dict(), dict(trainer.callback_metrics), trainer.global_step])
    record.note("final random", torch.rand(()), random.random())
    for index, callback in enumerate(callbacks):
        values = {name: value for name, value in vars(callback).items() if isinstance(value, (int, float, str, list, dict, torch.Tensor))}
        values.pop("_last_time_checked", None)  # a time
        record.state(f"final callback {index}", json.loads(json.dumps(values, default=float).replace(str(folder), "")))
    if callbacks and RANK == 0:
        files = [path for path in folder.rglob("*") if path.suffix in (".ckpt", ".csv")]
        record.note("end files", sorted(str(path.relative_to(folder)) for path in files))
        record.note("end steps of files", {path.name: _step_of(path) for path in files if path.suffix == ".ckpt"})
        record.note("end rows", next(path for path in files if path.suffix == ".csv").read_text())


def _step_of(path: Path) -> int:
    return int(torch.load(path, weights_only=False)["global_step"])


if __name__ == "__main__":
    assert gemini_ft.__version__
    for name, (options, kills) in json.loads(sys.argv[3]).items():
        train(Path(sys.argv[1]) / name, sys.argv[2], options, Record(Path(sys.argv[1]) / name, kills))
