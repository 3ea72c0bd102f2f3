"""SparCML's three algorithms (Renggli et al., SC 2019, section 5.3).

SSAR keeps the sum sparse, DSAR makes it dense. A message turns dense by itself where that is smaller.
"""

from __future__ import annotations

import torch

from . import wire
from .base import Dimensions, SparseScheme
from .exchange import Exchange
from .parameter_server import push
from .partition import EvenPartition
from .rows import SparseRows, add_up, from_dense


class SSARRecursiveDoubling(SparseScheme):
    """log2(n) rounds: in round i, partners at distance 2**i swap and add their units. Zen's hierarchical centralization.

    Of a world that is no power of two, the ranks beyond the largest one hand their gradient to a partner and get the sum back.
    16-bit values are rounded after each round.
    """

    name = "ssar-recursive-doubling"
    dimensions = Dimensions("hierarchy", "incremental", "centralization", None)

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        def read(message: torch.Tensor) -> SparseRows:
            return wire.decode(message, gradient.rows, gradient.width, gradient.values.dtype)

        exchange.agree()
        core = 1 << (exchange.size.bit_length() - 1)
        if exchange.rank >= core:
            exchange.send(wire.encode(gradient), exchange.rank - core)
            return read(exchange.receive(exchange.rank - core))
        helped = exchange.rank + core < exchange.size
        total = add_up([gradient, read(exchange.receive(exchange.rank + core))] if helped else [gradient])
        distance = 1
        while distance < core:
            peer = exchange.rank ^ distance
            theirs = read(exchange.swap(wire.encode(total), peer))
            total = add_up([total, theirs] if exchange.rank < peer else [theirs, total])
            distance *= 2
        if helped:
            exchange.send(wire.encode(total), exchange.rank + core)
        return total


class SSARSplitAllgather(SparseScheme):
    """Contiguous parts to their owners, then an all-gather of the sums, indices and values."""

    name = "ssar-split-allgather"
    dimensions = Dimensions("ring", "one-shot", "parallelism", "imbalanced")

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        partition = EvenPartition(gradient.rows, exchange.size)
        gathered = dict(exchange.all_gather(wire.encode(push(gradient, partition, exchange))))
        dtype = gradient.values.dtype
        return partition.join([wire.decode(gathered[part], partition.size(part), gradient.width, dtype) for part in range(partition.parts)])


class DSARSplitAllgather(SparseScheme):
    """The same push, then an all-gather of the sums as dense parts. Units whose sum is zero are left out of the result."""

    name = "dsar-split-allgather"
    dimensions = Dimensions("ring", "one-shot", "parallelism", "imbalanced")

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        partition = EvenPartition(gradient.rows, exchange.size)
        own = push(gradient, partition, exchange)
        gathered = dict(exchange.all_gather(wire.encode(own, ("dense",))))
        parts = [wire.decode(gathered[part], partition.size(part), own.width, own.values.dtype) for part in range(partition.parts)]
        return from_dense(torch.cat([part.values for part in parts]))
