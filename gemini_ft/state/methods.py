"""Reads which attributes the methods of a class use of their first argument: from their code, as there may be no source."""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from gemini_ft.state.fields import of_class


@of_class
def set_by(kind: type) -> frozenset[str]:
    """Names of the attributes that the methods of a class set."""
    return frozenset(use.name for item in vars(kind).values() for function in _functions(item) for use in _uses(function) if use.is_set)


@of_class
def kept_by(kind: type) -> frozenset[str]:
    """Names of the attributes that ``state_dict`` and ``load_state_dict`` of a class and its bases use, and that ``load_state_dict`` sets.

    It may set them in methods that it calls; what ``state_dict`` reads in others may be there to be shown. Where one of the two takes
    ``vars(self)``, all attributes that its class sets are among them.
    """
    found = {use.name for uses in _called(kind, "load_state_dict") for use in uses if use.is_set}
    for base, function in [*_methods(kind, "state_dict"), *_methods(kind, "load_state_dict")]:
        names = {use.name for use in _uses(function)}
        found |= names | (set_by(base) if names & {"", "__dict__"} else set())
    return frozenset(name for name in found - {"", "__dict__"} if not any(_methods(kind, name)))


def set_anew(kind: type, method: str) -> set[str]:
    """Names of the attributes that a method sets, itself or in methods that it calls, and has not read before.

    One that counts, or makes what is not there yet (``if self.batches is None``), does not begin anew.
    """
    found, read = set[str](), set[str]()
    for uses in _called(kind, method):
        first = {use.name: use.is_set for use in reversed([*itertools.takewhile(lambda use: use.name, uses)])}
        read |= {name for name, is_set in first.items() if not is_set}
        found |= first.keys() - read
    return found


def _called(kind: type, method: str) -> Iterator[list[_Use]]:
    """Yields the attributes that a method uses, function by function through its bases, and then those of the methods that it calls."""
    left, seen = [method], set[str]()
    while left:
        seen.add(name := left.pop())
        for _, function in _methods(kind, name):
            yield (uses := [*_uses(function)])
            left += {use.name for use in uses} - seen


def _methods(kind: type, name: str) -> Iterator[tuple[type, FunctionType]]:
    """The functions of a method or a property in a class and its bases, with the class of each."""
    return ((base, function) for base in kind.__mro__ for function in _functions(vars(base).get(name)))


class _Use(NamedTuple):
    """One use of a function's first argument."""

    name: str  # of the attribute that is read or set; "" where the argument is used as a whole
    is_set: bool  # whether the attribute is set


def _functions(item: Any) -> list[FunctionType]:
    parts = (item.fget, item.fset) if isinstance(item, property) else (item,)
    functions = (inspect.unwrap(getattr(part, "__func__", part)) for part in parts if part is not None)
    return [function for function in functions if isinstance(function, FunctionType)]


def _uses(function: FunctionType) -> Iterator[_Use]:
    code = function.__code__
    return _uses_in(code, code.co_varnames[0]) if code.co_argcount else iter(())


def _uses_in(code: CodeType, first: str) -> Iterator[_Use]:
    closed = {*code.co_cellvars, *code.co_freevars}
    steps = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    for index, each in enumerate(steps):
        loaded = _loaded(each)
        if first not in loaded or (each.opname.startswith("LOAD_FAST") and first in closed):  # for an inner function
            continue
        following = [*steps[index + 1 : index + 3], each]
        is_both = following[0].opname == "COPY"  # self.count += 1
        operation, name = following[is_both].opname, following[is_both].argval
        if loaded[-1] != first or operation not in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR"):
            yield _Use("", is_set=False)
        elif operation != "LOAD_SUPER_ATTR":
            if is_both:
                yield _Use(name, is_set=False)
            yield _Use(name, is_both or operation == "STORE_ATTR")
    inner = [each for each in code.co_consts if isinstance(each, CodeType) and first in each.co_freevars]
    yield from (use for each in inner for use in _uses_in(each, first))


def _loaded(step: dis.Instruction) -> tuple[Any, ...]:
    """The names of the variables that an instruction loads, in this order."""
    if "LOAD_FAST" not in step.opname and step.opname != "LOAD_DEREF":
        return ()
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return names[1:] if step.opname.startswith("STORE_FAST") else names
