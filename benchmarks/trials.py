"""Running trials and adding up what they measured: what the benchmarks of a saved step's cost share. Imports no torch."""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

import common
from measuring import Block, Plan
from peers import Row

K = TypeVar("K")

WORLD = 2
OVER_ROUNDS = "Medians over rounds of the ratios within one round (of memory: over blocks), and their 95 % intervals."
COLUMNS = [
    "row",
    "copies",
    "blocked",
    "worst",
    "lost",
    "complete",
    "iteration",
    "without",
    "cpu, s per GB: ranks, others",
    "memory x state",
    "fresh MB: early, later",
    "blocks",
]


@dataclass
class Measured:
    """All good pairs of blocks of one row at one size, and what went wrong; seconds and bytes of one rank."""

    copies: bool  # whether the row makes any
    same_state: bool  # whether all ranks have the same
    restarts: bool  # whether each block starts anew, so that memory is compared with the plain block before and not the first
    plain: list[float] = field(default_factory=list)  # mean iteration of the plain blocks around each saved block
    saved: list[float] = field(default_factory=list)  # mean iteration of the saved block
    blocked: list[float] = field(default_factory=list)  # mean over the saved block
    worst: list[float] = field(default_factory=list)  # longest block of the training thread in the saved block
    complete: list[float] = field(default_factory=list)  # per step: from the call until all ranks' copies were complete
    missing: int = 0  # steps that never became complete, of a row that makes copies
    held: list[float] = field(default_factory=list)  # memory beyond the same processes' before the first save
    fresh: list[float] = field(default_factory=list)  # freshly mapped memory per iteration, beyond the plain blocks'
    cpu: list[dict[str, float]] = field(default_factory=list)  # processor seconds per save beyond the plain blocks', by whose and mode
    early: list[float] = field(default_factory=list)  # the same for iterations right after the first save
    rejected: int = 0
    problem: str | None = None
    leftover: list[str] = field(default_factory=list)
    rounds: dict[int, dict[str, float]] = field(default_factory=dict)  # round -> key -> median over its one trial
    _complete_before: int = 0

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

    def note_round(self, turn: int, added: int) -> None:
        """Keep what the last ``added`` pairs alone come to."""
        complete = self.complete[self._complete_before :]
        self._complete_before = len(self.complete)
        if not added:
            return
        pairs = list(zip(self.saved[-added:], self.plain[-added:], strict=True))
        figures = {
            "blocked_s": common.median(self.blocked[-added:]),
            "lost_s": common.median(saved - plain for saved, plain in pairs),
            "complete_s": common.median(complete),
            "iteration_s": common.median(saved for saved, _ in pairs),
            "iteration_ratio": common.median(saved / plain for saved, plain in pairs),
            "cpu_s": common.median(sum(each.values()) for each in self.cpu[-added:]),
        }
        self.rounds[turn] = {key: value for key, value in figures.items() if value is not None}

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
        quiet = {key: (before.cpu[key] + after.cpu[key]) / (len(before.iterations) + len(after.iterations)) for key in block.cpu}
        self.cpu.append({key: seconds / len(block.iterations) - quiet[key] for key, seconds in block.cpu.items()})
        self.fresh.append((block.fresh / len(block.iterations) - idle) / len(ranks))
        for step in sorted(block.called)[:-1] if self.copies else ():  # nothing trains beside the last one's background work
            ends = [rank[1].completed.get(step) for rank in ranks]
            if None in ends:
                self.missing += 1
            else:
                self.complete.append(max(end for end in ends if end is not None) - min(rank[1].called[step] for rank in ranks))

    def cpu_per_gb(self, state: int) -> dict[str, float | None]:
        """Processor seconds of all processes per GB of distinct state that is saved, in all and by whose and mode."""
        distinct = state * (1 if self.same_state else WORLD) / 1e9
        found = {key: common.median(each[key] / distinct for each in self.cpu) for key in (self.cpu or [{}])[0]}
        return {"cpu_s_per_gb": common.median(sum(each.values()) / distinct for each in self.cpu)} | found

    def summary(self, state: int) -> dict[str, Any]:
        """Medians; ``problem`` alone where there is nothing to take a median of.

        Args:
            state: bytes of one rank's.
        """
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
            **self.cpu_per_gb(state),
            "held_states": common.median(value / state for value in self.held),
            "fresh_mb_per_step": common.median(value / 1e6 for value in self.fresh),
            "fresh_mb_early": common.median(value / 1e6 for value in self.early),
        }
        found = {key: None if value is None else round(value, 5) for key, value in found.items()}
        counts = {"blocks": len(self.saved), "rejected_blocks": self.rejected, "saves_never_complete": self.missing}
        return found | counts | ({"problem": self.problem} if self.problem else {})


def run_trial(worker: str, row: str, plan: Plan, timeout: float) -> tuple[list[list[Block]], list[str]]:
    """One row once, in fresh processes; returns each rank's blocks, and commands that had to be killed afterwards."""
    mark = f"bench-{uuid.uuid4().hex[:12]}"
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, tempfile.TemporaryDirectory() as output:
        program = str(Path(__file__).with_name(worker))
        argv = [sys.executable, "-W", "ignore", program, row, json.dumps(asdict(plan)), folder, output]
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


def measure(
    worker: str, rows: Mapping[str, Row], plans: Mapping[K, tuple[int, Plan]], limit: float, patience: float
) -> dict[K, dict[str, Measured]]:
    """All plans, all rounds, all rows in random order. A row whose trial fails twice in a row is not tried again in that plan.

    Args:
        worker: the program of one rank.
        rows: what to measure.
        plans: how often, and how.
        limit: most that other programs may take of the machine in a block that counts.
        patience: seconds to wait for a quiet machine before a trial.
    """
    found = {key: {name: Measured(bool(row.copies), row.same_state, row.own_loop) for name, row in rows.items()} for key in plans}
    for key, (rounds, plan) in plans.items():
        failures = dict.fromkeys(rows, 0)
        for turn in range(rounds):
            for row in random.sample(list(rows), len(rows)):
                if failures[row] < 2:
                    note = _attempt(found[key][row], worker, row, plan, limit=limit, patience=patience, turn=turn)
                    failures[row] = failures[row] + 1 if found[key][row].problem else 0
                    print(f"{key}, round {turn + 1}/{rounds}, {row}: {note}", file=sys.stderr, flush=True)
    return found


def _attempt(into: Measured, worker: str, row: str, plan: Plan, *, limit: float, patience: float, turn: int) -> str:
    if patience > 0:
        common.wait_until_quiet(limit, patience)
    try:
        blocks, left = run_trial(worker, row, plan, timeout=120 + plan.megabytes)
    except (common.TrialError, OSError) as error:
        into.problem = reason(error)
        return f"failed: {into.problem}"
    into.problem = None
    into.leftover += left
    added = into.add(blocks, limit)
    into.note_round(turn, added)
    lost = common.median(saved - plain for saved, plain in zip(into.saved[-added:], into.plain[-added:], strict=True)) if added else None
    return f"{added} pairs" + (f", lost {lost * 1e3:.1f} ms" if lost is not None else "") + (f", killed {left}" if left else "")


def paired(rows: Mapping[str, Measured], base: str, key: str) -> dict[str, common.Spread]:
    """Row -> its figure divided by that of ``base`` in the same round; infinite where the base cost nothing and the row did."""
    found = {}
    for name, measured in rows.items():
        pairs = [
            (figures[key], rows[base].rounds[turn][key])
            for turn, figures in measured.rounds.items()
            if key in figures.keys() & rows[base].rounds.get(turn, {}).keys()
        ]
        if name != base and pairs:
            found[name] = common.interval([_quotient(top, bottom) for top, bottom in pairs])
    return found


def _quotient(top: float, bottom: float) -> float:
    if bottom > 0:
        return top / bottom
    return math.inf if top > 0 else 1.0  # noise has made the difference of two blocks negative


def against(rows: Mapping[str, Measured], row: str, wanted: Mapping[str, tuple[str, str]]) -> dict[str, common.Spread]:
    """Ratios of one plan, as far as they were measured: name -> a figure of ``row`` divided by that of another row, as ``wanted`` says."""
    pairs = {name: paired(rows, base, key).get(row) for name, (key, base) in wanted.items() if base in rows and row in rows}
    return {name: found for name, found in pairs.items() if found is not None}


def worst(found: Mapping[K, Mapping[str, common.Spread]]) -> dict[str, float | None]:
    """Each ratio at the plan at which it is highest; None: it is infinite there, or a plan has no result for it."""
    names = dict.fromkeys(name for ratios in found.values() for name in ratios)
    return {name: _finite(max(ratios[name][0] if name in ratios else math.inf for ratios in found.values())) for name in names}


def by_plan(found: Mapping[K, Mapping[str, common.Spread]]) -> dict[str, dict[str, list[float | None]]]:
    """For the line of JSON: plan -> ratio -> median and the ends of its interval."""
    return {str(key): {name: [_finite(value) for value in each] for name, each in ratios.items()} for key, ratios in found.items()}


def _finite(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


def table(title: str, rows: Mapping[str, Row], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Summaries of one plan as a section of the report."""
    lines = [[rows[name].title, rows[name].copies or "none", *_cells(found)] for name, found in results.items()]
    return f"## {title}\n\n" + common.table(COLUMNS, lines)


def ratio_table(found: Mapping[K, Mapping[str, common.Spread]], told: str = OVER_ROUNDS) -> str:
    """The section with the ratios of all plans; ``told`` says what they are."""
    names = dict.fromkeys(name for ratios in found.values() for name in ratios)
    rows = [[name, *(_with_mark(ratios[name]) if name in ratios else "-" for ratios in found.values())] for name in names]
    mark = "With a star: that is wider than a tenth of the median, or a single value."
    return f"## Ratios\n\n{told} {mark}\n\n" + common.table(["ratio", *map(str, found)], rows)


def _with_mark(value: common.Spread) -> str:
    middle, low, high = value
    return common.spread(value, 3) + " *" * (low == high or not math.isfinite(high) or high - low > 0.1 * abs(middle))


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every benchmark of this kind has."""
    parser.add_argument("--rounds", type=int, help="rounds over all rows; default: by size")
    parser.add_argument("--noise-limit", type=float, default=0.08, help="most that others may take of the machine in a block that counts")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for a quiet machine before a trial")


def _cells(found: Mapping[str, Any]) -> list[str]:
    if "lost_s" not in found:
        return [f"no result: {found['problem']}".replace("|", "/")] + [""] * (len(COLUMNS) - 3)

    def ms(key: str) -> str:
        return "-" if found[key] is None else f"{found[key] * 1e3:.1f}"

    late = found["saves_never_complete"]
    complete = ms("complete_s") + (f" ({late} never)" if late else "")
    blocks = f"{found['blocks']}" + (f" (+{found['rejected_blocks']} rejected)" if found["rejected_blocks"] else "")
    times = [ms("blocked_s"), ms("blocked_worst_s"), ms("lost_s"), complete, ms("iteration_saved_s"), ms("iteration_plain_s")]
    early = "-" if found["fresh_mb_early"] is None else f"{found['fresh_mb_early']:.0f}"
    ranks, others = (found[f"{whose}_user"] + found[f"{whose}_kernel"] for whose in ("ranks", "others"))
    cpu = f"{found['cpu_s_per_gb']:.2f}: {ranks:.2f}, {others:.2f}"
    return [*times, cpu, f"{found['held_states']:.2f}", f"{early}, {found['fresh_mb_per_step']:.0f}", blocks]
