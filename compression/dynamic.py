"""8-bit dynamic tree quantisation (Dettmers, ICLR 2016): a sign, a decimal exponent of variable length, and a fraction in what is left.

Seven decades below the largest magnitude, the upper ones finer.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from . import kernels
from .base import Bundle, Compressor, FlatLayout, Payload, Primitive, Turn, cut, join
from .buffers import BUFFERS
from .quantise import inverse, magnitudes

_DECADES = 7


class Dynamic8(Compressor):
    """Sends each tensor's largest magnitude, and for each element the nearest of 256 fractions of it. Needs error feedback."""

    primitive = Primitive.ALL_GATHER

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        scales = magnitudes(bundle)
        codes = BUFFERS.empty(bundle.layout.total, torch.uint8, scales.device)
        for part, relative in kernels.scaled_blocks(bundle.flat, bundle.layout, inverse(scales)):
            codes[part] = nearest(relative)
        return Payload(bundle.layout, join(scales, codes))

    def decompress(self, payload: Payload) -> Bundle:
        layout = payload.layout
        scales, codes = cut(payload.data, (torch.float32, len(layout.names)), (torch.uint8, layout.total))
        tables = codebook(codes.device).view(1, 256, 1) * scales.view(-1, 1, 1)
        return Bundle(layout, kernels.look_up_each(codes, layout, tables))

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        return layout.total + 4 * len(layout.names)


@cache
def codebook(device: torch.device) -> Tensor:
    """The 256 fractions in ascending order, float32: 0, 1, and in decade i the middles of 2^i equal parts of [0.1, 1]."""
    fractions = []
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float64)
        fractions.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - _DECADES + 1))
    positive = torch.cat(fractions)
    return torch.cat([positive, -positive, torch.tensor([0.0, 1.0])]).sort().values.float().to(device)


@cache
def _search(device: torch.device) -> tuple[Tensor, Tensor]:
    """Tables by a float's upper 16 bits: the code of the least float that begins so, and where the next code begins.

    Those bits resolve more finely than the codes lie apart, so at most one border is among the floats that share them.
    """
    codes = codebook(torch.device("cpu")).double()
    borders = ((codes[:-1] + codes[1:]) / 2).float()
    upper = torch.arange(65536, dtype=torch.int32) << 16
    ends = torch.stack([upper.view(torch.float32), (upper | 0xFFFF).view(torch.float32)])
    first = torch.bucketize(ends.nan_to_num(0.0).amin(0), borders)
    return first.to(device=device, dtype=torch.int16), torch.cat([borders, torch.tensor([torch.inf])]).to(device)


def nearest(relative: Tensor) -> Tensor:
    """Codes of the nearest fractions, uint8; ``relative`` is float32 in [-1, 1]."""
    first, borders = _search(relative.device)
    codes = first.index_select(0, (relative.view(torch.int32) >> 16 & 0xFFFF))
    passed = relative > borders.index_select(0, codes.int())
    return codes.add_(passed).to(torch.uint8)
