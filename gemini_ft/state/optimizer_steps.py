"""Follows the steps of optimizers: each waits for the copy under way, is counted, and must be of an optimizer that is captured."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gemini_ft import accelerator
from gemini_ft.errors import StateError
from gemini_ft.state.base import PlainState
from gemini_ft.state.tensors import every_optimizer

_log = logging.getLogger("gemini_ft")
_IDLE = 100  # iterations without a step, from the first one on, after which the user is told
_captured: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers of this process whose step has been captured into a graph


def weak_hook(method: Callable[[Optimizer], None]) -> Callable[..., None]:
    """A hook of all optimizers of the process that calls a method for the one that steps, and does not keep the method's object alive."""
    found = weakref.WeakMethod(method)

    def hook(optimizer: Optimizer, *_: object) -> None:
        if (call := found()) is not None:
            call(optimizer)

    return hook


class OptimizerSteps:
    """The steps of the optimizers of one state. ``before``: called before each step."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._state: PlainState | None = None
        self._handles: list[Any] = []
        self._hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._named: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # unknown ones that the user was told of
        self._has_hooks = True
        self._stranger: Callable[[], Optimizer | None] = lambda: None  # one that has stepped and was not given, if it still exists
        self.made = 0  # how many there have been, of all optimizers
        self.has_stepped = False  # whether one of them was since `take`
        self._idle: int | None = 0  # iterations without a step; None: there has been one
        self._is_unannounced = False  # one has been captured since the loop announced an update for the last time

    def follow(self, state: PlainState, others: Iterable[Optimizer], hooks: bool) -> None:
        """Follows the optimizers of ``state`` and the others; without ``hooks`` their steps do not wait, and count in ``made`` alone."""
        self._state, self._has_hooks = state, hooks
        self._handles += state.watch()
        for optimizer in [*every_optimizer(state.optimizers).values(), *others]:
            self._hook(optimizer)
        self._handles.append(register_optimizer_step_post_hook(weak_hook(self._any_stepped)))

    def forget(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._state = [], None
        self._hooked.clear()

    def announced(self) -> None:
        """Takes the loop's announcement of an update, which counts as a step if it may be the replay of a graph that has captured one."""
        if any(optimizer in _captured for optimizer in self._hooked):
            self._count()
        self._is_unannounced = False

    def take(self) -> bool:
        """Whether an optimizer has stepped since the last call.

        Raises StateError: one has been captured into a graph, and replays of that are not announced.
        """
        if self._is_unannounced:
            raise StateError(
                "an optimizer's step has been captured into a graph, whose replays would write state while it is copied, unseen; call "
                "checkpointer.wait_before_update() before each replay, outside of the capture, for the first time before this step()"
            )
        stepped, self.has_stepped = self.has_stepped, False
        if stepped:
            self._idle = None
        elif self._idle is not None:
            self._idle += 1
            if self._idle == _IDLE:
                _log.warning(
                    "%d iterations have ended and no optimizer that was given has stepped, so there is no snapshot. A step counts if it is "
                    "made by step() of a torch optimizer, or announced by checkpointer.wait_before_update() where a graph is replayed that "
                    "was captured after gemini_ft had been imported",
                    _IDLE,
                )
        return stepped

    def refuse_stranger(self) -> None:
        """Raises StateError if an unknown optimizer with a state has stepped; one that another holds since then is taken in.

        Without hooks it is named in a warning, once: what has loops of its own lets a script save such an optimizer itself.
        """
        stranger, self._stranger = self._stranger(), lambda: None
        if stranger is None or not any(not isinstance(part, dict) or part for part in stranger.state.values()):
            return
        if not self._has_hooks:
            self._name(stranger)
            return
        if stranger not in set(every_optimizer(self._state.optimizers if self._state is not None else ()).values()):
            raise StateError(
                f"an optimizer that was not given has stepped, a {type(stranger).__qualname__} with parameters of a model that was, "
                "so its state is in no snapshot; where an optimizer is replaced, call checkpointer.bind(model, optimizers) with the new one"
            )
        self._hook(stranger)

    def _name(self, stranger: Optimizer) -> None:
        self._named.add(stranger)
        if not (dist.is_initialized() and dist.get_rank()):
            _log.warning(
                "an optimizer that was not given has stepped, a %s with parameters of a model that was, so its state is in no snapshot, "
                "unless the script saves it itself: return it from Lightning's configure_optimizers, put it into the state of Fabric, or "
                "save it in on_save_checkpoint and load it in on_load_checkpoint",
                type(stranger).__qualname__,
            )

    def _hook(self, optimizer: Optimizer) -> None:
        self._hooked.add(optimizer)
        if not self._has_hooks:
            return
        self._is_unannounced |= optimizer in _captured
        self._handles.append(optimizer.register_step_pre_hook(self._begin))
        self._handles.append(optimizer.register_step_post_hook(self._end))

    def _begin(self, optimizer: Optimizer, *_: Any) -> None:
        if _is_being_captured(optimizer):  # nothing is written now, and what waits for events cannot be captured
            self._is_unannounced = True
        else:
            self._before()

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        if not _is_being_captured(optimizer):
            self._count()

    def _count(self) -> None:
        self.made += 1
        self.has_stepped = True

    def _any_stepped(self, optimizer: Optimizer) -> None:
        """Watches every optimizer of this process: an unknown one that steps writes captured state, while its own state is not captured."""
        if optimizer in self._hooked:
            self.made += not self._has_hooks
        elif self._stranger() is None and self._state is not None and optimizer not in self._named:
            ours = {id(param) for model in self._state.models.values() for param in model.parameters()}
            if any(id(param) in ours for group in optimizer.param_groups for param in group["params"]):
                self._stranger = weakref.ref(optimizer)


def _note_capture(optimizer: Optimizer, *_: Any) -> None:
    if _is_being_captured(optimizer):
        _captured.add(optimizer)


# From the first import on: a script may capture before it makes its Checkpointer.
register_optimizer_step_pre_hook(_note_capture)


def _is_being_captured(optimizer: Optimizer) -> bool:
    devices = {param.device for group in optimizer.param_groups for param in group["params"][:1]}
    return any(map(accelerator.is_capturing, devices))
