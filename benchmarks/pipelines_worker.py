"""One host of benchmarks/pipelines.py: every row in turns; rank 0 writes what was measured as JSON.

Arguments: a JSON object with model, rows, rounds, learn (steps towards the target loss, 0: none), folder, a seed for learning, and the mark
that tells these processes from others'. A row with ``every`` is measured for so many steps at a time, of which one has an average.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gemini_ft
from common import Usage
from pipelines_models import MODELS, loss_of

SETTLING = 1000  # steps in which a plan must have been found
VISIT = 1.0  # seconds that a row is measured for in a round
MOST_STEPS = 8  # of a visit
ONE_BUCKET = 2**30  # bytes


@dataclass
class Row:
    """One way to exchange gradients; seconds are those of the slowest host, medians over rounds."""

    name: str
    seconds: float
    rounds: list[float]
    plan: str = ""
    groups: int = 0
    predicted: float | None = None  # seconds of forward, backward and exchange, by the planner
    exchanged: float | None = None  # the same, measured on rank 0
    sent_bytes: int | None = None
    losses: list[float] = field(default_factory=list)  # mean over ranks, by step
    choosing: float = 0.0  # seconds from the first step until the plan was final
    foreign: float = 0.0  # share of the machine that other programs took while it was timed


class Trainer:
    """One model with one way to exchange gradients."""

    def __init__(self, model: str, row: dict[str, Any], seed: int = 0) -> None:
        make, self._batch, rate = MODELS[model]
        torch.manual_seed(seed)
        module = make()
        self.synchronizer: gemini_ft.GradientSynchronizer | None = None
        self._model = self._wrapped(module, row)
        self._optimizer = (torch.optim.AdamW if model == "gpt" else torch.optim.SGD)(module.parameters(), rate)
        self._source = torch.Generator().manual_seed(1000 * seed + dist.get_rank())

    def _wrapped(self, module: nn.Module, row: dict[str, Any]) -> nn.Module:
        if "pipeline" in row:
            self.synchronizer = gemini_ft.GradientSynchronizer(module, row["pipeline"])
            return module
        if row["hook"] == "powersgd":  # callbacks of two buckets end in any order on gloo, and their collectives would be mixed up
            with patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", ONE_BUCKET):
                model = DistributedDataParallel(module, bucket_cap_mb=ONE_BUCKET / 2**20)
        else:
            model = DistributedDataParallel(module)
        if row["hook"] == "bf16":
            model.register_comm_hook(None, bf16_hook)
        elif row["hook"] == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model

    def step(self) -> torch.Tensor:
        self._optimizer.zero_grad()
        loss = loss_of(self._model, self._batch(self._source))
        torch.autograd.backward(loss)
        if self.synchronizer is not None:
            self.synchronizer.synchronize()
        self._optimizer.step()
        return loss.detach()

    def settle(self) -> None:
        """Until what is found out while training has been."""
        for number in range(SETTLING):
            self.step()
            if number >= 2 and (self.synchronizer is None or self.synchronizer.settled):
                return


def bf16_hook(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's, under another name: DDP refuses it by name on CPUs, where it works."""
    return default_hooks.bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


def slowest(seconds: float) -> float:
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def timed(steps: Callable[[], object], count: int) -> float:
    """Seconds per step on the slowest host."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        steps()
    return slowest((time.perf_counter() - begin) / count)


def measure(job: dict[str, Any]) -> list[Row]:
    trainers, steps, choosing = {}, {}, {}
    for row in job["rows"]:
        trainers[row["name"]] = Trainer(job["model"], row)
        begin = time.perf_counter()
        trainers[row["name"]].settle()
        choosing[row["name"]] = slowest(time.perf_counter() - begin)
        steps[row["name"]] = row.get("every") or min(MOST_STEPS, 1 + int(VISIT / timed(trainers[row["name"]].step, 1)))
    rounds: dict[str, list[float]] = {name: [] for name in trainers}
    exchanged: dict[str, list[float]] = {name: [] for name in trainers}
    order, before = random.Random(0), Usage.now(job.get("mark", ""))
    for _ in range(job["rounds"]):
        for name, trainer in order.sample(list(trainers.items()), len(trainers)):  # nobody always comes after the same one
            trainer.step()
            rounds[name].append(timed(partial(_noted, trainer, exchanged[name]), steps[name]))
    foreign = Usage.now(job.get("mark", "")).foreign_since(before)
    found = [_row(name, trainer, rounds[name], exchanged[name]) for name, trainer in trainers.items()]
    return [replace(row, foreign=foreign, choosing=choosing[row.name]) for row in found]


def _noted(trainer: Trainer, exchanged: list[float]) -> None:
    trainer.step()
    if trainer.synchronizer is not None and trainer.synchronizer.last_step is not None:
        exchanged.append(trainer.synchronizer.last_step.seconds)


def _row(name: str, trainer: Trainer, rounds: list[float], exchanged: list[float]) -> Row:
    row = Row(name, statistics.median(rounds), rounds, exchanged=statistics.median(exchanged) if exchanged else None)
    if (synchronizer := trainer.synchronizer) is not None:
        plan, last = synchronizer.averager.plan, synchronizer.last_step
        row.plan, row.groups = "; ".join(plan.fusion.values()), len(plan.groups)
        row.predicted = max(plan.predicted.values(), default=None)
        row.sent_bytes = sum(traffic.sent_bytes for traffic in last.rules.values()) if last is not None else None
        synchronizer.close()
    return row


def learn(job: dict[str, Any]) -> list[Row]:
    """Losses by step, of models that begin anew."""
    rows = []
    for row in job["rows"]:
        trainer = Trainer(job["model"], row, job.get("seed", 0))
        found: list[torch.Tensor] = []
        seconds = timed(lambda trainer=trainer, found=found: found.append(trainer.step()), job["learn"])  # type: ignore[misc]
        losses = torch.stack(found)
        dist.all_reduce(losses)
        rows.append(Row(row["name"], seconds, [], losses=(losses / dist.get_world_size()).tolist()))
        if trainer.synchronizer is not None:
            trainer.synchronizer.close()
    return rows


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    rows = learn(job) if job["learn"] else measure(job)
    if dist.get_rank() == 0:
        Path(job["folder"], "result.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
