"""Finds the tensors that the optimizers in a DeepSpeed engine update on this rank, from which low-precision weights follow.

`master` tensors are fp32 (partitions of) parameters; optimizer state is keyed by them. The weights that the
module computes with are a cast of them, all-gathered where they are partitioned, and are never captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from gemini_ft.errors import UnsupportedStateError

_PARTITIONED = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, BF16_Optimizer)
_WRAPPERS = (*_PARTITIONED, FP16_Optimizer, FP16_UnfusedOptimizer)


def base_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside DeepSpeed's."""
    inner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
    assert isinstance(inner, torch.optim.Optimizer)
    return inner


def is_partitioned(optimizer: Any) -> bool:
    """Whether every rank has masters of its own (ZeRO 1 to 3, BF16_Optimizer)."""
    return isinstance(optimizer, _PARTITIONED)


def masters(engine: Any) -> list[tuple[str, torch.Tensor]]:
    """Name and tensor of everything that the optimizer updates on this rank.

    Raises:
        UnsupportedStateError: the engine has an optimizer whose state is not known here; named.
    """
    optimizer = engine.optimizer
    match optimizer:
        case DeepSpeedZeroOptimizer_Stage3():
            found = [(f"zero.{i}", tensor) for i, tensor in enumerate(optimizer.fp32_partitioned_groups_flat)]
        case DeepSpeedZeroOptimizer():
            found = [(f"zero.{i}", tensor) for i, tensor in enumerate(optimizer.single_partition_of_fp32_groups)]
        case BF16_Optimizer():
            found = [(f"zero.{i}", tensor) for i, tensor in enumerate(optimizer.fp32_groups_flat_partition)]
        case FP16_Optimizer():
            found = [(f"flat.{i}", tensor) for i, tensor in enumerate(optimizer.fp32_groups_flat)]
        case FP16_UnfusedOptimizer():
            found = [(f"flat.{i}-{j}", tensor) for i, group in enumerate(optimizer.fp32_groups) for j, tensor in enumerate(group)]
        case torch.optim.Optimizer():
            names = {id(param): name for name, param in engine.module.named_parameters()}
            params = [param for group in optimizer.param_groups for param in group["params"]]
            found = [(f"param.{names.get(id(param), i)}", param) for i, param in enumerate(params)]
        case _:
            known = ", ".join(sorted(kind.__name__ for kind in _WRAPPERS))
            raise UnsupportedStateError(
                f"the engine's optimizer is a {type(optimizer).__qualname__}; supported: {known}, and torch optimizers at stage 0"
            )
    return found


@torch.no_grad()
def rebuild_weights(engine: Any) -> None:
    """Makes the module's weights follow from the masters; collective where they are partitioned."""
    optimizer = engine.optimizer
    match optimizer:
        case DeepSpeedZeroOptimizer_Stage3():
            for i, master in enumerate(optimizer.fp32_partitioned_groups_flat):
                if optimizer.fp16_partitioned_groups_flat[i].data_ptr() != master.data_ptr():
                    optimizer.fp16_partitioned_groups_flat[i].copy_(master)
                optimizer._unflatten_partitioned_parameters(i)
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
            optimizer.checkpoint_event_epilogue()
        case DeepSpeedZeroOptimizer() | BF16_Optimizer():
            optimizer.update_lp_params()
            optimizer._link_all_hp_params()  # its views of the optimizer's state are of the tensors before
        case FP16_Optimizer():
            for master, weights in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
                for weight, value in zip(weights, master.split([weight.numel() for weight in weights]), strict=True):
                    weight.data.copy_(value.view_as(weight))
        case FP16_UnfusedOptimizer():
            for group, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
                for master, weight in zip(group, weights, strict=True):
                    weight.data.copy_(master.data)
        case _:
            return  # stage 0 in fp32: the masters are the weights


def release_gathered(engine: Any) -> None:
    """Gives up whole parameters that ZeRO 3 has gathered; the counterpart is at the end of `rebuild_weights`."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        engine.optimizer.checkpoint_event_prologue()


def replay_beta_powers(engine: Any) -> None:
    """Walks DeepSpeed's CPU Adam through the steps already made.

    DeepSpeedCPUAdam, and FusedAdam on the CPU, keep beta ** t as a running product inside a C++ object and recompute it
    with pow() when the step jumps (ops/csrc/includes/cpu_adam.h), which gives other bits. One-element tensors suffice.
    """
    base = base_optimizer(engine.optimizer)
    steps = max((int(state["step"]) for state in base.state.values() if "step" in state), default=0)
    for betas in {tuple(group["betas"]) for group in base.param_groups if "betas" in group}:
        update = _one_element_update(base, *betas)
        if update is not None:
            for step in range(steps + 1):
                update(step)


def _one_element_update(base: torch.optim.Optimizer, beta1: float, beta2: float) -> Callable[[int], object] | None:
    values = [torch.zeros(1) for _ in range(4)]
    kind = type(base).__name__
    if kind == "DeepSpeedCPUAdam":
        adam: Any = base
        return lambda step: adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, beta1, beta2, 1e-8, 0.0, True, *values)
    if kind == "FusedAdam" and not torch.cuda.is_available():
        fused: Any = base
        lists, overflow = [[value] for value in values], torch.zeros(1, dtype=torch.int)
        return lambda step: fused.multi_tensor_adam(2048 * 32, overflow, lists, 0.0, beta1, beta2, 1e-8, step, fused.adam_w_mode, 1, 0.0)
    return None
