"""Reads and writes all attributes of an object, wherever its class keeps them, and lists the parts through which a search goes on."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import GetSetDescriptorType, MappingProxyType, MemberDescriptorType, MethodType
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Fields = MutableMapping[str, Any]
NO_FIELDS: Any = MappingProxyType({})
FEW = 64  # entries of a collection that a search looks at


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
