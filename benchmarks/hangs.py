"""Jobs that hang: is the right rank named, for the right reason, and how long does it take?

Each case is a job of two or three ranks on one to three emulated hosts, in which one rank, after some iteration, is stopped, waits for a
lock, an event or a queue, enters another collective than the others, or leaves the loop. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import common

sys.path.append(str(common.HERE.parent / "tests" / "kit"))  # the ranks are those of the tests
import hang_case
from rank_kit import World

from gemini_ft.events import read_events

KINDS: dict[str, Sequence[hang_case.Act]] = {
    "stopped": [hang_case.stops],
    "asleep": [hang_case.locks, hang_case.waits_for_an_event, hang_case.reads_a_queue],
    "mismatch": [hang_case.broadcasts, hang_case.meets, hang_case.gathers],
    "left": [hang_case.leaves],
}
BOUND = 10.0  # seconds from the timeout to the verdict


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job, and what was said of it.

    Attributes:
        seconds: from the end of the timeout until the last host has heard the verdict.
    """

    kind: str
    act: str
    hosts: list[str]
    culprit: int
    at: int
    causes: list[str]
    ranks: list[list[int]]
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether all hosts have named the rank; where two ranks differ, it cannot be told which of them is wrong."""
        both = self.kind == "mismatch" and len(self.hosts) == 2
        wanted = [0, 1] if both else [self.culprit]
        return {*self.causes} == {self.kind} and all(ranks == wanted for ranks in self.ranks) and len(self.ranks) == len({*self.hosts})


def run_case(kind: str, seed: int) -> Case | None:
    """Runs one job; None: it was judged before the rank had done anything, as a step took longer than the timeout on a busy machine."""
    luck = random.Random(f"{kind} {seed}")
    size = luck.choice([2, 3])
    hosts = [luck.choice("abc") for _ in range(size)]
    act, culprit, at = luck.choice(KINDS[kind]), luck.randrange(size), luck.randrange(5, 30)
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events"
        with World(Path(folder), hosts=hosts, GEMINI_EVENTS=str(events)) as world:
            try:
                world.outcome(hang_case.hang, act, culprit, at)
            except AssertionError:  # the ranks had no processor for a minute
                return None
        told = hang_case.hangs(events)
        steps = [event for event in read_events(events) if event["event"] == "step" and event["iteration"] <= at]
        if max((event["iteration"] for event in steps), default=0) < at:  # nothing had happened yet
            return None
        last = max(event["at"] for event in steps)  # a rank that was stopped goes on before it is killed
        over = max((event["at"] for event in told), default=float("inf")) - last - hang_case.TIMEOUT
        if over < 0:  # it was judged for a step that took longer than the timeout
            return None
    causes, ranks = [event["cause"] for event in told], [event["ranks"] for event in told]
    return Case(kind=kind, act=act.__name__, hosts=hosts, culprit=culprit, at=at, causes=causes, ranks=ranks, seconds=over)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10, help="of each kind")
    parser.add_argument("--quick", action="store_true", help="one of each kind, and no report")
    options = parser.parse_args()
    found: list[Case] = []
    busy = 0
    for seed in range(1 if options.quick else options.cases):
        for kind in KINDS:
            while (case := run_case(kind, seed)) is None:
                busy += 1
                assert busy < len(KINDS) * options.cases, "this machine is too busy"
            found.append(case)
            print(case, flush=True)
    rows, right = [], sum(case.is_right and case.seconds <= BOUND for case in found)
    for kind in KINDS:
        cases = [case for case in found if case.kind == kind]
        seconds = [case.seconds for case in cases]
        acts = ", ".join(sorted({case.act for case in cases}))
        figures = f"{common.median(seconds):.1f}", f"{max(seconds):.1f}"
        rows.append((kind, acts, str(len(cases)), str(sum(case.is_right for case in cases)), *figures))
    table = common.table(("verdict", "what one rank did", "cases", "right rank and reason", "median, s", "longest, s"), rows)
    body = f"""Jobs of two and three ranks on one to three emulated hosts, with a `hang_timeout` of {hang_case.TIMEOUT:g} s.
The time is from the end of the timeout until the last host has heard the verdict; the bound is {BOUND:g} s. In {right} of {len(found)}
cases all hosts named the right rank for the right reason within it. With two ranks that enter different collectives both are named.
{busy} jobs were run again, as a step took longer than the timeout, or a minute, before any rank had done anything.

{table}"""
    if not options.quick:
        print(common.write_report("hangs", "Jobs that hang", body, common.versions(["torch", "gemini-ft"])))
    common.print_result("hangs", {"cases": [asdict(case) for case in found]}, {"right": right / len(found)})
    return int(right < len(found))


if __name__ == "__main__":
    sys.exit(main())
