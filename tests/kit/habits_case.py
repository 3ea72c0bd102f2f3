"""Habits of plain loops, a small training for each. Run by test_plain_habits.py, never imported.

Usage: habits_case.py FOLDER STRATEGY '{CELL: [OPTIONS, KILLS]}', see three_ways.py. OPTIONS name the trainings of a cell; STRATEGY "ddp"
leaves gemini out. A kill is the rank and the number of turns that the process has made, see `train_in_turns`, or "rank:NAME:epoch:step".
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from three_ways import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler, random_split
from torchmetrics import MeanMetric

import gemini_ft

RANK = int(os.environ["RANK"])
OURS = np.random.default_rng(8)  # of the script, and given to nothing


class Loop:
    """A plain loop around a Checkpointer, or around nothing."""

    def __init__(self, name: str, folder: Path, together: Record, is_protected: bool) -> None:
        self.name, self._record, self._together, self._is_protected = name, Record(folder / name, []), together, is_protected
        self._checkpointer: gemini_ft.Checkpointer | None = None
        self.steps = 0
        self.is_even = True  # all ranks make the same number of steps
        self.is_replicated: bool | None = None  # all ranks have the same parameters; None: as DDP says

    def loader(self, *args: Any, **named: Any) -> Any:
        loader = DataLoader(*args, **named)
        return gemini_ft.resumable(loader) if self._is_protected else loader

    def begin(self, models: Any, optimizers: Any, **state: Any) -> int:
        if self._is_protected:
            late = "wait" if self.is_even else "skip"
            options: Any = {"name": self.name, "on_late": late, "replicated": self.is_replicated}
            self._checkpointer = gemini_ft.Checkpointer(models, optimizers, state=state, **options)
            self.steps = self._checkpointer.resume()
        return self.steps

    @property
    def scalars(self) -> dict[str, Any]:
        return self._checkpointer.scalars if self._checkpointer is not None else {}

    def step(self, *values: Any, **scalars: Any) -> None:
        self.steps += 1
        self._record.note(f"epoch {scalars.get('epoch', 0)} step {scalars.get('at', self.steps)}", *values)
        if self._checkpointer is not None:
            self._checkpointer.step(**scalars)

    def end(self, *state: Any) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._checkpointer = None
        self._record.state("end", [*state])

    def flush(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.flush()

    def reached(self, epoch: int, step: int) -> None:
        self._together.reached(self.name, epoch, step)


def net(dropout: float = 0.2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(dropout), nn.Linear(6, 1))


def wrapped(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **options)


def batch() -> torch.Tensor:
    return torch.randn(4, 3)


def train(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def rows(count: int = 24) -> TensorDataset:
    return TensorDataset(torch.arange(3.0 * count).reshape(count, 3) / count)


def scaler(loop: Loop) -> Iterator[None]:
    model = wrapped(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=3)
    first = loop.begin(model, optimizer, scaler=scaler)
    yield
    for _ in range(first, 12):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch()).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        loop.step(loss, scaler.get_scale())
        yield
    loop.end(model.state_dict(), optimizer.state_dict(), scaler.state_dict())


def lbfgs(loop: Loop) -> Iterator[None]:
    model = wrapped(net(0.0))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3, line_search_fn="strong_wolfe")
    first = loop.begin(model, optimizer)
    yield
    for _ in range(first, 8):
        x = batch()

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        loop.step(optimizer.step(closure))  # type: ignore[no-untyped-call]
        yield
    loop.end(model.state_dict(), optimizer.state_dict())


def averages(loop: Loop) -> Iterator[None]:
    model = wrapped(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)  # type: ignore[no-untyped-call]
    swa, copied = AveragedModel(model.module), copy.deepcopy(model.module)
    swa_rates, cosine = SWALR(optimizer, swa_lr=0.01, anneal_epochs=3), lr_scheduler.CosineAnnealingLR(optimizer, 6)
    models = {"model": model, "ema": ema, "copied": copied}
    first = loop.begin(models, optimizer, swa=swa, swa_rates=swa_rates, cosine=cosine)
    yield
    for step in range(first, 12):
        loss = train(model, batch(), optimizer)
        ema.update_parameters(model)
        if step >= 6:
            swa.update_parameters(model.module)
            swa_rates.step()
        else:
            cosine.step()
        with torch.no_grad():
            for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        loop.step(loss, optimizer.param_groups[0]["lr"])
        yield
    update_bn([torch.ones(4, 3)], swa)
    loop.end(model.state_dict(), ema.state_dict(), swa.state_dict(), copied.state_dict(), optimizer.state_dict())


def zipped(loop: Loop) -> Iterator[None]:
    model = wrapped(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    short, long = loop.loader(rows(16), 4, shuffle=True), loop.loader(rows(24), 4, shuffle=True)
    pairs = [lambda: zip(short, long), lambda: zip(long, short)]  # noqa: B905  # as loops have it
    loop.begin(model, optimizer, short=short, long=long)
    yield
    for epoch in range(loop.scalars.get("epoch", 0), 4):
        for (x,), (y,) in pairs[epoch % 2]():
            loop.step(x, y, train(model, x + y, optimizer), epoch=epoch)
            yield
    loop.end(model.state_dict())


def counted(loop: Loop) -> Iterator[None]:
    """Leaves each epoch early, starts iterators by hand, and accumulates by the number of the batch."""
    model = wrapped(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = loop.loader(rows(), 4, sampler=WeightedRandomSampler([1.0, 2.0] * 12, 24, generator=torch.Generator().manual_seed(3)))
    other = loop.loader(random_split(rows(), [20, 4], torch.Generator().manual_seed(5))[0], 4, shuffle=True)
    first = loop.begin(model, optimizer, loader=loader, other=other)
    yield
    forever: Iterator[Any] = iter(())
    for _ in range(first, 8):
        noise = torch.rand(())  # before the batch, which may be that with which the data goes on
        try:
            (x,) = next(forever)
        except StopIteration:
            forever = iter(other)
            (x,) = next(forever)
        loop.step(x, noise, train(model, x * noise, optimizer))
        yield
    for epoch in range(loop.scalars.get("epoch", 0), 3):
        for index, (x,) in enumerate(loader, getattr(loader, "batches_done", 0)):
            if index == 4:
                break
            loop.step(x, index, train(model, x * index, optimizer), epoch=epoch)
            yield
    loop.end(model.state_dict())


def accumulates(loop: Loop) -> Iterator[None]:
    model = wrapped(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rates = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    first = loop.begin(model, optimizer, rates=rates)
    yield
    for step in range(first, 16):
        if step % 2:
            loss = model(batch()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step < 14:
                rates.step()
        else:
            with model.no_sync():
                loss = model(batch()).square().mean()
                loss.backward()
        loop.step(loss, rates.get_last_lr())
        yield
    loop.end(model.state_dict(), optimizer.state_dict(), rates.state_dict())


def adversaries(loop: Loop) -> Iterator[None]:
    maker, judge = wrapped(nn.Linear(3, 3)), wrapped(net())
    makes, judges = torch.optim.Adam(maker.parameters(), lr=0.01), torch.optim.RMSprop(judge.parameters(), lr=0.01)
    first = loop.begin({"maker": maker, "judge": judge}, [makes, judges])
    yield
    for step in range(first, 12):
        loss = judge(batch()).mean() - judge(maker(batch()).detach()).mean()
        judges.zero_grad()
        loss.backward()
        judges.step()
        if step % 3 == 2:
            loss = judge(maker(batch())).mean()
            makes.zero_grad()
            loss.backward()
            makes.step()
        loop.step(loss)
        yield
    loop.end(maker.state_dict(), judge.state_dict(), makes.state_dict(), judges.state_dict())


def unfreezes(loop: Loop) -> Iterator[None]:
    """Adds a parameter group in the middle, lets layers be frozen, and goes on with schedulers in turns."""
    module = net()
    model = wrapped(module, find_unused_parameters=True)
    module[0].requires_grad_(False)
    optimizer = torch.optim.SGD([*module[1].parameters(), *module[3].parameters()], lr=0.05, momentum=0.9)
    warm, decay = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)
    rates, plateau = lr_scheduler.SequentialLR(optimizer, [warm, decay], [4]), lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    first = loop.begin(model, optimizer, rates=rates, plateau=plateau)
    yield
    for step in range(first, 12):
        if step == 5:
            module[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(module[0].parameters()), "lr": 0.02})
        loss = train(model, batch(), optimizer)
        if step < 5:
            rates.step()
        else:
            plateau.step(1.0)
        loop.step(loss, [group["lr"] for group in optimizer.param_groups])
        yield
    loop.end(model.state_dict(), optimizer.state_dict(), plateau.state_dict())


def normed(loop: Loop) -> Iterator[None]:
    """Weights that are computed of others: by hooks, the old way, and by parametrizations."""
    old = nn.utils.weight_norm(nn.Linear(3, 6))
    module = nn.Sequential(
        old,
        nn.utils.spectral_norm(nn.Linear(6, 6)),
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        nn.LazyLinear(1),
    )
    module(batch())  # makes the lazy one
    model = wrapped(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = loop.begin(model, optimizer)
    yield
    for _ in range(first, 8):
        loop.step(train(model, batch(), optimizer))
        yield
    loop.end(model.state_dict(), old.weight)


def unzeroed(loop: Loop) -> Iterator[None]:
    """Never zeroes its gradients, which are a momentum of its own; a recurrent layer has a list of its weights."""
    inner = nn.GRU(3, 4)
    model = wrapped(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = loop.begin(model, optimizer)
    yield
    for _ in range(first, 10):
        loss = model(batch())[0].square().mean()
        loss.backward()
        optimizer.step()
        loop.step(loss)
        yield
    loop.end(model.state_dict(), [param.grad for param in model.parameters()])


def generators(loop: Loop) -> Iterator[None]:
    """Generators of the script's own, given as state; seeds in the loop; a sampler's generator; a metric."""
    model, mean = wrapped(net()), MeanMetric()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    drawn, numpy, own = torch.Generator().manual_seed(1), np.random.default_rng(2), random.Random(3)
    old = np.random.RandomState(4)
    sampled = torch.Generator().manual_seed(6)
    loader = loop.loader(rows(), 4, sampler=RandomSampler(rows(), generator=sampled))
    loop.begin({"model": model, "mean": mean}, optimizer, drawn=drawn, numpy=numpy, own=own, old=old, loader=loader)
    yield
    for epoch in range(loop.scalars.get("epoch", 0), 2):
        for (x,) in loader:
            random.seed(loop.steps)
            mean.update(x)
            x = (
                x * torch.rand(x.shape, generator=drawn) * float(numpy.random()) * own.random() * old.rand()
                + random.random()
                + OURS.random()
            )
            loop.step(x, train(model, x, optimizer), epoch=epoch)
            yield
    loop.end(model.state_dict(), mean.compute(), float(numpy.random()))


def _scaled(loader: Any) -> Iterator[torch.Tensor]:
    for (x,) in loader:
        yield x * 2


def _in_turns(loader: Any, other: Any) -> Iterator[torch.Tensor]:
    for (x,) in loader:
        yield x
    for (x,) in other:
        yield x


# What stands between a loader and its loop.
AROUND: dict[str, Callable[[Any, Any], Iterator[torch.Tensor]]] = {
    "mapped": lambda loader, _: map(torch.neg, _scaled(loader)),
    "chained": lambda loader, other: (x for (x,) in itertools.chain(loader, other)),
    "in_turns": _in_turns,
    "in_twos": lambda loader, _: (x - y for (x,), (y,) in zip(*[iter(loader)] * 2, strict=True)),
    "teed": lambda loader, _: (x + y for (x,), (y,) in zip(*itertools.tee(loader), strict=True)),
}


def around(loop: Loop) -> Iterator[None]:
    """Each batch comes by way of something else; another one is drawn ahead, and given as state."""
    model, ahead = wrapped(net()), Ahead()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    size = {"in_twos": 2, "in_turns": 6}.get(loop.name, 4)
    loader, other = loop.loader(rows(), size, shuffle=True), loop.loader(rows(), max(size, 4))
    loop.begin(model, optimizer, loader=loader, other=other, ahead=ahead)
    yield
    for epoch in range(loop.scalars.get("epoch", 0), 1 if loop.name == "chained" else 2):
        for x in AROUND[loop.name](loader, other):
            drawn, ahead.batch = ahead.batch, batch()
            loop.step(x, drawn, train(model, torch.cat([x, drawn]), optimizer), epoch=epoch)
            yield
    loop.end(model.state_dict(), ahead.batch)


class Ahead:
    """The batch that a script has drawn for its next step."""

    def __init__(self) -> None:
        self.batch = batch()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.batch = state["batch"]


def uneven(loop: Loop) -> Iterator[None]:
    """Each rank has more inputs than the one before it, in two epochs."""
    model = wrapped(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loop.is_even = False
    loop.begin(model, optimizer)
    yield
    at = loop.scalars.get("at", 0)
    for epoch in range(loop.scalars.get("epoch", 0), 2):
        with model.join():
            for step in range(at, 3 + 2 * RANK):
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step + 10 * epoch + 100 * RANK))
                loop.step(train(model, x, optimizer), epoch=epoch, at=step + 1)
                if step < 3:
                    loop.flush()
                loop.reached(epoch, step + 1)
                yield
        at = 0
    loop.end(model.state_dict())


def apart(loop: Loop) -> Iterator[None]:
    """Ranks train apart and average every third step, by accelerate, whose count of steps is kept as the warning says."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net())
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    loop.is_replicated = False
    first = loop.begin(model, optimizer)
    yield
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=3) as local_sgd:
        local_sgd.num_steps = loop.scalars.get("local", 0)
        for _ in range(first, 11):
            loss = train(model, batch() + RANK, optimizer)
            local_sgd.step()
            loop.step(loss, local=local_sgd.num_steps)
            yield
    loop.end(model.state_dict(), optimizer.state_dict())


TRAININGS: dict[str, Callable[[Loop], Iterator[None]]] = {
    each.__name__: each
    for each in (scaler, lbfgs, averages, zipped, counted, adversaries, unfreezes, normed, unzeroed, generators, accumulates, uneven, apart)
}
TRAININGS.update(dict.fromkeys(AROUND, around))


def train_in_turns(names: list[str], folder: Path, is_protected: bool, kills: list[str]) -> None:
    """Trains all at once, a step of each in turn: a kill strikes them all. The last one resumes the process's generators, and ends last."""
    together = Record(folder, kills)
    loops = [Loop(name, folder, together, is_protected) for name in names]
    trainings = [TRAININGS[loop.name](loop) for loop in loops]
    for turn in itertools.count():
        trainings = [training for training in trainings if next(training, trainings) is None]
        if not trainings:
            break
        for loop in loops:
            if loop.is_even:
                loop.flush()
        together.reached(turn)


if __name__ == "__main__":
    gemini_ft.init_process_group("gloo")
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(7)
    for name, (options, kills) in json.loads(sys.argv[3]).items():
        train_in_turns(options["trainings"], Path(sys.argv[1]) / name, sys.argv[2] != "ddp", kills)
