"""Fused kernels for CUDA: one pass over a whole group, whatever the number of its tensors.

What is per tensor (thresholds, scales, seeds) is looked up by the number of the tensor that each run of eight elements belongs to.
Random numbers count from the beginning of a tensor, so that a group gives what its tensors give one by one; they are not those of a CPU.
With TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

# mypy: disallow-untyped-decorators=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .base import FlatLayout

_BLOCK = 1024


@triton.jit
def _count(flat, segments, thresholds, counts, total, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    threshold = tl.load(thresholds + tl.load(segments + at // 8, mask=inside, other=0), mask=inside, other=0.0)
    taken = inside & ~(tl.abs(tl.load(flat + at, mask=inside, other=0.0)) < threshold)
    tl.store(counts + tl.program_id(0), tl.sum(taken.to(tl.int32), axis=0))


@triton.jit
def _write(flat, segments, thresholds, ends, found, total, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    threshold = tl.load(thresholds + tl.load(segments + at // 8, mask=inside, other=0), mask=inside, other=0.0)
    taken = (inside & ~(tl.abs(tl.load(flat + at, mask=inside, other=0.0)) < threshold)).to(tl.int32)
    place = tl.load(ends + tl.program_id(0)) - tl.sum(taken, axis=0) + tl.cumsum(taken, axis=0) - 1
    tl.store(found + place, at, mask=taken == 1)


def select(flat: Tensor, layout: FlatLayout, thresholds: Tensor) -> Tensor:
    """Implements `kernels.select`: compares, counts, and writes indices in their order."""
    total, grid = layout.total, (triton.cdiv(layout.total, _BLOCK),)
    segments = layout.segments(flat.device)
    counts = torch.empty(grid[0], dtype=torch.int32, device=flat.device)
    _count[grid](flat, segments, thresholds, counts, total, BLOCK=_BLOCK)
    ends = counts.cumsum(0, dtype=torch.int32)
    found = torch.empty(int(ends[-1]), dtype=torch.int32, device=flat.device)
    _write[grid](flat, segments, thresholds, ends, found, total, BLOCK=_BLOCK)
    return found


@triton.jit
def _pack(flat, packed, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    byte = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < count
    bits = tl.zeros([BLOCK], dtype=tl.int32)
    for place in tl.static_range(8):
        value = tl.load(flat + byte * 8 + place, mask=inside, other=0.0)
        bits |= (value >= 0).to(tl.int32) << place
    tl.store(packed + byte, bits.to(tl.uint8), mask=inside)


def pack_signs(flat: Tensor) -> Tensor:
    """Implements `kernels.pack_signs`."""
    count = flat.numel() // 8
    packed = torch.empty(count, dtype=torch.uint8, device=flat.device)
    _pack[(triton.cdiv(count, _BLOCK),)](flat, packed, count, BLOCK=_BLOCK)
    return packed


@triton.jit
def _round(flat, segments, starts, seeds, scales, codes, total, limit, BUCKET: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    segment = tl.load(segments + at // 8, mask=inside, other=0)
    random = tl.rand(tl.load(seeds + segment), at - tl.load(starts + segment))
    scale = tl.load(scales + (at // BUCKET if BUCKET else segment), mask=inside, other=0.0)
    scaled = tl.floor(tl.load(flat + at, mask=inside, other=0.0) * scale + random)
    limited = tl.minimum(tl.maximum(scaled, -limit), limit)
    tl.store(codes + at, tl.where(scaled == scaled, limited, 0.0).to(tl.int8), mask=inside)


def stochastic_round(flat: Tensor, layout: FlatLayout, scales: Tensor, limit: int, seeds: Tensor, bucket: int) -> Tensor:
    """Implements `kernels.stochastic_round`."""
    codes = torch.empty(layout.total, dtype=torch.int8, device=flat.device)
    grid = (triton.cdiv(layout.total, _BLOCK),)
    segments, starts = layout.segments(flat.device), _starts(layout, flat)
    _round[grid](flat, segments, starts, seeds, scales, codes, layout.total, float(limit), BUCKET=bucket, BLOCK=_BLOCK)
    return codes


@triton.jit
def _natural(bits, segments, starts, seeds, exponents, total, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    segment = tl.load(segments + at // 8, mask=inside, other=0)
    random = tl.randint(tl.load(seeds + segment), at - tl.load(starts + segment)).to(tl.int32) & 0x7FFFFF
    value = tl.load(bits + at, mask=inside, other=0) & 0x7FFFFFFF
    own = value >> 23
    # The carry out of the mantissa rounds up; from 254 on it would make an infinity, or nonsense of one.
    rounded = tl.where(own >= 254, own, (own << 23 | (value & 0x7FFFFF)) + random >> 23)
    tl.store(exponents + at, rounded.to(tl.uint8), mask=inside)


def natural(flat: Tensor, layout: FlatLayout, seeds: Tensor) -> Tensor:
    """Implements `kernels.natural`."""
    exponents = torch.empty(layout.total, dtype=torch.uint8, device=flat.device)
    grid = (triton.cdiv(layout.total, _BLOCK),)
    bits = flat.view(torch.int32)
    _natural[grid](bits, layout.segments(flat.device), _starts(layout, flat), seeds, exponents, layout.total, BLOCK=_BLOCK)
    return exponents


def _starts(layout: FlatLayout, flat: Tensor) -> Tensor:
    return torch.tensor(layout.starts, dtype=torch.int32, device=flat.device)
