"""gemini_ft.state.codec: exact for what it knows, signed for what it pickles, harmless on hostile bytes."""

from __future__ import annotations

import collections
import contextlib
import datetime
import enum
import functools
import math
import os
import pathlib
import pickle
import random
import struct
import sys
import tracemalloc
import zoneinfo
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from gemini_ft.errors import CorruptDataError, StateError, UnsupportedStateError
from gemini_ft.state import codec

SECRET = b"the run's secret"


class Color(enum.Enum):
    RED = "red"
    GREEN = ("a", 1)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Nested:
    class Kind(enum.Enum):
        ONE = 1


class Point(NamedTuple):
    x: int
    y: float


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and same(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Plain({self.value!r})"


def bits(value: float) -> bytes:
    packed: bytes = struct.pack("<d", value)
    return packed


def same(a: Any, b: Any) -> bool:
    """Equal in type and to the last bit, at every level; dicts in the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return bits(a) == bits(b)
    if isinstance(a, complex):
        return bits(a.real) + bits(a.imag) == bits(b.real) + bits(b.imag)
    if isinstance(a, torch.Tensor):
        return same_tensor(a, b)
    if isinstance(a, (np.ndarray, np.generic)):
        return bool((a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()))
    if isinstance(a, collections.defaultdict) and a.default_factory is not b.default_factory:
        return False
    if isinstance(a, dict):
        return same(list(a.keys()), list(b.keys())) and same(list(a.values()), list(b.values()))
    if isinstance(a, collections.deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return same(*(sorted(items, key=codec.encode) for items in (a, b)))
    return bool(a == b)


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    facts = [(t.dtype, t.shape, t.requires_grad, t.device) for t in (a, b)]
    contents = [t.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).tolist() for t in (a, b)]
    return facts[0] == facts[1] and contents[0] == contents[1]


def round_trip(value: object) -> Any:
    return codec.decode(codec.encode(value, SECRET), SECRET)


def rebuilt(body: object, version: int = 1) -> bytes:
    """A blob with a right checksum around any msgpack, as an attacker would make it."""
    packed: bytes = msgpack.packb(body)
    return b"GFX" + bytes([version]) + xxhash.xxh3_64_digest(packed) + packed


nan_payloads = st.integers(1, 2**51 - 1).map(lambda n: struct.unpack("<d", struct.pack("<Q", 0x7FF8 << 48 | n))[0])
floats = st.floats() | nan_payloads
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**130), 2**130)
    | floats
    | st.builds(complex, floats, floats)
    | st.text(st.characters(codec=None))
    | st.binary()
    | st.sampled_from([Color.RED, Color.GREEN, Level.HIGH, Access.READ, Access.READ | Access.WRITE, Nested.Kind.ONE])
    | st.sampled_from([torch.float32, torch.float8_e4m3fn, torch.device("cpu"), torch.device("cuda", 3), torch.Size([2, 0])])
    | st.builds(Point, st.integers(), floats)
    | st.datetimes(timezones=st.none() | st.just(datetime.UTC) | st.just(datetime.timezone(datetime.timedelta(hours=-3), "X")))
    | st.dates()
    | st.timedeltas()
    | st.sampled_from([range(3), range(2**70, 5, -3), slice(None, (1, 2), 4), pathlib.Path("/a/b"), pathlib.PurePosixPath("c")])
)
keys = scalars.filter(lambda value: not isinstance(value, slice))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(keys, inner, max_size=4)
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | mappings
        | mappings.map(collections.OrderedDict)
        | mappings.map(lambda items: collections.defaultdict(list, items))
        | st.builds(collections.deque, st.lists(inner, max_size=4), st.none() | st.integers(4, 9))
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
    )


@given(st.recursive(scalars, containers, max_leaves=12))
@example(-(2**63))
@example(2**64)
@example(-(2**63) - 1)
@example({2: "a", "2": "b", (1, (2,)): None, None: 1, 2.5: [], b"x": {}})
@example(-0.0)
@example("\ud800")
def test_round_trip_is_exact(value: object) -> None:
    assert same(round_trip(value), value)


@given(st.recursive(scalars, containers, max_leaves=12), st.data())
def test_a_truncated_or_damaged_blob_is_refused(value: object, data: st.DataObject) -> None:
    blob = codec.encode(value, SECRET)
    with pytest.raises(CorruptDataError):
        codec.decode(blob[: data.draw(st.integers(0, len(blob) - 1))], SECRET)
    damaged = bytearray(blob)
    damaged[data.draw(st.integers(4, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptDataError):
        codec.decode(bytes(damaged), SECRET)


@pytest.mark.parametrize(
    "value",
    [
        bytearray(b"abc"),
        collections.Counter("abracadabra"),
        collections.defaultdict(None, {1: 2}),
        collections.defaultdict(functools.partial(int, 3), {1: 2}),
        collections.deque([1, 2], maxlen=2),
        pathlib.PureWindowsPath("c:\\x"),
        datetime.datetime(2020, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("UTC")),
        datetime.datetime(2020, 10, 25, 2, 30, fold=1),
        Plain({"a": [1.5, (2,)]}),
        dict,
        math.sqrt,
        Ellipsis,
        range(2**80),
    ],
    ids=repr,
)
def test_rarer_types_round_trip(value: object) -> None:
    decoded = round_trip(value)
    assert decoded == value
    assert type(decoded) is type(value)
    assert getattr(decoded, "fold", 0) == getattr(value, "fold", 0)


def test_a_zone_keeps_its_name() -> None:
    zone = datetime.timezone(datetime.timedelta(minutes=90), "HERE")
    assert round_trip(zone).tzname(None) == "HERE"
    assert round_trip(datetime.UTC) is datetime.UTC


def test_a_defaultdict_keeps_its_factory() -> None:
    decoded = round_trip(collections.defaultdict(list))
    decoded["new"].append(1)
    assert decoded == {"new": [1]}


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 3, 2)], ids=str)
def test_tensors_of_every_dtype_round_trip_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = math.prod(shape) * dtype.itemsize
    raw = [index % 2 for index in range(count)] if dtype is torch.bool else [(7 * index + 201) % 256 for index in range(count)]
    tensor = torch.tensor(raw, dtype=torch.uint8).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    assert same(round_trip(tensor), tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch says so once per process
def test_half_complex_tensors_round_trip() -> None:
    tensor = torch.zeros(3, dtype=torch.complex32)
    tensor.view(torch.uint8).copy_(torch.arange(12, dtype=torch.uint8))
    assert same(round_trip(tensor), tensor)


def test_nan_payloads_in_tensors_survive() -> None:
    tensor = torch.tensor([0x7FA12345, 0x7FC00001, -1], dtype=torch.int32).view(torch.float32)
    assert same(round_trip(tensor), tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24).view(2, 3, 4).transpose(0, 2),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(10)[::3],
        torch.arange(3).expand(4, 3),
        torch.tensor([1 + 2j]).conj(),
        torch.arange(6.0)[2:5],
        nn.Parameter(torch.randn(2, 2)),
        nn.Parameter(torch.randn(2), requires_grad=False),
        torch.randn(3, requires_grad=True),
        (torch.randn(3, requires_grad=True) * 2).detach(),
    ],
    ids=["transposed", "channels_last", "strided", "expanded", "conj", "offset", "parameter", "frozen", "leaf", "detached"],
)
def test_tensors_of_any_strides_and_kind_round_trip(tensor: torch.Tensor) -> None:
    decoded = round_trip({"x": tensor})["x"]
    assert same(decoded, tensor)
    if tensor.is_contiguous() or tensor.numel() == 24 or tensor.dim() == 4:  # dense: the next kernel sees the same strides
        assert decoded.stride() == tensor.stride()


def test_a_decoded_tensor_is_a_copy_that_can_be_written() -> None:
    tensor = torch.zeros(2)
    decoded = round_trip(tensor)
    decoded.add_(1)
    assert tensor.tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11
def test_a_sparse_tensor_is_pickled() -> None:
    tensor = torch.eye(3).to_sparse()
    assert torch.equal(round_trip(tensor).to_dense(), torch.eye(3))


def test_a_tensor_subclass_is_refused_by_path() -> None:
    class Marked(torch.Tensor):
        pass

    with pytest.raises(UnsupportedStateError, match=r"extras\['a'\]\[1\] is a .*Marked; only plain tensors"):
        codec.encode({"a": [0, torch.zeros(2).as_subclass(Marked)]}, SECRET)


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5), np.float64(-0.0), np.int8(-3), np.bool_(True), np.complex64(1 - 2j), np.float16(3), np.longdouble(1) / 3,
        np.str_("é"), np.str_(""), np.bytes_(b"x"), np.datetime64("2020-01-02T03:04", "s"), np.timedelta64(3, "ms"), np.uint64(2**63),
        np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(8).reshape(2, 4)), np.arange(6)[::2], np.zeros((0, 3)),
        np.array(3.5), np.array(["a", "bcd"]), np.arange(3, dtype=">i4"), np.array([1, None], dtype=object),
        np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]), np.array([np.nan, -np.inf]),
    ],
    ids=str,
)  # fmt: skip
def test_numpy_round_trips(value: Any) -> None:
    decoded = round_trip([value])[0]
    assert type(decoded) is type(value)
    assert decoded.dtype == value.dtype
    assert decoded.shape == value.shape
    assert repr(decoded) == repr(value)
    if isinstance(value, np.ndarray):
        assert decoded.flags.fnc == value.flags.fnc  # the order of Fortran, and only that
        assert decoded.flags.writeable


def test_states_of_random_generators_round_trip() -> None:
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "pcg": np.random.default_rng(5).bit_generator.state,  # holds 128-bit ints
        "torch": torch.get_rng_state(),
    }
    decoded = round_trip(states)
    random.setstate(decoded["python"])
    assert random.getstate() == states["python"]
    np.random.set_state(decoded["numpy"])
    torch.set_rng_state(decoded["torch"])
    assert same(torch.get_rng_state(), states["torch"])
    generator = np.random.default_rng(0)
    generator.bit_generator.state = decoded["pcg"]
    assert generator.integers(2**60) == np.random.default_rng(5).integers(2**60)


# What is pickled, and who may load it


def test_a_pickle_loads_only_under_the_secret_that_signed_it() -> None:
    blob = codec.encode({"callbacks": {"X": Plain(1)}}, SECRET)
    assert codec.decode(blob, SECRET) == {"callbacks": {"X": Plain(1)}}
    for secret, why in ((None, "no run secret"), (b"another", "not signed with this run's secret")):
        with pytest.raises(StateError, match=rf"^extras\['callbacks'\]\['X'\] is a pickled object, .*{why}.*storage\.trust_pickle=true"):
            codec.decode(blob, secret)
        assert codec.decode(blob, secret, trust_pickle=True) == {"callbacks": {"X": Plain(1)}}


def test_an_unsigned_pickle_does_not_load_without_trust() -> None:
    blob = codec.encode([Plain(1)], None)
    for secret in (None, SECRET, b""):
        with pytest.raises(StateError, match=r"extras\[0\] is a pickled object"):
            codec.decode(blob, secret)
    assert codec.decode(blob, None, trust_pickle=True) == [Plain(1)]


def test_blobs_without_pickles_need_no_secret() -> None:
    blob = codec.encode({"lr": 0.1, "betas": (0.9, 0.99)}, SECRET)
    assert codec.decode(blob) == {"lr": 0.1, "betas": (0.9, 0.99)}


class Bomb:
    """Makes a folder when unpickled, so that a test can see whether it went off."""

    def __init__(self, target: pathlib.Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.target),))


def test_a_hostile_pickle_does_not_run(tmp_path: pathlib.Path) -> None:
    evil = tmp_path / "evil"
    body = pickle.dumps(Bomb(evil))
    for forged in (bytes(32) + body, codec.sign(body, b"guess") + body, codec.sign(b"other", SECRET) + body, body):
        with pytest.raises(StateError, match="is a pickled object"):
            codec.decode(rebuilt({"x": msgpack.ExtType(3, forged)}), SECRET)
    assert not evil.exists()
    codec.decode(codec.encode(Bomb(evil), SECRET), SECRET)
    assert evil.exists(), "the bomb must be able to go off, or this test shows nothing"


@given(st.data())
def test_a_tampered_pickle_is_refused(data: st.DataObject) -> None:
    body = bytearray(codec.encode(Plain("payload"), SECRET)[12:])
    at = data.draw(st.integers(body.index(b"payload") - 40, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(StateError, match="not signed with this run's secret"):
        codec.decode(b"GFX\x01" + xxhash.xxh3_64_digest(bytes(body)) + bytes(body), SECRET)


def test_a_pickle_that_does_not_load_names_its_path() -> None:
    pickled = pickle.dumps(Plain(1)).replace(b"Plain", b"Gone_")
    blob = rebuilt({"x": msgpack.ExtType(3, bytes(32) + pickled)})
    with pytest.raises(StateError, match=r"extras\['x'\]: the pickled object cannot be loaded: AttributeError"):
        codec.decode(blob, None, trust_pickle=True)


def test_what_cannot_be_pickled_is_named_by_its_path() -> None:
    with pytest.raises(StateError, match=r"^extras\['callbacks'\]\[2\]\['f'\]: a function cannot be encoded .*state_dict\(\)"):
        codec.encode({"callbacks": (0, 1, {"f": lambda: 0})}, SECRET)


def test_state_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(StateError, match="must not contain themselves"):
        codec.encode(loop)
    deep: object = 0
    for _ in range(1500):  # Python 3.12 and newer take more levels than 3.11
        deep = [deep]
    with pytest.raises(StateError, match="nest deeper than 500 levels"):
        codec.encode(deep)


# Hostile bytes


def test_an_unknown_type_is_refused_by_path() -> None:
    with pytest.raises(CorruptDataError, match=r"extras\['a'\]\[0\] has an unknown type 99"):
        codec.decode(rebuilt({"a": [msgpack.ExtType(99, b"")]}), SECRET, trust_pickle=True)
    with pytest.raises(CorruptDataError, match="has an unknown type Timestamp"):
        codec.decode(rebuilt(msgpack.Timestamp(1)), SECRET)


def test_a_newer_format_is_refused_by_number() -> None:
    with pytest.raises(StateError, match="format version 9; this release reads version 1"):
        codec.decode(rebuilt([], version=9))


@pytest.mark.parametrize("blob", [b"", b"GF", b"GFX", b"GFX\x01", b"\x80\x04K\x01.", pickle.dumps([1])], ids=repr)
def test_what_was_never_encoded_is_refused(blob: bytes) -> None:
    with pytest.raises(CorruptDataError, match="not encoded state"):
        codec.decode(blob, SECRET)


def ext(code: int, *parts: object) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb(list(parts)))


# Numbers of one hash, each of which is compared with all others where they are keys.
ALIKE = [msgpack.ExtType(1, ((2**61 - 1) * k).to_bytes(16, "little")) for k in range(1, 2000)]


@pytest.mark.parametrize(
    "body",
    [
        ext(30, "float32", [2], [1], "cpu", False, False, b"1234"),  # fewer bytes than elements
        ext(30, "float32", [1], [1], "cpu", False, False, b"12345678"),
        ext(30, "float32", [2, 1 << 61], [1, 1], "cpu", False, False, b""),
        ext(30, "float32", [2], [1 << 40], "cpu", False, False, b"12345678"),  # strides that span a terabyte
        ext(30, "float32", [2], [-1], "cpu", False, False, b"12345678"),
        ext(30, "float32", [-1, -2], [1, 1], "cpu", False, False, b"12345678"),
        ext(30, "load", [1], [1], "cpu", False, False, b"1234"),
        ext(30, "int32", [1], [1], "cpu", True, False, b"1234"),
        ext(28, "O", [1], "C", b"12345678"),
        ext(28, "<f4", [1 << 50], "C", b""),
        ext(28, "nonsense", [1], "C", b"1234"),
        ext(27, "os", "system", "x", None),
        ext(27, "os", "path.sep", "x", None),
        ext(27, "not.loaded", "X", "x", None),
        ext(27, "enum", "Enum", "x", None),
        ext(16, "system", {}),
        ext(26, "Popen", "x"),
        ext(25, "nowhere"),
        ext(24, "load"),
        *(ext(code, ext(17, 0, 1 << 20, 1)) for code in (10, 11, 12, 13, 14, 15, 16, 23)),  # a range in place of what it ranges over
        ext(9, 1 << 24),
        ext(28, "|u1", [b"1", 1 << 24], "C", b""),
        ext(28, "|u1", ext(17, 1, 1 << 12, 1), "C", b""),
        ext(30, "uint8", [b"1", 1 << 24], [1, 1], "cpu", False, False, b""),
        ext(30, "uint8", [1], ext(17, 0, 1 << 20, 1), "cpu", False, False, b"1"),
        ext(30, "uint8", [0] * 65, [1] * 65, "cpu", False, False, b""),  # more sizes than any tensor has, whose product could take minutes
        ext(11, ALIKE),
        ext(12, ALIKE),
        ext(2, ALIKE, [0] * len(ALIKE)),
        ext(10, 1, 2),
        ext(11, [[]]),
        ext(2, [[]], [1]),
        ext(2, [1, 2], [1]),
        ext(19, "yesterday", 0, None),
        msgpack.ExtType(10, b"\xc1"),
        msgpack.ExtType(10, b""),
    ],
    ids=lambda body: repr(body)[:80],
)
def test_contradictory_parts_are_refused(body: msgpack.ExtType) -> None:
    """Without taking more memory than the blob itself does."""
    tracemalloc.start()
    try:
        with pytest.raises(CorruptDataError):
            codec.decode(rebuilt({"x": body}), SECRET, trust_pickle=True)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_decoding_an_enum_neither_imports_nor_calls_anything(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(enum.Flag):
        A = 1

        @classmethod
        def _missing_(cls, value: object) -> Any:
            raise AssertionError("called by the decoder")

    module = type(sys)("hostile_enum_module")
    module.Watched = Watched  # type: ignore[attr-defined]
    module.__getattr__ = lambda name: pytest.fail(f"asked for {name}")  # type: ignore[method-assign]
    sys.modules[module.__name__] = module
    try:
        for qualname in ("Watched", "Absent", "Watched.A"):
            with pytest.raises(CorruptDataError, match="no plain enum"):
                codec.decode(rebuilt(ext(27, module.__name__, qualname, "A", 64)))
    finally:
        del sys.modules[module.__name__]
    (tmp_path / "importable_enum.py").write_text("import enum\nclass X(enum.Enum):\n    A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CorruptDataError, match="no plain enum importable_enum"):
        codec.decode(rebuilt(ext(27, "importable_enum", "X", "A", None)))
    assert "importable_enum" not in sys.modules


def test_deeply_nested_hostile_bytes_do_not_crash() -> None:
    body = msgpack.ExtType(10, msgpack.packb([[0]]))
    for _ in range(2000):
        body = msgpack.ExtType(10, msgpack.packb([[body]]))
    with pytest.raises(CorruptDataError, match="RecursionError"):
        codec.decode(rebuilt(body))
    with pytest.raises(CorruptDataError):
        codec.decode(b"GFX\x01" + xxhash.xxh3_64_digest(b"\x91" * 100_000) + b"\x91" * 100_000)


@given(st.binary(max_size=60))
def test_random_bytes_under_a_right_checksum_do_no_harm(body: bytes) -> None:
    with contextlib.suppress(CorruptDataError, StateError):
        codec.decode(b"GFX\x01" + xxhash.xxh3_64_digest(body) + body, SECRET)


# Tensors that come from an accelerator


@pytest.mark.gpu
def test_a_tensor_returns_to_its_accelerator() -> None:
    tensor = torch.arange(6.0, device="cuda").view(2, 3).t()
    decoded = round_trip(tensor)
    assert decoded.device.type == "cuda"
    assert torch.equal(decoded, tensor)
    assert decoded.stride() == tensor.stride()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without an accelerator: CUDA_VISIBLE_DEVICES= hides it")
def test_a_tensor_of_an_absent_accelerator_comes_to_the_cpu() -> None:
    blob = codec.encode(torch.tensor([1.0, 2.0]))
    moved = blob[12:].replace(b"\xa3cpu", b"\xa4cuda")
    extended = bytearray(moved)
    extended[1] += 1  # length of the extension
    decoded = codec.decode(b"GFX\x01" + xxhash.xxh3_64_digest(bytes(extended)) + bytes(extended))
    assert decoded.device.type == "cpu"
    assert decoded.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", ["S0", "U0"])
def test_elements_without_bytes_take_no_memory(dtype: str) -> None:
    part = msgpack.packb([dtype, [2**24], "C", b""])
    tracemalloc.start()
    try:
        with pytest.raises(CorruptDataError):
            codec.decode(rebuilt(msgpack.ExtType(codec.ARRAY.code, part)))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert codec.decode(codec.encode({"empty": np.str_("")})) == {"empty": np.str_("")}
