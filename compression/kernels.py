"""The inner loops of the methods, per device: vectorised numpy and torch on CPUs, fused Triton kernels on CUDA.

Both give the same bits, random ones excepted. ``flat`` is float32 (layout.total,) throughout.

Norms are such that squares neither overflow nor vanish. A gradient of 1e-25 has a norm like any other, but not in float32: the sum of its
squares is zero, and what is divided by such a norm is lost, or never sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gemini_ft.accelerator import holds

from .base import FlatLayout, Turn
from .buffers import BUFFERS

BLOCK = 120 * 1024  # elements that fit, with their results, into a core's own cache; a multiple of every method's run


@cache
def _triton() -> ModuleType:
    try:
        from . import triton_kernels
    except ImportError as error:
        raise ImportError("gradient compression on a GPU needs triton: pip install triton, or compress on the CPU") from error
    kernels: ModuleType = triton_kernels
    return kernels


def stream_seeds(layout: FlatLayout, device: torch.device, seed: int, turn: Turn) -> Tensor:
    """The seed of each tensor's random numbers in a kernel, int32 (tensors,)."""
    seeds = [stream_seed(name, seed, turn, turn.rank) & 0x7FFFFFFF for name in layout.names]
    return torch.tensor(seeds, dtype=torch.int32, device=device)


def select(flat: Tensor, layout: FlatLayout, thresholds: Tensor) -> Tensor:
    """Ascending indices of the elements that are not below their tensor's threshold in magnitude, int32; NaN is never below.

    Padding is left out if thresholds are above zero. ``thresholds`` is float32 (tensors,).
    """
    if holds(flat):
        found: Tensor = _triton().select(flat, layout, thresholds)
        return found
    below = BUFFERS.empty(layout.total, torch.bool).numpy()
    magnitudes = torch.abs(flat, out=BUFFERS.empty(layout.total)).numpy()
    for at, span, threshold in zip(layout.starts, layout.spans, thresholds.numpy(), strict=True):
        np.less(magnitudes[at : at + span], threshold, out=below[at : at + span])
    return torch.from_numpy(np.flatnonzero(np.logical_not(below, out=below)).astype(np.int32))


def not_below(values: Tensor, limit: float) -> Tensor:
    """Ascending indices of the elements that are not below a limit, NaN among them; int64. numpy compares five times as fast as torch."""
    if holds(values):
        return values.lt(limit).logical_not_().nonzero().view(-1)
    below = np.less(values.numpy(), np.float32(limit))
    return torch.from_numpy(np.flatnonzero(np.logical_not(below, out=below)))


def negative(flat: Tensor) -> Tensor:
    """A mask of the elements below zero, bool."""
    return flat < 0 if holds(flat) else torch.from_numpy(flat.numpy() < 0)


def equal(codes: Tensor, code: int) -> Tensor:
    """A mask of the codes that equal ``code``, bool."""
    return codes == code if holds(codes) else torch.from_numpy(codes.numpy() == code)


def indices(mask: Tensor) -> Tensor:
    """The indices at which a bool tensor is set, ascending, int64."""
    return mask.nonzero().view(-1) if holds(mask) else torch.from_numpy(np.flatnonzero(mask.numpy()))


def pack(mask: Tensor) -> Tensor:
    """Bits of a bool tensor, eight a byte, the first in the lowest bit: uint8 (elements / 8,)."""
    if holds(mask):
        shifts = torch.arange(8, device=mask.device, dtype=torch.uint8)
        packed: Tensor = (mask.view(-1, 8).to(torch.uint8) << shifts).sum(1, dtype=torch.uint8)
        return packed
    return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))


def pack_signs(flat: Tensor) -> Tensor:
    """Packs one bit per element, set where it is zero or above: uint8 (total / 8,)."""
    if holds(flat):
        packed: Tensor = _triton().pack_signs(flat)
        return packed
    return torch.from_numpy(np.packbits(flat.numpy() >= 0, bitorder="little"))


def pack_signs_and_zeros(flat: Tensor) -> tuple[Tensor, Tensor | None, bool]:
    """`pack_signs`, and one bit an element that is set where it is zero: both uint8 (total / 8,); None where none is zero.

    The last value says whether all elements are finite; very large ones may count as infinite.
    """
    if holds(flat):
        return pack_signs(flat), pack(flat == 0), bool(torch.isfinite(flat.sum()))
    values, mask = flat.numpy(), np.empty(min(BLOCK, flat.numel()), dtype=bool)
    signs, nowhere, squares = np.empty(values.size // 8, dtype=np.uint8), True, 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for part in _blocks(values.size):
            block, result = values[part], mask[: part.stop - part.start]
            signs[part.start // 8 : part.stop // 8] = np.packbits(np.greater_equal(block, 0, out=result), bitorder="little")
            nowhere = nowhere and bool(np.not_equal(block, 0, out=result).all())
            squares += float(np.dot(block, block))
    zeros = None if nowhere else torch.from_numpy(np.packbits(values == 0, bitorder="little"))
    return torch.from_numpy(signs), zeros, math.isfinite(squares)


def _blocks(total: int) -> Iterator[slice]:
    return (slice(begin, min(begin + BLOCK, total)) for begin in range(0, total, BLOCK))


def mean_log(values: Tensor) -> float:
    """The mean of the natural logarithms. numpy takes them four times as fast as torch."""
    if holds(values):
        return float(values.log().mean())
    plain = values.numpy()
    return sum(float(np.log(plain[part]).sum(dtype=np.float64)) for part in _blocks(plain.size)) / plain.size


def scaled_blocks(flat: Tensor, layout: FlatLayout, factors: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The elements times their tensor's factor, float32, block by block; where each lies. A block is overwritten by the next.

    On CPUs, what is done to a block before the next one is asked for does not leave the core's cache.
    """
    if holds(flat):
        scaled = flat.clone()
        torch._foreach_mul_(layout.views(scaled), list(factors.unbind()))
        yield slice(0, layout.total), scaled
        return
    values, ends = flat.numpy(), zip(np.cumsum(layout.spans).tolist(), factors.tolist(), strict=True)
    buffer = np.empty(min(BLOCK, layout.total), dtype=np.float32)
    end, factor = next(ends)
    for part in _blocks(layout.total):
        at = part.start
        with np.errstate(invalid="ignore"):  # an infinity times a factor of 0
            while at < part.stop:
                if at == end:
                    end, factor = next(ends)
                stop = min(end, part.stop)
                np.multiply(values[at:stop], np.float32(factor), out=buffer[at - part.start : stop - part.start])
                at = stop
        yield part, torch.from_numpy(buffer[: part.stop - part.start])


def look_up(codes: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
    """The row of a table that each code stands for, one after the other: float32 (codes * width,).

    ``codes``: uint8. ``table``: float32 (codes there are, width), contiguous.
    """
    rows, width = table.shape
    flat = BUFFERS.empty(codes.numel() * width, device=table.device) if out is None else out
    if holds(codes):
        torch.index_select(table, 0, codes.int(), out=flat.view(-1, width))
        return flat
    row = f"V{4 * width}"  # numpy copies rows as wide items, three times as fast as torch; codes are not checked
    np.take(table.numpy().view(row).reshape(rows), codes.numpy(), out=flat.numpy().view(row), mode="clip")
    return flat


def look_up_each(codes: Tensor, layout: FlatLayout, tables: Tensor) -> Tensor:
    """`look_up` with a table for each tensor, (tensors, codes there are, width), so that scaling takes no pass: float32 (layout.total,)."""
    width = tables.shape[2]
    flat = BUFFERS.empty(layout.total, device=codes.device)
    parts = zip(codes.split_with_sizes([span // width for span in layout.spans]), flat.split_with_sizes(layout.spans), strict=True)
    for (part, out), table in zip(parts, tables.unbind(), strict=True):
        look_up(part, table, out)
    return flat


@cache
def bit_table(device: torch.device) -> Tensor:
    """The eight bits of each byte, the lowest first: bool (256, 8)."""
    return (torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1).bool().to(device)


@cache
def _signs_of_bits(device: torch.device, low: float) -> Tensor:
    return torch.where(bit_table(device), 1.0, low)


def unpack_signs(packed: Tensor, low: float = -1.0) -> Tensor:
    """1.0 where a bit is set, ``low`` elsewhere: float32 (8 * bytes,)."""
    return look_up(packed, _signs_of_bits(packed.device, low))


def pack_small(codes: Tensor, bits: int) -> Tensor:
    """Codes of 2 or 4 bits, the first in the lowest bits: uint8 (elements * bits / 8,). ``codes`` is uint8."""
    words = codes.view({2: torch.int32, 4: torch.int16}[bits])  # the codes of one byte, a byte each
    packed = words.clone()
    for place in range(1, 8 // bits):
        packed |= words >> place * (8 - bits)
    return packed.to(torch.uint8)


@cache
def small_table(device: torch.device, bits: int, offset: int) -> Tensor:
    """The codes of 2 or 4 bits in each byte, minus ``offset``: float32 (256, 8 / bits)."""
    shifts = torch.arange(0, 8, bits)
    values = (torch.arange(256).unsqueeze(1) >> shifts & (2**bits - 1)) - offset
    table: Tensor = values.float().to(device)
    return table


def unpack_small(packed: Tensor, bits: int, offset: int) -> Tensor:
    """Codes minus ``offset``: float32 (bytes * 8 / bits,)."""
    return look_up(packed, small_table(packed.device, bits, offset))


def stochastic_round(flat: Tensor, layout: FlatLayout, scales: Tensor, limit: int, seed: int, turn: Turn, *, bucket: int = 0) -> Tensor:
    """``scale x`` rounded to one of the integers around it, at random so that the expectation is ``scale x``: int8 (total,).

    Args:
        layout: whose names seed the random numbers.
        scales: one per tensor, or per bucket, float32; what is not finite there or in ``flat`` becomes 0.
        limit: the largest magnitude of a result, at most 127.
        bucket: elements of a bucket, which divides ``layout.align``; 0: scales are per tensor.
    """
    if holds(flat):
        rounded: Tensor = _triton().stochastic_round(flat, layout, scales, limit, stream_seeds(layout, flat.device, seed, turn), bucket)
        return rounded
    scaled = uniform(layout, flat.device, seed, turn)
    if not bucket:
        for part, values, scale in zip(
            scaled.split_with_sizes(layout.spans), flat.split_with_sizes(layout.spans), scales.unbind(), strict=True
        ):
            part.addcmul_(values, scale)
    else:
        scaled.view(-1, bucket).addcmul_(flat.view(-1, bucket), scales.unsqueeze(1))
    codes = BUFFERS.empty(layout.total, torch.int8)
    for block in _blocks(layout.total):
        codes[block] = scaled[block].floor_().clamp_(-limit, limit).nan_to_num_(0.0)
    return codes


def natural(flat: Tensor, layout: FlatLayout, seed: int, turn: Turn) -> Tensor:
    """Biased exponents after natural rounding, to the power of two below or above: uint8 (total,).

    The one above is taken with a probability of the mantissa's fraction. 0 stands for zero, 255 for infinities and NaN.
    """
    if holds(flat):
        rounded: Tensor = _triton().natural(flat, layout, stream_seeds(layout, flat.device, seed, turn))
        return rounded
    words, bits = random_words(layout, seed, turn), flat.numpy().view(np.uint32)
    exponents = BUFFERS.empty(layout.total, torch.uint8).numpy()
    for part in _blocks(layout.total):
        # A carry out of the mantissa rounds up: it comes with a probability of mantissa / 2^23. From an exponent of 254 it
        # would make an infinity, so the largest power of two is the last.
        block = words[part]
        block >>= 9
        block += bits[part] & np.uint32(0x7FFFFFFF)
        block >>= 23
        if block.max() >= 255:
            own = bits[part] >> 23 & 255
            np.copyto(block, own, where=own >= 254)
        exponents[part] = block
    return torch.from_numpy(exponents)


SHARED = -1  # in place of a rank: the same numbers on all ranks


@lru_cache(maxsize=65536)
def _hashed(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest(), "little")


def stream_seed(name: str, seed: int, turn: Turn, rank: int) -> int:
    """64 bits that begin the stream of a tensor at one step; ``rank`` may be `SHARED`."""
    mixed = _hashed(name, seed) ^ ((turn.step + 1) * 0x9E3779B97F4A7C15 + (rank + 2) * 0xC2B2AE3D27D4EB4F)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 27)) & 0x7FFFFFFFFFFFFFFF


def generator(name: str, seed: int, turn: Turn, rank: int) -> np.random.Generator:
    """The random generator of one tensor, step and rank."""
    bits = np.random.SFC64(0)
    begin = stream_seed(name, seed, turn, rank)
    bits.state = {
        "bit_generator": "SFC64",
        "state": {"state": np.array([begin, turn.step & 0xFFFFFFFF, rank + 2, 1], dtype=np.uint64)},
        "has_uint32": 0,
        "uinteger": 0,
    }
    bits.random_raw(12, output=False)  # until the words are mixed
    return np.random.Generator(bits)


def uniform(layout: FlatLayout, device: torch.device, seed: int, turn: Turn) -> Tensor:
    """Numbers in [0, 1) for each element of a layout, float32 (layout.total,)."""
    flat = BUFFERS.empty(layout.total, device=device)
    layout.clear_padding(flat)
    for name, view in zip(layout.names, layout.views(flat), strict=True):
        if device.type == "cpu":
            generator(name, seed, turn, turn.rank).random(dtype=np.float32, out=view.numpy())
        else:
            view.uniform_(generator=torch.Generator(device).manual_seed(stream_seed(name, seed, turn, turn.rank)))
    return flat


def random_words(layout: FlatLayout, seed: int, turn: Turn) -> npt.NDArray[np.uint32]:
    """32 random bits for each element of a layout, on the CPU, uint32 (layout.total,)."""
    words = BUFFERS.empty(layout.total, torch.int32).numpy().view(np.uint32)
    for name, at, span in zip(layout.names, layout.starts, layout.spans, strict=True):
        raw: npt.NDArray[np.uint64] = generator(name, seed, turn, turn.rank).bit_generator.random_raw(-(-span // 2))
        words[at : at + span] = raw.view(np.uint32)[:span]
    return words


def random_bytes(layout: FlatLayout, device: torch.device, seed: int, turn: Turn) -> Tensor:
    """Bytes for each eight elements of a layout, the same on all ranks, uint8 (layout.total / 8,)."""
    data = np.empty(layout.total // 8, dtype=np.uint8)
    for name, at, span in zip(layout.names, layout.starts, layout.spans, strict=True):
        raw: npt.NDArray[np.uint64] = generator(name, seed, turn, SHARED).bit_generator.random_raw(-(-span // 64))
        data[at // 8 : (at + span) // 8] = raw.view(np.uint8)[: span // 8]
    return torch.from_numpy(data).to(device)


_LOW = 2.0**-32  # norms below may lack elements that count: those whose squares vanish have to be small beside it
_SAFE = (2.0**-40, 2.0**40)  # magnitudes whose squares, and sums of any number of them, are far from both ends of float32


def norms(vectors: Sequence[Tensor]) -> Tensor:
    """The norm of each vector, computed one by one: float32 (vectors,)."""
    found: Tensor = torch.stack(torch._foreach_norm(list(vectors)))
    for number in _doubtful(found).nonzero().view(-1).tolist():
        found[number] = _scaled(vectors[number].reshape(1, -1))[0]
    return found


def row_norms(matrix: Tensor) -> Tensor:
    """The norm of each row: float32 (rows,) for (rows, columns)."""
    found: Tensor = torch.linalg.vector_norm(matrix, dim=1)
    doubtful = _doubtful(found)
    if bool(doubtful.any()):
        found[doubtful] = _scaled(matrix[doubtful])
    return found


def _doubtful(found: Tensor) -> Tensor:
    doubtful: Tensor = (found < _LOW) | (found == torch.inf)  # zeros among them, but no NaN
    return doubtful


def _scaled(matrix: Tensor) -> Tensor:
    largest = matrix.abs().amax(1, keepdim=True)
    # A reciprocal would overflow for a subnormal. Two steps by powers of two are exact, but for what is too small to count. Half of an odd
    # exponent is rounded, since two to the power of it would be no power of two: the largest value becomes 1 or 2 at most.
    scale = torch.exp2(-torch.div(torch.frexp(largest).exponent.clamp(-252, 252), 2, rounding_mode="floor").float())
    scaled: Tensor = torch.linalg.vector_norm(matrix * scale * scale, dim=1)
    return scaled / scale.view(-1) / scale.view(-1)


def moderate(values: Tensor) -> tuple[Tensor, float]:
    """Values times a power of two, where their squares could leave float32's range, and that power; else the values as they are, and 1."""
    low, high = torch.aminmax(values)
    largest = max(abs(float(low)), abs(float(high)))
    if _SAFE[0] <= largest <= _SAFE[1] or largest == 0 or not math.isfinite(largest):
        return values, 1.0
    half = 2.0 ** (-math.frexp(largest)[1] // 2)  # in two steps: from a subnormal to 1 is more than one float32 can say
    return values * half * half, half * half
