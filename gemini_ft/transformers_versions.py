"""The differences between the supported versions of transformers, in one place.

5.3 is the first version whose Trainer prepares a training and runs an epoch in methods of their own, which `GeminiCallback` extends. In
older ones, all of 4.x among them, the whole loop is one function, which is given its position in a checkpoint's folder before there is an
engine, and its running loss is a local variable; docs/versions.md has what it would take to resume those.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers
import transformers.trainer
from packaging.version import Version
from transformers import Trainer

from gemini_ft.errors import ConfigError

SUPPORTED = "transformers>=5.3,<5.25"
# Methods of the Trainer that are extended, and the arguments they are known by.
SEAMS = {
    "set_initial_training_values": ["args", "dataloader"],
    "_prepare_for_training": ["max_steps", "train_dataloader", "resume_from_checkpoint"],
    "_run_epoch": [
        "model",
        "epoch",
        "train_dataloader",
        "steps_in_epoch",
        "num_update_steps_per_epoch",
        "trial",
        "ignore_keys_for_eval",
        "start_time",
        "resume_from_checkpoint",
        "epochs_trained",
        "steps_trained_in_current_epoch",
    ],
}
# The Trainer's counters between two logs. `_initial_global_step` came with 5.19. `_tr_loss`, which is a tensor, is not among them.
_COUNTS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen", "current_flos")


def check_trainer() -> None:
    """Refuses a transformers whose Trainer cannot be resumed in the middle of an epoch.

    Raises ConfigError: the Trainer of this version has other methods.
    """
    for name, arguments in SEAMS.items():
        method = getattr(Trainer, name, None)
        if method is None or list(inspect.signature(method).parameters)[1:] != arguments:
            raise ConfigError(
                f"transformers {transformers.__version__} is not supported: Trainer.{name} is missing or takes other arguments; "
                f"install {SUPPORTED}"
            )
    if not hasattr(transformers.trainer, "skip_first_batches"):
        raise ConfigError(f"transformers {transformers.__version__} is not supported: its Trainer skips batches in another way")


def counts(trainer: Any) -> dict[str, Any]:
    """The Trainer's counters between two logs."""
    return {name: getattr(trainer, name) for name in _COUNTS if hasattr(trainer, name)}


def told_of_epochs(loader: Any) -> list[Any]:
    """The parts of a whole loader whose ``set_epoch`` this Trainer calls when an epoch begins.

    From 5.17 on it reaches the sampler in accelerate's BatchSamplerShard, which the loader itself does not tell.
    """
    found = [loader]
    if Version(transformers.__version__) >= Version("5.17"):
        found.append(getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None))
    return [part for part in found if hasattr(part, "set_epoch")]
