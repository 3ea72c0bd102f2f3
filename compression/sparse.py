"""Sparsifiers: some elements travel as they are, with their indices; the others wait in the residual.

Payload of all but random-k: the values (float32), then their indices (int32) in the group's flat buffer. What several ranks send
for one element is added, rank by rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gemini_ft.accelerator import holds
from gemini_ft.validation import Seed, checked

from . import kernels
from .base import Bundle, Compressor, FlatLayout, Payload, Primitive, Summed, Turn, cut, divided, join
from .buffers import BUFFERS
from .kernels import SHARED, generator
from .options import Count, Magnitude, Ratio, Scaled

_FEW = 4096  # elements; below, looking for candidates first costs more than it saves
_LEAST = 2.0**-126  # the smallest normal float32: below, a processor that flushes subnormals to zero does not compare rightly
_HITS = 16  # of the sample are expected to be among the largest


class Scattered(Compressor):
    """Sends values of some elements; what several ranks send for one element is added, rank by rank."""

    @abstractmethod
    def entries(self, payload: Payload) -> tuple[Tensor, Tensor]:
        """The values in a payload, float32, and their indices in the group's flat buffer."""

    def decompress(self, payload: Payload) -> Bundle:
        return self._summed([payload])

    def aggregate(self, payloads: Sequence[Payload]) -> Bundle:
        return divided(self._summed(payloads), len(payloads))

    def _summed(self, payloads: Sequence[Payload]) -> Bundle:
        layout, data = payloads[0].layout, payloads[0].data
        total = BUFFERS.zeros(layout.total, device=data.device)
        for payload in payloads:
            values, indices = self.entries(payload)
            total.index_add_(0, indices, values)
        return Bundle(layout, total)


class Sparsifier(Scattered):
    """Sends the elements that `pick` picks."""

    primitive = Primitive.ALL_GATHER_V
    selected_bytes = 8

    @abstractmethod
    def pick(self, bundle: Bundle, turn: Turn) -> Tensor:
        """Picks the elements to send: indices in ``bundle.flat``, int32, each once. Elements that are not finite are always picked."""

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        indices = self.pick(bundle, turn)
        return Payload(layout=bundle.layout, data=join(bundle.flat.index_select(0, indices), indices))

    def residual(self, bundle: Bundle, payload: Payload) -> Tensor:
        return bundle.flat.index_fill_(0, entries(payload)[1].long(), 0)

    def entries(self, payload: Payload) -> tuple[Tensor, Tensor]:
        return entries(payload)


def entries(payload: Payload) -> tuple[Tensor, Tensor]:
    """The values, float32, and their indices, int32, in a sparsifier's payload."""
    count = payload.data.numel() // 8
    values, indices = cut(payload.data, (torch.float32, count), (torch.int32, count))
    return values, indices


def kept(size: int, ratio: float) -> int:
    """The number of elements that a ratio keeps of ``size``: at least one, where there is any."""
    return min(size, max(1, int(ratio * size)))


def largest(magnitudes: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest of a tensor, int64, in no order; NaN is the largest of all.

    Large tensors are not sorted: a sample tells a threshold that a little more than ``count`` pass, and only those are compared.
    """
    size = magnitudes.numel()
    if holds(magnitudes) or size <= _FEW or count * 4 > size:
        return magnitudes.topk(count, sorted=False).indices
    sample = magnitudes[:: max(1, count // _HITS)]
    expected = count / size * sample.numel()
    low = sample.topk(min(sample.numel(), int(1.1 * expected + 4 * expected**0.5) + 1), sorted=True).values[-1]
    candidates = kernels.not_below(magnitudes, float(low))
    if not count <= candidates.numel() <= size // 2:  # the sample misled, or most are equal
        return magnitudes.topk(count, sorted=False).indices
    return candidates[magnitudes.index_select(0, candidates).topk(count, sorted=False).indices]


def above(magnitudes: Tensor, threshold: float) -> Tensor:
    """The indices of magnitudes that are not below a threshold, int64; zeros are never among them, NaN always is."""
    return kernels.not_below(magnitudes, threshold) if threshold >= _LEAST else kernels.indices(magnitudes.ne(0))


def within(magnitudes: Tensor, found: Tensor, target: int, most: float = 2.0) -> Tensor:
    """``found``, if these are some indices and at most ``most`` times ``target``; else the indices of the ``target`` largest magnitudes.

    A threshold that is estimated may be above every element, as it is where all are alike: without this they would never be sent. It may
    also be that of so many that a ratio means nothing. Zeros are left out, so that only of a tensor of zeros nothing is sent.
    """
    if 0 < found.numel() <= most * target:
        return found
    if found.numel():
        return found[largest(magnitudes.index_select(0, found), target)]
    picked = largest(magnitudes, target)
    return picked[magnitudes.index_select(0, picked).ne(0)]


class WithRatio:
    """A method of which an option says what part of each tensor travels."""

    @property
    def ratio(self) -> float:
        """Part of each tensor that travels; see `gemini_ft.compression.base.Reducer.ratio`."""
        return self._ratio

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio={ratio}: must be above 0 and at most 1, for example 0.01 for one element of a hundred")
        self._ratio = ratio


class RatioSparsifier(WithRatio, Sparsifier):
    """Sends about ``ratio`` of each tensor, which `choose` chooses for itself."""

    def pick(self, bundle: Bundle, turn: Turn) -> Tensor:
        tensors = zip(bundle.layout.names, bundle.magnitudes(), bundle.layout.starts, strict=True)
        return torch.cat([self.choose(name, magnitudes, turn) + at for name, magnitudes, at in tensors]).int()

    @abstractmethod
    def choose(self, name: str, magnitudes: Tensor, turn: Turn) -> Tensor:
        """Chooses indices in one tensor, whose magnitudes (size,) it may overwrite; int64."""


class TopK(RatioSparsifier):
    """Sends the k = max(1, floor(ratio d)) largest magnitudes of each tensor. Stich et al., NeurIPS 2018."""

    primitive = Primitive.ALL_GATHER

    def __init__(self, ratio: Ratio = 0.01) -> None:
        self.ratio = ratio

    def choose(self, name: str, magnitudes: Tensor, turn: Turn) -> Tensor:
        return largest(magnitudes, kept(magnitudes.numel(), self.ratio))

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        return 8 * sum(kept(size, self.ratio) for size in layout.sizes)


class Threshold(Sparsifier):
    """Sends every element of at least ``value`` in magnitude: an absolute compressor. Sahu et al., NeurIPS 2021 (hard threshold).

    The paper's choice is one value for all layers and steps: ``Threshold.hard(k)`` for k elements per step of the whole model.
    """

    @checked
    def __init__(self, value: Magnitude = 0.01) -> None:
        self.value = value

    @classmethod
    def hard(cls, count: Count) -> Threshold:
        """The threshold lambda = 1 / (2 sqrt(k)), for k elements of the whole model per step."""
        if count < 1:
            raise ValueError(f"count={count}: give how many elements of the model may travel per step, at least 1")
        return cls(1 / (2 * count**0.5))

    def pick(self, bundle: Bundle, turn: Turn) -> Tensor:
        return kernels.select(bundle.flat, bundle.layout, bundle.flat.new_full((len(bundle.layout.names),), self.value))


class RandomK(WithRatio, Summed):
    """Sends k = max(1, floor(ratio d)) elements of each tensor, drawn alike on all ranks, so that indices do not travel.

    Args:
        seed: of the draws; must be equal on all ranks.
        scaled: multiply by d / k, which makes it unbiased. Not with error feedback: there the residual does that.
    """

    def __init__(self, ratio: Ratio = 0.01, seed: Seed = 0, scaled: Scaled = False) -> None:
        self.ratio, self.seed, self.scaled = ratio, seed, scaled
        self.unbiased = scaled

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        layout = bundle.layout
        indices = self._drawn(layout, turn).to(bundle.flat.device)
        values = bundle.flat.index_select(0, indices)
        counts = [kept(size, self.ratio) for size in layout.sizes]
        if not bool(torch.isfinite(bundle.flat.sum())):  # elements that were not drawn must be seen too
            for part, view in zip(values.split_with_sizes(counts), bundle.views, strict=True):
                part.add_(view.sub(view).sum())
        if self.scaled:
            for part, size, count in zip(values.split_with_sizes(counts), layout.sizes, counts, strict=True):
                part.mul_(size / max(1, count))
        return Payload(layout=layout, data=values, shared=indices)

    def _drawn(self, layout: FlatLayout, turn: Turn) -> Tensor:
        drawn = []
        for name, size, at in zip(layout.names, layout.sizes, layout.starts, strict=True):
            stream = generator(name, self.seed, turn, SHARED)
            drawn.append(stream.choice(size, kept(size, self.ratio), replace=False, shuffle=False) + at)
        return torch.from_numpy(np.concatenate(drawn))

    def decompress(self, payload: Payload) -> Bundle:
        assert payload.shared is not None
        flat = BUFFERS.zeros(payload.layout.total, device=payload.data.device)
        return Bundle(payload.layout, flat.index_copy_(0, payload.shared, payload.data))

    def residual(self, bundle: Bundle, payload: Payload) -> Tensor:
        assert payload.shared is not None
        return bundle.flat.index_fill_(0, payload.shared, 0) if not self.scaled else super().residual(bundle, payload)

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        return 4 * sum(kept(size, self.ratio) for size in layout.sizes)
