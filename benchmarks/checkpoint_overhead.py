"""What keeping every optimizer step costs: gemini-ft beside its peers and beside the physical floor, in one run.

Two ranks, one torch thread each, the same bytes for all rows. Every trial is one row in two fresh processes; rounds over all
rows follow each other, so that a slow minute of the machine hits all rows alike. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import common
from measuring import Block, Plan
from peers import ROWS

PACKAGES = ("torch", "lightning", "gemini-ft", "lm-resiliency", "nvidia-resiliency-ext", "dlrover")
WORLD = 2
TOKENS = 768  # about 4 s of forward and backward per GB of state on one core; a GPT-2 100B on 128 A100 has 6.6 (SOSP'23, section 7.1)
PLANS = {
    64: (1, Plan(64, TOKENS, pairs=4, plain=3, saved=4)),
    256: (2, Plan(256, TOKENS, pairs=3, plain=3, saved=4)),
    1000: (1, Plan(1000, TOKENS, pairs=2, plain=2, saved=3)),
}
QUICK = {64: (1, Plan(64, 512, pairs=1, plain=2, saved=3, warm=2))}
COLUMNS = [
    "row",
    "copies",
    "blocked",
    "worst",
    "lost",
    "complete",
    "iteration",
    "without",
    "memory x state",
    "fresh MB: early, later",
    "blocks",
]
FLOOR, RIVAL, OURS = "floor", "lm_resiliency", "gemini"


@dataclass
class Measured:
    """All good pairs of blocks of one row at one size, and what went wrong; seconds and bytes of one rank."""

    copies: bool  # whether the row makes any
    restarts: bool  # whether each block starts anew, so that memory is compared with the plain block before and not the first
    plain: list[float] = field(default_factory=list)  # mean iteration of the plain blocks around each saved block
    saved: list[float] = field(default_factory=list)  # mean iteration of the saved block
    blocked: list[float] = field(default_factory=list)  # mean over the saved block
    worst: list[float] = field(default_factory=list)  # longest block of the training thread in the saved block
    complete: list[float] = field(default_factory=list)  # per step: from the call until all ranks' copies were complete
    missing: int = 0  # steps that never became complete, of a row that makes copies
    held: list[float] = field(default_factory=list)  # memory beyond the same processes' before the first save
    fresh: list[float] = field(default_factory=list)  # freshly mapped memory per iteration, beyond the plain blocks'
    early: list[float] = field(default_factory=list)  # the same for iterations right after the first save
    rejected: int = 0
    problem: str | None = None
    leftover: list[str] = field(default_factory=list)

    def add(self, ranks: list[list[Block]], limit: float) -> int:
        """Add one trial's blocks, those in which other programs took more than ``limit`` left out; returns how many were added."""
        idle = ranks[0][0].fresh / len(ranks[0][0].iterations)
        self.early += [(block.fresh - idle) / len(ranks) for block in ranks[0] if block.warm]
        ranks = [[block for block in blocks if not block.warm] for blocks in ranks]
        first, added = ranks[0], 0
        for i in range(1, len(first) - 1, 2):
            if max(block.foreign for block in first[i - 1 : i + 2]) > limit:
                self.rejected += 1
                continue
            added += 1
            self._add_pair([rank[i - 1 : i + 2] for rank in ranks], start_held=first[i - 1 if self.restarts else 0].held)
        return added

    def _add_pair(self, ranks: list[list[Block]], start_held: int) -> None:
        before, block, after = ranks[0]
        slowest = [[max(times) for times in zip(*(rank[k].iterations for rank in ranks), strict=True)] for k in range(3)]
        stops = [max(times) for times in zip(*(rank[1].blocked for rank in ranks), strict=True)]
        self.plain.append(mean(slowest[0] + slowest[2]))
        self.saved.append(mean(slowest[1]))
        self.blocked.append(mean(stops))
        self.worst.append(max(stops))
        self.held.append((block.held - start_held) / len(ranks))
        idle = (before.fresh + after.fresh) / (len(before.iterations) + len(after.iterations))
        self.fresh.append((block.fresh / len(block.iterations) - idle) / len(ranks))
        for step in sorted(block.called)[:-1] if self.copies else ():  # nothing trains beside the last one's background work
            ends = [rank[1].completed.get(step) for rank in ranks]
            if None in ends:
                self.missing += 1
            else:
                self.complete.append(max(end for end in ends if end is not None) - min(rank[1].called[step] for rank in ranks))

    def summary(self, state: int) -> dict[str, Any]:
        """Medians; ``problem`` alone where there is nothing to take a median of."""
        if not self.saved:
            return {"problem": self.problem or "no block was quiet enough", "rejected_blocks": self.rejected}
        found: dict[str, Any] = {
            "iteration_plain_s": common.median(self.plain),
            "iteration_saved_s": common.median(self.saved),
            "iteration_ratio": common.median(saved / plain for saved, plain in zip(self.saved, self.plain, strict=True)),
            "blocked_s": common.median(self.blocked),
            "blocked_worst_s": common.median(self.worst),
            "lost_s": common.median(saved - plain for saved, plain in zip(self.saved, self.plain, strict=True)),
            "complete_s": common.median(self.complete),
            "held_states": common.median(value / state for value in self.held),
            "fresh_mb_per_step": common.median(value / 1e6 for value in self.fresh),
            "fresh_mb_early": common.median(value / 1e6 for value in self.early),
        }
        found = {key: None if value is None else round(value, 5) for key, value in found.items()}
        counts = {"blocks": len(self.saved), "rejected_blocks": self.rejected, "saves_never_complete": self.missing}
        return found | counts | ({"problem": self.problem} if self.problem else {})


def run_trial(row: str, plan: Plan, timeout: float) -> tuple[list[list[Block]], list[str]]:
    """One row once, in fresh processes; returns each rank's blocks, and commands that had to be killed afterwards."""
    mark = f"bench-{uuid.uuid4().hex[:12]}"
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, tempfile.TemporaryDirectory() as output:
        worker = str(Path(__file__).with_name("overhead_worker.py"))
        argv = [sys.executable, "-W", "ignore", worker, row, json.dumps(asdict(plan)), folder, output]
        try:
            common.run_ranks(argv, world=WORLD, mark=mark, timeout=timeout, env={"GEMINI_BENCH_DUMP_AFTER": str(timeout - 5)})
            files = [Path(output, f"{rank}.json") for rank in range(WORLD)]
            blocks = [[_block(item) for item in json.loads(file.read_text())] for file in files]
        finally:
            left = common.end_marked(mark)
        return blocks, left


def _block(item: dict[str, Any]) -> Block:
    item["called"] = {int(step): at for step, at in item["called"].items()}
    item["completed"] = {int(step): at for step, at in item["completed"].items()}
    return Block(**item)


def reason(error: BaseException) -> str:
    """The line of a failed rank's output that says why, in one line."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line).strip() for line in str(error).splitlines()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (named[-1] if named else " ".join(lines[:1]))[:300]


def measure(rows: Iterable[str], plans: Mapping[int, tuple[int, Plan]], limit: float, patience: float) -> dict[int, dict[str, Measured]]:
    """All sizes, all rounds, all rows. A row whose trial fails twice in a row is not tried again at that size."""
    names = list(rows)
    found = {size: {row: Measured(bool(ROWS[row].copies), ROWS[row].own_loop) for row in names} for size in plans}
    for size, (rounds, plan) in plans.items():
        failures = dict.fromkeys(names, 0)
        for turn in range(rounds):
            for row in names:
                if failures[row] < 2:
                    note = _attempt(found[size][row], row, plan, limit, patience)
                    failures[row] = failures[row] + 1 if found[size][row].problem else 0
                    print(f"{size} MB, round {turn + 1}/{rounds}, {row}: {note}", file=sys.stderr, flush=True)
    return found


def _attempt(into: Measured, row: str, plan: Plan, limit: float, patience: float) -> str:
    if patience > 0:
        common.wait_until_quiet(limit, patience)
    try:
        blocks, left = run_trial(row, plan, timeout=120 + plan.megabytes)
    except (common.TrialError, OSError) as error:
        into.problem = reason(error)
        return f"failed: {into.problem}"
    into.problem = None
    into.leftover += left
    added = into.add(blocks, limit)
    lost = common.median(saved - plain for saved, plain in zip(into.saved[-added:], into.plain[-added:], strict=True)) if added else None
    return f"{added} pairs" + (f", lost {lost * 1e3:.1f} ms" if lost is not None else "") + (f", killed {left}" if left else "")


def ratios(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """gemini-ft (state per rank) against its rival and the floor, from the medians of one size."""

    def of(row: str, key: str) -> float | None:
        value = summaries.get(row, {}).get(key)
        return None if value is None else float(value)

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
        lines = [[ROWS[row].title, ROWS[row].copies or "none", *_cells(found)] for row, found in rows.items()]
        parts.append(f"## {size} MB of state per rank, every step saved\n\n" + common.table(COLUMNS, lines))
    shown = [[name, "not measured" if value is None else f"{value:.3f}"] for name, value in ratio.items()]
    parts.append("## Ratios\n\n" + common.table(["ratio", "value"], shown))
    return "\n\n".join(parts)


def _cells(found: Mapping[str, Any]) -> list[str]:
    if "lost_s" not in found:
        return [f"no result: {found['problem']}".replace("|", "/")] + [""] * 8

    def ms(key: str) -> str:
        return "-" if found[key] is None else f"{found[key] * 1e3:.1f}"

    late = found["saves_never_complete"]
    complete = ms("complete_s") + (f" ({late} never)" if late else "")
    blocks = f"{found['blocks']}" + (f" (+{found['rejected_blocks']} rejected)" if found["rejected_blocks"] else "")
    times = [ms("blocked_s"), ms("blocked_worst_s"), ms("lost_s"), complete, ms("iteration_saved_s"), ms("iteration_plain_s")]
    early = "-" if found["fresh_mb_early"] is None else f"{found['fresh_mb_early']:.0f}"
    return [*times, f"{found['held_states']:.2f}", f"{early}, {found['fresh_mb_per_step']:.0f}", blocks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MB, few steps, rows that start fast: under a minute, writes no report")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"rows to measure, of: {', '.join(ROWS)}")
    parser.add_argument(
        "--sizes", nargs="+", type=int, choices=PLANS, metavar="MB", help=f"state per rank, of: {', '.join(map(str, PLANS))}"
    )
    parser.add_argument("--rounds", type=int, help="rounds over all rows; default: by size")
    parser.add_argument("--noise-limit", type=float, default=0.08, help="most that others may take of the machine in a block that counts")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for a quiet machine before a trial")
    arguments = parser.parse_args()
    common.clean_up_on_sigterm()

    plans = QUICK if arguments.quick else {size: PLANS[size] for size in arguments.sizes or PLANS}
    plans = {size: (arguments.rounds or rounds, plan) for size, (rounds, plan) in plans.items()}
    rows = arguments.rows or [name for name, row in ROWS.items() if row.quick or not arguments.quick]
    limit, patience = (1.0, 0.0) if arguments.quick else (arguments.noise_limit, arguments.patience)
    measured = measure(rows, plans, limit, patience)
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
