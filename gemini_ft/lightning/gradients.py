"""Gradient pipelines under Lightning: a synchronizer in the place of DDP's communication hook, and its figures in the logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemini_ft.errors import ConfigError
from gemini_ft.lightning import trainer_loops
from gemini_ft.pipeline.rules import Rules
from gemini_ft.pipeline.synchronizer import GradientSynchronizer
from gemini_ft.state.gradients import GradientState


def synchronizer_of(model: Any, rules: Rules, precision: Any, hook: tuple[Any, Any] | None = None) -> GradientSynchronizer:
    """Makes the synchronizer of a model's gradients. Collective.

    Args:
        model: in DistributedDataParallel.
        precision: Lightning's plugin, which may have a scaler.
        hook: state and communication hook of the user's own, for the parameters that no rule matches.

    Raises ConfigError: the rules do not fit the model; or the hook is none that can be called.
    """
    if hook is not None and not callable(hook[1]):
        raise ConfigError(
            f"ddp_comm_hook={hook[1]} is built into DistributedDataParallel, which has only one hook, the gradient pipeline's; give a "
            "function of torch.distributed.algorithms.ddp_comm_hooks, or a rule with compress: bf16 or fp16"
        )
    return GradientSynchronizer(model, rules, scaler=getattr(precision, "scaler", None), otherwise=hook)


class FiguresLog:
    """Gives the Trainer's loggers the figures of a step, for the steps that ``log_every_n_steps`` selects.

    They do not pass through Lightning's own results, which are part of what is resumed.

    ``gradients``: the source of figures; those of the step as a whole are under "step", with its number.
    """

    def __init__(self, trainer: Any, gradients: GradientState) -> None:
        self._trainer, self._gradients = trainer, gradients
        self._step: float | None = None
        self._logged = -1

    def updated(self) -> None:
        """Logs the figures of a step, if an optimizer has stepped."""
        summary = self._gradients.summary()
        if (step := summary.get("step", {}).get("number")) == self._step:
            return  # it has only accumulated
        self._step = step
        number = trainer_loops.step_to_log(self._trainer)
        if number is None or number == self._logged:
            return  # of several optimizers the first one's
        self._logged = number
        for logger in self._trainer.loggers:
            logger.log_metrics(labelled(summary), number)


def labelled(summary: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The figures as ``gradients/rule_1/bytes_after`` and so on; rules are counted from 1, as in messages."""
    return {f"gradients/{_label(rule)}/{figure}": float(value) for rule, figures in summary.items() for figure, value in figures.items()}


def _label(rule: str) -> str:
    number, colon, _ = rule.partition(":")
    return f"rule_{number}" if colon else rule.replace(" ", "_")
