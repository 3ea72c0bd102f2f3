"""Finds where each parameter lies in an engine's partitions, for re-cutting to another number of ranks and for exports.

It is found once, when the engine is protected, and travels with every snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from gemini_ft.deepspeed.masters import base_optimizer, masters
from gemini_ft.deepspeed.reshard import Cut, Fragment
from gemini_ft.deepspeed.versions import end_to_end, groups_of_sub_groups, offsets_in_group
from gemini_ft.state.survey import state_dict_tensors


def about(engine: Any) -> dict[str, Any]:
    """Further facts that exports need, as plain data.

    ``params``: name -> whole shape, dtype in the module, whether it is trained. ``masters``: name -> parameters in it, in their
    order. ``groups``: parameters of each parameter group. ``keys``: key of the module's state dict -> name of parameter or buffer.
    """
    optimizer, named = engine.optimizer, dict(engine.module.named_parameters())
    names = {id(tensor): name for name, tensor in (*named.items(), *engine.module.named_buffers())}
    held: dict[str, list[str]] = {}
    for master, _, param, _, _ in _of_masters(engine):
        held.setdefault(master, []).append(names[id(param)])
    return {
        "version": deepspeed.__version__,
        "config": engine.config,
        "stage": int(engine.zero_optimization_stage()),
        "bf16": bool(engine.bfloat16_enabled()),
        "params": {name: _described(param) for name, param in named.items()},
        "masters": held,
        "groups": _groups(engine, held),
        "keys": {key: names[id(tensor)] for key, tensor in state_dict_tensors(engine.module)},
        "between": getattr(optimizer, "round_robin_bit16_padding", None),
        "clip_grad": getattr(optimizer, "clip_grad", 0.0),
        "dynamic_loss_scale": bool(getattr(optimizer, "dynamic_loss_scale", False)),
    }


def _described(param: Any) -> tuple[tuple[int, ...], str, bool]:
    return tuple(getattr(param, "ds_shape", param.shape)), str(param.dtype).removeprefix("torch."), param.requires_grad


def _groups(engine: Any, held: dict[str, list[str]]) -> list[list[str]]:
    """Parameters of each of the torch optimizer's groups."""
    groups: list[list[str]] = [[] for _ in base_optimizer(engine.optimizer).param_groups]
    of_sub_group = getattr(engine.optimizer, "sub_group_to_group_id", {})
    for master, params in held.items():
        kind, _, rest = master.partition(".")
        if kind != "param":
            number = int(rest.partition("-")[0])
            groups[of_sub_group.get(number, number)] += params
    if not any(groups):
        names = {id(param): name for name, param in engine.module.named_parameters()}
        return [[names[id(param)] for param in group["params"]] for group in engine.optimizer.param_groups]
    return groups


def present_cut(engine: Any) -> Cut:
    """The cut of this rank's masters and frozen parameters: how they are made of parameters."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    shapes = {name: tuple(master.shape) for name, master in masters(engine)}
    found = [Fragment(master, offset, names[id(param)], start, stop) for master, offset, param, start, stop in _of_masters(engine)]
    for name, param in others(engine).items():
        part = getattr(param, "ds_tensor", param)
        start, stop = own_part(param, engine.seq_data_parallel_group) if part is not param else (0, param.numel())
        shapes[f"frozen.{name}"] = tuple(part.shape)
        found.append(Fragment(f"frozen.{name}", 0, name, start, stop))
    return Cut(shapes, [fragment for fragment in found if fragment.start < fragment.stop])


def others(engine: Any) -> dict[str, Any]:
    """The parameters that the optimizer does not update: frozen, or not given to it."""
    updated = {id(param) for _, _, param, _, _ in _of_masters(engine)}
    return {name: param for name, param in engine.module.named_parameters() if id(param) not in updated}


def _of_masters(engine: Any) -> Iterator[tuple[str, int, torch.Tensor, int, int]]:
    """(master, offset in it, parameter, first and last element), by master and offset."""
    optimizer = engine.optimizer
    match optimizer:
        case DeepSpeedZeroOptimizer_Stage3():
            for i, (params, group) in enumerate(zip(optimizer.fp16_groups, groups_of_sub_groups(optimizer), strict=True)):
                starts = accumulate((param.partition_numel() for param in params), initial=0)
                for param, offset in zip(params, starts, strict=False):
                    yield f"zero.{i}", offset, param, *own_part(param, group)
        case DeepSpeedZeroOptimizer() | BF16_Optimizer():
            zero = isinstance(optimizer, DeepSpeedZeroOptimizer)
            partitions = optimizer.single_partition_of_fp32_groups if zero else optimizer.fp32_groups_flat_partition
            for i, (master, group) in enumerate(zip(partitions, optimizer.real_dp_process_group, strict=True)):
                params = optimizer.round_robin_bit16_groups[i] if zero else optimizer.bf16_groups[i]
                offsets = offsets_in_group(optimizer, i) if zero else end_to_end(params)
                low = dist.get_rank(group) * master.numel()
                for param, offset in zip(params, offsets, strict=True):
                    start, stop = max(low - offset, 0), min(low + master.numel() - offset, param.numel())
                    yield f"zero.{i}", offset + start - low, param, start, stop
        case FP16_Optimizer():
            for i, params in enumerate(optimizer.fp16_groups):
                for param, offset in zip(params, end_to_end(params), strict=True):
                    yield f"flat.{i}", offset, param, 0, param.numel()
        case FP16_UnfusedOptimizer():
            for i, params in enumerate(optimizer.fp16_groups):
                for j, param in enumerate(params):
                    yield f"flat.{i}-{j}", 0, param, 0, param.numel()
        case torch.optim.Optimizer():
            for name, param in masters(engine):
                yield name, 0, param, 0, param.numel()


def own_part(param: Any, group: Any) -> tuple[int, int]:
    """The range of a parameter that ZeRO 3 gives this rank, without the padding."""
    size = param.partition_numel()
    start = min(dist.get_rank(group) * size, param.ds_numel)
    return start, min(start + size, param.ds_numel)
