"""Surveys modules and optimizers: every live tensor by its name, where it is now, and what belongs to it.

    look = Surveyor(models, optimizers)
    found = look()          every step: the very same Survey as long as nothing has come, gone, or taken the place of another

Whether something has is seen by looking at every module, parameter, buffer, group and entry of optimizer state, and at the memory of
each tensor. What follows from them alone (names, labels, strides, hashes) is worked out once per Survey; what may change inside of them
(numbers, attributes) is not in it.
"""

from __future__ import annotations

import contextlib
import operator
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gemini_ft.errors import UnsupportedStateError
from gemini_ft.state.rebuilding import Modules, ModuleTree, Parts, contents, parts_of, tensors_of
from gemini_ft.state.tensors import Fingerprint, Live, Role, captured, every_optimizer, local, state_label, state_name, unwrap_model

Models = Mapping[str, nn.Module]
Labelled = tuple[str, Optimizer, torch.Tensor]  # label of its state, optimizer, parameter
_RESERVED = re.compile(r"(optim\d+|group\d+|gradients)$")


@dataclass(frozen=True, eq=False, kw_only=True)
class Survey:
    """Modules and optimizers between two steps."""

    live: list[Live]  # each parameter and buffer under its first name, and state of optimizers under all of its names
    ties: dict[str, str]  # further name of a parameter or buffer -> its first name
    models: Models  # name -> module, as it was given
    modules: Modules  # name as in snapshots -> module, of all modules
    optimizers: dict[str, Optimizer]  # name -> optimizer, also of those that others hold
    walks: int  # how often there have been other modules by now

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> tensor, each under its first name."""
        return {item.name: item.tensor for item in self.live if item.same_as is None}

    @cached_property
    def own(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers by name."""
        return {item.name: item.tensor for item in self.live if item.role is not Role.STATE}

    @cached_property
    def structure(self) -> object:
        """A value that changes with modules, groups, parameters, names of buffers and ties, and not with optimizer state."""
        groups = [[list(map(id, group["params"])) for group in optimizer.param_groups] for optimizer in self.optimizers.values()]
        params = {name: id(tensor) for name, tensor in self.parameters.items()}
        return self.walks, list(map(id, self.optimizers.values())), groups, params, list(self.own), self.ties

    @cached_property
    def parameters(self) -> dict[str, torch.Tensor]:
        """All parameters by name, also those of no optimizer."""
        return {item.name: item.tensor for item in self.live if item.role is Role.PARAMETER}

    @cached_property
    def repeated(self) -> list[Live]:
        """State that has been found under another name before."""
        return [item for item in self.live if item.same_as is not None]

    @cached_property
    def labelled(self) -> list[Labelled]:
        """Everything that is optimized."""
        names = {id(param): name for name, param in self.parameters.items()}
        return [
            (state_label(index, names[id(param)]), optimizer, param)
            for index, optimizer in enumerate(self.optimizers.values())
            for _, param in _params(optimizer)
        ]

    @cached_property
    def with_state(self) -> list[Labelled]:
        """The same, with every dictionary of state once, where optimizers share theirs."""
        firsts: dict[int, Optimizer] = {}
        return [each for each in self.labelled if firsts.setdefault(id(each[1].state), each[1]) is each[1]]

    @cached_property
    def uncaptured(self) -> list[tuple[str, dict[Any, Any]]]:
        """Label and dictionary of optimizer state that is not made of tensors alone which snapshots have by name."""
        entries = [(label, optimizer.state.get(param, {})) for label, optimizer, param in self.with_state]
        return [(label, entry) for label, entry in entries if not all(map(captured, entry.keys(), entry.values()))]

    @cached_property
    def others(self) -> list[list[Any]]:
        """Keys of each optimizer's state that belongs to no parameter.

        Raises UnsupportedStateError: state belongs to a tensor that is not optimized.
        """
        for optimizer in self.optimizers.values():
            ours = {id(param) for _, param in _params(optimizer)}
            if strangers := [key for key in optimizer.state if isinstance(key, torch.Tensor) and id(key) not in ours]:
                raise UnsupportedStateError(
                    f"{type(optimizer).__qualname__} keeps state for a tensor of shape {tuple(strangers[0].shape)} that is in none of its "
                    "parameter groups; remove it from optimizer.state"
                )
        return [[key for key in optimizer.state if not isinstance(key, torch.Tensor)] for optimizer in self.optimizers.values()]

    @cached_property
    def odd_strides(self) -> dict[str, list[int]]:
        """Strides of state that is laid out neither like its parameter nor row by row: products of matrices depend on them, bit for bit."""
        found: dict[str, list[int]] = {}
        for item in self.live:
            if item.param is not None and item.same_as is None:
                part, param = local(item.tensor), local(item.param)
                if not (part.is_contiguous() and param.is_contiguous()) and part.stride() != usual_strides(part.shape, param):
                    found[item.name] = list(part.stride())
        return found

    @cached_property
    def with_extra_state(self) -> dict[str, nn.Module]:
        """The modules that have a state of their own beside tensors."""
        ours = {name: module for name, module in self.modules.items() if type(module).get_extra_state is not nn.Module.get_extra_state}
        return {name if "." in name else f"{name}.": module for name, module in ours.items()}  # the root's has always been called so

    @cached_property
    def order(self) -> list[str]:
        """Labels of each optimizer's parameters in its own order, a line each: one string costs less to encode than many."""
        lines: dict[int, list[str]] = {id(optimizer): [] for optimizer in self.optimizers.values()}
        for label, optimizer, _ in self.labelled:
            lines[id(optimizer)].append(label)
        return ["\n".join(labels) for labels in lines.values()]

    @cached_property
    def identities(self) -> list[dict[str, Any]]:
        """For each optimizer, what must be the same when its state is put back."""
        return [
            {
                "class": type(optimizer).__qualname__,
                "parameters per group": [len(group["params"]) for group in optimizer.param_groups],
                "hash of the parameters' names": xxhash.xxh3_64_hexdigest(order.encode()),
            }
            for optimizer, order in zip(self.optimizers.values(), self.order, strict=True)
        ]

    @cached_property
    def naming(self) -> dict[str, dict[str, Any]]:
        """Name of each model -> the differences between the keys of its state dict and its tensors' names in snapshots; for exports.

        ``keys``: state dict key -> name, for tied tensors' further names and inside compiled modules; ``absent``: names that are no key
        by themselves (buffers that are not persistent, names inside compiled modules). ``out of order``: sharded parameters whose mesh
        does not have the ranks in their order, which the layout does not show.
        """
        names = {id(tensor): name for name, tensor in self.own.items()}
        return {name: _naming(name, unwrap_model(model), names) for name, model in self.models.items()}


class Surveyor:
    """Surveys the same models and optimizers at every step.

    Args:
        models: name -> module; names may not contain dots.
        optimizers: torch optimizers, wrapped by Lightning or Fabric or not; what they hold is found.
    """

    def __init__(self, models: Models, optimizers: Sequence[Any]) -> None:
        self._models, self._optimizers = models, optimizers
        self.tree = ModuleTree(models)
        self._walks = 0  # of the tree, when the parts were listed
        self._parts: list[Parts] = []  # of each model
        self._outline: list[Any] = []  # by which a change is seen
        self._memory: Fingerprint | None = None  # likewise; None: a tensor has none yet
        self._found: Survey | None = None  # keeps alive whatever has its id in the outline

    def __call__(self) -> Survey:
        """Surveys; to be called between steps. Raises UnsupportedStateError: a model's name or an optimizer cannot be used."""
        modules = self.tree.modules()
        if self._walks != self.tree.walks:
            self._parts, self._walks = [_parts(name, model) for name, model in self._models.items()], self.tree.walks
        _reshard([part for parts in self._parts for _, part in parts])
        optimizers = every_optimizer(self._optimizers)
        outline = [self._walks, *_outline_of_parts(self._parts), *_outline_of_optimizers(optimizers)]
        if self._found is None or outline != self._outline or self._memory is None or not self._memory.holds():
            live, ties = _live(self._parts, list(optimizers.values()))
            self._found = Survey(live=live, ties=ties, models=self._models, modules=modules, optimizers=optimizers, walks=self._walks)
            self._outline, self._memory = outline, None
            with contextlib.suppress(UnsupportedStateError, RuntimeError, ValueError):  # it is named where it is to be captured
                self._memory = Fingerprint(live)
        return self._found


def survey(models: Models, optimizers: Sequence[Any]) -> Survey:
    """Surveys once; see `Surveyor`."""
    return Surveyor(models, optimizers)()


def state_dict_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of ``module.state_dict()`` by its keys, tied tensors under each of them."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        persistent = {name: buffer for name, buffer in part._buffers.items() if name not in part._non_persistent_buffers_set}
        for name, tensor in (*part._parameters.items(), *persistent.items()):
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def usual_strides(shape: Sequence[int], param: torch.Tensor) -> tuple[int, ...]:
    """The strides that state of a parameter has where nothing else is known: the parameter's, as optimizers make their state."""
    if tuple(shape) == tuple(param.shape):
        return torch.empty_like(param, device="meta").stride()
    return torch.empty(tuple(shape), device="meta").stride()


def _outline_of_parts(models: Iterable[Parts]) -> Iterator[Any]:
    parts = [part for each in models for _, part in each]
    yield list(map(type, parts))
    yield contents([part._parameters for part in parts])
    yield contents([part._buffers for part in parts])
    yield [(index, {*names}) for index, names in enumerate(map(operator.attrgetter("_non_persistent_buffers_set"), parts)) if names]


def _outline_of_optimizers(optimizers: Mapping[str, Optimizer]) -> Iterator[Any]:
    for name, optimizer in optimizers.items():
        state, groups = optimizer.state, [group["params"] for group in optimizer.param_groups]
        params = list(chain.from_iterable(groups))
        yield name, id(optimizer), id(state), list(map(len, groups)), list(map(id, params)), list(map(id, state))
        is_in_order = len(state) == len(params) and all(map(operator.is_, state, params))  # each hash of a tensor is a call
        yield _outline_of_entries(list(state.values()) if is_in_order else [state.get(param) or {} for param in params])


def _outline_of_entries(entries: list[Mapping[Any, Any]]) -> object:
    """Names and identities of the tensors; of the rest only that there is some, since numbers are other objects at every step."""
    held, kinds = contents(entries), set(map(type, chain.from_iterable(entry.values() for entry in entries)))
    if set(map(type, held[1])) <= {str} and all(issubclass(kind, torch.Tensor) for kind in kinds):
        return held
    return list(map(_outline_of_entry, entries))


def _outline_of_entry(entry: Mapping[Any, Any]) -> list[Any]:
    tensors = [part for key, value in entry.items() if captured(key, value) for part in (key, id(value))]
    return tensors if 2 * len(entry) == len(tensors) else [*tensors, id(entry)]


def _live(models: Iterable[Parts], optimizers: Sequence[Optimizer]) -> tuple[list[Live], dict[str, str]]:
    found: list[Live] = []
    names: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, tensor, role, _ in chain.from_iterable(map(tensors_of, models)):
        if (first := names.setdefault(id(tensor), name)) == name:
            found.append(Live(name, tensor, role))
        else:
            ties[name] = first
    for index, optimizer in enumerate(optimizers):  # all parameters before any state, which may refer to one
        for place, param in _params(optimizer):
            if id(param) not in names:
                names[id(param)] = f"optim{index}.{place}"
                found.append(Live(names[id(param)], param, Role.PARAMETER))
    states: set[int] = set()
    for index, optimizer in enumerate(optimizers):
        if id(optimizer.state) in states:
            continue  # one that another holds, and that shares its state with it
        states.add(id(optimizer.state))
        for _, param in _params(optimizer):
            label = state_label(index, names[id(param)])
            for key, value in optimizer.state.get(param, {}).items():
                if captured(key, value):
                    name = state_name(label, key)
                    first = names.setdefault(id(value), name)
                    found.append(Live(name, value, Role.STATE, param, None if first == name else first))
    return found, ties


def _params(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for g, group in enumerate(optimizer.param_groups):
        for j, param in enumerate(group["params"]):
            yield f"group{g}.param{j}", param


def _parts(name: str, model: nn.Module) -> Parts:
    if "." in name or _RESERVED.match(name):
        raise UnsupportedStateError(f"a model cannot be named {name!r}: dots, optim<n>, group<n> and gradients are taken; use another key")
    return parts_of(name, model)


def _reshard(modules: Sequence[Any]) -> None:
    """Lets FSDP2 put its sharded parameters in place: after a forward without backward the root still shows whole ones."""
    if fsdp := sys.modules.get("torch.distributed.fsdp"):
        kinds = {kind for kind in set(map(type, modules)) if issubclass(kind, fsdp.FSDPModule)}
        for part in modules if kinds else ():
            if type(part) in kinds:
                part.reshard()


def _naming(name: str, model: nn.Module, names: Mapping[int, str]) -> dict[str, Any]:
    keys = {key: names[id(tensor)] for key, tensor in state_dict_tensors(model)}
    own = {other for other in names.values() if other.startswith(f"{name}.")}
    differing = {key: value for key, value in keys.items() if value != f"{name}.{key}"}
    absent = sorted(own - {f"{name}.{key}" for key in keys.keys() - differing.keys()})
    strange = sorted(name for name, param in model.named_parameters() if is_out_of_order(param))
    return {"keys": differing, "absent": absent, "out of order": strange}


def is_out_of_order(tensor: torch.Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return False
    ranks = tensor.device_mesh.mesh.flatten().tolist()
    return bool(ranks != sorted(ranks))
