"""One rank of benchmarks/interference.py: steps of a job whose communication is real and whose computation is a sleep or a product.

torchrun ... interference_worker.py plan.json results.json
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

import gemini_ft
from gemini_ft.worker.collectives import Observer, observe

MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "blocking": {"traffic": {"when": "ready"}, "on_late": "wait"},
    "naive": {"traffic": {"when": "ready"}},
    "unpipelined": {"traffic": {"transport": "collective", "sub_buffers": 1}},
    "pipelined": {"traffic": {"transport": "collective", "sub_buffers": 4}},
    "scheduled": {},
}

OBSERVED = ("unpipelined", "pipelined", "scheduled")  # these wait for idle network
_SETTLE = 6  # steps until the order of collectives has settled, and a change of pace has been heard


@dataclasses.dataclass(frozen=True)
class Plan:
    """The job to run. Seconds are of computation, per layer; bytes are of 32-bit weights, per layer."""

    job: str  # ddp or zero3
    layers: int
    layer_bytes: int
    state_bytes: int  # per rank, that a snapshot has
    forward: float
    backward: float
    update: float
    compute: str  # sleep or product
    modes: list[str]
    rounds: int
    block: int  # steps of a mode, and of none beside it
    window: int  # steps of a profile
    buffer_bytes: int


# -- computation


def busy(plan: Plan) -> Callable[[float], None]:
    """A function that keeps its caller busy for some seconds, by a sleep or by as many products of matrices as take that long alone."""
    if plan.compute == "sleep":
        return time.sleep
    factor = torch.randn(192, 192)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < 0.2:
        factor @ factor
        count += 1
    each = (time.perf_counter() - begin) / count

    def compute(seconds: float) -> None:
        for _ in range(round(seconds / each)):
            factor @ factor

    return compute


class _Timed(torch.autograd.Function):
    """The weight's gradient after so much computation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, compute: Callable[[float], None], forward: float, backward: float) -> Any:
        compute(forward)
        ctx.compute, ctx.backward, ctx.size = compute, backward, weight.shape
        return x + 0.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.compute(ctx.backward)
        return gradient, torch.full(ctx.size, 1e-3), None, None, None


class Layer(nn.Module):
    """A weight of so many bytes whose use takes so long."""

    def __init__(self, plan: Plan, compute: Callable[[float], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(plan.layer_bytes // 4))
        self.plan, self.compute = plan, compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Timed.apply(x, self.weight, self.compute, self.plan.forward, self.plan.backward)  # type: ignore[no-untyped-call]
        return out


class Holder(nn.Module):
    """This rank's own part of the optimizer state: what a snapshot consists of."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.state = nn.Parameter(torch.arange(nbytes // 4, dtype=torch.float32))

    @torch.no_grad()
    def update(self) -> None:
        self.state.add_(1.0)


class DataParallel:
    """DistributedDataParallel: gradients are summed in buckets during the backward pass."""

    def __init__(self, plan: Plan) -> None:
        compute = busy(plan)
        self.model = nn.parallel.DistributedDataParallel(
            nn.Sequential(*(Layer(plan, compute) for _ in range(plan.layers))), bucket_cap_mb=plan.layer_bytes / 2**20 * 0.9
        )

    def step(self) -> None:
        self.model(torch.ones(1, requires_grad=True)).sum().backward()
        self.model.zero_grad()


class Zero3:
    """Weights are gathered layer by layer, the next one ahead of its use; gradients are scattered as they come."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.compute = plan, busy(plan)
        elements = plan.layer_bytes // 4
        self.shard = torch.zeros(elements // dist.get_world_size())
        self.whole = [torch.zeros(elements) for _ in range(2)]

    def _gather(self, layer: int) -> Any:
        return dist.all_gather_into_tensor(self.whole[layer % 2], self.shard, async_op=True)

    def _pass(self, seconds: float) -> Iterator[int]:
        gathering = self._gather(0)
        for layer in range(self.plan.layers):
            gathering.wait()
            if layer + 1 < self.plan.layers:
                gathering = self._gather(layer + 1)
            self.compute(seconds)
            yield layer

    def step(self) -> None:
        for _ in self._pass(self.plan.forward):
            pass
        scattering: Any = None
        for layer in self._pass(self.plan.backward):
            if scattering is not None:
                scattering.wait()
            scattering = dist.reduce_scatter_tensor(torch.empty_like(self.shard), self.whole[layer % 2], async_op=True)
        scattering.wait()


JOBS: dict[str, Callable[[Plan], DataParallel | Zero3]] = {"ddp": DataParallel, "zero3": Zero3}


# -- one trial


class Trial:
    """A job that changes its way of checkpointing while it runs."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.holder = Holder(plan.state_bytes)
        self.compute = busy(plan)
        self.job = JOBS[plan.job](plan)
        self.checkpointers: dict[str, gemini_ft.Checkpointer] = {}
        self.iteration = 0

    def join(self, stack: ExitStack) -> None:
        for mode in self.plan.modes:
            if mode != "none":
                options = {**MODES[mode], "hang_timeout": 0}
                options["traffic"] = {
                    "profile_steps": self.plan.window,
                    "buffer_bytes": self.plan.buffer_bytes,
                    **options.get("traffic", {}),
                }
                checkpointer = gemini_ft.Checkpointer(self.holder, name=mode, hooks=False, replicated=False, **options)
                stack.enter_context(checkpointer)
                checkpointer.open()
                self.checkpointers[mode] = checkpointer

    def step(self, mode: str) -> float:
        """One step; its seconds."""
        begin = time.perf_counter()
        self.job.step()
        checkpointer = self.checkpointers.get(mode)
        if checkpointer is not None:
            checkpointer.wait_before_update()
        self.compute(self.plan.update)
        self.holder.update()
        self.iteration += 1
        if checkpointer is not None:
            if checkpointer.due(self.iteration - 1, self.iteration):
                checkpointer.save(self.iteration, None)
            else:
                checkpointer.alive(self.iteration)
            if mode == "blocking":
                checkpointer.flush()
        return time.perf_counter() - begin

    def block(self, mode: str, steps: int) -> list[float]:
        """Steps of one mode; what another one has left is out of the way, and the first is not counted."""
        self.step(mode)
        seconds = [self.step(mode) for _ in range(steps)]
        if mode in self.checkpointers:
            self.checkpointers[mode].flush()
        dist.barrier()
        return seconds

    def run(self) -> dict[str, Any]:
        plan = self.plan
        bare = self.block("none", plan.block)
        with ExitStack() as stack:
            self.join(stack)
            observer = stack.enter_context(observe())
            for mode in self.checkpointers:
                self.block(mode, plan.window + _SETTLE if mode in OBSERVED else 2)
            first = self.iteration
            psutil.cpu_percent()
            pairs: dict[str, list[tuple[list[float], list[float]]]] = {mode: [] for mode in self.checkpointers}
            for _ in range(plan.rounds):
                for mode in self.checkpointers:
                    pairs[mode].append((self.block("none", plan.block), self.block(mode, plan.block)))
            busy_share = psutil.cpu_percent() / 100
            timeline = self.timeline(observer) if "scheduled" in self.checkpointers else None
            figures = {mode: self.figures(checkpointer, first) for mode, checkpointer in self.checkpointers.items()}
        bare += self.block("none", plan.block)
        return {"pairs": pairs, "bare": bare, "cpu": busy_share, "figures": figures, "timeline": timeline}

    def figures(self, checkpointer: gemini_ft.Checkpointer, first: int) -> dict[str, Any]:
        """The figures that the checkpointer has counted since iteration ``first``."""
        stats = checkpointer.stats
        travels = [travel for iteration, each in stats.traffic.items() if iteration > first for travel in each]
        return {
            "snapshots": stats.snapshots,
            "skipped": stats.skipped,
            "interval": checkpointer.interval,
            "blocked": stats.blocked[-self.plan.block :],
            "commit_seconds": [seconds for iteration, seconds in stats.commit_seconds.items() if iteration > first],
            "lag": [steps for iteration, steps in stats.lag.items() if iteration > first],
            "travelled": [travel.seconds for travel in travels],
            "expected": [travel.expected for travel in travels if travel.expected is not None],
            "nbytes": [travel.nbytes for travel in travels],
            "outside": [travel.outside for travel in travels],
            "spans": [len(travel.spans) for travel in travels],
        }

    def timeline(self, observer: Observer) -> dict[str, Any]:
        """Some steps of the scheduled mode, with what was sent when; times in seconds of the monotonic clock."""
        steps, before = [], self.iteration
        observer.step_over()
        for _ in range(4):
            self.step("scheduled")
            step = observer.step_over()
            steps.append({**dataclasses.asdict(step), "idle": step.idle()})
        checkpointer = self.checkpointers["scheduled"]
        checkpointer.flush()
        travels = [travel for iteration, each in checkpointer.stats.traffic.items() if iteration > before for travel in each]
        return {"steps": steps, "spans": [span.model_dump() for travel in travels for span in travel.spans]}


def main() -> None:
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(1)
    gemini_ft.init_process_group("gloo")
    results = Trial(plan).run()
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    main()
