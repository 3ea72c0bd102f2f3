"""What keeping every optimizer step costs: gemini-ft beside its peers and beside the physical floor, in one run.

Two ranks, one torch thread each, the same bytes for all rows. Every trial is one row in two fresh processes; rounds over all
rows follow each other, so that a slow minute of the machine hits all rows alike. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import common
import trials
from measuring import Plan
from peers import ROWS

PACKAGES = ("torch", "lightning", "gemini-ft", "lm-resiliency", "nvidia-resiliency-ext", "dlrover")
TOKENS = 768  # about 4 s of forward and backward per GB of state on one core; a GPT-2 100B on 128 A100 has 6.6 (SOSP'23, section 7.1)
PLANS = {
    64: (1, Plan(64, TOKENS, pairs=4, plain=3, saved=4)),
    256: (2, Plan(256, TOKENS, pairs=3, plain=3, saved=4)),
    1000: (1, Plan(1000, TOKENS, pairs=2, plain=2, saved=3)),
}
QUICK = {64: (1, Plan(64, 512, pairs=1, plain=2, saved=3, warm=2))}
FLOOR, RIVAL, OURS = "floor", "lm_resiliency", "gemini"


def ratios(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """gemini-ft (state per rank) against its rival and the floor, from the medians of one size."""

    of = partial(trials.figure, summaries)
    return {
        "blocked_vs_lm_resiliency": common.ratio(of(OURS, "blocked_s"), of(RIVAL, "blocked_s")),
        "lost_vs_lm_resiliency": common.ratio(of(OURS, "lost_s"), of(RIVAL, "lost_s")),
        "lost_vs_floor": common.ratio(of(OURS, "lost_s"), of(FLOOR, "lost_s")),
        "replica_complete_vs_floor": common.ratio(of(OURS, "complete_s"), of(FLOOR, "complete_s")),
        "iteration_vs_no_checkpoint": common.ratio(of(OURS, "iteration_ratio"), 1.0),
    }


def report(results: Mapping[int, Mapping[str, Mapping[str, Any]]], ratio: Mapping[str, float | None], arguments: argparse.Namespace) -> str:
    """The body of the dated report."""
    parts = [
        "Two ranks, one torch thread each, both on this machine; times in ms, medians. `lost` is an iteration with saves minus one "
        "without, in the same processes. Ratios are against the floor that neither verifies nor commits. Blocks in which other "
        f"programs took more than {arguments.noise_limit:.0%} of the machine were rejected."
    ]
    for size, rows in results.items():
        parts.append(trials.table(f"{size} MB of state per rank, every step saved", ROWS, rows))
    return "\n\n".join([*parts, trials.ratio_table(ratio)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MB, few steps, rows that start fast: under a minute, writes no report")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"rows to measure, of: {', '.join(ROWS)}")
    parser.add_argument(
        "--sizes", nargs="+", type=int, choices=PLANS, metavar="MB", help=f"state per rank, of: {', '.join(map(str, PLANS))}"
    )
    trials.options(parser)
    arguments = parser.parse_args()
    common.clean_up_on_sigterm()

    plans = QUICK if arguments.quick else {size: PLANS[size] for size in arguments.sizes or PLANS}
    plans = {size: (arguments.rounds or rounds, plan) for size, (rounds, plan) in plans.items()}
    rows = arguments.rows or [name for name, row in ROWS.items() if row.quick or not arguments.quick]
    limit, patience = (1.0, 0.0) if arguments.quick else (arguments.noise_limit, arguments.patience)
    measured = trials.measure("overhead_worker.py", {name: ROWS[name] for name in rows}, plans, limit, patience)
    results = {size: {row: found.summary(size * 10**6) for row, found in rows.items()} for size, rows in measured.items()}
    main_size = 256 if 256 in results else next(iter(results))
    ratio = ratios(results[main_size])
    if not arguments.quick:
        body = report(results, ratio, arguments)
        path = common.write_report("checkpoint-overhead", "Cost of keeping every step", body, common.versions(PACKAGES))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    common.print_result("checkpoint_overhead", {str(size): rows for size, rows in results.items()}, ratio)


if __name__ == "__main__":
    main()
