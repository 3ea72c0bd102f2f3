"""The package's own agents on simulated time: seeds of faults, each a history that is checked as a whole.

Four hosts with three ranks, or six with five, and, in most runs, storage. Real are the agents, from messages to commits, replicas,
changes of leaders, slots and uploads, and how ranks join, choose and read what they resume; simulated are the clock, the network,
processes and the store (`tests/kit/simulation`). By a seed workers, agents and hosts are killed, stopped and slowed down, links are cut
in one direction or both, connections break, bits flip in memory, and storage fails, lags and is away. A run fails if anything in its
history must not be (`tests/kit/simulation/history.py`): a commit without its copies, something committed that is passed over while it is
there, other bytes than were made, a checkpoint deleted with nothing newer, or no commits when all is well again.

With ``--spells N --gap HOURS`` each seed has N times with faults, and between two of them ranks rest for so long in the mean: nothing
happens then but signs of life, over which the clock jumps. So years pass; the report says how many hours were simulated step by step.

One seed is one history, on any machine: `--first SEED --seeds 1 --history FILE` writes it down. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import common

if __name__ == "__main__" and os.environ.get("PYTHONHASHSEED") != "0":  # the order in sets of names is a part of the history
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **common.one_thread(), "PYTHONHASHSEED": "0"})

sys.path.append(str(common.HERE.parent / "tests" / "kit"))  # the simulation is that of the tests
from simulation.campaign import QUIET, Outcome, play
from simulation.drawn import draw
from simulation.mutations import MUTATIONS
from simulation.world import World

FAULTS = ("agent killed", "cut", "flip", "host lost", "killed", "one way", "probe", "replaced", "rot", "stop", "sudden")
_MUTANT_SECONDS = 20  # of the processor, which a seed of a broken package may take


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    counts = sum((Counter(each.counts) for each in outcomes), Counter[str]())
    return {
        "seeds": len(outcomes),
        "violations": {each.seed: each.wrong for each in outcomes if each.wrong},
        "simulated_hours": round(sum(each.simulated for each in outcomes) / 3600, 2),
        "of_these_step_by_step": round(sum(each.simulated - each.passed for each in outcomes) / 3600, 2),
        "processor_seconds": round(sum(each.processor for each in outcomes), 1),
        "faults": {name: counts[name] for name in FAULTS},
        "commits_heard": counts["commit"],
        "resumed": counts["chosen"],
        "stored": counts["put"],
        "digests": {each.seed: each.digest for each in outcomes} if len(outcomes) <= 10 else {},
    }


def report(figures: dict[str, object], hours: float) -> str:
    wrong = figures["violations"]
    assert isinstance(wrong, dict)
    faults = figures["faults"]
    assert isinstance(faults, dict)
    lines = [
        f"{figures['seeds']} seeds of {hours:g} simulated hours with faults each, and then until the job has come up again. "
        f"Together {figures['simulated_hours']} simulated hours ({figures['of_these_step_by_step']} of them step by step) "
        f"in {figures['processor_seconds']} processor seconds.",
        "",
        common.table(("fault", "times"), [(name, str(number)) for name, number in faults.items()]),
        "",
        f"Hosts heard {figures['commits_heard']} commits; {figures['resumed']} times ranks chose what to resume.",
        "",
        f"{len(wrong)} histories had something that must not be.",
        *(f"- seed {seed}: {'; '.join(texts)[:400]}" for seed, texts in wrong.items()),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three seeds of 100 simulated seconds; writes no report")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--hours", type=float, default=0.05, help="simulated hours with faults, of each seed")
    parser.add_argument("--spells", type=int, default=1, help="times with faults, of each seed, each of --hours")
    parser.add_argument("--gap", type=float, default=240.0, help="hours between two of them, in the mean, over which the clock jumps")
    parser.add_argument("--ranks", type=int, default=0, help="of each job, on hosts of their own; 0: three or five")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no seed after this time")
    parser.add_argument(
        "--history", type=Path, default=None, help="write the history of the first seed, as lines of JSON, and the agents' log"
    )
    parser.add_argument(
        "--mutations",
        type=int,
        default=0,
        metavar="N",
        help="break the package in one place at a time: the seed that has seen it before, and N others at most",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="with --mutations: those whose line has this text")
    parser.add_argument("--drawn", type=int, default=0, metavar="COUNT", help="with --mutations: in that many places which --draw draws")
    parser.add_argument("--draw", type=int, default=1, help="the seed by which these are drawn")
    parser.add_argument(
        "--speed", type=int, nargs="*", default=[], metavar="RANKS", help="time jobs of so many ranks without faults; no report"
    )
    parser.add_argument("--no-report", action="store_true", help="print the results only")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.hours = 3, 100 / 3600
    seconds = options.hours * 3600
    if options.speed:
        return speed(options.speed, seconds)
    if options.mutations:
        broken = {str(each): each.apply for each in draw(options.drawn, options.draw)} if options.drawn else WRITTEN
        broken = {name: each for name, each in broken.items() if options.only in name}
        return mutate(options.first, options.mutations, seconds, broken, "never reached" if options.drawn else "not seen")
    if options.history is not None:
        write_history(options.first, seconds, options.history)
    outcomes, until = [], time.monotonic() + options.seconds
    for seed in range(options.first, options.first + options.seeds):
        if time.monotonic() > until:
            break
        patience = (600 if options.ranks else 60) * options.spells
        outcomes.append(play(seed, seconds, patience=patience, ranks=options.ranks, spells=options.spells, gap=options.gap * 3600))
        for text in outcomes[-1].wrong:
            print(f"seed {seed}: {text}", file=sys.stderr, flush=True)
    figures = summary(outcomes)
    if not (options.quick or options.no_report):
        path = common.write_report("simulate", "Agents on simulated time", report(figures, options.hours), common.versions(("gemini-ft",)))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    hours, processor = sum(each.simulated for each in outcomes) / 3600, sum(each.processor for each in outcomes)
    common.print_result("simulate", figures, {"simulated_hours_per_processor_second": common.ratio(hours, processor)})
    return int(bool(figures["violations"]))


def speed(sizes: Sequence[int], seconds: float) -> int:
    """Times the first ``seconds`` of jobs of so many ranks, each on a host of its own: they join and train, and nothing fails."""
    rows = {}
    for ranks in sizes:
        outcome = play(1, seconds, patience=3600, ranks=ranks, has_faults=False)
        assert not outcome.wrong, outcome.wrong
        hours = common.ratio(outcome.simulated / 3600, outcome.processor)
        rows[str(ranks)] = {
            "processor_seconds": round(outcome.processor, 1),
            "commits": outcome.counts.get("commit", 0),
            "hours_per_second": hours,
        }
    common.print_result("simulate", rows, {})
    return 0


WRITTEN: dict[str, Callable[[], None]] = {f"{each.where}: {each.breaks}": each.apply for each in MUTATIONS}
SEEN = {f"{each.where}: {each.breaks}": each.seed for each in MUTATIONS}


def mutate(first: int, seeds: int, seconds: float, broken: dict[str, Callable[[], None]], otherwise: str) -> int:
    """Says of each place in which the package was broken on purpose which rule has seen it, at which seed, and after how long."""
    found = dict[str, str]()
    for name, apply in broken.items():
        found[name], begin = otherwise, time.monotonic()
        for seed in dict.fromkeys([SEEN.get(name, first), *range(first, first + seeds)]):
            outcome = play(seed, seconds, apply, _MUTANT_SECONDS)
            if outcome.wrong:
                found[name] = f"seed {seed} after {time.monotonic() - begin:.0f} s: {outcome.wrong[0].strip().splitlines()[-1][:200]}"
                break
            if outcome.reached:
                found[name] = "not seen"
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    seen = sum(what.startswith("seed") for what in found.values())
    common.print_result("simulate", {"seen": seen, "of": len(found), "places": found}, {"seen": common.ratio(seen, len(found))})
    return 0


def write_history(seed: int, seconds: float, path: Path) -> None:
    """Writes one history down, with what the agents have logged between its events."""
    if (child := os.fork()) == 0:
        world = World(seed)
        try:
            world.simulate(seconds, QUIET)
        finally:
            path.write_text("".join(f"{json.dumps(event)}\n" for event in world.history))
            path.with_suffix(".log").write_text("\n".join([*world.lines, *world.loop.errors]))
            os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    sys.exit(main())
