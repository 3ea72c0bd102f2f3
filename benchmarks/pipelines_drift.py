"""Measures what it costs per step that the ranks of a gradient pipeline are compared: pairs of blocks of steps, with and without.

python benchmarks/pipelines_drift.py --quick
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import common
from gemini_ft.pipeline import GradientSynchronizer

BLOCK, LAYERS = 20, 20  # steps; linear layers of 64 x 64
ROWS: dict[str, Any] = {
    "all-reduce": {},
    "topk 1 %, 4 groups": {"compress": {"method": "topk", "ratio": 0.01}, "fusion": {"groups": 4}},
    "topk 1 % by auto": {"compress": {"method": "topk", "ratio": 0.01}, "sync": "auto"},
}


CLOCKS = {"time": time.perf_counter, "processor time": time.process_time}


def measured(row: str, pairs: int) -> dict[str, list[dict[str, float]]]:
    """Seconds per step of each block by clock, "with" and "without"; the n-th of both are of one pair, in an order that is drawn."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch, drawn = torch.randn(8, 64), random.Random(1)
    found: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    with closing(GradientSynchronizer(model, [{"params": "*", **ROWS[row]}])) as synchronizer:
        drift = synchronizer._drift
        ways = {"with": drift.begin, "without": lambda: None}
        for pair in range(-2, pairs):  # the first ones warm up
            for way in drawn.sample(list(ways), 2):
                drift.begin = ways[way]  # type: ignore[method-assign]
                dist.barrier()
                begin = {name: clock() for name, clock in CLOCKS.items()}
                for _ in range(BLOCK):
                    optimizer.zero_grad()
                    model(batch).square().mean().backward()
                    synchronizer.synchronize()
                    optimizer.step()
                drift.check()
                if pair >= 0:
                    found[way].append({name: (clock() - begin[name]) / BLOCK for name, clock in CLOCKS.items()})
    return found


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {row: measured(row, arguments.pairs) for row in ROWS}
    if dist.get_rank() == 0:
        Path(arguments.out).write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="two ranks, 20 pairs, no report")
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.worlds, arguments.pairs = [2], 20
    if "RANK" in os.environ:
        worker(arguments)
        return
    results: dict[str, Any] = {}
    for world in arguments.worlds:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "found.json")
            command = [sys.executable, __file__, "--pairs", str(arguments.pairs), "--out", str(out)]
            common.run_ranks(command, world=world, mark=f"drift-{os.getpid()}", timeout=1200)
            results |= {f"{row}, {world} ranks": blocks for row, blocks in json.loads(out.read_text()).items()}
    cells, ratios = [], {}
    for (name, blocks), clock in itertools.product(results.items(), CLOCKS):
        each, step = ([block[clock] for block in blocks[way]] for way in ("with", "without"))
        cost = common.interval([one - other for one, other in zip(each, step, strict=True)])
        cells.append([name, clock, f"{1e3 * statistics.median(step):.2f}", *(f"{1e6 * value:.0f}" for value in cost)])
        ratios[f"{name}, {clock}"] = common.ratio(statistics.median(each), statistics.median(step))
    body = common.table(["row", "of rank 0", "ms per step without", "microseconds more (median)", "from", "to (95 %)"], cells)
    print(body)
    if not arguments.quick:
        print(common.write_report("pipelines-drift", "Comparing ranks after every step", body, common.versions(["torch", "gemini-ft"])))
    common.print_result("pipelines_drift", results, ratios)


if __name__ == "__main__":
    main()
