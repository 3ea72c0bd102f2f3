"""The part of checkpoint_overhead.py that asks what it costs to be observed. Imports no torch."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import common

NEVER = 10**9  # steps between two comparisons that never come
EVERY = 1000  # the default of compare_every
WORLD = 2


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to be observed: by readers of metrics and page, with hangs and slow ranks looked for; by comparing or replaying each step."""

    title: str
    is_watched: bool = True
    is_compared: bool = False
    is_replayed: bool = False


CELLS = {
    "off": Cell(title="nothing", is_watched=False),
    "watched": Cell(title="metrics and page, fetched once a second; hangs; stragglers"),
    "compared": Cell(title="the same, and ranks compared in each step", is_compared=True),
    "replayed": Cell(title="the same, and each step computed again (`verify: replay`)", is_compared=True, is_replayed=True),
}
PROCESSOR = ", processor"  # behind the name of a cell: the seconds of processors in place of those that have passed
AIMS = {"observed_vs_not": "compared", "observed_and_replayed_vs_not": "replayed"}


def measure(rounds: int, megabytes: int, tokens: int, steps: int) -> list[dict[str, float]]:
    """Seconds of an iteration by cell, and of processors, of each round: one trial in fresh processes with all cells in random order."""
    found = []
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            program = str(Path(__file__).with_name("observed_worker.py"))
            seed = random.randrange(2**31)
            argv = [sys.executable, "-W", "ignore", program, *map(str, (megabytes, tokens, steps, seed)), folder]
            mark = f"bench-{uuid.uuid4().hex[:12]}"
            try:
                common.run_ranks(argv, world=WORLD, mark=mark, timeout=300.0)
            finally:
                common.end_marked(mark)
            found.append(json.loads(Path(folder, "seconds.json").read_text()))
        told = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in found[-1].items())
        print(f"round {turn + 1}/{rounds}: {told}", file=sys.stderr, flush=True)
    return found


def ratios(rounds: Sequence[Mapping[str, float]]) -> dict[str, common.Spread]:
    """Iterations divided by those of the same round that nobody observes: of each cell, and of all that is on with its default interval."""
    found = {}
    for name in rounds[0]:
        first = f"off{PROCESSOR}" if name.endswith(PROCESSOR) else "off"
        found[name] = common.interval([each[name] / each[first] for each in rounds])
    for aim, cell in AIMS.items():
        found[aim] = common.interval([(each["watched"] + (each[cell] - each["watched"]) / EVERY) / each["off"] for each in rounds])
    return found


def report(rounds: Sequence[Mapping[str, float]], found: Mapping[str, common.Spread], megabytes: int) -> str:
    """The body of the dated report."""
    rows = [
        (
            cell.title,
            common.spread(common.interval([1e3 * each[name] for each in rounds]), 1),
            common.spread(found[name], 4) if name != "off" else "1",
            common.spread(common.interval([1e3 * each[f"{name}{PROCESSOR}"] for each in rounds]), 1),
            common.spread(found[f"{name}{PROCESSOR}"], 4) if name != "off" else "1",
        )
        for name, cell in CELLS.items()
    ]
    lines = [common.table(("what is on", "iteration, ms", "ratio", "processor, ms", "ratio"), rows), ""]
    lines += [f"`{aim}`: {common.spread(found[aim], 4)}" for aim in AIMS]
    return f"""Two ranks under DDP on two emulated hosts, one torch thread each, {megabytes} MB of state, a snapshot of every step in two
copies. {len(rounds)} rounds of fresh processes, in each all rows in random order, with agents of their own; medians over rounds and their
95 % intervals; ratios are against the first row of the same round. `observed_vs_not` is what an iteration costs with the second row on and
comparisons every {EVERY} steps, as by default, and `observed_and_replayed_vs_not` with `verify: replay` as well; the aim is at most 1.01.
`processor` is the time for which a rank, its agent and the reader of its figures kept a processor busy in an iteration, which
other work on the machine changes less.

""" + "\n".join(lines)
