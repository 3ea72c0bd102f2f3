"""Rebuilds a layout that has changed while training: state that has come, gone or grown since the script built it.

The state is described when the script has made it (`describe`), and compared with that when it is another (`difference`). Each snapshot
says what had changed by then, so that a fresh process, in which everything is as the script makes it, can follow (`build`): buffers are
registered, resized or removed, lazy parameters made, pruned ones split, parameters resized, names tied, groups added to optimizers. What
only the script can build (new layers, other optimizers) is refused at the moment when it is found, unless it has given a way to do so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, product
from operator import methodcaller
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import prune
from torch.optim import Optimizer

from gemini_ft.core.census import Fate, declare
from gemini_ft.errors import LayoutMismatchError, UnsupportedStateError
from gemini_ft.state.tensors import Role, clean, every_optimizer, local, unwrap_model

_UNINITIALIZED = (UninitializedParameter, UninitializedBuffer)
Entry = list[Any]  # kind, local shape (None: not known yet), dtype, whether it is persistent
Modules = Mapping[str, nn.Module]
Parts = list[tuple[str, nn.Module]]  # with the names as in snapshots
_WAY_OUT = (
    "a fresh process cannot build it from a snapshot; build it before training, or give Checkpointer(rebuild=...) a function that does so, "
    "from the description that it is called with"
)

declare(
    "changes of the layout while training: buffers that come, grow or go; parameters that are pruned (torch.nn.utils.prune), resized or "
    "lazy; names that are tied to another tensor or module; groups added to optimizers",
    Fate.CAPTURED,
    "a new layout, committed like any other; a fresh process builds what is missing from the snapshot's description",
)
declare(
    "layers that are added, removed or replaced while training, optimizers that are replaced",
    Fate.REFUSED,
    "when it happens, unless `rebuild=` is given",
)


@dataclass(frozen=True, kw_only=True)
class Structure:
    """The structure of modules and optimizers.

    Attributes:
        tensors: first name of each parameter and buffer -> its kind, shape, dtype, and whether it is persistent.
        groups: name of each optimizer -> for each of its groups the names of its parameters.
        order: name of each module -> its parameters, buffers and modules, one after the other.
    """

    tensors: dict[str, Entry] = field(default_factory=dict)
    groups: dict[str, list[list[str]]] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)  # name of each optimizer -> its class
    order: dict[str, list[str]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)  # name of each module -> its class
    ties: dict[str, str] = field(default_factory=dict)  # further name of a parameter, buffer or module -> its first name

    def with_newcomers(self, now: Structure) -> Structure:
        """The description with modules that a first iteration has made, and ties of theirs: a fresh process makes them again."""
        ties = {name: first for name, first in now.ties.items() if not {_parent(name), _parent(first)} <= self.order.keys()}
        return replace(self, modules={**now.modules, **self.modules}, ties={**ties, **self.ties})


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Differences from what the script had built: [then, now] each.

    Attributes:
        tensors: name -> entries of a `Structure`; None where there was, or is, no such tensor.
        classes: name of an optimizer -> its class; None where there was, or is, no such optimizer.
        order: name of a module -> its parameters, buffers and modules; sums over all of a model's depend on their order.
        modules: name of a module -> its class; None where there was, or is, no such module.
        ties: name -> the first name of the same tensor or module; None where it was, or is, the first one itself, or not there.
    """

    tensors: dict[str, list[Entry | None]] = field(default_factory=dict)
    groups: dict[str, list[list[list[str]]]] = field(default_factory=dict)  # name of an optimizer -> its groups
    classes: dict[str, list[str | None]] = field(default_factory=dict)
    order: dict[str, list[list[str] | None]] = field(default_factory=dict)
    modules: dict[str, list[str | None]] = field(default_factory=dict)
    ties: dict[str, list[str | None]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        moved = any(then is not None and now is not None for then, now in self.order.values())
        return bool(self.tensors or self.groups or self.classes or self.modules or self.ties or moved)


def modules_of(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Name as in snapshots -> module, of all modules."""
    return {path: module for name, model in models.items() for path, module in parts_of(name, model)}


def parts_of(name: str, model: nn.Module) -> Parts:
    """The modules of one model, each once."""
    return [(f"{name}.{clean(path)}".rstrip("."), part) for path, part in unwrap_model(model).named_modules()]


def tensors_of(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor, Role, bool]]:
    """Parameters, then buffers, of some modules under each of their names; whether the tensor belongs to state dicts."""
    for role, (path, part) in product((Role.PARAMETER, Role.BUFFER), parts):
        for key, tensor in (part._parameters if role is Role.PARAMETER else part._buffers).items():
            if tensor is not None:
                yield f"{path}.{key}", tensor, role, key not in part._non_persistent_buffers_set


class ModuleTree:
    """The modules of models, walked again only when one has come, gone, or taken the place of another. ``models``: name -> module."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = models
        self._watched: list[nn.Module] = []  # wrappers too
        self._children: object = None  # of these
        self._found: dict[str, nn.Module] = {}
        self.walks = 0  # how often there were other modules than before, or in another order

    def modules(self) -> Modules:
        """The mapping of `modules_of`; the very same object, as long as nothing has changed."""
        if not self.walks or self._look() != self._children:
            self._found = modules_of(self._models)
            self._watched = [module for root in self._models.values() for module in root.modules()]
            self._children = self._look()
            self.walks += 1
        return self._found

    def _look(self) -> object:
        return contents([module._modules for module in self._watched])


def contents(tables: Sequence[Mapping[Any, Any]]) -> tuple[list[Any], ...]:
    """Sizes, keys and identities of what mappings hold: as lists for all of them, since they are compared at every step.

    Identities, as modules may compare equal that are not the same.
    """
    filled = list(filter(None, tables))
    values = chain.from_iterable(map(methodcaller("values"), filled))
    return list(map(len, tables)), list(chain.from_iterable(map(methodcaller("keys"), filled))), list(map(id, values))


def describe(models: Mapping[str, nn.Module], optimizers: Sequence[Any]) -> Structure:
    """Describes how everything is built now."""
    tensors, names, modules, ties = dict[str, Entry](), dict[int, str](), modules_of(models), _module_ties(models)
    for name, tensor, role, is_persistent in tensors_of(modules.items()):
        if (first := names.setdefault(id(tensor), name)) == name:
            tensors[name] = [role.value, local_shape(tensor), _dtype(tensor), is_persistent]
        else:
            ties[name] = first
    found = every_optimizer(optimizers)
    groups = {
        name: [[names.get(id(param), "?") for param in group["params"]] for group in optimizer.param_groups]
        for name, optimizer in found.items()
    }
    classes = {name: type(optimizer).__qualname__ for name, optimizer in found.items()}
    order = {path: [*part._parameters.keys(), *part._buffers.keys(), *part._modules.keys()] for path, part in modules.items()}
    kinds = {path: kind for path, part in modules.items() if (kind := _kind(part))}
    return Structure(tensors=tensors, groups=groups, classes=classes, order=order, modules=kinds, ties=ties)


def _module_ties(models: Mapping[str, nn.Module]) -> dict[str, str]:
    ties: dict[str, str] = {}
    for model, root in models.items():
        parts = parts_of(model, root)
        names = {id(part): name for name, part in parts}
        for parent, part in parts:
            for key, child in part._modules.items():
                name = clean(f"{parent}.{key}")
                if child is not None and _kind(child) and (first := names.get(id(child), name)) != name:
                    ties[name] = first
    return ties


def difference(then: Structure, now: Structure) -> Changes:
    """The changes."""
    return Changes(**{part.name: _changed(getattr(then, part.name), getattr(now, part.name)) for part in fields(Changes)})


def _changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    return {key: [then.get(key), now.get(key)] for key in sorted({*then, *now}) if then.get(key) != now.get(key)}


def refuse(changes: Changes, modules: Modules) -> None:
    """Raises UnsupportedStateError, with all reasons, if `build` could not follow in a fresh process."""
    if reasons := list(_reasons(changes, modules)):
        raise UnsupportedStateError(f"the layout has changed while training: {'; '.join(reasons[:5])}: {_WAY_OUT}")


def build(models: Mapping[str, nn.Module], optimizers: Sequence[Any], changes: Changes) -> None:
    """Builds the changes in a fresh process; parts that are so already are left as they are.

    Raises LayoutMismatchError: it was neither as the script made it then, nor as it is to be.
    """
    ties: dict[str, str | None] = {**describe(models, ()).ties}  # all of them: a buffer that is resized is another tensor
    for name, (first_then, first_now) in changes.ties.items():
        if (first := ties.get(name)) not in (first_then, first_now):
            raise LayoutMismatchError(_mismatch(f"{name}: another name of", first, first_then, first_now))
        ties[name] = first_now
    for name in list(changes.tensors):
        fresh = describe(models, ()).tensors.get(name)
        then, now = changes.tensors[name]
        if not _same(fresh, now) and not (now is None and ties.get(name)):
            if not _same(fresh, then):
                raise LayoutMismatchError(_mismatch(name, fresh, then, now))
            parent, _, key = name.rpartition(".")
            _build_tensor(modules_of(models), parent, key, now, changes)
    have_ties = describe(models, ()).ties
    for name, first in ties.items():
        if have_ties.get(name) != first:
            _tie(modules_of(models), name, first)
    modules = modules_of(models)
    for path, (_, keys) in changes.order.items():
        part = modules.get(path)
        for entries in (part._parameters, part._buffers, part._modules) if part is not None else ():
            for key in keys or ():
                if key in entries:
                    entries[key] = entries.pop(key)  # type: ignore[assignment]
    fresh_groups = describe(models, optimizers).groups
    for name, (groups_then, groups_now) in changes.groups.items():
        if (have := fresh_groups.get(name)) != groups_now:
            if not _can_become(have or [], groups_then or [], groups_now or []):
                raise LayoutMismatchError(_mismatch(f"{name}: groups", have, groups_then, groups_now))
            _build_groups(every_optimizer(optimizers)[name], have or [], groups_now, _parameters(models))
            fresh_groups = describe(models, optimizers).groups


def _reasons(changes: Changes, modules: Modules) -> Iterator[str]:
    for name, classes in changes.classes.items():
        was, is_now = (f"a {kind}" if kind else "not there" for kind in classes)
        yield f"{name} was {was} and is {is_now} now"
    for name, kinds in changes.modules.items():
        was, is_now = (f"a {kind}" if kind else "not there" for kind in kinds)
        yield f"the module {name} was {was} and is {is_now} now"
    for name, (then, now) in changes.tensors.items():
        parent, _, key = name.rpartition(".")
        is_parameter = "parameter" in ((then or now or [""])[0], (now or then or [""])[0])
        if is_parameter and (then is None or now is None) and not _is_pruning(changes, parent, key):
            yield f"the parameter {name} was {'added' if then is None else 'removed'}"
        elif then is not None and now is not None and then[0] != now[0]:
            yield f"{name} was a {then[0]} and is a {now[0]} now"
        elif now is not None and parent not in modules:
            yield f"{name} belongs to a module that is not there"
    for name, (_, groups) in changes.groups.items():
        if name not in changes.classes and any("?" in labels for labels in groups or []):
            yield f"{name} has got a parameter of no model"


def _is_pruning(changes: Changes, parent: str, key: str) -> bool:
    """Whether a parameter has become its ``_orig`` and a mask, or was that before."""
    base = f"{parent}.{key.removesuffix('_orig')}"
    return all(f"{base}{end}" in changes.tensors or f"{base}{end}" in changes.ties for end in ("", "_orig", "_mask"))


def _build_tensor(modules: Modules, parent: str, key: str, now: Entry | None, changes: Changes) -> None:
    module = modules.get(parent)
    if module is None:
        raise LayoutMismatchError(f"{parent}.{key}: there is no module {parent} now; resume with the script that made the snapshot")
    base = key.removesuffix("_orig").removesuffix("_mask")
    if _is_pruning(changes, parent, base):
        if changes.tensors[f"{parent}.{base}_mask"][1] is not None:
            prune.identity(module, base)  # type: ignore[no-untyped-call]
        else:
            prune.remove(module, base)  # type: ignore[no-untyped-call]
        return
    current: Any = module._parameters.get(key)
    if now is None:
        delattr(module, key)
    elif isinstance(current, _UNINITIALIZED):
        current.materialize(now[1], dtype=getattr(torch, now[2]))
    elif current is not None:
        current.data = torch.empty(now[1], dtype=getattr(torch, now[2]), device=current.device)
    else:
        if vars(module).get(key, module) is None:
            delattr(module, key)
        device = next((tensor.device for part in (module, *modules.values()) for tensor in part.parameters()), None)
        old = module._buffers.get(key)
        room = torch.empty(now[1], dtype=getattr(torch, now[2]), device=device if old is None else old.device)
        module.register_buffer(key, room, persistent=now[3])


def _tie(modules: Modules, name: str, first: str | None) -> None:
    """Gives what has the first name this one too, or takes the name away."""
    (parent, _, key), (owner, _, label) = name.rpartition("."), (first or "").rpartition(".")
    for part in (parent, owner):
        if part and part not in modules:
            raise LayoutMismatchError(f"{name}: there is no module {part} now; resume with the script that made the snapshot")
    vars(modules[parent]).pop(key, None)
    for table in ("_parameters", "_buffers", "_modules"):
        entries = getattr(modules[parent], table)
        if first is not None and getattr(modules[owner], table).get(label) is not None:
            entries[key] = getattr(modules[owner], table)[label]
        else:
            entries.pop(key, None)


def _build_groups(optimizer: Optimizer, have: list[list[str]], now: list[list[str]], parameters: Mapping[str, nn.Parameter]) -> None:
    """Adds groups where the first ones are unchanged; else cuts groups anew in place."""
    if absent := [label for labels in now for label in labels if label not in parameters]:
        raise LayoutMismatchError(f"{absent[0]} is in a group of the snapshot's optimizer and not in this model")
    wanted = [[parameters[label] for label in labels] for labels in now]
    if now[: len(have)] == have:
        for params in wanted[len(have) :]:
            optimizer.add_param_group({"params": params})
    else:
        options = [{**optimizer.defaults, **group} for group in optimizer.param_groups]
        optimizer.param_groups[:] = [{**options[min(i, len(options) - 1)], "params": params} for i, params in enumerate(wanted)]


def _parameters(models: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    found: dict[str, nn.Parameter] = {}
    for path, module in modules_of(models).items():
        found |= {f"{path}.{key}": param for key, param in module._parameters.items() if param is not None}
    return found


def _can_become(have: list[list[str]], then: list[list[str]], now: list[list[str]]) -> bool:
    """Whether groups are those that the script made, and beside them some that the snapshot has too, by the script's ``rebuild``.

    Pruning has given parameters other names by now.
    """

    def plain(groups: list[list[str]]) -> list[list[str]]:
        return [[label.removesuffix("_orig") for label in labels] for labels in groups]

    made = len(then)
    return bool(have) and plain(have[:made]) == plain(then) and all(group in plain(now) for group in plain(have[made:]))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _kind(module: nn.Module) -> str:
    """The class, or what a lazy module becomes. Metrics come and go: their trackers build them again."""
    kind = type(module)
    return "" if kind.__module__.startswith("torchmetrics") else (getattr(kind, "cls_to_become", None) or kind).__qualname__


def _same(a: Entry | None, b: Entry | None) -> bool:
    return a == b or (a is not None and b is not None and list(a[:3]) == list(b[:3]))


def local_shape(tensor: torch.Tensor) -> list[int] | None:
    """The shape of the part on this rank; None where a lazy module has yet to make it."""
    return None if isinstance(tensor, _UNINITIALIZED) else list(local(tensor).shape)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _mismatch(name: str, fresh: Any, then: Any, now: Any) -> str:
    return (
        f"{name}: the snapshot has changed it from {then} to {now}, and this script makes it {fresh}; resume with the script that made the "
        "snapshot, or start afresh with another run_id or resume='never'"
    )
