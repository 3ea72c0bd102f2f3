"""A compressed hour: the share of the time that counts when something fails every minute, gemini-ft beside torchrun with checkpoint files.

Four emulated hosts with a worker each, and a spare. A seed draws when, where and what fails: a worker is killed, a worker raises an
exception, or a host is lost; all jobs have the same failures. See benchmarks/README.md.
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
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import common
from recovery_time import JOBS as RECOVERED
from recovery_time import PATIENCE, TORCHRUN, Job, Running, running

PACKAGES = ("torch", "gemini-ft")
HOSTS = 4
KINDS = ("worker", "exception", "host")
RARE = 600.0  # seconds from one failure to the next, for which the shares are extrapolated
JOBS = {
    "gemini_in_place": RECOVERED["gemini_in_place"],
    "gemini_process": RECOVERED["gemini_plain"],
    "torchrun_1": Job("torchrun, a file after every step", TORCHRUN, "plain", "files"),
    "torchrun_20": Job("torchrun, a file after every 20 steps", TORCHRUN, "plain", "files", every=20),
}
BARE = Job("torchrun, nothing is kept and nothing fails", TORCHRUN, "plain", "files", every=0)
BASELINES = ("torchrun_1", "torchrun_20")


@dataclass(frozen=True)
class Step:
    """The end of a step of rank 0."""

    life: str  # the attempt
    at: float
    number: int


@dataclass(frozen=True)
class Account:
    """The time of one job, in seconds.

    Attributes:
        steps: that were made, each counted once.
        wall: from the first step to the last one.
        step: mean of a new step between failures.
        failures: how many there were.
    """

    steps: int
    wall: float
    step: float
    failures: int

    @property
    def cost(self) -> float:
        """Seconds that a failure has cost, to the end of what had to be trained again."""
        return max(0.0, self.wall - self.steps * self.step) / self.failures if self.failures else 0.0

    def share(self, ideal: float) -> float:
        """The part of the time that counts; a step that nothing is kept of takes ``ideal`` seconds."""
        return self.steps * ideal / self.wall

    def share_of_rare(self) -> float:
        """The same between steps as they are, with a failure in each `RARE` seconds."""
        return max(0.0, 1 - self.cost / RARE)


def account(steps: Sequence[Step], failures: int) -> Account:
    """Makes up the account of a job.

    Raises:
        common.TrialError: it has made no two steps in a row.
    """
    if not steps:
        raise common.TrialError("no step was made")
    furthest, new = steps[0].number, list[float]()
    for before, now in pairwise(steps):
        if now.number > furthest:
            furthest = now.number
            if now.life == before.life:
                new.append(now.at - before.at)
    if not new:
        raise common.TrialError("no two steps were made in a row")
    return Account(furthest - steps[0].number, steps[-1].at - steps[0].at, statistics.fmean(new), failures)


class Progress:
    """Everything that the workers of a job have written, read once."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self.workers: dict[int, dict[str, Any]] = {}  # rank -> the beginning of its newest attempt
        self.steps: list[Step] = []
        self._stepped: set[str] = set()  # attempts of ranks

    def read(self) -> Progress:
        with open(self._path, "rb") as file:
            file.seek(self._at)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        for event in map(json.loads, whole.splitlines()):
            if event["event"] == "started":
                self.workers[event["rank"]] = event
            elif event["event"] == "step":
                self._stepped.add(event["life"])
                if event["rank"] == 0:
                    self.steps.append(Step(event["life"], event["at"], event["step"]))
        return self

    def await_further(self, before: Collection[str] = (), step: int = 0) -> None:
        """Wait until every rank has made a step in an attempt that is none of ``before``, and rank 0 more than ``step`` steps in all.

        Raises:
            common.TrialError: the job did not come so far in the time that it gets.
        """
        until = time.monotonic() + PATIENCE
        while True:
            lives = {worker["life"] for worker in self.read().workers.values()}
            if len(self.workers) == HOSTS and lives <= self._stepped - {*before} and self.steps[-1].number > step:
                return
            if time.monotonic() > until:
                raise common.TrialError(f"no further step within {PATIENCE:.0f} s")
            time.sleep(0.05)


def strike(job: Running, progress: Progress, kind: str, chance: random.Random) -> None:
    """One failure. The host with torchrun's store is spared, and has failures of its worker only."""
    rank = chance.randrange(HOSTS)
    worker = progress.workers[rank]
    if kind == "host" and worker["host"] == "host0":
        worker = progress.workers[(rank + 1) % HOSTS]
    if kind == "host":
        job.kill_host(worker["host"])
        job.start_host()  # the next spare
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker["pid"], signal.SIGKILL if kind == "worker" else signal.SIGUSR2)


def train(job: Job, megabytes: int, seconds: float, every: float, seed: int) -> Account:
    """Trains for ``seconds`` with a failure in every ``every`` seconds (0: none), and on until the last one has been made up for.

    A failure that is due before the one before it has been made up for waits until then.
    """
    chance, count = random.Random(seed), int(seconds // every) if every else 0
    failures = [(number * every + chance.uniform(0, every), chance.choice(KINDS)) for number in range(count)]
    with running(job, megabytes, HOSTS) as job_run:
        if failures:
            job_run.start_host()  # the spare
        progress = Progress(job_run.log)
        progress.await_further()
        begun = time.monotonic()
        for at, kind in failures:
            time.sleep(max(0.0, begun + at - time.monotonic()))
            lives, furthest = [worker["life"] for worker in progress.read().workers.values()], progress.steps[-1].number
            strike(job_run, progress, kind, chance)
            progress.await_further(lives, furthest)
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        return account([step for step in progress.read().steps if step.at >= begun], len(failures))


def report(results: dict[str, dict[str, Any]], settings: str) -> str:
    """The body of the dated report."""
    header = ("job", "steps", "failures", "share that counts", "a failure costs, s", "step, ms", f"share at a failure per {RARE:.0f} s")
    rows = []
    for name, row in results.items():
        if "problem" in row:
            rows.append((JOBS[name].title, *[""] * 5, f"no result: {row['problem']}".replace("|", "/")))
        else:
            cells = (str(row["steps"]), str(row["failures"]), f"{row['share']:.4f}", f"{row['cost_s']:.2f}", f"{1000 * row['step_s']:.1f}")
            rows.append((JOBS[name].title, *cells, f"{row['share_of_rare']:.4f}"))
    return f"{settings}\n\n{common.table(header, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 MB, 8 s and one failure of two jobs, no report")
    parser.add_argument("--megabytes", type=int, help="of state; default: 64")
    parser.add_argument("--minutes", type=float, help="of each job; default: 60")
    parser.add_argument("--every", type=float, help="seconds from one failure to the next; default: 60")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, metavar="JOB", help=f"of: {', '.join(JOBS)}")
    options = parser.parse_args()
    common.clean_up_on_sigterm()

    megabytes = options.megabytes or (8 if options.quick else 64)
    seconds, every = 60 * (options.minutes or (8 / 60 if options.quick else 60)), options.every or (8 if options.quick else 60)
    ideal = train(BARE, megabytes, seconds if options.quick else min(seconds, 120.0), 0.0, options.seed).step
    results: dict[str, dict[str, Any]] = {}
    for name in options.jobs or (["gemini_in_place", "torchrun_1"] if options.quick else JOBS):
        try:
            found = train(JOBS[name], megabytes, seconds, every, options.seed)
            results[name] = {"steps": found.steps, "failures": found.failures, "share": round(found.share(ideal), 4)}
            results[name] |= {
                "step_s": round(found.step, 4),
                "cost_s": round(found.cost, 3),
                "share_of_rare": round(found.share_of_rare(), 4),
            }
        except common.TrialError as error:
            results[name] = {"problem": str(error).strip().splitlines()[-1][:300]}
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    if not options.quick:
        settings = f"{megabytes} MB of state, {seconds / 60:g} minutes of each job, a failure in each {every:g} s, seed {options.seed}; "
        settings += f"a step of which nothing is kept took {1000 * ideal:.1f} ms."
        path = common.write_report("goodput", "The share of the time that counts", report(results, settings), common.versions(PACKAGES))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    shares = {name: row.get("share") for name, row in results.items()}
    pairs = [(name, base) for base in BASELINES if base in shares for name in shares if name not in BASELINES]
    ratios = {f"{name}_vs_{base}": common.ratio(shares[name], shares[base]) for name, base in pairs}
    common.print_result("goodput", {"ideal_step_s": round(ideal, 4), **results}, ratios)


if __name__ == "__main__":
    main()
