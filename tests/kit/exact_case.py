"""What the workers of test_elastic_exact.py train by logical ranks, and the same by a single process that knows nothing of these."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import gemini_ft
from gemini_ft.testing import digest

COUNT, SAMPLES, BATCH, EPOCHS = 4, 48, 3, 5  # steps of 12 samples: 4 in an epoch


@dataclass(frozen=True)
class Case:
    """One training job."""

    seed: int = 0
    accumulation: int = 1
    count: int = COUNT  # logical ranks
    epochs: int = EPOCHS
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)
    pause: float = 0.0


class Noisy(Dataset[torch.Tensor]):
    """Samples that draw from all three global generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + float(np.random.rand())
        return torch.linspace(-1, 1, 6) * (index + 1) / SAMPLES + 0.1 * noise * torch.rand(6)


class Net(nn.Module):
    """BatchNorm, dropout, a generator of its own, and a parameter that some logical ranks leave without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(6, 17), nn.BatchNorm1d(17), nn.Dropout(0.3), nn.Linear(17, 1)
        self.rare, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        self.generator = np.random.default_rng(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        out = out + 0.1 * float(self.generator.standard_normal())
        return out * self.rare.sum() if float(torch.rand(())) < 0.3 else out


def made(case: Case) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(case.seed)
    random.seed(case.seed)
    np.random.seed(case.seed)
    model = Net().to(case.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def seeded(case: Case, number: int) -> None:
    torch.manual_seed(100 * case.seed + number)
    random.seed(200 * case.seed + number)
    np.random.seed(300 * case.seed + number)


def loader_of(number: int, count: int = COUNT) -> DataLoader[torch.Tensor]:
    return DataLoader(Noisy(), BATCH, sampler=DistributedSampler(Noisy(), count, number, seed=7))


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return digest({name: [param.detach(), optimizer.state.get(param, {})] for name, param in model.named_parameters()})


def of_rank(model: nn.Module) -> str:
    """Buffers, and what would be drawn next."""
    device = next(model.parameters()).device
    drawn = [torch.rand(2).tolist(), random.random(), float(np.random.rand()), torch.rand(2, device=device).tolist()]
    return digest([dict(model.named_buffers()), drawn])


def train(case: Case, until: int) -> dict[str, Any]:
    """Trains until a step by logical ranks; returns the bits of each step, and of each logical rank here at the end."""
    gemini_ft.init_process_group("gloo")
    model, optimizer, scheduler = made(case)
    checkpointer = gemini_ft.Checkpointer(model, optimizer, state={"scheduler": scheduler}, elastic="exact", interval=1, **case.options)
    ranks = checkpointer.logical_ranks(case.count, lambda number: gemini_ft.resumable(loader_of(number, case.count)))
    for rank in ranks:
        with rank:
            seeded(case, rank.number)
    start = step = checkpointer.resume()
    found: dict[int, str] = {start: bits(model, optimizer)}
    for epoch in range(checkpointer.scalars.get("epoch", 0), case.epochs):
        for turns, turn in enumerate(ranks.batches(epoch), 1):
            for rank, batch in turn:
                with rank:
                    (model(batch.to(case.device)).square().mean() / case.accumulation).backward()
            if turns % case.accumulation:
                continue
            ranks.reduce()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            torch.rand(())  # the job's own
            step += 1
            checkpointer.step(epoch=epoch, norm=norm.item())
            found[step] = bits(model, optimizer)
            time.sleep(case.pause)
            if step >= until:
                checkpointer.flush()
                return said(start, found, ranks, model, checkpointer)
    checkpointer.close()
    return said(start, found, ranks, model, checkpointer)


def said(start: int, found: dict[int, str], ranks: Any, model: nn.Module, checkpointer: Any) -> dict[str, Any]:
    inner = {}
    common = float(torch.rand(()))
    for rank in ranks:
        with rank:
            inner[rank.number] = of_rank(model)
    return {"start": start, "bits": found, "ranks": inner, "common": common, "restored": checkpointer.stats.restored}


def oracle(case: Case) -> dict[str, Any]:
    """The same training in one process by plain torch: a copy of buffers and of all generators for each of four ranks."""
    model, optimizer, scheduler = made(case)
    outside = drawn()
    states: list[list[Any]] = []
    loaders: list[Any] = [loader_of(number, case.count) for number in range(case.count)]
    for number in range(case.count):
        seeded(case, number)
        states.append([drawn(), copy.deepcopy(dict(model.named_buffers())), copy.deepcopy(model.generator.bit_generator.state)])
    params, step, found = list(model.parameters()), 0, {0: bits(model, optimizer)}

    def enter(number: int) -> None:
        generators, buffers, own = states[number]
        draw_from(generators)
        model.generator.bit_generator.state = own
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])

    def leave(number: int) -> None:
        states[number] = [drawn(), copy.deepcopy(dict(model.named_buffers())), copy.deepcopy(model.generator.bit_generator.state)]

    for epoch in range(case.epochs):
        sources = []
        for number, loader in enumerate(loaders):
            enter(number)
            loader.sampler.set_epoch(epoch)
            sources.append(iter(loader))
            leave(number)
        for turn in range(len(loaders[0])):
            if turn % case.accumulation == 0:
                sums: list[list[torch.Tensor | None]] = [[None] * len(params) for _ in range(case.count)]
            for number in range(case.count):
                enter(number)
                for param, grad in zip(params, sums[number], strict=True):
                    param.grad = grad
                (model(next(sources[number]).to(case.device)).square().mean() / case.accumulation).backward()
                sums[number] = [param.grad for param in params]
                leave(number)
            if (turn + 1) % case.accumulation:
                continue
            for index, param in enumerate(params):
                grads = [own[index] for own in sums]
                total = torch.zeros_like(param)
                for grad in grads:
                    total += grad if grad is not None else 0
                param.grad = total / case.count if any(grad is not None for grad in grads) else None
            nn.utils.clip_grad_norm_(params, 0.5)
            optimizer.step()
            scheduler.step()
            draw_from(outside)
            torch.rand(())
            outside = drawn()
            step += 1
            found[step] = bits(model, optimizer)
    draw_from(outside)
    common, inner = float(torch.rand(())), {}
    for number in range(case.count):
        enter(number)
        inner[number] = of_rank(model)
    return {"bits": found, "ranks": inner, "common": common}


def drawn() -> list[Any]:
    device = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), random.getstate(), np.random.get_state(), *device]


def draw_from(state: list[Any]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    for device in state[3:]:
        torch.cuda.set_rng_state(device)


class Stopped(Exception):
    """The job has come as far as it was to come."""


@dataclass(frozen=True)
class Fitting:
    """One fit of Lightning's Trainer."""

    ranks: int | None = COUNT  # logical ones; 0: no number is given; None: Lightning's own DDP
    accumulation: int = 1
    draws: bool = True  # samples and model
    epochs: int = 3
    trainer: dict[str, Any] = field(default_factory=dict)  # further options
    strategy: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=lambda: {"shuffle": True})
    data: Any = None
    monitors: bool = False  # a scheduler of a figure
    kind: str = "AdamW"
    compiles: bool = False
    pause: float = 0.0


class Even(Noisy):
    """Samples without noise."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.linspace(-1, 1, 6) * (index + 1) / SAMPLES


def fit(case: Fitting, until: int) -> dict[str, Any]:
    """Trains until a step by the Trainer, with validations that draw; returns the bits of each step."""
    import lightning as L
    from elastic_case import QUIET

    from gemini_ft.lightning import GeminiStrategy

    found: dict[str, Any] = {"bits": {}, "numbers": []}

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net() if case.draws else nn.Sequential(nn.Linear(6, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Linear(17, 1))

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            found["numbers"].append(number)
            time.sleep(case.pause)
            loss: torch.Tensor = self.net(batch).square().mean()
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            if case.draws:
                torch.rand(())  # the logical rank's

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            torch.rand(())  # the job's own

        def validation_step(self, batch: torch.Tensor, number: int) -> None:
            torch.rand(())

        def on_train_batch_start(self, batch: Any, number: int) -> None:
            found.setdefault("start", self.trainer.global_step)
            found["bits"][self.trainer.global_step] = bits(self.net, self.trainer.optimizers[0])
            if self.trainer.global_step >= until:
                assert strategy.checkpointer is not None
                strategy.checkpointer.flush()
                raise Stopped

        def configure_optimizers(self) -> Any:
            optimizer = getattr(torch.optim, case.kind)(self.parameters(), lr=3e-2)
            if case.monitors:
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "loss"}}
            return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.95), "interval": "step"}]

    L.seed_everything(5, verbose=False)
    module, world = Module(), int(os.environ["WORLD_SIZE"])
    options = {"elastic": "exact", "logical_ranks": case.ranks or None, "interval": 1}
    strategy: Any = GeminiStrategy(process_group_backend="gloo", **options, **case.strategy) if case.ranks is not None else "ddp"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_epochs=case.epochs,
        accumulate_grad_batches=case.accumulation,
        gradient_clip_val=0.5,
        deterministic=True,
        **QUIET,
        **case.trainer,
    )
    data = case.data or (Noisy() if case.draws else Even())
    with contextlib.suppress(Stopped):
        given: Any = torch.compile(module, backend="eager") if case.compiles else module
        trainer.fit(given, DataLoader(data, BATCH, **case.loader), DataLoader(Even(), BATCH))
    found["bits"][trainer.global_step] = bits(module.net, trainer.optimizers[0])
    return found


PLAIN, FITTED = Case(epochs=20, pause=0.1), Fitting(epochs=20, pause=0.1)  # of whole hosts, that have time to go and to come


def refusals(cases: dict[str, Fitting]) -> dict[str, str]:
    """The texts that fits end with, by name."""
    told = {}
    for name, case in cases.items():
        try:
            fit(case, 2)
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


if __name__ == "__main__":
    out, kind = sys.argv[1:]
    job = partial(fit, FITTED) if kind == "lightning" else partial(train, PLAIN)
    result = json.dumps(gemini_ft.run(partial(job, 10**9)), default=str)
    Path(f"{out}.{os.environ['RANK']}").write_text(result)  # the rank of the last attempt
