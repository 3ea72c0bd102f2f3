"""Lightning's own callbacks that a restart concerns: those that no snapshot can resume are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemini_ft.core.fates import CALLBACKS_REFUSED
from gemini_ft.errors import UnsupportedStateError
from gemini_ft.lightning import trainer_callbacks

_REFUSED = {
    "BatchSizeFinder": "trains by itself when the fit starts, and would do so again at each restart",
    "LearningRateFinder": "trains by itself when the fit starts, and would do so again at each restart",
    "SpikeDetection": "does not save its running mean, and Lightning's own load_state_dict of it fails",
}


def refuse_callbacks(callbacks: Sequence[Any]) -> None:
    """Raises UnsupportedStateError for the first callback that cannot be resumed; called before training begins."""
    for callback in callbacks:
        for name in trainer_callbacks.shipped_names(callback) & _REFUSED.keys():
            raise UnsupportedStateError(f"{name} {_REFUSED[name]}; {CALLBACKS_REFUSED.how}")


def save_config_again(callbacks: Sequence[Any]) -> None:
    """Lets LightningCLI's callback write its file once more in a run that goes on: the one that it would spare is this run's own."""
    for callback in callbacks:
        if "SaveConfigCallback" in trainer_callbacks.shipped_names(callback):
            callback.overwrite = True
