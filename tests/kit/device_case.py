"""A small job on a device whose queues lag behind, which tells whether each snapshot is what the loop had; for test_device_waits.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from device_waits import take_away
from lagging_device import delay_training, install
from torch import nn

import gemini_ft
from gemini_ft import accelerator
from gemini_ft.testing import digest
from gemini_ft.wire.worker_messages import Landed
from gemini_ft.worker.snapshot import PendingSnapshot, Snapshotter

SAVED = 4  # iterations whose state is saved; one more is trained, and lost


Missing = tuple[str, str, str]  # a module, a wait as its source has it, and what stands there instead


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        options: of its Checkpointer.
        lag: seconds for which copies beside the training are late.
        training_lag: seconds for which the training's own writes are.
        is_hit: the last snapshot's slot is written to by a stray pointer, between the copy and the checksums that the agent forms.
        missing: the wait that it lacks.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    lag: float = 0.005
    training_lag: float = 0.0
    is_hit: bool = False
    missing: Missing | None = None


def _build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def _train(model: nn.Sequential, optimizer: torch.optim.Optimizer, iteration: int) -> None:
    """One iteration; the second one updates nothing, and writes buffers without a look at them."""
    if iteration == 1:
        model[1].running_mean.mul_(0.5)
        return
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(iteration))
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return digest({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})


def undisturbed() -> list[str]:
    """The state before each iteration, of a loop without snapshots on the CPU."""
    model, optimizer = _build()
    found = []
    for iteration in range(SAVED + 1):
        found.append(_state(model, optimizer))
        _train(model, optimizer, iteration)
    return found


def _hit() -> None:
    """Lets this process's last snapshot be hit: its agent is busy meanwhile, and begins with the checksums when all is copied."""
    declare, landed = Snapshotter._declare, list[int]()

    def land(_self: Snapshotter, _job: PendingSnapshot, upto: int, event: accelerator.Event) -> None:
        event.synchronize()
        landed.append(upto)

    def hit(self: Snapshotter, job: PendingSnapshot) -> None:
        assert job.slot is not None
        if job.iteration == SAVED:
            self.slots[job.slot].view[100] ^= 1
        self._tell(Landed(iteration=job.iteration, upto=landed[-1]))
        declare(self, job)

    vars_of: Any = Snapshotter
    vars_of._land, vars_of._declare = land, hit


def train(case: Case) -> dict[str, Any]:
    """What was resumed, and what became of the snapshots."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        gemini_ft.init_process_group("gloo")
    install(accelerator, case.lag)
    if case.is_hit:
        _hit()
    if case.missing is not None:
        take_away(*case.missing)
    model, optimizer = _build()
    checkpointer = gemini_ft.Checkpointer(model, optimizer, replicated=False, **case.options)
    start, state = 0, _state(model, optimizer)
    if (found := checkpointer.open()) is not None:
        checkpointer.load_tensors()
        start, state = found.iteration, _state(model, optimizer)
    if case.training_lag:
        delay_training(accelerator, case.training_lag)
    for iteration in range(start, SAVED + 1):
        _train(model, optimizer, iteration)
        if iteration < SAVED:
            checkpointer.save(iteration + 1, {})
    checkpointer.flush()
    stats = checkpointer.stats
    checkpointer.close(finished=False)
    return {"start": start, "state": state, "committed": stats.committed, "skipped": stats.skipped}
