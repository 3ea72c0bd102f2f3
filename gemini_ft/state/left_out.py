"""What a script's own loop uses and has not given to be captured: LR schedulers, scalers of losses, averages of weights, generators."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import pickle
import random
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from gemini_ft.state.rng import generator_states, private_generators
from gemini_ft.state.tensors import local

_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(os.__file__).parent))  # this package, and Python's, with what is installed there
_MANY = 100  # more are data
_UNSHARED = 3  # references to the dict of a frame's variables: of the frame, of who looks at it, and of the count itself


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


class Generators:
    """Generators that the script keeps in its variables beside what it has given, and that its steps draw from.

    Args:
        given: models, and objects with a state of their own.
    """

    def __init__(self, given: Iterable[Any]) -> None:
        known = {id(random._inst), id(np.random.mtrand._rand)}  # the process's own, which are captured
        known |= {id(each) for each in private_generators(given=[*given], loaders=[*instances(DataLoader)]).values()}
        found = private_generators(**_variables())
        self._unknown = {path: generator for path, generator in found.items() if id(generator) not in known}
        self._states = self._present()

    def drawn_from(self) -> list[str]:
        """The variables of those that have been drawn from since; each is named once."""
        drawn = sorted(path for path, state in self._present().items() if state != self._states.get(path, state))
        for path in drawn:
            del self._unknown[path]
        return drawn

    def _present(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for path, generator in self._unknown.items():
            with contextlib.suppress(Exception):  # a class of the script's own, whose state cannot be read
                found[path] = pickle.dumps(generator_states({path: generator}))
        return found


class Mirrors:
    """Collections of tensors in the script's variables that mirror a model and change: averages of the weights, slow ones, the best so far.

    Args:
        models: those of the training.
        given: models, and objects with a state of their own.
    """

    def __init__(self, models: Collection[nn.Module], given: Iterable[Any]) -> None:
        self._known = _within(given)
        params: list[list[torch.Tensor]] = [[*model.parameters()] for model in models]
        kinds = [*params, *([each for each in mine if each.requires_grad] for mine in params)]
        kinds += [[*mine, *model.buffers()] for mine, model in zip(params, models, strict=True)]
        self._shapes = [sorted(map(_shape, tensors)) for tensors in kinds if tensors]
        self._sizes = {len(shapes) for shapes in self._shapes if len(shapes) > 1}
        self._own = {_memory(tensor) for tensors in kinds for tensor in tensors}
        self._marks: dict[str, Any] = {}  # of a step that was looked at
        self._steps = 0

    def changed(self) -> list[str]:
        """Names the variables with collections that this step has changed. Call it at every step; it looks at fewer and fewer of them."""
        self._steps += 1
        before, is_due = self._marks, self._steps & (self._steps - 1) == 0
        now = dict(self._found()) if is_due or before else {}
        self._marks = now if is_due else {}  # held for one step alone, so that nothing that the script forgets stays
        return [path for path, (part, mark) in now.items() if path in before and before[path][0] is part and before[path][1] != mark]

    def _found(self) -> Iterator[tuple[str, Any]]:
        for name, value in _variables().items():
            if id(value) in self._known or isinstance(value, nn.Module):
                continue
            for path, part in [(name, value), *((f"{name}.{key}", item) for key, item in getattr(value, "__dict__", {}).items())]:
                if not isinstance(part, dict | list) or len(part) not in self._sizes or id(part) in self._known:
                    continue
                tensors = [*part.values()] if isinstance(part, dict) else part
                if not all(isinstance(tensor, torch.Tensor) for tensor in tensors) or sorted(map(_shape, tensors)) not in self._shapes:
                    continue
                if not any(_memory(tensor) in self._own for tensor in tensors):
                    yield path, (part, [(id(tensor), tensor._version) for tensor in tensors])


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _memory(tensor: torch.Tensor) -> int:
    return local(tensor).data_ptr() or id(tensor)  # a part of a DTensor may be empty


def _variables() -> dict[str, Any]:
    """The variables of the functions that are under way and of their modules, without those of libraries."""
    found: dict[str, Any] = {}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if "site-packages" not in (name := frame.f_code.co_filename) and not name.startswith(_LIBRARIES):
            found = frame.f_globals | variables_of(frame) | found
        frame = frame.f_back
    return {name: value for name, value in found.items() if not isinstance(value, ModuleType | type)}


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The local variables of a frame, which does not keep them alive afterwards.

    Before Python 3.13 the dict of a function's variables stays in its frame once it was asked for. It is emptied, unless the script has
    asked for it as well (``locals()``); the variables themselves lie elsewhere.
    """
    kept = frame.f_locals
    found = dict(kept)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(kept) == _UNSHARED:
        kept.clear()
    return found


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


def not_saved(module: nn.Module) -> list[str]:
    """The states of metrics (torchmetrics) in a module that its ``state_dict`` leaves out, as most do: whoever loads that loses them."""
    metrics = [(path, metric) for path, metric in module.named_modules() if isinstance(getattr(metric, "_persistent", None), dict)]
    return [f"{path}.{name}".lstrip(".") for path, metric in metrics for name, is_saved in metric._persistent.items() if not is_saved]
