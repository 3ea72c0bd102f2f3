"""Zen: balanced parallelism (Wang et al., OSDI 2025, section 3)."""

from __future__ import annotations

import torch

from . import wire
from .base import Dimensions, SparseScheme
from .exchange import Exchange
from .parameter_server import push
from .partition import Partition, RotatedPartition
from .rows import SparseRows, union


class Zen(SparseScheme):
    """Hash partition, push of indices and values, pull of a hash bitmap and values.

    Every server gets about the same number of units, however skewed the gradient is, both before and after the sum. The
    pull's indices are one bit per unit of the server's own part (algorithm 2), and its values go around a ring: all parts
    being equally long, every link carries every byte once and no link waits for another.
    """

    name = "zen"
    dimensions = Dimensions("point-to-point", "one-shot", "parallelism", "balanced")

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        partition = self._partition(gradient.rows, exchange)
        return _pull(push(gradient, partition, exchange), partition, exchange)

    def _partition(self, rows: int, exchange: Exchange) -> Partition:
        return RotatedPartition(rows, exchange.size)


def _pull(own: SparseRows, partition: Partition, exchange: Exchange) -> SparseRows:
    """First everybody's indices, which are short: where each unit lies in the result is known before its values come."""
    bare = wire.encode(SparseRows(own.rows, own.indices, own.values[:, :0]), ("bitmap", "coo"))
    positions = [
        wire.decode(message, partition.size(part), 0, own.values.dtype).indices
        for part, message in exchange.all_to_all([bare] * exchange.size)
    ]
    indices, places = union([partition.indices(part, each) for part, each in enumerate(positions)], partition.rows)
    values = torch.empty(len(indices), own.width, dtype=own.values.dtype, device=own.values.device)
    lengths = [len(each) * own.width * own.values.element_size() for each in positions]
    for part, data in exchange.all_gather(wire.as_bytes(own.values), lengths):
        values.index_copy_(0, places[part], wire.matrix(data, own.values.dtype, len(places[part]), own.width))
    return SparseRows(partition.rows, indices, values)
