"""The differences between the supported versions of torch, in one place."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

# torch 2.12 and older have these under names that 2.13 deprecates.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def buffers_are_broadcast(model: Any) -> bool:
    """Whether a DistributedDataParallel sends the first rank's buffers to all ranks before a forward pass."""
    return bool(getattr(model, "forward_sync_buffers", getattr(model, "broadcast_buffers", True)))  # torch 2.13 renames it


def guard_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A function that says of as many tensors, all different, whether each has the type, shape, strides, dtype, device and `requires_grad`
    of its predecessor in ``tensors``; a no may be wrong (inside autocast). None: this torch has no such guards, which its compiler uses.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if (kind := getattr(guards, "TensorGuards", None)) is None:
        return None
    check: Callable[..., bool] = kind(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def forget_defaults(group: Any) -> None:
    """Takes a default process group out of the defaults of functions, where None means the default group of the moment.

    A module that is imported while there is one, as DDP imports ``torch.distributed.nn``, keeps it by ``group=dist.group.WORLD``, and its
    connections stay open.
    """
    for each in gc.get_objects():
        if type(each) is FunctionType:
            if any(value is group for value in each.__defaults__ or ()):
                each.__defaults__ = tuple(None if value is group else value for value in each.__defaults__ or ())
            named = each.__kwdefaults__ or {}
            named.update({name: None for name, value in named.items() if value is group})


def forget_meshes() -> None:
    """Empties the caches in which torch keeps meshes of DTensors, and with them process groups, for as long as the process lives.

    A torch with further caches keeps them; a caller that depends on it looks whether a mesh still lives.
    """
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # what is frozen is in no list
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper and (each.__module__ or "").startswith("torch.distributed"):
            each.cache_clear()
    for where, name in (
        (sys.modules.get("torch.distributed.tensor._redistribute"), "clear_redistribute_planner_cache"),
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
    ):
        getattr(where, name, lambda: None)()
    gc.collect()
    if is_frozen:
        gc.freeze()


def number_groups_anew() -> None:
    """Gives the next process group the name that the first one of a process has, under which the other ranks look for it.

    Torch does so when it destroys the default group, but not where making that one has failed.
    """
    dist.distributed_c10d._world.group_count = 0
