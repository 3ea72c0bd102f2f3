"""Doubles of optimizers that keep their state in eight bits, in the two ways of public packages."""

from __future__ import annotations

from typing import Any

import torch


class State8bit(torch.Tensor):
    """As torchao keeps state: a tensor that says it is float32 of its parameter's shape, and has codes in uint8 and their scale."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> State8bit:
        made: State8bit = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=torch.float32, device=like.device)
        made.codes, made.scale = torch.full_like(like, 128, dtype=torch.uint8), torch.ones(())
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return args[0] if func is torch.ops.aten.detach.default else NotImplemented


class Wrapped(torch.optim.SGD):
    """Momentum in `State8bit`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p].setdefault("momentum", State8bit(p))
                new = (kept.codes.float() - 128).mul_(0.9 * kept.scale).add_(p.grad)
                kept.scale.copy_(new.abs().max() / 127)
                kept.codes.copy_((new / kept.scale).round().add(128))
                p.sub_(new, alpha=group["lr"])


class Blockwise(torch.optim.SGD):
    """As bitsandbytes keeps momentum: codes in uint8, a maximum per block, and one table of values that all parameters share."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.initialized, self.name2qmap = False, {"dynamic": torch.linspace(-1, 1, 256)}
        self.non_castable_tensor_keys = {"qmap1", "state1", "absmax1"}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.initialized:
            self.initialized = True
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["state1"] = 0, torch.full_like(p, 127, dtype=torch.uint8)
                    state["qmap1"], state["absmax1"] = self.name2qmap["dynamic"], torch.zeros(1)
                state["step"] += 1
                new = state["qmap1"][state["state1"].long()].mul_(state["absmax1"]).mul_(0.9).add_(p.grad)
                state["absmax1"].copy_(new.abs().max().reshape(1))
                state["state1"].copy_((new / state["absmax1"]).add(1).mul(127.5).round())
                p.sub_(new, alpha=group["lr"])
