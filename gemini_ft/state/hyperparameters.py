"""Hyperparameters as the script gives them, so that a resume can tell which of them the script has changed.

A snapshot holds what training has made of a rate, not what the script asked for. The two are kept apart: every snapshot also says
what the script had given when it began.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

Given = dict[str, Any]  # label, as a message shows it -> number, text, or a list of these

_log = logging.getLogger("gemini_ft")
_ABSENT = "nothing"
_COUNTS = frozenset({"last_epoch", "last_batch_iteration", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"})


class Hyperparameters:
    """The hyperparameters that the script has given, to be compared with those of the snapshot that is resumed.

    ``stateful``: name -> object given to the Checkpointer; of schedulers among them the values are known.
    """

    def __init__(self, stateful: Mapping[str, Any]) -> None:
        self._beside: Given = {}  # those that are no optimizer's
        for name, item in stateful.items():
            if isinstance(item, torch.optim.lr_scheduler.LRScheduler):
                self._beside |= of_scheduler(f"state[{name!r}]", item)
        self.then: Mapping[str, Given] = {}  # those of the snapshot, until they are compared
        self._given: Given = {}  # as the script gave them when the training began
        self._script: Given = {}  # those of which no snapshot holds the value, so that the script's is in force
        self._is_known = False  # they are as a snapshot has them

    def add(self, snapshots: Given, scripts: Given) -> None:
        """Adds some: those that a resume puts back as they were, and those that stay as the script gives them."""
        self._beside |= snapshots
        self._script |= scripts

    def note(self, of_optimizers: Callable[[], Given]) -> None:
        """Records the hyperparameters that the script gives, until the first snapshot is made or resumed."""
        if not self._is_known:
            self._given = of_optimizers() | self._beside

    def saved(self) -> dict[str, Given]:
        """Returns what a snapshot keeps of the hyperparameters; what the script gives later is compared with it."""
        self._is_known = True
        return {"snapshot": self._given, "script": self._script}

    def compare(self, iteration: int) -> str:
        """Returns the warning of what the script has changed; empty: nothing. What the snapshot says goes on being compared, until the
        script gives that again."""
        then, self.then, self._is_known = self.then, {}, True
        if not then:
            return ""
        ours, theirs = list(differences(then["snapshot"], self._given)), list(differences(then["script"], self._script))
        self._given, self._script = then["snapshot"], then["script"]
        if not ours and not theirs:
            return ""
        in_force = [f"the snapshot's stay in force ({'; '.join(ours)})"] if ours else []
        in_force += [f"the script's are in force ({'; '.join(theirs)})"] if theirs else []
        to_go_on = "; to go on with them, set them in the optimizer's param_groups after the resume" if ours else ""
        return (
            f"HYPERPARAMETERS HAVE CHANGED since the training that is resumed at iteration {iteration} began (then -> now): "
            f"{'; '.join(in_force)}. To train anew with those of now, start with GEMINI_RESUME=never or another GEMINI_RUN_ID{to_go_on}"
        )


def warn(texts: Sequence[str]) -> None:
    """Gives the warnings of all ranks (`Hyperparameters.compare`) as one: scripts may give each rank a rate of its own."""
    changed = [rank for rank, text in enumerate(texts) if text]
    if changed:
        first = texts[changed[0]]
        is_everywhere = all(text == first for text in texts)
        _log.warning("%s%s", "" if is_everywhere else f"On {len(changed)} of {len(texts)} ranks, as on rank {changed[0]}: ", first)


def of_groups(label: str, groups: Iterable[Mapping[str, Any]]) -> Given:
    """The plain values of an optimizer's parameter groups; one entry for values that all groups share.

    ``label``: the optimizer, as a message shows it.
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
