"""AdaQ, adaptive threshold quantisation (Dryden et al., MLHPC 2016): the largest elements of each sign, as one mean per sign.

Payload per tensor: mean of its positive and of its negative elements (float32), how many there are of each (int32); then the indices
(int32) of all, positive ones of a tensor before its negative ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import kernels
from .base import Bundle, Compressor, FlatLayout, Payload, Primitive, Turn, cut, join
from .buffers import BUFFERS
from .sparse import WithRatio, kept, within

_SAMPLE = 65536  # elements of a tensor that are looked at for a border
_LEAST = 2.0**-126  # the smallest normal float32: zeros and nearly zero elements are on neither side


class AdaQ(WithRatio, Compressor):
    """Sends about ``ratio`` of the positive and of the negative elements of each tensor, the largest, as their means.

    Two thresholds, because gradients need not be symmetric; large tensors are sampled for them. Biased: use it with error feedback.
    """

    primitive = Primitive.ALL_GATHER_V

    def __init__(self, ratio: float = 0.01) -> None:
        self.ratio = ratio

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        layout = bundle.layout
        parts = [part for view, at in zip(bundle.views, layout.starts, strict=True) for part in self._sides(view, at)]
        indices = [part[0] for part in parts]
        means = torch.stack([part[1] for part in parts])
        counts = torch.tensor([part.numel() for part in indices], dtype=torch.int32, device=means.device)
        return Payload(layout, join(means, counts, torch.cat(indices).int()))

    def _sides(self, view: Tensor, at: int) -> list[tuple[Tensor, Tensor]]:
        sides = [self._largest(view), self._largest(-view)]
        return [(picked + at, view.index_select(0, picked).sum() / max(1, picked.numel())) for picked in sides]

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

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        if selected is None:
            raise ValueError("AdaQ: how many elements travel depends on the data; give selected=")
        return 16 * len(layout.names) + 4 * selected
