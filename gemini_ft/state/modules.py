"""The live training state as named tensors and extras, and back.

Capture, per step:

    found = survey(models, optimizers)             named tensors, see `gemini_ft.state.survey`
    extras = collect_extras(found)

    extras    everything else: hyperparameters of the parameter groups, optimizer state that is no tensor (Python numbers, the lists of
              LBFGS), attributes of optimizers, modules' extra state. It refers to live objects, so encode it at once. Every rank keeps
              its own.

Sources are described (`gemini_ft.state.tensors.describe`) and laid out again only when the fingerprint changes.

Restore, all on the existing objects:

    sources = destinations(models, optimizers, stored_specs(rank, layouts), rank, world_size, replicated=replicated)
    for read in plan_reads([s.spec for s in sources], rank, layouts):
        copy_into(tensor[read.name], read.start, read.stop, bytes_of(read))
    apply_extras(models, optimizers, extras)

`destinations` gives every optimizer exactly the state tensors of the snapshot: missing ones are allocated
with the stored dtype, shape and strides on the parameter's device (or on the CPU, where they were; `room_for`), surplus ones
dropped. Nothing is ever cast, no gradient is touched and no collective is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gemini_ft.core.census import Fate, Finding, declare
from gemini_ft.core.layout import TensorSpec
from gemini_ft.errors import LayoutMismatchError, UnsupportedStateError
from gemini_ft.state.attributes import ATTRIBUTES, NOT_SEEN, OF_PROCESS, AttributeReturn, AttributeWalk, is_linked
from gemini_ft.state.survey import Models, Survey, survey, usual_strides
from gemini_ft.state.tensors import (
    HOST,
    Live,
    Role,
    Source,
    captured,
    describe,
    every_optimizer,
    local,
    overlaps,
    own_attributes,
    placement_words,
    split_state_name,
    unwrap_model,
)

Extras = dict[str, Any]
_TENSORS = declare("parameters, buffers, state of optimizers", Fate.CAPTURED, "each tensor once, under its name")
declare("hyperparameters of parameter groups, extra state of modules", Fate.CAPTURED, "with the small state of each rank")
_HELD = declare("optimizers that another optimizer holds (SAM, Lookahead)", Fate.CAPTURED, "like those that are given to the Checkpointer")
_STATIC_KEYS = ("params", "param_names")  # of a parameter group: they are in the tensors' names already


def room_for(spec: TensorSpec, param: torch.Tensor, current: object, used: set[int], strides: Sequence[int] | None = None) -> torch.Tensor:
    """A state tensor as in the snapshot: ``current`` if it is just like that, else a new one."""
    whole = spec.logical.removesuffix(HOST).strip()
    if whole and not (isinstance(param, DTensor) and placement_words(spec.name, param) == whole):
        raise LayoutMismatchError(
            f"{spec.name} was {whole} in the snapshot; its parameter is now placed otherwise, and resharding is not supported"
        )
    part = local(param)
    device = torch.device("cpu") if spec.logical.endswith(HOST) else part.device
    steps = tuple(strides) if strides is not None else usual_strides(spec.shape, part)
    if isinstance(current, torch.Tensor) and id(current) not in used and _fits(current, spec, whole, device, steps):
        used.add(id(current))
        return current
    fresh = torch.empty_strided(spec.shape, steps, dtype=getattr(torch, spec.dtype), device=device)
    if isinstance(param, DTensor) and whole:
        return DTensor.from_local(fresh, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride())
    return fresh


def _fits(current: torch.Tensor, spec: TensorSpec, whole: str, device: torch.device, strides: tuple[int, ...]) -> bool:
    words = placement_words(spec.name, current) if isinstance(current, DTensor) else ""
    part = local(current)
    facts = (words, str(part.dtype).removeprefix("torch."), tuple(part.shape), part.device)
    return facts == (whole, spec.dtype, spec.shape, device) and (part.stride() == strides or part.numel() < 2) and not overlaps(part)


def collect_extras(found: Survey, ignored: Callable[[str], bool] = lambda _: False) -> Extras:
    """The part of the state that is no tensor; holds live objects, so encode it before training goes on.

    ``found``: the survey just made. ``ignored``: whether the user sees to what has this name.

    Raises UnsupportedStateError: something cannot be captured exactly; named.
    """
    walk = _walk(found, ignored)
    saved = []
    for (name, optimizer), others, order, facts in zip(found.optimizers.items(), found.others, found.order, found.identities, strict=True):
        attributes = own_attributes(optimizer)
        entry = _optimizer_extras(optimizer, others) | facts | {"name": name, "parameters": order}
        saved.append(entry | {"attributes": walk.attributes(attributes, name) if attributes else {}})
    for label, state in found.uncaptured:
        for key, value in state.items():
            if not captured(key, value):
                taken = walk.take(value, f"{label}[{key!r}]")
                where = saved[_index(label)]["linked" if is_linked(taken) else "state"]
                where.setdefault(label, {})[key] = taken if is_linked(taken) else value
    for item in found.repeated:
        label, key = split_state_name(item.name)
        saved[_index(label)]["shared"].setdefault(label, {})[key] = item.same_as
    return {
        "optimizers": saved,
        "modules": {name: module.get_extra_state() for name, module in found.with_extra_state.items()},
        "strides": found.odd_strides,
        "naming": found.naming,
    }


def _walk(found: Survey, ignored: Callable[[str], bool] = lambda _: False) -> AttributeWalk:
    """The walk for attributes of optimizers, which may refer to parameters, to state, to each other and to modules."""
    owned: list[Any] = [*found.optimizers.values(), *found.models.values()]
    for optimizer in found.optimizers.values():
        owned += [optimizer.param_groups, optimizer.state, optimizer.defaults, *optimizer.param_groups]
        owned += [group["params"] for group in optimizer.param_groups]
    if any(map(own_attributes, found.optimizers.values())):
        owned += [module for model in found.models.values() for module in model.modules()]
    return AttributeWalk(found.tensors, map(id, owned), ignored)


def destinations(
    models: Models,  # name -> module
    optimizers: Sequence[Any],  # torch optimizers, wrapped by Lightning or Fabric or not
    stored: Iterable[TensorSpec],  # this rank's tensors in the snapshot (`gemini_ft.core.layout.stored_specs`)
    rank: int,
    world_size: int,
    *,
    replicated: bool,  # whether plain (not DTensor) parameters are the same on all ranks, as under DDP
    strides: Mapping[str, Sequence[int]] | None = None,
) -> list[Source]:
    """Live tensors to fill, after giving the optimizers the state tensors that the snapshot has.

    Between this and `apply_extras` the optimizers are not usable.

    Args:
        strides: name -> strides of state that is laid out otherwise than its parameter (the extras' ``strides``).

    Raises LayoutMismatchError: state was sharded otherwise than its parameter is now.
    """
    wanted: dict[str, dict[str, TensorSpec]] = {}
    for spec in stored:
        label, key = split_state_name(spec.name)
        wanted.setdefault(label, {})[key] = spec
    found = survey(models, optimizers)
    used = {id(item.tensor) for item in found.live if item.role is not Role.STATE}
    with torch.no_grad():
        for label, optimizer, param in found.with_state:
            old = optimizer.state.pop(param, {})
            specs = wanted.get(label, {}).items()
            if new := {key: room_for(spec, param, old.get(key), used, (strides or {}).get(spec.name)) for key, spec in specs}:
                optimizer.state[param] = new
    return describe(survey(models, optimizers).live, rank, world_size, replicated)


def apply_extras(models: Models, optimizers: Sequence[Any], extras: Extras) -> None:
    """Puts back the result of `collect_extras`, after the tensors.

    Tensor hyperparameters (a learning rate on the device) are written in place, as graphs may hold them.

    Raises LayoutMismatchError: other optimizers, parameter groups or modules than those of the snapshot.
    """
    found, saved = survey(models, optimizers), extras["optimizers"]
    modules, named = found.with_extra_state, found.optimizers
    _same("number of optimizers", len(named), len(saved))
    _same("optimizers", list(named), [entry["name"] for entry in saved])
    _same("modules with extra state", sorted(modules), sorted(extras["modules"]))
    for index, (optimizer, facts) in enumerate(zip(named.values(), found.identities, strict=True)):
        for what, now in facts.items():
            _same(f"optim{index}: {what}", now, saved[index][what])
        _apply_groups(optimizer, saved[index]["groups"])
        _replace_other(optimizer, saved[index]["other"])
    tensors = {item.name: item.tensor for item in found.live}
    back = AttributeReturn(tensors)
    for entry, optimizer in zip(saved, named.values(), strict=True):
        for name in own_attributes(optimizer).keys() - entry["attributes"].keys():
            delattr(optimizer, name)
        back.attributes(optimizer, entry["attributes"], entry["name"])
    for label, optimizer, param in found.with_state:
        entry = saved[_index(label)]
        shared, linked = entry["shared"].get(label, {}), entry["linked"].get(label, {})
        values = entry["state"].get(label, {}) | {key: tensors[name] for key, name in shared.items()}
        values |= {key: back.give(None, taken, f"{label}[{key!r}]") for key, taken in linked.items()}
        if values:
            optimizer.state.setdefault(param, {}).update(values)
    for name, module in modules.items():
        module.set_extra_state(extras["modules"][name])


def _index(label: str) -> int:
    """Number of the optimizer that a label belongs to."""
    return int(label.removeprefix("optim").partition(".")[0])


def _optimizer_extras(optimizer: Optimizer, others: Sequence[Any]) -> Extras:
    return {
        "groups": [{key: value for key, value in group.items() if key not in _STATIC_KEYS} for group in optimizer.param_groups],
        "other": {key: optimizer.state[key] for key in others},
        "state": {},
        "linked": {},
        "shared": {},
    }


def _apply_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key, value in values.items():
            current = group.get(key)
            if (
                isinstance(current, torch.Tensor)
                and isinstance(value, torch.Tensor)
                and (current.shape, current.dtype) == (value.shape, value.dtype)
            ):
                with torch.no_grad():
                    current.copy_(value)
            else:
                group[key] = value


def _replace_other(optimizer: Optimizer, other: Mapping[Any, Any]) -> None:
    """Replaces the state that belongs to no parameter."""
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for key in [key for key in optimizer.state if id(key) not in params]:
        del optimizer.state[key]
    optimizer.state.update(other)


def _same(what: str, now: object, then: object) -> None:
    if now != then:
        raise LayoutMismatchError(
            f"{what}: {now!r} now and {then!r} in the snapshot; resume with the script that made it, "
            "or start afresh with another run_id or resume='never'"
        )


def findings(found: Survey) -> Iterator[Finding]:
    """Models and optimizers in the census."""
    for name, model in found.models.items():
        own = [item for item in found.live if item.role is not Role.STATE and item.name.startswith(f"{name}.")]
        yield _TENSORS.found(name, _nbytes(own), f"{len(own)} tensors of {type(unwrap_model(model)).__qualname__}")
    for index, (name, optimizer) in enumerate(found.optimizers.items()):
        own = [item for item in found.live if item.role is Role.STATE and item.same_as is None and item.name.startswith(f"optim{index}.")]
        rule = _TENSORS if "." not in name else _HELD
        yield rule.found(name, _nbytes(own), f"{len(own)} tensors of {type(optimizer).__qualname__}")
        walk = _walk(found)
        for attribute, value in own_attributes(optimizer).items():
            where = f"{name}.{attribute}"
            try:
                kept = walk.take(value, where)[0] == "kept"
            except UnsupportedStateError as error:
                yield NOT_SEEN.found(where, note=str(error))
            else:
                yield (OF_PROCESS if kept else ATTRIBUTES).found(where, note=type(value).__qualname__)


def structure(optimizers: Sequence[Any]) -> object:
    """The structure of the optimizers: which there are, their groups, and the kinds of their attributes."""
    found = every_optimizer(optimizers)
    groups = tuple((name, id(optimizer), tuple(map(id, optimizer.param_groups))) for name, optimizer in found.items())
    return groups, tuple((name, type(value)) for optimizer in found.values() for name, value in own_attributes(optimizer).items())


def _nbytes(live: Iterable[Live]) -> int:
    return sum(local(item.tensor).nbytes for item in live)
