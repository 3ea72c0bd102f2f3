"""One rank of one trial of checkpoint_overhead.py --observed: blocks of the same training, watched in other ways, in random order.

Every block has a run, and agents, of its own. While a block is timed, a process beside each host's agent fetches its figures and its page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gemini_ft
from common import MARK
from gemini_ft.launch.endings import account_of
from load import Load
from observed import CELLS, NEVER, PROCESSOR

WARM_UP = 5  # iterations of a block before it is timed
BUCKET_MB = 1  # of DDP: many collectives, each of which is observed
_PATIENCE = 30.0  # seconds
_FETCH = """
import sys, time, urllib.request
address, token = sys.argv[1:]
while True:
    for path in ("/metrics", "/status.json"):
        request = urllib.request.Request(f"http://{address}{path}", headers={"Authorization": f"Bearer {token}"})
        urllib.request.urlopen(request, timeout=5).read()
    time.sleep(1)
"""


@contextlib.contextmanager
def fetched(run: str, token: str) -> Iterator[list[int]]:
    """Inside, another process fetches this host's figures, and the page's document, once a second; yields its id.

    Raises:
        TimeoutError: the agent serves no page.
        RuntimeError: a request failed.
    """
    until = time.monotonic() + _PATIENCE
    while (address := account_of(run, 1.0).get("metrics")) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"run {run}: no figures are served")
        time.sleep(0.05)
    with subprocess.Popen([sys.executable, "-c", _FETCH, address, token], stdin=subprocess.DEVNULL) as reader:
        yield [reader.pid]
        if reader.poll() is not None:
            raise RuntimeError("the figures could not be fetched")
        reader.kill()


def busy(pids: Sequence[int]) -> float:
    """Seconds for which this process, and those with these ids, have been on a processor."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return time.process_time() + sum(each.user + each.system for each in times)


def block(name: str, number: int, load: Load, steps: int, folder: Path) -> tuple[float, float]:
    """Mean seconds of an iteration of this rank, and those for which it kept a processor busy, with its agent and the reader."""
    cell, run = CELLS[name], f"{os.environ[MARK]}-{number}"
    token = folder / f"token-{dist.get_rank()}"
    token.write_text("a-token-of-the-benchmark")
    token.chmod(0o600)
    for variable, value in (("GEMINI_METRICS", "0"), ("GEMINI_PAGE_TOKEN_FILE", str(token))):
        os.environ.pop(variable, None)
        if cell.is_watched:
            os.environ[variable] = value
    options: dict[str, Any] = {} if cell.is_watched else {"straggler_factor": 0.0, "hang_timeout": 0.0}
    checkpointer = gemini_ft.Checkpointer(
        load.model,
        load.optimizer,
        run_id=run,
        replicas=2,
        replicated=True,
        verify="replay" if cell.is_replayed else False,
        compare_every=1 if cell.is_compared else NEVER,
        **options,
    )
    checkpointer.resume()

    def iterate(count: int) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            load.gradients()
            load.update()
            checkpointer.step()
        return (time.perf_counter() - begin) / count

    iterate(WARM_UP)
    nobody: contextlib.AbstractContextManager[list[int]] = contextlib.nullcontext([])
    with fetched(run, token.read_text()) if cell.is_watched else nobody as readers:
        before = busy(pids := [account_of(run)["pid"], *readers])
        seconds = iterate(steps)
        processor = (busy(pids) - before) / steps
    checkpointer.close()
    return seconds, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("megabytes", int), ("tokens", int), ("steps", int), ("seed", int), ("folder", Path)):
        parser.add_argument(name, type=kind)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    os.environ |= {"GEMINI_HOST_ID": f"host{dist.get_rank()}", "GEMINI_LOG_DIR": str(arguments.folder)}
    load = Load(arguments.megabytes * 10**6, arguments.tokens, seed=0)
    load.model = DistributedDataParallel(load.model, bucket_cap_mb=BUCKET_MB)  # type: ignore[assignment]
    order = random.Random(arguments.seed).sample(list(CELLS), len(CELLS))
    mine = dict[str, float]()
    for number, name in enumerate(order):
        mine[name], mine[f"{name}{PROCESSOR}"] = block(name, number, load, arguments.steps, arguments.folder)
    everyone: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        (arguments.folder / "seconds.json").write_text(json.dumps({name: mean(each[name] for each in everyone) for name in mine}))
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
