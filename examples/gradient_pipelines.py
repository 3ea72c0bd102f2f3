"""A byte-level language model learns from the standard library's own source text, under several gradient pipelines.

    python examples/gradient_pipelines.py

Four workers train the same model once per pipeline and once with DDP alone. Its embedding of pairs of bytes is large, and a batch
touches few of its rows. On a machine of one's own all traffic goes over loopback, so beside the seconds measured stand those that
the bytes alone take at 1 Gbit/s. As part of a job (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set) it is one worker of it.
"""

import argparse
import os
import socket
import sysconfig
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gemini_ft

WORKERS = 4
WINDOW = 24  # bytes
RATE = 1e9 / 8  # bytes per second
PIPELINES: dict[str, list[dict[str, Any]]] = {
    "bf16": [{"params": "*", "compress": "bf16"}],
    "zen": [{"params": "pairs.*", "sync": "zen"}],
    "zen + powersgd": [
        {"params": "pairs.*", "sync": "zen"},
        {"params": "lstm.weight*", "compress": {"method": "powersgd", "rank": 4}},
    ],
    "topk, layer-wise": [{"params": "*", "compress": {"method": "topk", "ratio": 0.01}, "fusion": "layer-wise"}],
    "topk, cupcake": [{"params": "*", "compress": {"method": "topk", "ratio": 0.01}, "fusion": "cupcake"}],
    "auto": [{"params": "pairs.*", "sync": "auto"}, {"params": "*", "fusion": "auto"}],
}
NAMES = ("DDP", *PIPELINES)


class Model(nn.Module):
    """Predicts the byte after each pair of bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pairs = nn.Embedding(256 * 256, width)
        self.lstm = nn.LSTM(width, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.pairs(256 * window[:, :-1] + window[:, 1:]))[0])


def text(megabytes: float) -> torch.Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)[: int(megabytes * 10**6)]), dtype=torch.uint8).long()


def train(name: str, data: torch.Tensor, arguments: argparse.Namespace) -> tuple[float, float, int]:
    """(Loss of the last step, seconds per step, bytes that this host has sent) after the steps in which plans are made."""
    torch.manual_seed(0)
    model: nn.Module = Model(arguments.width)
    synchronizer = None
    if name == "DDP":
        model = DistributedDataParallel(model)
    else:
        synchronizer = gemini_ft.GradientSynchronizer(model, PIPELINES[name], profile_steps=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    random = torch.Generator().manual_seed(dist.get_rank())
    begin, before = 0.0, 0
    for step in range(arguments.warmup + arguments.steps):
        if step == arguments.warmup:
            dist.barrier()
            begin, before = time.perf_counter(), sent()
        starts = torch.randint(0, len(data) - WINDOW - 1, (arguments.batch, 1), generator=random)
        window = data[starts + torch.arange(WINDOW + 1)]
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if synchronizer is not None:
            synchronizer.synchronize()
        optimizer.step()
    dist.barrier()
    seconds, nbytes = (time.perf_counter() - begin) / arguments.steps, sent() - before
    total = loss.detach()
    dist.all_reduce(total)
    if synchronizer is not None:
        synchronizer.close()
    return float(total) / dist.get_world_size(), seconds, nbytes


def sent() -> int:
    """Bytes that have left by any interface of this host."""
    return psutil.net_io_counters().bytes_sent


def worker(arguments: argparse.Namespace, workers_here: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = text(arguments.megabytes)
    if dist.get_rank() == 0:
        print(f"{'':18} {'last loss':>10} {'s per step':>11} {'MB sent per worker and step':>28} {'s at 1 Gbit/s':>14}", flush=True)
    for name in arguments.pipelines:
        loss, seconds, total = train(name, data, arguments)
        nbytes = total / workers_here / arguments.steps
        if dist.get_rank() == 0:
            print(f"{name:18} {loss:10.4f} {seconds:11.4f} {nbytes / 1e6:28.2f} {nbytes / RATE:14.4f}", flush=True)
    dist.destroy_process_group()


def spawned(rank: int, arguments: argparse.Namespace, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORKERS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    worker(arguments, WORKERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="that are measured")
    parser.add_argument("--warmup", type=int, default=100, help="steps before, in which plans are made")
    parser.add_argument("--batch", type=int, default=16, help="windows per worker and step")
    parser.add_argument("--width", type=int, default=32, help="of a row of the embedding")
    parser.add_argument("--megabytes", type=float, default=3.0, help="of text")
    parser.add_argument("--pipelines", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--quick", action="store_true", help="a smaller model and few steps")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.warmup, arguments.batch, arguments.width, arguments.megabytes = 3, 6, 4, 4, 0.3
    if "RANK" in os.environ:
        worker(arguments, workers_here=1)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(spawned, (arguments, port), WORKERS)


if __name__ == "__main__":
    main()
