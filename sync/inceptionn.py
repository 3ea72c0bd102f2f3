"""The exchange of INCEPTIONN (Li et al., MICRO 2018, section IV): a ring without aggregators, of which both legs carry truncated values."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from gemini_ft import truncation
from gemini_ft.validation import checked

from . import wire
from .base import Dimensions, Scheme, admit_dense
from .exchange import Exchange
from .rows import from_matrix


class InceptionnRing(Scheme):
    """A ring all-reduce in which every message is a gradient, or a sum of gradients, truncated as in `gemini_ft.truncation`.

    Each part of the gradient goes around once, and every rank adds its own values to what comes; then the sums go around. With n ranks a
    value is truncated n times on its way, so it is off by less than n 2^-bound beside the roundings of float32, in which values are
    added. Every rank has the same bits. Infinities and NaN travel as they are. A sparse gradient is made dense; float64 is rounded to
    float32 first. Nothing is kept of what is left out: for error feedback there is `gemini_ft.compression.cast`.

    Args:
        bound: b of the error bound 2^-b, from 1 to 14, in units of the gradients that are added up; the paper's are 6, 8 and 10.
    """

    name = "inceptionn-ring"
    dimensions = Dimensions("ring", "incremental", "parallelism", "balanced")
    whole = True

    @checked
    def __init__(self, bound: truncation.Bound = 10) -> None:
        self._bound = bound

    def _sum(self, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        matrix, exchange = admit_dense(tensor, group, self._describe(tensor))
        if exchange.size > 1:
            matrix = self._around(matrix.view(-1).float(), exchange).to(matrix.dtype).view(matrix.shape)
        return from_matrix(matrix, tensor)

    @property
    def _title(self) -> str:
        return f"{self.name} within 2^-{self._bound}"

    def _around(self, flat: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """The sum of the ranks' gradients, float32 (n,)."""
        size, rank = exchange.size, exchange.rank
        to, source = (rank + 1) % size, (rank - 1) % size
        length = -(-flat.numel() // size)
        parts = torch.cat([flat, flat.new_zeros(size * length - flat.numel())]).view(size, length)
        coming = torch.empty_like(parts[0])
        for step in range(size - 1):
            message = exchange.shift(self._encoded(parts[(rank - step) % size]), to, source)
            parts[(rank - step - 1) % size] += truncation.decode(wire.payload(message), coming, self._bound)
        message = self._encoded(parts[(rank + 1) % size])  # a sum, which this rank takes as all others will have it
        for step in range(size):
            truncation.decode(wire.payload(message), parts[(rank + 1 - step) % size], self._bound)
            if step < size - 1:
                message = exchange.shift(message, to, source)
        return parts.view(-1)[: flat.numel()]

    def _encoded(self, part: torch.Tensor) -> torch.Tensor:
        words = [each.view(torch.uint8) for each in truncation.encode(part, self._bound)]
        message = wire.new(sum(map(len, words)), part.device)
        torch.cat(words, out=wire.payload(message))
        return message
