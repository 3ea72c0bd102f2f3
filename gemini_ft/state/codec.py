"""Non-tensor state as bytes: exact for a fixed set of types, and safe to read.

`encode` writes msgpack. What msgpack does not know natively (tuples, big ints, arrays, tensors, dates,
...) travels as an extension: a code and the list of parts that the object is rebuilt from. Rebuilding
never imports a module, calls a user's function or allocates more than the blob itself holds, so a
hostile blob can at worst be refused.

Everything else is pickled and signed with HMAC-SHA256 under the run's secret. `decode` unpickles only
what carries a valid signature, unless the caller trusts the source; an agent never decodes at all.

Order of dicts, bits of floats (NaN payloads too), strides of dense tensors and dtypes are kept. Not
kept: that two entries are the same object (each is decoded on its own).
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import math
import pathlib
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, EnumType, Flag
from typing import Any

import msgpack
import numpy as np
import torch
import xxhash

from gemini_ft.accelerator import current_device
from gemini_ft.errors import CorruptDataError, LayoutMismatchError, StateError, UnsupportedStateError

_MAGIC = b"GFX"
_VERSION = 1
_HEADER = len(_MAGIC) + 1 + 8  # magic, version, XXH3-64 of the rest
_ATOMS = frozenset({type(None), bool, int, float, str, bytes})  # msgpack keeps these exactly
_BIG_INT, _DICT, _PICKLE = 1, 2, 3
_MOST_ALIKE = 1000  # keys of one hash
_MOST_DIMENSIONS = 64  # of an array (numpy) or a tensor
_PURPOSE = b"gemini-ft codec pickle v1\0"  # so that a signature made for another purpose is invalid here

_Path = tuple[Any, ...]  # () at the top, else (path of the container, key)


@dataclass(frozen=True)
class _Kind:
    """A type that is taken apart; ``take`` gives None for a value that must be pickled after all."""

    code: int
    take: Callable[[Any], tuple[Any, ...] | None]
    make: Callable[..., Any]


def encode(obj: object, secret: bytes | None = None) -> bytes:
    """Encodes ``obj`` so that `decode` gives back an equal object of the same types.

    Args:
        obj: any nesting of the supported types; tensors are copied, wherever they are.
        secret: the run's secret, which signs what has to be pickled; None leaves it unsigned.

    Raises StateError: something can be neither encoded nor pickled; the message has the path to it.
    """
    try:
        body = _pack(_lower(obj, (), secret))
    except (RecursionError, ValueError) as error:
        raise StateError(
            f"the extras cannot be encoded: {error}. "
            "They must not contain themselves, nest deeper than 500 levels, or hold 4 GiB in one entry"
        ) from None
    return _MAGIC + bytes([_VERSION]) + xxhash.xxh3_64_digest(body) + body


def decode(blob: bytes, secret: bytes | None = None, trust_pickle: bool = False, part: Sequence[str] = ()) -> Any:
    """Decodes bytes that `encode` made.

    Tensors that lived on an accelerator return to its current device where there is one, else to the CPU.

    Args:
        trust_pickle: whether pickles without a valid signature may be loaded (they can run any code).
        part: keys of nested plain dicts, from the top: only what lies there is decoded.

    Raises:
        KeyError: there is no such part.
        CorruptDataError: the bytes are damaged, or not an encoded object.
        StateError: they hold an untrusted pickle, or come from a newer release; the message has the path.
    """
    if blob[: len(_MAGIC)] != _MAGIC or len(blob) < _HEADER:
        raise CorruptDataError(f"not encoded state: {len(blob)} bytes that begin with {bytes(blob[:4])!r}")
    if blob[len(_MAGIC)] != _VERSION:
        raise StateError(f"encoded state of format version {blob[len(_MAGIC)]}; this release reads version {_VERSION}")
    body = blob[_HEADER:]
    if xxhash.xxh3_64_digest(body) != blob[_HEADER - 8 : _HEADER]:
        raise CorruptDataError("encoded state does not match its checksum")
    try:
        found = _unpack(body)
        path: _Path = ()
        for key in part:
            if type(found) is not dict or key not in found:
                raise _NoSuchPart(key)
            found, path = found[key], (path, key)
        return _lift(found, path, secret, trust_pickle)
    except (StateError, CorruptDataError, _NoSuchPart):
        raise
    except Exception as error:  # msgpack fails in many ways on bytes that were made to deceive
        raise CorruptDataError(f"not encoded state: {type(error).__name__}: {error}") from None


def is_exact(obj: object) -> bool:
    """Whether `encode` keeps an object that holds no others without pickling it: numbers, arrays, dates, paths, enums."""
    if type(obj) in _ATOMS:
        return True
    how = _kind_of(obj)
    return how is not None and how != _TENSOR and how.take(obj) is not None


class _NoSuchPart(KeyError):
    """An error of its own, unlike the KeyErrors that damaged bytes lead to."""


def _lower(obj: Any, path: _Path, secret: bytes | None) -> Any:
    """``obj`` in terms of what msgpack packs exactly."""
    kind = type(obj)
    if kind in _ATOMS:
        return obj
    if kind is list:
        # The usual long list is all numbers or all strings: leave it to C.
        return obj if _ATOMS.issuperset(map(type, obj)) else [_lower(item, (path, i), secret) for i, item in enumerate(obj)]
    if kind is dict:
        values = obj if _ATOMS.issuperset(map(type, obj.values())) else {k: _lower(v, (path, k), secret) for k, v in obj.items()}
        if all(type(key) is str for key in obj):
            return values
        return msgpack.ExtType(_DICT, _pack([[_lower(key, (path, key), secret) for key in obj], list(values.values())]))
    how = _kind_of(obj)
    parts = how.take(obj) if how else None
    if how is None or parts is None:
        return msgpack.ExtType(_PICKLE, _pickled(obj, path, secret))
    return msgpack.ExtType(how.code, _pack([_lower(part, path, secret) for part in parts]))


def _lift(obj: Any, path: _Path, secret: bytes | None, trust: bool) -> Any:
    """The inverse of `_lower`."""
    kind = type(obj)
    if kind in _ATOMS:
        return obj
    if kind is list:
        return [_lift(item, (path, index), secret, trust) for index, item in enumerate(obj)]
    if kind is dict:
        return {key: _lift(value, (path, key), secret, trust) for key, value in obj.items()}
    code = obj.code if kind is msgpack.ExtType else kind.__name__
    if code == _BIG_INT:
        return int.from_bytes(obj.data, "little", signed=True)
    if code == _PICKLE:
        return _unpickled(obj.data, path, secret, trust)
    if code != _DICT and code not in _CODES:
        raise CorruptDataError(f"{_text(path)} has an unknown type {code}")
    parts = _unpack(obj.data)
    if code == _DICT:
        keys = _spread([_lift(key, path, secret, trust) for key in parts[0]])
        return {key: _lift(value, (path, key), secret, trust) for key, value in zip(keys, parts[1], strict=True)}
    return _CODES[code].make(*(_lift(part, path, secret, trust) for part in parts))


def _spread(keys: list[Any]) -> list[Any]:
    """Returns keys, or members of a set, as they are; refuses many that were chosen to have one hash: each would be compared with all."""
    if len(keys) > _MOST_ALIKE and max(Counter(map(hash, keys)).values()) > _MOST_ALIKE:
        raise CorruptDataError(f"more than {_MOST_ALIKE} of {len(keys)} keys have the same hash")
    return keys


def _pack(obj: Any) -> bytes:
    return bytes(msgpack.packb(obj, default=_big_int, strict_types=True, unicode_errors="surrogatepass"))


def _unpack(blob: bytes) -> Any:
    return msgpack.unpackb(blob, ext_hook=msgpack.ExtType, unicode_errors="surrogatepass")


def _big_int(value: Any) -> Any:
    """An int beyond 64 bits as msgpack's default hook packs it."""
    return msgpack.ExtType(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _text(path: _Path) -> str:
    return f"{_text(path[0])}[{path[1]!r}]" if path else "extras"


def _pickled(obj: object, path: _Path, secret: bytes | None) -> bytes:
    if isinstance(obj, torch.Tensor) and type(obj) not in _PLAIN:
        raise UnsupportedStateError(f"{_text(path)} is a {type(obj).__qualname__}; only plain tensors can go there, such as its to_local()")
    try:
        body = pickle.dumps(obj, protocol=5)
    except Exception as error:  # whatever a user's __reduce__ raises
        raise StateError(
            f"{_text(path)}: a {type(obj).__qualname__} cannot be encoded ({type(error).__name__}: {error}); "
            "keep plain values, arrays and tensors there, or what a state_dict() of the object gives"
        ) from None
    return sign(body, secret) + body


def _unpickled(data: bytes, path: _Path, secret: bytes | None, trust: bool) -> Any:
    signature, body = data[:32], data[32:]
    if not trust and (secret is None or not hmac.compare_digest(signature, sign(body, secret))):
        why = "there is no run secret to check it with" if secret is None else "it is not signed with this run's secret"
        raise StateError(
            f"{_text(path)} is a pickled object, and {why}; loading it could run any code. "
            "Bring that secret back (GEMINI_SECRET_FILE), or, if you trust where it comes from, set storage.trust_pickle=true "
            "(gemini export: --trust-pickle)"
        )
    try:
        return pickle.loads(body)
    except Exception as error:  # an import or a __setstate__ of the user's
        raise StateError(f"{_text(path)}: the pickled object cannot be loaded: {type(error).__name__}: {error}") from error


def sign(body: bytes, secret: bytes | None) -> bytes:
    return bytes(32) if secret is None else hmac.digest(secret, _PURPOSE + body, hashlib.sha256)


# Numbers, containers, paths and dates. Codes are part of the format: never reuse one.


def lost_factory() -> Any:
    """Stands for a function of the script that makes entries of a defaultdict: no snapshot has it. Raises LayoutMismatchError."""
    raise LayoutMismatchError(
        "this defaultdict came while training, and no snapshot has the function that makes its entries; make it in __init__"
    )


_NAMED = (list, dict, set, tuple, int, float, str, bool, bytes, lost_factory)
_FACTORIES: dict[str, Callable[[], Any] | None] = {factory.__name__: factory for factory in _NAMED} | {"None": None}
_PATHS = {cls.__name__: cls for cls in (type(pathlib.PurePath()), type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath)}


def is_named(factory: Callable[[], Any] | None) -> bool:
    """Whether `encode` has a name for the ``default_factory`` of a defaultdict."""
    return _FACTORIES.get(getattr(factory, "__name__", "None"), is_named) is factory


def _take_defaultdict(obj: defaultdict[Any, Any]) -> tuple[Any, ...] | None:
    return (getattr(obj.default_factory, "__name__", "None"), dict(obj)) if is_named(obj.default_factory) else None


def _take_datetime(obj: datetime.datetime) -> tuple[Any, ...] | None:
    if obj.tzinfo is not None and type(obj.tzinfo) is not datetime.timezone:
        return None
    return (obj.replace(tzinfo=None).isoformat(), obj.fold, obj.tzinfo)


def _make_datetime(text: str, fold: int, zone: datetime.timezone | None) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _of(kind: type, make: Callable[..., Any]) -> Callable[..., Any]:
    """``make`` of what the blob itself holds: out of a range, or a number, it could make as much as it likes."""

    def checked(part: Any, *more: Any) -> Any:
        if type(part) is not kind:
            raise CorruptDataError(f"a {type(part).__name__} where a {kind.__name__} is due")
        return make(part, *more)

    return checked


_KINDS: dict[type, _Kind] = {
    complex: _Kind(8, lambda o: (o.real, o.imag), complex),
    bytearray: _Kind(9, lambda o: (bytes(o),), _of(bytes, bytearray)),
    tuple: _Kind(10, lambda o: (list(o),), _of(list, tuple)),
    set: _Kind(11, lambda o: (list(o),), _of(list, lambda members: set(_spread(members)))),
    frozenset: _Kind(12, lambda o: (list(o),), _of(list, lambda members: frozenset(_spread(members)))),
    deque: _Kind(13, lambda o: (list(o), o.maxlen), _of(list, deque)),
    OrderedDict: _Kind(14, lambda o: (dict(o),), _of(dict, OrderedDict)),
    Counter: _Kind(15, lambda o: (dict(o),), _of(dict, Counter)),
    defaultdict: _Kind(16, _take_defaultdict, lambda name, items: defaultdict(_FACTORIES[name], items)),
    range: _Kind(17, lambda o: (o.start, o.stop, o.step), range),
    slice: _Kind(18, lambda o: (o.start, o.stop, o.step), slice),
    datetime.datetime: _Kind(19, _take_datetime, _make_datetime),
    datetime.date: _Kind(20, lambda o: (o.toordinal(),), datetime.date.fromordinal),
    datetime.timedelta: _Kind(21, lambda o: (o.days, o.seconds, o.microseconds), datetime.timedelta),
    datetime.timezone: _Kind(22, lambda o: o.__getinitargs__(), datetime.timezone),
    torch.Size: _Kind(23, lambda o: (list(o),), _of(list, torch.Size)),
    torch.dtype: _Kind(24, lambda o: (str(o).removeprefix("torch."),), lambda name: _dtype(name)),
    torch.device: _Kind(25, lambda o: (str(o),), torch.device),
}
_PATH = _Kind(26, lambda o: (type(o).__name__, str(o)), lambda name, text: _PATHS[name](text))


# Enum members: found by name among the modules that are loaded already; nothing is imported.


def _take_enum(obj: Enum) -> tuple[Any, ...] | None:
    cls = type(obj)
    try:
        found = _enum(cls.__module__, cls.__qualname__)
    except ValueError:
        return None
    value = obj.value if isinstance(obj, Flag) else None  # members of a Flag can be unnamed combinations
    return (cls.__module__, cls.__qualname__, obj.name, value) if found is cls else None


def _make_enum(module: str, qualname: str, name: str | None, value: int | None) -> Enum:
    cls = _enum(module, qualname)
    return cls(value) if issubclass(cls, Flag) else cls.__members__[str(name)]


def _enum(module: str, qualname: str) -> type[Enum]:
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, type(sys) | type) else None  # not getattr: it may run code
    if type(found) is not EnumType or not issubclass(found, Enum):  # another metaclass may run code of its own
        raise ValueError(f"no plain enum {module}.{qualname} among the loaded modules")
    if issubclass(found, Flag) and found._missing_.__func__ is not Flag._missing_.__func__:  # type: ignore[attr-defined]
        raise ValueError(f"{module}.{qualname} is no plain enum: it has a _missing_ of its own")
    return found


_ENUM = _Kind(27, _take_enum, _make_enum)


# numpy


def _take_array(obj: Any) -> tuple[Any, ...] | None:
    if obj.dtype.kind not in "biufcSUmM" or (not obj.dtype.itemsize and obj.size > 1):
        return None  # objects, records, extension dtypes whose name says too little, and elements without bytes
    order = "F" if obj.flags.fnc else "C"
    return (obj.dtype.str, list(obj.shape), order, obj.tobytes(order))


def _make_array(dtype: str, shape: list[int], order: Any, raw: bytes) -> Any:
    kind = np.dtype(dtype)
    is_whole = _are_sizes(shape) and math.prod(shape) * kind.itemsize == len(raw)
    # Elements of "S0" and "U0" have no bytes here, and take some in memory: any number of them would fit.
    if kind.kind not in "biufcSUmM" or not is_whole or (not kind.itemsize and math.prod(shape) > 1):
        raise CorruptDataError(f"an array of {shape} {dtype} in {len(raw)} bytes")
    return np.ndarray(shape, kind, bytearray(raw), order=order).copy(order)


ARRAY = _Kind(28, _take_array, _make_array)
_SCALAR = _Kind(29, lambda o: _take_array(np.asarray(o)), lambda *parts: _make_array(*parts)[()])


# torch


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _take_tensor(obj: torch.Tensor) -> tuple[Any, ...] | None:
    if type(obj) not in _PLAIN or obj.layout != torch.strided or obj.is_quantized or obj.is_meta or obj.ndim > _MOST_DIMENSIONS:
        return None
    plain = obj.detach().resolve_conj().resolve_neg()
    dense = torch.empty_like(plain, device="cpu", memory_format=torch.preserve_format).copy_(plain)
    raw = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
    name = str(obj.dtype).removeprefix("torch.")
    return (name, list(obj.shape), list(dense.stride()), obj.device.type, obj.requires_grad, type(obj) is not torch.Tensor, raw)


def _make_tensor(name: str, shape: list[int], stride: list[int], device: str, grad: bool, parameter: bool, raw: bytes) -> torch.Tensor:  # noqa: PLR0917 (the format's order)
    dtype, numel = _dtype(name), math.prod(shape) if _are_sizes(shape) and _are_sizes(stride) else -1
    if numel * dtype.itemsize != len(raw) or (numel and _extent(shape, stride) != numel):
        raise CorruptDataError(f"a tensor of {shape} {name} with strides {stride} in {len(raw)} bytes")
    out = torch.empty_strided(shape, stride, dtype=dtype)
    if raw:
        out.as_strided((numel,), (1,)).view(torch.uint8).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    if device != "cpu" and (accelerator := torch.accelerator.current_accelerator(check_available=True)) and accelerator.type == device:
        out = out.to(current_device())
    return torch.nn.Parameter(out, grad) if parameter else out.requires_grad_(grad)


def _are_sizes(values: Any) -> bool:
    """Whether these are few plain numbers: products of anything else may be as large as they like."""
    return type(values) is list and len(values) <= _MOST_DIMENSIONS and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _extent(shape: Iterable[int], stride: Iterable[int]) -> int:
    """Elements of memory that a strided tensor spans; -1 if it would reach below its start."""
    pairs = list(zip(shape, stride, strict=True))
    return -1 if min((step for _, step in pairs), default=0) < 0 else 1 + sum((size - 1) * step for size, step in pairs)


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise CorruptDataError(f"unknown torch dtype {name!r}")
    return dtype


_TENSOR = _Kind(30, _take_tensor, _make_tensor)
_FAMILIES: tuple[tuple[type, _Kind], ...] = ((torch.Tensor, _TENSOR), (Enum, _ENUM), (np.generic, _SCALAR))
_CODES = {kind.code: kind for kind in (*_KINDS.values(), _PATH, _ENUM, ARRAY, _SCALAR, _TENSOR)}


def _kind_of(obj: object) -> _Kind | None:
    kind = type(obj)
    if kind in _KINDS:
        return _KINDS[kind]
    if kind is np.ndarray:
        return ARRAY
    if kind in _PATHS.values():
        return _PATH
    return next((how for family, how in _FAMILIES if issubclass(kind, family)), None)
