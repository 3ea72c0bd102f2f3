"""Zen's hierarchical hashing (OSDI 2025, algorithm 1): group indices by server in parallel, without loss.

Level one, h0, has the same seed everywhere and picks the server. Level two only finds an index a free slot in that server's
memory: h1 to hk try k slots of a *parallel* memory; what collides k times goes to the *serial* memory, slot by slot.
This is the reference; `hashing.group_by_part` does the same by counting, and is what `zen.Zen` uses by default.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemini_ft.accelerator import holds

from .hashing import ROUNDS, murmur

SERIAL = 10  # r1 / r2: the serial memory is a tenth of the parallel one


@dataclass(frozen=True)
class PartitionedIndices:
    """Indices grouped by part.

    Attributes:
        order: int64 [n], a permutation that puts those of part 0 first, then those of part 1, ...; within a part in no order.
        counts: of each part.
        serial: indices that found no slot in the parallel memory.
        slots: of all memories together; 8 bytes each.
        attempts: how often the memory was too small and everything was done again with twice as much.
    """

    order: torch.Tensor
    counts: list[int]
    serial: int
    slots: int
    attempts: int = 1


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
    slots = slots or max(SERIAL, -(-2 * len(indices) // count))
    attempts = 1
    while (grouping := _attempt(indices, parts, count, seed, slots, attempts)) is None:
        slots, attempts = 2 * slots, attempts + 1
    return grouping


def _attempt(indices: torch.Tensor, parts: torch.Tensor, count: int, seed: int, slots: int, attempts: int) -> PartitionedIndices | None:
    if holds(indices):
        from .hashing_triton import fill

        memory, serial = fill(indices, parts, count, seed, slots, slots // SERIAL)
    else:
        memory, serial = fill_table(indices, parts, count, seed, slots, slots // SERIAL)
    if int(serial.max()) > slots // SERIAL:
        return None
    used = memory != 0
    return PartitionedIndices(memory[used] - 1, used.sum(1).tolist(), int(serial.sum()), memory.numel(), attempts)


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
