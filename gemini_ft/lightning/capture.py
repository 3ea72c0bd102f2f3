"""Captures a Trainer's state beside parameters, buffers and optimizer state, between two batches, and puts it back.

Lightning's own checkpoint is the greater part: loops, callbacks, schedulers, precision plugin, datamodule, loaders and
whatever the user's ``on_save_checkpoint`` hooks add. Its tensors of the model are not copied: they are replaced by
their names, because the :class:`~gemini_ft.Checkpointer` has them. The rest is what Lightning does not save: random
states, values logged so far, torchmetrics, and a few of the loops' attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gemini_ft.lightning import trainer_callbacks, trainer_checkpoints, trainer_loops, trainer_metrics
from gemini_ft.state.rng import rng_state, take_rng_state

_LIVE = "gemini.live"  # {_LIVE: name} stands for the model's tensor of that name

Tensors = Mapping[str, torch.Tensor]


def capture(trainer: Any, live: Tensors) -> dict[str, Any]:
    """The extras of a snapshot. They refer to live objects, so encode them at once.

    ``live``: the state dict that the strategy hands out while the checkpoint is made.
    """
    checkpoint = trainer_checkpoints.without_hyper_parameters(trainer, trainer_checkpoints.dump_checkpoint(trainer))
    del checkpoint["optimizer_states"]
    if _is_untouched(checkpoint["state_dict"], live):
        del checkpoint["state_dict"]
    metrics, collections = trainer_metrics.metrics_of(trainer)
    return {
        "checkpoint": _name_live(checkpoint, {id(tensor): name for name, tensor in live.items()}),
        "loops": trainer_loops.loop_extras(trainer),
        "logging": trainer_metrics.logging_state(trainer, {id(metric): name for name, metric in metrics.items()}),
        "metrics": {name: trainer_metrics.metric_state(metric) for name, metric in metrics.items()},
        "trackers": trainer_metrics.tracked(trainer),
        "tickets": trainer_callbacks.tickets(trainer),
        "averaging": trainer_callbacks.averaging_state(trainer),
        "collections": {name: trainer_metrics.metric_groups(collection) for name, collection in collections.items()},
        "rng": rng_state(),
    }


def checkpoint_of(extras: Mapping[str, Any]) -> dict[str, Any]:
    """The part for Lightning to restore from. It still lacks what :func:`complete` adds."""
    checkpoint: dict[str, Any] = extras["checkpoint"]
    return checkpoint


def complete(trainer: Any, checkpoint: dict[str, Any], live: Tensors) -> None:
    """Adds the entries that hooks expect: the model's tensors by reference, and the hyperparameters."""
    resolved = _resolve_live(checkpoint, live)
    checkpoint.clear()
    checkpoint |= {"state_dict": dict(live), "optimizer_states": []} | trainer_checkpoints.hyper_parameters(trainer) | resolved


def file_checkpoint(checkpoint: dict[str, Any], state_dict: Mapping[str, Any], optimizer_states: Sequence[Any]) -> dict[str, Any]:
    """The checkpoint that Lightning would have saved for a Trainer without gemini-ft, but without hyperparameters.

    Args:
        checkpoint: the part of a snapshot's extras, see :func:`checkpoint_of`; it is changed.
        state_dict: of the module, whole.
        optimizer_states: state dict of each optimizer, whole.
    """
    trainer_checkpoints.drop_positions(checkpoint)
    trainer_checkpoints.as_if_saved_by_callback(checkpoint)
    resolved: dict[str, Any] = _resolve_live(checkpoint, state_dict)
    return {"state_dict": dict(state_dict), "optimizer_states": list(optimizer_states)} | resolved


def restore(trainer: Any, package: str, extras: Mapping[str, Any], new_rank: int | None) -> None:
    """Puts back the state that Lightning does not restore; the Trainer is about to fetch the same batch as then.

    It has to be this late, because everything on the way there draws random numbers, resets metrics, or counts.

    ``new_rank``: of this rank, where there is no state of its own number.
    """
    trainer_metrics.track(trainer, extras["trackers"])
    metrics, collections = trainer_metrics.metrics_of(trainer)
    for name, state in extras["metrics"].items():
        if name in metrics:
            trainer_metrics.set_metric_state(metrics[name], state)
    for name, state in extras["collections"].items():
        if name in collections:
            trainer_metrics.set_metric_groups(collections[name], state)
    trainer_callbacks.set_tickets(trainer, extras.get("tickets", {}))
    trainer_loops.set_loops(trainer, extras["checkpoint"]["loops"]["fit_loop"])
    trainer_loops.set_loop_extras(trainer, extras["loops"])
    trainer_callbacks.set_averaging(trainer, package, extras["averaging"])
    trainer_metrics.set_logging_state(trainer, package, extras["logging"], metrics)
    take_rng_state(extras["rng"], new_rank)


def _is_untouched(state_dict: Mapping[str, Any], live: Tensors) -> bool:
    """Whether no hook has put anything else in the place of the model's state."""
    return state_dict.keys() == live.keys() and all(state_dict[name] is tensor for name, tensor in live.items())


def _name_live(item: Any, names: Mapping[int, str]) -> Any:
    """``item`` with the model's tensors replaced by their names. Hooks pass them on: averaging callbacks store the
    average as ``state_dict`` and the model itself under another key."""
    if isinstance(item, torch.Tensor):
        return {_LIVE: names[id(item)]} if id(item) in names else item
    if type(item) is list:
        return [_name_live(part, names) for part in item]
    if isinstance(item, dict) and type(item).__module__ in ("builtins", "collections"):
        return {key: _name_live(part, names) for key, part in item.items()}
    return item


def _resolve_live(item: Any, live: Tensors) -> Any:
    if type(item) is dict:
        return live[item[_LIVE]] if item.keys() == {_LIVE} else {key: _resolve_live(part, live) for key, part in item.items()}
    return [_resolve_live(part, live) for part in item] if type(item) is list else item
