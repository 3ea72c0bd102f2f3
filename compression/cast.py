"""Narrower formats, element by element.

float16 and bfloat16, added up under way: the baseline that every other method has to beat. Natural compression (Horvath et al., MSML 2022):
one of the two powers of two around each element, unbiased, with a variance of at most an eighth of the squared norm. 8-bit dynamic tree
quantisation (Dettmers, ICLR 2016): a sign, a decimal exponent of variable length, and a fraction in what is left; it reaches seven decades
below the largest magnitude, and is finer in the upper ones.

INCEPTIONN (Li et al., MICRO 2018): floats truncated to words of 0 to 32 bits under an error bound, as its network cards do it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from gemini_ft.validation import Seed, checked

from . import kernels, truncation
from .base import Bundle, Compressor, Payload, Primitive, Summed, Turn, cut, join
from .buffers import BUFFERS
from .quantise import inverse, magnitudes


class Identity(Summed):
    """Sends float32 as it is: nothing is left out."""

    dtype = torch.float32
    bits = 32
    unbiased = True

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        return Payload(layout=bundle.layout, data=BUFFERS.empty(bundle.layout.total, self.dtype, bundle.flat.device).copy_(bundle.flat))

    def decompress(self, payload: Payload) -> Bundle:
        return Bundle(payload.layout, BUFFERS.empty(payload.layout.total, device=payload.data.device).copy_(payload.data))


class Fp16(Identity):
    """Rounds to the nearest float16. Values above 65504 become infinite, as under AMP."""

    dtype = torch.float16
    bits = 16
    unbiased = False


class Bf16(Identity):
    """Rounds to the nearest bfloat16, which has float32's range and 8 bits of precision."""

    dtype = torch.bfloat16
    bits = 16
    unbiased = False


_LOW = 18  # below the smallest biased exponent of seven bits, 19; 0 stands for zero, 127 for values that are not finite
_INFINITE = 127


class Natural(Compressor):
    """Sends sign and exponent: 9 bits. Infinities and NaN come out as infinities, as do values above 2^127 that round up."""

    primitive = Primitive.ALL_GATHER
    unbiased = True
    bits = 9

    def __init__(self, seed: Seed = 0) -> None:
        self.seed = seed

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        exponents = kernels.natural(bundle.flat, bundle.layout, self.seed, turn)
        return Payload(layout=bundle.layout, data=join(exponents, kernels.pack_signs(bundle.flat)))

    def decompress(self, payload: Payload) -> Bundle:
        total = payload.layout.total
        exponents, bits = cut(payload.data, (torch.uint8, total), (torch.uint8, total // 8))
        powers = BUFFERS.empty(total, torch.int32, bits.device).copy_(exponents).bitwise_left_shift_(23).view(torch.float32)
        return Bundle(payload.layout, powers.mul_(kernels.unpack_signs(bits)))


class Natural8(Natural):
    """Sign and seven bits of exponent: from 2^-108 to 2^17. Smaller values become zero, larger ones 2^17: unbiased in between."""

    bits = 8

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        exponents = kernels.natural(bundle.flat, bundle.layout, self.seed, turn)
        codes = exponents.clamp(_LOW, _LOW + _INFINITE - 1).sub_(_LOW)
        codes.add_(kernels.equal(exponents, 255).view(torch.uint8))  # one above the largest that is finite
        return Payload(layout=bundle.layout, data=codes.add_(kernels.negative(bundle.flat).view(torch.uint8), alpha=128))

    def decompress(self, payload: Payload) -> Bundle:
        return Bundle(payload.layout, kernels.look_up(payload.data, _table(payload.data.device).unsqueeze(1)))


def _table(device: torch.device) -> torch.Tensor:
    """The value of each code, float32 (256,)."""
    codes = torch.arange(128)
    powers = torch.where(codes == 0, 0.0, torch.exp2((codes + _LOW - 127).double())).float()
    powers[_INFINITE] = torch.inf
    return torch.cat([powers, -powers]).to(device)


_DECADES = 7


class Dynamic8(Compressor):
    """Sends each tensor's largest magnitude, and for each element the nearest of 256 fractions of it. Needs error feedback."""

    primitive = Primitive.ALL_GATHER
    bits, scales = 8, 1

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        scales = magnitudes(bundle)
        codes = BUFFERS.empty(bundle.layout.total, torch.uint8, scales.device)
        for part, relative in kernels.scaled_blocks(bundle.flat, bundle.layout, inverse(scales)):
            codes[part] = nearest(relative)
        return Payload(layout=bundle.layout, data=join(scales, codes))

    def decompress(self, payload: Payload) -> Bundle:
        layout = payload.layout
        scales, codes = cut(payload.data, (torch.float32, len(layout.names)), (torch.uint8, layout.total))
        tables = codebook(codes.device).view(1, 256, 1) * scales.view(-1, 1, 1)
        return Bundle(layout, kernels.look_up_each(codes, layout, tables))


@cache
def codebook(device: torch.device) -> Tensor:
    """The 256 fractions in ascending order, float32: 0, 1, and in decade i the middles of 2^i equal parts of [0.1, 1]."""
    fractions = []
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float64)
        fractions.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - _DECADES + 1))
    positive = torch.cat(fractions)
    return torch.cat([positive, -positive, torch.tensor([0.0, 1.0], dtype=torch.float64)]).sort().values.float().to(device)


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


class Inceptionn(Compressor):
    """Sends each element as a word of 0, 8, 16 or 32 bits, by its magnitude, and a tag of 2 bits. No element is off by 2^-bound.

    Elements from 1 on, infinities and NaN travel as they are; below 2^-bound they wait in the residual. The paper keeps none
    (``feedback=0``). `truncation` has the format. The exchange of the paper, in which sums travel truncated too, is
    `gemini_ft.sync.ring`.

    ``bound``: b of the error bound 2^-b, from 1 to 14; the paper's are 6, 8 and 10.
    """

    primitive = Primitive.ALL_GATHER_V
    bits, selected_bytes = 2, 1  # tags, and the bytes of all words

    @checked
    def __init__(self, bound: truncation.Bound = 10) -> None:
        self.bound = bound

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        return Payload(layout=bundle.layout, data=join(*truncation.encode(bundle.flat, self.bound)))

    def decompress(self, payload: Payload) -> Bundle:
        flat = BUFFERS.empty(payload.layout.total, device=payload.data.device)
        return Bundle(payload.layout, truncation.decode(payload.data, flat, self.bound))
