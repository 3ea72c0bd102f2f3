"""Measures what keeping every optimizer step costs: gemini-ft beside its peers and beside the physical floor, in one run.

Two ranks, one torch thread each, the same bytes for all rows. Every trial is one row in two fresh processes; rounds over all
rows follow each other, so that a slow minute of the machine hits all rows alike. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import byte_costs
import common
import observed
import trials
from measuring import Plan
from peers import ROWS

PACKAGES = ("torch", "lightning", "gemini-ft", "lm-resiliency", "nvidia-resiliency-ext", "dlrover")
TOKENS = 768  # about 4 s of forward and backward per GB of state on one core; a GPT-2 100B on 128 A100 has 6.6 (SOSP'23, section 7.1)
PLANS = {
    64: (4, Plan(64, TOKENS, pairs=4, plain=3, saved=4)),
    256: (3, Plan(256, TOKENS, pairs=3, plain=3, saved=4)),
    1000: (2, Plan(1000, TOKENS, pairs=2, plain=2, saved=3)),
}
# Steps as long as in the full run: ratios of shorter ones are others, because a step hides what it has time for.
QUICK = {64: (3, Plan(64, TOKENS, pairs=1, plain=3, saved=4))}
SHORT = Plan(64, 512, pairs=2, plain=2, saved=5, warm=2)  # of --against: many short rounds tell more of ratios than a few long ones
FLOOR, RIVAL, OURS = "floor", "lm_resiliency", "gemini"


RATIOS = {
    "blocked_vs_lm_resiliency": ("blocked_s", RIVAL),
    "lost_vs_lm_resiliency": ("lost_s", RIVAL),
    "lost_vs_floor": ("lost_s", FLOOR),
    "replica_complete_vs_floor": ("complete_s", FLOOR),
    "cpu_vs_floor": ("cpu_s", FLOOR),
    "cpu_vs_lm_resiliency": ("cpu_s", RIVAL),
    "iteration_vs_no_checkpoint": ("iteration_ratio", "none"),
}
OURS_EQUAL = "gemini_ddp"  # under plain data parallelism, where each rank keeps a half of what all have
RATIOS_EQUAL = {f"equal_{name}": (key, f"{base}_ddp") for name, (key, base) in RATIOS.items() if base != "none"}


def report(
    results: Mapping[int, Mapping[str, Mapping[str, Any]]], ratios: Mapping[str, Mapping[str, common.Spread]], arguments: argparse.Namespace
) -> str:
    """The body of the dated report."""
    parts = [
        "Two ranks, one torch thread each, both on this machine; times in ms, medians. `lost` is an iteration with saves minus one "
        "without, in the same processes. Ratios are against the floor that neither verifies nor commits. Blocks in which other "
        f"programs took more than {arguments.noise_limit:.0%} of the machine were rejected. Processor time is what all processes of a row "
        "used beyond the plain blocks', per GB of distinct state: in the processes that train, and in others (agents)."
    ]
    for size, rows in results.items():
        parts.append(trials.table(f"{size} MB of state per rank, every step saved", ROWS, rows))
    parts.append(byte_costs.section(byte_costs.measured(), results))
    return "\n\n".join([*parts, trials.ratio_table(ratios)])


def compare(rows: Mapping[str, trials.Measured], base: str, rounds: int) -> str:
    """The body of a report of --against."""

    def cells(name: str, key: str) -> list[str]:
        values = [1e3 * figures[key] for figures in rows[name].rounds.values() if key in figures]
        ratio = trials.paired(rows, base, key).get(name)
        return [common.spread(common.interval(values), 1) if values else "-", common.spread(ratio, 3) if ratio else "-"]

    header = ("row", "complete, ms", "ratio", "lost, ms", "ratio", "rounds")
    lines = [
        [
            ROWS[name].title,
            *cells(name, "complete_s"),
            *cells(name, "lost_s"),
            str(len(found.rounds)) + f": {found.problem}" * bool(found.problem),
        ]
        for name, found in rows.items()
    ]
    return "\n\n".join(
        [
            f"Two ranks, one torch thread each, {SHORT.megabytes} MB of state per rank, every step saved; {rounds} rounds of one trial of "
            "each row, in random order. Medians over rounds and their 95 % intervals; ratios are against "
            f"{ROWS[base].title!r} of the same round. Every block counts, however noisy the machine was.",
            common.table(header, lines),
        ]
    )


def observe(arguments: argparse.Namespace) -> None:
    """Measures, and reports, what it costs to be observed."""
    megabytes = (arguments.sizes or [64])[0]
    rounds, steps = (2, 6) if arguments.quick else (12, 20)
    seconds = observed.measure(arguments.rounds or rounds, megabytes, TOKENS, steps)
    found = observed.ratios(seconds)
    if not arguments.quick:
        body = observed.report(seconds, found, megabytes)
        path = common.write_report("checkpoint-overhead-observed", "What it costs to be observed", body, common.versions(PACKAGES[:3]))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    results = {name: [round(each[name], 5) for each in seconds] for name in observed.CELLS}
    intervals = {name: [round(value, 4) for value in spread] for name, spread in found.items()}
    told = {"observed": results, "ratios": intervals}
    common.print_result("checkpoint_overhead", told, {aim: round(found[aim][0], 4) for aim in observed.AIMS})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MB, fewer blocks, rows that start fast: some minutes, writes no report")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"rows to measure, of: {', '.join(ROWS)}")
    parser.add_argument(
        "--sizes", nargs="+", type=int, choices=PLANS, metavar="MB", help=f"state per rank, of: {', '.join(map(str, PLANS))}"
    )
    parser.add_argument(
        "--against", choices=ROWS, metavar="ROW", help="short rounds in random order, each row divided by this one of the same round"
    )
    parser.add_argument(
        "--observed", action="store_true", help="what metrics, page, hangs, stragglers, comparisons and replays cost an iteration"
    )
    trials.options(parser)
    arguments = parser.parse_args()
    common.clean_up_on_sigterm()

    if arguments.observed:
        observe(arguments)
        return
    if arguments.against:
        rounds, rows = arguments.rounds or 12, dict.fromkeys([arguments.against, *(arguments.rows or ["gemini", "gemini_encrypted"])])
        found = trials.measure("overhead_worker.py", {row: ROWS[row] for row in rows}, {64: (rounds, SHORT)}, 1.0, 0.0)[64]
        body = compare(found, arguments.against, rounds)
        path = common.write_report(
            "checkpoint-overhead", f"Cost of keeping every step, beside {arguments.against}", body, common.versions(PACKAGES)
        )
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
        ratio = {
            f"{row}_{key}": value[0]
            for key in ("complete_s", "lost_s")
            for row, value in trials.paired(found, arguments.against, key).items()
        }
        common.print_result("checkpoint_overhead", {row: measured.summary(64 * 10**6) for row, measured in found.items()}, ratio)
        return
    plans = QUICK if arguments.quick else {size: PLANS[size] for size in arguments.sizes or PLANS}
    plans = {size: (arguments.rounds or rounds, plan) for size, (rounds, plan) in plans.items()}
    wanted = arguments.rows or [name for name, row in ROWS.items() if row.quick or not arguments.quick]
    limit, patience = (1.0, 0.0) if arguments.quick else (arguments.noise_limit, arguments.patience)
    measured = trials.measure("overhead_worker.py", {name: ROWS[name] for name in wanted}, plans, limit, patience)
    results = {size: {row: found.summary(size * 10**6) for row, found in rows.items()} for size, rows in measured.items()}
    ratios = {
        f"{size} MB": trials.against(rows, OURS, RATIOS) | trials.against(rows, OURS_EQUAL, RATIOS_EQUAL) for size, rows in measured.items()
    }
    for size, found_at in measured.items():
        if OURS in found_at and found_at[OURS].held:
            ratios[f"{size} MB"]["memory_vs_state"] = common.interval([held / (size * 10**6) for held in found_at[OURS].held])
    if not arguments.quick:
        body = report(results, ratios, arguments)
        path = common.write_report("checkpoint-overhead", "Cost of keeping every step", body, common.versions(PACKAGES))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    told = {str(size): rows for size, rows in results.items()} | {"ratios": trials.by_plan(ratios)}
    common.print_result("checkpoint_overhead", told, trials.worst(ratios))


if __name__ == "__main__":
    main()
