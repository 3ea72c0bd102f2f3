"""One rank of one trial of checkpoint_overhead.py: plain and saved blocks of iterations in turns, in one process.

A block's iterations are timed one by one. A saved block starts with one save that is not timed; so every timed iteration
carries exactly one save and the background work of the one before it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import peers
from common import MARK, Usage, held_memory
from load import Load
from measuring import Block, Plan


class Trial:
    """Drives one adapter and its load through ``plan``."""

    def __init__(self, load: Any, peer: peers.Peer, plan: Plan, folder: Path) -> None:
        self.load, self.peer, self.plan, self.folder = load, peer, plan, folder
        self.mark = os.environ[MARK]
        self.first = dist.get_rank() == 0
        self.ranks = pids()
        self.step = 0

    def run(self) -> list[Block]:
        """Plain block, warm-up with saves, (saved block, plain block) x pairs."""
        for _ in range(2):
            self._iterate(None)
        blocks = [self._block(self.plan.plain, saved=False)]
        self.peer.setup(self.load, self.folder)
        for _ in range(self.plan.warm):
            blocks.append(self._block(1, saved=True))
            blocks[-1].warm = True
        for _ in range(self.plan.pairs):
            blocks.append(self._block(self.plan.saved, saved=True))
            blocks.append(self._block(self.plan.plain, saved=False))
        self.peer.close()
        return blocks

    def _iterate(self, block: Block | None) -> None:
        """One optimizer step; with a block whose rows are saved, a snapshot at its end."""
        begin = time.perf_counter()
        self.load.gradients()
        reached = time.perf_counter()
        if block is not None and block.saved:
            self.peer.before_update()
        waited = time.perf_counter() - reached
        self.load.update()
        self.step += 1
        ended = time.perf_counter()
        if block is not None and block.saved:
            block.called[self.step] = time.monotonic()
            self.peer.save(self.step)
        now = time.perf_counter()
        if block is not None:
            block.iterations.append(now - begin)
            block.blocked.append(waited + now - ended if block.saved else 0.0)

    def _block(self, count: int, saved: bool) -> Block:
        block = Block(saved)
        if saved:
            self._iterate(block)  # only so that the first timed iteration has a snapshot before it
            block.iterations.clear()
            block.blocked.clear()
        dist.barrier()
        before = Usage.now(self.mark) if self.first else None
        for _ in range(count):
            self._iterate(block)
        if before is not None:
            after = Usage.now(self.mark)
            block.foreign, block.fresh = after.foreign_since(before), after.fresh_since(before)
            block.cpu = after.cpu_since(before, self.ranks)
            block.held = held_memory(self.mark)
        if saved:
            self.peer.wait_complete()
            block.completed = {step: at for step, at in self.peer.completed.items() if step in block.called}
        dist.barrier()
        return block


def pids() -> list[int]:
    """The processes of all ranks."""
    found: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(found, os.getpid())
    return found


def main(rows: Collection[str], measure: Callable[[str, Plan, Path], list[Block]]) -> None:
    """One rank of a trial: as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", choices=rows)
    parser.add_argument("plan", type=json.loads)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(float(os.environ.get("GEMINI_BENCH_DUMP_AFTER", "300")))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    blocks = measure(arguments.row, Plan(**arguments.plan), arguments.folder)
    Path(arguments.output, f"{dist.get_rank()}.json").write_text(json.dumps([asdict(block) for block in blocks]))
    dist.barrier()


def trial(row: str, plan: Plan, folder: Path) -> list[Block]:
    """Runs one trial of checkpoint_overhead.py."""
    if peers.ROWS[row].own_loop:
        from lightning_trial import run

        return run(row, plan, folder, pids())
    load = Load(plan.megabytes * 10**6, plan.tokens, seed=0 if peers.ROWS[row].same_state else dist.get_rank())
    return Trial(load, peers.build(row), plan, folder).run()


if __name__ == "__main__":
    main(peers.ROWS, trial)
    dist.destroy_process_group()
