"""torchtitan's debug model on CPUs: torchtitan_case.py SCRIPT ARGUMENTS.

What its version 0.3 has for GPUs alone is exchanged before it is used. Prints each rank's last weights as a hash.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as utils
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_block_mask, create_mask

utils.device_type, utils.device_module = (
    "cpu",
    SimpleNamespace(
        current_device=lambda: 0,
        empty_cache=lambda: None,
        get_device_name=lambda _: "CPU",
        get_device_properties=lambda _: SimpleNamespace(total_memory=2**30),
        memory_stats=lambda _: {},
        reset_peak_memory_stats=lambda: None,
        set_device=lambda _: None,
        synchronize=lambda: None,
    ),
)
utils.get_local_device = lambda: torch.device("cpu")

import torchtitan.models.common.attention as attention  # noqa: E402  # after the device was chosen
from torchtitan.trainer import Trainer  # noqa: E402


def attend(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> tuple[Any, None]:
    """FlexAttention, which has no backward pass on CPUs, with a mask of all pairs."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], "cpu")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), None


attention.FlexAttention.compiled_flex_attn = staticmethod(attend)
attention._compiled_create_block_mask = create_block_mask
set_divide_factor = FSDPModule.set_gradient_divide_factor


def divide(self: FSDPModule, factor: float) -> None:
    self.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it adds
    set_divide_factor(self, factor)


FSDPModule.set_gradient_divide_factor = divide  # type: ignore[method-assign]
if not hasattr(torch.distributed, "set_timeout"):  # before torch 2.14
    torch.distributed.set_timeout = lambda *_: None  # type: ignore[attr-defined]
close = Trainer.close


def close_and_tell(trainer: Any) -> None:
    close(trainer)
    parameters = [getattr(param, "_local_tensor", param).detach() for part in trainer.model_parts for param in part.parameters()]
    ends = hashlib.sha256(b"".join(param.numpy().tobytes() for param in parameters)).hexdigest()
    print(f"last: rank {os.environ['RANK']} step {trainer.step} tokens {trainer.ntokens_seen} {ends}\n", end="", flush=True)


Trainer.close = close_and_tell
script = sys.argv.pop(1)
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
