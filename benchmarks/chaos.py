"""Failures in random order on real processes: does a job always end with the bits of an undisturbed one, and how soon does it go on?

Three to five emulated hosts and a spare, each with launcher, workers and agent of its own; faults by a seed. Between two faults
the job makes some steps, or none: every third fault is followed by another within a second. Three more are drawn for moments inside
agents, workers and launchers (docs/drills.md). Agents and workers write what they do, and the rules of the simulation judge it
(tests/kit/witnessed.py). See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import common
from gemini_ft.agent import lifecycle
from gemini_ft.core.faults import PROCESS_MOMENTS
from gemini_ft.storage.checkpoints import MANIFEST
from gemini_ft.testing import DrillError, EmulatedHosts
from gemini_ft.wire.private import credentials

sys.path.append(str(common.HERE.parent / "tests" / "kit"))  # the rules of histories are those of the tests
import witnessed

WORKER = str(Path(__file__).with_name("chaos_worker.py"))
# Faults that may take the only copy of a shard along: a replica that comes too late does not count. Without it a job waits for the host.
TAKES_A_HOST = {"host killed", "two hosts killed", "launcher killed", "agent and worker killed"}
PATIENCE = 150.0  # seconds without a new step after which a round counts as stuck
SETTINGS = {
    "GEMINI_AGENT_TIMEOUT": "2",
    "GEMINI_REPLICA_TIMEOUT": "2",
    "GEMINI_HANG_TIMEOUT": "5",
    "GEMINI_START_TIMEOUT": "20",
    "GEMINI_TIMEOUT": "20",
    "GEMINI_MAX_RETRIES": "1000",
    "GEMINI_ON_LATE": "skip",
}


@dataclass
class Fault:
    """One fault, or two within a second, and what the job made of it."""

    kinds: list[str]
    at: int  # iteration that had ended
    next_step: float | None = None  # seconds until an iteration ended that had not ended before; None: the job was over
    steps_lost: int = 0
    sources: list[str] = field(default_factory=list)


@dataclass
class Round:
    """One job."""

    seed: int
    hosts: int
    workers: int
    steps: int
    equal: bool = False
    problem: str = ""
    seconds: float = 0.0
    longest_without_commit: float = 0.0
    stayed: int = 0  # times that a worker has begun anew in its process
    faults: list[Fault] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)  # faults that have happened at moments inside processes
    events: int = 0  # of the history that agents and workers have written
    violations: list[str] = field(default_factory=list)  # what must not be in it


class Events:
    """The workers' reports, read once."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""
        self.highest = 0  # iteration that has ended
        self.joined: dict[int, dict[str, Any]] = {}  # rank -> its newest
        self.pids: set[int] = set()  # of all that have joined
        self.stayed = 0  # times that one has joined again
        self.resumed: list[dict[str, Any]] = []
        self.commits: list[float] = []
        self.steps: list[float] = []

    def read(self) -> Events:
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(self._at)
                self._rest += file.read()
                self._at = file.tell()
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        return self

    def _take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "step":
                self.highest = max(self.highest, event["iteration"])
                self.steps.append(event["at"])
            case "joined":
                self.joined[event["rank"]] = event
                self.stayed += event["pid"] in self.pids
                self.pids.add(event["pid"])
            case "resumed":
                self.resumed.append(event)
            case "committed" if event["rank"] == 0:
                self.commits.append(event["at"])


class Monkey:
    """Disturbs one job."""

    def __init__(self, job: EmulatedHosts, events: Events, chance: random.Random, longest_stop: float) -> None:
        self._job, self._events, self._chance, self._longest = job, events, chance, longest_stop
        self._timers: list[threading.Timer] = []
        self.deeds: dict[str, Callable[[], None]] = {
            "worker killed": lambda: self._signal(self._worker(), signal.SIGKILL),
            "worker raises": lambda: self._signal(self._worker(), signal.SIGUSR2),
            "all workers killed": self._all_workers,
            "agent killed": lambda: self._signal(self._agent(self._host()), signal.SIGKILL),
            "agent and worker killed": self._agent_and_worker,
            "host killed": self._kill_host,
            "two hosts killed": self._two_hosts,
            "launcher killed": self._launcher,
            "worker stopped": lambda: self._signal(self._worker(), signal.SIGSTOP),
            "agent stopped": self._stop_agent,
        }

    def strike(self, kind: str) -> None:
        self.deeds[kind]()

    def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()

    # -- who

    def _host(self) -> str:
        """A host of the present incarnation, as far as one can know."""
        hosts = [event["host"] for event in self._events.read().joined.values() if event["host"] in self._job.alive]
        chosen: str = self._chance.choice(sorted(hosts) or self._job.alive)
        return chosen

    def _worker(self, host: str | None = None) -> int | None:
        workers = [event["pid"] for event in self._events.read().joined.values() if host in (None, event["host"])]
        return self._chance.choice(sorted(workers)) if workers else None

    def _agent(self, host: str) -> int | None:
        sock = lifecycle.try_connect(self._job.run, host)
        if sock is None:
            return None
        with sock:
            return credentials(sock)[0]

    def _signal(self, pid: int | None, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)

    # -- what

    def _all_workers(self) -> None:
        for event in self._events.read().joined.values():
            self._signal(event["pid"], signal.SIGKILL)

    def _agent_and_worker(self) -> None:
        host = self._host()
        agent, worker = self._agent(host), self._worker(host)
        self._signal(agent, signal.SIGKILL)
        self._signal(worker, signal.SIGKILL)

    def _kill_host(self) -> None:
        self._job.replace(self._host())

    def _two_hosts(self) -> None:
        one = self._host()
        self._job.kill(one)
        if len(self._job.alive) > 1:
            self._job.kill(self._host())
            self._job.add()
        self._job.restart(one)  # these may be all that have taken part, without whom no other begins

    def _launcher(self) -> None:
        self._signal(self._job.launcher_pid(self._host()), signal.SIGKILL)
        self._job.add()

    def _stop_agent(self) -> None:
        if (pid := self._agent(self._host())) is not None:
            self._signal(pid, signal.SIGSTOP)
            self._timers.append(threading.Timer(self._chance.uniform(0.5, self._longest), self._signal, (pid, signal.SIGCONT)))
            self._timers[-1].daemon = True
            self._timers[-1].start()


# --------------------------------------------------------------------------- rounds


def inside(chance: random.Random, steps: int) -> str:
    """Faults at three different moments inside processes; one that is alone in its place never looks like an error that comes back."""
    drawn = []
    for moment in chance.sample(list(PROCESS_MOMENTS), 3):
        kind = chance.choice(("sigkill", "exit", "exception", "delay:seconds=3"))
        step = {"agent": f"step={chance.randint(1, steps)}:", "worker": "step=1:" * (moment != "worker_hands_over")}
        kind = "delay:seconds=3" if moment.startswith("launcher_") else kind  # else hosts would be lost that nobody replaces
        drawn.append(f"{step.get(moment.partition('_')[0], '')}moment={moment}:{kind}")
    return "; ".join(drawn)


def job_of(hosts: int, workers: int, steps: int, folder: Path, restart: str = "process", faults: str = "") -> EmulatedHosts:
    """The job, in an empty folder; every twentieth step is in storage, for when all holders of a shard are lost."""
    (folder / "out").mkdir(parents=True)
    env = SETTINGS | {"GEMINI_STORAGE__URL": f"file://{folder}/store", "GEMINI_STORAGE__EVERY_STEPS": "20", "GEMINI_RESTART": restart}
    env |= {"GEMINI_FAULTS": faults, **witnessed.witness(folder)}
    return EmulatedHosts(hosts, [WORKER, "--steps", str(steps), "--out", str(folder / "out")], folder, workers=workers, env=env)


def ends(folder: Path) -> dict[str, Any]:
    """The final state and hash of each rank."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((folder / "out").glob("*.json"))}


def undisturbed(hosts: int, workers: int, steps: int, folder: Path) -> dict[str, Any]:
    with job_of(hosts, workers, steps, folder) as job:
        job.finish()
    return ends(folder)


def disturbed(round_: Round, faults: int, longest_stop: float, folder: Path, restart: str) -> dict[str, Any]:
    """Carry a round out; its record is filled on the way."""
    chance = random.Random(round_.seed)
    with job_of(round_.hosts, round_.workers, round_.steps, folder, restart, inside(chance, round_.steps)) as job:
        job.add()  # the spare
        events = Events(folder / "events")
        monkey = Monkey(job, events, chance, longest_stop)
        try:
            for _ in range(faults):
                target = events.read().highest + chance.randint(1, 20)
                if not _reach(job, events, target):
                    break
                is_stored = any((folder / "store").rglob(MANIFEST))
                _strike(round_, chance, monkey, job, events, is_stored)
            job.finish(2 * PATIENCE)
        finally:
            monkey.stop()
            _measure_commits(round_, events.read())
            round_.stayed = events.stayed
            history = witnessed.read(folder)
            round_.events, round_.violations = len(history), witnessed.violations(history)
            round_.inside = sorted(path.read_text().strip() for path in (folder / "faults").glob("*"))
    return ends(folder)


def _strike(round_: Round, chance: random.Random, monkey: Monkey, job: EmulatedHosts, events: Events, is_stored: bool) -> None:
    """Carries out one fault, or two; while nothing is in storage, one that takes no host."""
    kinds = [kind for kind in monkey.deeds if is_stored or kind not in TAKES_A_HOST]
    fault = Fault([chance.choice(kinds)], events.read().highest)
    resumed, begin = len(events.resumed), time.monotonic()
    round_.faults.append(fault)
    monkey.strike(fault.kinds[0])
    if chance.random() < 1 / 3 and is_stored:
        time.sleep(chance.uniform(0, 1))
        fault.kinds.append(chance.choice(list(monkey.deeds)))
        monkey.strike(fault.kinds[1])
    before = events.read().highest
    if _reach(job, events, before + 1):
        fault.next_step = time.monotonic() - begin
    found = events.resumed[resumed:]
    fault.steps_lost = max([before - event["iteration"] for event in found], default=0)
    fault.sources = sorted({where.split()[0] for event in found for where in event["sources"]})


def _reach(job: EmulatedHosts, events: Events, iteration: int) -> bool:
    """Wait until an iteration has ended; False: the job is over before that."""
    until = time.monotonic() + PATIENCE
    while events.read().highest < iteration:
        if not job.alive:
            return False
        if time.monotonic() > until:
            raise DrillError(f"no new step within {PATIENCE:g} s after iteration {events.highest}{job._tails()}")
        time.sleep(0.05)
    return True


def _measure_commits(round_: Round, events: Events) -> None:
    """The longest time from one commit to the next in which steps were made all the while: restarts are another figure."""
    commits, steps = sorted(events.commits), sorted(events.steps)
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    pauses = [(at, at + gap) for at, gap in zip(steps, gaps, strict=False) if gap > 1.0]
    for one, other in pairwise(commits):
        idle = sum(min(stop, other) - max(start, one) for start, stop in pauses if start < other and stop > one)
        round_.longest_without_commit = max(round_.longest_without_commit, other - one - idle)


def campaign(options: argparse.Namespace) -> list[Round]:
    rounds: list[Round] = []
    expected: dict[tuple[int, int, int], dict[str, Any]] = {}
    chance = random.Random(options.seed)
    steps = 20 + 20 * options.faults_per_round
    done = 0
    while done < options.faults:
        shape = (3, 1) if options.quick else chance.choice([(3, 1), (4, 1), (5, 1), (3, 2)])
        round_ = Round(chance.randrange(2**31), *shape, steps)
        with tempfile.TemporaryDirectory(prefix="chaos-", dir=options.folder) as folder:
            key = (*shape, steps)
            if key not in expected:
                expected[key] = undisturbed(*key, Path(folder, "undisturbed"))
            begin = time.monotonic()
            try:
                wanted = min(options.faults_per_round, options.faults - done)
                found = disturbed(round_, wanted, options.longest_stop, Path(folder, "disturbed"), options.restart)
                round_.equal = found == expected[key] and not round_.violations
                round_.problem = "" if found == expected[key] else "the ranks ended with other bits"
                round_.problem = round_.problem or "".join(round_.violations[:1])
            except DrillError as error:
                round_.problem = str(error)
            round_.seconds = time.monotonic() - begin
        rounds.append(round_)
        done += max(1, sum(len(fault.kinds) for fault in round_.faults))
        print(_line(round_), file=sys.stderr, flush=True)
        if options.journal:
            with open(options.journal, "a") as journal:
                journal.write(json.dumps(asdict(round_)) + "\n")
    return rounds


def _line(round_: Round) -> str:
    kinds = Counter(kind for fault in round_.faults for kind in fault.kinds)
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    told += "".join(f", {text}" for text in round_.inside)
    verdict = "same bits" if round_.equal else f"FAILED: {round_.problem}"
    return f"seed {round_.seed}, {round_.hosts} hosts, {round_.workers} per host, {round_.seconds:.0f} s: {told}: {verdict}"


# --------------------------------------------------------------------------- report


def summary(rounds: list[Round]) -> dict[str, Any]:
    faults = [fault for round_ in rounds for fault in round_.faults]
    waits = [fault.next_step for fault in faults if fault.next_step is not None]
    return {
        "rounds": len(rounds),
        "faults": sum(len(fault.kinds) for fault in faults),
        "median_next_step_s": round(statistics.median(waits), 2) if waits else None,
        "worst_next_step_s": round(max(waits), 2) if waits else None,
        "longest_without_commit_s": round(max((round_.longest_without_commit for round_ in rounds), default=0.0), 2),
        "inside": sum(len(round_.inside) for round_ in rounds),
        "stayed": sum(round_.stayed for round_ in rounds),
        "events": sum(round_.events for round_ in rounds),
        "violations": sum(len(round_.violations) for round_ in rounds),
        "worst_steps_lost": max((fault.steps_lost for fault in faults), default=0),
        "sources": dict(Counter(source for fault in faults for source in fault.sources)),
    }


def report(rounds: list[Round], figures: dict[str, Any], restart: str) -> str:
    """The body of the dated report."""
    faults = [fault for round_ in rounds for fault in round_.faults]
    lines = [
        f"Settings: {json.dumps(SETTINGS)}; storage every 20 steps; `--restart {restart}`.",
        "",
        f"{figures['faults']} faults in {figures['rounds']} rounds; {sum(r.equal for r in rounds)} ended with the undisturbed bits. "
        f"{figures['inside']} more happened at moments inside processes. {figures['stayed']} times a worker began anew in its process. "
        f"The histories have {figures['events']} events, of which {figures['violations']} must not be.",
        "",
        "| fault (alone) | times | next step, median s | worst s | steps lost, median | worst |",
        "|---|---|---|---|---|---|",
    ]
    for kind in sorted({fault.kinds[0] for fault in faults}):
        alone = [fault for fault in faults if fault.kinds == [kind]]
        lines.append(_row(kind, alone))
    lines.append(_row("two within a second", [fault for fault in faults if len(fault.kinds) == 2]))
    lines += [
        "",
        f"In all: {json.dumps(figures)}",
        "",
        "| seed | hosts | per host | faults | s | longest without a commit, s | end |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rounds:
        end = "same bits" if r.equal else r.problem.splitlines()[0]
        count = sum(len(fault.kinds) for fault in r.faults)
        lines.append(f"| {r.seed} | {r.hosts} | {r.workers} | {count} | {r.seconds:.0f} | {r.longest_without_commit:.1f} | {end} |")
    return "\n".join(lines) + "\n"


def _row(kind: str, faults: list[Fault]) -> str:
    waits, lost = [f.next_step for f in faults if f.next_step is not None], [f.steps_lost for f in faults]
    if not waits:
        return f"| {kind} | {len(faults)} | | | | |"
    return f"| {kind} | {len(faults)} | {statistics.median(waits):.2f} | {max(waits):.2f} | {statistics.median(lost):g} | {max(lost)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of three hosts and four faults, under two minutes; no report")
    parser.add_argument("--faults", type=int, default=200, help="how many in all")
    parser.add_argument("--faults-per-round", type=int, default=10)
    parser.add_argument("--restart", choices=("process", "in_place"), default="process", help="as of gemini run")
    parser.add_argument("--longest-stop", type=float, default=30.0, help="seconds for which an agent is stopped at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="where the jobs write")
    parser.add_argument("--journal", type=Path, default=None, help="a line of JSON per round is appended here")
    options = parser.parse_args()
    if options.quick:
        options.faults = options.faults_per_round = 4
        options.longest_stop = 4.0
    rounds = campaign(options)
    figures = summary(rounds)
    if not options.quick:
        title, packages = "Chaos: random failures on real processes", common.versions(("torch", "gemini-ft"))
        path = common.write_report("chaos", title, report(rounds, figures, options.restart), packages)
        print(f"report: {path}", file=sys.stderr)
    ratios = {"rounds_equal": sum(r.equal for r in rounds) / len(rounds), "worst_next_step_s": figures["worst_next_step_s"]}
    common.print_result("chaos", figures, ratios)
    return 0 if all(r.equal for r in rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
