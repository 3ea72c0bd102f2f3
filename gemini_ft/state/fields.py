"""Reads and writes all attributes of an object, wherever its class keeps them, and lists the parts through which a search goes on."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import CellType, FunctionType, GetSetDescriptorType, MappingProxyType, MemberDescriptorType, MethodType, NoneType
from typing import Any, TypeVar

import numpy as np
import torch

from gemini_ft.state.script import is_of_library

T = TypeVar("T")
Fields = MutableMapping[str, Any]
NO_FIELDS: Any = MappingProxyType({})
FEW = 64  # entries of a collection that a search looks at
_SHORT = 1000  # characters of a text that is a fixed value
_NUMBERS = (NoneType, bool, int, float, complex)


def fields_of(item: Any) -> Fields:
    """The object's own attributes, to read and to write: those in its ``__dict__`` and those in slots of its classes.

    They are looked up and set where they lie: no property, ``__getattr__`` or ``__setattr__`` of the object's class is called.
    Returns `NO_FIELDS` for an object that has no place for attributes.
    """
    kind: type = type(item)
    own = _dict_of(kind)(item)
    return _SlotFields(item, slots, own) if (slots := slots_of(kind)) else own


def is_a(item: Any, kinds: Any) -> bool:
    """Whether an object is of one of ``kinds``; unlike ``isinstance`` this does not ask a lazy proxy for its ``__class__``."""
    return issubclass(type(item), kinds)


def of_class(function: Callable[[type], T]) -> Callable[[type], T]:
    """Keeps a function's result for each class as long as the class lives: one made inside a function may hold a model."""
    known: weakref.WeakKeyDictionary[type, T] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def look(kind: type) -> T:
        if (found := known.get(kind)) is None:
            found = known[kind] = function(kind)
        return found

    return look


@of_class
def _dict_of(kind: type) -> Callable[[Any], Fields]:
    """Returns what reads the ``__dict__`` of a class's objects, unless that is a property of the script's own."""
    if issubclass(kind, threading.local):  # each thread has its own
        return lambda item: threading.local.__getattribute__(item, "__dict__")
    found = next((vars(base)["__dict__"] for base in kind.__mro__ if "__dict__" in vars(base)), None)
    return found.__get__ if isinstance(found, GetSetDescriptorType | MemberDescriptorType) else lambda _: NO_FIELDS


@of_class
def slots_of(kind: type) -> Mapping[str, weakref.ref[type]]:
    """The slots of a class and its bases, with the class of each; ``__rate`` of a class ``Model`` is called ``_Model__rate``."""
    bases = [base for base in reversed(kind.__mro__) if "__slots__" in vars(base)]
    return {name: weakref.ref(base) for base in bases for name, slot in vars(base).items() if isinstance(slot, MemberDescriptorType)}


class _SlotFields(Fields):
    """The attributes of an object that has some in slots."""

    def __init__(self, item: Any, slots: Mapping[str, weakref.ref[type]], rest: Fields) -> None:
        self._item, self._slots, self._rest = item, slots, rest

    def _slot(self, name: str) -> Any:
        return vars(self._slots[name]())[name]

    def __getitem__(self, name: str) -> Any:
        if name not in self._slots:
            return self._rest[name]
        try:
            return self._slot(name).__get__(self._item)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._slots:
            self._slot(name).__set__(self._item, value)
        else:
            self._rest[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._slots:
            self._slot(name).__delete__(self._item)
        else:
            del self._rest[name]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in {**self._slots, **self._rest} if name in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Enclosed(Fields):
    """The variables that a function encloses and the defaults of its arguments, as far as they are fixed values: see `is_fixed`.

    A variable of another value, a list for example, is not among them, and keeps it whatever is set here. It may be shared with others.
    """

    def __init__(self, function: FunctionType) -> None:
        self.function = function

    def _defaults(self) -> dict[str, Any]:
        code, defaults = self.function.__code__, self.function.__defaults__ or ()
        return dict(zip(code.co_varnames[max(0, code.co_argcount - len(defaults)) : code.co_argcount], defaults, strict=False))

    def _cell(self, name: str) -> CellType | None:
        names = self.function.__code__.co_freevars
        return (self.function.__closure__ or ())[names.index(name)] if name in names else None

    def _value(self, name: str) -> Any:
        try:
            return self._defaults_with(name)[name] if (cell := self._cell(name)) is None else cell.cell_contents
        except ValueError:  # the variable has not been set yet, or is deleted
            raise KeyError(name) from None

    def _defaults_with(self, name: str) -> dict[str, Any]:
        keywords = self.function.__kwdefaults__ or {}
        return keywords if name in keywords else self._defaults()

    def hides(self, name: str) -> bool:
        """Whether there is a variable or a default of this name that has another value than a fixed one."""
        try:
            return not is_fixed(self._value(name))
        except KeyError:
            return False

    def values_of_all(self) -> dict[str, Any]:
        """All variables that are set, and defaults, of whatever value."""
        found = self._defaults() | (self.function.__kwdefaults__ or {})
        for name, cell in zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # the variable has not been set yet
                found[name] = cell.cell_contents
        return found

    def __getitem__(self, name: str) -> Any:
        if not is_fixed(value := self._value(name)):
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        if self.hides(name):
            return
        if (cell := self._cell(name)) is not None:
            cell.cell_contents = value
        elif name in (defaults := self._defaults_with(name)):
            defaults[name] = value
            if defaults is not self.function.__kwdefaults__:
                self.function.__defaults__ = tuple(defaults.values())

    def __delitem__(self, name: str) -> None:
        if (cell := self._cell(name)) is not None:  # a default is always there
            del cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, value in self.values_of_all().items() if is_fixed(value)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def enclosed_by(item: Any) -> Enclosed | None:
    """What a function of the script encloses, and its defaults; None: it has none, or is no such function."""
    if type(item) is not FunctionType or not (item.__closure__ or item.__defaults__ or item.__kwdefaults__):
        return None
    return None if is_of_library(item.__module__) else Enclosed(item)


def is_fixed(value: Any) -> bool:
    """Whether a value is small and cannot change itself: a number, a text of at most 1000 characters, None, or a tuple of these."""
    if type(value) is tuple:
        return len(value) <= FEW and all(map(is_fixed, value))
    is_numpys = is_a(value, (np.number, np.bool_)) and type(value).__module__ == "numpy"
    return is_numpys or type(value) in _NUMBERS or (type(value) in (str, bytes) and len(value) <= _SHORT)


def parts_of(item: Any, most: int = FEW) -> list[tuple[Any, Any]]:
    """Returns (name, key or index; value) for each part of an object: its attributes, and the first entries of a collection.

    In place of a key that is a tensor, as in an optimizer's state, there is an index. Mappings that are not dicts have no entries here:
    they may read a file for each.
    """
    if is_a(item, functools.partial):
        return [*enumerate(item.args), *item.keywords.items(), ("func", item.func)]
    if is_a(item, MethodType):  # for example a collate function of the dataset
        return [("self", item.__self__)]
    entries: list[tuple[Any, Any]] = []
    if is_a(item, dict):
        pairs = enumerate(itertools.islice(dict.items(item), most))
        # Whoever makes a text of a tensor waits for its device, again and again.
        entries = [(place if is_a(key, torch.Tensor) else key, value) for place, (key, value) in pairs]
    elif is_a(item, (list, tuple)):
        values = list.__iter__(item) if is_a(item, list) else tuple.__iter__(item)
        entries = list(enumerate(itertools.islice(values, most)))
    return entries + list(fields_of(item).items())
