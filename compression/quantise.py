"""Stochastic quantisers: each element becomes a small integer, at random so that its expectation is the element."""

from __future__ import annotations

import torch
from torch import Tensor

from . import kernels
from .base import Bundle, CollectiveRequest, Compressor, Exchange, FlatLayout, Payload, Primitive, Reducer, Turn, cut, divided, join
from .buffers import BUFFERS
from .norms import norms, row_norms

_LEAST = 2.0**-126  # its reciprocal is finite


def magnitudes(bundle: Bundle) -> Tensor:
    """The largest magnitude of each tensor, float32 (tensors,); NaN where one is in it."""
    ends = [torch.aminmax(view) for view in bundle.views]
    return torch.stack([torch.maximum(-end.min, end.max) for end in ends])


def inverse(scales: Tensor, levels: float = 1.0) -> Tensor:
    """``levels / scales``, or 0 where that is not finite: for scales that are zero, nearly zero, or not finite themselves."""
    return (levels / scales).nan_to_num_(0.0, 0.0, 0.0)


def divisible(scales: Tensor, levels: float = 1.0) -> Tensor:
    """Scales of which none is so small that its `inverse` is 0: such a one is made larger, which leaves rounding unbiased. 0 stays 0."""
    return torch.where(scales > 0, scales.clamp(min=levels * _LEAST), scales)


def check_bucket(bucket: int) -> int:
    if bucket < 8 or bucket % 8:
        raise ValueError(f"bucket={bucket}: must be a multiple of 8")
    return bucket


class QSGD(Compressor):
    """Sends each bucket's L2 norm and, per element, one of ``2 levels + 1`` multiples of a fraction of it. Alistarh et al., NeurIPS 2017.

    The variance is at most min(b / s^2, sqrt(b) / s) times the squared norm, for buckets of b elements and s levels. Finite values whose
    norm overflows float32 come out as NaN. Payload: norms (float32), then codes of 4 bits (up to 7 levels) or 8 (up to 127).

    Args:
        levels: s.
        bucket: elements that share a norm, a multiple of 8; tensors begin with a bucket of their own.
        seed: of the rounding.
    """

    primitive = Primitive.ALL_GATHER
    unbiased = True

    def __init__(self, levels: int = 127, bucket: int = 128, seed: int = 0) -> None:
        if not 1 <= levels <= 127:
            raise ValueError(f"levels={levels}: must be from 1 to 127; up to 7 take half the bytes")
        self.levels, self.align, self.seed = levels, check_bucket(bucket), seed
        self._bits = 4 if levels <= 7 else 8

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        lengths = divisible(row_norms(bundle.flat.view(-1, self.align)), self.levels)
        codes = kernels.stochastic_round(
            bundle.flat, bundle.layout, inverse(lengths, self.levels), self.levels, self.seed, turn, bucket=self.align
        )
        packed = codes if self._bits == 8 else kernels.pack_small((codes + 8).view(torch.uint8), 4)
        return Payload(bundle.layout, join(lengths, packed))

    def decompress(self, payload: Payload) -> Bundle:
        layout = payload.layout
        buckets = layout.total // self.align
        lengths, packed = cut(payload.data, (torch.float32, buckets), (torch.int8, layout.total * self._bits // 8))
        flat = (
            BUFFERS.empty(layout.total, device=packed.device).copy_(packed)
            if self._bits == 8
            else kernels.unpack_small(packed.view(torch.uint8), 4, 8)
        )
        flat.view(buckets, -1).mul_((lengths / self.levels).unsqueeze(1))
        return Bundle(layout, flat)

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        return layout.total * self._bits // 8 + 4 * (layout.total // self.align)


class TernGrad(Compressor):
    """Rounds each element to -1, 0 or 1 times its tensor's largest magnitude, in 2 bits. Wen et al., NeurIPS 2017.

    Args:
        clip: magnitudes above this many standard deviations of the tensor are clipped to it, which bounds the variance and is
            a bias. They are taken about zero: about the mean, elements that are nearly alike would all be clipped to nearly nothing.
            None: unbiased.
        seed: of the rounding.
    """

    primitive = Primitive.ALL_GATHER

    def __init__(self, clip: float | None = 2.5, seed: int = 0) -> None:
        if clip is not None and clip <= 0:
            raise ValueError(f"clip={clip}: must be above 0, in standard deviations, or None")
        self.clip, self.seed = clip, seed
        self.unbiased = clip is None

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        scales = magnitudes(bundle)
        if self.clip is not None:
            sizes = torch.tensor(bundle.layout.sizes, device=scales.device)
            scales = torch.minimum(scales, self.clip * norms(bundle.views) / sizes.sqrt())
        scales = divisible(scales)
        codes = kernels.stochastic_round(bundle.flat, bundle.layout, inverse(scales), 1, self.seed, turn)
        return Payload(bundle.layout, join(scales, kernels.pack_small((codes + 1).view(torch.uint8), 2)))

    def decompress(self, payload: Payload) -> Bundle:
        layout = payload.layout
        scales, packed = cut(payload.data, (torch.float32, len(layout.names)), (torch.uint8, layout.total // 4))
        tables = kernels.small_table(packed.device, 2, 1) * scales.view(-1, 1, 1)
        return Bundle(layout, kernels.look_up_each(packed, layout, tables))

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        return layout.total // 4 + 4 * len(layout.names)


class GlobalInt8(Reducer):
    """Integers that add up under way: all ranks share each bucket's scale, and round so finely that the sum of all fits int8.

    The cleanest path to a quarter of the bytes of an all-reduce: unbiased, no error feedback. After Global-QSGD (Xin et al., 2023).
    A first all-reduce (max) agrees on the scales, a second (sum) adds the integers: exactly, in any order. With p ranks an element of
    the mean is off by less than 1 / (127 // p) of the largest magnitude that any rank has in its bucket, and as a root mean square
    by 0.5 / sqrt(p) of that at most.

    Args:
        bucket: elements that share a scale, a multiple of 8; tensors begin with a bucket of their own.
        seed: of the rounding.
    """

    primitive = Primitive.TWO_ALL_REDUCES
    unbiased = True

    def __init__(self, bucket: int = 128, seed: int = 0) -> None:
        self.align, self.seed = check_bucket(bucket), seed

    def exchange(self, bundle: Bundle, turn: Turn) -> Exchange:
        layout = bundle.layout
        levels = 127 // turn.world
        if levels == 0:
            raise ValueError(f"GlobalInt8 on {turn.world} ranks: their sum fits int8 on at most 127; reduce hierarchically or use QSGD")
        # The bits of magnitudes are in the order of the magnitudes, with NaN above all: as integers they have a maximum in any order.
        ends = torch.aminmax(bundle.flat.view(-1, self.align), dim=1)
        (largest,) = yield CollectiveRequest("max", torch.maximum(-ends.min, ends.max).abs_().view(torch.int32))
        scales = divisible(largest.view(torch.float32), levels)
        codes = kernels.stochastic_round(bundle.flat, layout, inverse(scales, levels), levels, self.seed, turn, bucket=self.align)
        (total,) = yield CollectiveRequest("sum", codes)
        flat = BUFFERS.empty(layout.total, device=total.device).copy_(total)
        flat.view(-1, self.align).mul_((scales / levels).unsqueeze(1))
        return divided(Bundle(layout, flat), turn.world)

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        return layout.total + 4 * (layout.total // self.align)
