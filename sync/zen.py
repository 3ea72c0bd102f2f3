"""Zen: balanced parallelism (Wang et al., OSDI 2025, section 3)."""

from __future__ import annotations

import torch

from gemini_ft.validation import Seed, checked

from . import wire
from .base import SparseScheme
from .builtin import push
from .exchange import Exchange
from .options import Hashing
from .partition import HashedPartition, HashPartition, RotatedPartition
from .rows import SparseRows


class Zen(SparseScheme):
    """Hash partition, push of indices and values, pull of a hash bitmap and values.

    Every server gets about the same number of units, however skewed the gradient is, both before and after the sum. The
    pull's indices are one bit per unit of the server's own part (algorithm 2), and it goes around a ring: all parts being
    equally long, every link carries every byte once and no link waits for another.

    Args:
        hashing: "rotation" groups by counting, needs no memory and is the faster one, on CPUs and on devices; "hierarchical" is the
            paper's, with its tables and its kernel, for at most 2**31 units, and stays for comparison. The same sum.
        seed: of the hash that picks servers; the same on all ranks.
    """

    name = "zen"

    @checked
    def __init__(self, hashing: Hashing = "rotation", seed: Seed = 0) -> None:
        self._hashing, self._seed = hashing, seed
        self._tables: dict[tuple[int, int, torch.device], HashedPartition] = {}

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        partition = self._partition(gradient.rows, exchange.size, exchange.device)
        return _pull(push(gradient, partition, exchange), partition, exchange)

    @property
    def _title(self) -> str:
        return f"{self.name} by {self._hashing}, seed {self._seed},"

    def _partition(self, rows: int, servers: int, device: torch.device) -> HashPartition:
        if self._hashing == "rotation":
            return RotatedPartition(rows, servers, self._seed)
        key = (rows, servers, device)
        if key not in self._tables:
            self._tables[key] = HashedPartition(rows, servers, self._seed, device)
        return self._tables[key]


def _pull(own: SparseRows, partition: HashPartition, exchange: Exchange) -> SparseRows:
    """Bitmaps go ahead of the values: where each unit lies in the result is known before the last values come."""
    width, dtype = own.width, own.values.dtype
    sizes = [partition.size(part) for part in range(partition.parts)]
    head = wire.encode(SparseRows(rows=own.rows, indices=own.indices, values=own.values[:, :0]), ("bitmap", "coo"))
    positions: dict[int, torch.Tensor] = {}
    waiting: dict[int, torch.Tensor] = {}
    unit = width * dtype.itemsize
    passed = exchange.relay(head, wire.as_bytes(own.values), wire.bitmap_limit(max(sizes)), lambda each: wire.count(each) * unit)
    for part, message, data in passed:
        if data is None:
            positions[part] = wire.decode(message, sizes[part], 0, dtype).indices
        else:
            waiting[part] = wire.matrix(data, dtype, len(positions[part]), width)
        if len(positions) < partition.parts:
            continue
        if data is None:
            indices, places = partition.gather([positions[part] for part in range(partition.parts)])
            values = torch.empty(len(indices), width, dtype=dtype, device=own.values.device)
        for arrived in list(waiting):
            values.index_copy_(0, places[arrived], waiting.pop(arrived))
    return SparseRows(rows=partition.rows, indices=indices, values=values)
