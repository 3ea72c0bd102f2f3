"""What the failures of `recovery_time.py` come to: medians, ratios with their intervals, and the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import common
from recovery_parts import PHASES, explanation
from trials import ratio_table

NEVER: common.Spread = (math.inf, math.inf, math.inf)


@dataclass(frozen=True)
class Recovery:
    """One failure; seconds. Each phase ends when the slowest rank has reached its end.

    detection ends when no worker of before the failure is left; rendezvous, when the last new worker process exists;
    process start, when the last one has imported everything; then the process group, the restored state, one optimizer step.
    """

    phases: tuple[float, ...]
    parts: Mapping[tuple[str, str], float]  # (phase, mark that ends the part) -> seconds, in order; those of a phase add up to it
    steps_lost: int
    ordinary_step: float = 0.0  # of the job before the failure: no first step is shorter
    turn: int = 0  # the round

    @property
    def total(self) -> float:
        """From the signal to the end of the next optimizer step."""
        return sum(self.phases)


def summary(recoveries: Sequence[Recovery], problem: str | None) -> dict[str, Any]:
    """Medians over all failures of one kind."""
    if not recoveries:
        return {"problem": (problem or "not run").strip().splitlines()[-1][:300]}
    phases = {name: round(common.median(recovery.phases[i] for recovery in recoveries) or 0.0, 3) for i, name in enumerate(PHASES)}
    turns = dict.fromkeys(recovery.turn for recovery in recoveries)
    by_turn = [[round(each.total, 3) for each in recoveries if each.turn == turn] for turn in turns]
    totals = [*chain(*by_turn)]
    found: dict[str, Any] = {"total_s": common.median(totals), "worst_s": max(totals), "totals_s": by_turn, "phases_s": phases}
    named = dict.fromkeys(part for recovery in recoveries for part in recovery.parts)
    medians = {part: common.median(recovery.parts[part] for recovery in recoveries if part in recovery.parts) or 0.0 for part in named}
    found["parts_s"] = {f"{phase}: {mark}": round(seconds, 3) for (phase, mark), seconds in medians.items()}
    found["ordinary_step_s"] = round(common.median(recovery.ordinary_step for recovery in recoveries) or 0.0, 3)
    found |= {"failures": len(totals), "steps_lost": max(recovery.steps_lost for recovery in recoveries)}
    return found | ({"problem": problem.strip().splitlines()[-1][:300]} if problem else {})


def ratios(results: Mapping[str, Mapping[str, Mapping[str, Any]]], base: str) -> dict[str, dict[str, common.Spread]]:
    """By size, for each kind of failure: the median of the loop that is the worse against that of ``base``.

    Args:
        results: "kind size" -> job -> its summary.
        base: the job that is compared with.

    Returns:
        size -> ratio -> median and interval; infinite where a loop did not come back each time, or ``base`` never.
    """
    found: dict[str, dict[str, common.Spread]] = {}
    for case, rows in results.items():
        kind, _, size = case.partition(" ")
        theirs = rows.get(base, {}).get("totals_s")
        each = [
            common.quotient(row["totals_s"], theirs) if theirs and "problem" not in row else NEVER
            for name, row in rows.items()
            if name != base
        ]
        if base in rows and each:
            found.setdefault(size, {})[f"{kind}_vs_{base}"] = max(each)
    return found


def report(
    results: Mapping[str, Mapping[str, Mapping[str, Any]]], ratio: Mapping[str, Mapping[str, common.Spread]], titles: Mapping[str, str]
) -> str:
    """The body of the dated report."""
    parts = ["Seconds, medians; `total` runs from the signal to the end of the next optimizer step on all ranks."]
    for case, rows in results.items():
        lines = []
        for name, row in rows.items():
            if "total_s" in row:
                cells = [f"{row['phases_s'][phase]:.2f}" for phase in PHASES]
                cells += [f"{row[name]:.2f}" for name in ("ordinary_step_s", "total_s", "worst_s")]
                problem = f", then: {row['problem']}".replace("|", "/") if "problem" in row else ""
                cells += [str(row["steps_lost"]), str(row["failures"]) + problem]
            else:
                cells = [f"no result: {row['problem']}".replace("|", "/"), *[""] * (len(PHASES) + 4)]
            lines.append([titles[name], *cells])
        scenario, _, megabytes = case.partition(" ")
        what = {"worker": "a killed worker", "exception": "an exception in one worker", "host": "a lost host, a spare waiting"}[scenario]
        header = ["job", *PHASES, "(ordinary step)", "total", "worst", "steps lost", "failures"]
        parts.append(f"## {what.capitalize()}, {megabytes} of state\n\n{common.table(header, lines)}")
        parts += explanation({titles[name]: row for name, row in rows.items()})
    told = "Medians of gemini-ft against those of torchrun, of the worse loop; 95 % intervals by drawing rounds, then their failures, anew."
    return "\n\n".join([*parts, ratio_table(ratio, told)])
