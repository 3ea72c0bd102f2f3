"""Finds out when a loop writes state that is being copied, before the next forward pass or in it, and when it loads what has been resumed.

A loop that writes parameters in forward (an embedding with max_norm) does so again when it is resumed, so its state may be copied at the
end of each step instead. A write before the forward pass may stand behind the end of the iteration, and would be lost: it cannot be told
from one at the beginning of the next, so the user is asked.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from gemini_ft.state.copy_plan import CopyPlan, Marks
from gemini_ft.state.tensors import unwrap_model

_log = logging.getLogger("gemini_ft")
_resumed: weakref.WeakSet[nn.Module | Optimizer] = weakref.WeakSet()


def name_loads(models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> list[Any]:
    """Warns when a script loads another state into what was resumed, until the handles that are returned are removed."""
    handles = []
    items: list[nn.Module | Optimizer] = [*map(unwrap_model, models), *optimizers]
    for item in items:
        with suppress(AttributeError):  # an optimizer of a library may have called no constructor of torch's
            handles.append(item.register_load_state_dict_pre_hook(_name_load))
            _resumed.add(item)
    return handles


def _name_load(item: nn.Module | Optimizer, *_: Any) -> None:
    if item in _resumed and not (dist.is_initialized() and dist.get_rank()):  # a copy has the hook, too
        _log.warning(
            "a %s that resume() has put back is loaded from elsewhere, which may be older, while loaders, generators and all else go on "
            "where they were: load files of your own before resume(), or only if it has returned 0",
            type(item).__qualname__,
        )


def is_drifting(models: Iterable[nn.Module]) -> bool:
    """Whether a module writes a parameter in forward by what its rank is given (``max_norm``): nothing averages that over ranks."""
    found = (module for model in models for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return any(module.max_norm is not None for module in found)


class CopyWhen:
    """Decides when the state is copied: beside the next forward and backward, or at once when the step ends.

    Args:
        choice: the user's, ``copy_when``.
        warn: called with the reason why the last snapshot is worth nothing, where the user has to do something about it.
    """

    def __init__(self, choice: str, warn: Callable[[str], None]) -> None:
        self.at_step = choice == "at_step"  # whether it is copied at once
        self._is_auto, self._warn = choice == "auto", warn
        self._suspicious = False  # state was written during the last copy, and it is not known whether in forward
        self._watch: _EarlyWrites | None = None

    def judge(self, written: list[str], iteration: int) -> bool:
        """Whether the state is copied at once from ``iteration`` on, because writes in forward to ``written`` spoilt the last copy."""
        watch, self._watch, self._suspicious = self._watch, None, False
        if watch is not None:
            watch.end()
        if not written or self.at_step or not self._is_auto:
            return False
        if watch is None or watch.early is None:
            self._suspicious = True
        elif watch.early:
            self._suspicious = True
            self._warn(
                f"{', '.join(watch.early[:5])} written between the snapshot and the next forward; if that is the end of an iteration, take "
                "the snapshot after it (checkpointer.step() is the last statement), if it is the beginning of one, set copy_when='at_step'"
            )
        else:
            self.at_step = True
            _log.warning(
                "%s written in forward or backward, while the state is copied: from iteration %d on it is copied at once at the end of "
                "each step, which makes the step longer by that copy and takes %s bytes more of this worker's memory (copy_when='at_step')",
                ", ".join(written[:5]),
                iteration,
                f"{watch.plan.nbytes:,}",
            )
        return self.at_step

    def follow(self, plan: CopyPlan, marks: Marks) -> None:
        """Watches for writes to the snapshot that is being made, if there were some to the one before."""
        if self._suspicious:
            self._watch = _EarlyWrites(plan, marks)


class _EarlyWrites:
    """Looks at the tensors of one snapshot when the first module's forward begins."""

    def __init__(self, plan: CopyPlan, marks: Marks) -> None:
        self.plan, self._marks = plan, marks
        self.early: list[str] | None = None  # names of the tensors written by then; None: no forward has begun
        self._handle: Any = register_module_forward_pre_hook(self._look)

    def _look(self, *_: Any) -> None:
        self.end()
        if self.early is None:
            self.early = self.plan.changed(self._marks)

    def end(self) -> None:
        """Stops looking."""
        self._handle.remove()
