"""Hooks on a user's model that do not get in the way of copying, pickling, exporting and compiling it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
