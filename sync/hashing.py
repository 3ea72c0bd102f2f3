"""Hash functions on the units of an index space, and ways to group units by part (Zen, section 3.1)."""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF


def murmur(keys: torch.Tensor, seed: int) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit) of each key as 4 bytes, or, of keys above 32 bits, as 8.

    Args:
        keys: int64, not negative, any shape.

    Returns:
        int64 in [0, 2**32), the same shape.
    """
    state = _mix_in(torch.full_like(keys, seed & _WORD), keys & _WORD)
    high = keys >> 32
    wide = high != 0
    state = torch.where(wide, _mix_in(state, high), state)
    return _finish(state ^ torch.where(wide, 8, 4))


def group_by_part(parts: torch.Tensor, count: int) -> tuple[torch.Tensor, list[int]]:
    """Histogram, scan, scatter: (order that groups equal parts and keeps theirs, size of each part).

    Args:
        parts: int64 [n], in [0, count).
    """
    keys = parts.to(torch.uint8) if count <= 256 else parts.to(torch.int32)  # one pass of a radix sort, not eight
    return torch.argsort(keys, stable=True), torch.bincount(parts, minlength=count).tolist()


def _rotate(words: torch.Tensor, bits: int) -> torch.Tensor:
    return (words << bits | words >> (32 - bits)) & _WORD


def _mix_in(state: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    words = _rotate(words * 0xCC9E2D51 & _WORD, 15) * 0x1B873593 & _WORD
    return (_rotate(state ^ words, 13) * 5 + 0xE6546B64) & _WORD


def _finish(state: torch.Tensor) -> torch.Tensor:
    state = (state ^ state >> 16) * 0x85EBCA6B & _WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 & _WORD
    return state ^ state >> 16
