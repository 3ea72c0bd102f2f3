"""3LC (Lim et al., MLSys 2019): three values, five of them in a byte, and runs of zeros in one byte more.

Bytes 0 to 242 are five ternary digits; 243 to 255 are runs of 2 to 14 bytes of five zeros each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import kernels
from .base import Bundle, Compressor, FlatLayout, Payload, Primitive, Turn, cut, join
from .buffers import BUFFERS
from .quantise import inverse, magnitudes

_ZEROS = 121  # a byte of five zeros
_RUN = 243  # stands for two of them
_LONGEST = 14
_WEIGHTS = torch.tensor([81, 27, 9, 3, 1])  # of the digits of a byte


class ThreeLC(Compressor):
    """Sends the nearest of -M, 0 and M; M is ``sparsity`` times each tensor's largest magnitude. Needs error feedback.

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
        weights = _WEIGHTS.to(scales)
        quartic = BUFFERS.empty(bundle.layout.total // 5, torch.uint8, scales.device)
        for part, scaled in kernels.scaled_blocks(bundle.flat, bundle.layout, inverse(scales)):
            digits = torch.mv(scaled.round_().view(-1, 5), weights)
            quartic[part.start // 5 : part.stop // 5] = digits.nan_to_num_(0.0).add_(_ZEROS)
        return Payload(bundle.layout, join(scales, shorten(quartic)))

    def decompress(self, payload: Payload) -> Bundle:
        layout = payload.layout
        count = len(layout.names)
        scales, runs = cut(payload.data, (torch.float32, count), (torch.uint8, payload.data.numel() - 4 * count))
        tables = _digits(runs.device) * scales.view(-1, 1, 1)
        return Bundle(layout, kernels.look_up_each(lengthen(runs), layout, tables))

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        """Bytes of the payload, where ``selected`` is the number of bytes left after runs of zeros are shortened."""
        if selected is None:
            raise ValueError("3LC: how long runs of zeros are depends on the data; give selected=")
        return 4 * len(layout.names) + selected


def _digits(device: torch.device) -> Tensor:
    """The five values of each byte, float32 (243, 5)."""
    return (torch.arange(_RUN).unsqueeze(1) // _WEIGHTS % 3 - 1).float().to(device)


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
    """Undoes `shorten`."""
    lengths = (runs.int() - (_RUN - 2)).clamp_(min=1)
    return torch.repeat_interleave(runs.clamp(max=_RUN).masked_fill_(runs >= _RUN, _ZEROS), lengths)
