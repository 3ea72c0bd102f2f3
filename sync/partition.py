"""Decides which server sums which unit, by cutting an index space into as many parts as there are servers.

In its part a unit has a *position*, from 0; positions ascend with the indices. Units travel by position.

`hierarchical_hash` is Zen's way to group indices by server in parallel and without loss (OSDI 2025, algorithm 1). Level one, h0, has the
same seed everywhere and picks the server. Level two only finds an index a free slot in that server's memory: h1 to hk try k slots of a
*parallel* memory; what collides k times goes to the *serial* memory, slot by slot. It is the reference: `group_by_part` does the
same by counting, and is what `zen.Zen` uses by default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch

from gemini_ft.accelerator import holds

from . import wire
from .rows import SparseRows, union

ROUNDS = 3  # k, hash functions of hierarchical hashing's level two; a fourth gains nothing (section 4.5)
_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # spreads seeds that are small numbers
SERIAL = 10  # r1 / r2: the serial memory is a tenth of the parallel one


def murmur(keys: torch.Tensor, seed: int) -> torch.Tensor:
    """MurmurHash3's 32-bit finalizer, which lets every bit of the key change every bit of the hash.

    ``keys``: int64, not negative, any shape. ``seed``: another one gives another function. Returns int64 in [0, 2**32), the same shape.
    """
    state = (keys ^ keys >> 32 ^ seed * _GOLDEN) & _WORD
    state = (state ^ state >> 16) * 0x85EBCA6B & _WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 & _WORD
    return state ^ state >> 16


def group_by_part(parts: torch.Tensor, count: int) -> tuple[torch.Tensor, list[int]]:
    """Histogram, scan, scatter: (order that groups equal parts and keeps theirs, size of each part).

    ``parts``: int64 [n], in [0, count).
    """
    keys = parts.to(torch.uint8) if count <= 256 else parts.to(torch.int32)  # one pass of a radix sort, not eight
    return torch.argsort(keys, stable=True), torch.bincount(parts, minlength=count).tolist()


@dataclass(frozen=True, kw_only=True)
class PartitionedIndices:
    """Indices grouped by part."""

    order: torch.Tensor  # int64 [n], a permutation that puts those of part 0 first, then those of part 1, ...; within a part in no order
    counts: list[int]  # of each part
    serial: int  # indices that found no slot in the parallel memory
    slots: int  # of all memories together; 8 bytes each
    attempts: int = 1  # how often the memory was too small and everything was done again with twice as much


def hierarchical_hash(
    indices: torch.Tensor, parts: torch.Tensor, count: int, seed: int = 0, slots: int | None = None
) -> PartitionedIndices:
    """Groups ``indices`` by ``parts``.

    Args:
        indices: int64 [n], unique, not negative.
        parts: int64 [n] in [0, count): h0 of each index.
        seed: of h1 to hk. Need not be the same on all ranks: only h0 decides which rank sums an index.
        slots: of the parallel memory of one part (r1); by default twice as many in all parts together as there are indices.

    Returns:
        Every index exactly once, whatever collides. Should a serial memory overflow, all is done again with twice the memory.
    """
    fill: Callable[..., tuple[torch.Tensor, torch.Tensor]] = fill_table
    if holds(indices):
        from . import hashing_triton

        fill = partial(hashing_triton.fill, rounds=ROUNDS)
    slots, attempts = slots or max(SERIAL, -(-2 * len(indices) // count)), 1
    while True:
        memory, serial = fill(indices, parts, count, seed, slots, slots // SERIAL)
        if int(serial.max()) <= slots // SERIAL:
            used = memory != 0
            return PartitionedIndices(
                order=memory[used] - 1, counts=used.sum(1).tolist(), serial=int(serial.sum()), slots=memory.numel(), attempts=attempts
            )
        slots, attempts = 2 * slots, attempts + 1


def fill_table(
    indices: torch.Tensor, parts: torch.Tensor, count: int, seed: int, parallel: int, serial: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rounds as the kernel's, each for all indices at once: of those that want a slot, one gets it.

    Returns:
        int64 [count, parallel + serial]: 1 + place of an index in ``indices``, 0 where a slot is free; and, int64 [count], how many
        of each part the serial memory was asked to hold, which may be more than it can.
    """
    width = parallel + serial
    memory = torch.zeros(count * width, dtype=torch.int64)
    left = torch.arange(len(indices))
    for number in range(1, ROUNDS + 1):
        wanted = parts[left] * width + murmur(indices[left], seed + number) % parallel
        free = memory[wanted] == 0
        memory[wanted[free]] = left[free] + 1
        left = left[memory[wanted] != left + 1]
    asked = torch.bincount(parts[left], minlength=count)
    order = torch.argsort(parts[left], stable=True)
    left = left[order]
    cursor = torch.arange(len(left)) - (asked.cumsum(0) - asked)[parts[left]]
    fits = cursor < serial
    memory[(parts[left] * width + parallel + cursor)[fits]] = left[fits] + 1
    return memory.view(count, width), asked


class Partition(ABC):
    """``rows`` units in ``parts`` parts; part ``i`` has ``size(i)`` positions."""

    formats: ClassVar[tuple[wire.Format, ...]]
    """In which parts may travel to their servers: dense if all positions are units, as a bitmap if they ascend."""

    def __init__(self, rows: int, parts: int) -> None:
        self.rows, self.parts = rows, parts

    @abstractmethod
    def size(self, part: int) -> int: ...

    @abstractmethod
    def split(self, gradient: SparseRows) -> list[SparseRows]:
        """The units of ``gradient`` that belong to each part, by position, in any order."""


class HashPartition(Partition):
    """Balanced whatever units are present, as far as the hash is random."""

    @abstractmethod
    def indices(self, parts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The indices of the units at these positions of these parts, int64 [n]."""

    def gather(self, positions: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Indices of all parts' units, ascending, and where in them those at these positions of each part are."""
        counts = [len(each) for each in positions]
        parts = torch.arange(len(counts), device=positions[0].device).repeat_interleave(torch.tensor(counts, device=positions[0].device))
        indices, (places,) = union([self.indices(parts, torch.cat(list(positions)))], self.rows)
        return indices, list(torch.split(places, counts))

    def _pieces(self, positions: torch.Tensor, values: torch.Tensor, counts: list[int]) -> list[SparseRows]:
        pieces = zip(torch.split(positions, counts), torch.split(values, counts), strict=True)
        return [SparseRows(rows=self.size(part), indices=own, values=theirs) for part, (own, theirs) in enumerate(pieces)]


class EvenPartition(Partition):
    """Contiguous parts of (almost) the same size: balanced only if the units that are present are."""

    formats = ("coo", "dense")

    def size(self, part: int) -> int:
        return self._begin(part + 1) - self._begin(part)

    def split(self, gradient: SparseRows) -> list[SparseRows]:
        begins = [self._begin(part) for part in range(self.parts + 1)]
        cuts = torch.searchsorted(gradient.indices, torch.tensor(begins, device=gradient.indices.device)).tolist()
        return [
            SparseRows(rows=self.size(part), indices=gradient.indices[start:end] - begins[part], values=gradient.values[start:end])
            for part, (start, end) in enumerate(pairwise(cuts))
        ]

    def join(self, messages: Iterable[torch.Tensor], like: SparseRows) -> SparseRows:
        """The whole, of the encoded parts in order; its units are as those of ``like``."""
        parts = [wire.decode(message, self.size(part), like.width, like.values.dtype) for part, message in enumerate(messages)]
        indices = [each.indices + self._begin(part) for part, each in enumerate(parts)]
        return SparseRows(rows=self.rows, indices=torch.cat(indices), values=torch.cat([each.values for each in parts]))

    def _begin(self, part: int) -> int:
        return self.rows * part // self.parts


class RotatedPartition(HashPartition):
    """A hash that can be inverted without a table: of every ``parts`` consecutive units each part gets one.

    Group ``g`` holds the units from ``g * parts`` on. Its unit number ``j`` belongs to part ``(j + r(g)) mod parts``, where the
    rotation ``r`` is a hash. The position is the group's number. For any set of units a part's load is a sum of independent
    indicators, one per group, with the mean that Zen's h0 has (theorem 2) and no more variance: several units of a group are
    never in the same part. Zen's h0 needs a table of as many integers as there are units to invert it (algorithm 2).

    ``seed``: the same on all ranks.
    """

    formats = ("coo", "bitmap")

    def __init__(self, rows: int, parts: int, seed: int = 0) -> None:
        super().__init__(rows, parts)
        self._seed = seed

    def size(self, part: int) -> int:
        return -(-self.rows // self.parts)  # the last position may be unused

    def split(self, gradient: SparseRows) -> list[SparseRows]:
        positions = gradient.indices // self.parts
        order, counts = group_by_part((gradient.indices + self._rotation(positions)) % self.parts, self.parts)
        return self._pieces(positions[order], gradient.values.index_select(0, order), counts)

    def indices(self, parts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        first = positions * self.parts
        return first + (parts - first - self._rotation(positions)) % self.parts

    def _rotation(self, groups: torch.Tensor) -> torch.Tensor:
        return murmur(groups, self._seed) * self.parts >> 32


class HashedPartition(HashPartition):
    """The paper's: h0 is MurmurHash, inverted by a table (algorithm 2), and units are grouped by hierarchical hashing.

    The table and its inverse take 8 bytes per unit of the index space.

    ``seed``: the same on all ranks. ``device``: where the gradients are.
    """

    formats = ("coo",)

    def __init__(self, rows: int, parts: int, seed: int = 0, device: torch.device | None = None) -> None:
        super().__init__(rows, parts)
        if rows > 2**31:
            raise ValueError(f"{rows} units: the table holds 32-bit indices; a RotatedPartition needs no table")
        part = self._part(torch.arange(rows, device=device), seed)
        order, self._counts = group_by_part(part, parts)
        self._begins = torch.tensor([0, *self._counts], device=device).cumsum(0)
        self._units = order.to(torch.int32)  # of part 0 in ascending order, of part 1, ...
        self._positions = torch.empty(rows, dtype=torch.int32, device=device)
        self._positions[order] = (torch.arange(rows, device=device) - self._begins[part[order]]).to(torch.int32)
        self._seed = seed

    def size(self, part: int) -> int:
        return self._counts[part]

    def split(self, gradient: SparseRows) -> list[SparseRows]:
        grouping = hierarchical_hash(gradient.indices, self._part(gradient.indices, self._seed), self.parts)
        positions = self._positions[gradient.indices[grouping.order]].long()
        values = gradient.values.index_select(0, grouping.order)
        return self._pieces(positions, values, grouping.counts)

    def indices(self, parts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._units[self._begins[parts] + positions].long()

    def _part(self, indices: torch.Tensor, seed: int) -> torch.Tensor:
        return murmur(indices, seed) * self.parts >> 32
