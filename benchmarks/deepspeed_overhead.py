"""Measures what keeping every step of a DeepSpeed engine costs: gemini-ft beside DeepSpeed's own writers and lm-resiliency, in one run.

Two ranks, one torch thread each, ZeRO-1 and ZeRO-3 in bf16 with fp32 masters, or all in fp32. Every trial is one row in two fresh
processes; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import common
import trials
from measuring import Plan
from peers.engines import ROWS, WRITERS

PACKAGES = ("torch", "deepspeed", "gemini-ft", "lm-resiliency")
TOKENS = 512
PLANS = {
    "ZeRO-1": (2, Plan(128, TOKENS, pairs=3, plain=3, saved=4, stage=1)),
    "ZeRO-3": (2, Plan(128, TOKENS, pairs=3, plain=3, saved=4, stage=3)),
}
QUICK = {name: (1, Plan(32, 256, pairs=1, plain=2, saved=3, warm=2, stage=plan.stage)) for name, (_, plan) in PLANS.items()}
OURS, RIVAL = "gemini", "lm_resiliency"
SILENT = "ZeRO-1"  # the rival takes its ranks for replicas of each other there, and sends nothing
OF_SENDING = {
    "iteration_vs_lm_resiliency",
    "slowdown_vs_lm_resiliency",
    "cpu_vs_lm_resiliency",
}  # ratios that say something only where both send

RATIOS = {
    "blocked_vs_lm_resiliency": ("blocked_s", RIVAL),
    "iteration_vs_lm_resiliency": ("iteration_s", RIVAL),
    "slowdown_vs_lm_resiliency": ("iteration_ratio", RIVAL),
    "cpu_vs_lm_resiliency": ("cpu_s", RIVAL),
    "iteration_vs_no_checkpoint": ("iteration_ratio", "none"),
    **{f"blocked_vs_{row}": ("blocked_s", row) for row in WRITERS},
}


def report(
    results: Mapping[str, Mapping[str, Mapping[str, Any]]], ratios: Mapping[str, Mapping[str, common.Spread]], limit: float, dtype: str
) -> str:
    """The body of the dated report."""
    parts = [
        f"Two ranks, one torch thread each, both on this machine; {dtype} weights, fp32 masters and moments; times in ms, medians. `lost` "
        "is an iteration with saves minus one without, in the same processes. Writers write to memory (tmpfs). Blocks in which other "
        f"programs took more than {limit:.0%} of the machine were rejected."
    ]
    for stage, rows in results.items():
        size = PLANS[stage][1].megabytes
        parts.append(trials.table(f"{stage}, {size} MB of masters and moments per rank, every step saved", ROWS, rows))
    return "\n\n".join([*parts, trials.ratio_table(ratios)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="32 MB, ZeRO-1 unless --stages says otherwise, few steps, rows that start fast: under a minute, no report",
    )
    parser.add_argument("--stages", nargs="+", choices=PLANS, metavar="STAGE", help=f"of: {', '.join(PLANS)}")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"rows to measure, of: {', '.join(ROWS)}")
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp32"),
        default="bf16",
        help="of the weights; fp32 where a processor without bf16 products takes seconds for each",
    )
    trials.options(parser)
    arguments = parser.parse_args()
    common.clean_up_on_sigterm()

    stages = arguments.stages or (["ZeRO-1"] if arguments.quick else list(PLANS))
    chosen = {stage: (QUICK if arguments.quick else PLANS)[stage] for stage in stages}
    plans = {name: (arguments.rounds or rounds, replace(plan, dtype=arguments.dtype)) for name, (rounds, plan) in chosen.items()}
    rows = {name: row for name, row in ROWS.items() if (name in arguments.rows if arguments.rows else row.quick or not arguments.quick)}
    limit, patience = (1.0, 0.0) if arguments.quick else (arguments.noise_limit, arguments.patience)
    measured = trials.measure("deepspeed_worker.py", rows, plans, limit, patience)
    results = {
        stage: {row: found.summary(plans[stage][1].megabytes * 10**6) for row, found in rows.items()} for stage, rows in measured.items()
    }
    ratios = {stage: trials.against(found, OURS, RATIOS) for stage, found in measured.items()}
    if not arguments.quick:
        body = report(results, ratios, limit, arguments.dtype)
        title = "Cost of keeping every step of a DeepSpeed engine"
        path = common.write_report("deepspeed-overhead", title, body, common.versions(PACKAGES))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    sending = {stage: found for stage, found in ratios.items() if stage != SILENT}
    worst = {name: value for name, value in trials.worst(ratios).items() if name not in OF_SENDING}
    worst |= {name: value for name, value in trials.worst(sending).items() if name in OF_SENDING}
    common.print_result("deepspeed_overhead", {**results, "ratios": trials.by_plan(ratios)}, worst)


if __name__ == "__main__":
    main()
