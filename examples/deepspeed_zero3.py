"""ZeRO 3 without Lightning: the drill of survive_failures.py with a training loop of one's own around a DeepSpeed engine.

    python examples/deepspeed_zero3.py                                              # killed three ways, compared bit for bit
    gemini run --nproc-per-node 2 examples/deepspeed_zero3.py --train               # one run
    gemini run --nproc-per-node 2 examples/deepspeed_zero3.py --train --config configs/deepspeed_zero1.json

The model and the text are those of train_gpt.py, whose module needs Lightning. What makes it survive: the "gemini" section
of the configuration, and that the loop begins where the engine is. Batches depend on the step's number alone, so there is
no position in the data to be kept.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from survive_failures import Drill, main

CONFIG = Path(__file__).parent.parent / "configs" / "deepspeed_zero3.json"


@dataclass(frozen=True)
class ZeroDrill(Drill):
    imports = "deepspeed"
    note = "each rank owns, and reads, a quarter of the state."

    def program(self, strategy: str, out: Path) -> list[str]:
        plain = ["--plain"] if strategy == "ddp" else []
        return [__file__, "--train", f"--steps={self.steps}", *self.size, f"--out={out}", *plain]


def train(argv: Sequence[str]) -> None:
    import deepspeed
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional as F
    from train_gpt import CONTEXT, Block, SourceText

    import gemini_ft.deepspeed

    class GPT(nn.Module):
        def __init__(self, width: int, layers: int) -> None:
            super().__init__()
            self.embed, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
            self.blocks = nn.Sequential(*(Block(width, heads=4, dropout=0.1) for _ in range(layers)))
            self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embed(inputs) + self.position(torch.arange(CONTEXT, device=inputs.device))
            return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), targets.flatten())

    def whole_state(engine: Any) -> dict[str, Any]:
        """In the form of Lightning's checkpoints, which the drill compares: whole weights, and what each rank has of the optimizer."""
        weights = {}
        for name, param in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([param]):
                weights[name] = param.detach().cpu().clone()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, list(engine.basic_optimizer.state.values()))
        schedulers = [engine.lr_scheduler.state_dict()]
        return {"global_step": engine.global_steps, "state_dict": weights, "optimizer_states": parts, "lr_schedulers": schedulers}

    parser = argparse.ArgumentParser()
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--plain", action="store_true", help="without gemini-ft")
    parser.add_argument("--out", help="where to save the final state")
    arguments = parser.parse_args(argv)

    config = json.loads(arguments.config.read_text())
    if arguments.plain:
        del config["gemini"]
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = GPT(arguments.width, arguments.layers)
    engine, *_ = gemini_ft.deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    data, batch = SourceText(), engine.train_micro_batch_size_per_gpu()
    if engine.global_steps == 0:
        torch.manual_seed(dist.get_rank())  # dropout; a resumed engine has brought its generators along
    for step in range(engine.global_steps, arguments.steps):
        first = (step * dist.get_world_size() + dist.get_rank()) * batch
        inputs, targets = (torch.stack(part).to(engine.device) for part in zip(*(data[first + i] for i in range(batch)), strict=True))
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    if arguments.out:
        state = whole_state(engine)
        if dist.get_rank() == 0:
            torch.save(state, arguments.out)
        dist.barrier()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "--train" in sys.argv:
        train(sys.argv[1:])
    else:
        sys.exit(main(ZeroDrill(24, ["--width=64", "--layers=2"]), ZeroDrill(80, ["--width=256", "--layers=4"]), __doc__))
