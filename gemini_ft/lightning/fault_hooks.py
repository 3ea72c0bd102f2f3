"""Lightning's own moments at which a drill may strike: epochs and validation, beside the steps that every loop has."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from gemini_ft.faults import inject as faults


def watch(trainer: Any, package: str) -> None:
    """Makes ``trainer`` tell `gemini_ft.faults.inject` of its epochs and validations. Without GEMINI_FAULTS it does nothing."""
    kind = _callback(package)
    if faults.from_environment() and not any(isinstance(callback, kind) for callback in trainer.callbacks):
        trainer.callbacks.append(kind())


@functools.cache
def _callback(package: str) -> Any:
    """The callback as a class for one of Lightning's packages; it has no state, so checkpoints do not show it."""

    def at(moment: str) -> Any:
        return lambda self, trainer, module: faults.at_step(trainer.global_step, moment)

    hooks = {
        "on_train_epoch_start": at("epoch_start"),
        "on_train_epoch_end": at("epoch_end"),
        "on_validation_start": at("validation_start"),
        "on_validation_end": at("validation_end"),
    }
    return type("Moments", (importlib.import_module(f"{package}.callbacks").Callback,), hooks)
