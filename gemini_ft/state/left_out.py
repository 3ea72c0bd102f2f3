"""Finds what a script's own loop uses and has not given for capture: LR schedulers, scalers of losses, averages of weights, generators."""

from __future__ import annotations

import contextlib
import gc
import pickle
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from types import MappingProxyType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from gemini_ft.state.fields import is_a, parts_of
from gemini_ft.state.modes import own_values
from gemini_ft.state.rng import generator_states, private_generators, script_generators
from gemini_ft.state.script import script_frames, variables_of

_MANY = 100  # more are data
SHARED = (type, ModuleType, NoneType, int, float, complex, str, bytes, Enum)  # one such object may be the value of many variables


def left_out(given: Iterable[Any], optimizers: Collection[Any]) -> list[str]:
    """The schedulers of ``optimizers``, the scalers in use and the averaged models that nothing in ``given`` leads to, by their types.

    ``given``: models, and objects with a state of their own; what they hold is given with them. ``optimizers``: those of the training.
    """
    known, ours = within(given), {id(optimizer) for optimizer in optimizers}
    found = (
        item
        for item in instances(LRScheduler, torch.amp.GradScaler, AveragedModel)
        if id(item) not in known
        and (not isinstance(item, LRScheduler) or id(item.optimizer) in ours)
        and (not isinstance(item, torch.amp.GradScaler) or getattr(item, "_scale", None) is not None)  # it scaled a loss
    )
    return sorted({type(item).__qualname__ for item in found})


class Generators:
    """Generators that the script keeps in its variables beside what it has given, and that its steps draw from.

    ``given``: models, and objects with a state of their own. ``callbacks``: name -> object of the script that the loop calls.
    """

    def __init__(self, given: Iterable[Any], callbacks: Mapping[str, Any] = MappingProxyType({})) -> None:
        known = {id(random._inst), id(np.random.mtrand._rand), *map(id, script_generators().values())}  # which are captured
        roots = {str(index): item for index, item in enumerate(given)}
        modules = {name: item for name, item in roots.items() if is_a(item, nn.Module)}
        own = own_values({f"{name}.{path}": inner for name, item in modules.items() for path, inner in item.named_modules()})
        others = {name: item for name, item in roots.items() if name not in modules}
        known |= {id(each) for each in private_generators(6, **own, **others).values()}
        found = private_generators(**_variables(), **callbacks)
        self._unknown = {path: generator for path, generator in found.items() if id(generator) not in known}
        self._states, self._seeds = self._present(), self._seeded()

    def drawn_from(self) -> list[str]:
        """The variables of those that have been drawn from since, and not been given a seed; each is named once."""
        present, seeds = self._present(), self._seeded()
        changed = [path for path, state in present.items() if state != self._states.get(path, state)]
        drawn = sorted(path for path in changed if seeds.get(path) == self._seeds.get(path))
        for path in drawn:
            del self._unknown[path]
        self._states, self._seeds = present, seeds
        return drawn

    def _seeded(self) -> dict[str, int]:
        return {path: each.initial_seed() for path, each in self._unknown.items() if isinstance(each, torch.Generator)}

    def _present(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for path, generator in self._unknown.items():
            with contextlib.suppress(Exception):  # a class of the script's own, whose state cannot be read
                found[path] = pickle.dumps(generator_states({path: generator}))
        return found


def _variables() -> dict[str, Any]:
    """The variables of the functions that are under way and of their modules, without those of libraries."""
    found: dict[str, Any] = {}
    for frame in script_frames():
        found = frame.f_globals | variables_of(frame) | found
    return {name: value for name, value in found.items() if not issubclass(type(value), ModuleType | type)}


def instances(*kinds: type) -> Iterator[Any]:
    """The objects of ``kinds``, and of their subclasses, that exist in this process."""
    classes, more = list[type](), [*kinds]
    while more:
        classes.append(kind := more.pop())
        more += kind.__subclasses__()
    return (item for item in gc.get_referrers(*classes) if is_a(item, kinds))


def within(items: Iterable[Any], depth: int = 6) -> set[int]:
    """The ids of ``items``, and of what they hold in attributes, dicts, and lists that are no data."""
    found, level = set[int](), [*items]
    for _ in range(depth):
        level = [item for item in level if id(item) not in found and not issubclass(type(item), SHARED)]
        found |= {id(item) for item in level}
        level = [inner for item in level for inner in _held_by(item)]
    return found


def _held_by(item: Any) -> list[Any]:
    with contextlib.suppress(Exception):  # an object may raise anything when it is asked what it is
        return [*item.children()] if is_a(item, nn.Module) else [part for _, part in parts_of(item, _MANY)][:_MANY]
    return []


def not_saved(module: nn.Module) -> list[str]:
    """The states of metrics (torchmetrics) in a module that its ``state_dict`` leaves out, as most do: whoever loads that loses them."""
    metrics = [(path, metric) for path, metric in module.named_modules() if isinstance(getattr(metric, "_persistent", None), dict)]
    return [f"{path}.{name}".lstrip(".") for path, metric in metrics for name, is_saved in metric._persistent.items() if not is_saved]
