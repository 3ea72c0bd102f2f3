"""The scheme that gathers the indices and values of all ranks, so that each rank sums for itself."""

from __future__ import annotations

from . import wire
from .base import Dimensions, SparseScheme
from .exchange import Exchange
from .rows import SparseRows, add_up


class AGsparse(SparseScheme):
    """Torch's own way with sparse gradients: simple, but its bytes grow with the number of ranks."""

    name = "agsparse"
    dimensions = Dimensions("ring", "one-shot", "centralization", None)

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        gathered = sorted(exchange.all_gather(wire.encode(gradient)), key=lambda each: each[0])
        return add_up([wire.decode_like(message, gradient) for _, message in gathered])
