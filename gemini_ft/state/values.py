"""Copies, compares and writes the small plain values that snapshots can have, and marks all other values so that a change shows."""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import mmap
import operator
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import nn

from gemini_ft.state import codec
from gemini_ft.state.fields import FEW, NO_FIELDS, fields_of, is_a
from gemini_ft.state.tensors import version_of

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
SEQUENCES = (list, tuple, set, frozenset, deque)
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_CHANGEABLE = (list, set, deque, *MAPPINGS, bytearray, np.ndarray, torch.Tensor)  # in place
SMALL = 2**18  # bytes of a value that is kept
_WHOLE = 2**20  # bytes of an array of which all elements are looked at
_MANY = 1000  # objects in a container of which the attributes are looked at
_SAMPLED = 4096  # of a larger array at least so many elements are looked at, and less than twice as many
_Number = (Synchronized, ctypes._SimpleCData)  # of multiprocessing.Value and RawValue
_Numbers = (SynchronizedArray, ctypes.Array)


class NotPlain(Exception):
    """The value cannot be kept."""


class Identity:
    """Knows the very object again, and does not keep it alive."""

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        self._reference: weakref.ref[Any] | None
        try:
            self._reference = weakref.ref(value)
        except TypeError:  # lists and dicts: another one may have the id of one that is gone
            self._reference = None

    def is_of(self, value: Any) -> bool:
        """Whether ``value`` is the object."""
        return id(value) == self._id if self._reference is None else self._reference() is value


class Opaque(Identity):
    """A mark of a value that is not plain, by which a change of it shows, and of lists and dicts that another one is there.

    ``closely``: whether to look into containers and arrays, too; data may fill those as a cache.
    """

    def __init__(self, value: Any, closely: bool) -> None:
        super().__init__(value)
        self._mark, self._closely, self._code = _mark(value, closely), closely, code_of(value)

    def is_other_code(self, value: Any) -> bool:
        """Whether this is the mark of a function, and ``value`` is one that does something else."""
        return self._code is not None and code_of(value) not in (None, self._code)

    def is_now(self, value: Any) -> bool:
        """Whether this is the mark of the very object, and the object shows no change."""
        return self.is_of(value) and _mark(value, self._closely) == self._mark


def code_of(value: Any) -> Any:
    """Tells functions apart, methods and partials too, by what they do; None: the value is none."""
    if is_a(value, functools.partial):
        return code_of(value.func), *(part for part in (*value.args, *value.keywords.values()) if type(part) in ATOMS)
    if is_a(value, MethodType):
        return code_of(value.__func__)
    if is_a(value, FunctionType):
        return value.__code__, value.__qualname__
    return value.__qualname__ if is_a(value, BuiltinFunctionType) else None


def snapshot(value: Any, closely: bool = False) -> Any:
    """Copies a plain value; of any other value returns an `Opaque`."""
    try:
        return copy_of(value)
    except NotPlain:
        return Opaque(value, closely)


def copy_of(value: Any) -> Any:
    """Copies a plain value; one that cannot change is returned itself.

    Raises NotPlain: it is not plain, too large or too deep, or contains itself.
    """
    try:
        return _copy_of(value)
    except RecursionError:
        raise NotPlain from None


def _copy_of(value: Any) -> Any:
    kind = type(value)
    if kind in ATOMS:
        if kind in (str, bytes) and len(value) > SMALL:
            raise NotPlain
        return value
    if kind is torch.Tensor:
        if (
            value.layout is not torch.strided
            or value.is_meta
            or value.is_nested
            or value.is_quantized
            or value.numel() * value.element_size() > SMALL
        ):
            raise NotPlain
        return value.detach().clone()
    if kind in (np.ndarray, bytearray):
        if (kind is bytearray and len(value) > SMALL) or (kind is np.ndarray and (value.dtype.hasobject or value.nbytes > SMALL)):
            raise NotPlain
        return value.copy()
    if kind in SEQUENCES and len(value) <= FEW:
        parts = [_copy_of(part) for part in value]
        if kind is tuple and all(map(operator.is_, parts, value)):
            return value  # its parts never change: comparing it with itself is quick
        return deque(parts, value.maxlen) if kind is deque else kind(parts)
    if kind in MAPPINGS and len(value) <= FEW:
        if any(is_a(key, torch.Tensor | np.ndarray) for key in value):  # which are equal to none, or to many
            raise NotPlain
        pairs = {_copy_of(key): _copy_of(part) for key, part in value.items()}
        made: Any = kind
        if kind is defaultdict:
            return made(value.default_factory if codec.is_named(value.default_factory) else codec.lost_factory, pairs)
        return made(pairs)
    if is_a(value, _Number):
        return _copy_of(value.value)
    if is_a(value, _Numbers):
        return _copy_of(value[:])
    if kind not in (*SEQUENCES, *MAPPINGS) and not is_a(value, torch.Tensor | np.void) and codec.is_exact(value):
        return value  # dates, paths, ranges, dtypes, devices, enums that can be imported, numbers of numpy
    raise NotPlain


def copy_for(then: Any, current: Any) -> Any:
    """Copies a plain value that is to take the place of ``current``, which gives defaultdicts the functions that make their entries."""
    copy = copy_of(then)
    for part, there in _without_functions(copy, current):
        if type(there) is defaultdict:
            part.default_factory = there.default_factory
    return copy


def has_its_functions(value: Any, then: Any) -> bool:
    """Whether a plain value's defaultdicts find their functions in a process in which it is as ``then``; see `copy_for`."""
    return all(type(there) is defaultdict for _, there in _without_functions(value, then))


def _without_functions(value: Any, current: Any) -> Iterator[tuple[defaultdict[Any, Any], Any]]:
    """The defaultdicts in a plain value that have lost their functions, each with its counterpart in ``current``; None: it has none."""
    if type(value) is defaultdict and value.default_factory is codec.lost_factory:
        yield value, current
    if type(value) in SEQUENCES:
        parts, counterparts = enumerate(value), dict(enumerate(current)) if type(current) in (list, tuple, deque) else {}
    elif type(value) in MAPPINGS:
        parts, counterparts = value.items(), current if is_a(current, dict) else {}
    else:
        return
    for key, part in parts:
        there = counterparts.get(key)
        if type(part) is defaultdict and key not in counterparts and type(current) is defaultdict and current.default_factory is not None:
            if current.default_factory is codec.lost_factory:
                continue  # where it is at work, it makes entries with functions
            there = current.default_factory()
        yield from _without_functions(part, there)


def is_shared(value: Any) -> bool:
    """Whether a value lies in memory that worker processes see too. A tensor that is a part of another one may not stay so."""
    if is_a(value, torch.Tensor):
        storage = value.untyped_storage() if value.device.type == "cpu" and value.layout is torch.strided else None
        return storage is not None and storage.is_shared() and bool(storage.nbytes() == value.nbytes)
    return is_a(value, (*_Number, *_Numbers))


def is_changeable(value: Any) -> bool:
    """Whether a plain value can change and stay the object that it is, so that others that hold it see the change."""
    return type(value) in _CHANGEABLE


def wrote(held: Any, value: Any) -> bool:
    """Writes ``value`` into an object that others hold as well, or into memory that processes share; False: it does not fit."""
    if is_changeable(held) and type(held) is not type(value):
        return False
    if type(held) in (list, deque):
        if type(held) is deque and held.maxlen != value.maxlen:
            return False
        held.clear()
        held.extend(value)
    elif type(held) in (set, *MAPPINGS):
        held.clear()
        held.update(value)
    elif isinstance(held, torch.Tensor):
        if not isinstance(value, torch.Tensor) or (held.shape, held.dtype, held.device) != (value.shape, value.dtype, value.device):
            return False
        if held.is_inference() or 0 in held.stride():
            return False
        with torch.no_grad():
            held.copy_(value)
    elif type(held) is np.ndarray:
        if (held.shape, held.dtype) != (value.shape, value.dtype) or not held.flags.writeable:
            return False
        held[...] = value
    elif isinstance(held, _Number):
        held.value = value
    elif len(held) != len(value):
        return False
    else:
        held[:] = value
    return True


def is_same(value: Any, then: Any) -> bool:
    """Whether two plain values are the same, bit for bit."""
    if value is then:
        return True
    if type(value) is not type(then):
        return False
    if isinstance(value, torch.Tensor):
        is_alike = (value.shape, value.dtype, value.device) == (then.shape, then.dtype, then.device)
        return is_alike and torch.equal(_bits(value), _bits(then))
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype) == (then.shape, then.dtype) and value.tobytes() == then.tobytes()
    if isinstance(value, (list, tuple, deque)):
        return len(value) == len(then) and all(map(is_same, value, then))
    if isinstance(value, dict):
        return list(value) == list(then) and all(is_same(part, then[key]) for key, part in value.items())
    if isinstance(value, float | complex):
        return np.asarray(value).tobytes() == np.asarray(then).tobytes()
    return value.tobytes() == then.tobytes() if isinstance(value, np.generic) else bool(value == then)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes: a NaN is equal to itself."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _mark(value: Any, closely: bool, most: int = _SAMPLED) -> int:
    """A number that differs after a value that is not plain was changed in place.

    Of tensors it looks at versions and, if ``closely``, at one element, as writes to ``tensor.data`` count no version; at all elements of
    one up to 1 MiB that is an attribute itself. Arrays are looked at likewise, those of objects by their first numbers and texts.

    ``closely``: as in `Opaque`. ``most``: the most entries of a container that are looked at.

    One that cannot be looked at (a lazy module, a nested tensor) shows no change.
    """
    try:
        return _marked(value, closely, most)
    except Exception:  # an object may raise anything
        return 0


def _marked(value: Any, closely: bool, most: int) -> int:
    if is_a(value, torch.Tensor):
        is_seen = closely and value.device.type == "cpu" and value.layout is torch.strided and value.numel() > 0
        if not is_seen or hasattr(value, "placements"):
            return hash(version_of(value))
        is_whole = most == _SAMPLED and not (value.is_nested or value.is_quantized) and value.nbytes <= _WHOLE
        seen = _marked_array(_bits(value).numpy(), most) if is_whole else repr(value[(0,) * value.ndim].item())
        return hash((version_of(value), seen))
    if is_a(value, nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        updates = getattr(value, "_update_count", 0) if closely else 0  # of a metric of torchmetrics
        return int(updates) + sum(map(version_of, tensors)) + sum(_mark(tensor, closely, most // FEW) for tensor in tensors[:1])
    if closely and is_a(value, (bytearray, array.array)):
        return hash(bytes(value))
    if closely and is_a(value, np.ndarray):
        mask = _marked_array(np.ma.getmaskarray(value), most) if is_a(value, np.ma.MaskedArray) else 0
        return hash((_marked_array(np.asarray(value), most), mask))
    parts = list(itertools.islice(entries(value), most))  # more are data
    count = len(entries(value)) + sum(_mark(part, closely, most // FEW) for part in parts if is_a(part, (torch.Tensor, nn.Module)))
    if not closely:
        return count
    inner = [_mark(part, closely, most // FEW) for part in parts if is_a(part, (*SEQUENCES, dict, np.ndarray))] if most > 1 else []
    objects = [fields_of(part) for part in parts[:_MANY] if not is_a(part, torch.Tensor | nn.Module)] if len(parts) > FEW else []
    inner += [hash(tuple(each for each in own.values() if type(each) in ATOMS)) for own in objects if own is not NO_FIELDS]
    return hash((count, *inner, *(part for part in parts if type(part) in ATOMS)))


def _marked_array(array: Any, most: int) -> int:
    if array.dtype.hasobject:
        return hash(tuple(part for part in array.flat[:most] if type(part) in ATOMS))
    array = array.T if array.flags.f_contiguous else array
    is_whole = most == _SAMPLED and array.nbytes <= _WHOLE and not _is_mapped(array)
    seen: Any = np.ascontiguousarray(array) if is_whole else _sampled(array)
    return xxhash.xxh3_64_intdigest(seen)


class Numbered(NamedTuple):
    """Says of a mapping that numbers its keys in their order that it has outgrown what can be kept."""

    entries: int  # how many it has, and at least as many as can be kept


def sample_of(value: Any) -> Any:
    """Some elements of a large list or array, by which it shows that they were exchanged or replaced; None of other values.

    Numbers and texts stand for themselves, and other objects for which they are. Of a mapping that numbers its keys in their order, as a
    vocabulary does and a cache does not, the result is `Numbered`.
    """
    if type(value) in (np.ndarray, np.memmap) and value.dtype.kind in "biufc" and value.size:
        return _sampled(value)
    if type(value) is list:
        parts = value[:: max(1, len(value) // FEW)]
    elif type(value) is deque or type(value) in MAPPINGS:
        ordered = value if type(value) is deque else value.values()
        try:
            parts = [*itertools.islice(ordered, FEW), *itertools.islice(reversed(ordered), FEW)]
        except RuntimeError:  # another thread changes it
            return None
        if type(value) in MAPPINGS:
            count, most = len(parts) // 2, len(value)
            is_numbered = all(type(part) is int for part in parts) and parts == [*range(count), *range(most - 1, most - 1 - count, -1)]
            return Numbered(max(most, FEW)) if is_numbered else None
    else:
        return None
    return [(type(part), part if type(part) in ATOMS else id(part)) for part in parts]


def _sampled(array: Any, most: int = _SAMPLED) -> Any:
    """Some elements of an array, at least ``most`` and less than twice as many.

    Of a file that is mapped they are few, as each may lie on a page of its own, and none if it is only read.
    """
    if _is_mapped(array):
        most = min(FEW, most) if array.flags.writeable else 0
    return np.array(array.flat[: array.size if most else 0 : max(1, array.size // max(1, most))])  # the sample alone, whatever the strides


def _is_mapped(array: Any) -> bool:
    """Whether an array lies in a file that is mapped."""
    while is_a(array, np.ndarray):
        array = array.base
    return is_a(array, (mmap.mmap, memoryview))


def digest(value: Any) -> str:
    """A digest of the sizes and of some elements of a value that cannot be kept: two processes that make the same find the same one."""
    return xxhash.xxh3_64_hexdigest(repr(_outline(value, _SAMPLED)).encode(errors="surrogatepass"))


def _outline(value: Any, most: int) -> Any:
    """The sizes and some elements of a value: of each level at most a few times ``most``, which its parts share alike."""
    if type(value) in ATOMS or not most:
        return value if type(value) in ATOMS else type(value).__qualname__
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized:
        value = _bits(value).numpy()
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return value.shape, _sampled(value, most).tobytes()
    few = min(FEW, most // 2 + 1)
    if type(value) is deque:
        parts = [*itertools.islice(value, few), *itertools.islice(reversed(value), few)] if len(value) > few else value
    elif type(value) in (list, tuple):
        parts = [*value[:: max(1, len(value) // few)], *value[-few:]] if len(value) > few else value
    elif type(value) in MAPPINGS:
        parts = [*itertools.islice(value.items(), few)]
    else:
        return type(value).__qualname__, len(value) if is_a(value, SEQUENCES) else 0
    return len(value), [_outline(part, most // (len(parts) + 1)) for part in parts]


def fills(then: Any, now: Any) -> bool:
    """Whether two samples differ only where there was nothing (None, 0, "", -1, NaN) or something of another type, as of a cache."""
    if type(then) is type(now) is Numbered:
        return bool(then == now)
    if type(then) is not type(now) or len(then) != len(now):
        return True  # another object, which is lost as such
    if isinstance(then, np.ndarray):
        return not np.any((then != now) & (then != 0) & (then != -1) & (then == then))
    pairs = zip(then, now, strict=True)
    return all(old == new or old[0] is not new[0] or old[1] in (None, 0, "", -1) or old[1] != old[1] for old, new in pairs)


def entries(value: Any) -> Collection[Any]:
    """The values of a container."""
    return value.values() if is_a(value, dict) else value if is_a(value, SEQUENCES) else ()
