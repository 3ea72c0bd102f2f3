"""One rank of one trial of deepspeed_overhead.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from load import WIDTH, Model
from measuring import Block, Plan
from overhead_worker import Trial, main
from peers import build
from peers.engines import ROWS

os.environ |= {"LOCAL_RANK": os.environ.get("RANK", "0"), "CROSS_RANK": "0", "CROSS_SIZE": "1"}  # as DeepSpeed's launcher sets them
_MASTER_SHARE = 12  # bytes of fp32 master and moments per parameter


class EngineLoad:
    """One rank's training under DeepSpeed; the interface is that of `load.Load`."""

    def __init__(self, plan: Plan, extra: dict[str, Any]) -> None:
        torch.manual_seed(0)
        torch.set_flush_denormal(True)
        model = Model(plan.megabytes * 10**6 * dist.get_world_size() // _MASTER_SHARE * _MASTER_SHARE)
        config = {
            "train_micro_batch_size_per_gpu": plan.tokens,
            "steps_per_print": 10**9,
            "bf16": {"enabled": plan.dtype == "bf16"},
            "zero_optimization": {"stage": plan.stage, "reduce_bucket_size": 2**22, "allgather_bucket_size": 2**22},
            **extra,
        }
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.input = torch.randn(plan.tokens, WIDTH, dtype=torch.bfloat16 if plan.dtype == "bf16" else torch.float32)

    def gradients(self) -> None:
        """Forward and backward, which reduces the gradients."""
        self.engine.backward(self.engine(self.input))

    def update(self) -> None:
        """The engine's step."""
        self.engine.step()


def trial(row: str, plan: Plan, folder: Path) -> list[Block]:
    """Runs one trial of deepspeed_overhead.py."""
    peer: Any = build(row, ROWS)
    return Trial(EngineLoad(plan, peer.config), peer, plan, folder).run()


if __name__ == "__main__":
    main(ROWS, trial)
    sys.stdout.flush()
    os._exit(0)  # an engine of DeepSpeed may abort in the interpreter's last moments
