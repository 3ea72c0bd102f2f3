"""Run with TRITON_INTERPRET=1: the kernel of hierarchical hashing on a CPU, beside the vectorised code."""

from __future__ import annotations

import sys

import torch

from gemini_ft.sync import hashing_triton, partition
from gemini_ft.sync.partition import ROUNDS, murmur

PARALLEL, SERIAL, PARTS, SEED = 300, 60, 4, 5


def check(device: str, count: int) -> None:
    indices = torch.randperm(2**34 // 1000, generator=torch.Generator().manual_seed(count))[:count] * 1000  # above 32 bits too
    parts = murmur(indices, 0) * PARTS >> 32
    filled = hashing_triton.fill(indices.to(device), parts.to(device), PARTS, SEED, PARALLEL, SERIAL, ROUNDS)
    memory, asked = (each.cpu() for each in filled)
    reference, expected = partition.fill_table(indices, parts, PARTS, SEED, PARALLEL, SERIAL)
    assert (asked - expected).abs().max() <= 15, (asked, expected)  # who collides depends on who comes first
    lost = (asked - SERIAL).clamp(min=0).sum()
    held = memory[memory != 0] - 1
    assert len(held) == count - lost
    assert len(set(held.tolist())) == len(held)
    part, slot = memory.nonzero(as_tuple=True)
    assert torch.equal(parts[held], part)
    found = indices[held]
    tried = torch.stack([murmur(found, SEED + number) % PARALLEL for number in range(1, ROUNDS + 1)])
    assert ((tried == slot).any(0) | (slot >= PARALLEL)).all()
    assert torch.equal(memory[:, :PARALLEL] != 0, reference[:, :PARALLEL] != 0) or count > 100


if __name__ == "__main__":
    for number in (0, 1, 40, 600, 1300, 2000):
        check(sys.argv[1], number)
    print("as it should be")
