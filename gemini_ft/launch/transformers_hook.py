"""Protects, in workers of ``gemini run``, every training of transformers' Trainer: one without a `GeminiCallback` is given one.

So an unchanged script is protected, and so are libraries that subclass the Trainer. Under DeepSpeed it is the configuration that asks
for protection; without a "gemini" section nothing happens. ``GEMINI_WRAP=0`` leaves the Trainer as it is.

Standard library only: every worker runs this before its script, whatever the script is.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from gemini_ft.errors import GeminiError
from gemini_ft.launch.import_hook import once_imported

_log = logging.getLogger("gemini_ft")


def install() -> None:
    """Extends ``Trainer.train`` as soon as it is there. May be called any number of times."""
    once_imported("transformers.trainer", _wrap)


def _wrap(module: ModuleType) -> None:
    kind = getattr(module, "Trainer", None)
    original = getattr(kind, "train", None)
    if kind is not None and original is not None and not hasattr(original, "_gemini_original"):
        kind.train = _protecting(original)


def _protecting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(trainer: Any, *arguments: Any, **named: Any) -> Any:
        try:
            integration = importlib.import_module("gemini_ft.huggingface")
        except ImportError as error:
            _log.warning("transformers' Trainer is not protected: %s", error)
        else:
            integration.protect(trainer)
        try:
            return original(trainer, *arguments, **named)
        except GeminiError as error:  # the script may never have heard of us
            error.add_note("`gemini run` protects every Trainer; GEMINI_WRAP=0 leaves them as they are")
            raise

    train._gemini_original = original  # type: ignore[attr-defined]
    return train
