"""The job of benchmarks/storage_nemesis.py: a loop without end, every iteration of which is written down bit for bit."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from plain_case import Net, start_ranks
from session_case import Recorded
from torch.nn.parallel import DistributedDataParallel

import gemini_ft
from gemini_ft.testing import digest


def work(out: str, until: int, pause: float, options: dict[str, Any] | None) -> dict[str, Any]:
    """Train until iteration ``until``, without a Checkpointer where there are no options.

    Says where it began, and after each iteration its number, loss and state.

    Lines go to the file ``<out>.<rank>``: ``start ITERATION SOURCE``, ``ITERATION LOSS``, every tenth ``state ITERATION DIGEST``.
    """
    told = Recorded()
    rank, world = start_ranks()
    torch.manual_seed(0)
    net = Net(16)
    model = DistributedDataParallel(net) if world > 1 else net
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with open(f"{out}.{rank}", "a", buffering=1) as trace:
        checkpointer = gemini_ft.Checkpointer(model, optimizer, **options) if options is not None else None
        start = checkpointer.resume() if checkpointer is not None else 0
        source = "+".join(sorted(checkpointer.stats.restored)) if checkpointer is not None else ""
        trace.write(f"start {start} {source or 'nothing'}\n")
        for iteration in range(start, until):
            loss = model(torch.randn(8, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.write(f"{iteration} {loss.item().hex()}\n")
            if iteration % 10 == 0:
                trace.write(f"state {iteration} {digest([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()])}\n")
            if checkpointer is not None:
                checkpointer.step()
            time.sleep(pause)
        os.fsync(trace.fileno())
    return {"start": start, "told": told.texts}
