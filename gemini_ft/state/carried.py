"""Finds the variables that a script's own loop carries from one step to the next, and that no captured object holds."""

from __future__ import annotations

import argparse
import functools
import gc
import inspect
import itertools
import operator
import time
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from numbers import Number
from queue import Queue
from types import FrameType, FunctionType, GeneratorType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from gemini_ft.state.fields import NO_FIELDS, fields_of, is_a, parts_of
from gemini_ft.state.left_out import SHARED, within
from gemini_ft.state.loop_turns import LoopTurn, begun_by, turns_at
from gemini_ft.state.remembered import MODULE_INTERNALS, hooks_of
from gemini_ft.state.script import is_library_file, is_of_library, is_of_script, script_frames, variables_of
from gemini_ft.state.tensors import local
from gemini_ft.state.values import Opaque, is_same, snapshot

_CLOCKS: tuple[Callable[[], float], ...] = (time.time, time.monotonic, time.perf_counter)
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_READ = (argparse.Namespace, SimpleNamespace, Queue, UserDict, UserList, ChainMap, MethodType, functools.partial)  # of libraries
_ITERATED: tuple[Iterable[Any], ...] = ([], (), range(0))
_ITERATORS: tuple[type, ...] = (itertools.count, *(type(iter(each)) for each in _ITERATED))  # that say how far they are
_LOOKED_INTO = (*_READ, *_CONTAINERS, *_ITERATORS, np.ndarray, np.generic, Number, array)
_DEPTH, _OBJECTS = 6, 500  # of the objects that one variable leads to
_MANY = 1000  # parts of a container that are looked at
_SECONDS = 60.0  # a float that is nearer than this to a clock counts as a time
_HOUR = 3600.0  # a clock that reads less cannot be told from other numbers


@dataclass(frozen=True, kw_only=True)
class LoopChanges:
    """The changes of a loop's variables that no snapshot has, each named once."""

    carried: Sequence[str] = ()  # variables on which later steps may depend
    added: Sequence[str] = ()  # numbers that the loop only adds to
    data: Sequence[str] = ()  # attributes of objects that the loop iterates over
    odd: Mapping[str, Exception] = field(default_factory=dict)  # variables that cannot be looked at -> the error of each


class _Leaf(NamedTuple):
    """The value of a variable, or of an attribute of an object in one, that is compared."""

    owner: int  # id of the object that has it
    value: Any


class _Seen(NamedTuple):
    """A variable as it was when it was first seen; nothing of it is kept alive."""

    number: int  # its id
    owners: frozenset[str]  # paths of the objects with attributes to which it led
    marks: dict[str, Any]


class Carried:
    """Variables of a loop, and of objects in them, that change while it trains: numbers, averages, buffers, hidden states.

    Args:
        given: models, optimizers and objects with a state of their own; the objects that they hold are known with them.
        wrappers: of these; what else they hold is not known.
        callbacks: name -> object of the script that the loop calls, whether it is in a variable or not.
    """

    def __init__(
        self,
        models: Collection[nn.Module],
        given: Iterable[Any],
        wrappers: Iterable[Any] = (),
        callbacks: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._known, self._callbacks = within(given) | set(map(id, wrappers)), callbacks
        self._memory = {_memory(tensor) for model in models for tensor in (*model.parameters(), *model.buffers())}
        self._models = [weakref.ref(model) for model in models]
        self._seen: dict[str, _Seen] = {}
        self._odd: set[str] = set()
        self._steps = 0
        self._named: set[str] = set()

    def changed(self, scalars: Mapping[str, Any], iteration: int) -> LoopChanges:
        """Names the variables that have changed since they were first seen, each once.

        Call it at every step; it looks at the 1st, 2nd, 4th, 8th, ...

        ``scalars``: values that snapshots have, by name.
        """
        self._steps += 1
        if self._steps & (self._steps - 1):
            return LoopChanges()
        variables = _Variables()
        found: dict[str, _Leaf] = {}
        odd: dict[str, Exception] = {}
        for name, value in (self._hooks() | {**self._callbacks} | variables.found).items():
            if name not in self._odd:
                try:
                    found |= self._changes(name, value, variables)
                except Exception as error:  # an object of the script may raise anything when it is looked at
                    odd[name] = error
        self._odd.update(odd)
        is_added = {path: path.partition(".")[0] in variables.added and _is_number(leaf.value) for path, leaf in found.items()}
        by_place: dict[tuple[int, str], str] = {}  # an attribute of one object may have many paths: the best is that of a name of the loop
        for path in sorted(found, key=lambda path: (not is_added[path], path.count("."), path)):
            by_place.setdefault((found[path].owner, path.rpartition(".")[2]), path)
        names = {
            path
            for path in by_place.values()
            if not _is_given(path, found[path].value, scalars, iteration, variables.begun) and not _is_below(path, found)
        }
        names -= self._named
        self._named |= names
        added = {path for path in names if is_added[path]}
        data = {
            path
            for path in names - added
            if path.partition(".")[0] in variables.iterated and ("." in path or not is_a(found[path].value, Number))
        }
        return LoopChanges(carried=sorted(names - added - data), added=sorted(added), data=sorted(data), odd=odd)

    def _hooks(self) -> dict[str, FunctionType]:
        """The functions that the script has registered as hooks of its models and of their parameters, by name."""
        models = [model for there in self._models if (model := there()) is not None]
        hooks = [hook for model in models for module in model.modules() for hook in hooks_of(module).values()]
        return {hook.__name__: hook for hook in hooks if is_a(hook, FunctionType) and is_of_script(hook)}

    def _changes(self, name: str, value: Any, variables: _Variables) -> dict[str, _Leaf]:
        """Returns path -> value of all that has changed in a variable since it was first seen, or since an outer loop has set it."""
        owners, leaves = self._look_into(name, value, variables)
        before = self._seen.get(name)
        if before is None or (name in variables.held and before.number != id(value)):
            before = _Seen(id(value), frozenset(owners), {})
            changed: dict[str, _Leaf] = {}
        else:
            changed = {path: owners[path] for path in owners if path in before.marks and path not in leaves}
            for path, leaf in leaves.items():
                if path in before.marks:
                    mark = before.marks[path]
                    is_now = mark.is_now(leaf.value) if type(mark) is Opaque else is_same(snapshot(leaf.value), mark)
                    changed |= {} if is_now else {path: leaf}
                elif path.rpartition(".")[0] in before.owners:
                    changed[path] = leaf
        marks = {path: snapshot(leaf.value, closely=True) for path, leaf in leaves.items() if path not in before.marks}
        self._seen[name] = before._replace(owners=before.owners | owners.keys(), marks=before.marks | marks)
        return changed

    def _look_into(self, name: str, value: Any, variables: _Variables) -> tuple[dict[str, _Leaf], dict[str, _Leaf]]:
        """Returns, by path, the objects with attributes to which a variable leads, and the values of these attributes, or its own value."""
        owners, leaves = dict[str, _Leaf](), dict[str, _Leaf]()
        seen, level = set[int](), [(name, _Leaf(0, value), True)]
        for _ in range(_DEPTH):
            below: list[tuple[str, _Leaf, bool]] = []
            for path, leaf, is_attribute in level:
                item = leaf.value
                if id(item) in seen or len(seen) > _OBJECTS or self._is_known(item):
                    continue
                parts = _parts(item, variables)
                if is_attribute and is_a(item, FunctionType):
                    leaves[path] = leaf._replace(value=str(item.__code__))
                if is_attribute and (parts is None or is_a(item, (*_CONTAINERS, nn.Module))):
                    leaves[path] = leaf if type(item) not in _ITERATORS else leaf._replace(value=_next_of(item))
                elif parts is not None and not is_a(item, _CONTAINERS):
                    owners[path] = leaf
                if parts:
                    seen.add(id(item))
                    below += [(f"{path}.{key}", _Leaf(id(item), part), not is_a(item, _CONTAINERS)) for key, part in parts]
            level = below
        return owners, leaves

    def _is_known(self, value: Any) -> bool:
        """Whether a value is given, belongs to a model, or belongs to a library."""
        kind: type = type(value)
        if id(value) in self._known:
            return True
        if is_a(value, type | FunctionType | ModuleType):
            return is_of_library(value.__name__ if is_a(value, ModuleType) else value.__module__)
        if is_a(value, SHARED):
            return False
        if is_a(value, torch.Tensor):
            return _memory(value) in self._memory
        if is_a(value, dict | list | tuple):  # of the model's own tensors
            parts = [*islice(value.values() if is_a(value, dict) else value, _MANY)]
            return bool(parts) and all(is_a(part, torch.Tensor) and self._is_known(part) for part in parts)
        if is_a(value, AveragedModel):
            return True
        if is_a(value, nn.Module):
            return any(_memory(tensor) in self._memory for tensor in value.parameters())
        if is_a(value, GeneratorType):
            return is_library_file(value.gi_code.co_filename)
        is_pythons = kind.__module__ == "builtins" and (hasattr(kind, "__next__") or inspect.isroutine(value))
        return not is_a(value, _LOOKED_INTO) and (is_pythons or is_of_library(kind.__module__))


def _parts(item: Any, variables: _Variables) -> list[tuple[Any, Any]] | None:
    """Returns (name, part) for each part of a value that may have state; None: the value has no parts."""
    if is_a(item, ModuleType):
        parts = [] if id(vars(item)) in variables.tables else [*vars(item).items()]
    elif is_a(item, FunctionType):  # variables of a closure, and defaults that are changed in place
        code, defaults = item.__code__, item.__defaults__ or ()
        cells = [(name, cell.cell_contents) for name, cell in zip(code.co_freevars, item.__closure__ or (), strict=True) if _is_full(cell)]
        arguments = zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
        parts = [(name, part) for name, part in cells if name not in variables.found] + [*arguments, *vars(item).items()]
    elif is_a(item, GeneratorType):
        parts = [*_Variables.of(item.gi_frame).items()] if item.gi_frame is not None else []
    elif is_a(item, (*_CONTAINERS, MethodType, functools.partial)):
        return parts_of(item)
    else:
        fields = fields_of(item)
        if is_a(item, torch.Tensor | np.ndarray | Number) or fields is NO_FIELDS:
            return None
        left = MODULE_INTERNALS | {"training"} if is_a(item, nn.Module) else ()
        parts = [(name, part) for name, part in fields.items() if name not in left]
    return [(name, part) for name, part in parts if not str(name).startswith("__")]


class _Variables:
    """The variables of the loops that are under way, without those that each turn sets before it reads them."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}  # name -> value
        self.held: set[str] = set()  # names that a turn of an outer loop sets: they are compared as long as they stay the same objects
        self.added: set[str] = set()  # names that the loops only add to
        self.iterated: set[str] = set()  # names in the expressions that the loops iterate over
        self.begun: set[str] = set()  # names to which the loops' functions assign only constants, and add
        modules: dict[int, Mapping[str, Any]] = {}
        frames = [(frame, turns) for frame in script_frames() if (turns := turns_at(frame)) is not None]
        loops = [turn for _, turns in frames for turn in reversed(turns)]
        self._inner = loops[0].counter if len(loops) > 1 else ""  # counts the turns inside one of an outer loop
        for frame, turns in frames:
            if is_module := frame.f_code.co_name == "<module>":
                modules.pop(id(frame.f_globals), None)
            else:
                modules[id(frame.f_globals)] = frame.f_globals
            if turns or is_module:
                self._add(frame.f_globals if is_module else variables_of(frame), turns)
                self.begun |= begun_by(frame.f_code) & self.found.keys()
        for variables in modules.values():
            self._add(variables, ())
        self.tables = {id(frame.f_globals) for frame in script_frames()}  # ids of the dicts of the modules whose variables are in ``found``

    def _add(self, variables: Mapping[str, Any], turns: Sequence[LoopTurn]) -> None:
        carried = {name for turn in turns for name in turn.carried}
        renewed = {name for turn in turns for name in turn.stored} - carried - {self._inner}
        brief = turns[-1].stored - carried - {self._inner} if turns else set[str]()
        self.added |= turns[0].added if turns else set()
        self.iterated |= {name for turn in turns for name in turn.iterated}
        for name, value in variables.items():
            if name not in brief and name not in self.found and not name.startswith("__"):
                self.found[name] = value
                if name in renewed:
                    self.held.add(name)

    @staticmethod
    def of(frame: FrameType) -> dict[str, Any]:
        """The variables of a suspended generator, without those that each turn of its own loop sets before it reads them."""
        turns = turns_at(frame) or ()
        renewed = {name for turn in turns for name in turn.stored - turn.carried}
        return {name: value for name, value in variables_of(frame).items() if name not in renewed}


def _is_given(path: str, value: Any, scalars: Mapping[str, Any], iteration: int, begun: Collection[str]) -> bool:
    """Whether a variable that has changed is among the scalars of snapshots, counts the steps, or is a time.

    A count of the steps may have begun with the result of `resume`, unless the script begins it with a constant.
    """
    name = path.rpartition(".")[2]
    if name in scalars or (is_a(value, int | float) and any(value == each for each in scalars.values() if is_a(each, int | float))):
        return True
    if type(value) is int:
        return abs(value - iteration) <= 1 and path not in begun
    return type(value) is float and any(abs(now - value) < _SECONDS for clock in _CLOCKS if (now := clock()) > _HOUR)


def _is_below(path: str, found: Collection[str]) -> bool:
    """Whether an object on the way to ``path`` is among those found."""
    steps = path.split(".")
    return any(".".join(steps[:count]) in found for count in range(1, len(steps)))


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # its variable has not been set yet
        return False


def _next_of(counter: Any) -> Any:
    """Returns the number that a counter gives next, or minus how many items an iterator has left, without advancing it."""
    if type(counter) is not itertools.count:
        return -operator.length_hint(counter)
    # The number and the step; a counter that goes up by 1 may refer to the step alone. From Python 3.12 on its type is among them.
    held = [each for each in gc.get_referents(counter) if each is not itertools.count]
    return held[0] if len(held) > 1 else int(repr(counter)[len("count(") : -1])


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or a list of numbers."""
    if is_a(value, list | deque):
        return all(type(part) in (int, float) for part in islice(value, _MANY))
    return is_a(value, int | float | np.number) or (is_a(value, torch.Tensor) and value.dim() == 0)


def _memory(tensor: torch.Tensor) -> int:
    try:
        return local(tensor).data_ptr() or id(tensor)  # a part of a DTensor may be empty
    except (RuntimeError, ValueError, NotImplementedError):  # it is sparse, or has no memory yet
        return id(tensor)
