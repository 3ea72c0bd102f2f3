"""What a script's own loop uses and has not given to be captured: LR schedulers, scalers of losses and averages of weights."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

_MANY = 100  # more are data


def left_out(given: Iterable[Any], optimizers: Collection[Any]) -> list[str]:
    """The schedulers of ``optimizers``, the scalers in use and the averaged models that nothing in ``given`` leads to, by their types.

    Args:
        given: models, and objects with a state of their own; what they hold is given with them.
        optimizers: those of the training.
    """
    known, ours = _within(given), {id(optimizer) for optimizer in optimizers}
    found = (
        item
        for item in instances(LRScheduler, torch.amp.GradScaler, AveragedModel)
        if id(item) not in known
        and (not isinstance(item, LRScheduler) or id(item.optimizer) in ours)
        and (not isinstance(item, torch.amp.GradScaler) or item._scale is not None)  # it has scaled a loss
    )
    return sorted({type(item).__qualname__ for item in found})


def instances(*kinds: type) -> Iterator[Any]:
    """The objects of ``kinds``, and of their subclasses, that exist in this process."""
    classes, more = list[type](), [*kinds]
    while more:
        classes.append(kind := more.pop())
        more += kind.__subclasses__()
    return (item for item in gc.get_referrers(*classes) if isinstance(item, kinds))


def _within(items: Iterable[Any], depth: int = 6) -> set[int]:
    """The ids of ``items``, and of what they hold in attributes, dicts, and lists that are no data."""
    found, level = set[int](), [*items]
    for _ in range(depth):
        level = [item for item in level if id(item) not in found and not isinstance(item, type | ModuleType)]
        found |= {id(item) for item in level}
        level = [inner for item in level for inner in _held_by(item)]
    return found


def _held_by(item: Any) -> list[Any]:
    if isinstance(item, nn.Module):
        return [*item.children()]
    if isinstance(item, list | tuple):
        return [*item[:_MANY]]
    return [*(item if isinstance(item, dict) else getattr(item, "__dict__", {})).values()][:_MANY]
