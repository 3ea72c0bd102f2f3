"""What the ranks of test_export.py and test_dcp_writer.py run: a few steps, the state after them, and the loading of it elsewhere."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plain_case import start_ranks
from session_case import settle
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn.parallel import DistributedDataParallel

import gemini_ft
from gemini_ft.dcp import GeminiReader
from gemini_ft.testing import first_difference

STEPS = 3


@dataclass(frozen=True)
class Odd:
    """A value that only pickle can encode."""

    how: str = "very"


class Net(nn.Module):
    """Uneven shapes, several dtypes, a tied weight, a buffer of each kind, and something frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.ModuleList([nn.Linear(7, 7, bias=False) for _ in range(11)])  # 10 sorts before 2
        self.twin = nn.Linear(7, 7, bias=False)
        self.twin.weight = self.middle[3].get_parameter("weight")
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)
        self.frozen = nn.Parameter(torch.arange(6).to(torch.bfloat16).view(3, 2), requires_grad=False)
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.middle:
            x = torch.tanh(layer(x))
        out: torch.Tensor = self.last(self.norm(self.twin(x)))
        return out


def build(sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    model: nn.Module = net
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net.first)
        fully_shard(net)
    elif dist.is_initialized():
        model = DistributedDataParallel(net)
    groups: list[dict[str, Any]] = [
        {"params": [*net.last.parameters()], "lr": 3e-3},
        {"params": [p for name, p in net.named_parameters() if not name.startswith("last") and p.requires_grad]},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def train(out: str, sharded: bool = False, odd: bool = False, **options: Any) -> None:
    """Train ``STEPS`` steps, write what torch says of the state to ``<out>/live.pt``, and die: the agents keep the last step."""
    start_ranks()
    model, optimizer = build(sharded)
    if odd:
        optimizer.param_groups[1]["odd"] = Odd()
    checkpointer = gemini_ft.Checkpointer(model, optimizer, on_late="wait", replicated=not sharded, **options)
    checkpointer.resume()
    for _ in range(STEPS):
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()
    settle(checkpointer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        live = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=sharded))
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"model": live[0], "optim": live[1]}, Path(out) / "live.pt")


def load_again(sources: dict[str, dict[str, Any]], live: dict[str, str]) -> dict[str, str | None]:
    """Loads each source into new models by ``torch.distributed.checkpoint``, whole and sharded; what differs from the live state then.

    Args:
        sources: name -> arguments of `GeminiReader`.
        live: name -> file with the live state.
    """
    start_ranks()
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    found = {}
    for (name, source), sharded in product(sources.items(), (False, True)):
        flat = "written" not in name and sharded == ("step" in source)
        model, optimizer = build(sharded)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.detach().zero_()
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weights: dict[str, Any]
            optim: dict[str, Any]
            weights, optim = get_state_dict(model, optimizer, options=options)
            if flat:  # as torchtitan lays it out
                document: dict[str, Any] = weights | {"optimizer": optim}
                load(document, storage_reader=GeminiReader(**source, model="", optim="optimizer", flat=True))
                optim, weights = document.pop("optimizer"), document
            else:
                document = {"model": weights, "optim": optim}
                load(document, storage_reader=GeminiReader(**source))
                weights, optim = document["model"], document["optim"]
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optim, options=options)
            again = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=sharded))
        expected = torch.load(live[name], weights_only=False)
        found[f"{name}, {sharded=}, {flat=}"] = first_difference({"model": again[0], "optim": again[1]}, expected)
    return found
