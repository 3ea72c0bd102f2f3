"""Measures what copying 1 to 16 GB of state to host memory at every step costs a transformer that trains on a GPU meanwhile.

Needs a CUDA device. Two limits stand beside the figures: the same bytes copied to pinned memory with nothing else running (PCIe), and
the step without snapshots. The state beyond the model's own is a table that the step writes to.
"""

from __future__ import annotations

import argparse
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gemini_ft

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common

PACKAGES = ("torch", "gemini-ft")


class Model(nn.Module):
    """A transformer, and so many bytes more."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dtype=torch.bfloat16)
        self.blocks = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.table = nn.Parameter(torch.zeros(extra // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks(x)
        return out


def pinned_bandwidth(nbytes: int) -> float:
    """Bytes per second from the device to pinned memory, with nothing else running."""
    nbytes = min(nbytes, 4 * 10**9)
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target.copy_(source)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return nbytes / (time.perf_counter() - begin)


def steps(model: Model, count: int, checkpointer: gemini_ft.Checkpointer | None, first: int) -> list[float]:
    """Seconds of each step."""
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=1e-4)
    inputs = torch.randn(16, 512, 1024, device="cuda", dtype=torch.bfloat16)
    seconds = []
    for number in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = model(inputs).float().square().mean()
        loss.backward()
        if checkpointer is not None:
            checkpointer.wait_before_update()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.table.add_(1.0)
        if checkpointer is not None:
            checkpointer.save(first + number, None)
        torch.cuda.synchronize() if checkpointer is None else torch.cuda.current_stream().synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure(gigabytes: float, pairs: int, block: int) -> dict[str, Any]:
    """Blocks of steps without and with snapshots, in turns."""
    torch.cuda.empty_cache()
    model = Model(int(gigabytes * 10**9)).cuda()
    without, with_ = [], []
    steps(model, 3, None, 0)
    run = f"snapshot-{uuid.uuid4().hex[:8]}"
    with gemini_ft.Checkpointer(model, hooks=False, replicated=False, run_id=run, replicas=1, interval=1, hang_timeout=0) as checkpointer:
        checkpointer.open()
        number = 1
        steps(model, 2, checkpointer, number)
        number += 2
        for _ in range(pairs):
            without += steps(model, block, None, 0)
            with_ += steps(model, block, checkpointer, number)
            number += block
            checkpointer.flush()
        commits = [seconds for iteration, seconds in checkpointer.stats.commit_seconds.items() if iteration > 2]
        nbytes, skipped = checkpointer.stats.shard_bytes, checkpointer.stats.skipped
    limit = pinned_bandwidth(nbytes)
    complete = common.median(commits)
    return {
        "state_bytes": nbytes,
        "step_s": common.median(without),
        "step_with_snapshot_s": common.median(with_),
        "complete_s": complete,
        "skipped": skipped,
        "pinned_bytes_per_s": limit,
        "snapshot_bytes_per_s": nbytes / complete if complete else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 GB, few steps: under a minute, no report")
    parser.add_argument("--gigabytes", nargs="+", type=float, default=[1, 4, 16])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    sizes, pairs, block = ([1.0], 1, 3) if arguments.quick else (arguments.gigabytes, 4, 6)
    results = {f"{size:g} GB": measure(size, pairs, block) for size in sizes}
    ratios = {}
    for name, found in results.items():
        ratios[f"step_vs_none_{name.replace(' ', '')}"] = common.ratio(found["step_with_snapshot_s"], found["step_s"])
        ratios[f"bandwidth_vs_pinned_{name.replace(' ', '')}"] = common.ratio(found["snapshot_bytes_per_s"], found["pinned_bytes_per_s"])
    if not arguments.quick:
        device = f"Device: {torch.cuda.get_device_name()}."
        header = ("state", "step ms", "with snapshot ms", "complete s", "GB/s", "pinned GB/s", "skipped")
        rows = [
            (
                name,
                f"{1000 * found['step_s']:.1f}",
                f"{1000 * found['step_with_snapshot_s']:.1f}",
                f"{found['complete_s']:.3f}",
                f"{found['snapshot_bytes_per_s'] / 1e9:.1f}",
                f"{found['pinned_bytes_per_s'] / 1e9:.1f}",
                str(found["skipped"]),
            )
            for name, found in results.items()
        ]
        body = f"{device}\n\n{common.table(header, rows)}\n\n{common.table(('ratio', 'value'), [(k, str(v)) for k, v in ratios.items()])}"
        path = common.write_report("gpu-snapshot", "Snapshots of a transformer on a GPU", body, common.versions(PACKAGES))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    common.print_result("gpu_snapshot", results, ratios)


if __name__ == "__main__":
    main()
