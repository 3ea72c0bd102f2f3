"""Natural compression (Horvath et al., MSML 2022): to one of the two powers of two around each element, unbiased.

The variance is at most an eighth of the squared norm.
"""

from __future__ import annotations

import torch

from . import kernels
from .base import Bundle, Compressor, FlatLayout, Payload, Primitive, Turn, cut, join
from .buffers import BUFFERS

_LOW = 18  # below the smallest biased exponent of seven bits, 19; 0 stands for zero, 127 for values that are not finite
_INFINITE = 127


class Natural(Compressor):
    """Sends sign and exponent: 9 bits. Infinities and NaN come out as infinities, as do values above 2^127 that round up."""

    primitive = Primitive.ALL_GATHER
    unbiased = True

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        exponents = kernels.natural(bundle.flat, bundle.layout, self.seed, turn)
        return Payload(bundle.layout, join(exponents, kernels.pack_signs(bundle.flat)))

    def decompress(self, payload: Payload) -> Bundle:
        total = payload.layout.total
        exponents, bits = cut(payload.data, (torch.uint8, total), (torch.uint8, total // 8))
        powers = BUFFERS.empty(total, torch.int32, bits.device).copy_(exponents).bitwise_left_shift_(23).view(torch.float32)
        return Bundle(payload.layout, powers.mul_(kernels.unpack_signs(bits)))

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        return layout.total + layout.total // 8


class Natural8(Natural):
    """Sign and seven bits of exponent: from 2^-108 to 2^17. Smaller values become zero, larger ones 2^17: unbiased in between."""

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        exponents = kernels.natural(bundle.flat, bundle.layout, self.seed, turn)
        codes = exponents.clamp(_LOW, _LOW + _INFINITE - 1).sub_(_LOW)
        codes.add_(kernels.equal(exponents, 255).view(torch.uint8))  # one above the largest that is finite
        return Payload(bundle.layout, codes.add_(kernels.negative(bundle.flat).view(torch.uint8), alpha=128))

    def decompress(self, payload: Payload) -> Bundle:
        return Bundle(payload.layout, kernels.look_up(payload.data, _table(payload.data.device).unsqueeze(1)))

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        return layout.total


def _table(device: torch.device) -> torch.Tensor:
    """The value of each code, float32 (256,)."""
    codes = torch.arange(128)
    powers = torch.where(codes == 0, 0.0, torch.exp2((codes + _LOW - 127).double())).float()
    powers[_INFINITE] = torch.inf
    return torch.cat([powers, -powers]).to(device)
