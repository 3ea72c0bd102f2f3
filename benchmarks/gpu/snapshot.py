"""Measures what copying 1 to 16 GB of state to host memory at every step costs a transformer that trains on a GPU meanwhile.

Needs an accelerator; ``--tiny`` runs on a CPU too, and measures nothing. Two limits stand beside the figures: the same bytes copied to
pinned memory with nothing else running (PCIe), and the step without snapshots. The state beyond the model's own is a table that the step
writes to.
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
HAS_DEVICE = torch.accelerator.is_available()
DEVICE = torch.accelerator.current_accelerator() if HAS_DEVICE else torch.device("cpu")


def _finish() -> None:
    if HAS_DEVICE:
        torch.accelerator.synchronize()


class Model(nn.Module):
    """A transformer, and a table of ``extra`` bytes."""

    def __init__(self, extra: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dtype=torch.bfloat16)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.table = nn.Parameter(torch.zeros(extra // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks(x)
        return out


def pinned_bandwidth(nbytes: int) -> float:
    """Bytes per second from the device to pinned memory, with nothing else running."""
    nbytes = min(nbytes, 4 * 10**9)
    source = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=HAS_DEVICE)
    target.copy_(source)
    _finish()
    begin = time.perf_counter()
    target.copy_(source, non_blocking=True)
    _finish()
    return nbytes / (time.perf_counter() - begin)


def steps(model: Model, count: int, checkpointer: gemini_ft.Checkpointer | None, first: int, batch: int) -> list[float]:
    """Seconds of each step."""
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=1e-4)
    inputs = torch.randn(batch, 512, 1024, device=DEVICE, dtype=torch.bfloat16)
    seconds = []
    for number in range(count):
        _finish()
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
        if HAS_DEVICE and checkpointer is not None:
            torch.accelerator.current_stream().synchronize()
        else:
            _finish()
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure(gigabytes: float, pairs: int, block: int, layers: int, batch: int) -> dict[str, Any]:
    """Blocks of steps without and with snapshots, in turns."""
    model = Model(int(gigabytes * 10**9), layers).to(DEVICE)
    without, with_ = [], []
    steps(model, 3, None, 0, batch)
    run = f"snapshot-{uuid.uuid4().hex[:8]}"
    with gemini_ft.Checkpointer(model, hooks=False, replicated=False, run_id=run, replicas=1, interval=1, hang_timeout=0) as checkpointer:
        checkpointer.open()
        number = 1
        steps(model, 2, checkpointer, number, batch)
        number += 2
        for _ in range(pairs):
            without += steps(model, block, None, 0, batch)
            with_ += steps(model, block, checkpointer, number, batch)
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
    parser.add_argument("--tiny", action="store_true", help="one layer and 20 MB, to see that this file runs: no report")
    parser.add_argument("--gigabytes", nargs="+", type=float, default=[1, 4, 16])
    arguments = parser.parse_args()
    if not HAS_DEVICE and not arguments.tiny:
        sys.exit("needs an accelerator; --tiny runs on a CPU")
    brief = arguments.quick or arguments.tiny
    sizes = [0.02] if arguments.tiny else [1.0] if arguments.quick else arguments.gigabytes
    pairs, block = (1, 3) if brief else (4, 6)
    layers, batch = (1, 1) if arguments.tiny else (12, 16)
    results = {f"{size:g} GB": measure(size, pairs, block, layers, batch) for size in sizes}
    ratios = {}
    for name, found in results.items():
        ratios[f"step_vs_none_{name.replace(' ', '')}"] = common.ratio(found["step_with_snapshot_s"], found["step_s"])
        ratios[f"bandwidth_vs_pinned_{name.replace(' ', '')}"] = common.ratio(found["snapshot_bytes_per_s"], found["pinned_bytes_per_s"])
    if not brief:
        device = f"Device: {torch.get_device_module().get_device_name()}."
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
