"""What the ranks of tests/test_session_errors.py run: jobs that must be refused, or go on in a defined way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from plain_case import start_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_ft


class Recorded(logging.Handler):
    """What the user is told."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("gemini_ft").addHandler(self)
        logging.getLogger("gemini_ft").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def loop(
    steps: int,
    width: int = 8,
    state: tuple[str, ...] = (),
    during: Callable[[int, nn.Module, torch.optim.Optimizer, gemini_ft.Checkpointer], None] | None = None,
    per_rank: bool = False,
    crash_at: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """``steps`` iterations from wherever the run is; what the ranks were told, and where they began."""
    told = Recorded()
    rank, world = start_ranks()
    torch.manual_seed(rank if per_rank else 0)
    net: nn.Module = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))
    model = DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedulers = {name: torch.optim.lr_scheduler.StepLR(optimizer, 5) for name in state}
    options = {"on_late": "wait", "timeout": 10.0} | options
    checkpointer = gemini_ft.Checkpointer(model, optimizer, state=schedulers, **options)
    start = checkpointer.resume()
    if crash_at is not None and start >= crash_at:
        raise RuntimeError("the script crashes")
    for iteration in range(start, start + steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        checkpointer.step(iteration=iteration)
        if during is not None:
            during(iteration, net, optimizer, checkpointer)
    settle(checkpointer)
    stats = checkpointer.stats
    return {
        "start": start,
        "told": told.texts,
        "committed": stats.committed,
        "scalars": dict(checkpointer.scalars),
        "restored": stats.restored,
    }


def settle(checkpointer: gemini_ft.Checkpointer) -> None:
    """Until the last snapshot is committed, or given up."""
    recorder = checkpointer._recorder
    assert recorder is not None
    end = time.monotonic() + 20
    while recorder._ended and time.monotonic() < end:
        time.sleep(0.01)


def scribble(iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer) -> None:
    """Write a parameter just after the snapshot was begun, in the third iteration."""
    if iteration == 2:
        with torch.no_grad():
            net[0].weight.add_(1)  # type: ignore[index, operator, union-attr]
