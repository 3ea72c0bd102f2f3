"""Which server sums which unit: ways to cut an index space into as many parts as there are servers.

In its part a unit has a *position*, from 0; positions ascend with the indices. Units travel by position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from .hashing import group_by_part, murmur
from .rows import SparseRows


class Partition(ABC):
    """``rows`` units in ``parts`` parts; part ``i`` has ``size(i)`` positions."""

    def __init__(self, rows: int, parts: int) -> None:
        self.rows, self.parts = rows, parts

    @abstractmethod
    def size(self, part: int) -> int: ...

    @abstractmethod
    def split(self, gradient: SparseRows) -> list[SparseRows]:
        """What of ``gradient`` belongs to each part, by position; ascending if the gradient's indices are."""


class HashPartition(Partition):
    """Balanced whatever units are present, as far as the hash is random."""

    @abstractmethod
    def indices(self, parts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Of the units at these positions of these parts, int64 [n]: the inverse of `split`."""


class EvenPartition(Partition):
    """Contiguous parts of (almost) the same size: balanced only if the units that are present are."""

    def size(self, part: int) -> int:
        return self._begin(part + 1) - self._begin(part)

    def split(self, gradient: SparseRows) -> list[SparseRows]:
        begins = [self._begin(part) for part in range(self.parts + 1)]
        cuts = torch.searchsorted(gradient.indices, torch.tensor(begins, device=gradient.indices.device)).tolist()
        return [
            SparseRows(self.size(part), gradient.indices[start:end] - begins[part], gradient.values[start:end])
            for part, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False))
        ]

    def join(self, parts: Sequence[SparseRows]) -> SparseRows:
        """The whole, of all parts in order."""
        indices = [each.indices + self._begin(part) for part, each in enumerate(parts)]
        return SparseRows(self.rows, torch.cat(indices), torch.cat([each.values for each in parts]))

    def _begin(self, part: int) -> int:
        return self.rows * part // self.parts


class RotatedPartition(HashPartition):
    """A hash that can be inverted without a table: of every ``parts`` consecutive units each part gets one.

    Group ``g`` holds the units from ``g * parts`` on. Its unit number ``j`` belongs to part ``(j + r(g)) mod parts``, where the
    rotation ``r`` is a hash. The position is the group's number. For any set of units a part's load is a sum of independent
    indicators, one per group, with the mean that Zen's h0 has (theorem 2) and no more variance: several units of a group are
    never in the same part. Zen's h0 needs a table of as many integers as there are units to invert it (algorithm 2).

    Args:
        seed: the same on all ranks.
    """

    def __init__(self, rows: int, parts: int, seed: int = 0) -> None:
        super().__init__(rows, parts)
        self._seed = seed

    def size(self, part: int) -> int:
        return -(-self.rows // self.parts)  # the last position may be nobody's

    def split(self, gradient: SparseRows) -> list[SparseRows]:
        positions = gradient.indices // self.parts
        order, counts = group_by_part((gradient.indices + self._rotation(positions)) % self.parts, self.parts)
        pieces = zip(positions[order].split(counts), gradient.values.index_select(0, order).split(counts), strict=True)
        return [SparseRows(self.size(part), *piece) for part, piece in enumerate(pieces)]

    def indices(self, parts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        first = positions * self.parts
        return first + (parts - first - self._rotation(positions)) % self.parts

    def _rotation(self, groups: torch.Tensor) -> torch.Tensor:
        return murmur(groups, self._seed) * self.parts >> 32
