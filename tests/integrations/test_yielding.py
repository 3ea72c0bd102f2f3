"""Training comes first: while a backward pass runs, what gemini-ft runs beside it is of a class that interrupts nothing."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_kit import agent_pid
from rank_kit import World
from torch import nn

import gemini_ft

STEPS = 3
Policies = dict[str, set[int]]
seen: Policies = {}  # whose thread -> its scheduling classes; in the process of a rank


def class_of(thread: int, *, yields: bool) -> int:
    """A thread's scheduling class; one that has only just begun gets a moment in which to yield."""
    end = time.monotonic() + 2
    while (found := os.sched_getscheduler(thread)) == os.SCHED_OTHER and yields and time.monotonic() < end:
        time.sleep(0.01)
    return found


def look(_: torch.Tensor) -> None:
    """Notes the class of every thread of the training process that is gemini-ft's, of the training's own, and of the agent's."""
    for thread in threading.enumerate():
        if thread.native_id is not None and (thread is threading.main_thread() or thread.name.startswith("gemini")):
            seen.setdefault(thread.name, set()).add(class_of(thread.native_id, yields=thread is not threading.main_thread()))
    agent = agent_pid(os.environ["GEMINI_RUN_ID"], os.environ["GEMINI_HOST_ID"])
    for task in Path(f"/proc/{agent}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            seen.setdefault("agent", set()).add(os.sched_getscheduler(int(task.name)))


class Net(nn.Module):
    """Looks around in the middle of each backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(look)
        out: torch.Tensor = self.last(hidden).float().square().mean()
        return out


def plain() -> Policies:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    with gemini_ft.Checkpointer(net, optimizer) as checkpointer:
        for _ in range(checkpointer.resume(), STEPS):
            net(torch.ones(4, 8)).backward()
            optimizer.step()
            checkpointer.step()
    return seen


def with_lightning() -> Policies:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            out: torch.Tensor = self.net(batch)
            return out

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="gemini", max_steps=STEPS, **quiet)
    trainer.fit(Module(), DataLoader(torch.ones(40, 8), batch_size=4))
    return seen


def with_deepspeed() -> Policies:
    import gemini_ft.deepspeed

    gemini_ft.init_process_group("gloo")
    net = Net()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True, "gemini": {}}
    optimizer = torch.optim.Adam(net.parameters())
    engine, *_ = gemini_ft.deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(4, 8)))
        engine.step()
    return seen


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("job", [plain, with_lightning, with_deepspeed])
def test_threads_beside_a_backward_pass_are_of_sched_batch(tmp_path: Path, job: Callable[[], Policies]) -> None:
    with World(tmp_path, 1) as world:
        (seen,) = world.outcome(job)
    assert not isinstance(seen, Exception), seen
    assert seen.pop("MainThread") == {os.SCHED_OTHER}
    assert {"gemini-snapshot", "agent"} <= seen.keys()
    assert set().union(*seen.values()) == {os.SCHED_BATCH}, seen
