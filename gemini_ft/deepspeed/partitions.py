"""The masters of a DeepSpeed engine, which its optimizers update on this rank, and where each parameter lies in them.

Masters are fp32 (partitions of) parameters; optimizer state is keyed by them. The weights that the module computes with are a cast of
them, all-gathered where they are partitioned, and are never captured.

The place of each parameter is found once, when the engine is protected, and travels with every snapshot, for re-cutting to another number
of ranks and for exports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
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

from gemini_ft.deepspeed.reshard import Cut, Fragment
from gemini_ft.deepspeed.versions import end_to_end, groups_of_sub_groups, offsets_in_group
from gemini_ft.errors import UnsupportedStateError
from gemini_ft.pipeline.plan import trained
from gemini_ft.state.survey import state_dict_tensors

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

    Raises UnsupportedStateError: the engine has an optimizer whose state is not known here; named.
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


def whole_masters(engine: Any) -> dict[str, torch.Tensor]:
    """Name -> the master of a parameter, a view in its shape, where this rank's masters are all that there are."""
    flat, found = dict(masters(engine)), dict[str, torch.Tensor]()
    names = {id(param): name for name, param in trained(engine.module).items()}
    for master, offset, param, start, stop in _of_masters(engine):
        if start < stop:
            found[names[id(param)]] = flat[master].detach()[offset : offset + stop - start].view(param.shape)
    return found


def divide_among(engine: Any, group: Any) -> None:
    """Has ZeRO 1 or 2 divide its masters among the ranks of a group, in place of all, before the first step. Collective within it."""
    old = engine.optimizer
    base = base_optimizer(old)
    old.destroy()
    for settings, params in zip(base.param_groups, old.bit16_groups, strict=True):
        settings["params"] = params
    base.state.clear()
    engine.seq_data_parallel_group = group
    new = engine._configure_zero_optimizer(base)
    if getattr(engine, "_support_torch_style_backward", False):
        new.register_grad_acc_post_hook(engine._backward_post_hook)
    old.__dict__ = vars(new)  # whoever holds the old one, as scripts do, has the new one's state


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
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()  # the script may look at them before the next step
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


@torch.no_grad()
def written_weights(engine: Any) -> list[str]:
    """The weights that do not follow from their masters, as the script has written them; of each this rank's part is looked at."""
    optimizer, found = engine.optimizer, list[str]()
    if isinstance(optimizer, torch.optim.Optimizer):
        return found  # the masters are the weights
    flat, names = dict(masters(engine)), {id(param): name for name, param in engine.module.named_parameters()}
    for master, offset, param, start, stop in _of_masters(engine):
        if start < stop:
            part: torch.Tensor | None = getattr(param, "ds_tensor", None)  # of ZeRO 3
            own = param.flatten()[start:stop] if part is None else part[: stop - start]
            due = flat[master].flatten()[offset : offset + stop - start].to(own)
            is_cast = own.is_floating_point()  # quantized ones (zero_quantized_weights) are none
            if is_cast and not torch.equal(own.view(torch.uint8), due.view(torch.uint8)):  # bits: a NaN equals itself
                found.append(names[id(param)])
    return found


def follow_writes(engine: Any, written: Callable[[bool], None]) -> None:
    """Has ``written`` called when DeepSpeed's ``safe_set_full_fp32_param`` and the like have written masters, or else their state.

    They write through ``.data``, which torch does not count.
    """
    is_zero3 = isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3)
    for owner in [engine.optimizer] if is_zero3 else engine.module.parameters():
        for name in ("set_full_hp_param", "set_local_hp_param"):
            write = getattr(owner, name, None)
            if write is not None and not hasattr(write, "__wrapped__"):
                setattr(owner, name, _told(write, written))


def _told(write: Callable[..., None], written: Callable[[bool], None]) -> Callable[..., None]:
    @wraps(write)
    def told(*arguments: Any, **named: Any) -> None:
        write(*arguments, **named)
        if any(isinstance(each, torch.nn.Parameter) and not each.requires_grad for each in (*arguments, *named.values())):
            return  # ZeRO 3 leaves what is frozen as it is
        written(not any(isinstance(key, str) for key in (*arguments, *named.values())))  # the key of optimizer state

    return told


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


def has_gradients(engine: Any) -> bool:
    """Whether gradients wait for the next step, behind one that has used all of its own: another engine's loss went through this one."""
    waiting = getattr(engine.optimizer, "averaged_gradients", None) or {}
    return any(part is not None and len(part) > 0 for part in waiting.values()) or any(
        param.grad is not None for param in engine.module.parameters()
    )


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
        "params": {
            name: (tuple(getattr(param, "ds_shape", param.shape)), str(param.dtype).removeprefix("torch."), param.requires_grad)
            for name, param in named.items()
        },
        "masters": held,
        "groups": _groups(engine, held),
        "keys": {key: names[id(tensor)] for key, tensor in state_dict_tensors(engine.module)},
        "between": getattr(optimizer, "round_robin_bit16_padding", None),
        "clip_grad": getattr(optimizer, "clip_grad", 0.0),
        "dynamic_loss_scale": bool(getattr(optimizer, "dynamic_loss_scale", False)),
    }


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
