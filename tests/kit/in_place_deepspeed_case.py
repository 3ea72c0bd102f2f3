"""As in_place_case.py, by DeepSpeed: KEEPER is "deepspeed", which `gemini run` protects by a section of the configuration, or "deepspeed-alone".

It makes STEPS steps in all, whatever was resumed.
"""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from in_place_case import FOLDER, KEEPER, STEPS, main, network, reached

from gemini_ft.testing import digest


def train() -> None:
    """Trains by an engine of stage 1."""
    with open(f"{FOLDER}/rank-{os.environ['RANK']}", "a", buffering=1) as trace:
        print("attempt", os.getpid(), float(torch.rand(())).hex(), file=trace)
        reached("start")
        torch.manual_seed(0)
        net = network()
        config = {"train_micro_batch_size_per_gpu": 8, "steps_per_print": 10**9, "zero_optimization": {"stage": 1}}
        config |= {"zero_allow_untested_optimizer": True, **({"gemini": {"on_late": "wait"}} if KEEPER == "deepspeed" else {})}
        engine, *_ = deepspeed.initialize(
            model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2), config=config, dist_init_required=True
        )
        while engine.global_steps < STEPS:
            batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(engine.global_steps))
            loss = engine(batch).square().mean()
            engine.backward(loss)
            reached(engine.global_steps, net)
            print("step", engine.global_steps, loss.item().hex(), file=trace)
            engine.step()
        print("end", digest({"model": net.state_dict(), "rng": torch.get_rng_state()}), file=trace)
        engine.destroy()


if __name__ == "__main__":
    main(train)
