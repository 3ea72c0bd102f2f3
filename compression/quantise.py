"""Quantisers: each element becomes one of few values.

- QSGD, TernGrad and Global-QSGD draw it at random, with the element as its expectation.
- AdaQ, adaptive threshold quantisation (Dryden et al., MLHPC 2016), sends the largest elements of each sign as one mean per sign.
- SketchML (Jiang et al., SIGMOD 2018) sends the mean of the quantile bin that an element falls into.
- 3LC (Lim et al., MLSys 2019) has three values, five of them in a byte, and puts runs of zeros into one byte more.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gemini_ft.validation import Seed, checked

from . import kernels
from .base import Bundle, CollectiveRequest, Compressor, Exchange, FlatLayout, Payload, Primitive, Reducer, Turn, cut, divided, join
from .buffers import BUFFERS
from .kernels import norms, row_norms
from .options import Bucket, Clip, Levels, Ratio, Sparsity
from .sparse import WithRatio, kept, within

_LEAST = 2.0**-126  # its reciprocal is finite
_SAMPLE = 65536  # elements of a tensor that AdaQ looks at for a border
_BINS = 64  # of a sketch: six bits
_SAMPLE_FOR_BINS = 16384  # elements of a tensor that a sketch looks at


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


class QSGD(Compressor):
    """Sends each bucket's L2 norm and, per element, one of ``2 levels + 1`` multiples of a fraction of it. Alistarh et al., NeurIPS 2017.

    The variance is at most min(b / s^2, sqrt(b) / s) times the squared norm, for buckets of b elements and s levels. Finite values whose
    norm overflows float32 come out as NaN. Payload: norms (float32), then codes of 4 bits (up to 7 levels) or 8 (up to 127).
    """

    primitive = Primitive.ALL_GATHER
    unbiased = True

    @checked
    def __init__(self, levels: Levels = 127, bucket: Bucket = 128, seed: Seed = 0) -> None:
        self.levels, self.align, self.seed = levels, bucket, seed
        self.bits = 4 if levels <= 7 else 8

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        lengths = divisible(row_norms(bundle.flat.view(-1, self.align)), self.levels)
        codes = kernels.stochastic_round(
            bundle.flat, bundle.layout, inverse(lengths, self.levels), self.levels, self.seed, turn, bucket=self.align
        )
        packed = codes if self.bits == 8 else kernels.pack_small((codes + 8).view(torch.uint8), 4)
        return Payload(layout=bundle.layout, data=join(lengths, packed))

    def decompress(self, payload: Payload) -> Bundle:
        layout = payload.layout
        buckets = layout.total // self.align
        lengths, packed = cut(payload.data, (torch.float32, buckets), (torch.int8, layout.total * self.bits // 8))
        flat = (
            BUFFERS.empty(layout.total, device=packed.device).copy_(packed)
            if self.bits == 8
            else kernels.unpack_small(packed.view(torch.uint8), 4, 8)
        )
        flat.view(buckets, -1).mul_((lengths / self.levels).unsqueeze(1))
        return Bundle(layout, flat)

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        return super().wire_bytes(layout) + 4 * (layout.total // self.align)


class TernGrad(Compressor):
    """Rounds each element to -1, 0 or 1 times its tensor's largest magnitude, in 2 bits. Wen et al., NeurIPS 2017.

    ``clip``: magnitudes above this many standard deviations of the tensor are clipped to it, which bounds the variance and is a bias. They
    are taken about zero: about the mean, elements that are nearly alike would all be clipped to nearly nothing. None: unbiased.
    """

    primitive = Primitive.ALL_GATHER
    bits, scales = 2, 1

    @checked
    def __init__(self, clip: Clip = 2.5, seed: Seed = 0) -> None:
        self.clip, self.seed = clip, seed
        self.unbiased = clip is None

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        scales = magnitudes(bundle)
        if self.clip is not None:
            sizes = scales.new_tensor(bundle.layout.sizes)
            scales = torch.minimum(scales, self.clip * norms(bundle.views) / sizes.sqrt())
        scales = divisible(scales)
        codes = kernels.stochastic_round(bundle.flat, bundle.layout, inverse(scales), 1, self.seed, turn)
        return Payload(layout=bundle.layout, data=join(scales, kernels.pack_small((codes + 1).view(torch.uint8), 2)))

    def decompress(self, payload: Payload) -> Bundle:
        layout = payload.layout
        scales, packed = cut(payload.data, (torch.float32, len(layout.names)), (torch.uint8, layout.total // 4))
        tables = kernels.small_table(packed.device, 2, 1) * scales.view(-1, 1, 1)
        return Bundle(layout, kernels.look_up_each(packed, layout, tables))


class GlobalInt8(Reducer):
    """Integers that add up under way: all ranks share each bucket's scale, and round so finely that the sum of all fits int8.

    The cleanest path to a quarter of the bytes of an all-reduce: unbiased, no error feedback. After Global-QSGD (Xin et al., 2023).
    A first all-reduce (max) agrees on the scales, a second (sum) adds the integers: exactly, in any order. With p ranks an element of
    the mean is off by less than 1 / (127 // p) of the largest magnitude that any rank has in its bucket, and as a root mean square
    by 0.5 / sqrt(p) of that at most.
    """

    primitive = Primitive.TWO_ALL_REDUCES
    unbiased = True

    @checked
    def __init__(self, bucket: Bucket = 128, seed: Seed = 0) -> None:
        self.align, self.seed = bucket, seed

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


class AdaQ(WithRatio, Compressor):
    """Sends about ``ratio`` of the positive and of the negative elements of each tensor, the largest, as their means.

    Two thresholds, because gradients need not be symmetric; large tensors are sampled for them. Biased: use it with error feedback.

    Payload: of each tensor the means of its positive and of its negative elements (float32), then how many there are of each (int32);
    then the indices of all (int32), a tensor's positive elements before its negative ones.
    """

    primitive = Primitive.ALL_GATHER_V
    scales, selected_bytes = 4, 4

    def __init__(self, ratio: Ratio = 0.01) -> None:
        self.ratio = ratio

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        layout = bundle.layout
        indices, means = list[Tensor](), list[Tensor]()
        for view, at in zip(bundle.views, layout.starts, strict=True):
            for picked in (self._largest(view), self._largest(-view)):
                indices.append(picked + at)
                means.append(view.index_select(0, picked).sum() / max(1, picked.numel()))
        counts = torch.tensor([part.numel() for part in indices], dtype=torch.int32, device=bundle.flat.device)
        return Payload(layout=layout, data=join(torch.stack(means), counts, torch.cat(indices).int()))

    def _largest(self, signed: Tensor) -> Tensor:
        """Indices of about ``ratio`` of the positive elements."""
        stride = max(1, signed.numel() // _SAMPLE)
        sample = signed[::stride]
        target = kept(int((sample > 0).sum()), self.ratio)
        border = max(_LEAST, float(sample.topk(target).values[-1])) if target else _LEAST
        found = kernels.not_below(signed, border)
        return within(signed, found, max(1, target * stride)) if found.numel() else found

    def decompress(self, payload: Payload) -> Bundle:
        layout = payload.layout
        sides = 2 * len(layout.names)
        count = payload.data.numel() // 4 - 2 * sides
        means, counts, indices = cut(payload.data, (torch.float32, sides), (torch.int32, sides), (torch.int32, count))
        flat = BUFFERS.zeros(layout.total, device=payload.data.device)
        # A NaN is on both sides, so that its index may come twice: the mean is NaN both times.
        flat.index_copy_(0, indices.long(), torch.repeat_interleave(means, counts))
        return Bundle(layout, flat)


class Sketch(Compressor):
    """64 bins per tensor, as many elements in each, in six bits; bin means are exact, borders are from a sample.

    An element's bin is looked up by the upper 16 bits of its float, as if borders were rounded to bfloat16, wherever that leaves bins
    apart. Elements between borders that bfloat16 cannot tell apart are searched for. Needs error feedback.
    Payload: 64 means of each tensor (float32), then four codes in three bytes. Computed on the CPU.
    """

    primitive = Primitive.ALL_GATHER
    bits, scales = 6, _BINS

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        layout, device = bundle.layout, bundle.flat.device
        values = bundle.flat.cpu().numpy()
        keys = _ordered(values)
        codes = np.zeros(layout.total, np.uint8)
        means = np.empty((len(layout.names), _BINS), np.float32)
        for row, size, at in zip(means, layout.sizes, layout.starts, strict=True):
            part = slice(at, at + size)
            codes[part] = _bins(keys[part], values[part])
            sums = np.bincount(codes[part], weights=values[part], minlength=_BINS)
            row[:] = sums / np.maximum(np.bincount(codes[part], minlength=_BINS), 1)
        return Payload(layout=layout, data=join(torch.from_numpy(means), torch.from_numpy(_pack6(codes))).to(device))

    def decompress(self, payload: Payload) -> Bundle:
        layout, count = payload.layout, len(payload.layout.names)
        means, packed = cut(payload.data, (torch.float32, count * _BINS), (torch.uint8, layout.total * 3 // 4))
        x, y, z = packed.view(-1, 3).unbind(1)
        codes = torch.stack([x & 63, x >> 6 | (y & 15) << 2, y >> 4 | (z & 3) << 4, z >> 2], dim=1).view(-1)
        flat = kernels.look_up_each(codes, layout, means.view(count, _BINS, 1))
        return Bundle(layout, layout.clear_padding(flat))


def _ordered(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper 16 bits of floats, so changed that they are in the floats' order."""
    upper = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return upper ^ ((upper.view(np.int16) >> 15).view(np.uint16) | np.uint16(0x8000))


def _bins(keys: npt.NDArray[np.uint16], values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """The bin of each element, by borders between equal parts of a sorted sample."""
    sample = np.sort(values[:: max(1, values.size // _SAMPLE_FOR_BINS)])
    borders = sample[np.arange(1, _BINS) * sample.size // _BINS]
    upper = np.maximum.accumulate(_ordered(borders).astype(np.int64))  # numpy sorts a NaN last, whatever its sign
    table = np.repeat(np.arange(_BINS, dtype=np.uint8), np.diff(upper, prepend=0, append=65536))
    bins = table[keys]
    crowded = np.unique(upper[:-1][(upper[1:] == upper[:-1]) & (borders[1:] > borders[:-1])])
    if crowded.size:
        among = np.zeros(65536, dtype=bool)
        among[crowded] = True
        places = np.flatnonzero(among[keys])
        bins[places] = np.searchsorted(borders, values[places], side="right")
    return bins


def _pack6(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    a, b, c, d = codes.reshape(-1, 4).T
    packed = np.empty((codes.size // 4, 3), np.uint8)
    packed[:, 0] = a | b << 6
    packed[:, 1] = b >> 2 | c << 4
    packed[:, 2] = c >> 4 | d << 2
    return packed.reshape(-1)


# 3LC: bytes 0 to 242 are five ternary digits; 243 to 255 are runs of 2 to 14 bytes of five zeros each.
_ZEROS = 121  # a byte of five zeros
_RUN = 243  # stands for two of them
_LONGEST = 14
_WEIGHTS = torch.tensor([81, 27, 9, 3, 1])  # of the digits of a byte


class ThreeLC(Compressor):
    """Sends the nearest of -M, 0 and M; M is ``sparsity`` times each tensor's largest magnitude. Needs error feedback.

    Payload: M of each tensor (float32), then bytes: five digits each, or a run of zeros.
    """

    primitive = Primitive.ALL_GATHER_V
    scales, selected_bytes = 1, 1  # bytes after runs of zeros are shortened
    align = 40  # whole bytes of five digits and whole bytes of eight bits

    @checked
    def __init__(self, sparsity: Sparsity = 1.0) -> None:
        self.sparsity = sparsity

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        scales = magnitudes(bundle).mul_(self.sparsity)
        weights = _WEIGHTS.to(scales)
        quartic = BUFFERS.empty(bundle.layout.total // 5, torch.uint8, scales.device)
        for part, scaled in kernels.scaled_blocks(bundle.flat, bundle.layout, inverse(scales)):
            digits = torch.mv(scaled.round_().view(-1, 5), weights)
            quartic[part.start // 5 : part.stop // 5] = digits.nan_to_num_(0.0).add_(_ZEROS)
        return Payload(layout=bundle.layout, data=join(scales, shorten(quartic)))

    def decompress(self, payload: Payload) -> Bundle:
        layout = payload.layout
        count = len(layout.names)
        scales, runs = cut(payload.data, (torch.float32, count), (torch.uint8, payload.data.numel() - 4 * count))
        tables = (torch.arange(_RUN).unsqueeze(1) // _WEIGHTS % 3 - 1).float().to(runs.device) * scales.view(-1, 1, 1)
        return Bundle(layout, kernels.look_up_each(lengthen(runs), layout, tables))


def shorten(quartic: Tensor) -> Tensor:
    """Runs of `_ZEROS` as one byte each, the longer ones in pieces; uint8 in, uint8 out."""
    others = kernels.indices(kernels.equal(quartic, _ZEROS).logical_not_())
    gaps = torch.cat([others.new_full((1,), -1), others, others.new_full((1,), quartic.numel())]).diff() - 1
    pieces = (gaps + _LONGEST - 1) // _LONGEST
    ends = (pieces + 1).cumsum(0) - 1  # where the element after a gap lies
    short = quartic.new_full((int(ends[-1]),), _RUN + _LONGEST - 2)
    short[ends[:-1]] = quartic[others]
    last = gaps - _LONGEST * (pieces - 1)  # of a gap that is not empty: the zeros in its last piece
    some = kernels.indices(gaps > 0)
    short[ends[some] - 1] = torch.where(last > 1, last + (_RUN - 2), _ZEROS)[some].to(torch.uint8)
    return short


def lengthen(runs: Tensor) -> Tensor:
    lengths = (runs.int() - (_RUN - 2)).clamp_(min=1)
    return torch.repeat_interleave(runs.clamp(max=_RUN).masked_fill_(runs >= _RUN, _ZEROS), lengths)
