"""What the ranks of test_deepspeed_replay.py run: engines whose iterations are computed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed_case import Case, Net, result_of, start
from plain_case import start_ranks
from replay_case import miscompute
from session_case import Recorded

from gemini_ft.errors import ConfigError


def train(case: Case, wrong_at: int = -1, **options: Any) -> dict[str, Any]:
    """Trains to ``case.steps``; rank 1 flips a bit of a gradient on its way, once in the run, in the iteration after ``wrong_at`` steps."""
    told = Recorded()
    rank, _ = start_ranks()
    torch.manual_seed(0)
    net, calls = Net(), [0]
    net.body.weight.register_hook(miscompute(wrong_at, calls))  # type: ignore[no-untyped-call]
    torch.manual_seed(rank)
    engine = start(replace(case, options={**case.options, **options}), net)
    first = engine.global_steps
    while engine.global_steps < case.steps:
        for micro in range(1, case.accumulate + 1):
            calls.append(engine.global_steps if micro == case.accumulate else -2)  # the last one is computed again
            engine.backward(engine(torch.randn(4, 8, dtype=next(net.parameters()).dtype)).square().mean())
            engine.step()
    return result_of(engine, first) | {"told": told.texts}


def refused() -> str:
    """The error of an engine of ZeRO 3."""
    start_ranks()
    with pytest.raises(ConfigError) as refusal:
        start(Case(stage=3, options={"verify": "replay"}), Net())
    return str(refusal.value)
