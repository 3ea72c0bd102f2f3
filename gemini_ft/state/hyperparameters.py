"""Hyperparameters as the script gives them, so that a resume can tell which of them the script has changed.

A snapshot holds what training has made of a rate, not what the script asked for. The two are kept apart: every snapshot also says
what the script had given when it began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

Given = dict[str, Any]  # label, as a message shows it -> number, text, or a list of these

_ABSENT = "nothing"
_COUNTS = frozenset({"last_epoch", "last_batch_iteration", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"})


def of_groups(label: str, groups: Iterable[Mapping[str, Any]]) -> Given:
    """The plain values of an optimizer's parameter groups; one entry for values that all groups share.

    Args:
        label: the optimizer, as a message shows it.
        groups: its ``param_groups``.
    """
    groups = list(groups)
    found: Given = {}
    for key in {key: None for group in groups for key in group if key not in ("params", "param_names")}:
        values = [_plain(group.get(key)) for group in groups]
        if None in values or (key == "initial_lr" and values == [_plain(group.get("lr")) for group in groups]):
            continue
        found[f"{key} of {label}"] = values[0] if all(value == values[0] for value in values) else values
    return found


def of_scheduler(label: str, scheduler: Any) -> Given:
    """The plain values of a scheduler's state_dict, counters left out."""
    return of_mapping(label, {key: value for key, value in scheduler.state_dict().items() if key not in _COUNTS})


def of_mapping(label: str, values: Mapping[str, Any]) -> Given:
    """The plain values among ``values``."""
    found = {f"{key} of {label}": _plain(value) for key, value in values.items()}
    return {key: value for key, value in found.items() if value is not None}


def differences(then: Given, now: Given) -> Iterator[str]:
    """Each change as ``name: then -> now``."""
    for name in {**then, **now}:
        before, after = then.get(name, _ABSENT), now.get(name, _ABSENT)
        if before != after:
            yield f"{name}: {before} -> {after}"


def _plain(value: Any) -> Any:
    """``value`` as codecs and messages take it; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return None if None in items or len(items) > 64 else items
    return None
