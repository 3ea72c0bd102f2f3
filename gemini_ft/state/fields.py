"""Reads and writes all attributes of an object, wherever its class keeps them, and lists the parts through which a search goes on."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType, MemberDescriptorType, MethodType
from typing import Any

Fields = MutableMapping[str, Any]
NO_FIELDS: Any = MappingProxyType({})
FEW = 64  # entries of a collection that a search looks at


def fields_of(item: Any) -> Fields:
    """The object's own attributes, to read and to write: those in its ``__dict__`` and those in slots of its classes.

    They are looked up and set where they lie: no property, ``__getattr__`` or ``__setattr__`` of the object's class is called.
    Returns `NO_FIELDS` for an object that has no place for attributes.
    """
    try:
        own = item.__dict__
    except Exception:  # a __getattr__ of the script may raise anything
        own = NO_FIELDS
    kind: type = type(item)
    return _SlotFields(item, slots, own) if (slots := slots_of(kind)) else own


@functools.cache
def slots_of(kind: type) -> Mapping[str, MemberDescriptorType]:
    """The slots of a class and its bases, by their full names: ``__rate`` of a class ``Model`` is ``_Model__rate``."""
    found: dict[str, MemberDescriptorType] = {}
    for base in kind.__mro__:
        members = vars(base).items() if "__slots__" in vars(base) else ()
        found = {name: slot for name, slot in members if isinstance(slot, MemberDescriptorType)} | found
    return found


class _SlotFields(Fields):
    """The attributes of an object that has some in slots."""

    def __init__(self, item: Any, slots: Mapping[str, MemberDescriptorType], rest: Fields) -> None:
        self._item, self._slots, self._rest = item, slots, rest

    def __getitem__(self, name: str) -> Any:
        if name not in self._slots:
            return self._rest[name]
        try:
            return self._slots[name].__get__(self._item)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._slots:
            self._slots[name].__set__(self._item, value)
        else:
            self._rest[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._slots:
            self._slots[name].__delete__(self._item)
        else:
            del self._rest[name]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in {**self._slots, **self._rest} if name in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def parts_of(item: Any, most: int = FEW) -> list[tuple[Any, Any]]:
    """Returns (name, key or index; value) for each part of an object: its attributes, and the first entries of a collection.

    Mappings that are not dicts have no entries here: they may read a file for each.
    """
    if isinstance(item, functools.partial):
        return [*enumerate(item.args), *item.keywords.items(), ("func", item.func)]
    if isinstance(item, MethodType):  # for example a collate function of the dataset
        return [("self", item.__self__)]
    entries: list[tuple[Any, Any]] = []
    if isinstance(item, dict):
        entries = list(itertools.islice(item.items(), most))
    elif isinstance(item, (list, tuple)):
        entries = list(enumerate(item[:most]))
    return entries + list(fields_of(item).items())
