"""Capturing as production does it: the live state into a slot by the copy plan, without an agent."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from gemini_ft.core.layout import Layout, build_layout, plan_reads, stored_specs
from gemini_ft.state import codec
from gemini_ft.state.base import TrainingState
from gemini_ft.state.copies import copy_into
from gemini_ft.state.copy_plan import CopyPlan, MappedSlot
from gemini_ft.state.modules import collect_extras
from gemini_ft.state.survey import survey
from gemini_ft.state.tensors import Source, describe

_SECRET = b"secret of a test"


@contextlib.contextmanager
def slot_of(layout: Layout) -> Iterator[MappedSlot]:
    """A slot as an agent would have given it."""
    fd = os.memfd_create("slot")
    os.ftruncate(fd, max(1, layout.nbytes))
    slot = MappedSlot(fd, 0, layout.nbytes, device=None)
    yield slot
    slot.close()


def shard_of(sources: Sequence[Source], layout: Layout, chunk_bytes: int = 8 * 2**20) -> torch.Tensor:
    """The bytes of a shard, as a worker writes them into its slot."""
    plan = CopyPlan(sources, layout, chunk_bytes)
    plan.stage()
    with slot_of(layout) as slot:
        for number, batch in enumerate(plan.batches):
            slot.write(number, batch)
        return slot.tensor.clone()


def collect(
    models: Mapping[str, nn.Module], optimizers: Sequence[Any], rank: int, world_size: int, replicated: bool
) -> tuple[list[Source], dict[str, Any]]:
    """All tensors of a rank, and its extras."""
    found = survey(models, optimizers)
    return describe(found.live, rank, world_size, replicated), collect_extras(found)


class Taken(NamedTuple):
    """A snapshot of one rank, as bytes."""

    layout: Layout
    shard: torch.Tensor
    extras: bytes


def take(state: TrainingState) -> Taken:
    """A snapshot of the state of a job of one rank."""
    live = state.survey()
    extras = codec.encode(state.extras(), _SECRET)
    sources = state.describe(live, 0, 1)
    layout = build_layout([source.spec for source in sources], 0, 1)
    return Taken(layout, shard_of(sources, layout), extras)


def give(taken: Taken, state: TrainingState) -> None:
    """Restore a snapshot into the state of another process."""
    extras = codec.decode(taken.extras, _SECRET)
    state.check(extras)
    layouts = {0: Layout.from_bytes(taken.layout.to_bytes())}
    sources = state.destinations(stored_specs(0, layouts), 0, 1)
    tensors = {source.spec.name: source.tensor for source in sources}
    for read in plan_reads([source.spec for source in sources], 0, layouts):
        copy_into(tensors[read.name], read.start, read.stop, taken.shard[read.offset : read.offset + read.nbytes])
    state.apply_extras(extras)


class SAM(Optimizer):
    """Sharpness-aware minimisation as it is usually written: an optimizer inside, on the same groups."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not params:  # all are frozen
            return loss
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        loss = closure()
        for p in params:
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        return loss


class Lookahead(Optimizer):
    """Slow weights around another optimizer, written as long ago: it shares that one's groups, and does not call torch's ``__init__``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state, self.steps = defaultdict(dict), 0
        self.slow = [param.detach().clone() for group in self.param_groups for param in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.steps += 1
        for slow, fast in zip(self.slow, (param for group in self.param_groups for param in group["params"]), strict=True):
            if self.steps % 2 == 0:
                fast.data.copy_(slow.lerp_(fast.data, 0.5))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.optimizer.state_dict(), "slow": self.slow, "steps": self.steps}
