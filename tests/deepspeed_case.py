"""What the ranks of tests/test_deepspeed.py run: small models under every stage of DeepSpeed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")


@dataclass(frozen=True)
class Case:
    """One training job; ``config`` is merged into DeepSpeed's configuration."""

    stage: int = 0
    bf16: bool = False
    accumulate: int = 1
    steps: int = 10
    groups: int = 1
    frozen: bool = False
    optimizer: str = "AdamW"  # of torch, or a type for the configuration's optimizer section
    schedule: bool = True
    config: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)


class Net(nn.Module):
    """Buffers that differ between ranks, dropout, and a part that may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(24)
        self.drop = nn.Dropout(0.2)
        self.body = nn.Linear(24, 24)
        self.last = nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.embed(x)))
        out: torch.Tensor = self.last(self.drop(torch.relu(self.body(hidden))))
        return out


def configuration(case: Case) -> dict[str, Any]:
    zero = {"stage": case.stage, "reduce_bucket_size": 5000, "allgather_bucket_size": 100000, "stage3_param_persistence_threshold": 64}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case.accumulate,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "zero_optimization": {**zero, **case.zero},
        "zero_allow_untested_optimizer": True,
        "gemini": {"on_late": "wait"},
    }
    if case.bf16:
        config |= {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}}
    if case.optimizer != "AdamW":
        config["optimizer"] = {"type": case.optimizer, "params": {"lr": 1e-2}}
    return config | case.config


def train(case: Case, out: str) -> dict[str, Any]:
    """Train to the end; every micro-batch's loss goes to the file ``<out>.<rank>``, in hex."""
    import gemini_ft
    import gemini_ft.deepspeed
    from gemini_ft.testing import digest

    gemini_ft.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net()
    if case.frozen:
        net.embed.requires_grad_(False)
    params = [param for param in net.parameters() if param.requires_grad]
    parts = [{"params": params[i :: case.groups], "lr": 1e-2 / (i + 1)} for i in range(case.groups)]
    named: dict[str, Any] = {"optimizer": torch.optim.AdamW(parts, lr=1e-2)} if case.optimizer == "AdamW" else {"model_parameters": parts}
    if case.schedule:
        named["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    torch.manual_seed(rank)
    engine, *_ = gemini_ft.deepspeed.initialize(model=net, config=configuration(case), **named)
    start, dtype = engine.global_steps, torch.bfloat16 if case.bf16 else torch.float32
    with open(f"{out}.{rank}", "a", buffering=1) as trace:
        for step in range(start, case.steps):
            for micro in range(case.accumulate):
                loss = engine(torch.randn(4, 8).to(dtype)).float().square().mean()
                engine.backward(loss)
                engine.step()
                trace.write(f"{step * case.accumulate + micro} {loss.item().hex()} {engine.get_lr()[0].hex()}\n")
    checkpointer = engine.gemini.checkpointer
    live = {item.name: item.tensor for item in checkpointer._state.survey()}
    result = {"start": start, "state": digest({**live, "rng": torch.get_rng_state()}), "restored": checkpointer.stats.restored}
    engine.gemini.close()
    dist.barrier()
    return result
