"""Makes the state dicts of models and optimizers of whole tensors, under the names that other tools know.

A snapshot calls a parameter ``<model>.<name>``; where there is one model, its name is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from gemini_ft.errors import StateError, UnsupportedStateError
from gemini_ft.export.assemble import read_whole
from gemini_ft.export.source import Checkpoint
from gemini_ft.state.gradients import is_gradient
from gemini_ft.state.tensors import split_state_name

_OPTIMIZER = re.compile(r"optim\d+\.")


@dataclass(frozen=True)
class OptimizerState:
    """The state of one optimizer.

    Attributes:
        names: its parameters, in its own order, as in the model's state dict.
        sizes: parameters in each group.
        groups: hyperparameters of each group.
        state: name -> key -> tensor or value.
        other: state that belongs to no parameter.
    """

    names: list[str]
    sizes: list[int]
    groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]
    other: dict[Any, Any] = field(default_factory=dict)


class State:
    """Models and optimizers of one checkpoint, whole, on the CPU.

    Args:
        checkpoint: where to read; it is closed then.
        optimizers: whether to read these too.

    Raises:
        StateError: it was made by a gemini-ft that did not keep the names, or holds a pickle that is not trusted.
        CorruptDataError: a checksum does not match.
        UnsupportedStateError: parts of a tensor cannot be put in their places.
    """

    def __init__(self, checkpoint: Checkpoint, optimizers: bool) -> None:
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
        self._extras: dict[str, Any] = on_cpu(checkpoint.extras("tensors")) if optimizers else {}
        self._tensors = read_whole(checkpoint.shards, lambda name: not is_gradient(name) and (optimizers or not _OPTIMIZER.match(name)))
        checkpoint.close()

    def model(self, raw: bool = False) -> dict[str, torch.Tensor]:
        """Name -> tensor; tied tensors under each of their names, buffers that are not persistent left out.

        Args:
            raw: the keys of ``state_dict()`` itself, in which torch.compile leaves its marks.
        """
        return {key if raw else key.replace("_orig_mod.", ""): self._tensors[name] for key, name in self._keys.items()}

    @property
    def tied(self) -> dict[str, str]:
        """Further name -> first name, of parameters and buffers that are one."""
        firsts: dict[str, str] = {}
        return {key: first for key, name in self._keys.items() if (first := firsts.setdefault(name, key)) != key}

    def extra_state(self) -> dict[str, Any]:
        """Extra state of modules, by its key in the model's state dict."""
        return {f"{self._short(name)}._extra_state".lstrip("."): value for name, value in self._extras["modules"].items()}

    def optimizers(self) -> list[OptimizerState]:
        """All optimizers, in their order; not those that another one holds, whose own state dict lacks them as well."""
        given = enumerate(self._extras["optimizers"])
        return [self._optimizer(index, saved) for index, saved in given if "." not in saved["name"]]

    @cached_property
    def _keys(self) -> dict[str, str]:
        """Key in the model's state dict -> name in the snapshot; of tied tensors the first name first."""
        own: dict[str, str] = {}
        further: dict[str, str] = {}
        for model, naming in self._naming.items():
            names = [name for name in self._tensors if name.startswith(f"{model}.") and not _OPTIMIZER.match(name)]
            own |= {self._short(name): name for name in names if name not in naming["absent"]}
            further |= {self._short(f"{model}.{key}"): name for key, name in naming["keys"].items()}
        return own | further

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
        return OptimizerState([names[label] for label in labels], saved["parameters per group"], saved["groups"], filled, saved["other"])

    def _parameter(self, index: int, label: str) -> str:
        """The parameter that a label stands for, as the model's state dict has it; one of no model keeps the label."""
        name = label.removeprefix(f"optim{index}.")
        return self._short(name) if name in self._tensors else label


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
