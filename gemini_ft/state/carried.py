"""Finds the variables that a script's own loop carries from one step to the next, and that no object given to be captured holds."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import linecache
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from gemini_ft.state.left_out import SHARED, is_of_library, script_frames, variables_of, within
from gemini_ft.state.remembered import Attributes
from gemini_ft.state.tensors import local

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_CLOCKS: tuple[Callable[[], float], ...] = (time.time, time.monotonic, time.perf_counter)
_LOOKED_INTO = (argparse.Namespace, SimpleNamespace, np.ndarray, np.generic, list, tuple, set, frozenset, deque, dict)
_MANY = 1000  # parts of a container that are looked at
_SECONDS = 60.0  # a float that is nearer than this to one of the clocks is taken for a time
_HOUR = 3600.0  # a clock that reads less is like any small number
_ADDS = {"add", "append", "extend", "update"}  # methods, as of lists and of meters
_TELLS = {"add_scalar", "debug", "info", "log", "print", "set_description", "set_postfix", "warning", "write"}


class Carried:
    """Variables of a loop, and of objects in them, that change while it trains: numbers, averages, buffers, hidden states.

    Args:
        models: those of the training.
        given: models, optimizers and objects with a state of their own; what they hold is given with them.
    """

    def __init__(self, models: Collection[nn.Module], given: Iterable[Any]) -> None:
        self._known = within(given)
        self._memory = {_memory(tensor) for model in models for tensor in (*model.parameters(), *model.buffers())}
        self._marks: list[_Marked] = []
        self._names: set[str] = set()
        self._steps = 0
        self._named: set[str] = set()

    def changed(self, scalars: Mapping[str, Any], iteration: int) -> tuple[list[str], list[str]]:
        """Names what has changed since it was first seen, each once: what steps may depend on, and numbers that they only add to.

        Call it at every step; it looks at the 1st, 2nd, 4th, 8th, ...

        Args:
            scalars: values that snapshots have, by name.
            iteration: the number of steps.
        """
        self._steps += 1
        if self._steps & (self._steps - 1):
            return [], []
        variables = _Variables()
        found = {path: value for mark in self._marks for path, value in mark.changes(variables)}
        if fresh := variables.found.keys() - self._names:
            self._names |= fresh
            self._marks.append(_Marked({name: variables.found[name] for name in fresh}, self._is_known))
        names = {path for path, value in found.items() if not _is_given(path, value, scalars, iteration)} - self._named
        self._named |= names
        added = {path for path in names if path in variables.added and _is_number(found[path])}
        return sorted(names - added), sorted(added)

    def _is_known(self, value: Any) -> bool:
        kind: type = type(value)
        if isinstance(value, SHARED):
            return False
        if id(value) in self._known:
            return True
        if isinstance(value, torch.Tensor):
            return _memory(value) in self._memory
        if isinstance(value, dict | list | tuple):  # of the model's own tensors
            parts = [*islice(value.values() if isinstance(value, dict) else value, _MANY)]
            return bool(parts) and all(isinstance(part, torch.Tensor) and self._is_known(part) for part in parts)
        if hasattr(kind, "__next__") or isinstance(value, AveragedModel):
            return True
        if isinstance(value, nn.Module):
            return any(_memory(tensor) in self._memory for tensor in value.parameters())
        return not isinstance(value, _LOOKED_INTO) and is_of_library(kind)


class _Marked:
    """Some variables as they were at a step."""

    def __init__(self, variables: Mapping[str, Any], is_known: Callable[[Any], bool]) -> None:
        self._ids = {name: id(value) for name, value in variables.items()}
        self._view = SimpleNamespace()
        self._fill(variables)
        classes = {name: SimpleNamespace(**_numbers(value)) for name, value in variables.items() if isinstance(value, type)}
        self._classes = {name: variables[name] for name in classes}
        self._class_views = classes
        self._attributes = Attributes({"": self._view, **classes}, caches=False, known=is_known, closely=True)
        vars(self._view).clear()  # the script may forget them

    def changes(self, variables: _Variables) -> Iterator[tuple[str, Any]]:
        """The paths of what differs now, with the values of variables."""
        same = {name: value for name, value in variables.found.items() if name in self._ids}
        self._fill({name: value for name, value in same.items() if name not in variables.held or id(value) == self._ids[name]})
        for name, kind in self._classes.items():
            vars(self._class_views[name]).update(_numbers(kind))
        kept, lost = self._attributes.changes()
        vars(self._view).clear()
        for path, values in kept.items():
            yield from ((f"{path}.{name}".lstrip("."), value) for name, value in values.items())
        yield from ((path.lstrip("."), None) for path in lost)

    def _fill(self, variables: Mapping[str, Any]) -> None:
        vars(self._view).update({name: value for name, value in variables.items() if not isinstance(value, type | ModuleType)})


class _Variables:
    """The variables of the loops that are under way, but for those that each turn sets before it reads them.

    Attributes:
        found: name -> value.
        held: names of those that an outer loop's turn sets: they count as long as they stay the same objects.
        added: names of those that the loops only add to.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.held: set[str] = set()
        self.added: set[str] = set()
        modules: dict[int, Mapping[str, Any]] = {}
        for frame in script_frames():
            if (turns := turns_at(frame)) is None:
                continue
            if is_module := frame.f_code.co_name == "<module>":
                modules.pop(id(frame.f_globals), None)
            else:
                modules[id(frame.f_globals)] = frame.f_globals
            if turns or is_module:
                self._add(frame.f_globals if is_module else variables_of(frame), turns)
        for variables in modules.values():
            self._add(variables, ())

    def _add(self, variables: Mapping[str, Any], turns: Sequence[LoopTurn]) -> None:
        carried = {name for turn in turns for name in turn.carried}
        renewed = {name for turn in turns for name in turn.stored} - carried
        brief = turns[-1].stored - carried if turns else set[str]()
        self.added |= turns[0].added if turns else set()
        for name, value in variables.items():
            if name not in brief and name not in self.found and not (name.startswith("__") or _is_code(value)):
                self.found[name] = value
                if name in renewed:
                    self.held.add(name)


class LoopTurn(ast.NodeVisitor):
    """The names that one turn of a loop stores, and those of them that it reads before.

    Branches are taken one by one, each as if the others had not been there.

    Attributes:
        stored: names that a turn stores.
        carried: those of them that it reads before.
        added: names that a turn adds to (``total += loss``, ``losses.append(loss)``), and reads only to tell of them.
    """

    def __init__(self, loop: ast.AST) -> None:
        self.stored: set[str] = set()
        self._read: set[str] = set()
        self._adds, self._used = set[str](), set[str]()
        if isinstance(loop, ast.While):
            self.visit(loop.test)
        elif isinstance(loop, ast.For | ast.AsyncFor):
            self.visit(loop.target)
        for statement in getattr(loop, "body", ()):
            self.visit(statement)
        self.carried = self.stored & self._read
        self.added = self._adds - self._used

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.stored.add(node.id)
        else:
            self._use(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._in_order(node.value, *node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._in_order(*([node.value, node.target] if node.value is not None else []))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            (self._add_to if isinstance(node.op, ast.Add) else self._use)(node.target.id)
        self._in_order(node.value, node.target)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        function = call.func if isinstance(call, ast.Call) else None
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if isinstance(call, ast.Call) and name in _ADDS and isinstance(owner := getattr(function, "value", None), ast.Name):
            self._add_to(owner.id)
            self._in_order(*call.args, *call.keywords)
            return
        used = set(self._used)
        self.visit(call)
        if name in _TELLS:
            self._used = used

    def _add_to(self, name: str) -> None:
        self._adds.add(name)
        self._read |= {name} - self.stored

    def _use(self, name: str) -> None:
        self._used.add(name)
        self._read |= {name} - self.stored

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._in_order(node.value, node.target)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._in_order(node.iter, node.target, *node.body, *node.orelse)

    visit_AsyncFor = visit_For

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        before = set(self.stored)
        self._in_order(*node.body)
        after, self.stored = self.stored, before
        self._in_order(*node.orelse)
        self.stored |= after

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.stored.add(node.name)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Runs later."""

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, _COMPREHENSIONS):
            before = set(self.stored)
            self._in_order(*node.generators)
            self._in_order(*([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]))
            self.stored = before
        elif isinstance(node, ast.comprehension):
            self._in_order(node.iter, node.target, *node.ifs)
        else:
            super().generic_visit(node)

    def _in_order(self, *nodes: ast.AST) -> None:
        for node in nodes:
            self.visit(node)


def turns_at(frame: FrameType) -> Sequence[LoopTurn] | None:
    """The loops of a frame's code that its present line is in, the innermost last; None: its source cannot be read."""
    if (loops := _loops(frame.f_code)) is None:
        return None
    return [turn for first, last, turn in loops if first <= frame.f_lineno <= last]


@functools.cache
def _loops(code: CodeType) -> list[tuple[int, int, LoopTurn]] | None:
    """The loops in a code's source, each with its first and last line, outer ones first."""
    is_module = code.co_name == "<module>"
    if not (lines := linecache.getlines(code.co_filename)):
        return None
    first = 0 if is_module else code.co_firstlineno - 1
    source = "".join(lines if is_module else inspect.getblock(lines[first:]))
    try:
        tree = ast.parse(f"if 1:\n{source}" if (is_inside := source[:1].isspace()) else source)
    except SyntaxError:
        return None
    shift = first - is_inside
    loops = [node for node in ast.walk(tree) if isinstance(node, _LOOPS)]
    return [(node.lineno + shift, (node.end_lineno or node.lineno) + shift, LoopTurn(node)) for node in loops]


def _is_given(path: str, value: Any, scalars: Mapping[str, Any], iteration: int) -> bool:
    """Whether a variable that has changed is known to snapshots under a name of theirs, counts steps, or tells the time."""
    name = path.rpartition(".")[2]
    if name in scalars or (
        isinstance(value, int | float) and any(value == each for each in scalars.values() if isinstance(each, int | float))
    ):
        return True
    if type(value) is int:
        return abs(value - iteration) <= 1
    return type(value) is float and any(abs(now - value) < _SECONDS for clock in _CLOCKS if (now := clock()) > _HOUR)


def _is_code(value: Any) -> bool:
    return isinstance(value, ModuleType) or (isinstance(value, type) and is_of_library(value)) or inspect.isroutine(value)


def _numbers(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if type(value) in (int, float) and not name.startswith("__")}


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or a list of such."""
    if isinstance(value, list | deque):
        return all(type(part) in (int, float) for part in islice(value, _MANY))
    return isinstance(value, int | float | np.number) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _memory(tensor: torch.Tensor) -> int:
    try:
        return local(tensor).data_ptr() or id(tensor)  # a part of a DTensor may be empty
    except (RuntimeError, ValueError, NotImplementedError):  # it is sparse, or has no elements yet
        return id(tensor)
