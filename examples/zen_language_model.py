"""An LSTM learns to write Python, word by word, from the standard library's own source text; its embedding is large and sparse.

    python examples/zen_language_model.py

Four workers train the same model three times: with DDP and a dense gradient of the embedding, with DDP's own sparse path, and
with Zen in a communication hook of DDP. The losses are the same but for rounding; bytes and seconds are not. On a machine of
one's own all traffic goes over loopback, so beside the seconds measured stand those that the bytes alone take at 1 Gbit/s.
As part of a job (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set) it is one worker of it.
"""

import argparse
import os
import re
import socket
import sysconfig
import time
from collections import Counter
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gemini_ft.sync.ddp_hook import HookState, hook
from gemini_ft.sync.zen import Zen

WORKERS = 4
WINDOW = 32  # words
TARGETS = 512  # the most frequent words are predicted, all others as one
RATE = 1e9 / 8  # bytes per second
PATHS = ("DDP, dense", "DDP, sparse", "Zen")


def words(vocabulary: int, megabytes: float) -> torch.Tensor:
    """The standard library as numbers of words, the most frequent one first; rare ones share the last number."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(file.read_text(errors="replace") for file in files)[: int(megabytes * 10**6)]
    found = re.findall(r"\w+|[^\w\s]|\n", text)
    numbers = {word: number for number, (word, _) in enumerate(Counter(found).most_common(vocabulary - 1))}
    return torch.tensor([numbers.get(word, vocabulary - 1) for word in found])


class Model(nn.Module):
    def __init__(self, vocabulary: int, width: int, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, sparse=sparse)
        self.lstm = nn.LSTM(width, 64, batch_first=True)
        self.head = nn.Linear(64, TARGETS)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(window))[0])


def train(path: str, text: torch.Tensor, arguments: argparse.Namespace) -> tuple[float, float]:
    """Train for so many steps; (last loss, seconds per step)."""
    torch.manual_seed(0)
    model = Model(arguments.vocabulary, arguments.width, sparse=path != "DDP, dense")
    ddp = DistributedDataParallel(model)
    if path == "Zen":
        ddp.register_comm_hook(HookState(sparse=Zen()), hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    random = torch.Generator().manual_seed(dist.get_rank())
    begin = 0.0
    for step in range(arguments.steps + 1):
        if step == 1:  # the first step makes buffers and connections
            begin = time.perf_counter()
        starts = torch.randint(0, len(text) - WINDOW - 1, (arguments.batch, 1), generator=random)
        window = text[starts + torch.arange(WINDOW + 1)]
        loss = F.cross_entropy(ddp(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten().clamp(max=TARGETS - 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size(), (time.perf_counter() - begin) / arguments.steps


def sent() -> int:
    """Bytes that have left by any interface of this host."""
    return psutil.net_io_counters().bytes_sent


def worker(arguments: argparse.Namespace, workers_here: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text = words(arguments.vocabulary, arguments.megabytes)
    rows = {}
    for path in arguments.paths:
        dist.barrier()
        before = sent()
        loss, seconds = train(path, text, arguments)
        dist.barrier()
        rows[path] = loss, seconds, (sent() - before) / workers_here / (arguments.steps + 1)
    if dist.get_rank() == 0:
        report(rows)
    dist.destroy_process_group()


def report(rows: dict[str, tuple[float, float, float]]) -> None:
    print(f"{'':12} {'last loss':>10} {'s per step':>11} {'MB sent per worker and step':>28} {'s at 1 Gbit/s':>14}")
    for path, (loss, seconds, nbytes) in rows.items():
        print(f"{path:12} {loss:10.4f} {seconds:11.4f} {nbytes / 1e6:28.2f} {nbytes / RATE:14.4f}")
    if "Zen" in rows:
        _, seconds, nbytes = rows["Zen"]
        for path in rows.keys() - {"Zen"}:
            saved, gained = rows[path][2] - nbytes, rows[path][1] - seconds
            print(f"Zen against {path}: saves {saved / 1e6:.2f} MB and {gained:.4f} s per step ({saved / RATE:.4f} s at 1 Gbit/s)")


def spawned(rank: int, arguments: argparse.Namespace, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORKERS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    worker(arguments, WORKERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="windows per worker and step")
    parser.add_argument("--vocabulary", type=int, default=40_000)
    parser.add_argument("--width", type=int, default=128, help="of a row of the embedding")
    parser.add_argument("--megabytes", type=float, default=3.0, help="of text")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments, workers_here=1)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(spawned, (arguments, port), WORKERS)


if __name__ == "__main__":
    main()
