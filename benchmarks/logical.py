"""The price of `elastic: exact`: steps of logical ranks beside steps of DDP that accumulates as much, in the same two workers.

Blocks of both take turns. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import common

WORKERS, LAYERS, BATCH = 2, 8, 16


def worker(folder: Path, megabytes: int, count: int, blocks: int) -> None:
    """One worker: the seconds of a step in each block, of DDP and of logical ranks."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import gemini_ft

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    random.seed(0)
    np.random.seed(0)
    gemini_ft.init_process_group("gloo")
    width = int((megabytes * 1e6 / 4 / LAYERS) ** 0.5)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())))

    plain, carried = DistributedDataParallel(made()), made()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in (plain, carried)]
    checkpointer = gemini_ft.Checkpointer(carried, optimizers[1], elastic="exact")
    ranks = checkpointer.logical_ranks(count)
    checkpointer.resume()
    batches = [torch.randn(BATCH, width) for _ in range(count // WORKERS)]

    def step_of_ddp() -> None:
        for batch in batches[:-1]:
            with plain.no_sync():
                plain(batch).square().mean().backward()
        plain(batches[-1]).square().mean().backward()

    def step_of_ranks() -> None:
        for rank, batch in zip(ranks, batches, strict=True):
            with rank:
                carried(batch).square().mean().backward()
        ranks.reduce()

    seconds: dict[str, list[float]] = {"ddp": [], "exact": []}
    for block in range(-1, blocks):  # the first one warms up
        for name, gradients, optimizer in zip(seconds, (step_of_ddp, step_of_ranks), optimizers, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(5):
                gradients()
                optimizer.step()
                optimizer.zero_grad()
            if block >= 0:
                seconds[name].append((time.perf_counter() - begin) / 5)
    (folder / f"{megabytes}.{count}.{dist.get_rank()}").write_text(json.dumps(seconds))
    checkpointer.close()


def trial(megabytes: int, count: int, blocks: int) -> dict[str, float]:
    """Medians over blocks, of the slower worker, and of the ratios of neighbouring blocks."""
    from gemini_ft.testing import EmulatedHosts

    with tempfile.TemporaryDirectory() as name:
        given = {"worker": name, "megabytes": megabytes, "ranks": count, "blocks": blocks}
        program = [__file__, *(f"--{option}={value}" for option, value in given.items())]
        with EmulatedHosts(WORKERS, program, Path(name), env=common.one_thread()) as hosts:
            hosts.finish(900)
        said = [json.loads((Path(name) / f"{megabytes}.{count}.{rank}").read_text()) for rank in range(WORKERS)]
    both = {kind: [max(each) for each in zip(*(found[kind] for found in said), strict=True)] for kind in ("ddp", "exact")}
    ratios = [exact / ddp for ddp, exact in zip(both["ddp"], both["exact"], strict=True)]
    return {kind: statistics.median(values) for kind, values in both.items()} | {"ratio": statistics.median(ratios)}


def main() -> None:
    """Measure, write the report, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 MB of gradients, no report")
    parser.add_argument("--blocks", type=int, default=15, help="of five steps each, of both kinds")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--megabytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker, options.megabytes, options.ranks, options.blocks)
        return
    sizes, blocks = ((4,), 3) if options.quick else ((4, 64), options.blocks)
    results = {f"{size} MB, {count} ranks": trial(size, count, blocks) for size in sizes for count in (2, 4, 8)}
    ratios = {name: found["ratio"] for name, found in results.items()}
    if not options.quick:
        rows = [
            (name, *(f"{1 / found[kind]:.1f}" for kind in ("ddp", "exact")), f"{found['ratio']:.2f}") for name, found in results.items()
        ]
        header = ("gradients", "steps per second, DDP", "steps per second, exact", "seconds of a step, exact / DDP")
        body = (
            f"{WORKERS} workers over loopback, gloo, one thread each; {blocks} blocks of five steps of both in turn: medians, and the "
            "median of the ratios of neighbours. DDP accumulates where a worker has several logical ranks. Load average at the end: "
            f"{os.getloadavg()[0]:.0f}."
        )
        common.write_report(
            "logical", "The price of elastic: exact", f"{body}\n\n{common.table(header, rows)}", common.versions(("torch", "gemini-ft"))
        )
    common.print_result("logical", results, ratios)


if __name__ == "__main__":
    main()
