"""The nemesis of partitions: a network that falls apart under a job and heals again, at every moment and in every way.

Each round is a job of two or three hosts with spares and one to three stores of the rendezvous, every one of them in a network namespace
of its own, with or without storage that all can reach. By a seed the network is cut into two or three sides, or into halves of which
each could be the job (a host that takes part, a spare, a store), is silenced in one direction, or flaps, while the hosts come together,
train, or restart; perhaps workers are killed meanwhile; after a while it heals. A round fails if

- two jobs of the run still go on a minute after the network has healed, or none does,
- the job that is left has gone back behind what was committed before the cut (behind what was stored, where one side alone
  has not all shards),
- the bits it ends with are not those of an undisturbed job,
- a launcher ends with a status that is not documented for it, or not at all,
- storage has anything newer than what the job has ended with, or not that; where both halves of a job have stored something, neither may
  store more, and the launchers must say so by their status.

Linux, root and iproute2 are needed. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import common

sys.path.append(str(common.HERE.parent / "tests" / "kit"))  # the job is that of the tests
from weights_kit import assert_same_bits, job, reached

from gemini_ft.launch.endings import ENDED_ELSEWHERE, NOT_STORED, OVERTAKEN
from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.storage.lookout import newest_whole
from gemini_ft.storage.opening import open_storage
from gemini_ft.testing import DrillError, Network

PATIENCE = 240.0  # seconds for what must happen on a busy machine
REJOINING = 20.0  # seconds for hosts that were cut off to find where the job is, of which they would not learn after its end
SETTLED = 4.0  # seconds in which one job alone must have committed
SETTINGS = {
    "GEMINI_HANG_TIMEOUT": "6",
    "GEMINI_START_TIMEOUT": "40",
    "GEMINI_TIMEOUT": "20",
    "GEMINI_MAX_RETRIES": "1000",
    "GEMINI_STATE_DIR": "",  # of each round
}
KINDS = ("two sides", "three sides", "halves", "one way", "flapping")
PHASES = ("coming together", "training", "restarting")
WAITS = (0.5, 3.0, 8.0, 15.0, 30.0, 45.0)  # seconds until the network heals
HALVES_WAIT = 75.0  # seconds in which each half of a job has found that the other is lost, and trains


class Failure(Exception):
    """A round has found something."""


@dataclass
class Round:
    """One round: its cut and its outcome."""

    seed: int
    hosts: int
    spares: int
    stores: int
    has_storage: bool
    kind: str
    phase: str
    wait: float
    sides: list[list[str]] = field(default_factory=list)
    kills: int = 0
    committed: int = 0  # at the cut
    stored: int = 0
    worlds: int = 0  # that were formed after the cut
    overtaken: int = 0  # launchers that ended so
    has_two_lines: bool = False  # in storage, so that the job could not store its end
    back: float | None = None  # seconds from the healing to one job that goes on
    seconds: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class World:
    """The ranks that have joined together."""

    number: int  # of the incarnation
    hosts: frozenset[str]


@dataclass
class Course:
    """One world's part of the events."""

    at: float
    start: int
    last: float = 0.0  # when it committed last
    committed: int = 0


class Campaign:
    """One round under way."""

    def __init__(self, this: Round, folder: Path, network: Network) -> None:
        self.this, self.folder = this, folder
        self._dice = random.Random(this.seed)
        self._network = network
        self._stores = [f"store{number}" for number in range(this.stores)]
        env = SETTINGS | {"GEMINI_STATE_DIR": str(folder / "state")}
        if this.has_storage:
            env |= {"GEMINI_STORAGE__URL": f"file://{folder}/store", "GEMINI_STORAGE__EVERY_STEPS": "20", "GEMINI_STORAGE__PATIENCE": "20"}
        self.job = job(folder, this.hosts, self._stores, network, **env)

    def run(self) -> None:
        """Raises Failure."""
        this, hosts = self.this, self.job
        with hosts:
            for _ in range(this.spares):
                hosts.add()
            self._await_phase()
            cut = time.time()
            this.committed, this.stored = self._newest(), self._newest_stored()
            self._disturb()
            healed = time.monotonic()
            target = self._newest() + 20
            try:
                hosts.wait_for(lambda: self._is_one(target), PATIENCE)
            except DrillError as error:
                raise Failure(f"no single job goes on: {self._state()}; {error}") from None
            this.back = time.monotonic() - healed
            time.sleep(REJOINING)
            (hosts.folder / "weights.enough").touch()
            self._await_ends()
            courses = self._courses()
            this.worlds = sum(course.at > cut for course in courses.values())
            self._check_line(courses, cut)
            self._check_results()

    # -- deeds

    def _await_phase(self) -> None:
        hosts, dice = self.job, self._dice
        if self.this.phase == "coming together":
            time.sleep(dice.uniform(0, 12))
            return
        at = dice.randint(25, 80)
        hosts.wait_for(lambda: reached(hosts, at), PATIENCE)
        if self.this.phase == "restarting":
            self._kill_worker(hosts.alive)
            time.sleep(dice.uniform(0, 3))

    def _disturb(self) -> None:
        """Cuts the network, and heals it in the end."""
        this, dice = self.this, self._dice
        places = [*self.job.alive, *self._stores]
        for turn in range(dice.randint(2, 4) if this.kind == "flapping" else 1):
            dice.shuffle(places)
            sides = 3 if this.kind == "three sides" and len(places) > 3 else 2
            borders = sorted(dice.sample(range(1, len(places)), sides - 1))
            split = [places[start:stop] for start, stop in zip([0, *borders], [*borders, len(places)], strict=True)]
            if this.kind == "halves":
                split = [sorted(places)[start::2] for start in range(2)]
            this.sides += [sorted(side) for side in split]
            if this.kind == "one way":
                for place in split[0]:
                    self._network.silence(place, *split[1])
            else:
                for side in split[1:]:
                    self._network.part(*side)
            self._spend(dice.uniform(0.2, 8) if this.kind == "flapping" else this.wait)
            for place in places:
                self._network.heal(place)
            if this.kind == "flapping" and turn:
                time.sleep(dice.uniform(0.1, 4))

    def _spend(self, seconds: float) -> None:
        """Lets the sides do what they do; two of three times a worker somewhere is killed, so that they come together anew."""
        if self._dice.random() < 2 / 3:
            before = self._dice.uniform(0, seconds)
            time.sleep(before)
            self._kill_worker(self.job.alive)
            seconds -= before
        time.sleep(seconds)

    def _kill_worker(self, hosts: Iterable[str]) -> None:
        newest = {event["host"]: event["pid"] for event in self.job.events("joined") if event["host"] in set(hosts)}
        if newest:
            self.this.kills += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(newest[self._dice.choice(sorted(newest))], signal.SIGKILL)

    # -- findings

    def _newest(self) -> int:
        return max((event["iteration"] for event in self.job.events("committed")), default=0)

    def _newest_stored(self) -> int:
        if not self.this.has_storage or not (self.folder / "store").is_dir():
            return 0
        storage = open_storage(f"file://{self.folder}/store")
        return max((info.iteration for info in list_checkpoints(storage)), default=0)

    def _courses(self) -> dict[World, Course]:
        """The steps of each world, in the order in which the worlds were formed."""
        of: dict[int, World] = {}
        courses: dict[World, Course] = {}
        for event in self.job.events("joined", "committed"):
            if event["event"] == "joined":
                world = of[event["pid"]] = World(event["incarnation"], frozenset(event["hosts"]))
                courses.setdefault(world, Course(event["at"], event["iteration"]))
            elif event["pid"] in of:
                course = courses[of[event["pid"]]]
                course.last, course.committed = max(course.last, event["at"]), max(course.committed, event["iteration"])
        return courses

    def _is_one(self, target: int) -> bool:
        """Whether one world alone has committed lately, and has come as far as that."""
        now = time.time()  # before all events are read, which takes seconds on a busy machine
        active = [course for course in self._courses().values() if course.last > now - SETTLED]
        return len(active) == 1 and active[0].committed >= target and now - active[0].at > SETTLED

    def _await_ends(self) -> None:
        end = time.monotonic() + PATIENCE
        while self.job.alive:
            if time.monotonic() > end:
                raise Failure(f"{', '.join(self.job.alive)} did not end when the training was over: {self._state()}")
            time.sleep(0.1)
        status = {f"host{number}": self.job.status(f"host{number}") for number in range(self.this.hosts + self.this.spares)}
        self.this.overtaken = sum(each == OVERTAKEN for each in status.values())
        ended = {each for each in status.values() if each not in (OVERTAKEN, ENDED_ELSEWHERE)}
        self.this.has_two_lines = NOT_STORED in ended and self.this.kind == "halves" and self.this.has_storage
        if not ended or ended - {0, NOT_STORED} or (NOT_STORED in ended and not self.this.has_two_lines):
            raise Failure(f"launchers ended with {status}")

    def _check_line(self, courses: dict[World, Course], cut: float) -> None:
        """Walks back from the world that came last; each that was formed after the cut must have gone on from what was there."""
        this = self.this
        bound = this.stored if this.hosts > 2 and this.has_storage else this.committed
        line = max(courses, key=lambda world: courses[world].last)
        for world in reversed(courses):
            course = courses[world]
            if course.at > courses[line].at or not (world.hosts & line.hosts):
                continue
            line = world
            if course.at > cut and course.start < bound:
                raise Failure(f"{world} of the job that is left began at {course.start}, after {bound} was kept: {self._state()}")

    def _check_results(self) -> None:
        """The last weights, and the newest checkpoint."""
        import torch

        try:
            assert_same_bits(self.folder, self.this.hosts)
        except AssertionError as error:
            raise Failure(f"the job ended with other bits: {error}") from None
        ended = int(torch.load(self.folder / "weights")["steps"])
        if self.this.has_storage:
            storage = open_storage(f"file://{self.folder}/store")
            if self.this.has_two_lines:
                if len({info.version.incarnation for info in list_checkpoints(storage, self.job.run)}) < 2:
                    raise Failure(f"the job could not store its end, though it alone has stored anything: {self._state()}")
                return
            newest, stream = max((info.iteration, info.stream) for info in list_checkpoints(storage, self.job.run))
            found = newest_whole(storage, self.job.run, stream)
            if found is None or found.iteration != ended or newest > ended:
                raise Failure(f"the job ended after step {ended}; storage has {newest}, to be resumed from {found and found.version}")

    def _state(self) -> str:
        courses = [f"{w.number} of {sorted(w.hosts)} from {c.start} to {c.committed}" for w, c in self._courses().items()]
        launchers = {name: self.job.status(name) for name in sorted(self.job._launchers)}
        return f"worlds {courses}, launchers {launchers}"


def draw(dice: random.Random, quick: bool) -> Round:
    if quick:
        return Round(dice.randrange(2**31), 2, 1, 2, True, "two sides", "training", 8.0)
    this = Round(
        seed=dice.randrange(2**31),
        hosts=dice.choice([2, 2, 3]),
        spares=dice.randint(0, 2),
        stores=dice.randint(1, 3),
        has_storage=dice.random() < 0.5,
        kind=dice.choice(KINDS),
        phase=dice.choice(PHASES),
        wait=dice.choice(WAITS),
    )
    if this.kind == "halves":
        this.hosts, this.spares, this.stores, this.wait = 2, 2, dice.randint(2, 3), HALVES_WAIT
        this.phase = dice.choice(PHASES[1:])
    return this


def campaign(options: argparse.Namespace) -> list[Round]:
    dice, rounds, end = random.Random(options.seed), list[Round](), time.monotonic() + options.seconds
    for number in range(options.rounds):
        this = draw(dice, options.quick)
        if number < options.first or time.monotonic() > end:
            continue
        folder = Path(tempfile.mkdtemp(prefix=f"partitions-{number}-", dir=options.folder))
        begun = time.monotonic()
        try:
            with Network() as network:
                Campaign(this, folder, network).run()
        except Failure as failure:
            this.problem = str(failure)
        except DrillError as error:
            this.problem = f"the job: {error}"
        this.seconds = time.monotonic() - begun
        rounds.append(this)
        verdict = f"FAILED: {this.problem}; see {folder}" if this.problem else f"one job, back after {this.back:.0f} s"
        print(f"{number}: {json.dumps(asdict(this) | {'problem': ''})}: {verdict}", file=sys.stderr, flush=True)
        if options.journal:
            with open(options.journal, "a") as journal:
                journal.write(json.dumps(asdict(this) | {"number": number}) + "\n")
        if not (this.problem and options.folder):
            shutil.rmtree(folder)
    return rounds


def summary(rounds: list[Round]) -> dict[str, Any]:
    back = sorted(one.back for one in rounds if one.back is not None)
    return {
        "rounds": len(rounds),
        "failed": sum(bool(one.problem) for one in rounds),
        "kinds": dict(Counter(one.kind for one in rounds)),
        "phases": dict(Counter(one.phase for one in rounds)),
        "with storage": sum(one.has_storage for one in rounds),
        "worlds after the cut": sum(one.worlds for one in rounds),
        "launchers overtaken": sum(one.overtaken for one in rounds),
        "workers killed": sum(one.kills for one in rounds),
        "seconds to one job": {"median": round(statistics.median(back), 1), "longest": round(back[-1], 1)} if back else {},
    }


def report(rounds: list[Round], figures: dict[str, Any]) -> str:
    by_kind: dict[str, list[Round]] = defaultdict(list)
    for one in rounds:
        by_kind[f"{one.kind}, {one.phase}"].append(one)
    rows = [
        [kind, str(len(those)), str(sum(one.overtaken > 0 for one in those)), f"{statistics.median(back):.0f}", f"{max(back):.0f}"]
        for kind, those in sorted(by_kind.items())
        if (back := [one.back for one in those if one.back is not None])
    ]
    found = [f"- seed {one.seed}: {one.problem.splitlines()[0]}" for one in rounds if one.problem]
    every = [
        [
            *(str(r.seed), f"{r.hosts}+{r.spares}", str(r.stores), "yes" if r.has_storage else "no", r.kind, r.phase, f"{r.wait:g}"),
            *(str(r.worlds), str(r.overtaken), f"{r.seconds:.0f}", "FAILED" if r.problem else "one job"),
        ]
        for r in rounds
    ]
    return "\n\n".join(
        [
            f"Settings: {json.dumps({name: value for name, value in SETTINGS.items() if value})}. *Overtaken*: rounds in which two sides "
            "had each formed a job, and one of them ended with status 76. *Seconds*: from the healing to one job that goes on.",
            "## Findings\n\n" + ("\n".join(found) or "None."),
            common.table(["cut, while", "rounds", "overtaken", "seconds, median", "longest"], rows),
            f"In all: {json.dumps(figures)}",
            common.table(["seed", "hosts", "stores", "storage", "cut", "while", "for, s", "worlds after", "overtaken", "s", "end"], every),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of two hosts and a spare, under two minutes; writes no report")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="begin with this round of the seed's, to see it again or to go on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=6 * 3600.0, help="begin no round after this time")
    parser.add_argument("--folder", type=Path, default=None, help="where jobs write; what failed rounds have written stays there")
    parser.add_argument("--journal", type=Path, default=None, help="a line of JSON per round is appended here")
    parser.add_argument("--no-report", action="store_true", help="print the results only")
    options = parser.parse_args()
    common.clean_up_on_sigterm()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    if options.quick:
        options.rounds = 1
    rounds = campaign(options)
    figures = summary(rounds)
    if not (options.quick or options.no_report):
        title, packages = "The nemesis of partitions", common.versions(("torch", "gemini-ft"))
        path = common.write_report("partitions", title, report(rounds, figures), packages)
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    common.print_result("partitions", figures, {"rounds_with_one_job": common.ratio(len(rounds) - figures["failed"], len(rounds))})
    return int(bool(figures["failed"]))


if __name__ == "__main__":
    sys.exit(main())
