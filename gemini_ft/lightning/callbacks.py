"""Lightning's callbacks and what else of a Trainer has no tensors: what no snapshot can resume, and moments at which a drill may strike.

Callbacks that cannot be resumed are refused by name; the rest is listed for the census. Epochs and validation are moments beside the steps
that every loop has.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from gemini_ft.core import census
from gemini_ft.errors import UnsupportedStateError
from gemini_ft.faults import inject as faults
from gemini_ft.lightning import trainer_callbacks, trainer_loops, trainer_metrics
from gemini_ft.lightning.trainer_loggers import is_followed
from gemini_ft.loaders.loader import bookmark_of
from gemini_ft.loaders.parts import facts

_REFUSED = {
    "BatchSizeFinder": "trains by itself when the fit starts, and would do so again at each restart",
    "LearningRateFinder": "trains by itself when the fit starts, and would do so again at each restart",
    "SpikeDetection": "does not save its running mean, and Lightning's own load_state_dict of it fails",
}


def refuse_callbacks(callbacks: Sequence[Any]) -> None:
    """Raises UnsupportedStateError for the first callback that cannot be resumed; called before training begins."""
    for callback in callbacks:
        for name in trainer_callbacks.shipped_names(callback) & _REFUSED.keys():
            raise UnsupportedStateError(f"{name} {_REFUSED[name]}; {census.CALLBACKS_REFUSED.how}")


def save_config_again(callbacks: Sequence[Any]) -> None:
    """Lets LightningCLI's callback write its file once more in a run that goes on: the one that it would spare is this run's own."""
    for callback in callbacks:
        if "SaveConfigCallback" in trainer_callbacks.shipped_names(callback):
            callback.overwrite = True


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


def findings(trainer: Any) -> Iterator[census.Finding]:
    """Everything in a Trainer but flags and attributes that hooks set (`gemini_ft.state.modes`)."""
    yield census.LOOPS.found("trainer", note=f"{len(trainer.lr_scheduler_configs)} schedulers")
    for index, loader in enumerate(trainer_loops.training_loaders(trainer)):
        if (mark := bookmark_of(loader)) is not None:
            where = f"train_dataloader[{index}]"
            rule = census.LOADERS_AGAIN if mark.way == "replay" else census.LOADERS
            kept, lost = mark.changed()
            yield rule.found(where, note=f"{type(loader).__name__}, by {mark.way}")
            yield from (census.DATA.found(f"{where}.{path}") for path in kept)
            yield from (census.LOADERS_AGAIN.found(f"{where}.{path}") for path in lost)
    for name, metric in trainer_metrics.metrics_of(trainer)[0].items():
        yield census.METRICS.found(name, note=type(metric).__name__)
    for name, first in trainer_callbacks.tickets(trainer).items():
        yield census.TICKETS.found(name, 0 if first is None else first.nbytes)
    for index, callback in enumerate(trainer.callbacks):
        rule = census.CALLBACKS if trainer_callbacks.has_state(callback) else census.CALLBACKS_MADE
        yield rule.found(f"callback.{index}", note=type(callback).__name__)
    for index, logger in enumerate(trainer.loggers):
        rule = census.LOGS if is_followed(logger) else census.LOGGERS
        yield rule.found(f"logger.{index}", note=type(logger).__name__)


def fingerprint(trainer: Any) -> object:
    """A value that changes when the census has to be taken again; cheap enough for every step."""
    loaders = [(id(loader), tuple(facts(loader).values())) for loader in trainer_loops.training_loaders(trainer)]
    return loaders, [id(callback) for callback in trainer.callbacks]
