"""Measures how long it takes to group a sparse gradient's indices by server, on a GPU. Zen: about 6 ms for 214M parameters at 5.2 %.

    python benchmarks/gpu/hashing.py            # needs a CUDA device
    python benchmarks/gpu/hashing.py --quick    # a small gradient, on the CPU if there is no GPU

Rows: hierarchical hashing (algorithm 1; a Triton kernel on CUDA), counting (a stable radix sort of the servers' numbers, which
Zen's rotation uses), a sort of the indices by server and index, and one `nonzero` per server. All group the same indices.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import print_result, ratio, table
from gemini_ft.sync.partition import group_by_part, hierarchical_hash, murmur

PARAMETERS, DENSITY, SERVERS = 214_000_000, 0.052, 16
PAPER = 6e-3  # seconds, on a V100
ROUNDS = 20


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median, the first call left out: it compiles."""
    times = []
    for _ in range(ROUNDS + 1):
        _finish(device)
        begin = time.perf_counter()
        call()
        _finish(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.quick:
        sys.exit("there is no CUDA device; --quick runs on the CPU")
    parameters = PARAMETERS // 1000 if arguments.quick else PARAMETERS
    present = torch.rand(parameters, device=device) < DENSITY
    indices = present.nonzero().flatten()
    parts = murmur(indices, 0) * SERVERS >> 32
    rows: dict[str, Callable[[], object]] = {
        "hierarchical hashing": lambda: hierarchical_hash(indices, parts, SERVERS),
        "counting": lambda: group_by_part(parts, SERVERS),
        "sort": lambda: torch.sort(parts * parameters + indices),
        "nonzero per server": lambda: [(parts == server).nonzero() for server in range(SERVERS)],
        "nonzero of the gradient": lambda: present.nonzero(),
    }
    times = {name: seconds(call, device) for name, call in rows.items()}
    grouping = hierarchical_hash(indices, parts, SERVERS)
    print(f"{parameters} parameters, {len(indices)} of them present, {SERVERS} servers, {device}")
    print(table(["row", "ms"], [[name, f"{1e3 * each:.3f}"] for name, each in times.items()]))
    print(f"hierarchical hashing: {grouping.serial / len(indices):.3%} in the serial memory, {8 * grouping.slots / 2**20:.1f} MiB of slots")
    hashing = times["hierarchical hashing"]
    ratios = {"hashing_vs_paper": None if arguments.quick else ratio(hashing, PAPER)}
    ratios |= {f"hashing_vs_{name.replace(' ', '_')}": ratio(hashing, each) for name, each in times.items() if each is not hashing}
    print_result("gpu_hashing", times, ratios)


if __name__ == "__main__":
    main()
