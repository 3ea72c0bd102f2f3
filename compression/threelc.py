"""3LC (Lim et al., MLSys 2019): three values, five of them in a byte, and runs of zeros in one byte more.

Bytes 0 to 242 are five ternary digits; 243 to 255 are runs of 2 to 14 bytes of five zeros each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import kernels
from .base import Bundle, Compressor, Layout, Payload, Primitive, Turn, cut, join
from .quantise import inverse, magnitudes

_ZEROS = 121  # a byte of five zeros
_RUN = 243  # stands for two of them
_LONGEST = 14
_WEIGHTS = torch.tensor([81, 27, 9, 3, 1])  # of the digits of a byte


class ThreeLC(Compressor):
    """The nearest of -M, 0 and M, where M is ``sparsity`` times the largest magnitude of each tensor. Needs error feedback.

    Payload: M of each tensor (float32), then the bytes.

    Args:
        sparsity: from 1 (most exact) to 2, excluded (sparsest).
    """

    primitive = Primitive.ALL_GATHER_V
    align = 40  # whole bytes of five digits and whole bytes of eight bits

    def __init__(self, sparsity: float = 1.0) -> None:
        if not 1 <= sparsity < 2:
            raise ValueError(f"sparsity={sparsity}: must be at least 1 and below 2")
        self.sparsity = sparsity

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        scales = magnitudes(bundle).mul_(self.sparsity)
        ternary = bundle.flat.clone()
        torch._foreach_mul_(bundle.layout.views(ternary), list(inverse(scales).unbind()))
        quartic = torch.mv(ternary.round_().view(-1, 5), _WEIGHTS.to(ternary)).nan_to_num_(0.0).add_(_ZEROS)
        return Payload(bundle.layout, join(scales, shorten(quartic.to(torch.uint8))))

    def decompress(self, payload: Payload) -> Bundle:
        layout = payload.layout
        count = len(layout.names)
        scales, runs = cut(payload.data, (torch.float32, count), (torch.uint8, payload.data.numel() - 4 * count))
        flat = _digits(runs.device).index_select(0, lengthen(runs).int()).view(-1)
        torch._foreach_mul_(layout.views(flat), list(scales.unbind()))
        return Bundle(layout, flat)

    def wire_bytes(self, layout: Layout, *, world: int = 1, selected: int | None = None) -> int:
        """Here ``selected`` is the number of bytes that runs have come down to."""
        if selected is None:
            raise ValueError("3LC: how long runs of zeros are depends on the data; give selected=")
        return 4 * len(layout.names) + selected


def _digits(device: torch.device) -> Tensor:
    """The five values of each byte, float32 (243, 5)."""
    return (torch.arange(_RUN).unsqueeze(1) // _WEIGHTS % 3 - 1).float().to(device)


def shorten(quartic: Tensor) -> Tensor:
    """Runs of `_ZEROS` as one byte each, the longer ones in pieces; uint8 in, uint8 out."""
    zero = quartic == _ZEROS
    border = zero.new_zeros(1)
    first = kernels.indices(zero & ~torch.cat([border, zero[:-1]]))
    lengths = kernels.indices(zero & ~torch.cat([zero[1:], border])) + 1 - first
    pieces = (lengths + _LONGEST - 1) // _LONGEST
    # Number of each piece within its run.
    numbers = torch.arange(int(pieces.sum()), device=first.device) - torch.repeat_interleave(pieces.cumsum(0) - pieces, pieces)
    kept = ~zero
    kept[torch.repeat_interleave(first, pieces) + _LONGEST * numbers] = True
    short = quartic[kept]
    taken = (torch.repeat_interleave(lengths, pieces) - _LONGEST * numbers).clamp_(max=_LONGEST)
    short[short == _ZEROS] = torch.where(taken > 1, taken + (_RUN - 2), _ZEROS).to(torch.uint8)
    return short


def lengthen(runs: Tensor) -> Tensor:
    """Undo `shorten`."""
    lengths = (runs.int() - (_RUN - 2)).clamp_(min=1)
    return torch.repeat_interleave(runs.clamp(max=_RUN).masked_fill_(runs >= _RUN, _ZEROS), lengths)
