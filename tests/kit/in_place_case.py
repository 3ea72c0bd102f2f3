"""The script of test_job_in_place.py: a small DDP loop inside `gemini_ft.run`, or plain; it fails on purpose as its arguments say.

``in_place_case.py FOLDER KEEPER [ATTEMPT:RANK:MOMENT:DEED]...``; KEEPER is "gemini", "nothing", "generator" or "dataset": gemini, with a
generator of the process's own in its state, or a dataset of its own that counts; "sharded" and "sharded-alone" train by FSDP2, with gemini
and without; "trainer-STRATEGY" trains by Lightning's Trainer, "fabric-STRATEGY" by Fabric, "transformers" and "transformers-alone" by its
Trainer.

A MOMENT is "start", "group" or a number of steps done. Each rank writes what every step has computed to a file of its own, in hex, with its
process id.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset

import gemini_ft
from gemini_ft.testing import digest

STEPS = 12
FOLDER, KEEPER, *DEEDS = sys.argv[1:]
generator = torch.Generator().manual_seed(3)


class Counting(TensorDataset):
    """Its samples depend on how many it has given."""

    given = 0

    def __getitem__(self, index: Any) -> Any:
        self.given += 1
        return tuple(tensor[index] + 0.01 * self.given for tensor in self.tensors)


counting = Counting(torch.ones(48, 8))
kept: list[Any] = []  # what survives an attempt, as a script's mistake


def reached(moment: object, model: Any = None) -> None:
    here = [f"{attempt}:{os.environ['RANK']}:{moment}" for attempt in (os.environ["TORCHELASTIC_RESTART_COUNT"], "*")]
    for when, _, deed in (each.rpartition(":") for each in DEEDS):
        match deed if when in here else "":
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sleep":
                time.sleep(1000)
            case "raise":
                raise ValueError("bad luck")
            case "keep":
                kept.append(model)
            case "blind":
                torch.set_grad_enabled(False)
            case "thread":
                threading.Thread(target=time.sleep, args=(1000,), daemon=True, name="forgotten").start()


class Module(L.LightningModule):
    """Notes each of its losses."""

    def __init__(self, trace: Any) -> None:
        super().__init__()
        self.net, self.trace = network(), trace

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        reached(self.trainer.global_step, self.net)
        print("step", self.trainer.global_step, float(loss.item()).hex(), file=self.trace)
        return loss

    def configure_model(self) -> None:
        if "fsdp2" in KEEPER and not any(isinstance(param, DTensor) for param in self.parameters()):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)]


def fit() -> None:
    """Trains by Lightning's Trainer."""
    L.seed_everything(3)
    with open(f"{FOLDER}/rank-{os.environ['RANK']}", "a", buffering=1) as trace:
        print("attempt", os.getpid(), float(torch.rand(())).hex(), file=trace)
        reached("start")
        module, loader = Module(trace), DataLoader(TensorDataset(torch.randn(48, 8)), 8, shuffle=True, num_workers=1)
        checkpoints, logger = (
            ModelCheckpoint(f"{FOLDER}/checkpoints", save_top_k=-1),
            CSVLogger(FOLDER, name="csv", flush_logs_every_n_steps=1),
        )
        strategy: Any = KEEPER.removeprefix("trainer-")
        if strategy == "fsdp2":
            strategy = ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1)
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
        options: dict[str, Any] = {"strategy": strategy, "accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"])}
        trainer = L.Trainer(max_epochs=4, logger=logger, callbacks=[checkpoints], **options, **quiet)
        trainer.fit(module, loader)
        final = {"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict(), "rng": torch.get_rng_state()}
        print("end", digest(whole(final)), file=trace)


def fabric() -> None:
    """Trains by Fabric."""
    with open(f"{FOLDER}/rank-{os.environ['RANK']}", "a", buffering=1) as trace:
        print("attempt", os.getpid(), float(torch.rand(())).hex(), file=trace)
        reached("start")
        fabric = Fabric(strategy=KEEPER.removeprefix("fabric-"), accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]))
        fabric.launch()
        fabric.seed_everything(3)
        net = network()
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(48, 8)), 8, shuffle=True, num_workers=1))
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0, "step": 0}
        if "gemini" in KEEPER:
            fabric.strategy.protect(state)
        while state["epoch"] < 4:
            loader.sampler.set_epoch(state["epoch"])
            for batch in loader:
                loss = model(batch[0]).square().mean()
                fabric.backward(loss)
                reached(state["step"], model)
                optimizer.step()
                optimizer.zero_grad()
                print("step", state["step"], loss.item().hex(), file=trace)
                state["step"] += 1
            state["epoch"] += 1
        final = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        print("end", digest(whole(final)), file=trace)
        if "gemini" in KEEPER:
            fabric.strategy.close()


def transform() -> None:
    """Trains by transformers' Trainer, which `gemini run` protects."""
    from huggingface_case import Texts, model
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Noting(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            reached(state.global_step, named["model"])

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **named: Any) -> None:
            if "loss" in logs:
                print("step", state.global_step, float(logs["loss"]).hex(), file=trace)

    with open(f"{FOLDER}/rank-{os.environ['RANK']}", "a", buffering=1) as trace:
        print("attempt", os.getpid(), float(torch.rand(())).hex(), file=trace)
        reached("start")
        quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
        arguments = TrainingArguments(FOLDER, use_cpu=True, per_device_train_batch_size=2, max_steps=STEPS, seed=3, **quiet)
        trainer = Trainer(model(), arguments, train_dataset=Texts(22), callbacks=[Noting()])
        trainer.train()
        final = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict(), "rng": torch.get_rng_state()}
        print("end", digest(final), file=trace)


def whole(state: Any) -> Any:
    """The state with what this rank holds of sharded tensors in their places."""
    return tree_map_only(DTensor, DTensor.to_local, state)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))


def train() -> None:
    rank, world = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    with open(f"{FOLDER}/rank-{rank}", "a", buffering=1) as trace:
        print("attempt", os.getpid(), float(torch.rand(())).hex(), file=trace)  # random numbers begin anew as well
        reached("start")
        if world > 1:
            dist.init_process_group("gloo")
        reached("group")
        torch.manual_seed(0)
        net = network()
        model = net if world == 1 else fully_shard(net) if KEEPER.startswith("sharded") else DistributedDataParallel(net)
        torch.manual_seed(int(rank))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        loader: Any = DataLoader(TensorDataset(torch.randn(48, 8)), 8, shuffle=True, num_workers=1, persistent_workers=True)
        if KEEPER == "dataset":
            loader = DataLoader(counting, 8, shuffle=True)
        start, checkpointer = 0, None
        if KEEPER not in ("nothing", "sharded-alone"):
            loader = gemini_ft.resumable(loader)
            state = {"scheduler": scheduler, "loader": loader, **({"generator": generator} if KEEPER == "generator" else {})}
            checkpointer = gemini_ft.Checkpointer(model, optimizer, state=state, on_late="wait")
            start = checkpointer.resume()
        batches = (batch for _ in iter(int, 1) for batch in loader)  # epoch after epoch
        for step in range(start, STEPS):
            noise = torch.rand((), generator=generator) if KEEPER == "generator" else 1
            loss = model(noise * next(batches)[0]).square().mean()
            loss.backward()
            reached(step, model)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            print("step", step, loss.item().hex(), file=trace)
            if checkpointer is not None:
                checkpointer.step()
                checkpointer.flush()
        final = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        print("end", digest(whole(final)), file=trace)
        if checkpointer is not None:
            checkpointer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(5)
    Path(FOLDER).mkdir(exist_ok=True)
    gemini_ft.run({"trainer": fit, "fabric": fabric, "transformers": transform}.get(KEEPER.partition("-")[0], train))
    if dist.is_initialized():
        dist.destroy_process_group()
