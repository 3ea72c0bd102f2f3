"""Zen: balanced parallelism (Wang et al., OSDI 2025, section 3)."""

from __future__ import annotations

import torch

from . import wire
from .base import Dimensions, SparseScheme
from .exchange import Exchange
from .parameter_server import push
from .partition import HashPartition, RotatedPartition
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
        partition = self._partition(gradient.rows, exchange.size)
        return _pull(push(gradient, partition, exchange), partition, exchange)

    def _partition(self, rows: int, servers: int) -> HashPartition:
        return RotatedPartition(rows, servers)


def _pull(own: SparseRows, partition: HashPartition, exchange: Exchange) -> SparseRows:
    """First everybody's indices, which are short: where each unit lies in the result is known before its values come."""
    width, dtype = own.width, own.values.dtype
    bitmaps = exchange.share(wire.encode(SparseRows(own.rows, own.indices, own.values[:, :0]), ("bitmap", "coo")))
    positions = [wire.decode(message, partition.size(part), 0, dtype).indices for part, message in enumerate(bitmaps)]
    counts = [len(each) for each in positions]
    gathered = exchange.all_gather(wire.as_bytes(own.values), [count * width * dtype.itemsize for count in counts])
    parts = torch.arange(len(counts), device=own.indices.device).repeat_interleave(torch.tensor(counts, device=own.indices.device))
    indices, (places,) = union([partition.indices(parts, torch.cat(positions))], partition.rows)
    values = torch.empty(len(indices), width, dtype=dtype, device=own.values.device)
    rows = places.split(counts)
    for part, data in gathered:
        values.index_copy_(0, rows[part], wire.matrix(data, dtype, counts[part], width))
    return SparseRows(partition.rows, indices, values)
