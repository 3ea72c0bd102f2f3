"""Random numbers that depend on a tensor's name, the step and the rank, and on nothing else: not on what it is grouped with.

On CPUs they come from SFC64, three times as fast as torch's generator; on other devices from torch's generator there.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .base import FlatLayout, Turn
from .buffers import BUFFERS

SHARED = -1  # in place of a rank: the same numbers on all ranks


@lru_cache(maxsize=65536)
def _hashed(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest(), "little")


def stream_seed(name: str, seed: int, turn: Turn, rank: int) -> int:
    """64 bits that begin the stream of a tensor at one step; ``rank`` may be `SHARED`."""
    mixed = _hashed(name, seed) ^ ((turn.step + 1) * 0x9E3779B97F4A7C15 + (rank + 2) * 0xC2B2AE3D27D4EB4F)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 27)) & 0x7FFFFFFFFFFFFFFF


def generator(name: str, seed: int, turn: Turn, rank: int) -> np.random.Generator:
    """The random generator of one tensor, step and rank."""
    bits = np.random.SFC64(0)
    begin = stream_seed(name, seed, turn, rank)
    bits.state = {
        "bit_generator": "SFC64",
        "state": {"state": np.array([begin, turn.step & 0xFFFFFFFF, rank + 2, 1], dtype=np.uint64)},
        "has_uint32": 0,
        "uinteger": 0,
    }
    bits.random_raw(12, output=False)  # until the words are mixed
    return np.random.Generator(bits)


def uniform(layout: FlatLayout, device: torch.device, seed: int, turn: Turn) -> Tensor:
    """Numbers in [0, 1) for each element of a layout, float32 (layout.total,)."""
    flat = BUFFERS.empty(layout.total, device=device)
    layout.clear_padding(flat)
    for name, view in zip(layout.names, layout.views(flat), strict=True):
        if device.type == "cpu":
            generator(name, seed, turn, turn.rank).random(dtype=np.float32, out=view.numpy())
        else:
            view.uniform_(generator=torch.Generator(device).manual_seed(stream_seed(name, seed, turn, turn.rank)))
    return flat


def random_words(layout: FlatLayout, seed: int, turn: Turn) -> npt.NDArray[np.uint32]:
    """32 random bits for each element of a layout, on the CPU, uint32 (layout.total,)."""
    words = BUFFERS.empty(layout.total, torch.int32).numpy().view(np.uint32)
    for name, at, span in zip(layout.names, layout.starts, layout.spans, strict=True):
        raw: npt.NDArray[np.uint64] = generator(name, seed, turn, turn.rank).bit_generator.random_raw(-(-span // 2))
        words[at : at + span] = raw.view(np.uint32)[:span]
    return words


def random_bytes(layout: FlatLayout, device: torch.device, seed: int, turn: Turn) -> Tensor:
    """Bytes for each eight elements of a layout, the same on all ranks, uint8 (layout.total / 8,)."""
    data = np.empty(layout.total // 8, dtype=np.uint8)
    for name, at, span in zip(layout.names, layout.starts, layout.spans, strict=True):
        raw: npt.NDArray[np.uint64] = generator(name, seed, turn, SHARED).bit_generator.random_raw(-(-span // 64))
        data[at // 8 : (at + span) // 8] = raw.view(np.uint8)[: span // 8]
    return torch.from_numpy(data).to(device)
