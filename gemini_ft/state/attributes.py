"""State in plain Python attributes (of optimizers, of communication hooks): taken apart by name, and put back in place.

    walk = Walk({name: tensor, ...})                  the tensors that snapshots have already
    saved = walk.take(vars(thing), "optim0")          plain data for `gemini_ft.state.codec`; encode it at once
    Return({name: tensor, ...}).give(current, saved, "optim0")

A reference to a tensor that is captured elsewhere stays a reference. Containers are rebuilt; objects, generators and tensors that exist are
filled where they are, so that all other references to them see the change. Code, process groups, locks and the like belong to the process.
A value that cannot be taken apart is refused by name.
"""

from __future__ import annotations

import functools
import logging
import random
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gemini_ft.core.census import Fate, declare
from gemini_ft.errors import LayoutMismatchError, UnsupportedStateError
from gemini_ft.state import codec
from gemini_ft.state.fields import NO_FIELDS, fields_of

Saved = list[Any]  # [kind, parts]

_ATOMS = (type(None), bool, float, str, bytes, complex, torch.dtype, torch.device, torch.Size, range, slice)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, torch.jit.ScriptFunction, weakref.ref, logging.Logger)
_PROCESS = ("torch._C", "torch.distributed", "torch.cuda", "_thread", "threading", "concurrent", "asyncio")  # where such types are
_PROCESS_TYPES: tuple[type, ...] = (DeviceMesh, dist.ProcessGroup) if dist.is_available() else ()
_LISTS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", defaultdict: "defaultdict"}
_MAKERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_WAY_OUT = (
    "keep numbers, tensors and plain containers there, give it a state_dict() and a load_state_dict(), or name it in the option `ignore`"
)

ATTRIBUTES = declare(
    "attributes of optimizers and of communication hooks",
    Fate.CAPTURED,
    "numbers, tensors, generators, containers and objects made of these",
)
OF_PROCESS = declare("code, process groups, streams, locks, loggers in such attributes", Fate.DERIVED, "made by the script when it starts")
NOT_SEEN = declare("such attributes of other types", Fate.REFUSED, _WAY_OUT)


class AttributeWalk:
    """Takes attributes apart, once for one snapshot.

    Args:
        known: name -> each tensor that the snapshot has by itself.
        owned: ids of objects that are captured by themselves (optimizers, their groups and states).
        ignored: whether the user sees to what has this name.
    """

    def __init__(
        self, known: Mapping[str, torch.Tensor], owned: Iterable[int] = (), ignored: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._ignored = ignored
        self._tensors, self._owned = known, frozenset(owned)
        self._paths: dict[int, tuple[str, Any]] = {}  # id of each value taken -> its place; and the value, so that no other gets the id

    @functools.cached_property
    def _known(self) -> dict[int, str]:
        return {id(tensor): name for name, tensor in self._tensors.items()}

    @functools.cached_property
    def _storages(self) -> set[int]:
        """The versions of all tensors so far; most snapshots need none of them."""
        return {_storage(tensor) for tensor in self._tensors.values()}

    def take(self, value: Any, where: str) -> Saved:
        """The value as plain data.

        ``where``: its name, for errors and for references from elsewhere.

        Raises UnsupportedStateError: something in it cannot be captured; named.
        """
        kind = type(value)
        if kind is int:
            return ["id", self._known[value]] if value in self._known else ["value", value]
        if kind in _ATOMS:
            return ["value", value]
        if id(value) in self._known:
            return ["tensor of", self._known[id(value)]]
        if id(value) in self._owned or self._is_of_process(value) or self._ignored(where):
            return ["kept", None]
        if id(value) in self._paths:
            return ["again", self._paths[id(value)][0]]
        self._paths[id(value)] = where, value
        if isinstance(value, types.MethodType):
            return ["method", self.take(value.__self__, f"{where}.__self__")]
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if kind in _LISTS:
            return [_LISTS[kind], [getattr(value, "maxlen", None), [self.take(item, f"{where}[{i}]") for i, item in enumerate(value)]]]
        if kind in _MAPPINGS:
            items = [[self._key(key, where), self.take(item, f"{where}[{_short(key)}]")] for key, item in value.items()]
            return [_MAPPINGS[kind], items]
        return self._object(value, where)

    def attributes(self, attributes: Mapping[str, Any], where: str) -> dict[str, Saved]:
        """Name -> value as plain data, of attributes of one object."""
        return {name: self.take(value, f"{where}.{name}") for name, value in attributes.items()}

    def _is_of_process(self, value: Any) -> bool:
        if isinstance(value, _CODE):
            return True
        if isinstance(value, types.MethodType):
            return id(value.__self__) in self._owned or isinstance(value.__self__, type | nn.Module | Optimizer)
        if isinstance(value, functools.partial):
            return not value.keywords and all(self._is_of_process(part) for part in (value.func, *value.args))
        if isinstance(value, _PROCESS_TYPES):
            return True
        hidden = type(value).__module__.startswith(_PROCESS) and not isinstance(value, torch.Tensor | torch.Generator)
        return hidden and not _is_stateful(value) and not fields_of(value)

    def _key(self, key: Any, where: str) -> Saved:
        if isinstance(key, torch.Tensor) and id(key) not in self._known:
            raise UnsupportedStateError(f"{where} has a tensor of shape {tuple(key.shape)} as a key that is no parameter; {_WAY_OUT}")
        return self.take(key, f"{where}.keys[{_short(key)}]")

    def _tensor(self, tensor: torch.Tensor, where: str) -> Saved:
        if tensor.grad_fn is not None:
            return ["kept", None]  # of a graph: the next forward makes it anew
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise UnsupportedStateError(
                f"{where} is a {type(tensor).__qualname__} ({tensor.layout}); only plain dense tensors can go there, such as its to_local()"
            )
        storage = tensor.untyped_storage().data_ptr()
        is_first = storage not in self._storages or not storage
        self._storages.add(storage)
        return ["tensor" if is_first else "view", tensor.detach()]

    def _object(self, value: Any, where: str) -> Saved:
        if isinstance(value, torch.Generator):
            return ["generator", value.get_state()]
        if isinstance(value, random.Random):
            return ["random", value.getstate()]
        if isinstance(value, np.random.RandomState):
            return ["numpy state", value.get_state()]
        if isinstance(value, np.random.Generator):
            return ["numpy generator", dict(value.bit_generator.state)]
        if isinstance(value, nn.Module | Optimizer):
            raise UnsupportedStateError(
                f"{where} is a {type(value).__qualname__} of its own; give it to the Checkpointer as well, {_WAY_OUT}"
            )
        if _is_stateful(value):
            return ["state dict", self.take(value.state_dict(), f"{where}.state_dict()")]
        if codec.is_exact(value):
            return ["value", value]
        fields, kind = fields_of(value), type(value)
        if fields is NO_FIELDS:
            raise UnsupportedStateError(f"{where} is a {kind.__module__}.{kind.__qualname__}, whose state cannot be seen; {_WAY_OUT}")
        known = None if "<locals>" in kind.__qualname__ or kind.__module__ == "__main__" else kind  # pickled by its name, and signed
        return ["object", [_name_of(kind), known, self.attributes(fields, where)]]


class AttributeReturn:
    """Puts back what a `AttributeWalk` has taken. ``tensors``: name -> tensor, of what the snapshot has elsewhere."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[str, Any] = {}

    def give(self, current: Any, saved: Saved, where: str) -> Any:
        """The value to put in the place of ``current``: itself where it could be filled.

        Raises LayoutMismatchError: what was there in the snapshot cannot be made, and there is nothing to fill.
        """
        kind, parts = saved
        if kind == "value":
            self._made[where] = parts
            return parts
        if kind == "kept":
            return current
        if kind in ("id", "tensor of"):
            tensor = self._tensors[parts]
            return id(tensor) if kind == "id" else tensor
        if kind == "again":
            return self._made[parts]
        if kind == "method":
            self.give(getattr(current, "__self__", None), parts, f"{where}.__self__")
            return current
        made = self._made[where] = self._make(kind, current, parts, where)
        return made

    def attributes(self, owner: Any, saved: Mapping[str, Saved], where: str) -> None:
        """Puts back attributes of one object; the caller removes those that have been added since."""
        fields = fields_of(owner)
        for name, value in saved.items():
            current = fields.get(name)
            given = self.give(current, value, f"{where}.{name}")
            if value[0] in ("kept", "method") or (given is current and name in fields):
                continue
            if isinstance(owner, nn.Module):
                setattr(owner, name, given)
            else:
                fields[name] = given

    def _make(self, kind: str, current: Any, parts: Any, where: str) -> Any:
        if kind in ("tensor", "view"):
            if kind == "view" and not _fits(current, parts):
                raise LayoutMismatchError(
                    f"{where} shared memory with other state in the snapshot, and is not there now; it cannot be made"
                )
            return _filled(current, parts)
        if kind in _MAKERS:
            return self._list(kind, current, parts, where)
        if kind in _MAPPINGS.values():
            return self._mapping(kind, current, parts, where)
        if kind == "object":
            return self._object(current, parts[0], parts[1], parts[2], where)
        if current is None:
            raise LayoutMismatchError(f"{where} was there in the snapshot and is not now; resume with the script that made it")
        if kind == "generator":
            current.set_state(parts)
        elif kind == "random":
            current.setstate(parts)
        elif kind == "numpy state":
            current.set_state(parts)
        elif kind == "numpy generator":
            current.bit_generator.state = parts
        else:
            current.load_state_dict(self.give(None, parts, f"{where}.state_dict()"))
        return current

    def _object(self, current: Any, name: str, kind: type | None, attributes: Mapping[str, Saved], where: str) -> Any:
        """The object that is there, filled; else a new one, which must consist only of values that were captured."""
        if _name_of(type(current)) != name:
            parts_of_process = [key for key, value in attributes.items() if value[0] == "kept"]
            if kind is None or parts_of_process:
                why = f"it has {parts_of_process[0]}, which snapshots lack" if parts_of_process else "its class has no name to find it by"
                raise LayoutMismatchError(f"{where} was a {name} in the snapshot and is none now, and cannot be made: {why}")
            current = object.__new__(kind)
        self._made[where] = current
        self.attributes(current, attributes, where)
        return current

    def _list(self, kind: str, current: Any, parts: Any, where: str) -> Any:
        limit, items = parts
        before = list(current) if type(current) is _MAKERS[kind] and kind not in ("set", "frozenset") else []
        values = [self.give(before[i] if i < len(before) else None, item, f"{where}[{i}]") for i, item in enumerate(items)]
        if kind == "list" and type(current) is list:
            current[:] = values
            return current
        return deque(values, limit) if kind == "deque" else _MAKERS[kind](values)

    def _mapping(self, kind: str, current: Any, items: Any, where: str) -> Any:
        before = dict(current) if isinstance(current, dict) else {}
        found = {}
        for saved_key, saved in items:
            key = self.give(None, saved_key, f"{where}.keys")
            found[key] = self.give(before.get(key), saved, f"{where}[{_short(key)}]")
        if isinstance(current, dict):
            current.clear()
            current.update(found)
            return current
        if kind == "defaultdict":
            raise LayoutMismatchError(f"{where} is a defaultdict in the snapshot and not here now; resume with the script that made it")
        return OrderedDict(found) if kind == "OrderedDict" else found


def held(value: Any, path: str, depth: int = 4) -> Iterator[tuple[str, Optimizer]]:
    """The optimizers in an attribute of another one, in containers and plain objects too, with the way to each."""
    if isinstance(value, Optimizer):
        yield path, value
    elif depth and type(value) in _MAPPINGS:
        for key, item in value.items():
            yield from held(item, f"{path}[{_short(key)}]", depth - 1)
    elif depth and type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from held(item, f"{path}[{index}]", depth - 1)
    elif depth and _is_plain_object(value):
        for name, item in fields_of(value).items():
            yield from held(item, f"{path}.{name}", depth - 1)


def _is_plain_object(value: Any) -> bool:
    return not isinstance(value, (*_ATOMS, *_CODE, int, torch.Tensor, nn.Module)) and bool(fields_of(value))


def _storage(tensor: torch.Tensor) -> int:
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return 0 if part.is_meta or part.layout != torch.strided else part.untyped_storage().data_ptr()


def is_linked(saved: Saved) -> bool:
    """Whether only a `AttributeReturn` can put the value back: it has references, objects, generators or shared memory."""
    kind, parts = saved
    if kind in _MAKERS:
        return any(map(is_linked, parts[1]))
    if kind in _MAPPINGS.values():
        return any(is_linked(key) or is_linked(value) for key, value in parts)
    return kind not in ("value", "tensor")


def _fits(current: Any, saved: torch.Tensor) -> bool:
    if not isinstance(current, torch.Tensor) or isinstance(current, DTensor) or current.grad_fn is not None:
        return False
    return (current.shape, current.dtype, current.device) == (saved.shape, saved.dtype, saved.device)


def _filled(current: Any, saved: torch.Tensor) -> torch.Tensor:
    """The tensor that is there with the saved bytes, if they fit; else the saved one."""
    if not _fits(current, saved):
        return saved
    with torch.no_grad():
        current.copy_(saved)
    return current  # type: ignore[no-any-return]


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _short(key: Any) -> str:
    return repr(key) if isinstance(key, str | int | float | bool | tuple) and len(repr(key)) < 80 else type(key).__name__
