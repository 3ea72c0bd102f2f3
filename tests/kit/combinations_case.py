"""Trainings of combined traits, for test_combinations.py: loaders, loops, optimizers, callbacks and habits, in any mixture."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import loaders_case
import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from loader_kit import OwnEpochs
from loaders_case import KINDS, WORKERS, Best, Cursor, Drawing, Endless, Inheriting, Noise, Patient, Private, Stream, Table
from three_ways import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler
from torchmetrics import MeanMetric, RunningMean

import gemini_ft

Traits = dict[str, Any]
SAMPLES, BATCH = 22, 4


class Diary(Record):
    """Counts how often this process has come to each moment."""

    def __init__(self, folder: Path, kills: list[str]) -> None:
        super().__init__(folder, kills)
        self._counts: Counter[str] = Counter()

    def came_to(self, moment: str) -> None:
        self._counts[moment] += 1
        self.reached(moment, self._counts[moment])

    def again(self, key: str, *values: Any) -> None:
        """Notes values under a key that may come several times: an optimizer may compute the loss more than once in a step."""
        self._counts[key] += 1
        self.note(f"{key}, {self._counts[key]}", *values)


class Small(Table):
    def __len__(self) -> int:
        return SAMPLES


class SmallPrivate(Private):
    def __len__(self) -> int:
        return SAMPLES


class Told(Small):
    """A table that is told the epoch, and has other values in each."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) * (1 + self.epoch)


class Numpy(Sampler[int]):
    """An order of numpy's global generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Mixing:
    """A collate function with a generator and a counter."""

    def __init__(self) -> None:
        self.rng, self.batches = np.random.default_rng(4), 0

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        self.batches += 1
        x = torch.stack(samples)
        share = self.rng.beta(2, 2)
        return x * share + x[torch.randperm(len(x))] * (1 - share) + 0.001 * self.batches


DATA: dict[str, Callable[[float], Any]] = {
    "table": Small,
    "private": SmallPrivate,
    "told": Told,
    "stream": Stream,
    "noise": Noise,
    "drawing": Drawing,
    "cursor": Cursor,
}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: {"shuffle": True},
    "in order": dict,
    "generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0 + i for i in range(SAMPLES)], 18)},
    "weighted generator": lambda: {"sampler": WeightedRandomSampler([1.0] * SAMPLES, 18, generator=torch.Generator().manual_seed(5))},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(3, 21), generator=torch.Generator().manual_seed(6))},
    "numpy": lambda: {"sampler": Numpy()},
    "own epochs": lambda: {"sampler": SubsetOwn()},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(SAMPLES)), 5, drop_last=True)},
}


class SubsetOwn(OwnEpochs):
    def __iter__(self) -> Iterator[int]:
        return (index for index in super().__iter__() if index < SAMPLES)

    def __len__(self) -> int:
        return SAMPLES


def make_loader(traits: Traits, shard: float = 0.0) -> Any:
    data = DATA[traits["data"]](shard)
    how: dict[str, Any] = dict(WORKERS[traits["workers"]])
    if traits["collate"] == "mixing":
        how["collate_fn"] = Mixing()
    kind = {"torch": DataLoader, "stateful": KINDS["stateful-table"][0], "iterator": Endless}[traits["loader"]]
    order = SAMPLERS[traits["sampler"]]() if isinstance(data, Table) else {}
    if "batch_sampler" not in order and kind is not Endless:
        order["batch_size"] = BATCH
    return kind(data, BATCH) if kind is Endless else kind(data, **order, **how)


class Net(nn.Module):
    seen: torch.Tensor

    def __init__(self, traits: Traits) -> None:
        super().__init__()
        self.kind = traits["model"]
        self.first: Any = nn.Linear(4, 6)
        self.norm, self.drop, self.last = nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1)
        if self.kind == "spectral":
            self.first = nn.utils.parametrizations.spectral_norm(self.first)
        elif self.kind == "recurrent":
            self.rnn = nn.GRU(6, 6, batch_first=True)
        elif self.kind == "counting":
            self.calls = 0
            self.register_buffer("seen", torch.zeros(0), persistent=False)
        elif self.kind == "embedding":
            self.table = nn.Embedding(8, 6, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(torch.relu(self.norm(self.first(x))))
        if self.kind == "recurrent":
            h = self.rnn(h[None])[0][0]
        elif self.kind == "embedding":
            h = h + self.table((x[:, 0].abs() * 7).long() % 8)
        elif self.kind == "counting" and self.training:
            self.calls += 1
            self.seen = torch.cat([self.seen, h.detach().mean().view(1)])[-5:]
            h = h + self.seen.mean() / self.calls
        out: torch.Tensor = self.last(h)
        return out


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.3),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=2, history_size=3),
    "asgd": lambda p: torch.optim.ASGD(p, 0.02, t0=3),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.7),
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=60, cycle_momentum=False),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step / 5)),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5, threshold=0.2),
}


MODES: dict[str, Any] = {
    "combined": "max_size_cycle",
    "shortest": "min_size",
    "longest": "max_size",
}  # of several loaders that are iterated together


class Data(L.LightningDataModule):
    def __init__(self, traits: Traits) -> None:
        super().__init__()
        self._traits, self.made = traits, 0

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        self.made += 1
        shard = self.trainer.current_epoch + self.made / 100 if self._traits["reload"] else 0.0
        mode = MODES.get(self._traits["loader"])
        if mode is None:
            return make_loader(self._traits, shard)
        traits = self._traits | {"loader": "torch"}
        other = {"data": "noise"} if self._traits["data"] != "noise" else {"data": "private"}
        return CombinedLoader({"one": make_loader(traits, shard), "two": make_loader(traits | other, 7.0)}, mode)

    def val_dataloader(self) -> Any:
        tables: dict[str, list[Any]] = {"none": [], "table": [Small], "private": [SmallPrivate], "noise": [Noise, Small]}
        kinds = tables[self._traits["validation"]]
        how = WORKERS[self._traits["workers"]]
        return [DataLoader(kind(0.5), BATCH, shuffle=issubclass(kind, Table), **how) for kind in kinds]


class Module(L.LightningModule):
    def __init__(self, traits: Traits, record: Diary) -> None:
        super().__init__()
        self.save_hyperparameters({"decay": 0.9})
        self.net = Net(traits)
        self.automatic_optimization = traits["loop"] != "by hand"
        self.mean, self.running = MeanMetric(), RunningMean(3)
        self.weight, self.history, self.shift, self.noise = 1.0, list[float](), 0.0, torch.zeros(())
        self.extra = {"mean": torch.zeros(2)}
        # Neither is part of a snapshot: objects that cannot be kept, under names that no attribute has.
        self._traits, self._record, self._habits = traits, record, frozenset(traits["habits"])

    def moment(self, name: str) -> None:
        if not self.trainer.sanity_checking:
            self._record.came_to(name)

    # -- the optimization

    def configure_optimizers(self) -> Any:
        kind = OPTIMIZERS[self._traits["optimizer"]]
        parts = [self.net.parameters()]
        if self._traits["optimizers"] == 2 and not self.automatic_optimization:
            first = [*self.net.first.parameters()]
            parts = [iter(first), (p for p in self.net.parameters() if all(p is not one for one in first))]
        optimizers = [kind([*part]) for part in parts]
        schedulers: list[Any] = [made for each in optimizers if (made := SCHEDULES[self._traits["schedule"]](each)) is not None]
        how: dict[str, Any] = {"interval": self._traits["interval"], "frequency": 1, "monitor": "loss", "strict": True}
        return optimizers, [{"scheduler": each, **how} for each in schedulers]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(metric)
        else:
            scheduler.step()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.moment("on_before_zero_grad")

    def on_after_backward(self) -> None:
        self.moment("on_after_backward")
        if "gradient noise" in self._habits:
            for param in self.net.parameters():
                if param.grad is not None:
                    param.grad.add_(torch.randn_like(param.grad), alpha=0.01)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.moment("on_before_optimizer_step")
        if "scaled gradients" in self._habits:
            self.weight *= 0.95
            for param in self.net.parameters():
                if param.grad is not None:
                    param.grad.mul_(self.weight)

    def optimizer_step(self, *args: Any, **named: Any) -> None:
        super().optimizer_step(*args, **named)
        if "clamped" in self._habits:
            with torch.no_grad():
                for param in self.net.parameters():
                    param.clamp_(-0.7, 0.7)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.moment("training_step")
        x = batch
        if isinstance(batch, dict):
            one, two = (torch.ones(2, 4) if batch[name] is None else batch[name] for name in ("one", "two"))
            x = one + two.mean()
        loss: torch.Tensor = (self.net(x) - x[:, :1]).square().mean().float() + self.shift + self.noise
        loss = self.changed(loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if not self.trainer.sanity_checking:
            self._record.again(f"epoch {self.current_epoch} batch {batch_idx} of {self.global_step}", x, loss)
        if "skipped" in self._habits and self.automatic_optimization and batch_idx % 3 == 2:
            return None
        if not self.automatic_optimization:
            self._by_hand(loss, batch_idx)
        return loss

    def _by_hand(self, loss: torch.Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.manual_backward(loss / self._traits["accumulate"])
        for number, optimizer in enumerate(optimizers):
            if (batch_idx + 1) % (self._traits["accumulate"] + number) == 0:
                self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
        schedulers: Any = self.lr_schedulers()
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers] if schedulers else []:
            scheduler.step(*[loss.detach()] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        if "history" in self._habits:
            self.history = [*self.history, loss.item()][-4:]
            loss = loss * (1 + sum(self.history))
        if "metrics" in self._habits:
            self.mean.update(loss.detach())
            self.running.update(loss.detach())
            self.log("mean", self.mean, on_step=True, on_epoch=True)
            loss = loss * (1 + self.running.compute())
        if "drawn" in self._habits:
            loss = loss * (1 + random.random() + np.random.rand())
        if "hyperparameters" in self._habits:
            self.hparams["decay"] *= 0.9
            loss = loss * self.hparams["decay"]
        if "saved" in self._habits:
            self.extra["mean"] = self.extra["mean"] * 0.9 + loss.detach()
            loss = loss + self.extra["mean"].sum()
        if "kept by the trainer" in self._habits:
            self.trainer.weight = 0.9 * getattr(self.trainer, "weight", 1.0)  # type: ignore[attr-defined]
            loss = loss * self.trainer.weight  # type: ignore[attr-defined]
        return loss

    # -- hooks

    def setup(self, stage: str) -> None:
        if "drawn at setup" in self._habits:
            self.shift = random.random()

    def on_fit_start(self) -> None:
        if "asks for steps" in self._habits:
            self._record.note("steps", str(self.trainer.estimated_stepping_batches))
        if "drawn at the start" in self._habits:
            self.noise = torch.rand(())

    def on_train_start(self) -> None:
        self.moment("on_train_start")

    def on_train_epoch_start(self) -> None:
        self.moment("on_train_epoch_start")
        for part in (self.trainer.train_dataloader, getattr(self.trainer.train_dataloader, "dataset", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(self.current_epoch)
        epoch, habits = self.current_epoch, self._habits
        if "dropout" in habits:
            self.net.drop.p = 0.1 + 0.2 * epoch
        if "frozen" in habits:
            self.net.first.requires_grad_(epoch != 1)
        if "resting" in habits:
            self.net.norm.train(epoch != 1)
        if "shifted" in habits:
            self.shift = random.random()
        if "seeded" in habits:
            torch.manual_seed(epoch)
        if "fresh moments" in habits and epoch == 1:
            for optimizer in self.trainer.optimizers:
                optimizer.state.clear()
        if "longer" in habits and epoch == 1:
            self.trainer.fit_loop.max_epochs = 4
        if "clipped" in habits:
            self.trainer.gradient_clip_val = 0.5 / (1 + epoch)
        if "momentum" in habits:
            for group in self.trainer.optimizers[0].param_groups:
                group["weight_decay"] = 0.01 * epoch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.moment("on_train_batch_start")
        if "noise" in self._habits:
            self.noise = torch.rand(())
        if "rate by hand" in self._habits:
            for optimizer in self.trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 / (1 + batch_idx + self.current_epoch)
        return -1 if "left early" in self._habits and self.current_epoch == 1 and batch_idx == 4 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.moment("on_train_batch_end")
        if "looks" in self._habits:
            self.eval()
            with torch.no_grad():
                self._record.note(
                    f"look {self.global_step} {batch_idx} {self.current_epoch}",
                    self.net(torch.rand(3, 4, dtype=self.net.last.weight.dtype)),
                )
            self.train()
        if "stopped" in self._habits and self.global_step >= 8:
            self.trainer.should_stop = True

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.moment("validation_step")
        loss = self.net(batch).square().mean()
        if "drawn in validation" in self._habits:
            loss = loss * torch.rand(())
        self.log("val", loss, sync_dist=True)
        seen = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready  # one step may be validated several times, between its batches
        when = "sanity" if self.trainer.sanity_checking else f"{self.current_epoch} {self.global_step} {seen}"
        self._record.note(f"validation {when} {dataloader_idx} {batch_idx}", batch, loss)

    def on_validation_start(self) -> None:
        self.moment("on_validation_start")

    def on_validation_epoch_end(self) -> None:
        self.moment("on_validation_epoch_end")
        if "lowered by validation" in self._habits and not self.trainer.sanity_checking:
            self.weight *= 0.8
            for optimizer in self.trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.9

    def on_train_epoch_end(self) -> None:
        self.moment("on_train_epoch_end")
        if "drawn at the end" in self._habits:
            self.shift = random.random() + torch.rand(()).item()
        if "rates at the end" in self._habits:
            for optimizer in self.trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.8

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "saved" in self._habits:
            checkpoint["extra"] = self.extra

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "saved" in self._habits:
            self.extra = checkpoint["extra"]


class Shaking(L.Callback):
    """Draws from the process, and keeps a tensor, a counter and a generator of its own."""

    def __init__(self) -> None:
        self.mean, self.count, self.rng = torch.zeros(2), 0, random.Random(3)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.count += 1
        self.mean = 0.9 * self.mean + torch.rand(2) * self.rng.random() / self.count

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.mean = self.mean + random.random() * self.rng.random()


class Weighing(L.Callback):
    """Changes the loss's weight after each epoch and each validation, and has a metric."""

    def __init__(self) -> None:
        self.metric, self.best, self.waited = MeanMetric(), float("inf"), 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if outputs:
            self.metric.update(outputs["loss"].detach())

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        value = float(self.metric.compute())
        self.waited = 0 if value < self.best else self.waited + 1
        self.best = min(value, self.best)
        module.shift = 0.1 * self.waited
        self.metric.reset()


def make_callbacks(names: list[str], folder: Path) -> list[Any]:
    many = of_lightning.ModelCheckpoint
    makers: dict[str, Callable[[], Any]] = {
        "best": lambda: Best(dirpath=folder / "best", monitor="loss", save_top_k=2, save_last=True, filename="{epoch}-{step}"),
        "often": lambda: many(folder / "often", save_top_k=3, monitor="loss_step", every_n_train_steps=2, save_last="link"),
        "all": lambda: many(folder / "all", save_top_k=-1, every_n_epochs=1, filename="newest"),
        "each epoch": lambda: many(folder / "each", save_top_k=1, monitor="loss_epoch", save_on_train_epoch_end=True),
        "patient": Patient,
        "inheriting": Inheriting,
        "shaking": Shaking,
        "weighing": Weighing,
        "rates": lambda: of_lightning.LearningRateMonitor("step", log_momentum=True),
        "accumulating": lambda: of_lightning.GradientAccumulationScheduler({0: 1, 1: 2}),
        "stopping": lambda: of_lightning.EarlyStopping("loss_epoch", patience=1, check_on_train_epoch_end=True, min_delta=0.5),
        "swa": lambda: of_lightning.StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=2),
        "ema": lambda: of_lightning.EMAWeightAveraging(decay=0.8),
        "pruning": lambda: of_lightning.ModelPruning("l1_unstructured", amount=0.1, use_lottery_ticket_hypothesis=False),
    }
    return [makers[name]() for name in names]


def train_by_trainer(folder: Path, way: str, traits: Traits, record: Diary) -> None:
    L.seed_everything(7, workers=True, verbose=False)
    callbacks = make_callbacks(traits["callbacks"], folder)
    options: dict[str, Any] = {"accumulate_grad_batches": traits["accumulate"]} if traits["loop"] == "trainer" else {}
    if "clipped" in traits["habits"]:
        options["gradient_clip_val"] = 1.0
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=("ddp" if way == "ddp" else "gemini") + "_find_unused_parameters_true" * ("frozen" in traits["habits"]),
        default_root_dir=folder,
        logger=CSVLogger(folder, "logs", flush_logs_every_n_steps=traits["flush"]),
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(each, of_lightning.ModelCheckpoint) for each in callbacks),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=3,
        limit_train_batches=traits["limit"],
        limit_val_batches=traits["limit_validation"],
        num_sanity_val_steps=traits["sanity"],
        val_check_interval=traits["interval_of_validation"],
        check_val_every_n_epoch=traits["validated_epochs"],
        reload_dataloaders_every_n_epochs=traits["reload"],
        precision=traits["precision"],
        **options,
    )
    module = Module(traits, record)
    trainer.fit(module, datamodule=Data(traits))
    optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
    kept = [module.weight, module.history, module.shift, module.noise, module.extra, dict(module.hparams)]
    record.state(
        "final", [module.state_dict(), optimizers, dict(trainer.callback_metrics), trainer.global_step, trainer.current_epoch, kept]
    )
    record.state("final schedulers", [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs])
    record.note("final random", torch.rand(()), random.random(), np.random.rand())
    for index, callback in enumerate(callbacks):
        values = {name: value for name, value in vars(callback).items() if isinstance(value, (int, float, str, list, dict, torch.Tensor))}
        shown, loaded = ("_last_time_checked", "lrs", "last_momentum_values"), ("_init_n_averaged", "_scheduler_state")
        for name in (*shown, *loaded):  # a time and what is only shown; what SWA has loaded, and reads only where it begins
            values.pop(name, None)
        text = json.dumps(values, default=repr, skipkeys=True).replace(str(folder), "")
        record.state(f"final callback {index}", json.loads(re.sub(" at 0x[0-9a-f]+", "", text)))  # where functions lie in memory
    if os.environ["RANK"] == "0":
        files = [path for path in folder.rglob("*") if path.suffix in (".ckpt", ".csv")]
        record.note("end files", sorted(str(path.relative_to(folder)) for path in files))
        steps = {str(path.relative_to(folder)): torch.load(path, weights_only=False) for path in files if path.suffix == ".ckpt"}
        record.note("end steps of files", {name: checkpoint["global_step"] for name, checkpoint in steps.items()})
        record.note("end rows", *[path.read_text() for path in files if path.suffix == ".csv"])


def train_by_loop(folder: Path, way: str, traits: Traits, record: Diary) -> None:
    """A plain loop, or one of Fabric."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
    is_ours, is_fabric, habits = way != "ddp", traits["loop"] == "fabric", traits["habits"]
    net = Net(traits)
    first = [*net.first.parameters()]
    others = [param for param in net.parameters() if all(param is not each for each in first)]
    parts = [first, others] if traits["optimizers"] == 2 else [[*net.parameters()]]
    optimizers: list[Any] = [OPTIMIZERS[traits["optimizer"]](part) for part in parts]
    schedulers = [made for each in optimizers if (made := SCHEDULES[traits["schedule"]](each)) is not None]
    loader, validation = make_loader(traits), DataLoader(SmallPrivate(0.5), BATCH, shuffle=True)
    average: Any = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if traits["average"] else None  # type: ignore[no-untyped-call]
    fabric: Any = None
    if is_fabric:
        fabric = Fabric(strategy="gemini" if is_ours else "ddp", accelerator="cpu", devices=ranks, precision=traits["precision"])
        fabric.launch()
        model, *optimizers = fabric.setup(net, *optimizers)
        loader, validation = fabric.setup_dataloaders(loader, validation)
    else:
        if ranks > 1:
            gemini_ft.init_process_group("gloo")
        model = DistributedDataParallel(net) if ranks > 1 else net
        if is_ours:
            loader, validation = gemini_ft.resumable(loader), gemini_ft.resumable(validation)
    torch.manual_seed(rank)
    drawn, own = torch.Generator().manual_seed(1), np.random.default_rng(2)
    state: dict[str, Any] = {f"schedule{number}": scheduler for number, scheduler in enumerate(schedulers)}
    state |= {"loader": loader, "validation": validation, "drawn": drawn, "own": own}
    scalars: dict[str, Any] = {"epoch": 0, "steps": 0, "best": 9.0, "losses": [], "batches": 0}
    checkpointer: Any = None
    if is_fabric:
        state |= {"model": model, **{f"optimizer{number}": each for number, each in enumerate(optimizers)}, **scalars}
        state |= {"average": average} if average is not None else {}
        if is_ours:
            fabric.strategy.protect(state)
        scalars = state
    elif is_ours:
        models = {"model": model, "average": average} if average is not None else model
        checkpointer = gemini_ft.Checkpointer(models, optimizers, state=state, on_late="wait")
        checkpointer.resume()
        scalars |= checkpointer.scalars

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if traits["precision"] == "bf16-mixed" and not is_fabric else contextlib.nullcontext():
            loss: torch.Tensor = (model(x) - x[:, :1]).square().mean().float()
        if "drawn" in habits:
            loss = loss * (1 + random.random() + np.random.rand() + own.random()) + torch.rand((), generator=drawn)
        return loss

    backward = fabric.backward if is_fabric else torch.Tensor.backward
    for epoch in range(scalars["epoch"], 3):
        for part in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        batches = itertools.islice(loader, 5 - getattr(loader, "batches_done", 0)) if traits["loader"] == "iterator" else loader
        for x in batches:
            record.came_to("training_step")
            x = x.float()
            step, is_last = scalars["steps"], (scalars["steps"] + 1) % traits["accumulate"] == 0
            losses: list[torch.Tensor] = []
            if traits["optimizer"] == "lbfgs":

                def closure(x: torch.Tensor = x, losses: list[torch.Tensor] = losses) -> torch.Tensor:
                    for each in optimizers:
                        each.zero_grad()
                    losses.append(forward(x))
                    backward(losses[-1])
                    return losses[-1]

                for each in optimizers:
                    each.step(closure)
            else:
                quiet = model.no_sync() if ranks > 1 and not is_fabric and not is_last else contextlib.nullcontext()
                if is_fabric and ranks > 1:
                    quiet = fabric.no_backward_sync(model, enabled=not is_last)
                with quiet:
                    losses.append(forward(x))
                    backward(losses[-1] / traits["accumulate"])
                record.came_to("on_after_backward")
                if is_last:
                    if "clipped" in habits:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    for each in optimizers:
                        each.step()
                        each.zero_grad()
            if average is not None:
                average.update_parameters(net)
            for scheduler in schedulers:
                scheduler.step(*[float(losses[-1])] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
            record.note(f"step {step}", epoch, x, losses[-1].detach(), [each.param_groups[0]["lr"] for each in optimizers])
            record.came_to("on_train_batch_end")
            if traits["validation"] != "none" and step % 4 == 3:
                model.eval()
                with torch.no_grad():
                    for number, y in enumerate(validation):
                        record.came_to("validation_step")
                        record.note(f"validation {step} {number}", y, model(y.float()))
                model.train()
            if "left early" in habits and step % 5 == 4:
                scalars |= {"steps": step + 1}
                if checkpointer is not None:
                    checkpointer.step(**{name: scalars[name] for name in ("epoch", "steps", "best", "losses")})
                break
            loss = losses[-1].item()
            scalars |= {"epoch": epoch, "steps": step + 1, "best": min(scalars["best"], loss), "losses": [*scalars["losses"][-3:], loss]}
            if checkpointer is not None:
                checkpointer.step(**{name: scalars[name] for name in ("epoch", "steps", "best", "losses")})
        scalars["epoch"] = epoch + 1
        record.came_to("on_train_epoch_end")
    if checkpointer is not None:
        checkpointer.close()
    elif is_ours:
        fabric.strategy.close()
    final = [net.state_dict(), [each.state_dict() for each in optimizers], average.state_dict() if average is not None else None]
    record.state(
        "final", [final, [each.state_dict() for each in schedulers], {name: scalars[name] for name in ("steps", "best", "losses")}]
    )
    record.note("final random", torch.rand(()), random.random(), np.random.rand(), float(own.random()), torch.rand((), generator=drawn))


def train(folder: Path, way: str, traits: Traits, kills: list[str]) -> str:
    """Trains one combination in this rank; returns "done", or "refused: " and the error by which gemini-ft has refused it."""
    folder.mkdir(parents=True, exist_ok=True)
    output = os.open(folder / f"output-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method("fork", force=True)  # for loaders' workers; this rank's parent has set another
    loaders_case.RANK, loaders_case.RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # it was imported before the fork
    record = Diary(folder, kills if way == "killed" else [])
    try:
        (train_by_trainer if traits["loop"] in ("trainer", "by hand") else train_by_loop)(folder, way, traits, record)
    except gemini_ft.errors.GeminiError as error:
        return f"refused: {type(error).__name__}: {error}"
    except RuntimeError as error:
        if isinstance(cause := error.__context__, gemini_ft.errors.GeminiError):  # Lightning fails once more when it tears down
            return f"refused: {type(cause).__name__}: {cause}"
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return "done"
