"""Watches when gradients become ready, for the planners' picture of a backward pass.

It does so by `ModelHook`, which does not get in the way of copying, pickling, exporting and compiling the user's model.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_KEPT = 16  # steps


class ModelHook:
    """Calls a method at every forward pass, except while the model is being compiled or exported.

    In a copy of the model, and where it is unpickled, it does nothing: a copy has no synchronizer, until it is given one of its own.

    Args:
        method: called with what a hook gets; its answer is not used.
    """

    def __init__(self, method: Callable[..., object] | None = None) -> None:
        self._method = method

    def __call__(self, *arguments: Any) -> None:
        if not torch.compiler.is_compiling() and self._method is not None:
            self._method(*arguments)

    def __reduce__(self) -> tuple[type[ModelHook], tuple[()]]:
        return ModelHook, ()


class ReadyTimes:
    """Notes the times of each step. Without a forward pass of the model itself, times count from the first gradient on."""

    def __init__(self, model: nn.Module) -> None:
        self.steps: deque[tuple[float, dict[str, float]]] = deque(maxlen=_KEPT)  # seconds of each as in `typical`
        self.begun: float | None = None  # the forward pass of this step
        self._forward = 0.0
        self._end: float | None = None
        self._at: dict[str, float] = {}
        self._handles: list[Any] = [
            model.register_forward_pre_hook(ModelHook(self._begin)),
            model.register_forward_hook(ModelHook(self._ended)),
        ]

    def _begin(self, *_: Any) -> None:
        self.begun = time.perf_counter()

    def _ended(self, *_: Any) -> None:
        self._end = time.perf_counter()
        self._forward = self._end - (self.begun if self.begun is not None else self._end)
        self._at = {}  # of a forward pass without a step: evaluation

    def ready(self, name: str) -> None:
        """Records a gradient that is final."""
        now = time.perf_counter()
        if self._end is None:
            self._end = now
        self._at[name] = now - self._end

    def step_over(self) -> None:
        """Records that the backward pass is over."""
        if self._at:
            self.steps.append((self._forward, self._at))
        self._at, self._end, self._forward, self.begun = {}, None, 0.0, None

    def typical(self, names: list[str]) -> list[float]:
        """Medians over the last steps: of the forward pass, then from its end until each gradient was ready (infinite: it never was)."""
        found = list(self.steps)[1:] or list(self.steps)  # the first step is unlike all others
        ready = [statistics.median([at[name] for _, at in found if name in at] or [float("inf")]) for name in names]
        return [statistics.median([forward for forward, _ in found] or [0.0]), *ready]

    def close(self) -> None:
        """Removes all hooks from the model."""
        for handle in self._handles:
            handle.remove()
