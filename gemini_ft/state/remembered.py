"""Plain attributes of Python objects that training changes as it goes: found, kept with a snapshot, and given back.

Samplers count epochs, datasets remember the previous sample, modules hold a dropout rate that a hook has set. None of it
is in a state dict. An attribute is *kept* if it is plain and small: numbers, texts, tensors and arrays of at most 256 KiB,
and containers of at most 64 of them. One that has changed and is not plain is *lost*, and named.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import operator
import random
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from enum import Enum
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from gemini_ft.state.attributes import slots_of
from gemini_ft.state.tensors import version_of

Values = dict[str, dict[str, Any]]  # path of an object -> attribute -> value

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_SEQUENCES = (list, tuple, set, frozenset, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_FEW = 64  # entries of a container that is kept
SMALL = 2**18  # bytes of a value that is kept
_SAMPLED = 4096  # elements of a larger array that are looked at, or up to twice as many
_DEPTH, _OBJECTS = 6, 2000
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)  # `randomness` keeps their states
_Number = (Synchronized, ctypes._SimpleCData)  # of multiprocessing.Value and RawValue
_Numbers = (SynchronizedArray, ctypes.Array)
_CODE = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
_CLOSED = (str, bytes, type, ModuleType, FunctionType, BuiltinFunctionType, torch.Tensor, np.ndarray, nn.Module, *_GENERATORS)
# Objects of these packages have ways of their own to keep their state, or none worth keeping (open files, loggers, locks).
_FOREIGN = frozenset(
    {"PIL", "_io", "_thread", "deepspeed", "fsspec", "gemini_ft", "h5py", "io", "lightning", "lightning_fabric", "lmdb", "logging"}
    | {"mmap", "multiprocessing", "numpy", "pathlib", "pyarrow", "pytorch_lightning", "re", "socket", "sqlite3", "tarfile"}
    | {"threading", "torchmetrics", "weakref", "zarr", "zipfile"}
)

# Attributes of a DataLoader that are no settings of it: the iteration under way, with its worker processes, and who follows that.
OF_LOADERS = frozenset({"_gemini", "_iterator", "_index_sampler"})


class AttributeChanges(NamedTuple):
    """The differences between attributes now and at the mark.

    Attributes:
        kept: new values of those that are plain.
        lost: paths of those that are not.
    """

    kept: Values
    lost: list[str]


class _Opaque(NamedTuple):
    """A value that is not plain, as far as a change of it shows. What can be referred to weakly is not kept alive."""

    value: Callable[[], Any]
    size: int
    depth: int  # what counts of its elements, see `_size`

    def is_now(self, value: Any) -> bool:
        mine = self.value()
        return mine is not None and value is mine and _size(value, self.depth) == self.size


class _NotPlain(Exception):
    """The value cannot be kept."""


class Attributes:
    """The attributes of ``roots`` and of the objects that they are made of, compared with those at the last ``mark``.

    Looks into attributes, lists, tuples, mappings, partials and bound methods, six levels and two thousand objects beside the roots deep,
    into what a module's hooks are made of, and not into modules that are no roots.

    Args:
        roots: name -> object.
        leave: names of an object's attributes that are not to be kept.
        caches: whether large mappings that change are taken for caches, which are made again.
        shared: whether values in memory that processes share count too; in a loader's workers they are those of the main process.
        known: whether a value is looked at elsewhere.
        closely: whether writes through ``tensor.data`` are noticed in whatever cannot be copied.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        leave: Callable[[Any], frozenset[str]] = lambda _: frozenset(),
        caches: bool = True,
        shared: bool = True,
        known: Callable[[Any], bool] = lambda _: False,
        closely: bool = False,
    ) -> None:
        self._depth = 2 if closely else 0 if caches else 1
        self._roots, self._leave, self._caches, self._shared, self._known = dict(roots), leave, caches, shared, known
        self._left: dict[str, frozenset[str]] = {}
        self._watched: dict[str, tuple[int, dict[str, Any]]] = {}  # of modules: number of attributes; marks of those that count
        self._still: _StillModules | None = None
        self._objects: dict[str, Any] = {}
        self._marked: dict[str, dict[str, Any]] = {}
        self._elsewhere: dict[tuple[str, str], tuple[torch.Tensor, int]] = {}
        self._came: dict[str, tuple[weakref.ref[torch.Tensor], int, bool]] = {}  # tensors in place of None: version, whether they stayed so
        self.mark()

    def mark(self) -> None:
        """Makes the present values those to compare with from now on."""
        self._objects = self._find(self._roots)
        self._left = {path: self._names_to_leave(item) for path, item in self._objects.items()}
        self._forget_looks()
        self._marked, self._elsewhere = {}, {}
        for path, item in self._objects.items():
            marked = self._marked[path] = {}
            for name, value in self._of(path, item):
                marked[name] = _snapshot(value, self._depth)
                if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                    self._elsewhere[path, name] = value, version_of(value)

    def follow(self, roots: Mapping[str, Any]) -> None:
        """Takes in roots that came later, or came in place of others: all plain attributes of new ones are changes."""
        self._roots.update(roots)
        for path, item in self._find(self._roots).items():
            if self._objects.get(path) is not item:
                self._objects[path], self._left[path] = item, self._names_to_leave(item)
                self._forget_looks()
                self._marked.setdefault(path, {})

    def count_from(self, other: Attributes) -> None:
        """Counts among the changes what had changed since the mark of ``other``, of objects that are in both, when it is called."""
        paths = {id(item): path for path, item in self._objects.items()}
        for path, values in other.changes().kept.items():
            marked = self._marked.get(paths.get(id(other._objects[path]), ""), {})
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
            if not (differing := self._differing(path, item)) and path in self._watched:
                equal.append(path)
            for name, value, then in differing:
                if type(then) is _Opaque and then.is_now(value) and not _is_iterator(value):
                    continue
                if isinstance(value, torch.Tensor) and self._is_unwritten(path, name, value):
                    continue
                try:
                    copy = _copy(value)
                except _NotPlain:
                    if not (self._is_root(value) or self._holds_roots(value, then) or _is_harmless(value, self._caches)):
                        lost.append(f"{path}.{name}")
                        if then is None and isinstance(value, torch.Tensor):
                            self._see(lost[-1], value)
                    continue
                if not _is_same(copy, then):
                    kept.setdefault(path, {})[name] = copy
        if still is None:
            self._still = _StillModules({path: (vars(self._objects[path]), self._watched[path][1]) for path in equal}, self._objects)
        return AttributeChanges(kept, lost)

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
        self, values: Values, below: str | tuple[str, ...] = "", *, shared: bool = True, lost: bool = True, but: Iterable[Any] = ()
    ) -> None:
        """Sets all plain attributes to their values at the mark, but for ``values``. One that has its value stays the object it is.

        Args:
            values: as :class:`AttributeChanges` has them.
            below: only those of objects whose path begins with this, or with one of these.
            shared: whether values in memory that processes share are set too.
            lost: whether those are set too that have become what cannot be kept. Functions stay: the script, or Lightning, gives them in
                every process (``worker_init_fn``), and no snapshot says that they were there.
            but: objects to leave as they are.
        """
        left = set(map(id, but))
        for path, item in self._objects.items():
            if not path.startswith(below) or id(item) in left:
                continue
            now, given = self._fields(item), values.get(path, {})
            for name, then in (self._marked[path] | given).items():
                current = now.get(name, _ABSENT)
                if (name not in given and (type(then) is _Opaque or current is then)) or (not shared and _is_shared(current)):
                    continue
                present = _snapshot(current)
                if _is_same(present, then) or (name not in given and type(present) is _Opaque and (not lost or isinstance(current, _CODE))):
                    continue
                if not (_is_shared(current) and _wrote(current, then)):
                    now[name] = _copy(then)

    def _find(self, roots: Mapping[str, Any]) -> dict[str, Any]:
        """Objects with attributes of their own, by the path that leads to them."""
        found: dict[str, Any] = {}
        seen: set[int] = set()
        level = [(path, item, True) for path, item in roots.items()]
        for _ in range(_DEPTH):
            below: list[tuple[str, Any, bool]] = []
            for path, item, is_root in level:
                if id(item) in seen or type(item) in _ATOMS:
                    continue
                is_closed = (_is_closed(item) and not self._is_namespace(item)) or self._known(item)
                if not is_root and (len(seen) > _OBJECTS + len(roots) or is_closed):
                    continue
                seen.add(id(item))
                if self._fields(item) is not _NONE and not isinstance(item, (functools.partial, MethodType)):
                    found[path] = item
                below += [(f"{path}.{name}", inner, False) for name, inner in _parts(item)]
            level = below
        return found

    def _fields(self, item: Any) -> MutableMapping[str, Any]:
        """The attributes of an object, to read and to write; of a dict with a class of its own, which is no cache, its few entries."""
        if self._is_namespace(item):
            return item  # type: ignore[no-any-return]
        return vars(item) if hasattr(item, "__dict__") else _Slots(item) if _slots_of(item) else _NONE

    def _is_namespace(self, item: Any) -> bool:
        own = isinstance(item, dict) and not self._caches and type(item) not in _MAPPINGS
        return own and len(item) <= _FEW and all(type(key) is str for key in item)

    def _is_unwritten(self, path: str, name: str, value: torch.Tensor) -> bool:
        """Whether ``value`` is the accelerator's tensor that was remembered under this name, and torch has counted no write to it since.

        Comparing its elements would make the training wait for the device. Writes through ``.data`` are not counted.
        """
        same, version = self._elsewhere.get((path, name), (None, -1))
        return value is same and version_of(value) == version

    def _is_root(self, value: Any) -> bool:
        """Whether a value is a module that is watched by others, or a wrapper around it."""
        if not isinstance(value, nn.Module):
            return False
        roots = set(map(id, self._roots.values()))
        return any(id(module) in roots for module in value.modules())

    def _holds_roots(self, value: Any, then: Any) -> bool:
        """Whether a container is the one that it was, of the roots, or their parameters and buffers: an RNN has a list of its weights."""
        if type(then) is not _Opaque or then.value() is not value or not _values(value):
            return False
        known = {id(tensor) for root in self._roots.values() if isinstance(root, nn.Module) for tensor in _tensors(root)}
        return all(id(part) in known or self._is_root(part) for part in _values(value))

    def _names_to_leave(self, item: Any) -> frozenset[str]:
        names = self._leave(item) | (OF_LOADERS if isinstance(item, DataLoader) else frozenset())
        return MODULE_INTERNALS if names == MODULE_INTERNALS else names

    def _of(self, path: str, item: Any) -> Iterator[tuple[str, Any]]:
        left = self._left[path]
        return (
            (name, value)
            for name, value in list(self._fields(item).items())
            if name not in left and (self._shared or not _is_shared(value)) and not self._known(value)
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

    Args:
        tables: path -> attributes, and the marks of those that count.
        objects: path -> module.
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
_NONE: dict[str, Any] = {}


class _Slots(MutableMapping[str, Any]):
    """The attributes of an object that has them in slots."""

    def __init__(self, item: Any) -> None:
        self._item = item

    def __getitem__(self, name: str) -> Any:
        if name in _slots_of(self._item) and hasattr(self._item, name):
            return getattr(self._item, name)
        raise KeyError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._item, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._item, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in _slots_of(self._item) if hasattr(self._item, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _slots_of(item: Any) -> tuple[str, ...]:
    kind: type = type(item)
    return _slots(kind)


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    """The names of the slots that a class of the script's has."""
    bases = () if _is_foreign(kind.__module__) or kind.__module__ in sys.stdlib_module_names else kind.__mro__
    return tuple(name for base in bases for name in slots_of(base) if not name.startswith("__"))


def _is_closed(item: Any) -> bool:
    return isinstance(item, _CLOSED) or _is_foreign(type(item).__module__)


@functools.cache
def _is_foreign(module: str) -> bool:
    package, _, rest = module.partition(".")
    if package == "torch":
        return not rest.startswith("utils.data")
    return package in _FOREIGN


def _parts(item: Any) -> list[tuple[Any, Any]]:
    """Parts of ``item``. The first entries of a collection stand for all."""
    if isinstance(item, functools.partial):
        return [*enumerate(item.args), *item.keywords.items(), ("func", item.func)]
    if isinstance(item, MethodType):  # for example a collate function of the dataset
        return [("self", item.__self__)]
    if isinstance(item, dict):
        return list(itertools.islice(item.items(), _FEW))
    if isinstance(item, (list, tuple)):
        return list(enumerate(item[:_FEW]))
    inner = list(getattr(item, "__dict__", {}).items())
    if isinstance(item, nn.Module):  # its submodules are roots, if they are anything
        hooks = [(f"{kind}.{index}", hook) for kind in HOOKS for index, hook in enumerate(getattr(item, kind).values())]
        return [(name, value) for name, value in inner if name not in MODULE_INTERNALS] + hooks
    if isinstance(item, DataLoader):
        return [(name, value) for name, value in inner if name not in OF_LOADERS]
    return inner


def _snapshot(value: Any, depth: int = 0) -> Any:
    """A copy of a plain value; numbers and texts are their own. Else an :class:`_Opaque` of it."""
    try:
        return _copy(value)
    except _NotPlain:
        try:
            return _Opaque(weakref.ref(value), size=_size(value, depth), depth=depth)
        except TypeError:
            return _Opaque(lambda: value, size=_size(value, depth), depth=depth)


def _copy(value: Any) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        if kind in (str, bytes) and len(value) > SMALL:
            raise _NotPlain
        return value
    if kind is torch.Tensor:
        if value.layout is not torch.strided or value.is_meta or value.numel() * value.element_size() > SMALL:
            raise _NotPlain
        return value.detach().clone()
    if kind is np.ndarray:
        if value.dtype.hasobject or value.nbytes > SMALL:
            raise _NotPlain
        return value.copy()
    if kind in _SEQUENCES and len(value) <= _FEW:
        parts = [_copy(part) for part in value]
        if kind is tuple and all(map(operator.is_, parts, value)):
            return value  # of values that never change: found to be the same at once
        return deque(parts, value.maxlen) if kind is deque else kind(parts)
    if kind in _MAPPINGS and len(value) <= _FEW:
        pairs = {_copy(key): _copy(part) for key, part in value.items()}
        made: Any = kind
        return made(value.default_factory, pairs) if kind is defaultdict else made(pairs)
    if isinstance(value, (np.generic, Enum)) and not isinstance(value, np.void):
        return value
    if isinstance(value, _Number):
        return _copy(value.value)
    if isinstance(value, _Numbers):
        return _copy(value[:])
    raise _NotPlain


def _is_shared(value: Any) -> bool:
    """Whether a value lies in memory that worker processes see too. A tensor that is a part of another one may not stay so."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu" and value.untyped_storage().is_shared() and value.untyped_storage().nbytes() == value.nbytes
    return isinstance(value, (*_Number, *_Numbers))


def _wrote(shared: Any, value: Any) -> bool:
    """Writes ``value`` where processes share it, if it fits."""
    if isinstance(shared, torch.Tensor):
        if not isinstance(value, torch.Tensor) or (shared.shape, shared.dtype) != (value.shape, value.dtype):
            return False
        with torch.no_grad():
            shared.copy_(value)
    elif isinstance(shared, _Number):
        shared.value = value
    elif len(shared) != len(value):
        return False
    else:
        shared[:] = value
    return True


def _is_same(value: Any, then: Any) -> bool:
    if type(value) is not type(then):
        return False
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.device) == (then.shape, then.dtype, then.device) and torch.equal(value, then)
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype) == (then.shape, then.dtype) and value.tobytes() == then.tobytes()
    if isinstance(value, (list, tuple, deque)):
        return len(value) == len(then) and all(map(_is_same, value, then))
    if isinstance(value, dict):
        return list(value) == list(then) and all(_is_same(part, then[key]) for key, part in value.items())
    if isinstance(value, float):
        return value == then and math.copysign(1, value) == math.copysign(1, then)
    return bool(value == then)


def _size(value: Any, depth: int = 0) -> int:
    """A mark that shows whether a value that is no plain one was changed in place.

    Args:
        value: anything.
        depth: 1: elements of arrays count, which data may fill as a cache; 2: so do those that are written through ``tensor.data``.
    """
    if isinstance(value, torch.Tensor):
        return hash((version_of(value), value[(0,) * value.ndim].item())) if depth > 1 and _is_plain(value) else version_of(value)
    if isinstance(value, nn.Module):
        updates = _updates(value) if depth > 1 else 0
        return updates + sum(_size(tensor, depth) for tensor in itertools.chain(value.parameters(), value.buffers()))
    if depth and type(value) is np.ndarray and not value.dtype.hasobject:  # np.memmap is another type: no file is read
        return hash(value.flat[:: max(1, value.size // _SAMPLED)].tobytes())  # no copy of all of it, however its elements lie
    parts = itertools.islice(_values(value), _SAMPLED)  # more are data
    written = sum(_size(part, depth) + _updates(part) for part in parts if isinstance(part, (torch.Tensor, nn.Module)))
    return written + len(_values(value))


def _updates(part: Any) -> int:
    """How often a metric of torchmetrics was updated; 0 for anything else."""
    return int(getattr(part, "__dict__", {}).get("_update_count", 0))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() > 0 and not hasattr(tensor, "placements")


def _values(value: Any) -> Collection[Any]:
    """The values of a container."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set, deque)) else ()


def _tensors(module: nn.Module) -> Iterator[Any]:
    """The parameters and buffers that a module itself has registered."""
    return itertools.chain(module._parameters.values(), module._buffers.values())


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__") and not _is_closed(value)


def _is_harmless(value: Any, caches: bool) -> bool:
    """Whether a new value of this kind is taken to be made again when it is needed: an open file, a function, a large mapping.

    A large mapping that grows cannot be told from a cache by looking at it, and in data caches are the rule. In modules and callbacks
    it is rather an average of the weights, or what was seen of each sample.
    """
    if isinstance(value, _GENERATORS) or _is_iterator(value) or isinstance(value, (torch.Tensor, np.ndarray, *_SEQUENCES)):
        return False
    if not caches and (isinstance(value, nn.Module) or not all(isinstance(part, (*_CODE, type, NoneType)) for part in _values(value))):
        return False
    return _is_closed(value) or isinstance(value, (dict, *_CODE)) or not (hasattr(value, "__dict__") or _slots_of(value))


# ZeRO 3 notes in the last one, in a forward pass, which parameters of other modules that has used.
MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"} | {"_external_params"}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
