"""Plain attributes of Python objects that training changes as it goes: found, kept with a snapshot, and given back.

Samplers count epochs, datasets remember the previous sample, modules hold a dropout rate that a hook has set. None of it
is in a state dict. An attribute is *kept* if it is plain and small: numbers, texts, tensors and arrays of at most 256 KiB,
and containers of at most 64 of them. One that has changed and is not plain is *lost*, and named.
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from gemini_ft.state.fields import FEW, NO_FIELDS, Fields, fields_of, is_a, parts_of, slots_of
from gemini_ft.state.rng import GENERATORS  # whose states are kept beside attributes
from gemini_ft.state.script import is_of_library
from gemini_ft.state.tensors import version_of
from gemini_ft.state.values import (
    ATOMS,
    MAPPINGS,
    SEQUENCES,
    Identity,
    NotPlain,
    Opaque,
    copy_for,
    copy_of,
    digest,
    entries,
    has_its_functions,
    is_changeable,
    is_same,
    is_shared,
    snapshot,
    wrote,
)

# Path of an object -> attribute -> value; `_GONE` -> path -> attributes that have been deleted; `HELD` -> path -> attributes that are
# still the very objects of the mark, which others may hold as well.
Values = dict[str, dict[str, Any]]

_GONE, HELD = "(gone)", "(held)"
_DEPTH, _OBJECTS = 6, 2000
_MANY = 1000  # entries of a namespace; one with more was none, and is lost
_CODE = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
_CLOSED = (str, bytes, type, ModuleType, FunctionType, BuiltinFunctionType, torch.Tensor, np.ndarray, nn.Module)
# Objects of these packages have ways of their own to keep their state, or none worth keeping (open files, loggers, locks).
_FOREIGN = frozenset(
    {"PIL", "_io", "_thread", "deepspeed", "fsspec", "gemini_ft", "h5py", "io", "lightning", "lightning_fabric", "lmdb", "logging"}
    | {"mmap", "multiprocessing", "numpy", "pathlib", "pyarrow", "pytorch_lightning", "re", "socket", "sqlite3", "tarfile"}
    | {"threading", "torchmetrics", "weakref", "zarr", "zipfile"}
)

# What Hugging Face's `datasets` makes of the shards of a shuffled stream when it is iterated; and, with that, attributes of a DataLoader
# that are no settings of it: the iteration under way, with its worker processes, and who follows that.
OF_STREAMS = frozenset({"_interleaved"})
OF_LOADERS = OF_STREAMS | {"_gemini", "_iterator", "_index_sampler"}


class AttributeChanges(NamedTuple):
    """The differences between attributes now and at the mark."""

    kept: Values  # new values of those that are plain
    lost: list[str]  # paths of those that are not

    def each(self) -> dict[str, Any]:
        """The new values, and the names of attributes that have been deleted, by path."""
        return {f"{path}.{name}": value for path, values in self.kept.items() if path != HELD for name, value in values.items()}


class Attributes:
    """The attributes of ``roots`` and of the objects that they are made of, compared with those at the last ``mark``.

    Looks into attributes, lists, tuples, mappings, partials and bound methods, six levels and two thousand objects beside the roots deep,
    into what a module's hooks are made of, and not into modules that are no roots.

    Args:
        roots: name -> object.
        leave: names of an object's attributes that are not to be kept.
        caches: whether large mappings and arrays that change are taken for caches, which are made again.
        shared: whether values in memory that processes share count too; in a loader's workers they are those of the main process.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        leave: Callable[[Any], frozenset[str]] = lambda _: frozenset(),
        caches: bool = True,
        shared: bool = True,
    ) -> None:
        self._roots, self._leave, self._caches, self._shared = dict(roots), leave, caches, shared
        self._left: dict[str, frozenset[str]] = {}
        self._watched: dict[str, tuple[int, dict[str, Any]]] = {}  # of modules: number of attributes; marks of those that count
        self._still: _StillModules | None = None
        self._objects: dict[str, Any] = {}
        self._namespaces: set[int] = set()  # ids of those among them that are dicts, whose entries are their attributes
        self._marked: dict[str, dict[str, Any]] = {}
        self._firsts: dict[str, dict[str, Identity]] = {}  # the objects of attributes that can change in place, when they were first seen
        self._elsewhere: dict[tuple[str, str], tuple[torch.Tensor, int]] = {}
        self._came: dict[str, tuple[weakref.ref[torch.Tensor], int, bool]] = {}  # tensors in place of None: version, whether they stayed so
        self.mark()

    def mark(self) -> None:
        """Makes the present values those to compare with from now on."""
        self._namespaces = set()
        self._objects = self._find(self._roots)
        self._left = {path: self._names_to_leave(item) for path, item in self._objects.items()}
        self._forget_looks()
        self._marked, self._elsewhere, self._firsts = {}, {}, {}
        for path, item in self._objects.items():
            self._identify(path, item)
            marked = self._marked[path] = {}
            for name, value in self._of(path, item):
                marked[name] = snapshot(value, not self._caches)
                if is_a(value, torch.Tensor) and value.device.type != "cpu":
                    self._elsewhere[path, name] = value, version_of(value)

    def follow(self, roots: Mapping[str, Any]) -> None:
        """Takes in roots that came later, or came in place of others: all plain attributes of new ones are changes."""
        self._roots.update(roots)
        for path, item in self._find(self._roots).items():
            if self._objects.get(path) is not item:
                self._objects[path], self._left[path] = item, self._names_to_leave(item)
                self._identify(path, item)
                self._forget_looks()
                self._marked.setdefault(path, {})

    def _identify(self, path: str, item: Any) -> None:
        self._firsts[path] = {name: Identity(value) for name, value in self._of(path, item) if is_changeable(value)}

    def _is_first(self, path: str, name: str, value: Any) -> bool:
        first = self._firsts.get(path, {}).get(name)
        return first is not None and first.is_of(value)

    def count_from(self, other: Attributes) -> None:
        """Counts among the changes what had changed since the mark of ``other``, of objects that are in both, when it is called."""
        paths = {id(item): path for path, item in self._objects.items()}
        for path, values in other.changes().kept.items():
            marked = self._marked.get(paths.get(id(other._objects.get(path)), ""), {})
            for name in values:
                marked.pop(name, None)
        self._forget_looks()

    def _forget_looks(self) -> None:
        self._watched, self._still = {}, None

    def changes(self) -> AttributeChanges:
        """The values that differ from the mark. Objects that are new since then are lost as a whole, unless `follow` took them in."""
        kept: Values = {}
        lost: list[str] = []
        still = self._still if self._still is not None and self._still.hold() else None
        equal: list[str] = []
        for path, item in self._objects.items():
            if still is not None and path in still.paths:
                continue
            now = self._fields(item)
            if id(item) in self._namespaces and len(now) > _MANY:
                lost.append(path)
                continue
            if gone := [name for name, then in self._marked[path].items() if name not in now]:
                kept.setdefault(_GONE, {})[path] = gone
            if not (differing := self._differing(path, item)) and not gone and path in self._watched:
                equal.append(path)
            for name, value, then in differing:
                if type(then) is Opaque and then.is_now(value) and not _is_iterator(value):
                    continue
                if is_a(value, torch.Tensor) and self._is_unwritten(path, name, value):
                    continue
                if id(value) in self._namespaces and type(then) is Opaque and then.is_of(value):
                    continue
                try:
                    copy = copy_of(value)
                except NotPlain:
                    is_other = not self._caches and type(then) is Opaque and then.is_other_code(value)
                    if is_other or not (self._is_root(value) or self._holds_roots(value, then) or _is_harmless(value, self._caches)):
                        lost.append(f"{path}.{name}")
                        if then is None and is_a(value, torch.Tensor):
                            self._see(lost[-1], value)
                    continue
                if self._marked[path] and not has_its_functions(copy, then):  # what came later has them when it comes again
                    lost.append(f"{path}.{name}")
                elif not is_same(copy, then):
                    kept.setdefault(path, {})[name] = copy
                    if self._is_first(path, name, value):
                        kept.setdefault(HELD, {}).setdefault(path, []).append(name)
        if still is None:
            self._still = _StillModules({path: (vars(self._objects[path]), self._watched[path][1]) for path in equal}, self._objects)
        return AttributeChanges(kept, lost)

    def not_plain(self) -> Iterator[tuple[str, Any]]:
        """Path and present value of the attributes that could not be kept at the mark, and of mappings, which may have grown."""
        for path, item in self._objects.items():
            for name, value in self._of(path, item):
                if type(value) in MAPPINGS or type(self._marked[path].get(name)) is Opaque:
                    yield f"{path}.{name}", value

    def lost(self) -> dict[str, str]:
        """The digests of those that have changed and are not plain, by path."""
        return self.digests(self.changes().lost)

    def digests(self, paths: Iterable[str]) -> dict[str, str]:
        """The digests of attributes, by path, whether they have changed or not."""
        found: dict[str, str] = {}
        for path in paths:
            owner, _, name = path.rpartition(".")
            item = self._objects.get(owner)
            found[path] = digest(self._fields(item).get(name) if item is not None else self._objects.get(path))
        return found

    def changed(self) -> list[Any]:
        """The objects of which attributes differ from the mark."""
        changes = self.changes()
        paths = {*changes.kept, *(path.rpartition(".")[0] for path in changes.lost)}
        return [item for path, item in self._objects.items() if path in paths]

    def is_made_once(self, path: str) -> bool:
        """Whether an attribute that `changes` has lost is a tensor that came in the place of None and has stayed so, as caches do."""
        return path in self._came and self._came[path][2]

    def _see(self, path: str, value: torch.Tensor) -> None:
        now = version_of(value)
        first, version, stayed = self._came.get(path, (weakref.ref(value), now, True))
        self._came[path] = first, version, stayed and first() is value and now == version

    def objects(self, below: tuple[str, ...]) -> list[Any]:
        """The objects that are watched and whose path begins with one of these."""
        return [item for path, item in self._objects.items() if path.startswith(below)]

    def give_back(
        self,
        values: Values,
        below: str | tuple[str, ...] = "",
        *,
        shared: bool = True,
        lost: bool = True,
        new: bool = False,
        but: Iterable[Any] = (),
        replaced: Collection[str] = (),
    ) -> None:
        """Sets all plain attributes to their values at the mark, but for ``values``. One that has its value stays the object it is.

        Args:
            values: as :class:`AttributeChanges` has them.
            below: only those of objects whose path begins with this, or with one of these.
            shared: whether values in memory that processes share are set too.
            lost: whether those are set too that have become what cannot be kept. Functions stay: the script, or Lightning, gives them in
                every process (``worker_init_fn``), and no snapshot says that they were there.
            new: whether plain attributes that have come since the mark are deleted, unless ``values`` has them, or ``shared`` keeps them.
            but: objects to leave as they are.
            replaced: paths of attributes that had become what cannot be kept by then; where they have become so here too, they stay.
        """
        left = set(map(id, but))
        items = {path: item for path, item in self._objects.items() if path.startswith(below) and id(item) not in left}
        held = {path: names for path, names in values.get(HELD, {}).items() if shared and path in items}
        for path, names in held.items():  # before all else, as what is to have another value may be the same object here
            _write(self._fields(items[path]), {name: values[path][name] for name in names if name in values.get(path, {})})
        for path, item in items.items():
            now, given = self._fields(item), values.get(path, {})
            for name in values.get(_GONE, {}).get(path, ()):
                _delete(now, name)
            for name, value in list(self._of(path, item)) if new else ():
                is_new = name not in self._marked[path] and name not in given and (shared or not is_shared(value))
                if is_new and type(snapshot(value)) is not Opaque:
                    _delete(now, name)
            for name, then in (self._marked[path] | given).items():
                current = now.get(name, _ABSENT)
                if name in values.get(_GONE, {}).get(path, ()) or (not shared and is_shared(current)):
                    continue
                if name not in given and (type(then) is Opaque or current is then):
                    continue
                present = snapshot(current)
                stays = not lost or is_a(current, _CODE) or f"{path}.{name}" in replaced
                is_other = shared and name in given and name not in held.get(path, ())
                is_replaced = is_other and self._is_first(path, name, current)  # others may go on to write into the first one
                if (is_same(present, then) and not is_replaced) or (name not in given and type(present) is Opaque and stays):
                    continue
                if not (is_shared(current) and wrote(current, copy_for(then, current))):
                    _set(now, name, copy_for(then, current))

    def exchange(self, values: Values, below: tuple[str, ...], *, new: bool) -> AttributeSwap:
        """Gives ``values`` back, but not in shared memory, until the result says otherwise; see `give_back`."""
        before = [(now, {**now}) for now in map(self._fields, self.objects(below))]
        self.give_back(values, below, shared=False, new=new)
        return AttributeSwap(
            [
                (now, name, here, there)
                for now, then in before
                for name in {**then, **now}
                if (here := then.get(name, _ABSENT)) is not (there := now.get(name, _ABSENT))
            ]
        )

    def _find(self, roots: Mapping[str, Any]) -> dict[str, Any]:
        """Objects with attributes of their own, by the path that leads to them."""
        found: dict[str, Any] = {}
        seen: set[int] = set()
        level = [(path, item, True) for path, item in roots.items()]
        for _ in range(_DEPTH):
            below: list[tuple[str, Any, bool]] = []
            for path, item, is_root in level:
                if id(item) in seen or type(item) in ATOMS:
                    continue
                if self._is_namespace(item):
                    self._namespaces.add(id(item))
                is_closed = _is_closed(item) and id(item) not in self._namespaces
                if not is_root and (len(seen) > _OBJECTS + len(roots) or is_closed):
                    continue
                seen.add(id(item))
                if id(item) in self._namespaces or _has_fields(item):
                    found[path] = item
                left = self._leave(item) if _is_foreign(type(item).__module__) else ()
                below += [(f"{path}.{name}", inner, False) for name, inner in _parts(item) if name not in left]
            level = below
        return found

    def _fields(self, item: Any) -> Fields:
        """The attributes of an object that is watched; of a dict with a class of its own, which is no cache, its entries.

        Whether that is one is decided when it is found, so that it stays one.
        """
        return item if id(item) in self._namespaces else fields_of(item)

    def _is_namespace(self, item: Any) -> bool:
        own = is_a(item, dict) and not self._caches and type(item) not in MAPPINGS
        return own and len(item) <= FEW and all(type(key) is str for key in item)

    def _is_unwritten(self, path: str, name: str, value: torch.Tensor) -> bool:
        """Whether ``value`` is the accelerator's tensor that was remembered under this name, and torch has counted no write to it since.

        Comparing its elements would make the training wait for the device. Writes through ``.data`` are not counted.
        """
        same, version = self._elsewhere.get((path, name), (None, -1))
        return value is same and version_of(value) == version

    def _is_root(self, value: Any) -> bool:
        """Whether a value is a module that is watched by others, or a wrapper around it."""
        if not is_a(value, nn.Module):
            return False
        roots = set(map(id, self._roots.values()))
        return any(id(module) in roots for module in value.modules())

    def _holds_roots(self, value: Any, then: Any) -> bool:
        """Whether a container is the one that it was, of the roots, or their parameters and buffers: an RNN has a list of its weights."""
        if type(then) is not Opaque or not then.is_of(value) or not entries(value):
            return False
        known = {id(tensor) for root in self._roots.values() if is_a(root, nn.Module) for tensor in _tensors(root)}
        return all(id(part) in known or self._is_root(part) for part in entries(value))

    def _names_to_leave(self, item: Any) -> frozenset[str]:
        names = self._leave(item) | (OF_LOADERS if is_a(item, DataLoader) else frozenset())
        return MODULE_INTERNALS if names == MODULE_INTERNALS else names

    def _of(self, path: str, item: Any) -> Iterator[tuple[str, Any]]:
        left = self._left[path]
        return (
            (name, value) for name, value in list(self._fields(item).items()) if name not in left and (self._shared or not is_shared(value))
        )

    def _differing(self, path: str, item: Any) -> list[tuple[str, Any, Any]]:
        """Name, present value and marked one of attributes that are not the very same object as at the mark.

        Modules are many, so names of theirs are looked up again only when one has come or gone.
        """
        now, marked = self._fields(item), self._marked[path]
        if self._left[path] is not MODULE_INTERNALS:  # these alone are always there
            return [(name, value, then) for name, value in self._of(path, item) if (then := marked.get(name, _ABSENT)) is not value]
        count, names = self._watched.get(path, (0, {}))
        if count != len(now) or not all(map(now.__contains__, names)):
            names = {name: marked.get(name, _ABSENT) for name, _ in self._of(path, item)}
            self._watched[path] = len(now), names
        return [(name, now[name], then) for name, then in names.items() if now[name] is not then]


class _StillModules:
    """Modules of which all attributes that count were the very objects of the mark. There may be hundreds: one look asks all of them.

    ``tables``: path -> attributes, and the marks of those that count. ``objects``: path -> module.
    """

    def __init__(self, tables: Mapping[str, tuple[dict[str, Any], dict[str, Any]]], objects: Mapping[str, Any]) -> None:
        self.paths = tables.keys()
        self._owners, self._tables = [objects[path] for path in tables], [now for now, _ in tables.values()]
        self._sizes = list(map(len, self._tables))
        self._places = [now for now, marks in tables.values() for _ in marks]
        self._names, self._marks = ([each for _, marks in tables.values() for each in part(marks)] for part in (dict.keys, dict.values))

    def hold(self) -> bool:
        """Whether they still are: no attribute has come or gone, and none is another object."""
        try:
            return (
                all(map(operator.is_, map(vars, self._owners), self._tables))
                and list(map(len, self._tables)) == self._sizes
                and all(map(operator.is_, map(operator.getitem, self._places, self._names), self._marks))
            )
        except KeyError:
            return False


_ABSENT = object()


def _set(fields: Fields, name: str, value: Any) -> None:
    """Sets an attribute, or the entry of a namespace, as ``dict`` does: what its class has made of that is not called."""
    if isinstance(fields, dict):
        dict.__setitem__(fields, name, value)
    else:
        fields[name] = value


def _write(fields: Fields, values: Mapping[str, Any]) -> None:
    """Writes values into the objects that attributes are now, as far as these can change in place to have them."""
    for name, then in values.items():
        current = fields.get(name)
        if is_changeable(current) and not is_same(snapshot(current), then):
            wrote(current, copy_for(then, current))


def _delete(fields: Fields, name: str) -> None:
    if isinstance(fields, dict):
        dict.pop(fields, name, None)
    else:
        fields.pop(name, None)


class AttributeSwap:
    """Attributes that have other values for a while; those that they had are kept as the very objects."""

    def __init__(self, differing: list[tuple[Fields, str, Any, Any]]) -> None:
        self._differing = differing  # fields, name, value before, value for the while

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Shows the values before, for a while in that while; what is set then is kept in their place."""
        for now, name, here, _ in self._differing:
            _put(now, name, here)
        try:
            yield
        finally:
            self._differing = [(now, name, now.get(name, _ABSENT), there) for now, name, _, there in self._differing]
            for now, name, _, there in self._differing:
                _put(now, name, there)

    def end(self) -> None:
        """Puts the values before back, but not in the place of what somebody else has set since."""
        for now, name, here, there in self._differing:
            if now.get(name, _ABSENT) is there:
                _put(now, name, here)
        self._differing = []


def _put(fields: Fields, name: str, value: Any) -> None:
    """Sets an attribute to what was found there, or deletes it where there was none."""
    if value is _ABSENT:
        _delete(fields, name)
    else:
        _set(fields, name, value)


def _has_fields(item: Any) -> bool:
    """Whether an object has attributes that a script may set: of Python's own classes with slots, fractions for example, none changes."""
    if is_a(item, (functools.partial, MethodType, Enum)) or fields_of(item) is NO_FIELDS:
        return False
    kind: type = type(item)
    return kind.__module__ not in sys.stdlib_module_names or not slots_of(kind)


def _is_closed(item: Any) -> bool:
    if is_a(item, GENERATORS):
        return is_of_library(type(item).__module__)
    return is_a(item, _CLOSED) or (_is_foreign(type(item).__module__) and not is_a(item, LRScheduler))


@functools.cache
def _is_foreign(module: str) -> bool:
    package, _, rest = module.partition(".")
    if package == "torch":
        return not rest.startswith(("amp.grad_scaler", "cuda.amp.grad_scaler", "utils.data"))
    return package in _FOREIGN


def _parts(item: Any) -> list[tuple[Any, Any]]:
    left = MODULE_INTERNALS if is_a(item, nn.Module) else OF_LOADERS if is_a(item, DataLoader) else ()
    parts = [(name, value) for name, value in parts_of(item) if name not in left]
    if is_a(item, nn.Module):  # its submodules are roots, if they are anything
        parts += hooks_of(item).items()
    return parts


def hooks_of(module: nn.Module) -> dict[str, Any]:
    """The hooks of a module and of its parameters, by the attribute and number of each."""
    tables = {kind: getattr(module, kind) for kind in HOOKS}
    for name, param in module._parameters.items():
        tables |= {f"{name}.{kind}": getattr(param, kind, None) for kind in _HOOKS_OF_TENSORS if param is not None}
    return {f"{kind}.{index}": hook for kind, table in tables.items() if table for index, hook in enumerate(table.values())}


def _tensors(module: nn.Module) -> tuple[Any, ...]:
    """The parameters and buffers that a module itself has registered."""
    return (*module._parameters.values(), *module._buffers.values())


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__") and not _is_closed(value)


def _is_harmless(value: Any, caches: bool) -> bool:
    """Whether a new value of this kind is taken to be made again when it is needed: an open file, a function, a large mapping.

    A large mapping that grows cannot be told from a cache by looking at it, and in data caches are the rule. In modules and callbacks
    it is rather an average of the weights, or what was seen of each sample. Handles of hooks hold no state of a training.
    """
    if is_a(value, (list, tuple)) and all(is_a(part, RemovableHandle) for part in value):
        return True
    if is_a(value, GENERATORS) or _is_iterator(value) or is_a(value, (torch.Tensor, np.ndarray, *SEQUENCES)):
        return False
    if not caches and (is_a(value, nn.Module) or not all(is_a(part, (*_CODE, type, NoneType)) for part in entries(value))):
        return False
    return _is_closed(value) or is_a(value, (dict, *_CODE)) or (caches and not _has_fields(value))


# ZeRO 3 notes in the last one, in a forward pass, which parameters of other modules that has used.
MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"} | {"_external_params"}
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
