"""Lists a Trainer's state beside models and optimizers, for the census."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemini_ft.core.census import Finding
from gemini_ft.core.fates import CALLBACKS, CALLBACKS_MADE, DATA, LOADERS, LOADERS_AGAIN, LOGGERS, LOGS, LOOPS, METRICS, TICKETS
from gemini_ft.lightning import trainer_callbacks, trainer_loops, trainer_metrics
from gemini_ft.lightning.loader import bookmark_of
from gemini_ft.lightning.loader_parts import facts
from gemini_ft.lightning.trainer_loggers import is_followed


def findings(trainer: Any) -> Iterator[Finding]:
    """Everything in a Trainer but flags and attributes that hooks set (`gemini_ft.state.modes`)."""
    yield LOOPS.found("trainer", note=f"{len(trainer.lr_scheduler_configs)} schedulers")
    for index, loader in enumerate(trainer_loops.training_loaders(trainer)):
        if (mark := bookmark_of(loader)) is not None:
            where = f"train_dataloader[{index}]"
            rule = LOADERS_AGAIN if mark.way == "replay" else LOADERS
            kept, lost = mark.changed()
            yield rule.found(where, note=f"{type(loader).__name__}, by {mark.way}")
            yield from (DATA.found(f"{where}.{path}") for path in kept)
            yield from (LOADERS_AGAIN.found(f"{where}.{path}") for path in lost)
    for name, metric in trainer_metrics.metrics_of(trainer)[0].items():
        yield METRICS.found(name, note=type(metric).__name__)
    for name, first in trainer_callbacks.tickets(trainer).items():
        yield TICKETS.found(name, 0 if first is None else first.nbytes)
    for index, callback in enumerate(trainer.callbacks):
        rule = CALLBACKS if trainer_callbacks.has_state(callback) else CALLBACKS_MADE
        yield rule.found(f"callback.{index}", note=type(callback).__name__)
    for index, logger in enumerate(trainer.loggers):
        rule = LOGS if is_followed(logger) else LOGGERS
        yield rule.found(f"logger.{index}", note=type(logger).__name__)


def fingerprint(trainer: Any) -> object:
    """A value that changes when the census has to be taken again; cheap enough for every step."""
    loaders = [(id(loader), tuple(facts(loader).values())) for loader in trainer_loops.training_loaders(trainer)]
    return loaders, [id(callback) for callback in trainer.callbacks]
