"""Measures how well each configuration of configs/ learns a small task under DDP, beside DDP alone: seeds and their spread.

    python benchmarks/pipelines_convergence.py --quick

Two ranks learn to tell which of eight groups of words a sentence draws from: an embedding of 240 words, and
three layers. Every row and seed begins with the same weights and sees the same batches; accuracy is on sentences that nobody has learned.
Beside the configurations stand top-k in buckets, which is Espresso's compression without its plan, and the plan of Cupcake.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import common
from gemini_ft.pipeline import GradientSynchronizer, load_rules

WORLD, WORDS, CLASSES, LENGTH, BATCH = 2, 240, 8, 16, 32
CONFIGS = Path(__file__).parent.parent / "configs"
TOPK = {"params": "*", "compress": {"method": "topk", "ratio": 0.01}}
ROWS: dict[str, Any] = {
    "DDP": None,
    **{path.stem.removeprefix("pipeline_"): path for path in sorted(CONFIGS.glob("pipeline_*.yaml"))},
    "topk 1 %, buckets": [TOPK],
    "topk 1 %, cupcake": [{**TOPK, "fusion": "cupcake"}],
    "ring8": [{"params": "*", "sync": "ring8"}],
}
MOMENTUM = {"dgc_cupcake": 0.0}  # it has its own
SHORTENED = {"warmup_steps": 50}  # of dgc: the configuration's 500 are longer than this training


class Model(nn.Module):
    """The mean of a sentence's embeddings through three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(self.embed(words).mean(1))
        return out


def sentences(count: int, source: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and the class of each sentence: half of its words are from its class's part of the vocabulary, half are any."""
    labels = torch.randint(0, CLASSES, (count,), generator=source)
    part = WORDS // CLASSES
    own = labels[:, None] * part + torch.randint(0, part, (count, LENGTH), generator=source)
    noise = torch.randint(0, WORDS, (count, LENGTH), generator=source)
    return torch.where(torch.rand(count, LENGTH, generator=source) < 0.5, own, noise), labels


def learned(row: str, seed: int, steps: int) -> dict[str, Any]:
    """The accuracy after the training, and the plan that was chosen."""
    torch.manual_seed(seed)
    model = Model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    synchronizer = GradientSynchronizer(ddp, rules_of(row)) if row != "DDP" else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=MOMENTUM.get(row, 0.9))
    source = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(steps):
        words, labels = sentences(BATCH, source)
        optimizer.zero_grad()
        F.cross_entropy(ddp(words), labels).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
    words, labels = sentences(4000, torch.Generator().manual_seed(10**6 + seed))
    with torch.no_grad():
        accuracy = float((model(words).argmax(1) == labels).float().mean())
    plan = "-"
    if synchronizer is not None:
        with closing(synchronizer):
            plan = ", ".join(synchronizer.averager.plan.fusion.values())
    return {"accuracy": accuracy, "plan": plan}


def rules_of(row: str) -> Any:
    rules = load_rules(ROWS[row])
    packed = [rule.pack() for rule in rules]
    for rule in packed:
        if rule.get("compress", {}).get("method") == "dgc":
            rule["compress"] = rule["compress"] | SHORTENED
    return packed


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, list[dict[str, Any]]] = {row: [] for row in arguments.rows}
    for seed in range(arguments.seeds):
        for row in arguments.rows:
            found[row].append(learned(row, seed, arguments.steps))
            if dist.get_rank() == 0:
                print(seed, row, found[row][-1], flush=True)
                Path(arguments.out).write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--quick", action="store_true", help="two seeds, few steps, no report")
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.steps = 2, 60
    if "RANK" in os.environ:
        worker(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        options = ["--rows", *arguments.rows, "--seeds", str(arguments.seeds), "--steps", str(arguments.steps), "--out", str(out)]
        command = [sys.executable, __file__, *options]
        common.run_ranks(command, world=WORLD, mark=f"convergence-{os.getpid()}", timeout=7200, env={"GLOO_SOCKET_IFNAME": "lo"})
        found = json.loads(out.read_text())
    body = report(found)
    print(body)
    if not arguments.quick:
        common.write_report(
            "pipelines-convergence", "Convergence of gradient pipelines", body, common.versions(["torch", "numpy", "gemini-ft"])
        )
    results = {row: statistics.fmean(run["accuracy"] for run in runs) for row, runs in found.items()}
    ratios = {row: accuracy / results["DDP"] for row, accuracy in results.items()} if "DDP" in results else {}
    common.print_result("pipelines_convergence", results, ratios)


def report(found: dict[str, list[dict[str, Any]]]) -> str:
    """A table of all rows, by the accuracy after the last step."""
    rows = []
    for row, runs in found.items():
        accuracies = [run["accuracy"] for run in runs]
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        figures = [f"{figure:.4f}" for figure in (statistics.fmean(accuracies), spread, min(accuracies), max(accuracies))]
        rows.append([row, str(len(runs)), *figures, "; ".join(sorted({run["plan"] for run in runs}))])
    return common.table(["row", "seeds", "mean accuracy", "standard deviation", "least", "greatest", "plans"], rows)


if __name__ == "__main__":
    main()
