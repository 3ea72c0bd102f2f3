"""SketchML (Jiang et al., SIGMOD 2018): each element becomes the mean of its quantile bin."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import kernels
from .base import Bundle, Compressor, FlatLayout, Payload, Primitive, Turn, cut, join

_BINS = 64  # six bits
_SAMPLE = 16384


class Sketch(Compressor):
    """64 bins per tensor, as many elements in each, in six bits; bin means are exact, borders are from a sample.

    An element's bin is looked up by the upper 16 bits of its float, as if borders were rounded to bfloat16, wherever that leaves bins
    apart. Elements between borders that bfloat16 cannot tell apart are searched for. Needs error feedback.
    Payload: 64 means of each tensor (float32), then four codes in three bytes. Computed on the CPU.
    """

    primitive = Primitive.ALL_GATHER

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        layout, device = bundle.layout, bundle.flat.device
        values = bundle.flat.cpu().numpy()
        keys = _ordered(values)
        codes = np.zeros(layout.total, np.uint8)
        means = np.empty((len(layout.names), _BINS), np.float32)
        for row, size, at in zip(means, layout.sizes, layout.starts, strict=True):
            part = slice(at, at + size)
            codes[part] = _bins(keys[part], values[part])
            row[:] = _means(codes[part], values[part])
        return Payload(layout, join(torch.from_numpy(means), torch.from_numpy(_pack6(codes))).to(device))

    def decompress(self, payload: Payload) -> Bundle:
        layout, count = payload.layout, len(payload.layout.names)
        means, packed = cut(payload.data, (torch.float32, count * _BINS), (torch.uint8, layout.total * 3 // 4))
        flat = kernels.look_up_each(_unpack6(packed), layout, means.view(count, _BINS, 1))
        return Bundle(layout, layout.clear_padding(flat))

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        return layout.total * 3 // 4 + 4 * _BINS * len(layout.names)


def _ordered(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper 16 bits of floats, so changed that they are in the floats' order."""
    upper = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return upper ^ ((upper.view(np.int16) >> 15).view(np.uint16) | np.uint16(0x8000))


def _bins(keys: npt.NDArray[np.uint16], values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """The bin of each element, by borders between equal parts of a sorted sample."""
    sample = np.sort(values[:: max(1, values.size // _SAMPLE)])
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


def _means(codes: npt.NDArray[np.uint8], values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    counts = np.bincount(codes, minlength=_BINS)
    sums = np.bincount(codes, weights=values, minlength=_BINS)
    return np.asarray(sums / np.maximum(counts, 1), dtype=np.float64)


def _pack6(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    a, b, c, d = codes.reshape(-1, 4).T
    packed = np.empty((codes.size // 4, 3), np.uint8)
    packed[:, 0] = a | b << 6
    packed[:, 1] = b >> 2 | c << 4
    packed[:, 2] = c >> 4 | d << 2
    return packed.reshape(-1)


def _unpack6(packed: Tensor) -> Tensor:
    x, y, z = packed.view(-1, 3).unbind(1)
    return torch.stack([x & 63, x >> 6 | (y & 15) << 2, y >> 4 | (z & 3) << 4, z >> 2], dim=1).view(-1)
