"""The training loops that the ranks of test_plain_oddities.py run: their layout, flags and optimizers change while they train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capture_kit import SAM
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.utils._pytree import tree_map_only

import gemini_ft
from gemini_ft.errors import StateError
from gemini_ft.state.rebuilding import Changes
from gemini_ft.testing import digest

STEPS = 14


class Net(nn.Module):
    """A model with a backbone that is frozen at first, an embedding that writes its weight in forward, and a buffer that grows."""

    seen: torch.Tensor

    def __init__(self, max_norm: float | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, max_norm=max_norm)
        self.backbone = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)
        self.extra: nn.Module = nn.Identity()
        self.scale = 1.0
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(torch.tanh(self.backbone(self.embed(x))))
        if self.training:
            self.seen = torch.cat([self.seen, out.detach().mean().view(1)])[-6:]
        return self.extra(self.head(out + self.seen.sum() * 1e-2)) * self.scale  # type: ignore[no-any-return]


def train(what: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train to the end; each iteration's loss goes to the file ``<out>.<rank>``, in hex."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        gemini_ft.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net(1.0 if what == "everything" else None)
    model: nn.Module = net
    if what == "sharded":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (net.backbone, net.head, net):
            fully_shard(part, mesh=mesh)
        torch.manual_seed(dist.get_rank())
    elif dist.is_initialized():
        net.backbone.requires_grad_(True)  # DDP sorts its parameters when it is made
        model = wrapper = DistributedDataParallel(net)
        if what == "local":
            state: Any = post_localSGD_hook.PostLocalSGDState(None, None, 1)  # type: ignore[no-untyped-call]
            wrapper.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        else:
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
            wrapper.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizers: list[Any] = [torch.optim.Adam(net.parameters(), lr=0.02)]
    if model is net:
        sharp = SAM([*net.embed.parameters(), *net.norm.parameters()], torch.optim.Adam, lr=0.02)
        optimizers = [sharp, torch.optim.SGD(net.head.parameters(), 0.1, 0.9)]

    def rebuild(changes: Changes) -> None:
        if "model.extra.weight" in changes.tensors:
            _grow(net, optimizers)

    checkpointer = gemini_ft.Checkpointer(model, optimizers, on_late="wait", rebuild=rebuild if what == "everything" else None, **options)
    start = checkpointer.resume()
    with open(f"{out}.{os.environ['RANK']}", "a", buffering=1) as trace:
        for iteration in range(start, STEPS):
            if model is net:
                _change(net, optimizers, iteration)
            x = torch.randint(12, (6,))

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                loss: torch.Tensor = model(x).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            loss = closure()
            optimizers[0].step(closure)
            optimizers[0].zero_grad()
            if len(optimizers) > 1 and iteration % 3 == 2:
                optimizers[1].step()
                optimizers[1].zero_grad()
            trace.write(f"{iteration} {float(loss).hex()}\n")
            checkpointer.step()
    checkpointer.close()
    final = {"model": net.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    final = tree_map_only(DTensor, DTensor.to_local, final)
    return {"start": start, "state": digest(final), "frozen": [name for name, p in net.named_parameters() if not p.requires_grad]}


def _change(net: Net, optimizers: list[Any], iteration: int) -> None:
    """Makes the changes that a loop makes once, and not again after a restart."""
    if iteration == 4:
        net.backbone.requires_grad_(True)
        optimizers[1].add_param_group({"params": list(net.backbone.parameters()), "lr": 0.05})
        net.norm.eval()
    if iteration == 6:
        net.scale = 0.5
        if not dist.is_initialized():
            prune.l1_unstructured(net.head, "weight", amount=4)  # type: ignore[no-untyped-call]
    if iteration == 8 and not dist.is_initialized():
        _grow(net, optimizers)


def _grow(net: Net, optimizers: list[Any]) -> None:
    """Appends a layer, which nobody but the script can build."""
    net.extra = nn.Linear(4, 4)
    optimizers[1].add_param_group({"params": list(net.extra.parameters()), "lr": 0.01})


def stranger(out: str) -> str:
    """Steps with an optimizer that the Checkpointer was not given; returns the error."""
    net = nn.Linear(2, 2)
    checkpointer = gemini_ft.Checkpointer(net, torch.optim.SGD(net.parameters(), 0.1))
    checkpointer.resume()
    other = torch.optim.Adam(net.parameters())
    net(torch.ones(2)).sum().backward()
    other.step()
    try:
        checkpointer.step()
    except StateError as error:
        Path(out).write_text(str(error))
    checkpointer.close()
    return Path(out).read_text()
