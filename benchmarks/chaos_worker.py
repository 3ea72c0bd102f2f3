"""The job that `chaos.py` disturbs: a loop with BatchNorm, dropout, data of each rank's own, and a hash over all losses of a rank."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_ft
from gemini_ft.testing import digest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.01, help="seconds after each step")
    parser.add_argument("--out", type=Path, required=True, help="folder for what each rank ends with")
    torch.set_num_threads(1)
    gemini_ft.run(partial(train, parser.parse_args()))


def train(options: argparse.Namespace) -> None:
    told: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: told.append(number))
    gemini_ft.init_process_group("gloo", timedelta(seconds=60))  # one that is stopped before it comes is known to nobody
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    torch.manual_seed(1000 + rank)
    with gemini_ft.Checkpointer(model, optimizer, state={"scheduler": scheduler}) as checkpointer:
        for _ in range(checkpointer.resume(), options.steps):
            if told:
                raise OSError("told to fail")  # of a kind that may go away
            loss = model(torch.randn(8, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            so_far = checkpointer.scalars.get("losses", "")
            checkpointer.step(losses=hashlib.sha256(f"{so_far}{loss.item().hex()}".encode()).hexdigest())
            time.sleep(options.pause)
        end = {
            "losses": checkpointer.scalars["losses"],
            "state": digest({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}),
        }
        written = options.out / f"{rank}.{os.getpid()}"
        written.write_text(json.dumps(end))
        written.rename(options.out / f"{rank}.json")


if __name__ == "__main__":
    main()
