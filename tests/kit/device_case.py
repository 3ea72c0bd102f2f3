"""A small job on a device whose queues lag behind, which tells whether each snapshot is what the loop had; for test_device_waits.py."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from agent_kit import end_agent, eventually
from device_waits import take_away
from eight_bits import Blockwise
from lagging_device import delay_training, install, is_copying
from torch import nn

import gemini_ft
from gemini_ft import accelerator
from gemini_ft.agent.client import AgentClient
from gemini_ft.state.copy_plan import MappedSlot
from gemini_ft.testing import digest
from gemini_ft.wire.worker_messages import Copied, Landed
from gemini_ft.worker.snapshot import Snapshotter

SAVED = 4  # iterations whose state is saved; one more is trained, and lost


Missing = tuple[str, str, str]  # a module, a wait as its source has it, and what stands there instead


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        options: of its Checkpointer.
        optimizer: one of `OPTIMIZERS`.
        lag: seconds for which copies beside the training are late.
        training_lag: seconds for which the training's own writes are.
        is_hit: the last snapshot's slot is written to by a stray pointer, between the copy and the checksums that the agent forms.
        missing: the wait that it lacks.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "momentum"
    lag: float = 0.005
    training_lag: float = 0.0
    is_hit: bool = False
    missing: Missing | None = None


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "scaled": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "scaled, fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "eight bits": lambda params: Blockwise(params, lr=0.1),
}


class Loop:
    """The objects of the loop, and its iterations."""

    def __init__(self, optimizer: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2, enabled="scaled" in optimizer)

    def train(self, iteration: int) -> None:
        """The second iteration updates nothing, and writes buffers without a look at them; a scaler skips the third one's update."""
        if iteration == 1:
            self.model.get_buffer("1.running_mean").mul_(0.5)
            return
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(iteration))
        loss = self.model(inputs).square().mean()
        if self.scaler.is_enabled():
            self.scaler.scale(loss * torch.inf if iteration == 2 else loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> str:
        """A digest of it all."""
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"], "scaler": self.scaler.state_dict()}
        return digest(parts)


def undisturbed(optimizer: str) -> list[str]:
    """The state before each iteration, of a loop without snapshots on the CPU."""
    loop, found = Loop(optimizer), []
    for iteration in range(SAVED + 1):
        found.append(loop.state())
        loop.train(iteration)
    return found


def _hit() -> None:
    """Lets this process's last snapshot be hit: its agent is busy meanwhile, and begins with the checksums when all is copied."""
    granted, tell, slots, landed = Snapshotter.granted, AgentClient.tell, dict[int, MappedSlot](), list[Landed]()

    def note(self: Snapshotter, iteration: int, slot: int) -> None:
        slots[iteration] = self.slots[slot]
        granted(self, iteration, slot)

    def late(self: AgentClient, message: Any, fds: Any = ()) -> None:
        if isinstance(message, Landed):
            landed.append(message)
            return
        if isinstance(message, Copied):
            slots[message.iteration].view[100] ^= message.iteration == SAVED
            tell(self, landed.pop())
        tell(self, message, fds)

    Snapshotter.granted = note  # type: ignore[method-assign]
    AgentClient.tell = late  # type: ignore[method-assign]


def train(case: Case) -> dict[str, Any]:
    """Returns the iteration that was resumed, and the outcome of each snapshot."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        gemini_ft.init_process_group("gloo")
    install(accelerator, case.lag)
    if case.is_hit:
        _hit()
    if case.missing is not None:
        take_away(*case.missing)
    loop = Loop(case.optimizer)
    checkpointer = gemini_ft.Checkpointer(loop.model, loop.optimizer, **{"replicated": False, **case.options})
    start = 0
    if (found := checkpointer.open()) is not None:
        checkpointer.load_tensors()
        loop.scaler.load_state_dict(found.extras)
        start = found.iteration
    state = loop.state()
    if case.training_lag:
        delay_training(accelerator, case.training_lag)
    for iteration in range(start, SAVED + 1):
        loop.train(iteration)
        if iteration < SAVED:
            checkpointer.save(iteration + 1, loop.scaler.state_dict())
    checkpointer.flush()
    stats = checkpointer.stats
    checkpointer.close(finished=False)
    return {"start": start, "state": state, "committed": stats.committed, "skipped": stats.skipped}


def end_without_close(lag: float) -> list[bool]:
    """Ends as a script does that leaves its Checkpointer open, when its agent has died and copies are under way; returns whether they still
    are, each time that an agent is called.
    """
    call, clients, found = AgentClient.__init__, list[AgentClient](), list[bool]()

    def note(self: AgentClient, *arguments: Any) -> None:
        found.append(is_copying())
        call(self, *arguments)
        clients.append(self)

    AgentClient.__init__ = note  # type: ignore[assignment, method-assign]
    install(accelerator, lag)
    loop = Loop("momentum")
    checkpointer = gemini_ft.Checkpointer(loop.model, loop.optimizer, replicas=1, on_late="wait")
    checkpointer.resume()
    loop.train(0)
    checkpointer.step()
    eventually(is_copying)
    end_agent(checkpointer.run, "host0")
    eventually(lambda: clients[0].lost)
    atexit._run_exitfuncs()
    return found
