"""One host of benchmarks/sparse_sync.py: every scheme on every trace, in turns; rank 0 writes what was measured as JSON.

Arguments: a JSON object with rows, width, bits (per second, of the link), traces, schemes, budget (seconds per scheme), folder.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from gemini_ft.sync import auto, costs
from gemini_ft.sync.auto import Auto
from gemini_ft.sync.backends import open_exchange
from gemini_ft.sync.base import Scheme
from gemini_ft.sync.partition import EvenPartition, HashedPartition, Partition, RotatedPartition, group_by_part, hierarchical_hash, murmur
from gemini_ft.sync.rows import SparseRows, to_rows, union
from gemini_ft.sync.schemes import SCHEMES
from gemini_ft.sync.zen import Zen
from traces import TRACES, Trace

MOST_ROUNDS, LEAST_ROUNDS = 15, 3
SHORT = 1.0  # seconds: a scheme that takes less is called once more before each call that is measured
TRIES = 3  # of each way of grouping
SEED = 1
FORMULAS = {"torch, sparse": "agsparse"}  # schemes under another name: gloo gathers all ranks' indices and values


@dataclass
class Point:
    """One scheme on one trace; figures are medians over rounds."""

    trace: str
    scheme: str
    times: list[float]  # of the slowest host, by round
    seconds: float
    formula_seconds: float
    mbytes: float  # that the busiest host sent
    formula_mbytes: float
    cpu: float  # share of the machine's processors that were busy
    chosen: str = ""  # by Auto


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    points: list[Point] = []
    described = {}
    for name in job["traces"]:
        gradient = TRACES[name].gradient(dist.get_rank(), job["rows"], job["width"])
        traffic, found = _describe(TRACES[name], gradient, job)
        described[name] = found
        points += _measure(name, gradient, traffic, job)
    if dist.get_rank() == 0:
        report = {"points": [asdict(point) for point in points], "traces": described}
        Path(job["folder"], "result.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


class TorchSparse:
    """torch's own all-reduce of sparse tensors, which DDP takes for sparse gradients."""

    def all_reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


Row: TypeAlias = Scheme | TorchSparse


def _schemes(names: list[str]) -> dict[str, Row]:
    special: dict[str, Callable[[], Row]] = {
        "auto": Auto,
        "zen, paper's hashing": lambda: Zen("hierarchical"),
        "torch, sparse": TorchSparse,
    }
    return {name: special[name]() if name in special else SCHEMES[name]() for name in names}


def _measure(trace: str, gradient: torch.Tensor, traffic: costs.Traffic, job: dict[str, Any]) -> list[Point]:
    """In turns, in another order in each round, so that what disturbs the machine disturbs all. A short call comes after one of its own
    kind, as in training: the scheme before has left caches, and connections that had lost packets, to it."""
    link = costs.Link(alpha=0.0, beta=8 / job["bits"])
    schemes = _schemes(job["schemes"])
    names = {name: FORMULAS.get(name, name.partition(",")[0]) for name in schemes if name != "auto"}
    names["auto"] = min(names.values(), key=lambda name: costs.seconds(name, traffic, link))
    formulas = {name: costs.seconds(names[name], traffic, link) for name in schemes}
    rounds = {name: min(MOST_ROUNDS, max(LEAST_ROUNDS, int(job["budget"] / formulas[name]))) for name in schemes}
    for scheme in schemes.values():
        scheme.all_reduce(gradient)
        while isinstance(scheme, Auto) and any(plan.chosen is None for plan in scheme.plans.values()):
            scheme.all_reduce(gradient)
    samples: dict[str, list[list[float]]] = {name: [] for name in schemes}
    for number in range(max(rounds.values())):
        going = [name for name in schemes if number < rounds[name]]
        for name in random.Random(SEED + number).sample(going, len(going)):
            if formulas[name] < SHORT:
                schemes[name].all_reduce(gradient)
            samples[name].append(_one(schemes[name], gradient))
    points = []
    for name, scheme in schemes.items():
        table = torch.tensor(samples[name], dtype=torch.float64)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        times, *others = table.T.tolist()
        sent, cpu = map(statistics.median, others)
        nbytes = costs.FORMULAS[names[name]](traffic)[1]
        chosen = next(iter(scheme.plans.values())).chosen or "" if isinstance(scheme, Auto) else ""
        points.append(Point(trace, name, times, statistics.median(times), formulas[name], sent / 1e6, nbytes / 1e6, cpu, chosen))
    return points


def _one(scheme: Row, gradient: torch.Tensor) -> list[float]:
    """Seconds, bytes sent, share of the processors."""
    dist.barrier()
    busy, sent, begin = _busy(), _sent(), time.perf_counter()
    scheme.all_reduce(gradient)
    seconds = time.perf_counter() - begin
    used = _busy() - busy
    dist.barrier()  # what a socket has taken has not left yet; what the others have received has
    nbytes = _sent() - sent
    return [seconds, nbytes, used / seconds / len(os.sched_getaffinity(0))]


def _busy() -> float:
    """Processor seconds of the whole machine, all but idle and waiting ones."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _sent() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.split()[9])


# -- the trace


def _describe(trace: Trace, gradient: torch.Tensor, job: dict[str, Any]) -> tuple[costs.Traffic, dict[str, Any]]:
    """Its figures, and how well each way of hashing does on it."""
    group = dist.group.WORLD
    assert group is not None
    own = to_rows(gradient)
    traffic = auto.traffic(own, open_exchange(group, torch.device("cpu"), "a trace"))
    sets = [own.indices if rank == dist.get_rank() else trace.indices(rank, job["rows"], job["width"]) for rank in range(group.size())]
    found = {
        "published": trace.published,
        "rows": own.rows,
        "width": gradient.shape[1],
        "density": traffic.density,
        "sum": traffic.densities[traffic.ranks],
        "densification": traffic.densities[traffic.ranks] / traffic.density if traffic.density else 1.0,
        "overlap": statistics.mean(_overlap(one, other) for one, other in pairwise(sets)),
        "push skew": traffic.push_skew,
        "pull skew": traffic.pull_skew,
        "hashing": _hashing(sets, own.rows),
    }
    return traffic, found


def _overlap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The share of the smaller of two index sets that the other one has, too (Zen, section 2.1)."""
    return int(torch.isin(one, other).sum()) / max(1, min(len(one), len(other)))


def _hashing(sets: list[torch.Tensor], rows: int) -> dict[str, dict[str, float]]:
    """Imbalance (section 3.1), milliseconds to group a rank's indices, bytes held, of each partition."""
    ranks = len(sets)
    partitions: dict[str, Partition] = {
        "even parts": EvenPartition(rows, ranks),
        "rotation": RotatedPartition(rows, ranks),
        "paper's": HashedPartition(rows, ranks),
    }
    total = union(sets, rows)[0]
    found = {}
    for name, partition in partitions.items():
        push = max(_imbalance(partition, each) for each in sets)
        found[name] = {"push": push, "pull": _imbalance(partition, total)}
    part = murmur(sets[0], 0) * ranks >> 32
    grouping = hierarchical_hash(sets[0], part, ranks)
    found["rotation"] |= {"ms": 1e3 * _fastest(lambda: group_by_part(part, ranks)), "table": 0, "slots": 0}
    found["paper's"] |= {
        "ms": 1e3 * _fastest(lambda: hierarchical_hash(sets[0], part, ranks)),
        "table": 8 * rows,
        "slots": 8 * grouping.slots,
        "collisions": grouping.serial / len(sets[0]),
    }
    return found


def _imbalance(partition: Partition, indices: torch.Tensor) -> float:
    parts = partition.split(SparseRows(rows=partition.rows, indices=indices, values=torch.zeros(len(indices), 0)))
    return max(len(part.indices) for part in parts) * partition.parts / len(indices)


def _fastest(call: Any) -> float:
    times = []
    for _ in range(TRIES):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    main()
