"""A job that a host is lost of after three steps, and the bytes that each host's network card has counted while the state was restored.

restore_case.py ELEMENTS OUT '{"replicas": 2}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_ft

STEPS = 3
DEVICE = "eth0"  # of a host in a testbed


def counted() -> tuple[int, int]:
    """Bytes that the card of this host has received and sent so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    figures = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{DEVICE}:"))
    return int(figures[0]), int(figures[8])


def main() -> None:
    elements, out, options = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    gemini_ft.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Linear(1000, elements // 1000, bias=False)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    checkpointer = gemini_ft.Checkpointer(model, optimizer, on_late="wait", **options)
    dist.barrier()  # the weights have been sent round that every rank of a new DDP gets
    before = counted()
    start = checkpointer.resume()
    dist.barrier()  # all have what they need
    after = counted()
    if start:
        said = {"received": after[0] - before[0], "sent": after[1] - before[1], "restored": checkpointer.stats.restored, "start": start}
        (out / f"{dist.get_rank()}.{os.environ['GEMINI_HOST_ID']}.json").write_text(json.dumps(said))
        dist.barrier()
        checkpointer.close()
        return
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(1, 1000)).square().mean().backward()
        optimizer.step()
        checkpointer.step()
    checkpointer.flush()
    while True:
        time.sleep(0.1)  # until the test takes a host away


if __name__ == "__main__":
    main()
