"""Seconds from a failure to the next optimizer step, split into phases: gemini-ft beside plain torchrun, in one run.

A worker is killed with SIGKILL, or raises an exception; or a whole host (its launcher, worker and agent at once) while a spare waits in the
rendezvous. Plain torchrun resumes from Lightning's checkpoint of every step on local disk. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import common
from gemini_ft.events import read_events
from recovery_parts import PARTS, split
from recovery_report import Recovery, ratios, report, summary
from trials import by_plan, worst

PACKAGES = ("torch", "lightning", "gemini-ft")
STEPS_BETWEEN = 4  # optimizer steps from one recovery to the next failure
SPARE_HEAD_START = 5.0  # seconds a spare gets at least to start and to wait in the rendezvous
WAITS = "waits as a spare, and is ready"  # in the output of `gemini run`
PATIENCE = 180.0  # seconds until a job that makes no step counts as failed


@dataclass(frozen=True)
class Job:
    """A combination of a training loop and the program that keeps its state."""

    title: str
    launcher: tuple[str, ...]
    loop: str
    keeper: str
    in_place: bool = False  # survivors keep their processes
    every: int = 1  # steps from one file to the next, where these are kept; 0: none


TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
GEMINI_RUN = (sys.executable, "-m", "gemini_ft.cli.main", "run")
JOBS = {
    "gemini_lightning": Job("gemini-ft, Lightning", GEMINI_RUN, "lightning", "gemini"),
    "gemini_plain": Job("gemini-ft, plain loop", GEMINI_RUN, "plain", "gemini"),
    "gemini_in_place": Job("gemini-ft, plain loop, in place", (*GEMINI_RUN, "--restart=in_place"), "plain", "gemini", in_place=True),
    "torchrun": Job("torchrun, Lightning's checkpoint of every step", TORCHRUN, "lightning", "lightning"),
}
# These need benchmarks/requirements-peers.txt. The last one makes no new process: it has no cell for a killed worker.
PEERS = {
    "torchft": Job("torchft, the survivor sends the state", TORCHRUN, "torchft", "lightning", in_place=True),
    "nvrx": Job("NVRx in process, a file of every step", TORCHRUN, "nvrx", "files", in_place=True),
}
JOBS |= PEERS
BASELINE = "torchrun"


# --------------------------------------------------------------------------- a running job


class Running:
    """One job: its launchers (one per emulated host), and the events its workers write."""

    def __init__(self, job: Job, megabytes: int, hosts: int, folder: Path) -> None:
        self.job, self.hosts, self.folder = job, hosts, folder
        self.mark = f"bench-{uuid.uuid4().hex[:12]}"
        self.log = folder / "events"
        self.log.touch()
        self._own = folder / "own-events"  # as gemini-ft itself writes them
        self._endpoint = f"127.0.0.1:{common.free_port()}"
        self._lighthouse = f"http://127.0.0.1:{common.free_port()}"  # torchft's
        self._launchers: list[subprocess.Popen[bytes]] = []
        worker = str(Path(__file__).with_name("recovery_worker.py"))
        options = ["--loop", job.loop, "--keeper", job.keeper, "--every", str(job.every), "--megabytes", str(megabytes)]
        self._script = [worker, *options, "--events", str(self.log), "--folder", str(folder / "checkpoints")]

    def start_lighthouse(self) -> None:
        """Start the process by which torchft's replicas find each other."""
        options = f"bind={self._lighthouse.removeprefix('http://')!r}, min_replicas=2, join_timeout_ms=100, heartbeat_timeout_ms=1000"
        text = f"import time; from torchft.coordination import LighthouseServer; it = LighthouseServer({options}); time.sleep(100000)"
        subprocess.Popen([sys.executable, "-c", text], env={**os.environ, common.MARK: self.mark}, stderr=subprocess.DEVNULL)

    def start_spare(self) -> None:
        """Start one more launcher and return when it waits and is ready for its turn.

        Torchrun does not say so: it counts as waiting once it has become idle.
        """
        host, until = self.start_host(), time.monotonic() + PATIENCE
        log, is_gemini = self.folder / f"{host}.log", self.job.launcher != TORCHRUN
        time.sleep(SPARE_HEAD_START)
        before = common.Usage.now(self.mark, GEMINI_HOST_ID=host)
        while time.monotonic() < until:
            time.sleep(2.0)
            now = common.Usage.now(self.mark, GEMINI_HOST_ID=host)
            if WAITS in log.read_text() if is_gemini else now.own_since(before) < 0.1:
                return
            before = now
        raise common.TrialError(f"the spare does not wait after {PATIENCE:.0f} s")

    def start_host(self) -> str:
        """Start one more launcher and return its host's name; the first ``hosts`` of them train, further ones are spares."""
        name = f"host{len(self._launchers)}"
        if self.job.loop == "torchft":
            where = ["--standalone", "--nproc-per-node=1"]  # a job of its own for each replica
        elif self.hosts == 1:
            where = ["--standalone", "--nproc-per-node=2"]
        else:
            where = [f"--nnodes={self.hosts}", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={self._endpoint}"]
        argv = [*self.job.launcher, *where, "--max-restarts=1000", *self._script]
        env = {**os.environ, **common.one_thread(), common.MARK: self.mark, "GEMINI_HOST_ID": name, "GEMINI_RUN_ID": self.mark}
        env |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "GEMINI_EVENTS": str(self._own)}
        # without it restarts of torch 2.13 on gloo find the dead workers' addresses in the store, and most hang
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0" if self.job.loop == "nvrx" else "1", "TORCHFT_LIGHTHOUSE": self._lighthouse}
        with open(self.folder / f"{name}.log", "ab") as log:
            self._launchers.append(subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT))
        return name

    def kill_host(self, host: str) -> None:
        """End everything of one emulated host as a power cut would: nobody on it gets to say goodbye."""
        for pid in common.marked(self.mark, GEMINI_HOST_ID=host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def events(self) -> list[dict[str, Any]]:
        """Everything written so far, whole lines only."""
        text = self.log.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def own_events(self) -> list[dict[str, Any]]:
        """Everything that gemini-ft has written, on the monotonic clock; the moment at which it began to read the state is one more."""
        ahead, found = time.time() - time.monotonic(), []
        for event in read_events(self._own):
            found.append({**event, "at": event["at"] - ahead})
            if event["event"] == "resumed":
                found.append({**event, "event": "prepared", "at": event["at"] - ahead - event["seconds"]})
        return found

    def wait(self, reached: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Poll the events until ``reached`` holds.

        Raises:
            common.TrialError: it did not within the time a job gets; with the ends of the launchers' outputs.
        """
        until = time.monotonic() + PATIENCE
        while not reached(events := self.events()):
            if time.monotonic() > until or all(launcher.poll() is not None for launcher in self._launchers):
                tails = [f"[{log.stem}] {log.read_text(errors='replace')[-1500:]}" for log in sorted(self.folder.glob("*.log"))]
                raise common.TrialError("no further optimizer step\n" + "\n".join(tails))
            time.sleep(0.01)
        return events


@contextmanager
def running(job: Job, megabytes: int, hosts: int) -> Iterator[Running]:
    """A job with one launcher per host, and nothing of it left afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        found = Running(job, megabytes, hosts, Path(folder))
        try:
            if job.loop == "torchft":
                found.start_lighthouse()
            for _ in range(hosts):
                found.start_host()
                if hosts > 1:
                    time.sleep(1.0)  # the first one is to hold the store
            yield found
        finally:
            common.end_marked(found.mark, patience=0.0)


@dataclass(frozen=True)
class Attempt:
    """The newest set of workers that has all its ranks."""

    pids: Mapping[int, int]  # rank -> process
    lives: Mapping[int, str]  # rank -> process and which of its attempts
    hosts: Mapping[int, str]  # rank -> host it runs on
    events: Sequence[Mapping[str, Any]]

    @classmethod
    def newest(cls, events: Sequence[Mapping[str, Any]]) -> Attempt | None:
        """None until a world's ranks have all started; a rank counts as its latest attempt."""
        starts = {event["rank"]: event for event in events if event["event"] == "started"}
        if not starts or len(starts) < next(iter(starts.values()))["world"]:
            return None
        pids, lives = ({rank: start[key] for rank, start in starts.items()} for key in ("pid", "life"))
        own = [event for event in events if event["life"] in lives.values()]
        return cls(pids, lives, {rank: start["host"] for rank, start in starts.items()}, own)

    def times(self, event: str, key: str = "at") -> list[float]:
        """The times at which each rank first had ``event``; ranks that never had it are left out."""
        first: dict[int, float] = {}
        for entry in self.events:
            if entry["event"] == event:
                first.setdefault(entry["pid"], entry[key])
        return list(first.values())

    def steps(self, event: str = "step") -> list[int]:
        """The steps of all ``event`` entries."""
        return [entry["step"] for entry in self.events if entry["event"] == event]

    def ordinary_step(self) -> float:
        """Median seconds from the end of a step to the end of the next one."""
        ends: dict[str, list[float]] = {}
        for entry in self.events:
            if entry["event"] == "step":
                ends.setdefault(entry["life"], []).append(entry["at"])
        return common.median(b - a for each in ends.values() for a, b in pairwise(each)) or 0.0

    def has_stepped(self, count: int) -> bool:
        """Whether every rank has made ``count`` steps."""
        made = Counter(entry["life"] for entry in self.events if entry["event"] == "step")
        return all(made[life] >= count for life in self.lives.values())


# --------------------------------------------------------------------------- failures


def fail(job: Running, scenario: str) -> Recovery:
    """Let the job train a little, make one failure, and wait for the next optimizer step of all ranks."""
    old = _attempt(job.wait(lambda events: _stepped(events, STEPS_BETWEEN)))
    rank = next(rank for rank, host in old.hosts.items() if host != "host0") if scenario == "host" else max(old.pids)
    dying = {*old.pids.values()} if not job.job.in_place else {old.pids[rank]} if scenario != "exception" else set()
    watched = {pid: os.pidfd_open(pid) for pid in dying}
    at = time.monotonic()
    if scenario == "host":
        job.kill_host(old.hosts[rank])
    else:
        os.kill(old.pids[rank], signal.SIGKILL if scenario == "worker" else signal.SIGUSR2)
    marks = {"start": at, **_watch(watched, {old.pids[rank]})}  # the host that is lost has no other worker
    known = set(old.lives.values())
    new = _attempt(job.wait(lambda events: _stepped(events, 1, besides=known)))
    marks["created"] = max(new.times("started", "created"))
    own = [event for event in job.own_events() if event["pid"] in new.pids.values() and event["event"] in ("joined", "prepared", "resumed")]
    seen = replace(new, events=[*new.events, *(event for event in own if event["at"] > at)])
    marks |= {mark: max(times) for mark in PARTS if (times := seen.times(mark))}
    before = _attempt([event for event in job.events() if event["life"] in known])
    phases, parts = split(marks)
    return Recovery(phases, parts, max(before.steps()) - max(new.steps("restored")), before.ordinary_step())


def _stepped(events: Sequence[Mapping[str, Any]], count: int, besides: set[str] | None = None) -> bool:
    attempt = Attempt.newest(events)
    return attempt is not None and not (besides or set()) & set(attempt.lives.values()) and attempt.has_stepped(count)


def _attempt(events: Sequence[Mapping[str, Any]]) -> Attempt:
    found = Attempt.newest(events)
    assert found is not None
    return found


def _watch(pidfds: Mapping[int, int], victims: Collection[int]) -> dict[str, float]:
    """Wait for all processes to end; when what was killed had ended, the others had been hit, and all had ended."""
    poller = select.poll()
    for pidfd in pidfds.values():
        poller.register(pidfd, select.POLLIN)
    left, hit, until = {pidfd: pid for pid, pidfd in pidfds.items()}, dict[int, float](), time.monotonic() + PATIENCE
    marks: dict[str, float] = {}
    while left:
        for pidfd, _ in poller.poll(5):
            poller.unregister(pidfd)
            hit.setdefault(pid := left.pop(pidfd), time.monotonic())
            if pid in victims:
                marks["victim"] = time.monotonic()
            os.close(pidfd)
        for pid in left.values():
            if pid not in hit and _is_dying(pid):
                hit[pid] = time.monotonic()
        if time.monotonic() > until:
            raise common.TrialError(f"{len(left)} workers of before the failure are still there after {PATIENCE:.0f} s")
    if others := [at for pid, at in hit.items() if pid not in victims]:
        marks["noticed"] = max(others)
    return marks | {"gone": time.monotonic()}


def _is_dying(pid: int) -> bool:
    """Whether a process has no memory of its own any more: it is on its way out, and the kernel takes its pages back."""
    try:
        return Path(f"/proc/{pid}/statm").read_text().startswith("0 ")
    except OSError:
        return True


# --------------------------------------------------------------------------- the benchmark


def measure(job: Job, scenario: str, megabytes: int, failures: int) -> tuple[list[Recovery], str | None]:
    """One job, ``failures`` times failed and recovered; with the reason if it did not come back."""
    found: list[Recovery] = []
    try:
        with running(job, megabytes, hosts=2 if scenario == "host" or job.loop == "torchft" else 1) as job_run:
            for _ in range(failures):
                if scenario == "host":
                    job_run.start_spare()
                found.append(fail(job_run, scenario))
    except common.TrialError as error:
        return found, str(error)
    return found, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MB, plain loop, one killed worker: under a minute, writes no report")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, metavar="JOB", help=f"of: {', '.join(JOBS)}")
    parser.add_argument(
        "--scenarios", nargs="+", choices=("worker", "exception", "host"), help="default: worker host; exception: plain loops only"
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=None, metavar="MB", help="megabytes of state; default: 64 1000")
    parser.add_argument("--failures", type=int, help="failures per job and round; default: 2")
    parser.add_argument("--rounds", type=int, help="rounds over all jobs; default: 3")
    arguments = parser.parse_args()
    common.clean_up_on_sigterm()

    rounds, failures = (arguments.rounds or (1 if arguments.quick else 3)), (arguments.failures or (1 if arguments.quick else 2))
    scenarios, sizes = arguments.scenarios or ["worker", "host"], arguments.sizes or [64, 1000]
    jobs = arguments.jobs or [name for name in JOBS if name not in PEERS]
    if arguments.quick:
        scenarios, sizes, jobs = scenarios[:1], sizes[:1], arguments.jobs or ["gemini_plain", "gemini_in_place", BASELINE]
    cases = [(scenario, size) for scenario in scenarios for size in sizes]
    found: dict[str, dict[str, list[Recovery]]] = {f"{kind} {size} MB": {name: [] for name in jobs} for kind, size in cases}
    problems: dict[tuple[str, str], str | None] = {}
    for turn in range(rounds):
        for scenario, size in cases:
            for name in jobs:
                case = f"{scenario} {size} MB"
                recoveries, problem = measure(JOBS[name], scenario, size, failures)
                found[case][name] += [replace(recovery, turn=turn) for recovery in recoveries]
                problems[case, name] = problem or problems.get((case, name))
                note = ", ".join(f"{recovery.total:.2f} s" for recovery in recoveries) + (f" problem: {problem}" if problem else "")
                print(f"round {turn + 1}/{rounds}, {case}, {name}: {note}", file=sys.stderr, flush=True)
    results = {case: {name: summary(rows[name], problems[case, name]) for name in rows} for case, rows in found.items()}
    by_case = ratios(results, BASELINE)
    if not arguments.quick:
        body = report(results, by_case, {name: job.title for name, job in JOBS.items()})
        path = common.write_report("recovery-time", "Time to the next step after a failure", body, common.versions(PACKAGES))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    common.print_result("recovery_time", {**results, "ratios": by_plan(by_case)}, worst(by_case))


if __name__ == "__main__":
    main()
