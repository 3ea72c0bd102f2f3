"""SparseLoCo's payload: the largest of each chunk, in 14 bits each.

Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025. A chunk is a run of 4096 elements of a tensor, so that an
index takes 12 bits. A value takes two: its sign, and whether its magnitude is above the mean of those that its tensor sends; it arrives as
the mean of the values that share both. The authors' implementation divides matrices into squares of 64 by 64, and draws borders at
multiples of a standard deviation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import kernels
from .base import Bundle, FlatLayout, Payload, Primitive, Turn, cut, join
from .options import Ratio
from .sparse import Scattered, WithRatio, kept

CHUNK = 4096
_CODES = 4


class ChunkedTopK(WithRatio, Scattered):
    """Sends the max(1, floor(ratio c)) largest magnitudes of each chunk of c elements, as one of four values. Needs error feedback.

    Payload: four means of each tensor (float32), then indices in chunks, two in three bytes, then codes, four a byte.
    """

    primitive = Primitive.ALL_GATHER

    def __init__(self, ratio: Ratio = 1 / 64) -> None:
        self.ratio = ratio

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        means, indices, codes = list[Tensor](), list[Tensor](), list[Tensor]()
        for view, magnitudes in zip(bundle.views, bundle.magnitudes(), strict=True):
            picked = [
                magnitudes[begin : begin + rows * chunk].view(rows, chunk).topk(kept(chunk, self.ratio), sorted=False).indices.view(-1)
                for begin, rows, chunk in _chunks(view.numel())
            ]
            indices += picked
            values = view.index_select(0, torch.cat(picked) + self._begins(view.numel()).to(view.device))
            code = (values < 0) + 2 * (values.abs() > values.abs().double().mean())
            sides = torch.arange(_CODES, device=view.device).unsqueeze(1) == code
            means.append((torch.where(sides, values.double(), 0.0).sum(1) / sides.sum(1).clamp(min=1)).float())
            codes.append(code.to(torch.uint8))
        return Payload(layout=bundle.layout, data=join(torch.cat(means), _pack12(torch.cat(indices)), _pack2(torch.cat(codes))))

    def entries(self, payload: Payload) -> tuple[Tensor, Tensor]:
        layout, device = payload.layout, payload.data.device
        begins = [self._begins(size) + at for size, at in zip(layout.sizes, layout.starts, strict=True)]
        count = sum(part.numel() for part in begins)
        tables, packed, codes = cut(payload.data, (torch.float32, _CODES * len(begins)), *_packed(count))
        tables = tables.view(-1, _CODES)
        code = kernels.unpack_small(codes, 2, 0)[:count].long()
        values = [table[own] for table, own in zip(tables, code.split_with_sizes([part.numel() for part in begins]), strict=True)]
        return torch.cat(values), torch.cat(begins).to(device) + _unpack12(packed)[:count]

    def _begins(self, size: int) -> Tensor:
        """The first element of the chunk that each element sent of a tensor of ``size`` elements lies in, int64."""
        found = [
            torch.arange(begin, begin + rows * chunk, chunk).repeat_interleave(kept(chunk, self.ratio))
            for begin, rows, chunk in _chunks(size)
        ]
        return torch.cat(found)

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        count = sum(rows * kept(chunk, self.ratio) for size in layout.sizes for _, rows, chunk in _chunks(size))
        return 4 * _CODES * len(layout.sizes) + sum(nbytes for _, nbytes in _packed(count))


def _chunks(size: int) -> list[tuple[int, int, int]]:
    """Runs of chunks of equal length in a tensor: the first element, how many chunks, and elements of each."""
    rows, rest = divmod(size, CHUNK)
    return [(0, rows, CHUNK)] * (rows > 0) + [(rows * CHUNK, 1, rest)] * (rest > 0)


def _packed(count: int) -> tuple[tuple[torch.dtype, int], tuple[torch.dtype, int]]:
    """The bytes that ``count`` indices take, and as many codes."""
    return (torch.uint8, -(-count // 2) * 3), (torch.uint8, -(-count // 4))


def _pack2(codes: Tensor) -> Tensor:
    return kernels.pack_small(torch.nn.functional.pad(codes, (0, -codes.numel() % 4)), 2)


def _pack12(indices: Tensor) -> Tensor:
    """Numbers below 4096, two in three bytes; uint8."""
    one, two = torch.nn.functional.pad(indices, (0, indices.numel() % 2)).view(-1, 2).unbind(1)
    return torch.stack([one & 255, one >> 8 | (two & 15) << 4, two >> 4], dim=1).to(torch.uint8).view(-1)


def _unpack12(packed: Tensor) -> Tensor:
    one, two, three = packed.long().view(-1, 3).unbind(1)
    return torch.stack([one | (two & 15) << 8, two >> 4 | three << 4], dim=1).view(-1)
