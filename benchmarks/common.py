"""The parts that all benchmarks share: the machine's description, clean starts of ranks, the noise guard, the report.

Nothing here imports torch: the parent process of a benchmark only starts others, reads clocks and writes files.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
MARK = "GEMINI_BENCH_MARK"  # every process of one trial carries this variable, daemons included: that is how they are found again
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


# --------------------------------------------------------------------------- the machine


def hardware() -> dict[str, Any]:
    """Cores, memory, kernel: what a reader needs in order to compare two reports."""
    model = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown")
    memory = int(_meminfo()["MemTotal"] / 2**30 + 0.5)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": memory,
        "kernel": platform.release(),
        "huge_pages": Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(),
        "network": "loopback",
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Installed version of each package, ``missing`` where there is none."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def revision() -> str:
    """The checkout's commit, with a plus sign where files differ from it."""
    try:
        commit, changed = _git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain", "-uno")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")


def same_revision(started: str) -> str:
    """The commit of all that was measured, for a report; says so if the checkout has changed since ``started``."""
    now = revision()
    return started if now == started else f"{started} at the start, {now} at the end: rows may be from either, measure again"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()


STARTED = revision()


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    table = (line.split(":") for line in _lines("/proc/meminfo"))
    return {name: int(value.split()[0]) * 1024 for name, value in table}


# --------------------------------------------------------------------------- processes of one trial


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def marked(mark: str, **variables: str) -> list[int]:
    """Process ids of everything that was started, directly or not, under ``mark``, and with these environment variables."""
    needles = {f"{name}={value}".encode() for name, value in {MARK: mark, **variables}.items()}
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            environ = Path(entry.path, "environ").read_bytes()
        except OSError:  # gone meanwhile, or another user's
            continue
        if needles <= set(environ.split(b"\0")):
            found.append(int(entry.name))
    return found


def end_marked(mark: str, patience: float = 5.0) -> list[str]:
    """Give what is left of a trial ``patience`` seconds to end, then kill it; returns the commands that had to be killed."""
    until = time.monotonic() + patience
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    names = []
    for pid in left:
        try:
            names.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120])
            os.kill(pid, signal.SIGKILL)
        except (OSError, ProcessLookupError):
            continue
    return names


def clean_up_on_sigterm() -> None:
    """Let SIGTERM end this program as an exception does, so that trials under way are cleaned up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


class TrialError(RuntimeError):
    """A trial's process failed or was late; the text holds the end of its output."""


def run_ranks(
    argv: Sequence[str], *, world: int, mark: str, timeout: float, env: Mapping[str, str] | None = None, folder: Path | None = None
) -> None:
    """Run ``argv`` as ``world`` ranks with one torch thread each and wait for all of them.

    The ranks find each other by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; their output goes to files.

    Raises:
        TrialError: a rank ended with an error or did not end within ``timeout`` seconds; the others were killed.
    """
    with tempfile.TemporaryDirectory(dir=folder) as logs:
        shared = {**os.environ, **one_thread(), **(env or {}), MARK: mark, "WORLD_SIZE": str(world), "MASTER_PORT": str(free_port())}
        ranks = []
        for rank in range(world):
            own = {**shared, "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
            with open(Path(logs, str(rank)), "wb") as log:
                ranks.append(subprocess.Popen(argv, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT))
        try:
            problem = _wait_all(ranks, timeout)
        finally:
            for process in ranks:
                process.kill()
        if problem is not None:
            rank, how = problem
            output = Path(logs, str(rank)).read_text(errors="replace").strip()[-3000:]
            raise TrialError(f"rank {rank} {how}\n{output}")


def _wait_all(ranks: Sequence[subprocess.Popen[bytes]], timeout: float) -> tuple[int, str] | None:
    """Wait until all have ended; at the first that fails or is late, kill the rest and return which one and how."""
    until = time.monotonic() + timeout
    problem = None
    while problem is None and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
        problem = _failed(ranks)
        if problem is None and time.monotonic() > until:
            problem = next(((i, f"was not done after {timeout:.0f} s") for i, rank in enumerate(ranks) if rank.poll() is None), None)
    problem = problem or _failed(ranks)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()
    return problem


def _failed(ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[int, str] | None:
    return next(((i, f"ended with {rank.returncode}") for i, rank in enumerate(ranks) if rank.poll() not in (None, 0)), None)


def one_thread() -> dict[str, str]:
    """Environment that keeps every numeric library of a rank on one core."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


# --------------------------------------------------------------------------- processor time, fresh memory, held memory


@dataclass(frozen=True)
class Usage:
    """Counters at one moment; subtract two of them."""

    at: float  # seconds, monotonic clock
    busy: float  # processor seconds of the whole machine in user and kernel mode, interrupts left out
    stolen: float  # processor seconds taken by the hypervisor
    per_process: Mapping[int, float] = field(repr=False)  # processor seconds of each process of the trial, reaped children included
    kernel: Mapping[int, float] = field(repr=False)  # of those seconds, the ones in the kernel
    faults: Mapping[int, int] = field(repr=False)  # pages freshly mapped by each process of the trial, reaped children included
    huge: int = 0  # huge pages handed out by the whole machine

    @classmethod
    def now(cls, mark: str, **variables: str) -> Usage:
        """Read the counters; ``variables`` choose among the trial's processes, see :func:`marked`."""
        cpu = [int(x) / _TICK for x in _lines("/proc/stat")[0].split()[1:]]
        seconds: dict[int, float] = {}
        kernel: dict[int, float] = {}
        faults: dict[int, int] = {}
        for pid in marked(mark, **variables):
            try:
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            seconds[pid] = sum(int(x) for x in stat[11:15]) / _TICK
            kernel[pid] = (int(stat[12]) + int(stat[14])) / _TICK
            faults[pid] = int(stat[7]) + int(stat[8])
        huge = next((int(line.split()[1]) for line in _lines("/proc/vmstat") if line.startswith("thp_fault_alloc ")), 0)
        return cls(time.monotonic(), cpu[0] + cpu[1] + cpu[2], cpu[7] if len(cpu) > 7 else 0.0, seconds, kernel, faults, huge)

    def own_since(self, before: Usage) -> float:
        """Processor seconds of the chosen processes between two moments."""
        return sum(value - before.per_process.get(pid, 0.0) for pid, value in self.per_process.items())

    def cpu_since(self, before: Usage, ranks: Collection[int]) -> dict[str, float]:
        """Processor seconds of the trial between two moments: of the processes of its ``ranks``, and of all others of it, by mode."""
        found = dict.fromkeys(("ranks_user", "ranks_kernel", "others_user", "others_kernel"), 0.0)
        for pid, now in self.per_process.items():
            whose = "ranks" if pid in ranks else "others"
            kernel = self.kernel[pid] - before.kernel.get(pid, 0.0)
            found[f"{whose}_kernel"] += kernel
            found[f"{whose}_user"] += now - before.per_process.get(pid, 0.0) - kernel
        return found

    def foreign_since(self, before: Usage) -> float:
        """Share of the machine that other programs took, or the hypervisor, between two moments: 0 is a quiet machine."""
        other = max(0.0, self.busy - before.busy - self.own_since(before)) + self.stolen - before.stolen
        return other / max(1e-9, (self.at - before.at) * len(os.sched_getaffinity(0)))

    def fresh_since(self, before: Usage) -> int:
        """Bytes of memory that the kernel handed to the trial's processes between two moments.

        A buffer of the size of the state that is allocated anew shows up here in full; one that is reused does not.
        Blind to pages of files (tmpfs included) that are written and not mapped.
        """
        pages = sum(value - before.faults.get(pid, 0) for pid, value in self.faults.items())
        return pages * _PAGE + (self.huge - before.huge) * 2 * 2**20


def held_memory(mark: str) -> int:
    """Bytes of RAM the trial holds: private memory of its processes, plus all shared memory and tmpfs of the machine.

    Memory that nobody maps at the moment (a memfd, a file in /dev/shm) belongs to no process; the machine's total has it.
    """
    private = 0
    for pid in marked(mark):
        try:
            rollup = _lines(f"/proc/{pid}/smaps_rollup")
        except OSError:
            continue
        private += sum(int(line.split()[1]) for line in rollup if line.startswith("Pss_Anon:")) * 1024
    return private + _meminfo()["Shmem"]


def wait_until_quiet(limit: float, patience: float) -> float:
    """Wait until other programs use at most ``limit`` of the machine; returns the last share seen, after ``patience`` seconds at most.

    Says what it waits for, once in ten seconds.
    """
    until = time.monotonic() + patience
    for second in itertools.count():
        before = Usage.now("none of ours")
        time.sleep(1.0)
        share, left = Usage.now("none of ours").foreign_since(before), until - time.monotonic()
        if share <= limit or left < 0:
            break
        if second % 10 == 0:
            told = f"other programs take {share:.0%} of the machine, at most {limit:.0%} are wanted: waiting for up to {left:.0f} s more"
            print(told, file=sys.stderr, flush=True)
    return share


# --------------------------------------------------------------------------- results


def median(values: Iterable[float]) -> float | None:
    """Median, or None of nothing."""
    kept = list(values)
    return statistics.median(kept) if kept else None


Spread = tuple[float, float, float]  # a median and the ends of its 95 % interval


def interval(values: Sequence[float]) -> Spread:
    """Median, and the 95 % interval of it by drawing again with replacement."""
    drawn = random.Random(1)
    medians = sorted(statistics.median(drawn.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[1949]


def quotient(tops: Sequence[Sequence[float]], bottoms: Sequence[Sequence[float]]) -> Spread:
    """The quotient of two medians, and its 95 % interval by drawing again.

    Args:
        tops: by rounds, which are drawn first, and then the values of each: what one round has in common does not count as evidence.
        bottoms: the same; they are no pairs with ``tops``.
    """
    drawn = random.Random(1)

    def again(rounds: Sequence[Sequence[float]]) -> float:
        return statistics.median(value for each in drawn.choices(rounds, k=len(rounds)) for value in drawn.choices(each, k=len(each)))

    middle = statistics.median(itertools.chain(*tops)) / statistics.median(itertools.chain(*bottoms))
    found = sorted(again(tops) / again(bottoms) for _ in range(2000))
    return middle, found[50], found[1949]


def spread(value: Spread, digits: int) -> str:
    """A median and its interval, as reports show them."""
    middle, low, high = (f"{number:.{digits}f}" for number in value)
    return f"{middle} ({low} to {high})"


def ratio(top: float | None, bottom: float | None) -> float | None:
    """``top / bottom`` rounded to three digits; None where either is missing or the divisor is not positive."""
    return None if top is None or bottom is None or bottom <= 0 else round(top / bottom, 3)


def command_line() -> str:
    """The command as a reader would type it, without this machine's paths."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def write_report(name: str, title: str, body: str, packages: Mapping[str, str]) -> Path:
    """Write ``results/<date>-<name>.md``: machine, versions, command, then ``body``. An earlier report of the day stays."""
    RESULTS.mkdir(exist_ok=True)
    first = RESULTS / f"{date.today().isoformat()}-{name}.md"
    more = (first.with_stem(f"{first.stem}-{number}") for number in itertools.count(2))
    path = next(path for path in itertools.chain([first], more) if not path.exists())
    facts = [f"- {key}: {value}" for key, value in hardware().items()]
    facts += ["- versions: " + ", ".join(f"{key} {value}" for key, value in packages.items())]
    facts += [f"- commit: {same_revision(STARTED)}", f"- command: `{command_line()}`"]
    path.write_text(f"# {title}, {date.today().isoformat()}\n\n" + "\n".join(facts) + "\n\n" + body.rstrip() + "\n")
    return path


def print_result(benchmark: str, results: Mapping[str, Any], ratios: Mapping[str, float | None]) -> None:
    """The last line of a benchmark's output: one line of JSON."""
    print(json.dumps({"benchmark": benchmark, "hardware": hardware(), "results": results, "ratios": ratios}))
