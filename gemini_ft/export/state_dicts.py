"""Models and optimizers of a checkpoint, as state dicts of whole tensors on the CPU, under the names that other tools know.

A snapshot calls a parameter ``<model>.<name>``; where there is one model, its name is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from gemini_ft.errors import CorruptDataError, StateError, StorageError, UnsupportedStateError
from gemini_ft.export.source import Checkpoint
from gemini_ft.export.whole_tensors import WholeTensors
from gemini_ft.state.gradients import is_gradient
from gemini_ft.state.tensors import split_state_name

_OPTIMIZER = re.compile(r"optim\d+\.")
WRITTEN = "state dict"  # in place of the name of a model: a snapshot is what `gemini_ft.dcp.GeminiWriter` was given


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """The state of one optimizer."""

    names: list[str]  # its parameters, in its own order, as in the model's state dict
    sizes: list[int]  # parameters in each group
    groups: list[dict[str, Any]]  # hyperparameters of each group
    state: dict[str, dict[str, Any]]  # name -> key -> tensor or value
    other: dict[Any, Any] = field(default_factory=dict)  # state that belongs to no parameter


class State:
    """Models and optimizers of one checkpoint, whole, on the CPU.

    ``checkpoint``: where to read. ``declared``: leaves the tensors on the device ``meta``, without reading any.

    Raises:
        StateError: it was made by a gemini-ft that did not keep the names, or holds a pickle that is not trusted.
        CorruptDataError: a checksum does not match.
        UnsupportedStateError: parts of a tensor cannot be put in their places.
    """

    def __init__(self, checkpoint: Checkpoint, optimizers: bool, declared: bool = False) -> None:
        try:
            self._naming: dict[str, dict[str, Any]] = checkpoint.extras("tensors", "naming")
        except KeyError:
            raise StateError(
                f"step {checkpoint.step} was written by a gemini-ft that kept no state dict keys; resume the job with this one, and export "
                "what it writes then"
            ) from None
        for model, naming in self._naming.items():
            if strange := naming["out of order"]:
                raise UnsupportedStateError(
                    f"{model}.{strange[0]} ({len(strange)} in all) is sharded over a mesh whose ranks are not in their order, so its parts "
                    "cannot be put together from here; save this model with its own tools"
                )
        self.is_written = WRITTEN in self._naming  # `model` is what a script has saved, whatever that was
        self.values: dict[str, Any] = {}  # what a script has saved beside tensors; of the first rank that had it
        for owner in reversed(range(len(checkpoint.shards))) if self.is_written else ():
            self.values |= on_cpu(checkpoint.extras_of(owner, "tensors", "values"))
        self._extras: dict[str, Any] = on_cpu(checkpoint.extras("tensors")) if optimizers else {}
        # what reads them
        self.tensors = WholeTensors(checkpoint.shards, lambda name: not is_gradient(name) and (optimizers or not _OPTIMIZER.match(name)))
        # name -> tensor on the device ``meta``, the one that the state dicts have; empty where all have been read
        self.declared = self.tensors.declared() if declared else {}
        self._tensors = self.declared or self.tensors.read()

    def model(self, raw: bool = False) -> dict[str, torch.Tensor]:
        """Name -> tensor; tied tensors under each of their names, buffers that are not persistent left out.

        ``raw``: the keys of ``state_dict()`` itself, in which torch.compile leaves its marks.
        """
        return {key if raw else key.replace("_orig_mod.", ""): self._tensors[name] for key, name in self._keys.items()}

    @property
    def tied(self) -> dict[str, str]:
        """Further name -> first name, of parameters and buffers that are one."""
        return tied_keys(self._keys)

    def extra_state(self) -> dict[str, Any]:
        """Extra state of modules, by its key in the model's state dict."""
        return {f"{self._short(name)}._extra_state".lstrip("."): value for name, value in self._extras["modules"].items()}

    def optimizers(self) -> list[OptimizerState]:
        """All optimizers, in their order; not those that another one holds, whose own state dict lacks them as well."""
        given = enumerate(self._extras["optimizers"])
        return [self._optimizer(index, saved) for index, saved in given if "." not in saved["name"]]

    @cached_property
    def _keys(self) -> Mapping[str, str]:
        """Key in the model's state dict -> name in the snapshot; of tied tensors the first name first."""
        own: dict[str, str] = {}
        further: dict[str, str] = {}
        for model, naming in self._naming.items():
            names = [name for name in self._tensors if name.startswith(f"{model}.") and not _OPTIMIZER.match(name)]
            own |= {self._short(name): name for name in names if name not in naming["absent"]}
            further |= {self._short(f"{model}.{key}"): name for key, name in naming["keys"].items()}
        return checked_aliases(own | further)

    def _short(self, name: str) -> str:
        only = next(iter(self._naming)) if len(self._naming) == 1 else None
        return name.removeprefix(f"{only}.") if only is not None else name

    def _optimizer(self, index: int, saved: Mapping[str, Any]) -> OptimizerState:
        labels: list[str] = saved["parameters"].split("\n") if saved["parameters"] else []
        state: dict[str, dict[str, Any]] = {label: {} for label in labels}
        for name, tensor in self._tensors.items():
            label, key = split_state_name(name)
            if label in state:
                state[label][key] = tensor
        for label, values in saved["state"].items():
            state[label] |= values
        for label, shared in saved["shared"].items():
            state[label] |= {key: self._tensors[name] for key, name in shared.items()}
        names = {label: self._parameter(index, label) for label in labels}
        filled = {names[label]: values for label, values in state.items() if values}
        return OptimizerState(
            names=[names[label] for label in labels],
            sizes=saved["parameters per group"],
            groups=saved["groups"],
            state=filled,
            other=saved["other"],
        )

    def _parameter(self, index: int, label: str) -> str:
        """The parameter that a label stands for, as the model's state dict has it; one of no model keeps the label."""
        name = label.removeprefix(f"optim{index}.")
        return self._short(name) if name in self._tensors else label


_MOST_ALIASES = 2**14  # of all tensors; a format may write a tensor under each of them


def checked_aliases(names: Mapping[str, str]) -> Mapping[str, str]:
    """Key -> name of its tensor, as given. Raises CorruptDataError: there are far more keys than tensors."""
    if (more := len(names) - len(set(names.values()))) > _MOST_ALIASES:
        raise CorruptDataError(f"{more:,} further names of tensors, more than the {_MOST_ALIASES:,} of any model; use another checkpoint")
    return names


def tied_keys(names: Mapping[str, str]) -> dict[str, str]:
    """Further key -> first key, of those that have the same name in ``names``."""
    firsts: dict[str, str] = {}
    return {key: first for key, name in names.items() if (first := firsts.setdefault(name, key)) != key}


_MOST_EMPTY = 1000  # groups without a parameter


def numbered_groups(groups: Sequence[Mapping[str, Any]], sizes: Sequence[int], count: int) -> list[dict[str, Any]]:
    """Parameter groups with ``sizes`` parameters each, which are numbered as ``torch.optim.Optimizer.state_dict`` does it.

    Raises CorruptDataError: these are not ``count`` parameters, or there are too many groups for them.
    """
    if not all(type(size) is int and size >= 0 for size in sizes) or sum(sizes) != count or len(sizes) > count + _MOST_EMPTY:
        raise CorruptDataError(f"{len(sizes)} groups of an optimizer do not hold its {count} parameters; use another checkpoint")
    spans = pairwise(accumulate(sizes, initial=0))
    return [{**group, "params": list(range(*span))} for group, span in zip(groups, spans, strict=True)]


def on_cpu(value: Any) -> Any:
    """``value`` with all tensors in dicts, lists and tuples on the CPU; types of containers are kept."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = on_cpu(item)
        return value
    if type(value) in (list, tuple):
        return type(value)(map(on_cpu, value))
    return value


def save_file(path: Path, content: object) -> None:
    """Writes a file of ``torch.save``. Raises StorageError: torch cannot write it."""
    try:
        torch.save(content, path)
    except RuntimeError as error:  # its writer's error for a full disk
        raise StorageError(f"{path}: torch cannot write it: {str(error).partition(chr(10))[0]}; is there room?") from None
