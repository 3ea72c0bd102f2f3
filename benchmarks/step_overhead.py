"""Measures the training thread's own work for a snapshot of every step: its processor time, by the number of parameters.

    python benchmarks/step_overhead.py                          # about half a minute; a report
    python benchmarks/step_overhead.py --quick                  # one model, few steps

The Checkpointer, its threads and its agent are the real ones; one rank, one copy, tensors of a few numbers, so that no time goes into their
bytes. The optimizer has the state of AdamW and updates nothing. What counts is the processor time of the training thread in `step()` of the
Checkpointer and in the hooks of the optimizer's step, beyond what that step takes without a Checkpointer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

LAYERS = {"85": 21, "341": 85, "1365": 341}  # parameters -> layers of four parameters each, and one more
WARM_UP = 8  # steps


def train(layers: int, steps: int) -> dict[str, float]:
    """Milliseconds of the training thread's processor time per step, of one job in this process."""
    import torch
    from torch import nn

    import gemini_ft

    torch.set_num_threads(1)

    class Still(torch.optim.AdamW):
        """Has the state of AdamW from its first step on, and updates nothing after it."""

        def step(self, closure: Any = None) -> Any:
            if not self.state:
                super().step()

    blocks = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers)]
    model = nn.Sequential(*blocks, nn.Linear(4, 4, bias=False))
    optimizer = Still(model.parameters(), lr=1e-3)
    params = list(model.parameters())

    def update() -> float:
        for param in params:
            param.grad = torch.zeros_like(param)
        begin = time.thread_time()
        optimizer.step()
        return time.thread_time() - begin

    bare = [update() for _ in range(WARM_UP + steps)][WARM_UP:]
    checkpointer = gemini_ft.Checkpointer(
        model, optimizer, replicated=False, run_id=f"step-{uuid.uuid4().hex[:8]}", replicas=1, on_late="wait"
    )
    checkpointer.resume()
    hooks, ends = [], []
    for _ in range(WARM_UP + steps):
        hooks.append(update())
        begin = time.thread_time()
        checkpointer.step()
        ends.append(time.thread_time() - begin)
    assert checkpointer.stats.snapshots == WARM_UP + steps
    checkpointer.close()
    update_ms = 1000 * (statistics.median(hooks[WARM_UP:]) - statistics.median(bare))
    step_ms = 1000 * statistics.median(ends[WARM_UP:])
    return {"parameters": len(params), "hooks_ms": update_ms, "step_ms": step_ms, "snapshot_ms": update_ms + step_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the model of 341 parameters, few steps; no report")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--row", choices=LAYERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    steps = 40 if arguments.quick else arguments.steps
    if arguments.row:
        print(json.dumps(train(LAYERS[arguments.row], arguments.steps)))
        return
    results: dict[str, Any] = {}
    for row in ["341"] if arguments.quick else LAYERS:
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"GEMINI_HOST_ID": "host0", "GEMINI_LOG_DIR": folder}
            command = [sys.executable, __file__, "--row", row, "--steps", str(steps)]
            told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        results[row] = json.loads(told.splitlines()[-1])
    lines = [[name, *(f"{found[key]:.2f}" for key in ("hooks_ms", "step_ms", "snapshot_ms"))] for name, found in results.items()]
    text = common.table(("parameters", "hooks of the update, ms", "step(), ms", "both, ms"), lines)
    print(text, file=sys.stderr)
    ratios: dict[str, float | None] = {}
    if not arguments.quick:
        small, large = results["341"], results["1365"]
        ratios["growth_341_to_1365"] = common.ratio(large["snapshot_ms"] / large["parameters"], small["snapshot_ms"] / small["parameters"])
        body = f"{steps} steps of each job, medians of the training thread's processor time.\n\n{text}"
        path = common.write_report(
            "step-overhead", "The training thread's own work for a snapshot", body, common.versions(("torch", "gemini-ft"))
        )
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    common.print_result("step_overhead", results, ratios)


if __name__ == "__main__":
    main()
