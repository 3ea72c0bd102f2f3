"""Zen's hierarchical hashing as a CUDA kernel in Triton.

The paper writes a slot and reads it back to see whether it kept it. That is not safe: another thread that saw the slot empty
may write after the read. Here a slot is taken by an atomic compare-and-swap, which gives it to exactly one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # indices per program


def fill(
    indices: torch.Tensor, parts: torch.Tensor, count: int, seed: int, parallel: int, serial: int, rounds: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does the work of `partition.fill_table` on the device of ``indices``. Which index gets a slot differs between calls."""
    width = parallel + serial
    memory = torch.zeros(count * width, dtype=torch.int64, device=indices.device)
    asked = torch.zeros(count, dtype=torch.int64, device=indices.device)
    if len(indices):
        grid = (triton.cdiv(len(indices), BLOCK),)
        _place[grid](indices, parts, memory, asked, len(indices), seed, parallel, width, ROUNDS=rounds, BLOCK=BLOCK)
    return memory.view(count, width), asked


@triton.jit
def _murmur(keys, seed):
    salt = (tl.zeros_like(keys) + seed) * 0x9E3779B9
    state = (keys ^ (keys >> 32) ^ salt).to(tl.uint32)
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return (state ^ (state >> 16)).to(tl.int64)


@triton.jit
def _place(indices, parts, memory, asked, length, seed, parallel, width, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    waiting = place < length
    key = tl.load(indices + place, mask=waiting, other=0)
    part = tl.load(parts + place, mask=waiting, other=0)
    for number in tl.static_range(1, ROUNDS + 1):
        slot = part * width + _murmur(key, seed + number) % parallel
        # An atomic has no mask here: an index that has its slot already expects a value that is never there.
        expected = tl.where(waiting, 0, -1).to(tl.int64)
        before = tl.atomic_cas(memory + slot, expected, place + 1)
        waiting = waiting & (before != 0)
    cursor = tl.atomic_add(asked + part, tl.where(waiting, 1, 0).to(tl.int64), mask=waiting)
    tl.store(memory + part * width + parallel + cursor, place + 1, mask=waiting & (cursor < width - parallel))
