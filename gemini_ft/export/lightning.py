"""Writes a Lightning ``.ckpt`` that ``Trainer.fit(ckpt_path=...)`` continues from, without gemini-ft."""

from __future__ import annotations

import logging
import pickle
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from gemini_ft.errors import ConfigError, StorageError
from gemini_ft.export.source import Checkpoint
from gemini_ft.export.state import OptimizerState, on_cpu
from gemini_ft.export.zero import read_states
from gemini_ft.lightning.capture import file_checkpoint

_log = logging.getLogger("gemini_ft")


def write(checkpoint: Checkpoint, folder: Path, name: str) -> None:
    """Writes ``folder/name``.

    Raises:
        ConfigError: the checkpoint is not of a Lightning Trainer.
        StateError: it holds a pickle that is not trusted.
    """
    try:
        saved = on_cpu(checkpoint.extras("extras", "checkpoint"))
    except KeyError:
        raise ConfigError(
            f"format='lightning' needs a stream of a Lightning Trainer (fit-0, ...); {checkpoint.stream!r} of run {checkpoint.run!r} is of "
            "a loop without a Trainer, whose progress Lightning cannot continue. Use --format dcp or safetensors"
        ) from None
    state = read_states(checkpoint, optimizers=True)
    model = state.model(raw=True) | state.extra_state()
    content = file_checkpoint(saved, model, [_state_dict(optimizer) for optimizer in state.optimizers()])
    try:
        torch.save(content, folder / name)
    except RuntimeError as error:  # its writer's error for a full disk
        raise StorageError(f"{folder / name}: torch cannot write it: {str(error).partition(chr(10))[0]}; is there room?") from None
    _warn_if_not_plain(folder / name)


def _state_dict(optimizer: OptimizerState) -> dict[str, Any]:
    """The state of one optimizer, numbered as ``torch.optim.Optimizer.state_dict`` does it."""
    numbers = {name: number for number, name in enumerate(optimizer.names)}
    spans = pairwise(accumulate(optimizer.sizes, initial=0))
    groups = [{**hyper, "params": list(range(*span))} for hyper, span in zip(optimizer.groups, spans, strict=True)]
    return {"state": {numbers[name]: values for name, values in optimizer.state.items()} | optimizer.other, "param_groups": groups}


def _warn_if_not_plain(path: Path) -> None:
    try:
        torch.load(path, weights_only=True, mmap=True, map_location="meta")
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        _log.warning(
            "the checkpoint holds objects that torch.load refuses by default (%s): load it with Trainer.fit(..., weights_only=False), "
            "or keep only plain values in callbacks and on_save_checkpoint",
            reason,
        )
