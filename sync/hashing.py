"""Hash functions on the units of an index space, and ways to group units by part (Zen, section 3.1)."""

from __future__ import annotations

import torch

ROUNDS = 3  # k, hash functions of hierarchical hashing's level two; a fourth gains nothing (section 4.5)
_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # spreads seeds that are small numbers


def murmur(keys: torch.Tensor, seed: int) -> torch.Tensor:
    """MurmurHash3's 32-bit finalizer, which lets every bit of the key change every bit of the hash.

    Args:
        keys: int64, not negative, any shape.
        seed: another one gives another function.

    Returns:
        int64 in [0, 2**32), the same shape.
    """
    state = (keys ^ keys >> 32 ^ seed * _GOLDEN) & _WORD
    state = (state ^ state >> 16) * 0x85EBCA6B & _WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 & _WORD
    return state ^ state >> 16


def group_by_part(parts: torch.Tensor, count: int) -> tuple[torch.Tensor, list[int]]:
    """Histogram, scan, scatter: (order that groups equal parts and keeps theirs, size of each part).

    Args:
        parts: int64 [n], in [0, count).
    """
    keys = parts.to(torch.uint8) if count <= 256 else parts.to(torch.int32)  # one pass of a radix sort, not eight
    return torch.argsort(keys, stable=True), torch.bincount(parts, minlength=count).tolist()
