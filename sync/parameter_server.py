"""Parameter servers: a single one; and the parallel schemes, in which every rank is the server of one part, and the same push begins."""

from __future__ import annotations

import torch

from . import wire
from .base import Dimensions, SparseScheme
from .exchange import Exchange
from .partition import EvenPartition, Partition
from .rows import SparseRows, add_up


def push(gradient: SparseRows, partition: Partition, exchange: Exchange) -> SparseRows:
    """Sends each part to its server; returns the sum of the own part, added in rank order."""
    messages = [wire.encode(part, partition.formats) for part in partition.split(gradient)]
    size, width, dtype = partition.size(exchange.rank), gradient.width, gradient.values.dtype
    return add_up([wire.decode(message, size, width, dtype) for message in exchange.all_to_all(messages)])


class SparsePS(SparseScheme):
    """A sparse parameter server, colocated: contiguous parts; each worker pushes to and pulls from every server.

    The holder of the part with most units sends and receives most of the bytes.
    """

    name = "sparse-ps"
    dimensions = Dimensions("point-to-point", "one-shot", "parallelism", "imbalanced")

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        partition = EvenPartition(gradient.rows, exchange.size)
        own = wire.encode(push(gradient, partition, exchange))
        return partition.join(exchange.all_to_all([own] * exchange.size), gradient)


class SinglePS(SparseScheme):
    """One parameter server, rank 0: it receives all ranks' gradients and sends the sum back to each of them.

    All bytes go through its link, so that time grows with the number of ranks: the pattern with which the others are compared.
    """

    name = "single-ps"
    dimensions = Dimensions("point-to-point", "one-shot", "centralization", None)

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        exchange.agree()
        if exchange.rank:
            exchange.send(wire.encode(gradient), 0)
            return wire.decode_like(exchange.receive(0), gradient)
        dtype = gradient.values.dtype
        total = add_up([gradient.of(torch.promote_types(dtype, torch.float32))])  # wide, so that 16-bit values are rounded once
        for worker in range(1, exchange.size):
            total = add_up([total, wire.decode_like(exchange.receive(worker), gradient)])
        message = wire.encode(total.of(dtype))
        for worker in range(1, exchange.size):
            exchange.send(message, worker)
        return wire.decode_like(message, gradient)  # as the others have it: where a message is dense, units whose sum is zero are present
