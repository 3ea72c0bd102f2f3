"""A job whose snapshots take a while on a slow link: a small model, and a large table that follows its weights.

network_case.py steps out.pt '{"replicas": 2, "pause": 0.1}'
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_ft


class Table(nn.Module):
    """Of which every rank owns a part; nothing of it is ever communicated by the training."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.linspace(-1, 1, elements))

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        self.rows.mul_(0.99).add_(next(model.parameters()).mean())


def main() -> None:
    steps, out, options = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    pause = options.pop("pause", 0.0)
    gemini_ft.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model, table = DistributedDataParallel(nn.Linear(16, 16)), Table(1_000_000)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with gemini_ft.Checkpointer({"model": model, "table": table}, optimizer, **options) as checkpointer:
        for _ in range(checkpointer.resume(), steps):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            table.follow(model)
            checkpointer.step()
            time.sleep(pause)
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "table": table.state_dict(), "optimizer": optimizer.state_dict()}, out)


if __name__ == "__main__":
    main()
