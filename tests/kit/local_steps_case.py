"""What the ranks of test_local_steps.py run: steps that ranks make alone, beside the same in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from pipeline_case import alike, error_of
from plain_case import Net, start_ranks
from sync_case import join
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import gemini_ft
from gemini_ft.testing import digest, first_difference

STEPS = 9
SGD = {"lr": 0.5, "momentum": 0.9, "nesterov": False}
DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
TOPK = {"method": "topk", "ratio": 0.3}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training of `STEPS` steps: the rule's options, whether in DDP, micro-batches of a step, the parameters' dtype."""

    rule: Mapping[str, Any] = field(default_factory=dict)
    ddp: bool = False
    micro: int = 1
    dtype: torch.dtype = torch.float32
    names: str = "*"  # that the rule is for; the others' gradients are averaged
    skips: bool = False  # whether one rank leaves an update out in which an outer step is due, as a loss scaler does


CASES = {
    f"{what}, DDP={ddp}": Case(ddp=ddp, **options)
    for ddp in (False, True)
    for what, options in {
        "the plain average": {"rule": {"every": 3}},
        "momentum": {"rule": {"every": 3, "outer": SGD}},
        "DiLoCo": {"rule": {"every": 3, "outer": DILOCO}},
        "each step": {"rule": {"every": 1, "outer": DILOCO}},
        "fragments": {"rule": {"every": 4, "outer": DILOCO, "fragments": 2}},
        "micro-batches": {"rule": {"every": 3, "outer": DILOCO}, "micro": 2},
        "bfloat16": {"rule": {"every": 3, "outer": DILOCO}, "dtype": torch.bfloat16},
        "only some": {"rule": {"every": 3, "outer": DILOCO}, "names": "0.*"},
        "a step left out": {"rule": {"every": 3, "outer": DILOCO}, "skips": True},
    }.items()
}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def loss_of(model: nn.Module, step: int, micro: int, rank: int, dtype: torch.dtype) -> Any:
    given = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)).to(dtype)
    return model(given).square().sum()


def in_one_process(case: Case) -> list[nn.Module]:
    """The models of all ranks after `STEPS` steps, with torch's own SGD as the outer optimizer. Written by the papers, not by our code."""
    world, rule = dist.get_world_size(), {"outer": {"lr": 1.0}, "fragments": 1, **case.rule}
    models: list[nn.Module] = [network(case.dtype) for _ in range(world)]
    inner = [torch.optim.AdamW(model.parameters(), 1e-2) for model in models]
    anchor = network(case.dtype).float()
    outer = torch.optim.SGD(anchor.parameters(), **rule["outer"])
    names = [name for name, _ in anchor.named_parameters()]
    local = {name for name in names if case.names == "*" or name.startswith(case.names[:2])}
    last_first = [name for name in reversed(names) if name in local]
    sizes = [anchor.get_parameter(name).numel() for name in last_first]
    fragment = {name: sum(sizes[:place]) * rule["fragments"] // sum(sizes) for place, name in enumerate(last_first)}
    stale: nn.Module | None = (
        None  # the one that has left an update out, before the outer step, which it makes after its next backward pass
    )
    for step in range(STEPS):
        for rank, model in enumerate(models):
            inner[rank].zero_grad()
            trained = stale if stale is not None and rank == 1 else model
            for micro in range(case.micro):
                loss_of(trained, step, micro, rank, case.dtype).backward()
            for param, other in zip(model.parameters(), trained.parameters(), strict=True):
                param.grad = other.grad
        for name in set(names) - local:
            mean = torch.stack([_gradient(model, name) for model in models]).sum(0) / world
            for model in models:
                model.get_parameter(name).grad = mean.clone()
        is_left_out = case.skips and step == 2
        for rank, optimizer in enumerate(inner):
            if not (is_left_out and rank == 1):
                optimizer.step()
        stale = deepcopy(models[1]) if is_left_out else None
        if stale is not None:
            stale.zero_grad()
        turn, parts = (step + 1) % rule["every"], rule["fragments"]
        _outer_step(
            models, anchor, outer, {name for name in local if turn == (fragment[name] + 1) * rule["every"] // parts % rule["every"]}
        )
    return models


def _gradient(model: nn.Module, name: str) -> torch.Tensor:
    found = model.get_parameter(name).grad
    assert found is not None
    return found


@torch.no_grad()
def _outer_step(models: list[nn.Module], anchor: nn.Module, outer: torch.optim.Optimizer, due: set[str]) -> None:
    outer.zero_grad()
    for name in due:
        start = anchor.get_parameter(name)
        start.grad = torch.stack([start - model.get_parameter(name).float() for model in models]).sum(0) / len(models)
    outer.step()
    for name in due:
        for model in models:
            model.get_parameter(name).copy_(anchor.get_parameter(name))


def on_each_rank(case: Case) -> nn.Module:
    """This rank's model after `STEPS` steps of its own."""
    model, rank = network(case.dtype), dist.get_rank()
    wrapped: Any = DistributedDataParallel(model) if case.ddp else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with closing(gemini_ft.GradientSynchronizer(wrapped, [{"params": case.names, **case.rule}])) as synchronizer:
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(case.micro):
                last = micro == case.micro - 1
                with contextlib.nullcontext() if last else wrapped.no_sync() if case.ddp else synchronizer.no_sync():
                    loss_of(wrapped, step, micro, rank, case.dtype).backward()
            if not case.ddp:
                synchronizer.synchronize()
            if not (case.skips and step == 2 and rank == 1):
                optimizer.step()
    return model


def differences(cases: Mapping[str, Case]) -> dict[str, str | None]:
    """Case -> where this rank's model differs from what one process makes of all ranks' data; None: nowhere, in bits."""
    join()
    found = {}
    for name, case in cases.items():
        expected = in_one_process(case)[dist.get_rank()]
        found[name] = first_difference(on_each_rank(case).state_dict(), expected.state_dict())
    return found


def compressed() -> tuple[bool, bool, list[int]]:
    """Whether ranks differ between two averages, whether they are alike after one, and the bytes of each average, before and after."""
    rank, model = join().rank(), network()
    optimizer, between = torch.optim.AdamW(model.parameters(), 1e-2), list[bool]()
    with closing(gemini_ft.GradientSynchronizer(model, [{"params": "*", "every": 3, "outer": DILOCO, "compress": TOPK}])) as synchronizer:
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step, 0, rank, torch.float32).backward()
            synchronizer.synchronize()
            optimizer.step()
            between.append(alike(digest(model.state_dict())))
        figures = next(value for name, value in synchronizer.summary().items() if name.startswith("1:"))
    return any(between[:2] + between[3:5]), between[2] and between[5], [int(figures["bytes_before"]), int(figures["bytes_after"])]


def refusals() -> list[str]:
    """What is said where others average between two averages, or ranks are not all there."""
    join()
    model = network()
    with closing(gemini_ft.GradientSynchronizer(model, [{"params": "*", "every": 2}])) as synchronizer:
        loss_of(model, 0, 0, 0, torch.float32).backward()
        synchronizer.synchronize()
        said = [error_of(ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1).step)]
    wrapped = DistributedDataParallel(network())
    with closing(gemini_ft.GradientSynchronizer(wrapped, [{"params": "*", "every": 2}])), wrapped.join():
        said.append(error_of(loss_of(wrapped, 0, 0, 0, torch.float32).backward))
    return said


def train(out: str) -> int:
    """Trains to the end, with ring8 beside local steps; loss, weights and anchors of each iteration go to ``<out>.<rank>``."""
    rank, _ = start_ranks()
    torch.manual_seed(0)
    net = Net(16)
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    rules = [{"params": "last.*", "sync": "ring8"}, {"params": "*", "every": 4, "outer": DILOCO, "fragments": 2, "compress": TOPK}]
    synchronizer = gemini_ft.GradientSynchronizer(net, rules)
    checkpointer = gemini_ft.Checkpointer(net, optimizer, replicated=True, on_late="wait")
    start = checkpointer.resume()
    with open(f"{out}.{rank}", "a", buffering=1) as trace:
        for iteration in range(start, 16):
            optimizer.zero_grad()
            loss = net(torch.randn(8, 8)).square().mean()
            loss.backward()
            synchronizer.synchronize()
            optimizer.step()
            trace.write(
                f"{iteration} {loss.item().hex()} {digest(net.state_dict())} {digest(synchronizer.state_dict()['outer']['anchors'])}\n"
            )
            checkpointer.step()
    checkpointer.close()
    synchronizer.close()
    return start
