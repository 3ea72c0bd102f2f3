"""What the ranks of test_plain_loop.py run: small loops around a Checkpointer, each with something special."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_kit import World
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_ft
from gemini_ft.testing import digest


@dataclass(frozen=True)
class Case:
    """One training job."""

    steps: int = 16
    accumulate: int = 1  # iterations per optimizer step
    overflow_every: int = 0  # iterations at which the optimizer is not called, as GradScaler does it
    optimizers: int = 1
    width: int = 16
    state: tuple[str, ...] = ("scheduler",)
    pause: float = 0.0  # seconds after each iteration
    options: Mapping[str, Any] = field(default_factory=dict)


class Net(nn.Module):
    """Parameters, buffers, and randomness in the forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        return out


def start_ranks() -> tuple[int, int]:
    if int(os.environ["WORLD_SIZE"]) > 1:
        gemini_ft.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def build(case: Case) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    rank, world = start_ranks()
    torch.manual_seed(0)
    net = Net(case.width)
    model = DistributedDataParallel(net) if world > 1 else net
    torch.manual_seed(rank)
    parts = (
        [list(net.parameters())]
        if case.optimizers == 1
        else [list(net.first.parameters()), [*net.norm.parameters(), *net.last.parameters()]]
    )
    return model, [torch.optim.AdamW(part, lr=1e-2) for part in parts]


def train(case: Case, out: str) -> dict[str, Any]:
    """Train to the end; every iteration's loss and learning rate goes to the file ``<out>.<rank>``, in hex."""
    model, optimizers = build(case)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], case.steps)
    everything: dict[str, Any] = {"scheduler": scheduler}
    state = {name: everything[name] for name in case.state}
    checkpointer = gemini_ft.Checkpointer(model, optimizers if len(optimizers) > 1 else optimizers[0], state=state, **case.options)
    start = checkpointer.resume()
    seen = checkpointer.scalars.get("seen", 0)
    with open(f"{out}.{os.environ['RANK']}", "a", buffering=1) as trace:
        for iteration in range(start, case.steps):
            loss = model(torch.randn(8, 8)).square().mean()
            (loss / case.accumulate).backward()
            if (iteration + 1) % case.accumulate == 0:
                overflow = case.overflow_every and (iteration + 1) % case.overflow_every == 0
                for optimizer in optimizers:
                    if not overflow:
                        optimizer.step()
                    optimizer.zero_grad()
                scheduler.step()
            seen += 8
            trace.write(f"{iteration} {float(loss).hex()} {float(scheduler.get_last_lr()[0]).hex()} {seen}\n")
            checkpointer.step(seen=seen)
            time.sleep(case.pause)
    checkpointer.close()
    final = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "rng": torch.get_rng_state(), "seen": seen}
    return {"start": start, "state": digest(final), "restored": checkpointer.stats.restored, "snapshots": checkpointer.stats.snapshots}


def history(out: Path, rank: int) -> dict[int, str]:
    """Iteration -> what was written of it; an iteration that was repeated must have been the same each time."""
    found: dict[int, str] = {}
    for line in Path(f"{out}.{rank}").read_text().splitlines():
        iteration, _, rest = line.partition(" ")
        assert found.setdefault(int(iteration), rest) == rest, f"iteration {iteration} was {found[int(iteration)]}, then {rest}"
    return found


def side_by_side(
    folder: Path, job: Callable[[str], Any], faults: str, world: int = 2, *, calm: Callable[[str], Any] | None = None, **environ: Any
) -> tuple[list[Any], list[Any]]:
    """Runs a job with faults until it ends, and at the same time without; what its ranks wrote of each iteration must be the same.

    Args:
        folder: for both.
        job: called with the path at which each rank writes what `history` reads.
        faults: of which each restarts all ranks once.
        world: ranks.
        calm: the job to compare with; default: the same one.
        **environ: of the disturbed ranks.

    Returns:
        What the ranks of the last attempt have returned, and those of the undisturbed one.
    """
    with World(folder, world) as others, World(folder, world, **environ) as ranks:
        undisturbed = others.start(calm or job, str(folder / "undisturbed"))
        results = ranks.finish(job, str(folder / "disturbed"), GEMINI_FAULTS=faults)
        assert ranks.restarts == len(faults.split(";"))
        expected = undisturbed.results()
    assert not any(isinstance(said, Exception) for said in expected), expected
    for rank in range(world):
        assert history(folder / "disturbed", rank) == history(folder / "undisturbed", rank)
    return results, expected
