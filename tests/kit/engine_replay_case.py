"""What the ranks of test_deepspeed_replay.py run: engines whose iterations are computed again."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_case import Case, Net, result_of, start
from plain_case import start_ranks
from replay_case import miscompute
from session_case import Recorded, flip
from torch import nn

from gemini_ft.errors import ConfigError


class Tracked(Net):
    """Has a weight outside of all layers, and a dropout by a generator that DeepSpeed tracks."""

    def __init__(self) -> None:
        import deepspeed

        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
        tracker.reset()
        tracker.add("model-parallel-rng", 9 + int(os.environ["RANK"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import deepspeed

        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            x = nn.functional.dropout(x, 0.2)
        out: torch.Tensor = super().forward(x) * self.scale
        return out


def miscompute_update(engine: Any, at: int) -> None:
    """Rank 0 flips a bit in the first weight of the last group as it updates that, once in the run, in the iteration after ``at`` steps."""
    from gemini_ft.deepspeed.partitions import base_optimizer

    done = Path(os.environ["GEMINI_LOG_DIR"]) / "miscomputed_update"
    if os.environ["RANK"] != "0" or engine.global_steps != at or done.exists():
        return
    done.touch()
    base = base_optimizer(engine.optimizer)
    wrong = base.param_groups[-1]["params"][0]

    def hook(optimizer: Any, *_: Any) -> None:
        if optimizer.param_groups[-1]["params"][0] is wrong:
            handle.remove()
            flip(wrong)

    handle = base.register_step_pre_hook(hook)


def train(case: Case, gradient_at: int = -1, update_at: int = -1, **options: Any) -> dict[str, Any]:
    """Trains to ``case.steps``; bits flip in a gradient on rank 1, and in an update on rank 0, in the iterations after so many steps.

    At stage 2 every second iteration calls the loss's own ``backward``.
    """
    told = Recorded()
    rank, _ = start_ranks()
    torch.manual_seed(0)
    net, calls = Tracked(), [0]
    net.body.weight.register_hook(miscompute(gradient_at, calls))  # type: ignore[no-untyped-call]
    torch.manual_seed(rank)
    engine = start(replace(case, options={**case.options, **options}), net)
    first = engine.global_steps
    while engine.global_steps < case.steps:
        miscompute_update(engine, update_at)
        for micro in range(1, case.accumulate + 1):
            calls.append(engine.global_steps if micro == case.accumulate else -2)  # the last one is computed again
            loss = engine(torch.randn(4, 8, dtype=next(net.parameters()).dtype)).square().mean()
            if case.stage == 2 and engine.global_steps % 2:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
    return result_of(engine, first) | {"told": told.texts}


def late(**options: Any) -> dict[str, Any]:
    """Writes a weight after each step. Of each forward pass: whether there were hooks in a layer, and in its weight."""
    told, hooks = Recorded(), list[tuple[bool, bool]]()
    start_ranks()
    torch.manual_seed(0)
    net = Tracked()
    engine = start(Case(options=options), net)
    while engine.global_steps < 9:
        loss = engine(torch.randn(4, 8)).square().mean()
        hooks.append((bool(vars(net.body)["_forward_pre_hooks"]), bool(net.body.weight._backward_hooks)))
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            net.scale.mul_(0.99)
    return result_of(engine, 0) | {"told": told.texts, "hooks": hooks}


def refused() -> str:
    """The error of an engine of ZeRO 3."""
    start_ranks()
    with pytest.raises(ConfigError) as refusal:
        start(Case(stage=3, options={"verify": "replay"}), Net())
    return str(refusal.value)
