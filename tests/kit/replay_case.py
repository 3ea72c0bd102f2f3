"""What the ranks of test_job_replay.py run: loops whose iterations are computed again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from plain_case import Net, start_ranks
from session_case import Recorded, flip
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gemini_ft
from gemini_ft.testing import digest


class Wide(Net):
    """Calls no module for its last layer, as nn.MultiheadAttention does, and is called under autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.drop(torch.relu(self.norm(self.first(x).float())))
        return torch.nn.functional.linear(hidden, self.last.weight, self.last.bias)


def miscompute(at: int, calls: list[int]) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """A hook that flips a bit of a gradient on its way, once in the run, on rank 1."""

    def hook(grad: torch.Tensor) -> torch.Tensor | None:
        done = Path(os.environ["GEMINI_LOG_DIR"]) / "miscomputed"
        if os.environ["RANK"] != "1" or calls[-1] != at or done.exists():
            return None
        done.touch()
        wrong = grad.clone()
        flip(wrong)
        return wrong

    return hook


def train(kind: str, steps: int, wrong_at: int = -1, **options: Any) -> dict[str, Any]:
    """Trains to ``steps``: under "ddp", "fsdp2", or "closure" (DDP, accumulated, gradients come inside the optimizer's step)."""
    told = Recorded()
    rank, _ = start_ranks()
    torch.manual_seed(0)
    net = Wide(16)
    model: Any = fully_shard(net) if kind == "fsdp2" else DistributedDataParallel(net)
    calls = [0]
    if kind != "fsdp2":
        net.first.weight.register_hook(miscompute(wrong_at, calls))  # type: ignore[no-untyped-call]
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    checkpointer = gemini_ft.Checkpointer(model, optimizer, interval=1, **options)
    start = checkpointer.resume()

    def forward() -> Any:
        loss: Any = model(torch.randn(8, 8)).square().mean()
        loss.backward()
        return loss

    for iteration in range(start, steps):
        optimizer.zero_grad()
        if kind == "closure":
            with model.no_sync():
                forward()
        calls.append(iteration)
        if kind == "closure":
            optimizer.step(forward)
        else:
            forward()
            torch.nn.utils.clip_grad_norm_(net.first.parameters(), 1.0)
            optimizer.step()
        checkpointer.step()
        if kind == "ddp":
            checkpointer.flush()  # the fault that comes next damages whole copies of one commit, and none that is still arriving
    checkpointer.close()
    state = {name: getattr(value, "_local_tensor", value) for name, value in net.state_dict().items()}
    return {"start": start, "told": told.texts, "state": digest({"model": state, "rng": torch.get_rng_state()})}
