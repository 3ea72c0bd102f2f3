"""What the ranks of test_elastic_batch.py train: a small DDP model whose samples are recorded.

Usage under ``gemini run``: elastic_case.py FILE EPOCHS MICRO_BATCHES [sharded | lightning], as `train` has them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SubsetRandomSampler, WeightedRandomSampler

import gemini_ft
from gemini_ft.lightning import GeminiDeepSpeedStrategy, GeminiFabricStrategy, GeminiModelParallelStrategy, GeminiStrategy
from gemini_ft.testing import digest

# Options of a Trainer.
QUIET: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)

SAMPLES, BATCH, GLOBAL = 72, 2, 12  # micro-batches of 2, and steps of 12 samples: 6 micro-batches of all ranks


@dataclass(frozen=True)
class Case:
    """One training job."""

    epochs: int = 2
    accumulation: int = 2  # at the first start
    workers: int = 0
    draws: bool = False  # samples have noise
    kind: str = "dealt"  # of the loader
    is_sharded: bool = False  # the model, by FSDP2
    pause: float = 0.0  # seconds after each step
    has_engine: bool = False  # DeepSpeed's, with ZeRO 2
    later: int = 0  # micro-batches of a step that a hook sets in the second epoch; 0: none does
    checkpoint: str | None = None  # to begin with
    saved: str | None = None  # the checkpoint to make at the end
    options: dict[str, Any] = field(default_factory=lambda: {"elastic": "batch", "interval": 1})


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    """Samples that name themselves."""

    def __init__(self, draws: bool = False) -> None:
        self._draws = draws

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        sample = torch.linspace(-1, 1, 4, dtype=torch.float64) * (index + 1) / SAMPLES
        return index, sample + torch.rand(()) if self._draws else sample


class Net(nn.Module):
    """Parameters, and a buffer that each rank changes."""

    batches: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8, dtype=torch.float64), nn.Linear(8, 1, dtype=torch.float64)
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.batches.add_(1)
        out: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return out


def loader_of(case: Case, rank: int, world: int) -> DataLoader[Any]:
    data = Numbers(case.draws)
    sampler = DistributedSampler[Any](data, world, rank, seed=5)
    match case.kind:
        case "dealt":
            return DataLoader(data, BATCH, sampler=sampler, num_workers=case.workers)
        case "shuffled":
            return DataLoader(data, BATCH, shuffle=True)
        case "persistent":
            return DataLoader(data, BATCH, sampler=sampler, num_workers=1, persistent_workers=True)
        case "iterated":
            return DataLoader(Stream(), BATCH)
        case "batched":
            return DataLoader(data, batch_sampler=[[index, index] for index in sampler])
        case "weighted":
            return DataLoader(data, BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
        case "of some":
            return DataLoader(data, BATCH, sampler=SubsetRandomSampler(range(SAMPLES)))
        case "stateful":
            made: DataLoader[Any] = pytest.importorskip(
                "torchdata.stateful_dataloader", reason="needs torchdata: pip install torchdata"
            ).StatefulDataLoader(Kept(), BATCH, sampler=sampler)
            return made
        case "prepared":
            prepare = pytest.importorskip("accelerate.data_loader", reason="needs accelerate: pip install accelerate").prepare_data_loader
            prepared: DataLoader[Any] = prepare(DataLoader(data, BATCH, shuffle=True), num_processes=world, process_index=rank)
            return prepared
        case "wrapped":
            return DataLoader(data, BATCH, sampler=DistributedSamplerWrapper(SubsetRandomSampler(range(SAMPLES)), world, rank))
    raise ValueError(case.kind)


class Kept(Numbers):
    """Samples with a state of their own."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class Stream(torch.utils.data.IterableDataset[tuple[int, torch.Tensor]]):
    def __iter__(self) -> Any:
        return map(Numbers().__getitem__, range(SAMPLES))


def train(case: Case, out: str, until: int) -> dict[str, Any]:
    """Trains until a step; the samples of each step go to the file ``<out>.<rank>``."""
    gemini_ft.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = sharded(world) if case.is_sharded else DistributedDataParallel(Net())
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    loader = gemini_ft.resumable(loader_of(case, rank, world))
    checkpointer = gemini_ft.Checkpointer(model, optimizer, state={"loader": loader, "scheduler": scheduler}, **case.options)
    checkpointer.accumulation = case.accumulation
    start = step = checkpointer.resume()
    this, wholes = began(), {start: whole(model, optimizer)}
    with open(f"{out}.{rank}", "a", buffering=1) as trace:
        for epoch in range(checkpointer.scalars.get("epoch", 0), case.epochs):
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            for number, (ids, batch) in enumerate(loader, loader.batches_done + 1):
                loss = model(batch).square().mean() / checkpointer.accumulation
                loss.backward()
                trace.write(f"{this} {step} {epoch} {' '.join(map(str, ids.tolist()))}\n")
                if number % checkpointer.accumulation:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                step += 1
                checkpointer.step(epoch=epoch)
                wholes[step] = whole(model, optimizer)
                time.sleep(case.pause)
                if step >= until:
                    checkpointer.flush()
                    return said(start, checkpointer, model, wholes)
    checkpointer.close()
    return said(start, checkpointer, model, wholes)


def sharded(world: int) -> nn.Module:
    model, mesh = Net(), init_device_mesh("cpu", (world,))
    for part in (model.first, model.last, model):
        fully_shard(part, mesh=mesh)
    return model


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A digest of all weights and moments, as a full checkpoint of any number of ranks has them."""
    return digest(
        {
            name: [full(param), {key: full(value) for key, value in optimizer.state[param].items()}]
            for name, param in model.named_parameters()
        }
    )


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def said(start: int, checkpointer: Any, model: nn.Module, wholes: dict[int, str]) -> dict[str, Any]:
    return {
        "start": start,
        "accumulation": checkpointer.accumulation,
        "wholes": wholes,
        "restored": checkpointer.stats.restored,
        "weights": [value for param in model.parameters() for value in full(param).flatten().tolist()],
        "buffer": int(next(model.buffers())),
        "drawn": float(torch.rand(())),
    }


def samples(out: Path) -> dict[int, dict[int, list[int]]]:
    """Epoch -> step -> the samples that were used, by the last attempt at each step."""
    found: dict[int, dict[int, dict[float, list[int]]]] = {}
    for file in out.parent.glob(f"{out.name}.*"):
        for line in file.read_text().splitlines():
            began_at, step, epoch, *ids = line.split()
            found.setdefault(int(epoch), {}).setdefault(int(step), {}).setdefault(float(began_at), []).extend(map(int, ids))
    return {epoch: {step: attempts[max(attempts)] for step, attempts in of.items()} for epoch, of in found.items()}


def began() -> float:
    """The time at which rank 0 has begun this attempt, the same on all ranks."""
    times = [time.time()]
    dist.broadcast_object_list(times, src=0)
    return times[0]


class Stopped(Exception):
    """The job has come as far as it was to come."""


def fit(case: Case, out: str, until: int) -> dict[str, Any]:
    """Does as `train`, by Lightning's Trainer."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {"told": [], "validated": []}

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found["told"].append(record.getMessage())

    logging.getLogger("gemini_ft").addHandler(Noting(logging.WARNING))

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net().float() if case.has_engine else Net()
            self.world = 0

        def configure_model(self) -> None:
            if case.is_sharded:
                assert self.device_mesh is not None
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def on_fit_start(self) -> None:
            self.world = self.trainer.world_size

        def on_train_epoch_start(self) -> None:
            if case.later and self.trainer.current_epoch == 1:
                self.trainer.accumulate_grad_batches = case.later

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            ids, numbers = batch
            if case.has_engine:
                ids, numbers = ids.long(), numbers.float()
            loss: torch.Tensor = self.net(numbers).square().mean()
            with open(f"{out}.{rank}", "a") as trace:
                step, epoch = self.trainer.global_step, self.trainer.current_epoch
                trace.write(f"{found['this']} {step} {epoch} {' '.join(map(str, ids.tolist()))}\n")
            time.sleep(case.pause)
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            if not self.trainer.sanity_checking:
                found["validated"].append((self.trainer.global_step, number))

        def on_train_start(self) -> None:
            found["this"] = began()

        def on_train_batch_start(self, batch: Any, number: int) -> None:
            found.setdefault("start", self.trainer.global_step)
            if self.trainer.global_step == until:
                assert strategy.checkpointer is not None
                strategy.checkpointer.flush()
                if case.saved is not None:
                    self.trainer.save_checkpoint(case.saved)
                raise Stopped

        def configure_optimizers(self) -> Any:
            found["steps"] = self.trainer.estimated_stepping_batches
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)]

    L.seed_everything(3, verbose=False)
    module = Module()
    if case.has_engine:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        config = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
        strategy: Any = GeminiDeepSpeedStrategy(config=config, process_group_backend="gloo", **case.options)
    else:
        strategy = (GeminiModelParallelStrategy if case.is_sharded else GeminiStrategy)(process_group_backend="gloo", **case.options)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_epochs=case.epochs,
        accumulate_grad_batches=case.accumulation,
        num_sanity_val_steps=1,
        limit_val_batches=2,
        **QUIET,
    )
    validation = DataLoader(Numbers(), BATCH, shuffle=True)
    with contextlib.suppress(Stopped):
        trainer.fit(module, DataLoader(Numbers(), BATCH, shuffle=True, num_workers=case.workers), validation, ckpt_path=case.checkpoint)
    weights = [value for param in module.parameters() for value in full(param).flatten().tolist()]
    return found | {
        "accumulation": trainer.accumulate_grad_batches,
        "world": module.world,
        "weights": weights,
        "epoch": trainer.current_epoch,
    }


def fabricate(case: Case, out: str, until: int) -> dict[str, Any]:
    """Does as `train`, by Fabric, which takes a snapshot when the next batch is asked for."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    strategy = GeminiFabricStrategy(process_group_backend="gloo", **case.options)
    fabric = L.Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    loader = fabric.setup_dataloaders(DataLoader(Numbers(), BATCH, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "epoch": 0, "step": 0}
    strategy.accumulation = case.accumulation
    strategy.protect(state)
    start, this = state["step"], began()
    for epoch in range(state["epoch"], case.epochs):
        state["epoch"] = epoch
        for number, (ids, batch) in enumerate(loader, 1):
            if state["step"] == until:
                strategy.checkpointer.flush()
                return said(start, strategy.checkpointer, model, {})
            with open(f"{out}.{rank}", "a") as trace:
                trace.write(f"{this} {state['step']} {epoch} {' '.join(map(str, ids.tolist()))}\n")
            fabric.backward(model(batch).square().mean() / strategy.accumulation)
            if number % strategy.accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                state["step"] += 1
    checkpointer = strategy.checkpointer
    strategy.close()
    return said(start, checkpointer, model, {})


def engage(case: Case, out: str, until: int) -> dict[str, Any]:
    """Does as `train`, by an engine of DeepSpeed whose configuration does not know of other numbers of ranks."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import gemini_ft.deepspeed

    gemini_ft.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net().float()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": case.accumulation,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "gemini": {"on_late": "wait", **case.options},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = gemini_ft.deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loader = gemini_ft.resumable(loader_of(case, rank, world))
    engine.gemini.keep(loader=loader)
    checkpointer, state = engine.gemini.checkpointer, engine.gemini.client_state
    start, this = engine.global_steps, began()
    for epoch in range(state.get("epoch", 0), case.epochs):
        state["epoch"] = epoch
        loader.sampler.set_epoch(epoch)
        for ids, batch in loader:
            with open(f"{out}.{rank}", "a") as trace:
                trace.write(f"{this} {engine.global_steps} {epoch} {' '.join(map(str, ids.tolist()))}\n")
            engine.backward(engine(batch.float()).square().mean())
            engine.step()
            if engine.global_steps == until:
                while checkpointer.stats.committed != until:
                    time.sleep(0.01)
                engine.gemini.close(finished=False)
                return said(start, checkpointer, model, {}) | {"accumulation": engine.gradient_accumulation_steps()}
    raise AssertionError(f"the data ended before step {until}")


if __name__ == "__main__":
    file, epochs, micro_batches, kind = sys.argv[1:]
    given = Case(epochs=int(epochs), accumulation=int(micro_batches), is_sharded=kind == "sharded", pause=0.1)
    gemini_ft.run(partial(fit if kind == "lightning" else train, given, file, 10**9))
