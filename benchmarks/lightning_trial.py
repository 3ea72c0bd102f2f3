"""A trial in which Lightning drives the training: plain and saved blocks are calls of ``fit`` in turns, in one process."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist

import peers
from common import MARK, Usage, held_memory
from lightning_load import Inputs, LightningLoad, quiet
from measuring import Block, Plan
from peers.lightning_rows import Keeper


def run(row: str, plan: Plan, folder: Path, ranks: list[int]) -> list[Block]:
    """Plain block, (saved block, plain block) x pairs. Every block trains a module of its own, from the same start.

    Args:
        row: what to measure.
        plan: how often.
        folder: in memory, empty.
        ranks: the processes of all ranks.
    """
    os.environ |= {"NODE_RANK": str(dist.get_rank()), "LOCAL_RANK": "0"}  # to Lightning, every rank is a host
    blocks = [_fit(None, plan.plain, plan, folder, ranks)]
    for _ in range(plan.pairs):
        keeper: Keeper = peers.build(row)  # type: ignore[assignment]  # rows with a loop of their own build keepers
        blocks.append(_fit(keeper, plan.saved, plan, folder, ranks))
        blocks.append(_fit(None, plan.plain, plan, folder, ranks))
    return blocks


def _fit(keeper: Keeper | None, count: int, plan: Plan, folder: Path, ranks: list[int]) -> Block:
    block = Block(saved=keeper is not None)
    clock = Clock(block, keeper, skip=plan.warm + 1, ranks=ranks)
    options: dict[str, Any] = {"strategy": "ddp", "callbacks": [], "enable_checkpointing": False}
    options |= keeper.options(folder) if keeper is not None else {}
    options["callbacks"] = [*options["callbacks"], clock]  # it reads what the others have noted
    steps = clock.skip + count + 1  # an iteration ends where the next one starts
    trainer = quiet(devices=1, num_nodes=dist.get_world_size(), max_steps=steps, **options)
    trainer.fit(LightningLoad(plan.megabytes * 10**6), Inputs(steps, plan.tokens).loader())
    if keeper is not None:
        block.called = {step: at for step, at in keeper.called.items() if step >= clock.skip}
        block.completed = keeper.completed
    del trainer
    gc.collect()  # trainer and module are a cycle; the next fit is not to find their memory held
    return block


class Clock(L.Callback):
    """Times iterations from the start of one batch to the start of the next: what a strategy does in between is inside."""

    def __init__(self, block: Block, keeper: Keeper | None, skip: int, ranks: list[int]) -> None:
        self.skip = skip
        self._block, self._keeper = block, keeper
        self._mark = os.environ[MARK]
        self._ranks = ranks
        self._begin = 0.0
        self._before: Usage | None = None

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        step, now = trainer.global_step, time.perf_counter()
        if step > self.skip:
            self._block.iterations.append(now - self._begin)
            self._block.blocked.append(self._keeper.blocked.get(step, 0.0) if self._keeper is not None else 0.0)
        elif step == self.skip and trainer.is_global_zero:
            self._before = Usage.now(self._mark)
        self._begin = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._before is not None:
            after = Usage.now(self._mark)
            self._block.foreign, self._block.fresh = after.foreign_since(self._before), after.fresh_since(self._before)
            self._block.cpu = after.cpu_since(self._before, self._ranks)
            self._block.held = held_memory(self._mark)
