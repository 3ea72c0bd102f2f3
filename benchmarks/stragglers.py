"""Jobs with a rank at half speed: is it named within thirty steps, and nobody where all are as fast as each other?

Each case is a job of two or three ranks on one to three emulated hosts. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import common

sys.path.append(str(common.HERE.parent / "tests" / "kit"))  # the ranks are those of the tests
import session_case
from rank_kit import World

from gemini_ft.core.stragglers import WINDOW
from gemini_ft.events import read_events

KINDS = ("sleeps", "computes")
PAUSE = 0.1  # seconds that each rank takes for a step, much more than its computing; a slow one takes as long again
BOUND = 30  # steps


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job.

    Attributes:
        how: the slow rank "sleeps" or "computes".
        hosts: of each rank.
        culprit: the rank that is slow.
        since: the first step in which it is.
        named: for each line `straggler` of one host, the ranks that it names, and how many steps after ``since`` it does.
    """

    how: str
    hosts: list[str]
    culprit: int
    since: int
    named: list[tuple[list[int], int]]

    @property
    def is_right(self) -> bool:
        return len(self.named) == 1 and self.named[0][0] == [self.culprit] and self.named[0][1] <= BOUND


def named(folder: Path, hosts: list[str], since: int, steps: int, during: session_case.Hook | None) -> list[tuple[list[int], int]]:
    """Runs a job, and returns `Case.named`: what the first host's lines say; 0 steps where a line names nobody new."""
    events = folder / "events"
    with World(folder, hosts=hosts, GEMINI_EVENTS=str(events)) as world:
        world.outcome(partial(session_case.loop, steps, during=during, pause=PAUSE))
    said = [event for event in read_events(events) if event["event"] == "straggler" and event["host"] == hosts[0]]
    begun = [(event["ranks"], re.search(r"since step (\d+)", event["text"])) for event in said]
    return [(ranks, int(begin[1]) + 3 * WINDOW - 1 - since if begin is not None else 0) for ranks, begin in begun]


def run_case(how: str, seed: int) -> Case:
    luck = random.Random(f"{how} {seed}")
    hosts = [luck.choice("abc") for _ in range(luck.choice([2, 3]))]
    culprit, since = luck.randrange(len(hosts)), luck.randrange(10, 40)
    with tempfile.TemporaryDirectory() as folder:
        slow = partial(session_case.drag, how, culprit, since, 1.1 * PAUSE)
        found = named(Path(folder), hosts, since, since + BOUND + 4, slow)
    return Case(how=how, hosts=hosts, culprit=culprit, since=since, named=found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10, help="of each kind")
    parser.add_argument("--quick", action="store_true", help="one of each kind, 200 quiet steps, and no report")
    options = parser.parse_args()
    found: list[Case] = []
    for seed in range(1 if options.quick else options.cases):
        for how in KINDS:
            found.append(run_case(how, seed))
            print(found[-1], flush=True)
    steps = 200 if options.quick else 2000
    with tempfile.TemporaryDirectory() as folder:
        alarms = named(Path(folder), ["a", "b", "c"], 0, steps, None)
    right, rows = sum(case.is_right for case in found), []
    for how in KINDS:
        cases = [case for case in found if case.how == how]
        late = [case.named[0][1] for case in cases if case.named]
        rows.append((how, str(len(cases)), str(sum(case.is_right for case in cases)), str(max(late, default="-"))))
    table = common.table(("the slow rank", "cases", "right rank, and no other", "most steps until it is named"), rows)
    body = f"""Jobs of two and three ranks on one to three emulated hosts; a step takes {PAUSE:g} s, and the slow rank twice as long.
In {right} of {len(found)} cases that rank was named within {BOUND} steps, and no other. In {steps} steps of a job of three ranks in which
none was slow, ranks were named {len(alarms)} times.

{table}"""
    if not options.quick:
        print(common.write_report("stragglers", "Ranks at half speed", body, common.versions(["torch", "gemini-ft"])))
    ratios = {"right": right / len(found), "false_alarms": float(len(alarms))}
    common.print_result("stragglers", {"cases": [asdict(case) for case in found]}, ratios)
    return int(right < len(found) or bool(alarms))


if __name__ == "__main__":
    sys.exit(main())
