"""Parallel schemes: every rank is the server of one part. All begin with the same push."""

from __future__ import annotations

from . import wire
from .base import Dimensions, SparseScheme
from .exchange import Exchange
from .partition import EvenPartition, Partition
from .rows import SparseRows, add_up


def push(gradient: SparseRows, partition: Partition, exchange: Exchange) -> SparseRows:
    """Sends each part to its server; returns the sum of the own part, added in rank order."""
    messages = [wire.encode(part, partition.formats) for part in partition.split(gradient)]
    size, width, dtype = partition.size(exchange.rank), gradient.width, gradient.values.dtype
    return add_up([wire.decode(message, size, width, dtype) for _, message in exchange.all_to_all(messages)])


class SparsePS(SparseScheme):
    """A sparse parameter server, colocated: contiguous parts; each worker pushes to and pulls from every server.

    The holder of the part with most units sends and receives most of the bytes.
    """

    name = "sparse-ps"
    dimensions = Dimensions("point-to-point", "one-shot", "parallelism", "imbalanced")

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        partition = EvenPartition(gradient.rows, exchange.size)
        own = wire.encode(push(gradient, partition, exchange))
        return partition.join(
            [
                wire.decode(message, partition.size(part), gradient.width, gradient.values.dtype)
                for part, message in exchange.all_to_all([own] * exchange.size)
            ]
        )
