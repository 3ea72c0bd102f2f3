"""Measures what a snapshot of every step costs beside a double of a device, and says what the model of the pipeline expects.

    python benchmarks/device_double.py                          # about seven minutes; a report
    python benchmarks/device_double.py --quick                  # two rows, few steps

The recorder, its threads and the agent are the real ones; the device is not. Its queues are threads that sleep for as long as an H100 works
(a step of 114 ms, 10 of them the update; 73 ms for the copies of 4 GB; small reads stand behind copies in the engine), and the agent's hash
threads sleep for as long as one of that machine's takes over its chunk. So two cores do, and say what waits for what. They say nothing
about memory, PCIe or the interpreter lock under a real load. The loop reads its loss at every step.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

SLOWER = (
    4  # times as slow is everything, so that threads which wake up late on a busy machine matter less; figures are of the device's time
)
STEP, UPDATE = 0.114 * SLOWER, 0.010 * SLOWER  # seconds; of a GPT of 335 M parameters on an H100, and of its AdamW
COPY = 0.073 * SLOWER  # seconds for the 4.03 GB that it is
HASH = 4.03 * 0.155 * SLOWER  # seconds, one thread
COST = 0.02  # of the time, that updates may be held back
COMMIT = 0.004 * SLOWER  # seconds, in the model
NUMBERS = 4 * 2**20  # of the state here, in 64 tensors; the seconds are those of the large one
CHUNK = 2**18  # bytes
BATCHES = 16  # of copies; 4 GB have 60
WARM_UP = 24  # steps; by then it is known how often copies can be made that do not fit beside one


@dataclass(frozen=True)
class Row:
    """One job."""

    name: str
    threads: int  # that hash; 0: no snapshots
    copy: float = COPY


ROWS = [
    Row("none", 0),
    *(Row(f"{count} thread{'s' * (count > 1)}", count) for count in (1, 2, 4, 8)),
    Row("8 threads, copies of 150 ms", 8, 0.15 * SLOWER),
]
QUICK = [ROWS[0], ROWS[4]]


def expected(row: Row, steps: int = 200) -> tuple[float, float]:
    """By the model: mean step over an undisturbed one, and the share of the snapshots that is committed.

    Two slots, of which one always holds the last committed snapshot. A copy begins only where it can be over before the update. One
    thread forms the checksum of the last chunk when all of it has come. Copies that do not fit beside a step are made every so many steps.
    """
    if not row.threads:
        return 1.0, 0.0
    every = max(1, math.ceil((row.copy - STEP + UPDATE) / (COST * (STEP - UPDATE))))
    now = free = copied = hashed = 0.0
    commits = 0
    begin = now
    for number in range(steps):
        window = now + STEP - UPDATE
        start = max(now, free)
        if number % every == 0 and start <= max(window - row.copy, now + 0.1 * (STEP - UPDATE)):
            copied = start + row.copy
            hashed = max(copied + HASH * CHUNK / (4 * NUMBERS), max(hashed, start) + HASH / row.threads)
            free = hashed + COMMIT
            commits += 1
        now = max(window, copied) + UPDATE
    return (now - begin) / steps / STEP, commits / steps


# --------------------------------------------------------------------------- the device


class Event:
    """A place in a queue."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.over = threading.Event()
        self.over.set()
        self.when = 0.0

    def query(self) -> bool:
        return self.over.is_set()

    def synchronize(self) -> None:
        self.over.wait()

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.when - self.when)

    def end(self) -> None:
        self.when = time.monotonic()
        self.over.set()


class Stream:
    """A queue of work that takes its time."""

    def __init__(self, *_: Any) -> None:
        self._queue: queue.SimpleQueue[tuple[float, Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, seconds: float, work: Callable[[], Any] = lambda: None) -> None:
        self._queue.put((seconds, work))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.over.clear()
        self.put(0, event.end)
        return event

    def wait_event(self, event: Event) -> None:
        self.put(0, event.synchronize)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def _run(self) -> None:
        while True:
            seconds, work = self._queue.get()
            end = time.monotonic() + seconds
            work()
            time.sleep(max(0.0, end - time.monotonic()))


def install(seconds_per_byte: float) -> Stream:
    """Lets the package believe that all tensors lie on a device; returns the training's stream."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from gemini_ft import accelerator
    from gemini_ft.state import copy_plan

    class Queued(TorchDispatchMode):
        def __init__(self, stream: Stream) -> None:
            super().__init__()
            self._stream = stream

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.ops.aten._foreach_copy_.default:
                return func(*args, **(kwargs or {}))
            nbytes = sum(target.nbytes for target in args[0])
            self._stream.put(nbytes * seconds_per_byte, lambda: func(*args, **(kwargs or {})))
            return None

    class Module(types.SimpleNamespace):
        local = threading.local()

        def current_stream(self, _device: Any = None) -> Stream:
            return getattr(self.local, "stream", training)

        @contextlib.contextmanager
        def stream(self, stream: Stream) -> Iterator[None]:
            before, self.local.stream = self.current_stream(), stream
            try:
                with Queued(stream):
                    yield
            finally:
                self.local.stream = before

        def set_device(self, _device: Any) -> None:
            pass

    training = Stream()
    module: Any = Module()
    module.Event, module.Stream = Event, Stream
    accelerator.module_of = lambda device: module
    accelerator.holds = lambda tensor: True
    copy_plan.LANDING = 4 * NUMBERS // BATCHES
    return training


# --------------------------------------------------------------------------- the processes


def agent(threads: int, run: str) -> None:
    """An agent whose threads take as long over a chunk as one that hashes its part of 4 GB."""
    from gemini_ft.agent import main, own_shards
    from gemini_ft.core.roots import checksum

    pool = ThreadPoolExecutor(threads)

    def slow(data: Any) -> int:
        time.sleep(HASH * len(data) / (4 * NUMBERS))
        return checksum(data)

    vars(own_shards).update(checksum=slow, _pool=lambda: pool)
    sys.exit(main.main(["--run", run, "--host", "host0"]))


def train(row: Row, steps: int) -> dict[str, Any]:
    """The figures of one job, in this process."""
    import torch

    import gemini_ft
    from gemini_ft.agent.lifecycle import is_listening

    torch.set_num_threads(1)
    training = install(row.copy / (4 * NUMBERS))
    model = torch.nn.ParameterList(torch.zeros(NUMBERS // 64) for _ in range(64))

    class Update(torch.optim.SGD):
        """Queues its update: the host does not wait for the device."""

        def step(self, closure: Any = None) -> Any:
            training.put(UPDATE)

    optimizer, run = Update(model.parameters(), 0.1), f"double-{uuid.uuid4().hex[:8]}"
    checkpointer = served = None
    if row.threads:
        served = subprocess.Popen([sys.executable, __file__, "--agent", str(row.threads), run])
        while not is_listening(run, "host0"):
            time.sleep(0.05)
        checkpointer = gemini_ft.Checkpointer(model, optimizer, replicated=False, run_id=run, replicas=1, chunk_bytes=CHUNK)
        checkpointer.resume()
    marks = []
    for number in range(WARM_UP + steps + 1):
        training.put(STEP - UPDATE)
        training.synchronize()  # it reads the loss
        optimizer.step()
        if number >= WARM_UP:
            marks.append(training.record_event())
        if checkpointer is not None:
            checkpointer.step()
    training.synchronize()
    times = [(end.when - begin.when) / SLOWER for begin, end in itertools.pairwise(marks)]
    figures: dict[str, Any] = {"step_s": statistics.mean(times), "median_s": statistics.median(times), "worst_s": max(times)}
    if checkpointer is not None and served is not None:
        checkpointer.flush()
        commits = [seconds for at, seconds in checkpointer.stats.commit_seconds.items() if at > WARM_UP]
        blocked = checkpointer.stats.blocked[-steps:]
        figures |= {"blocked_s": statistics.median(blocked) / SLOWER, "committed": len(commits) / (steps + 1)}
        figures["complete_s"] = statistics.median(commits) / SLOWER
        checkpointer.close()
        served.send_signal(signal.SIGKILL)
        served.wait()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rows of a few steps; no report")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--agent", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.agent:
        agent(int(arguments.agent[0]), arguments.agent[1])
    steps = 12 if arguments.quick else arguments.steps
    if arguments.row:
        print(json.dumps(train(next(row for row in ROWS if row.name == arguments.row), arguments.steps)))
        return
    results: dict[str, Any] = {}
    ratios: dict[str, float | None] = {}
    lines = []
    for row in QUICK if arguments.quick else ROWS:
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"GEMINI_HOST_ID": "host0", "GEMINI_LOG_DIR": folder}
            command = [sys.executable, __file__, "--row", row.name, "--steps", str(steps)]
            told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        found = results[row.name] = json.loads(told.splitlines()[-1])
        slower, share = expected(row)
        ratios[f"step_{row.name}_vs_none".replace(" ", "_")] = step = common.ratio(found["step_s"], results["none"]["step_s"])
        own = [f"{1000 * found['blocked_s']:.1f}", f"{found['committed']:.2f}", f"{found['complete_s']:.3f}"] if row.threads else [""] * 3
        model = [f"{slower:.3f}", f"{share:.2f}" if row.threads else ""]
        lines.append((row.name, f"{1000 * row.copy / SLOWER:.0f}", f"{found['step_s']:.4f}", f"{step:.3f}", *own, *model))
    head = ("hashing", "copies ms", "step s", "of none", "blocked ms", "committed", "complete s", "model: of none", "model: committed")
    text = common.table(head, lines)
    print(text, file=sys.stderr)
    if not arguments.quick:
        body = f"{steps} steps of each job. No GPU was at work: see the benchmark's docstring.\n\n{text}"
        path = common.write_report("device-double", "Snapshots beside a double of a device", body, common.versions(("torch", "gemini-ft")))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    common.print_result("device_double", results, ratios)


if __name__ == "__main__":
    main()
