"""The script of test_job_in_place.py: a small DDP loop inside `gemini_ft.run`, or plain; it fails on purpose as its arguments say.

``in_place_case.py FOLDER KEEPER [ATTEMPT:RANK:MOMENT:DEED]...``; KEEPER is "gemini", "nothing", "generator" or "dataset": gemini, with a
generator of the process's own in its state, or a dataset of its own that counts; "trainer-STRATEGY" trains by Lightning's Trainer.
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
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.parallel import DistributedDataParallel
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
        strategy = KEEPER.removeprefix("trainer-")
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
        options: dict[str, Any] = {"strategy": strategy, "accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"])}
        trainer = L.Trainer(max_epochs=4, logger=logger, callbacks=[checkpoints], **options, **quiet)
        trainer.fit(module, loader)
        final = {"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict(), "rng": torch.get_rng_state()}
        print("end", digest(final), file=trace)


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
        model = DistributedDataParallel(net) if world > 1 else net
        torch.manual_seed(int(rank))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        loader: Any = DataLoader(TensorDataset(torch.randn(48, 8)), 8, shuffle=True, num_workers=1, persistent_workers=True)
        if KEEPER == "dataset":
            loader = DataLoader(counting, 8, shuffle=True)
        start, checkpointer = 0, None
        if KEEPER != "nothing":
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
        print("end", digest(final), file=trace)
        if checkpointer is not None:
            checkpointer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(5)
    Path(FOLDER).mkdir(exist_ok=True)
    gemini_ft.run(fit if KEEPER.startswith("trainer-") else train)
    if dist.is_initialized():
        dist.destroy_process_group()
