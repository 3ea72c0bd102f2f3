"""Compressors that send one bit per element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from gemini_ft.validation import Seed, checked

from . import kernels
from .base import Bundle, CollectiveRequest, Compressor, Exchange, FlatLayout, Payload, Primitive, Reducer, Turn, cut, join
from .buffers import BUFFERS
from .feedback import Memory, non_finite, put_back
from .kernels import random_bytes
from .options import Momentum


class ScaledSign(Compressor):
    """EF-signSGD: sends the mean magnitude of each tensor and one sign bit per element; zero counts as positive.

    Needs error feedback. Karimireddy et al., ICML 2019. Payload: scales (float32), then the bits.
    """

    primitive = Primitive.ALL_GATHER
    bits, scales = 1, 1

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        sums = torch.stack([view.sum() for view in bundle.magnitudes()])
        sizes = torch.tensor(bundle.layout.sizes, device=sums.device).clamp_(min=1)
        return Payload(layout=bundle.layout, data=join(sums / sizes, kernels.pack_signs(bundle.flat)))

    def decompress(self, payload: Payload) -> Bundle:
        layout = payload.layout
        scales, bits = cut(payload.data, (torch.float32, len(layout.names)), (torch.uint8, layout.total // 8))
        return Bundle(layout, _of_bits(layout, bits, -scales, scales))


class OneBit(Compressor):
    """1-bit SGD: sends the means of each tensor's negative and other elements, and one bit per element to tell them apart.

    Needs error feedback. Seide et al., Interspeech 2014. Payload: both means of each tensor (float32), then the bits.
    """

    primitive = Primitive.ALL_GATHER
    bits, scales = 1, 2

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        layout = bundle.layout
        bits = kernels.pack_signs(bundle.flat)
        below = torch.stack([torch.count_nonzero(part) for part in layout.views(kernels.negative(bundle.flat))])
        sizes = torch.tensor(layout.sizes, device=below.device)
        # Each side is added up for itself: as the difference of two sums over all elements, the smaller one would be lost in rounding.
        side = torch.clamp(bundle.flat, max=0, out=BUFFERS.empty(layout.total, device=bundle.flat.device))
        low = torch.stack([view.sum() for view in layout.views(side)]) / below.clamp(min=1)
        torch.clamp(bundle.flat, min=0, out=side)
        high = torch.stack([view.sum() for view in layout.views(side)]) / (sizes - below).clamp(min=1)
        return Payload(layout=layout, data=join(low, high, bits))

    def decompress(self, payload: Payload) -> Bundle:
        layout, count = payload.layout, len(payload.layout.names)
        low, high, bits = cut(payload.data, (torch.float32, count), (torch.float32, count), (torch.uint8, payload.layout.total // 8))
        return Bundle(layout, _of_bits(layout, bits, low, high))


def _of_bits(layout: FlatLayout, bits: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Each tensor's ``high`` where a bit is set, its ``low`` elsewhere, zeros as padding: float32 (layout.total,)."""
    tables = torch.where(kernels.bit_table(bits.device), high.view(-1, 1, 1), low.view(-1, 1, 1))
    return layout.clear_padding(kernels.look_up_each(bits, layout, tables))


class MajorityVote(Reducer):
    """signSGD: the sign that most ranks have, +1 or -1. Bernstein et al., ICLR 2019.

    One bit an element each way: every rank counts the votes on its part of the elements. A tie, and a gradient that is zero, is
    decided by a coin that all ranks see alike, so that neither drifts. Signs have no scale: the learning rate is that of a sign
    method (about 1e-4), and there is no error feedback.

    What travels per rank: a block for each rank, of sign bits and of one bit a tensor that says whether all of it is finite.

    Args:
        momentum: Signum's beta; 0: signSGD. Votes are on the momentum ``m = beta m + (1 - beta) g``.
        seed: of the coin; must be equal on all ranks.
    """

    primitive = Primitive.ALL_TO_ALL
    kept = ("averages",)

    @checked
    def __init__(self, momentum: Momentum = 0.0, seed: Seed = 0) -> None:
        self.momentum, self.seed = momentum, seed
        self.averages = Memory()

    def exchange(self, bundle: Bundle, turn: Turn) -> Exchange:
        layout, device = bundle.layout, bundle.flat.device
        bad = non_finite(bundle) if self.momentum else []
        coin = cache(partial(random_bytes, layout, device, self.seed, turn))
        bits, finite = signs(self._averaged(bundle, bad), coin)
        if not finite:
            bad = non_finite(bundle)
        block = -(-bits.numel() // turn.world)
        flags = torch.zeros(-(-len(layout.names) // 8) * 8, dtype=torch.bool, device=device)
        flags[bad] = True
        packed = kernels.pack(flags)
        ballots = [join(part, packed) for part in _blocks(bits, block, turn.world)]
        sent = torch.cat(ballots)
        length = ballots[0].numel()
        votes = yield CollectiveRequest("all_to_all", sent, [length] * turn.world, length)
        counted = yield CollectiveRequest(
            "gather", majority([vote[:block] for vote in votes], lambda: _blocks(coin(), block, turn.world)[turn.rank])
        )
        flat = kernels.unpack_signs(torch.cat(counted)[: bits.numel()])
        for number in _flagged([vote[block:] for vote in votes], len(layout.names)):
            layout.views(flat)[number].fill_(torch.nan)
        return Bundle(layout, layout.clear_padding(flat))

    def _averaged(self, bundle: Bundle, bad: Sequence[int]) -> Tensor:
        if self.momentum == 0:
            return bundle.flat
        average = self.averages.flat(bundle.layout, bundle.flat.device)
        before = average.clone() if bad else None
        average.lerp_(bundle.flat, 1 - self.momentum)
        put_back(bundle.layout, average, before, bad)
        return average

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        block = -(-(layout.total // 8) // world)
        return world * (block + -(-len(layout.names) // 8)) + block


def signs(flat: Tensor, coin: Callable[[], Tensor]) -> tuple[Tensor, bool]:
    """Packed signs, with the coin's bit where an element is zero; whether all is finite, as of `kernels.pack_signs_and_zeros`."""
    bits, zeros, finite = kernels.pack_signs_and_zeros(flat)
    if zeros is not None:
        bits ^= zeros & ~coin()
    return bits, finite


def majority(votes: Sequence[Tensor], coin: Callable[[], Tensor]) -> Tensor:
    """Bitwise majority of packed bits; a tie takes the coin's bit. uint8 in, uint8 out.

    Counted without unpacking: adders of one bit work on all bits of a byte at once, one plane for each binary digit of the count.
    """
    planes: list[Tensor] = []
    for vote in votes:
        carry = vote
        for place, plane in enumerate(planes):
            planes[place], carry = plane ^ carry, plane & carry
        if (1 << len(planes)) <= len(votes):
            planes.append(carry)
    above, equal = torch.zeros_like(votes[0]), torch.full_like(votes[0], 255)
    half = len(votes) // 2
    for place in reversed(range(len(planes))):
        if half >> place & 1:
            equal = equal & planes[place]
        else:
            above = above | (equal & planes[place])
            equal = equal & ~planes[place]
    return above | (equal & coin()) if len(votes) % 2 == 0 else above


def _blocks(data: Tensor, length: int, count: int) -> list[Tensor]:
    """Blocks of one length; the last ones are filled up with zeros."""
    padded = data.new_zeros(length * count)
    padded[: data.numel()] = data
    return list(padded.view(count, length).unbind())


def _flagged(packed: Sequence[Tensor], count: int) -> list[int]:
    either = packed[0]
    for other in packed[1:]:
        either = either | other
    return kernels.indices(kernels.unpack_signs(either, low=0.0)[:count] > 0).tolist()
