"""Gradient states for tests: one made up of everything there can be, and a loop that synchronises its gradients by hand."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from plain_case import Net, start_ranks
from torch import Tensor

import gemini_ft
from gemini_ft.cli import commands
from gemini_ft.compression.base import Reducer
from gemini_ft.compression.collective import reduce
from gemini_ft.compression.methods import create
from gemini_ft.testing import digest

STEPS = 14


class Toy:
    """Keeps whatever it is given, and what it has loaded."""

    def __init__(self, state: dict[str, Any] | None = None, figures: Mapping[str, Mapping[str, float]] | None = None) -> None:
        self.state, self.figures = state or {}, dict(figures or {})

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = copy.deepcopy(dict(state))

    def summary(self) -> Mapping[str, Mapping[str, float]]:
        return self.figures


def everything(rank: int) -> dict[str, Any]:
    """All kinds of state; shapes differ from rank to rank, keys do not."""
    drawn = torch.Generator().manual_seed(rank)
    return {
        "residuals": {"net.0.weight": torch.randn(5 + rank, 3, generator=drawn), "50%.bias": torch.randn((), generator=drawn)},
        "step": 2**70 + rank,
        "factors": {"net": {"0": torch.randn(4, 6, generator=drawn).t(), "halves": torch.randn(7, generator=drawn).bfloat16()}},
        "nothing": {},
        "counts": torch.arange(3 * rank),  # none on rank 0
        "plan": {"groups": [["net.0.weight"], [0.1, None]], "name": "exact", "measured": float("nan")},
    }


class ByHand:
    """Matrices by top-k with error feedback, the rest by DGC; both hold still."""

    def __init__(self) -> None:
        self.rules: dict[str, Reducer] = {"matrices": create("topk", ratio=0.05), "rest": create("dgc", ratio=0.1, warmup_steps=6)}
        for method in self.rules.values():
            method.hold_still()
        self.step = 0
        self.figures: dict[str, dict[str, float]] = {}

    def synchronise(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Averages over all ranks, a collective for each rule."""
        means: dict[str, Tensor] = {}
        for rule, method in self.rules.items():
            mine = {name: value for name, value in gradients.items() if (value.dim() > 1) == (rule == "matrices")}
            begin = time.perf_counter()
            means |= reduce(method, mine, self.step)
            milliseconds = 1000 * (time.perf_counter() - begin)
            before = sum(value.nbytes for value in mine.values())
            self.figures[rule] = {"bytes_before": before, "bytes_after": before / 8, "communication_ms": milliseconds, "overlap": 0.25}
        self.step += 1
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "rules": {rule: method.state_dict() for rule, method in self.rules.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        for rule, method in self.rules.items():
            method.load_state_dict(state["rules"][rule])

    def summary(self) -> Mapping[str, Mapping[str, float]]:
        return self.figures


def train(out: str, attached: bool = True) -> dict[str, Any]:
    """Train to the end, without DDP; every iteration's loss, weights and residuals go to the file ``<out>.<rank>``, in hex."""
    rank, _ = start_ranks()
    torch.manual_seed(0)
    net = Net(16)
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    pipeline = ByHand()
    options: dict[str, Any] = {"gradients": pipeline} if attached else {}
    checkpointer = gemini_ft.Checkpointer(net, optimizer, replicated=True, on_late="wait", **options)
    start = checkpointer.resume()
    with open(f"{out}.{rank}", "a", buffering=1) as trace:
        for iteration in range(start, STEPS):
            loss = net(torch.randn(8, 8)).square().mean()
            loss.backward()
            means = pipeline.synchronise({name: param.grad for name, param in net.named_parameters() if param.grad is not None})
            for name, param in net.named_parameters():
                param.grad = means[name]
            optimizer.step()
            optimizer.zero_grad()
            trace.write(f"{iteration} {loss.item().hex()} {digest(net.state_dict())} {digest(pipeline.state_dict())}\n")
            checkpointer.step()
    checkpointer.flush()  # what was said before its commit has been heard
    told = {form: _status(*arguments) for form, arguments in (("text", ()), ("json", ("--json",)))}
    restored = checkpointer.stats.restored
    checkpointer.close()
    return {"start": start, "told": told["text"], "document": json.loads(told["json"]), "restored": restored, "figures": pipeline.figures}


def _status(*arguments: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert commands.status(["--run-id", os.environ["GEMINI_RUN_ID"], "--host", os.environ["GEMINI_HOST_ID"], *arguments]) == 0
    return shown.getvalue()
