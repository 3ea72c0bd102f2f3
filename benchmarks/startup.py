"""Seconds from a command to training processes that have imported torch, and from a death to those of the next attempt; their memory.

torchrun, ``gemini run`` and ``gemini run --cold`` in random order within each round, so that a round is a pair of any two. Workers import
torch, make an optimizer's step, write the time, and one of them kills itself. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common

PACKAGES = ("torch", "gemini-ft")
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone"),
    "gemini_run": ("gemini_ft.cli.main", "run"),
    "gemini_run_cold": ("gemini_ft.cli.main", "run", "--cold"),
}
BASELINE = "torchrun"
FIGURES = ("first", "restart", "pss")
WORKER = """
import time
begun = time.monotonic()
import json, os, signal
import torch
weight = torch.ones(8, requires_grad=True)
optimizer = torch.optim.SGD([weight])
weight.sum().backward()
optimizer.step()
ready = time.monotonic()
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def all_here(what):
    open(f"{what}.{attempt}.{rank}", "w").close()
    while not all(os.path.exists(f"{what}.{attempt}.{other}") for other in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.005)
all_here("ready")
pss = next(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:"))
all_here("measured")
os.write(1, json.dumps([attempt, ready, pss * 1024, time.monotonic()]).encode() + b"\\n")
all_here("written")
if attempt == 0 and rank == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 0:
    signal.pause()
"""


def trial(launcher: str, workers: int) -> dict[str, float]:
    """One job: seconds to the first ready processes, seconds from the death of one to those of the second attempt, mean PSS in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "worker.py").write_text(WORKER)
        command = [sys.executable, "-m", *LAUNCHERS[launcher], "--nproc-per-node", str(workers), "--max-restarts", "1", "worker.py"]
        begun = time.monotonic()
        job = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        if job.returncode:
            raise SystemExit(f"{' '.join(command)}: status {job.returncode}\n{job.stderr}")
    said = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("[")]
    first, second = ([line for line in said if line[0] == attempt] for attempt in (0, 1))
    death = max(line[3] for line in first)
    return {
        "first": max(line[1] for line in first) - begun,
        "restart": max(line[1] for line in second) - death,
        "pss": statistics.fmean(line[2] for line in second),
    }


def main() -> None:
    """Measure, write the report, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds, no report")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    rounds = 2 if options.quick else options.rounds
    trials: dict[str, list[dict[str, float]]] = {launcher: [] for launcher in LAUNCHERS}
    busy = []
    for _ in range(rounds):
        for launcher in random.sample(list(LAUNCHERS), len(LAUNCHERS)):
            busy.append(float(Path("/proc/loadavg").read_text().split()[0]))
            trials[launcher].append(trial(launcher, options.workers))
    results = {launcher: {key: common.interval([each[key] for each in found]) for key in FIGURES} for launcher, found in trials.items()}
    ratios = {
        f"{launcher}_{key}": common.interval([ours[key] / theirs[key] for ours, theirs in zip(found, trials[BASELINE], strict=True)])
        for launcher, found in trials.items()
        if launcher != BASELINE
        for key in FIGURES
    }
    if not options.quick:
        body = report(results, ratios, rounds, options.workers, statistics.median(busy))
        common.write_report("startup", "Start-up and restart beside torchrun", body, common.versions(PACKAGES))
    medians: Mapping[str, Any] = {launcher: {key: value[0] for key, value in found.items()} for launcher, found in results.items()}
    common.print_result("startup", medians, {name: value[0] for name, value in ratios.items()})


def report(results: Mapping[str, Any], ratios: Mapping[str, Any], rounds: int, workers: int, load: float) -> str:
    """The tables, in Markdown."""
    units = {"first": 1.0, "restart": 1.0, "pss": 2**20}

    def cell(value: tuple[float, float, float], unit: float) -> str:
        middle, low, high = (f"{number / unit:.2f}" if unit == 1 else f"{number / unit:.0f}" for number in value)
        return f"{middle} ({low} to {high})"

    header = ("launcher", "first start, s", "restart, s", "PSS per worker, MiB")
    rows = [(launcher, *(cell(found[key], units[key]) for key in FIGURES)) for launcher, found in results.items()]
    paired = [(launcher, *(cell(ratios[f"{launcher}_{key}"], 1.0) for key in FIGURES)) for launcher in results if launcher != BASELINE]
    return "\n\n".join(
        [
            f"{workers} workers, {rounds} rounds in random order; median (95 % interval). Load average when a trial began: {load:.1f}.",
            common.table(header, rows),
            "Divided by torchrun of the same round:",
            common.table(("launcher", "first start", "restart", "PSS per worker"), paired),
        ]
    )


if __name__ == "__main__":
    main()
